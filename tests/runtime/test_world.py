"""How processes meet and part, without other processes. With them: tests/multiprocess."""

from __future__ import annotations

import json
import os
import warnings

import pytest

from jcoll.runtime import world


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has met nobody, and will register nothing."""
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "_failure", "")
    monkeypatch.setattr(world.atexit, "register", lambda *_: None)
    return monkeypatch


def test_meeting_that_fails_is_not_tried_again(alone: pytest.MonkeyPatch) -> None:
    """Whatever failed: the others would not come a second time."""
    tries = []

    def fail() -> world.World:
        tries.append(1)
        raise TypeError("incompatible arguments")

    alone.setattr(world, "_join", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="incompatible arguments"):
            world.join()
    assert len(tries) == 1


def test_memory_that_cannot_be_made_is_everybodys_error(alone: pytest.MonkeyPatch) -> None:
    store: dict[str, str] = {}

    class Client:
        def key_value_set(self, key: str, value: str) -> None:
            store[key] = value

        def blocking_key_value_get(self, key: str, _: int) -> str:
            return store[key]

    def fail(*_: int) -> None:
        raise RuntimeError("no shared memory")

    alone.setattr(world._compat, "distributed_client", Client)
    alone.setattr(world._native, "prepare_world", fail)
    with pytest.raises(RuntimeError, match="no shared memory"):
        world.join()
    assert json.loads(store[f"{world.KEY}/0"])["problem"] == "no shared memory"


def test_a_warning_that_is_an_error_does_not_undo_the_meeting(alone: pytest.MonkeyPatch) -> None:
    met = world.World(("a", "a"), (0, 1), same_tuning=False)
    worlds = iter([met])
    alone.setattr(world, "_join", lambda: next(worlds))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="different tuning files"):
            world.join()
    assert world.join() is met


def test_a_forked_child_does_not_leave_for_its_parent(alone: pytest.MonkeyPatch) -> None:
    left = []
    alone.setattr(world._native, "leave_world", left.append)
    alone.setattr(world._compat, "distributed_process", lambda: left.append("early"))
    world._leave(os.getppid())
    world._leave_early(0, os.getppid())
    assert not left
    alone.setattr(world, "_own_error", lambda: None)
    world._leave(os.getpid())
    assert left == ["its program has ended"]


def test_containers_of_one_machine_are_hosts_apart(alone: pytest.MonkeyPatch) -> None:
    here = world.host_id()
    alone.setattr(world, "_pid_space", lambda: "pid:[1]")
    assert world.host_id() != here
