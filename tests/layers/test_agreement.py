"""Steps that processes take together: threads here, with a store and barriers of their own."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jcoll import _compat
from jcoll.layers import _agreement
from jcoll.layers._agreement import Agreement

COUNT = 3


class Service:
    """What is used of the client of jax.distributed."""

    def __init__(self):
        self.store, self.barriers, self.lock = {}, {}, threading.Lock()

    def key_value_set(self, key, value):
        self.store[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.store.items() if key.startswith(prefix + "/")]

    def wait_at_barrier(self, name, timeout_ms):
        with self.lock:
            barrier = self.barriers.setdefault(name, threading.Barrier(COUNT))
        try:
            barrier.wait(timeout_ms / 1000)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"DEADLINE_EXCEEDED: {name}\nmore") from None


@pytest.fixture
def processes(monkeypatch):
    """processes(f): what f(process) returned, or raised, in each process of a job."""
    here, service = threading.local(), Service()
    monkeypatch.setattr(_agreement, "_attempts", Counter())
    monkeypatch.setattr(_compat, "distributed_client", lambda: service)
    monkeypatch.setattr(jax, "process_count", lambda: COUNT)
    monkeypatch.setattr(jax, "process_index", lambda: here.process)

    def run(f):
        def one(process):
            here.process = process
            try:
                return f(process)
            except Exception as error:
                return error

        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(one, range(COUNT)))

    return run


def attempt(number, works, timeout_s=10.0):
    """Two steps in attempt `number` of each process; the first is works[process]()."""

    def one(process):
        with LOCK:
            _agreement._attempts["w"] = number  # Threads share what processes do not.
            together = Agreement("layers.here", "w", timeout_s)
        first = together.step("one", works[process])
        together.step("two", lambda: None)
        return first

    return one


LOCK = threading.Lock()


def fails():
    raise OSError("no space left")


def test_all_go_on_together(processes):
    works = [lambda p=p: p for p in range(COUNT)]
    assert processes(attempt(0, works)) == [0, 1, 2]


def test_one_fails_and_all_stop_and_try_again(processes):
    """At once, not after a timeout; and the next attempt of all succeeds."""
    works = [lambda: 0, fails, lambda: 2]
    first, second, third = processes(attempt(0, works))
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("jcoll.layers.here: process 1 failed (OSError: no space left)")
    assert processes(attempt(1, [lambda: 7] * COUNT)) == [7] * COUNT


def test_one_does_not_come(processes):
    here = attempt(0, [lambda: 0] * COUNT, timeout_s=0.2)
    _, *late = processes(lambda process: here(process) if process else None)
    for error in late:
        assert isinstance(error, TimeoutError)
        assert "not all 3 processes have come to the end of step 'one' within 0.2 s" in str(error)
        assert "more" not in str(error)
