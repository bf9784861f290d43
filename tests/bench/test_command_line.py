"""The flags of `python -m jcoll bench`: sizes, checks, jobs, the children's environment."""

import argparse
import itertools

import jax.numpy as jnp
import pytest

from jcoll import cli, sizes
from jcoll.bench import catalog, checks, options, spawn
from jcoll.bench.job import Job
from jcoll.comm.group import Groups
from jcoll.comm.mesh import Call
from jcoll.cores import num_cores
from jcoll.ops._reductions import canonical

DTYPES = ("bool", "int8", "uint32", "bfloat16", "float32", "float8_e4m3fn", "complex64")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.configure(parser)
    return parser.parse_args(argv)


def jobs(*argv: str) -> list[Job]:
    return checks.jobs(parsed(*argv))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    {
        "0": 0,
        "512": 512,
        "1K": 1024,
        "1k": 1024,
        "4KiB": 4096,
        "4KB": 4096,
        " 8 ": 8,
        "3B": 3,
    }.items(),
)
def test_parse_size(text, nbytes):
    assert sizes.parse_size(text) == nbytes


def test_parse_size_units():
    assert (sizes.parse_size("16M"), sizes.parse_size("2G")) == (2**24, 2**31)


@pytest.mark.parametrize(
    "text", ["", "K", "1T", "-1", "1.5K", "1 K", "0x10", "1e3", "1025G", "9" * 5000]
)
def test_parse_size_refuses(text):
    with pytest.raises(ValueError, match="is not a size"):
        sizes.parse_size(text)


def test_parse_count():
    texts = ("8", "", "-1", "²", "1.0", "9" * 5000)
    assert [sizes.parse_count(text) for text in texts] == [8, *[-1] * 5]


@pytest.mark.parametrize("nbytes", [0, 1, 1020, 1024, 1536, 2**20, 3 * 2**20, 2**30])
def test_format_size_is_exact(nbytes):
    assert sizes.parse_size(sizes.format_size(nbytes)) == nbytes


def test_sweep():
    assert sizes.sweep(1024, 20000, factor=4) == [1024, 4096, 16384]
    assert sizes.sweep(10, 40, step=15) == [10, 25, 40]
    assert sizes.sweep(8, 8) == [8]


def test_defaults():
    (job,) = jobs("all_reduce")
    assert job.sizes == tuple(1024 * 4**k for k in range(8))
    assert (job.num_ranks, job.malloc, job.form, job.redop) == (8, "default", "single", "sum")


def test_one_job_for_each_device_count_and_allocator():
    found = [
        (job.num_ranks, job.malloc)
        for job in jobs("all_gather", "--devices", "2,4", "--malloc", "both")
    ]
    assert found == [(2, "default"), (2, "reuse"), (4, "default"), (4, "reuse")]


def test_all_means_the_main_ops_and_commas_work():
    assert jobs("all")[0].ops == catalog.MAIN_OPS
    assert jobs("barrier,all_gather", "barrier")[0].ops == ("barrier", "all_gather")


def test_grid_fills_in_only_what_is_open():
    found = jobs("--grid", "-e", "4K")
    assert {job.num_ranks for job in found} == {2, 4, 8}
    assert {job.malloc for job in found} == {"default", "reuse"}
    assert {job.ops for job in found} == {catalog.MAIN_OPS}
    assert {job.sizes for job in found} == {(1024, 4096)}
    assert all(job.copy for job in found)
    assert [job.num_ranks for job in jobs("ppermute", "--grid", "--devices", "3")] == [3, 3]


def test_modes():
    for flags, mode in {
        ("--chain", "16"): "chain16",
        ("--loop", "9"): "loop9",
        (): "single",
    }.items():
        (job,) = jobs("all_reduce", *flags)
        assert {row.mode for row in job.blank_rows()} == {mode}


def test_job_survives_the_trip_to_the_child():
    (job,) = jobs("all", "-d", "float32,bfloat16", "--loop", "7", "-n", "3", "--copy")
    assert Job.from_json(job.to_json()) == job


def test_sizes_are_rounded_to_whole_blocks():
    (job,) = jobs("all_gather", "--devices", "3", "-b", "1", "-e", "1000", "-i", "333")
    assert [row.size for row in job.blank_rows()] == [12, 324, 660, 996]
    (job,) = jobs("all_gather", "--devices", "8", "-b", "1", "-e", "4", "-i", "1")
    assert [row.size for row in job.blank_rows()] == [32], "equal sizes make one row"


BAD = [
    ([], "no OP was given"),
    (["all_redcue"], "'all_redcue' is not an op"),
    (["all_reduce", "-b", "1X"], "-b/--begin: '1X' is not a size"),
    (["all_reduce", "-e", "lots"], "-e/--end: 'lots' is not a size"),
    (["all_reduce", "-b", "2M", "-e", "1M"], "0 < begin <= end"),
    (["all_reduce", "-b", "0"], "0 < begin <= end"),
    (["all_reduce", "-f", "1"], "-f/--factor is 1; at least 2"),
    (["all_reduce", "-i", "0"], "-i/--step is 0"),
    (["all_reduce", "-i", "1K", "-f", "2"], "leave the other out"),
    (["all_reduce", "--devices", "0"], "'0' is not a count"),
    (["all_reduce", "--devices", "2,x"], "'x' is not a count"),
    (["all_reduce", "--processes", "x"], "--processes: 'x' is not a count"),
    (["all_reduce", "--processes", "2", "--devices", "2"], "one of the two is needed"),
    (["all_reduce", "-d", "float31"], "'float31' is not a dtype"),
    (["all_gather", "-d", "object"], "'object' is not a dtype"),
    (["all_reduce", "-d", "bool"], "--op sum has no meaning for bool"),
    (["all_reduce", "-o", "and"], "bool or an integer dtype is needed"),
    (["all_reduce", "-o", "mean", "-d", "int32"], "a float or complex dtype is needed"),
    (["reduce_scatter", "-o", "max", "-d", "complex64"], "an ordered dtype is needed"),
    (["all_reduce", "-o", "avg"], "-o/--op is 'avg'"),
    (["all_gather", "-o", "max"], "reduces nothing"),
    (["broadcast", "-r", "4", "--devices", "8,4"], "0 to 3"),
    (["all_reduce", "-n", "0"], "-n/--iters is 0; at least 1"),
    (["all_reduce", "--loop", "0"], "--loop is 0; at least 1"),
    (["all_reduce", "--seconds", "nan"], "more than 0 seconds"),
    (["gather", "--chain", "2"], "--chain is given with gather"),
    (["all_reduce", "--json", "/no/such/folder/f.json"], "cannot be written"),
    (["all_reduce", "--json", "/proc/f.json"], "cannot be written"),
    (["all_reduce", "--plot", "f.bmp"], "--plot is f.bmp, with .bmp; one of .png, .svg, .pdf"),
    (
        ["all_reduce", "--algorithm", "rnig"],
        "--algorithm is 'rnig', which is no algorithm of all_reduce; one of auto, ",
    ),
    (
        ["all_to_all", "--algorithm", "tree"],
        "--algorithm is 'tree', which is no algorithm of all_to_all",
    ),
    (["all_reduce", "-d", "int4"], "'int4' has 4 bits"),
]


@pytest.mark.parametrize(("argv", "text"), BAD, ids=lambda value: str(value)[:40])
def test_bad_command_lines(argv, text, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *argv])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert text in err
    assert not out


def test_unknown_flag_and_command(capsys):
    for argv in (["bench", "all_reduce", "--frobnicate"], ["benhc"], []):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 2
        assert "See: python -m jcoll" in capsys.readouterr().err


def test_help_names_every_op_and_example(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {op} " in out for op in catalog.CATALOG)
    assert "python -m jcoll bench all_reduce -b 1K -e 16M -f 4 --devices 8" in out


def test_dtypes_agree_with_the_ops():
    """What is measured exists; what exists and is not measured changes the dtype."""
    for op, name in itertools.product(catalog.REDUCE_OPS, DTYPES):
        x = jnp.zeros(1, name)
        call = Call("all_reduce", ("x",), Groups(2), "auto", 0.0, "")
        try:
            _, _, is_mean = canonical(call, op, x)
            keeps = not is_mean and not (name == "bool" and op in ("sum", "prod"))
        except TypeError:
            keeps = False
        try:
            catalog.check_pair(op, name)
        except ValueError:
            assert not keeps, (op, name)
        else:
            assert keeps, (op, name)


def test_environment_of_a_child():
    base = {"XLA_FLAGS": "--xla_foo=1 --xla_force_host_platform_device_count=3", "HOME": "/h"}
    base |= {"MALLOC_TOP_PAD_": "1"}
    env = spawn.environment(base, 8, "default")
    assert env["XLA_FLAGS"].split() == [
        "--xla_foo=1",
        "--xla_force_host_platform_device_count=8",
    ]
    assert env["HOME"] == "/h"
    assert not [name for name in env if name.startswith("MALLOC_")]
    assert "NPROC" not in env
    shared = spawn.environment(base, 1, "default", 8)
    assert shared["NPROC"] == shared["JCOLL_NUM_THREADS"] == str(max(1, num_cores() // 8))
    assert shared["XLA_FLAGS"].endswith("device_count=1")
    theirs = spawn.environment(base | {"NPROC": "3"}, 1, "default", 8)
    assert theirs["NPROC"] == "3"
    reuse = spawn.environment(base, 8, "reuse")
    assert reuse["MALLOC_TOP_PAD_"] == "268435456"
    assert reuse["MALLOC_MMAP_THRESHOLD_"] == "33554432"
    assert reuse["MALLOC_TRIM_THRESHOLD_"] == "4294967296"
