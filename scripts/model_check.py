"""Checks the models in cuda/models with spin: what holds, and that every seeded bug is found.

    python scripts/model_check.py [--json FILE] [--jobs N]

Needs Debian's `spin` and a C compiler. Each line is one exhaustive search; one that was cut short
by depth or memory fails, as does a bug that is not found or breaks something else than expected.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "cuda" / "models"
MAX_DEPTH = 2_000_000
MEMORY_MIB = 2048
TIMEOUT_S = 120

# How a search may end.
HOLDS = "holds"
ASSERTION = "assertion"  # A property that the model states.
OVERRUN = "overrun"  # A rank is further ahead of its peers than the protocol allows.
DEADLOCK = "deadlock"
LIVELOCK = "livelock"
INCOMPLETE = "incomplete"


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    defines: str = ""  # As in "N=3 BLOCKS=2".
    bug: str = ""  # What BUG_... is to be defined.
    expected: str = HOLDS
    progress: bool = False  # Looks for cycles without progress, not for deadlocks.

    def __str__(self) -> str:
        mode = "progress" if self.progress else ""
        return " ".join(filter(None, [f"{self.model:12}", self.defines, mode, self.bug]))


@dataclasses.dataclass(frozen=True)
class Result:
    verdict: str
    states: int
    seconds: float
    output: str  # What pan said.


THREADS = "N=2 THREADED=2"

HOLDING = [
    Case("barrier", THREADS),
    Case("barrier", "N=3"),
    Case("barrier", "N=3 THREADED=1"),
    Case("barrier", THREADS, progress=True),
    Case("all_reduce", "SHOTS=1 N=3"),
    Case("all_reduce", "SHOTS=1 N=2 BLOCKS=2"),
    Case("all_reduce", "SHOTS=2 N=3"),
    Case("all_reduce", "SHOTS=2 N=2 BLOCKS=2"),
    Case("all_reduce", "SHOTS=2 N=2", progress=True),
    Case("ll", "N=2 LINES=2"),
    Case("ll", "N=3 LINES=2 M=6"),
    Case("ll", "N=2 LINES=2", progress=True),
    Case("timeout", "N=2 THREADED=2 LAUNCHES=3"),
    Case("timeout", "N=3 LAUNCHES=1"),
    Case("timeout", THREADS, progress=True),
    Case("error_record", "WRITERS=3"),
]

BUGS = [
    Case("barrier", THREADS, "BUG_EQUALITY", DEADLOCK),
    Case("barrier", THREADS, "BUG_UNSIGNED_COMPARE", ASSERTION),
    Case("barrier", THREADS, "BUG_WAITS_FOR_OLD_EPOCH", ASSERTION),
    Case("barrier", THREADS, "BUG_EPOCH_NOT_KEPT", ASSERTION),
    Case("barrier", THREADS, "BUG_LAUNCHES_OVERLAP", ASSERTION),
    Case("barrier", THREADS, "BUG_NO_RELEASE", ASSERTION),
    Case("barrier", THREADS, "BUG_NO_ACQUIRE", ASSERTION),
    Case("barrier", THREADS, "BUG_NO_SYNC_BEFORE", ASSERTION),
    Case("barrier", THREADS, "BUG_NO_SYNC_AFTER", ASSERTION),
    Case("barrier", "N=3", "BUG_WRONG_INBOX", DEADLOCK),
    Case("barrier", "N=3", "BUG_SIGNALS_TOO_FEW", DEADLOCK),
    Case("barrier", "N=3", "BUG_WAITS_FOR_TOO_FEW", ASSERTION),
    Case("all_reduce", "BLOCKS=2", "BUG_NO_FIRST_BARRIER", ASSERTION),
    Case("all_reduce", "BLOCKS=2", "BUG_FIRST_RELAXED", ASSERTION),
    Case("all_reduce", "BLOCKS=2 SHOTS=1", "BUG_NO_LAST_BARRIER", ASSERTION),
    Case("all_reduce", "BLOCKS=2 SHOTS=2", "BUG_NO_LAST_BARRIER", ASSERTION),
    Case("all_reduce", "BLOCKS=2", "BUG_LAST_RELAXED", ASSERTION),
    Case("all_reduce", "BLOCKS=2", "BUG_READS_OTHER_BLOCK", ASSERTION),
    Case("all_reduce", "BLOCKS=2", "BUG_BLOCK_SKIPS_LAST", ASSERTION),
    Case("all_reduce", "BLOCKS=2 SHOTS=1", "BUG_IDLE_BLOCK_RETURNS", DEADLOCK),
    Case("ll", "LINES=2", "BUG_ONE_HALF", DEADLOCK),
    Case("ll", "LINES=2", "BUG_HALVES_BY_SIZE", DEADLOCK),
    Case("ll", "LINES=2", "BUG_EMPTY_EXCHANGE", DEADLOCK),
    Case("ll", "LINES=2", "BUG_NO_BARRIER_AFTER_CLEANING", DEADLOCK),
    Case("ll", "LINES=2", "BUG_NOT_CLEANED", ASSERTION),
    Case("ll", "LINES=2", "BUG_SECOND_FLAG_UNCHECKED", ASSERTION),
    Case("ll", "LINES=2", "BUG_ANY_FLAG", ASSERTION),
    Case("ll", "LINES=2", "BUG_EPOCH_BEFORE", ASSERTION),
    Case("ll", "LINES=2", "BUG_READS_ROOT_ONLY", OVERRUN),
    Case("timeout", THREADS, "BUG_NO_DEADLINE", DEADLOCK),
    Case("timeout", THREADS, "BUG_THREAD_LEAVES_ALONE", DEADLOCK),
    Case("timeout", THREADS, "BUG_FAILURE_NOT_SHARED", ASSERTION),
    Case("timeout", THREADS, "BUG_GIVES_UP_SILENTLY", ASSERTION),
    Case("timeout", THREADS, "BUG_DEAD_FORGOTTEN", ASSERTION),
    Case("timeout", THREADS, "BUG_NO_SECOND_LOOK", ASSERTION),
    Case("timeout", THREADS, "BUG_LOOKS_BEFORE_SIGNAL", ASSERTION),
    Case("timeout", THREADS, "BUG_LEAVES_AT_ONCE", ASSERTION),
    Case("timeout", THREADS, "BUG_NOT_SETTLED", ASSERTION),
    Case("timeout", THREADS, "BUG_RETRIES", LIVELOCK, progress=True),
    Case("error_record", "", "BUG_NOT_CLAIMED", ASSERTION),
    Case("error_record", "", "BUG_PUBLISHED_EARLY", ASSERTION),
    Case("error_record", "", "BUG_STATE_NOT_RELEASED", ASSERTION),
]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here as well")
    parser.add_argument("--jobs", type=positive, default=2, help="searches at a time (2)")
    args = parser.parse_args(argv)
    if complaint := missing_tools() or unlisted_bugs():
        print(f"model_check: {complaint}", file=sys.stderr)
        return 1
    cases = HOLDING + BUGS
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = []
        for case, result in zip(cases, pool.map(search, cases), strict=True):
            results.append(result)
            print(line(case, result), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows(cases, results), indent=1) + "\n")
    return summary(cases, results)


def positive(text: str) -> int:
    number = int(text)  # argparse has a text for what is no integer.
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def missing_tools() -> str | None:
    if shutil.which("spin") is None:
        return (
            "the models are checked with `spin`, which is not on PATH. "
            "Install it (Debian, Ubuntu: `apt-get install spin`) and run this again."
        )
    if shutil.which(compiler()) is None:
        return (
            f"spin's verifiers are C, and the compiler `{compiler()}` is not on PATH. "
            "Install one (Debian, Ubuntu: `apt-get install gcc`), or name yours in CC."
        )
    return None


def unlisted_bugs() -> str | None:
    seeded = {bug for path in MODELS.glob("*.pml") for bug in seeded_bugs(path)}
    listed = {case.bug for case in BUGS}
    if seeded == listed:
        return None
    return (
        f"seeded in {MODELS} but not checked: {sorted(seeded - listed)}; "
        f"checked but not seeded: {sorted(listed - seeded)}. "
        "Bring BUGS in scripts/model_check.py and the models together."
    )


def seeded_bugs(path: Path) -> set[str]:
    return set(re.findall(r"BUG_\w+", path.read_text()))


def compiler() -> str:
    return os.environ.get("CC", "cc")


def search(case: Case, max_depth: int = MAX_DEPTH) -> Result:
    """Generates the verifier of a case, compiles it and lets it look at every state."""
    defines = [f"-D{define}" for define in (*case.defines.split(), case.bug) if define]
    flavour = "-DNP" if case.progress else "-DSAFETY"
    optimize = "-O2" if case.expected == HOLDS else "-O0"  # A bug is found in less than it takes.
    options = ["-l", "-f"] if case.progress else []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="model_check_") as folder:

        def run(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            if done.returncode != 0 and command[0] != "./pan":
                raise RuntimeError(f"{case}: {' '.join(command)}:\n{done.stdout}{done.stderr}")
            return done.stdout

        run("spin", "-a", *defines, str(MODELS / f"{case.model}.pml"))
        run(compiler(), optimize, "-w", flavour, f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c")
        try:
            output = run("./pan", f"-m{max_depth}", *options)
        except subprocess.TimeoutExpired:
            output = f"no end after {TIMEOUT_S} s"
    return Result(verdict_of(output), states_in(output), time.monotonic() - start, output)


def verdict_of(output: str) -> str:
    """What pan found; it stops at the first violation. No verdict without a complete search."""
    violation = re.search(r"^pan:1: (.*)", output, re.MULTILINE)
    if violation is None:
        complete = "errors: 0" in output and not re.search(
            r"max search depth too small|not completed|out of memory|MEMLIM", output
        )
        return HOLDS if complete else INCOMPLETE
    text = violation[1]
    if "invalid end state" in text:
        return DEADLOCK
    if "non-progress cycle" in text:
        return LIVELOCK
    # nfull(), in arrive() and store().
    return OVERRUN if "q_full" in text else ASSERTION


def states_in(output: str) -> int:
    stored = re.search(r"^\s*(\S+) states, stored", output, re.MULTILINE)
    return int(float(stored[1])) if stored else 0


def line(case: Case, result: Result) -> str:
    verdict = result.verdict if result.verdict in (HOLDS, INCOMPLETE) else f"found {result.verdict}"
    if result.verdict != case.expected:
        verdict = f"FAILED: {verdict}, expected {case.expected}"
    return f"{case!s:55} {result.states:9,} states {result.seconds:6.1f} s  {verdict}"


def rows(cases: list[Case], results: list[Result]) -> list[dict[str, object]]:
    return [
        dataclasses.asdict(case)
        | {"verdict": result.verdict, "states": result.states, "seconds": result.seconds}
        for case, result in zip(cases, results, strict=True)
    ]


def summary(cases: list[Case], results: list[Result]) -> int:
    failed = [
        (case, result)
        for case, result in zip(cases, results, strict=True)
        if result.verdict != case.expected
    ]
    for case, result in failed:
        print(f"\n{case}\n{result.output}", file=sys.stderr)
    print(f"{len(cases) - len(failed)} of {len(cases)} as expected, {len(BUGS)} seeded bugs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
