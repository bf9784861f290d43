"""That the check of nvcc's output finds what it is for, on recorded output of cuobjdump 13.5."""

from pathlib import Path

import project_scripts
import pytest

ROOT = Path(__file__).resolve().parent.parent
check = project_scripts.load("check_cuda_build")

SYMBOL = "_ZN5jcoll3gpu45_GLOBAL__N__5541dbac_12_broadcast_cu_370f1f029BroadcastENS0_4ArgsE"
RESOURCES = f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]
host = linux
compile_size = 64bit

Resource usage:
 Common:
  GLOBAL:0
 Function {SYMBOL}:
  REG:64 STACK:0 SHARED:0 LOCAL:0 CONSTANT[2]:24 CONSTANT[0]:2928 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin ptx code:
================
arch = sm_100
code version = [9,0]
host = linux
compile_size = 64bit
compressed
ptxasOptions =  --fmad false

Fatbin elf code:
================
arch = sm_100
code version = [1,8]
host = linux
compile_size = 64bit

Resource usage:
 Common:
  GLOBAL:0
 Function {SYMBOL}:
  REG:78 STACK:16 SHARED:8 LOCAL:0 CONSTANT[2]:24 CONSTANT[0]:3472 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

	code for sm_80
		Function : {SYMBOL}
        /*e110*/                   LDG.E.128 R16, [R16.64] ;      /* 0x0000000610107981 */
        /*e400*/                   STG.E.128 [R36.64], R24 ;      /* 0x0000001824007986 */

Fatbin elf code:
================
arch = sm_100
code version = [1,8]

	code for sm_100
		Function : {SYMBOL}
        /*e110*/                   LDG.E.128 R16, desc[UR4][R16.64] ;
        /*e400*/                   STG.E.64 desc[UR4][R36.64], R24 ;
"""


@pytest.fixture
def instances():
    found = check.parse_resources(RESOURCES.splitlines())
    check.add_accesses(SASS.splitlines(), found)
    return found


def test_reads_what_each_kernel_uses(instances):
    old, new = instances["sm_80", SYMBOL], instances["sm_100", SYMBOL]
    assert (old.kernel, old.registers, old.shared, old.stack) == ("Broadcast", 64, 0, 0)
    assert (new.registers, new.shared, new.stack) == (78, 8, 16)
    assert old.accesses == {"LDG.E.128", "STG.E.128"}


def test_table_has_the_most_of_all_instances(instances):
    rows = list(check.table([*instances.values(), check.Instance("8BarrierE", "sm_80", 99)]))
    assert rows[0] == "| kernel | instances | sm_80 | sm_100 | shared bytes | stack bytes |"
    assert "| Broadcast | 1 | 64 | 78 | 8 | 16 |" in rows
    assert "| Barrier | 1 | 99 | 0 | 0 | 0 |" in rows


def test_finds_stacks_and_narrow_accesses(instances):
    of_old = [p for p in check.problems(instances.values()) if "for sm_80" in p]
    of_new = [p for p in check.problems(instances.values()) if "for sm_100" in p]
    assert of_old == []
    assert any("16 bytes of stack" in p for p in of_new)
    assert any(r"no STG\.E\.128" in p for p in of_new)
    assert not any(r"no LDG\.E\.128" in p for p in of_new)


def test_finds_kernels_that_are_missing_or_not_known(instances):
    assert "PlanLL: is not in the library" in check.problems(instances.values())
    assert "Broadcast: is not in the library" not in check.problems(instances.values())
    of_one = [i for i in instances.values() if i.arch == "sm_80"]
    of_one.append(check.Instance("_ZN5jcoll3gpu3_N15RaggedAllToAllIlEEvNS0_4ArgsE", "sm_100"))
    assert "Broadcast: is not in the library for sm_100" in check.problems(of_one)
    assert "PlanLL: is not in the library" in check.problems([])
    unknown = check.Instance("_ZN5jcoll3gpu7ScatterENS0_4ArgsE", "sm_80")
    assert any("is not in ACCESSES" in p for p in check.problems([unknown]))


def test_multimem_is_checked_where_the_gpu_has_it():
    symbol = "_ZN5jcoll3gpu24AllReduceMultimemOneShotIfNS0_3SumEEEvNS0_4ArgsE"
    of = {arch: check.Instance(symbol, arch) for arch in ("sm_80", "sm_90a")}
    found = [p for p in check.problems(of.values()) if "LDGMC" in p]
    assert len(found) == 1 and "for sm_90a" in found[0]


@pytest.mark.parametrize(
    ("symbol", "kernel"),
    [
        ("_ZN5jcoll3gpu3_N18AllReduceOneShotLLI6FloatENS0_4ArgsE", "AllReduceOneShotLL"),
        ("_ZN5jcoll3gpu3_N16AllReduceOneShotIfNS0_3SumEEEvNS0_4ArgsE", "AllReduceOneShot"),
        ("_ZN5jcoll3gpu3_N15RaggedAllToAllIlEEvNS0_4ArgsE", "RaggedAllToAll"),
        ("_ZN5jcoll3gpu3_N8AllToAllENS0_4ArgsE", "AllToAll"),
    ],
)
def test_kernel_of_a_symbol(symbol, kernel):
    assert check.Instance(symbol, "sm_80").kernel == kernel


def test_each_kernel_of_the_sources_is_known():
    text = "".join(path.read_text() for path in (ROOT / "cuda" / "kernels").glob("*.cu"))
    for kernel in check.ACCESSES:
        assert f"{kernel}(const __grid_constant__ Args args)" in text
    assert text.count("__grid_constant__ Args args)") == len(check.ACCESSES)


def test_tools_of_the_system_are_left_as_they_are(monkeypatch, tmp_path):
    """They are not ours to change: as a rule, not even permitted."""
    for name in ("cuobjdump", "nvdisasm"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho $1\n")
        tool.chmod(0o555)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list(check.dump("--dump-sass", "a.so")) == ["--dump-sass\n"]
    assert (tmp_path / "nvdisasm").stat().st_mode & 0o777 == 0o555
