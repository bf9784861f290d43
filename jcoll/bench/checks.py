"""From parsed flags to jobs, refusing whatever could not be measured before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from jcoll import sizes
from jcoll.algorithms import registry
from jcoll.algorithms.registry import RESERVED
from jcoll.bench import catalog, rows
from jcoll.bench.job import Job
from jcoll.errors import UsageError

_T = TypeVar("_T")


def jobs(args: argparse.Namespace) -> list[Job]:
    """One job per child process: every device count with every allocator setting."""
    _fill_in(args)
    _check_counts(args)
    common = Job(
        ops=_ops(args),
        dtypes=_dtypes(args),
        sizes=_sizes(args),
        num_ranks=1,
        redop=args.redop or "sum",
        root=args.root,
        algorithm=args.algorithm,
        form="chain" if args.chain else "loop" if args.loop else "single",
        steps=args.chain or args.loop or 1,
        calls=args.iters,
        warmup=args.warmup,
        repeats=args.repeats,
        seconds=args.seconds,
        check=bool(args.check),
        copy=bool(args.copy),
        dispatch=args.dispatch,
    )
    _check_ops(args, common)
    _check_outputs(args)
    mallocs = ("default", "reuse") if args.malloc == "both" else (args.malloc,)
    return [
        dataclasses.replace(
            common, num_ranks=num_ranks, malloc=malloc, processes=num_ranks if args.processes else 1
        )
        for num_ranks in _devices(args)
        for malloc in mallocs
    ]


def _fill_in(args: argparse.Namespace) -> None:
    """Defaults of what was left open; --grid has its own."""
    if args.devices is not None and args.processes is not None:
        raise UsageError(
            f"--devices is {args.devices} and --processes is {args.processes}; one of the two is "
            "needed: a process has one device here"
        )
    defaults = {"begin": "1K", "end": "16M", "devices": "8", "malloc": "default", "copy": False}
    if args.grid:
        defaults |= {"devices": "2,4,8", "malloc": "both", "copy": True}
        args.ops = args.ops or ["all"]
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _ops(args: argparse.Namespace) -> tuple[str, ...]:
    named = [name for text in args.ops for name in text.split(",")]
    known = [*catalog.CATALOG, "all"]
    unknown = [name for name in named if name not in known]
    if unknown or not named:
        given = f"OP {unknown[0]!r} is not an op" if unknown else "no OP was given"
        raise UsageError(f"{given}; needed is one or more of {', '.join(known)}: bench all_reduce")
    expanded = (name for text in named for name in (catalog.MAIN_OPS if text == "all" else (text,)))
    return tuple(dict.fromkeys(expanded))


def _each(flag: str, parse: Callable[[str], _T], texts: Iterable[str]) -> tuple[_T, ...]:
    """Parse all texts; the error of one is told under its flag's name."""
    try:
        return tuple(parse(text) for text in texts)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _dtypes(args: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(args.dtype.split(",")))
    _each("-d/--dtype", _whole_bytes, names)
    return names


def _whole_bytes(name: str) -> None:
    bits = re.search(r"\d+", catalog.parse_dtype(name).name)  # bool has none.
    if bits is not None and int(bits[0]) < 8:
        raise ValueError(
            f"{name!r} has {bits[0]} bits, and XLA packs several of them into a byte; a dtype of "
            "whole bytes is needed: write int8"
        )


def _devices(args: argparse.Namespace) -> tuple[int, ...]:
    if args.processes is None:
        return _each("--devices", _parse_count, dict.fromkeys(args.devices.split(",")))
    return _each("--processes", _parse_count, dict.fromkeys(args.processes.split(",")))


def _parse_count(text: str) -> int:
    if not 1 <= sizes.parse_count(text.strip()) <= 1024:
        raise ValueError(
            f"{text!r} is not a count; whole numbers from 1 to 1024, by commas, are needed: "
            "write 8 or 2,4,8"
        )
    return int(text)


def _sizes(args: argparse.Namespace) -> tuple[int, ...]:
    (begin,) = _each("-b/--begin", sizes.parse_size, [args.begin])
    (end,) = _each("-e/--end", sizes.parse_size, [args.end])
    (step,) = _each("-i/--step", sizes.parse_size, [args.step or "0"])
    if not 0 < begin <= end:
        raise UsageError(
            f"-b/--begin is {args.begin} and -e/--end is {args.end}; needed is 0 < begin <= end: "
            f"raise --end, or lower --begin"
        )
    if args.step is not None and (args.factor is not None or step < 1):
        raise UsageError(
            f"-i/--step is {args.step} with -f/--factor {args.factor}; one of the two, at least "
            "1 byte or a factor of at least 2, is needed: leave the other out"
        )
    return tuple(sizes.sweep(begin, end, factor=args.factor or 4, step=step))


_MINIMUM = {
    "factor": ("-f/--factor", 2),
    "iters": ("-n/--iters", 1),
    "warmup": ("-w/--warmup", 0),
    "repeats": ("--repeats", 1),
    "chain": ("--chain", 1),
    "loop": ("--loop", 1),
    "root": ("-r/--root", 0),
}


def _check_counts(args: argparse.Namespace) -> None:
    for name, (flag, least) in _MINIMUM.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"{flag} is {value}; at least {least} is needed: raise it")
    for name in ("seconds", "timeout"):
        if not getattr(args, name) > 0:
            raise UsageError(
                f"--{name} is {getattr(args, name):g}; more than 0 seconds are needed: raise it"
            )


def _check_ops(args: argparse.Namespace, job: Job) -> None:
    """Flags that no chosen op takes, and pairs of reduction and dtype without a meaning."""
    entries = {op: catalog.CATALOG[op] for op in job.ops}
    reduces = any(entry.reduces for entry in entries.values())
    if args.redop is not None and args.redop not in catalog.REDUCE_OPS:
        raise UsageError(
            f"-o/--op is {args.redop!r}; needed is one of {', '.join(catalog.REDUCE_OPS)}: "
            "leave it out for sum"
        )
    if args.redop is not None and not reduces:
        raise UsageError(
            f"-o/--op is {args.redop}, but {', '.join(job.ops)} reduces nothing; an op such as "
            "all_reduce is needed with it: leave -o out"
        )
    if reduces:
        _each("-d/--dtype", functools.partial(catalog.check_pair, job.redop), job.dtypes)
    known = {*RESERVED, *(name for op in job.ops for name in registry.names(op))}
    if job.algorithm not in known:
        raise UsageError(
            f"--algorithm is {job.algorithm!r}, which is no algorithm of {', '.join(job.ops)}; "
            f"one of {', '.join(sorted(known))} is needed"
        )
    _check_rooted(args, job)
    fixed = [op for op, entry in entries.items() if not entry.repeats]
    if job.form != "single" and fixed:
        raise UsageError(
            f"--{job.form} is given with {fixed[0]}, whose results are not the same on all ranks "
            "and so cannot feed the next call; an op that can is needed: leave one of them out"
        )


def _check_rooted(args: argparse.Namespace, job: Job) -> None:
    fewest = min(_devices(args))
    if job.root >= fewest:
        raise UsageError(
            f"-r/--root is {job.root} with --devices {args.devices}; a rank of every group, 0 to "
            f"{fewest - 1}, is needed: lower it, or use more devices"
        )


def _check_outputs(args: argparse.Namespace) -> None:
    for name in ("json", "markdown"):
        check_output(f"--{name}", getattr(args, name))
    check_plot(args.plot)


def check_output(flag: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """A file that cannot be written must be known before the work, not after it."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        given = path.suffix or "no suffix"
        raise UsageError(f"{flag} is {path}, with {given}; one of {', '.join(suffixes)} is needed")
    if not rows.can_write(path):
        raise UsageError(
            f"{flag} is {path}, which cannot be written; a file name in an existing, writable "
            "directory is needed: create the directory, or name another"
        )


def check_plot(path: Path | None) -> None:
    check_output("--plot", path, (".png", ".svg", ".pdf"))
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot is {path}, but matplotlib is not installed; it is needed to draw: "
            "pip install 'jcoll[bench]', or use --json"
        )
