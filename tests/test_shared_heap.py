"""XLA's buffers in memory that peers map: what is preloaded where, and what it does to a program.

What collectives make of it is in tests/multiprocess and tests/native.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jcoll import shared_heap
from jcoll.cli import main

LIBRARY = str(shared_heap.library())

IN_HEAP = """
import jax, numpy as np
import jax.numpy as jnp

def in_heap(x):
    address = x.unsafe_buffer_pointer()
    for line in open("/proc/self/maps"):
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "jcoll-heap" in line
"""


def output_of(program: str, env: dict[str, str], *prefix: str) -> str:
    done = subprocess.run(
        [*(prefix or (sys.executable,)), "-c", program],
        env={name: value for name, value in os.environ.items() if name != shared_heap.VARIABLE}
        | {"JAX_PLATFORMS": "cpu"}
        | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, LIBRARY),
        ({"LD_PRELOAD": "other.so"}, f"{LIBRARY}:other.so"),
        ({"LD_PRELOAD": f"other.so:{LIBRARY}"}, f"other.so:{LIBRARY}"),
        ({"JCOLL_SHARED_HEAP": "1"}, LIBRARY),
        ({"JCOLL_SHARED_HEAP": "0"}, None),
        ({"JCOLL_SHARED_HEAP": "0", "LD_PRELOAD": "other.so"}, "other.so"),
    ],
)
def test_preloaded(env, expected):
    found = shared_heap.preloaded(env)
    assert found.pop("LD_PRELOAD", None) == expected
    assert found == {name: value for name, value in env.items() if name != "LD_PRELOAD"}


@pytest.mark.parametrize(
    ("path", "why"), [(None, "not been built"), (Path("/a b/lib.so"), "a space or a colon")]
)
def test_obstacles(monkeypatch, path, why):
    monkeypatch.setattr(shared_heap, "library", lambda: path)
    assert why in shared_heap.obstacle({})
    assert shared_heap.preloaded({"A": "1"}) == {"A": "1"}


def test_command_prints_the_path(capsys, monkeypatch):
    assert main(["shared-heap"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    monkeypatch.setattr(shared_heap, "library", lambda: None)
    assert main(["shared-heap"]) == 1
    assert "has not been built" in capsys.readouterr().err


@pytest.mark.parametrize(("switch", "expected"), [(None, "True False"), ("0", "False False")])
def test_large_buffers_are_in_it(switch, expected):
    program = f"{IN_HEAP}\nprint(in_heap(jnp.ones(1 << 18) + 1), in_heap(jnp.ones(8) + 1))"
    env = {"LD_PRELOAD": LIBRARY} | ({shared_heap.VARIABLE: switch} if switch else {})
    assert output_of(program, env) == expected


def test_ranks_of_launch_have_it():
    program = f"{IN_HEAP}\nprint(in_heap(jnp.ones(1 << 18) + 1))"
    launch = (sys.executable, "-m", "jcoll", "launch", "-n", "2", "-m", "timeit", "-n1", "-r1")
    done = subprocess.run(
        [*launch, program],
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("True") == 2, done.stdout + done.stderr


def test_programs_go_on_as_before():
    """Of any kind: arrays come and go, children of forks do without, others are left alone."""
    program = f"""{IN_HEAP}
import os
step = jax.jit(lambda x: jnp.sort(x * 3 % 1009) + 1)
x = y = jnp.arange(300_000.0)
for _ in range(20):
    x = step(x)
jax.block_until_ready((x, y))
if (child := os.fork()) == 0:
    z = np.arange(300_000.0) + 1
    del x, y
    os._exit(0 if z[-1] == 300_000 else 1)
assert os.waitpid(child, 0)[1] == 0
assert in_heap(x) and np.asarray(x)[-1] == 1009 and y[-1] == 299_999
print("right")
"""
    assert output_of(program, {"LD_PRELOAD": LIBRARY}) == "right"
    assert output_of("echo $((6 * 7)) | cat", {"LD_PRELOAD": LIBRARY}, "sh") == "42"


def test_a_forked_child_cannot_look_into_it():
    """Better than what it would see: what its parent makes of the memory later."""
    program = f"""{IN_HEAP}
import os, signal
view = np.asarray((jnp.ones(1 << 18) + 1).block_until_ready())
if (child := os.fork()) == 0:
    os._exit(int(view[0]))
print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV)
"""
    assert output_of(program, {"LD_PRELOAD": LIBRARY}) == "True"


def test_memory_goes_back():
    """What programs have not used for seconds, but for what is kept for the next."""
    program = f"""{IN_HEAP}
import time
def mib():
    return next(int(r.split()[1]) >> 10 for r in open("/proc/self/status") if "RssShmem" in r)
arrays = [jnp.full(16 << 20, float(i)).block_until_ready() for i in range(8)]
before = mib()
del arrays
time.sleep(4.5)
for _ in range(10):  # XLA may give the last one back a little later.
    (jnp.ones(1 << 18) + 1).block_until_ready()
    time.sleep(0.1)
print(before >= 512, mib() <= 256)
"""
    assert output_of(program, {"LD_PRELOAD": LIBRARY}) == "True True"
