"""Seeds bugs in the kernels' protocols, and expects the tests in the emulator to find each of them.

    python tests/cuda/mutate.py [NAME...] [--jobs N] [--keep FOLDER]

`make mutants` is it. NAME: only the bugs whose name contains it. Needs cmake, ninja, a C++ compiler
and, for the plans, numpy.

A bug that depends on who is late may hide: its test is run again, a few times, with other delays,
longer ones, before the bug counts as missed.

All bugs are compiled into one copy of the sources, each behind `if (Seeded(number))`; the
environment of a run chooses one. So there are two builds, without a sanitizer and with
ThreadSanitizer, and not one for each bug; and a bug whose place in the sources is gone, or that no
longer compiles, fails at once. Run number 0 has no bug and must pass.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from seeded_bugs import BUGS, HANG, PASSED, POISON, RACE, STATE, TIMEOUT, VALUES, Bug, Place, Test

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = Path("cuda/kernels")

# What a line that the tests print says; the first that fits.
SYMPTOMS = {
    RACE: "ThreadSanitizer: data race",
    TIMEOUT: "expected error.state == 0u",
    VALUES: '"right"',
    POISON: "IsPoisoned",
    STATE: ": expected ",
}

# The copy's time-outs: shorter where only a bug can reach them, and longer where a rank that is
# only slow, as two tests run at once, could be taken for one that has stopped.
TIMEOUTS_NS = (
    ("gpu_emulated.h", "60'000'000'000", "3'000'000'000"),
    ("faults_test.cc", "(600'000'000'000)", "(1'000'000'000)"),
    ("faults_test.cc", "kTimeoutNs = 150'000'000", "kTimeoutNs = 600'000'000"),
    ("plan_faults_test.cc", "kTimeoutNs = 500'000'000", "kTimeoutNs = 1'000'000'000"),
)

# How often a test is run until it finds its bug.
NUM_TRIES = 4

# The copy's emulator: delays by the number of the try too, and longer ones the more there were.
DELAYS = (
    (
        "cuda/emulator/emulator.cc",
        "void SetOptions(const Options& options) { current_options = options; }",
        """void SetOptions(const Options& options) {
  const int tries = std::atoi(std::getenv("JCOLL_SEEDED_TRY"));
  current_options = options;
  if (options.delay_seed != 0) current_options.delay_seed += 1000 * tries;
  current_options.max_delay_us <<= tries;
}""",
    ),
    ("tests/cuda/plan_schedules_test.cc", "delay_ = delay;", """delay_ = delay;
    for (int i = std::atoi(std::getenv("JCOLL_SEEDED_TRY")); i > 0; --i) delay_ *= 2;"""),
)  # fmt: skip

SEEDED_H = """#include <cstdlib>
inline const int seeded_bug = std::atoi(std::getenv("JCOLL_SEEDED_BUG"));
inline bool Seeded(int number) { return number == seeded_bug; }
"""


class PatchError(Exception):
    """A place that the table names is not in the sources as the table has it."""


def find_once(text: str, wanted: str, file: str) -> int:
    if text.count(wanted) != 1:
        raise PatchError(f"{file}: {text.count(wanted)} places with {wanted!r}, not 1")
    return text.index(wanted)


def replace_once(text: str, old: str, new: str, file: str) -> str:
    at = find_once(text, old, file)
    return text[:at] + new + text[at + len(old) :]


def guarded(place: Place, bugs: dict[int, Bug]) -> str:
    """The place's text, or that of one of its bugs."""
    text = place.text
    for number, bug in bugs.items():
        if place.is_statement:
            text = f"if (Seeded({number})) {{ {bug.text} }} else {{ {text} }}"
        else:
            text = f"(Seeded({number}) ? ({bug.text}) : ({text}))"
    return text


def seed(text: str, bugs: dict[int, Bug], file: str) -> str:
    """The file's text with all its bugs, by their numbers."""
    places: dict[Place, dict[int, Bug]] = {}
    for number, bug in bugs.items():
        places.setdefault(bug.place, {})[number] = bug
    edits = []
    for place, alternatives in places.items():
        begin = find_once(text, place.context + place.text, file) + len(place.context)
        edits.append((begin, begin + len(place.text), guarded(place, alternatives)))
    behind = len(text) + 1
    for begin, end, new in sorted(edits, reverse=True):
        if end > behind:
            raise PatchError(f"{file}: two bugs' places overlap at {text[begin:end]!r}")
        text = text[:begin] + new + text[end:]
        behind = begin
    return text


def seeded_files() -> dict[Path, str]:
    files: dict[str, dict[int, Bug]] = {}
    for number, bug in enumerate(BUGS, start=1):
        files.setdefault(bug.place.file, {})[number] = bug
    return {
        KERNELS / file: seed((ROOT / KERNELS / file).read_text(), bugs, file)
        for file, bugs in files.items()
    }


def summing_only(reduce_cuh: str) -> str:
    """The tests that run here sum int32 and float: all else would be compiled in vain."""
    types = r"    case DType::k(?!S32|U32|F32)\w+:[^\n]*\n(?:      return [^\n]*\n)?"
    operations = r"    case ReduceOp::k(?!Sum|Mean)\w+:[^\n]*\n(?:      return With[^\n]*\n)?"
    return re.sub(f"{types}|{operations}", "", reduce_cuh)


def changed_files() -> dict[Path, str]:
    files = seeded_files()
    files[Path("seeded.h")] = SEEDED_H
    timeouts = [(f"tests/cuda/{name}", old, new) for name, old, new in TIMEOUTS_NS]
    for name, old, new in [*timeouts, *DELAYS]:
        path = Path(name)
        files[path] = replace_once(files.get(path) or (ROOT / path).read_text(), old, new, name)
    reduce = KERNELS / "reduce.cuh"
    files[reduce] = summing_only((ROOT / reduce).read_text())
    return files


def copy_sources(to: Path) -> None:
    """Touches nothing that is there and as it should be."""
    changed = changed_files()

    def copy(source: str, target: str) -> None:
        if Path(source).relative_to(ROOT) not in changed:
            shutil.copy2(source, target)

    to.mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / "CMakeLists.txt", to)
    for name in ("cmake", "csrc", "cuda", "jcoll", "tests"):
        shutil.copytree(ROOT / name, to / name, copy_function=copy, dirs_exist_ok=True)
    for path, text in changed.items():
        if not (to / path).exists() or (to / path).read_text() != text:
            (to / path).write_text(text)


def build(source: Path, sanitizer: str, tests: list[Test], jobs: int) -> None:
    folder = build_folder(source, sanitizer)
    options = {
        "JCOLL_TESTS": "ON",
        "JCOLL_CUDA": "OFF",
        "JCOLL_SANITIZE": sanitizer,
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS": f"-include {source / 'seeded.h'}",
        "Python_EXECUTABLE": sys.executable,
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    configure = ["cmake", "-S", source, "-B", folder, "-G", "Ninja", "--log-level=WARNING"]
    subprocess.run([*configure, *defines], check=True, stdout=subprocess.DEVNULL)
    targets = sorted({f"cuda_{test.program}" for test in tests if test.sanitizer == sanitizer})
    built = subprocess.run(
        ["cmake", "--build", folder, "-j", str(jobs), "--target", *targets],
        stdout=subprocess.PIPE,
        text=True,
    )
    if built.returncode != 0:
        sys.exit(f"{built.stdout}\nThe sources with all bugs in them do not compile.")


def build_folder(source: Path, sanitizer: str) -> Path:
    return source / f"build-{sanitizer or 'plain'}"


def symptoms_in(printed: str) -> list[str]:
    found = [
        next((symptom for symptom, text in SYMPTOMS.items() if text in line), None)
        for line in printed.splitlines()
    ]
    return [symptom for symptom in SYMPTOMS if symptom in found]


def run(source: Path, test: Test, number: int, limit_s: float, tries: int = 0) -> list[str]:
    """How it ended, after so many tries. A bug may have several symptoms."""
    program = build_folder(source, test.sanitizer) / "tests" / "cuda" / f"cuda_{test.program}"
    environ = {"JCOLL_SEEDED_BUG": str(number), "JCOLL_SEEDED_TRY": str(tries)}
    environ |= {"TSAN_OPTIONS": "halt_on_error=1"}
    try:
        done = subprocess.run(
            [program, test.cases],
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return [HANG]
    if done.returncode == 0:
        return [PASSED]
    return symptoms_in(done.stderr) or [f"exit status {done.returncode}: {done.stderr[-200:]}"]


def find(source: Path, bug: Bug, number: int, limit_s: float) -> tuple[bool, list[list[str]]]:
    """Whether its test finds it in the way that the table has, and how each try ended."""
    ends: list[list[str]] = []
    while len(ends) < NUM_TRIES:
        ends.append(run(source, bug.test, number, limit_s, len(ends)))
        if not set(ends[-1]).isdisjoint(bug.symptoms):
            return True, ends
        if ends[-1] == [HANG]:  # Of which more tries would only be as many hangs.
            break
    return False, ends


def limits_without_bugs(source: Path, tests: list[Test]) -> dict[Test, float]:
    """Runs the tests without a bug. How long each may take with one before we call it a hang."""
    limits = {}
    for test in tests:
        start = time.monotonic()
        ended = run(source, test, 0, 300)
        if ended != [PASSED]:
            sys.exit(f"{test}: {' and '.join(ended)}, without a bug")
        limits[test] = 25 + 4 * (time.monotonic() - start)
    return limits


def check(source: Path, chosen: dict[int, Bug], jobs: int) -> bool:
    """Whether all are found, as the table has it. Prints a line for each."""
    tests = list(dict.fromkeys(bug.test for bug in chosen.values()))
    for sanitizer in dict.fromkeys(test.sanitizer for test in tests):
        build(source, sanitizer, tests, jobs)
    limits = limits_without_bugs(source, tests)
    num_found = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = {
            number: pool.submit(find, source, bug, number, limits[bug.test])
            for number, bug in chosen.items()
        }
        for number, bug in chosen.items():
            found, ends = results[number].result()
            num_found += found
            ended = ", then ".join(" and ".join(end) for end in ends)
            wanted = "" if found else f"  FAILED, wants {' or '.join(bug.symptoms)}"
            print(f"{bug.name:50} {bug.test!s:42} {ended}{wanted}", flush=True)
    print(f"{num_found} of {len(chosen)} bugs found")
    return num_found == len(chosen)


def positive(text: str) -> int:
    number = int(text)  # argparse has a text for what is no integer.
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description="Seed bugs in the kernels' protocols.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=positive, default=2)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build there, and leave it")
    args = parser.parse_args()
    chosen = {
        number: bug
        for number, bug in enumerate(BUGS, start=1)
        if not args.names or any(name in bug.name for name in args.names)
    }
    if not chosen:
        sys.exit(f"no bug's name has any of {args.names}")
    with tempfile.TemporaryDirectory() as folder:
        source = args.keep or Path(folder)
        try:
            copy_sources(source)
        except PatchError as error:
            sys.exit(f"{error}. Change tests/cuda/seeded_bugs.py, or what it names")
        return 0 if check(source, chosen, args.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
