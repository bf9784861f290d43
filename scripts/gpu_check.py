"""Runs the CUDA kernels on this machine's GPU: `gpu_check.py [--json FILE] [--build DIR]`.

Builds for the GPU that is here, with nvcc and CMake and without a network, and runs the tests of
tests/cuda with all ranks on it: every kernel, type and operation against the reference, ranks that
stop, and the speed of each kernel beside that of a copy. Then, where they are installed,
compute-sanitizer on small cases and jcoll in JAX. Exit status: 1 if anything is wrong, 2 if nothing
can be run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("moves", "reductions", "ragged", "plan_results", "plan_rounds", "faults")
# Test, case, and whether it has several ranks. These need launches that run side by side; a tool
# may run them one after the other, and then ranks wait in vain, which is no bug.
ALONE = ("moves", "Alone", False), ("reductions", "OneRank", False), ("ragged", "Alone", False)
SANITIZED = (*ALONE, ("moves", "InPlace", True), ("plan_results", "EveryType", True))
# memcheck sees accesses outside of memory, synccheck threads that miss their block's barrier.
# racecheck looks at shared memory only, of which the kernels have none: it finds something when
# they get some, or the compiler gives them some. So it has the smallest cases, comes last, and is
# what is left out if time is short.
TOOLS = {"memcheck": SANITIZED, "synccheck": SANITIZED, "racecheck": ALONE}
SANITIZER_FOUND = 9  # compute-sanitizer's exit status if it has found something.
NO_GPU = """\
gpu-check: nvidia-smi finds no GPU here. Run it on a machine with one; `make test` runs the same
  programs in the emulator."""
OLD_GPU = """\
gpu-check: the GPU here ({}) has compute capability {}, and the kernels need 8.0 or later. Run it
  on a machine with a later one."""
OLDEST_CAPABILITY = 8.0
BUILD_TIMEOUT_S = 300
RUN_TIMEOUT_S = 120
RACECHECK_TIMEOUT_S = 30
ALL_TIMEOUT_S = 470  # A step gets what is left of it.


@dataclass
class Step:
    """Something that was run, or could not be."""

    name: str
    verdict: str  # "ok", "FAILED" or "skipped".
    seconds: float
    why: str = ""


@dataclass
class Speed:
    """One line of tests/cuda/bandwidth_test.cc."""

    kernel: str
    ranks: int
    nbytes: int
    seconds: float
    bytes_per_second: float
    of_copy: float
    right: bool


class Deadline:
    """When all has to be done."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, at_most: float) -> float:
        return max(0.1, min(at_most, self.end - time.monotonic()))


def run(
    name: str, command: list[str], timeout: float, env: dict[str, str] | None = None
) -> tuple[Step, str]:
    """Runs a command, prints what it says if it fails, and returns its output too."""
    print(f"{name} ...", flush=True)
    start = time.monotonic()
    # A session of its own, so that nothing that the command has started goes on when it is killed.
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, errors="replace", env=env, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
        why = f"exit {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        why = f"not done after {timeout:.0f} s"
    except BaseException:  # Ctrl-C, which does not reach another session.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    step = Step(name, "FAILED" if why else "ok", round(time.monotonic() - start, 1), why)
    if why:
        print(output[-4000:])
    print(f"{name}: {step.verdict} {why} ({step.seconds} s)", flush=True)
    return step, output


def skip(name: str, why: str) -> Step:
    print(f"{name}: skipped, {why}", flush=True)
    return Step(name, "skipped", 0.0, why)


def gpu() -> str | None:
    """What nvidia-smi says of the first GPU."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    lines = [line for line in done.stdout.splitlines() if line.count(", ") >= 2]
    return lines[0] if done.returncode == 0 and lines else None


def is_served(capability: str) -> bool:
    """Whether there are kernels for it. A driver that is out of order says "[N/A]"."""
    try:
        return float(capability) >= OLDEST_CAPABILITY
    except ValueError:
        return False


def has_cuda_plugin() -> bool:
    spec = importlib.util.find_spec("jax_plugins")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return any(any(Path(folder).glob("xla_cuda*")) for folder in folders)


def python_options() -> tuple[list[str], str | None]:
    """CMake's options for the extensions, and why they cannot be built."""
    for module in ("pybind11", "jax", "jaxlib"):
        if importlib.util.find_spec(module) is None:
            return [], f"{sys.executable} has no {module}"
    if not has_cuda_plugin():
        return [], "JAX has no plugin for CUDA (pip install 'jax[cuda13]')"
    import jaxlib

    pybind11 = importlib.import_module("pybind11")
    include = Path(str(jaxlib.__file__)).parent / "include"
    if not (include / "xla/ffi/api/collectives_c_api.h").exists():
        return [], f"jaxlib {jaxlib.__version__} lends no communicators; 0.11.2 does"
    headers = [
        f"-D{name}={include}" for name in ("JCOLL_FFI_INCLUDE_DIR", "JCOLL_CUDA_FFI_INCLUDE_DIR")
    ]
    return ["-DJCOLL_PYTHON=ON", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *headers], None


def build(folder: Path, arch: str, options: list[str], deadline: Deadline) -> list[Step]:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        return [Step("build", "FAILED", 0.0, "no cmake on PATH")]
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DJCOLL_TESTS=ON", "-DJCOLL_CUDA=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DJCOLL_CUDA_ARCH={arch}", *options]
    targets = ["gpu_check", *(["_native", "_cuda"] if options else [])]
    compile_ = [cmake, "--build", str(folder), "-j", str(os.cpu_count()), "--target", *targets]
    first, _ = run("configure", configure, deadline.left(BUILD_TIMEOUT_S))
    if first.why:
        return [first]
    return [first, run("build", compile_, deadline.left(BUILD_TIMEOUT_S))[0]]


def speeds(output: str) -> list[Speed]:
    """What tests/cuda/bandwidth_test.cc prints."""
    rows = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("kernel\t")]
    return [
        Speed(name, int(n), int(nbytes), float(s), float(rate), float(part), verdict == "ok")
        for name, n, nbytes, s, rate, part, verdict in rows
    ]


def print_speeds(rows: list[Speed]) -> None:
    """Markdown, as docs/gpu.md would have it."""
    print("| kernel | ranks | bytes | us | GB/s | of a copy |\n|---|---:|---:|---:|---:|---:|")
    for r in rows:
        numbers = f"{r.seconds * 1e6:.1f} | {r.bytes_per_second / 1e9:.1f} | {r.of_copy:.2f}"
        print(f"| {r.kernel} | {r.ranks} | {r.nbytes} | {numbers} |")


def sanitize(tests: Path, deadline: Deadline) -> list[Step]:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return [skip("compute-sanitizer", "it is not on PATH")]
    steps = []
    for tool, cases in TOOLS.items():
        for name, case, has_several_ranks in cases:
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND)]
            command += [str(tests / f"gpu_{name}_test"), case]
            step, output = sanitized(f"{tool} {name} {case}", command, deadline, has_several_ranks)
            if "Device not supported" in output:  # As in some virtual machines.
                return [*steps, skip("compute-sanitizer", "it does not support this device")]
            steps.append(step)
    return steps


def sanitized(
    title: str, command: list[str], deadline: Deadline, has_several_ranks: bool
) -> tuple[Step, str]:
    """One case under a tool, as `run`. Skipped where it does not tell of a bug that it fails."""
    is_racecheck = title.startswith("racecheck")
    timeout = deadline.left(RACECHECK_TIMEOUT_S if is_racecheck else RUN_TIMEOUT_S)
    if is_racecheck and timeout < RACECHECK_TIMEOUT_S:
        return skip(title, f"{timeout:.0f} s are left"), ""
    # Of kernels that wait for each other in vain: soon.
    environment = {**os.environ, "JCOLL_TIMEOUT": "10"}
    step, output = run(title, command, timeout, environment)
    if has_several_ranks and step.why and step.why != f"exit {SANITIZER_FOUND}":
        step = skip(title, f"its ranks did not run side by side ({step.why})")
    elif is_racecheck and step.why.startswith("not done"):
        step = skip(title, step.why)
    return step, output


def in_jax(folder: Path, missing: str | None, deadline: Deadline) -> Step:
    if missing is not None:
        return skip("in JAX", missing)
    site = folder / "site" / "jcoll"
    shutil.copytree(ROOT / "jcoll", site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so"))
    for library in [*folder.glob("_native*.so"), *folder.glob("cuda/_cuda*.so")]:
        shutil.copy(library, site)
    environment = {**os.environ, "PYTHONPATH": str(site.parent), "JAX_PLATFORMS": "cuda"}
    script = str(ROOT / "scripts" / "gpu_check_jax.py")
    timeout = deadline.left(RUN_TIMEOUT_S)
    return run("in JAX", [sys.executable, script], timeout, environment)[0]


def why_not_writable(path: Path) -> str:
    """Better known before eight minutes of measuring than after."""
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
        return ""
    except OSError as e:
        return e.strerror or str(e)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu-check")
    args = parser.parse_args(argv)
    found = gpu()
    if found is None:
        print(NO_GPU, file=sys.stderr)
        return 2
    name, capability, _ = found.rsplit(", ", 2)
    if not is_served(capability):
        print(OLD_GPU.format(name, capability), file=sys.stderr)
        return 2
    if args.json and (why := why_not_writable(args.json)):
        parser.error(f"--json {args.json}: {why}; name a file that can be written")
    print(f"GPU: {found}")
    deadline = Deadline(ALL_TIMEOUT_S)
    options, missing = python_options()
    steps, rows = build(args.build, capability.replace(".", "") + "-real", options, deadline), []
    if not any(step.why for step in steps):
        tests = args.build / "tests" / "cuda"
        for name in TESTS:
            timeout = deadline.left(RUN_TIMEOUT_S)
            steps.append(run(name, [str(tests / f"gpu_{name}_test")], timeout)[0])
        measuring = [str(tests / "gpu_bandwidth_test")]
        measured, output = run("bandwidth", measuring, deadline.left(RUN_TIMEOUT_S))
        rows = speeds(output)
        print_speeds(rows)
        steps += [measured, in_jax(args.build, missing, deadline), *sanitize(tests, deadline)]
    if args.json:
        report = {"gpu": found, "steps": [*map(asdict, steps)], "speeds": [*map(asdict, rows)]}
        args.json.write_text(json.dumps(report, indent=1))
    failed = [step.name for step in steps if step.verdict == "FAILED"]
    print("gpu-check:", f"FAILED: {', '.join(failed)}" if failed else "ok")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
