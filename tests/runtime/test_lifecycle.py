"""The end of a process, forks, and memory: in processes of their own."""

import textwrap

import pytest
from runtime_programs import run_ok, run_script

# Leaves two programs in flight: jcoll alone, and mixed with lax.
IN_FLIGHT = """
mesh = mesh_of(N)
def long(body):
    loop = lambda x, n: jax.lax.fori_loop(0, n, lambda i, y: body(y) * 0.125, x)
    return program(loop, mesh, num_replicated=1)
alone = long(lambda y: jcoll.all_reduce(y, "x"))
mixed = long(lambda y: jcoll.all_reduce(jax.lax.psum(y, "x"), "x") * 0.125)
x = place(np.ones((N, 4), np.float32), mesh)
jax.block_until_ready((alone(x, 1), mixed(x, 1)))
results = alone(x, 20000), mixed(x, 500)
"""
ENDINGS = {
    "end of the script": ("", 0),
    "results dropped": ("del results", 0),
    "exception": ("raise ValueError('boom')", 1),
    "sys.exit": ("sys.exit(5)", 5),
    "sys.exit in a thread": (
        "import threading; t = threading.Thread(target=sys.exit); t.start(); t.join()",
        0,
    ),
    "os._exit": ("os._exit(7)", 7),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_with_collectives_in_flight(ending):
    line, returncode = ENDINGS[ending]
    done = run_script(textwrap.dedent(IN_FLIGHT) + line)
    assert done.returncode == returncode, done.stderr
    assert ("ValueError: boom" in done.stderr) == (ending == "exception")


def test_exit_with_a_rank_missing():
    """Nobody waits for the result: the program ends when the deadline has passed."""
    run_ok(
        """
        mesh = mesh_of(N)
        def body(x):
            skip = jax.lax.axis_index("x") == 3
            return jax.lax.cond(
                skip, lambda y: y, lambda y: jcoll.all_reduce(y, "x", timeout_s=1), x
            )
        y = program(body, mesh)(place(integers(N, 2), mesh))
        """
    )


ALL_REDUCE = """
def check():
    mesh = mesh_of(N)
    fn = program(lambda x: jcoll.all_reduce(x, "x"), mesh)
    x = integers(N, 3)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(fn(place(x, mesh)))[2], x.sum(0))
def wait_for(pid):
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
import warnings
warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
"""


def test_fork_before_first_use():
    run_ok(
        ALL_REDUCE
        + """
pid = os.fork()
check()  # In both, each with its own backend.
if pid:
    wait_for(pid)
"""
    )


def test_fork_after_use():
    """The child has no backend to speak of, but it can exit, and start other programs."""
    run_ok(
        ALL_REDUCE
        + """
import subprocess
check()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    wait_for(pid)
    subprocess.run([sys.executable, "-c", ""], check=True)
    check()
"""
    )


def test_multiprocessing_spawn(tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import numpy as np
            import jcoll
            from runtime_programs import N, integers, mesh_of, place, program

            def total(seed):
                mesh = mesh_of(N)
                fn = program(lambda x: jcoll.all_reduce(x, "x"), mesh)
                return np.asarray(fn(place(integers(N, 3, seed=seed), mesh)))[1]

            if __name__ == "__main__":
                here = total(1)
                with multiprocessing.get_context("spawn").Pool(2) as pool:
                    there = pool.map(total, [1, 2])
                np.testing.assert_array_equal(there[0], here)
                np.testing.assert_array_equal(there[1], integers(N, 3, seed=2).sum(0))
                print("done")
            """
        )
    )
    assert run_ok(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')") == "done\n"


MEMORY = """
import gc
from jcoll.runtime.native import _native
mesh = mesh_of(N)
def rss_kb():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
def loop(x, n):
    return jax.lax.fori_loop(0, n, lambda i, y: jcoll.all_reduce(y, "x") * 0.125, x)
x = place(np.ones((N, 8), np.float32), mesh)
"""


def test_memory_of_a_long_loop():
    out = run_ok(
        MEMORY
        + """
fn = program(loop, mesh, num_replicated=1)
jax.block_until_ready(fn(x, 10000))
before = rss_kb()
jax.block_until_ready(fn(x, 200000))
print(rss_kb() - before)
"""
    )
    assert int(out) < 2000, "kB for 200,000 collectives"


def test_memory_of_many_calls():
    out = run_ok(
        MEMORY
        + """
fn = program(lambda x: jcoll.all_reduce(x, "x"), mesh)
def calls(n):
    for _ in range(n):
        jax.block_until_ready(fn(x))
calls(500)
before = rss_kb()
calls(2000)
print(rss_kb() - before)
"""
    )
    assert int(out) < 2000, "kB for 2,000 calls"


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_sites_die_with_their_executables(times):
    out = run_ok(
        MEMORY
        + f"""
def make_and_drop(scale):
    fn = program(lambda x: jcoll.all_reduce(jcoll.all_reduce(x, "x") * scale, "x"), mesh)
    jax.block_until_ready(fn(x))
    return _native.num_sites()
most = max(make_and_drop(float(i)) for i in range({times}))
jax.clear_caches()
gc.collect()
print(most, _native.num_sites())
"""
    )
    most, left = map(int, out.split())
    assert most >= 2
    assert left == 0


def test_deadlines_of_dead_programs_cost_nothing():
    """The monitor sleeps when nothing is open."""
    out = run_ok(
        MEMORY
        + """
fn = program(lambda x: jcoll.all_reduce(x, "x"), mesh)
for _ in range(10):
    jax.block_until_ready(fn(x))
time.sleep(0.3)
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""
    )
    assert float(out) < 0.05
