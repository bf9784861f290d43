"""Checks what nvcc made of the kernels, by cuobjdump: `check_cuda_build.py LIBRARY`.

No kernel may have a stack: there spilled registers lie, and arrays that the compiler could not
keep in registers. And where cuda/kernels moves 16 bytes at once, so must the machine code (SASS) of
every instance. Prints what each kernel uses, by architecture. Exit status: 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# What the SASS of each kernel's every instance must have.
_VECTORS = (r"LDG\.E\.128", r"STG\.E\.128")
_LINES = (r"LDG\.E\.128\.STRONG\.SYS", r"STG\.E\.128\.STRONG\.SYS")
# Loads that the switch reduces; how wide they can be depends on the type (F16x8, F32x4, 64).
_MULTIMEM_LOADS = (r"LDGMC\.E\.",)
ACCESSES = {
    "AllGather": _VECTORS,
    "AllReduceMultimemOneShot": _MULTIMEM_LOADS,
    "AllReduceMultimemTwoShot": _MULTIMEM_LOADS,
    "AllReduceOneShot": _VECTORS,
    "AllReduceOneShotLL": _LINES,
    "AllReduceTwoShot": _VECTORS,
    "AllToAll": _VECTORS,
    "Barrier": (),
    "Broadcast": _VECTORS,
    "PlanLL": _LINES,
    "PlanSimple": _VECTORS,
    "RaggedAllToAll": _VECTORS,
    "ReduceScatter": _VECTORS,
}
# Kernels that older GPUs cannot run, and what is compiled for these in their place is empty.
NEEDS_ARCH = {"AllReduceMultimemOneShot": 90, "AllReduceMultimemTwoShot": 90}

_NAME = re.compile(r"(?<=\d)(" + "|".join(sorted(ACCESSES, key=len, reverse=True)) + r")(?=I|E)")


@dataclass
class Instance:
    """One instance of a kernel for one architecture."""

    symbol: str
    arch: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    accesses: set[str] = field(default_factory=set)

    @property
    def kernel(self) -> str:
        found = _NAME.search(self.symbol)
        return found.group(1) if found else "?"


Instances = dict[tuple[str, str], Instance]


def parse_resources(lines: Iterable[str]) -> Instances:
    """What `cuobjdump --dump-resource-usage` prints."""
    found: Instances = {}
    arch = symbol = ""
    for line in lines:
        if match := re.match(r"arch = (\S+)", line):
            arch = match.group(1)
        elif match := re.match(r" Function (\S+):$", line):
            symbol = match.group(1)
        elif symbol and (numbers := dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line))):
            stack = int(numbers["STACK"]) + int(numbers["LOCAL"])
            registers, shared = int(numbers["REG"]), int(numbers["SHARED"])
            found[arch, symbol] = Instance(symbol, arch, registers, shared, stack)
            symbol = ""
    return found


def add_accesses(lines: Iterable[str], instances: Instances) -> None:
    """Notes the wide accesses and the multicast loads of what `cuobjdump --dump-sass` prints."""
    arch = ""
    accesses: set[str] = set()
    for line in lines:
        if ".128" in line or "LDGMC" in line:
            accesses.update(re.findall(r"\b(?:LDG|STG|LDGMC|LD|ST)\.[\w.]+", line))
        elif match := re.search(r"Function : (\S+)", line):
            accesses = instances[arch, match.group(1)].accesses
        elif match := re.match(r"arch = (\S+)", line):
            arch = match.group(1)


def problems(instances: Iterable[Instance]) -> Iterator[str]:
    """What is wrong, one line each."""
    archs: dict[str, set[str]] = {}
    for i in instances:
        where = f"{i.kernel} for {i.arch} ({i.symbol})"
        archs.setdefault(i.arch, set()).add(i.kernel)
        if i.kernel == "?":
            yield f"{where}: is not in ACCESSES of {Path(__file__).name}; add what it has to have"
            continue
        if i.stack:
            yield f"{where}: {i.stack} bytes of stack: registers spill, or an array is in memory"
        if _number(i.arch) < NEEDS_ARCH.get(i.kernel, 0):
            continue
        for pattern in ACCESSES[i.kernel]:
            if not any(re.match(pattern, access) for access in i.accesses):
                have = ", ".join(sorted(i.accesses)) or "no wide access"
                yield f"{where}: no {pattern}, which the design says; there is {have}"
    for kernel in sorted(ACCESSES):
        lacking = [arch for arch in sorted(archs, key=_number) if kernel not in archs[arch]]
        if len(lacking) == len(archs):
            yield f"{kernel}: is not in the library"
        elif lacking:
            yield f"{kernel}: is not in the library for {', '.join(lacking)}"


def table(instances: Iterable[Instance]) -> Iterator[str]:
    """Markdown: the most that any instance of a kernel uses, its registers by architecture."""
    kernels: dict[str, list[Instance]] = {}
    for i in instances:
        kernels.setdefault(i.kernel, []).append(i)
    archs = sorted({i.arch for group in kernels.values() for i in group}, key=_number)
    yield f"| kernel | instances | {' | '.join(archs)} | shared bytes | stack bytes |"
    yield "|---|" + "---:|" * (len(archs) + 3)
    for kernel, group in sorted(kernels.items()):
        registers = [max((i.registers for i in group if i.arch == a), default=0) for a in archs]
        shared, stack = max(i.shared for i in group), max(i.stack for i in group)
        numbers = [len({i.symbol for i in group}), *registers, shared, stack]
        yield f"| {kernel} | {' | '.join(map(str, numbers))} |"


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: PATH's, or those of NVIDIA's wheels (the extra 'cuda-tools')."""
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/cu*/bin/{name}"))
    return shutil.which(name) or (str(wheels[-1]) if wheels else None)


def dump(option: str, library: str) -> Iterator[str]:
    """The lines that cuobjdump prints. It looks for nvdisasm on PATH."""
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        sys.exit(
            "check_cuda_build.py: needs cuobjdump and nvdisasm, of the CUDA toolkit or of PyPI:\n"
            "  pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    for path in (cuobjdump, nvdisasm):
        if not os.access(path, os.X_OK):  # Wheels may lose the bit.
            Path(path).chmod(0o755)
    command = [cuobjdump, option, library]
    search = {"PATH": f"{Path(nvdisasm).parent}:/usr/bin:/bin"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=search) as child:
        assert child.stdout is not None
        yield from child.stdout
    if child.returncode:
        sys.exit(f"check_cuda_build.py: {' '.join(command)} failed (exit {child.returncode})")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", help="jcoll/_cuda*.so")
    args = parser.parse_args(argv)
    instances = parse_resources(dump("--dump-resource-usage", args.library))
    add_accesses(dump("--dump-sass", args.library), instances)
    print("\n".join(table(instances.values())))
    found = list(problems(instances.values()))
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(instances)} kernels, {len(found)} problems")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
