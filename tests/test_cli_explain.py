"""`python -m jcoll explain`, in this process: what it prints and refuses."""

from __future__ import annotations

import dataclasses

import pytest

from jcoll import cli
from jcoll.comm import mesh
from jcoll.comm.group import Groups
from jcoll.tuning import select, table
from jcoll.tuning.candidates import PROCESS, PROCESSES


@pytest.fixture
def run(capsys):
    def run(*argv):
        assert cli.main(["explain", *argv]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def own_table(monkeypatch):
    """The user's: in one process "ring" is fastest, between processes "tree"."""
    rows = tuple(
        table.Row(placement, "all_reduce", 4, 1 << 20, {"direct": 100.0, fastest: 1.0})
        for placement, fastest in ((PROCESS, "ring"), (PROCESSES, "tree"))
    )
    monkeypatch.setattr(table, "own", lambda kind: table.Table("cpu", "test", rows))
    select.select.cache_clear()
    yield
    select.select.cache_clear()


def test_one_process(run):
    out = run("all_reduce", "--size", "4M", "--mesh", "host=2,local=4", "--axis", "local")
    head, chosen, blank, names, *rows = out.splitlines()
    assert head == "all_reduce of 4M (float32), 4 ranks, one process, on CPU"
    assert (blank, names.split()) == ("", ["algorithm", "us"])
    (star,) = [line for line in rows if line.startswith("*")]
    assert star.split()[1] == chosen.partition(":")[0]
    assert {line.lstrip("* ").split()[0] for line in rows} >= {"direct", "ring", "xla"}
    assert "measured, 4 ranks, shipped" in star


def test_other_dtypes_than_the_measured_one(run):
    flags = ["all_gather", "--size", "4K", "--mesh", "x=4"]
    note = "(costs are those of as many bytes of float32; int4 is not measured)\n"
    assert note in run(*flags, "--dtype", "int4")
    assert "costs are those of" not in run(*flags)


def test_algorithms_of_the_users(run, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from jcoll.algorithms import algorithm\n"
        "@algorithm('own_for_test', op='all_gather', unsupported=lambda n: 'it is full moon')\n"
        "def own(p): pass\n"
    )
    out = run("all_gather", "--size", "4K", "--mesh", "x=4", "--module", str(path))
    assert "own_for_test" in out and "it is full moon" in out


@pytest.mark.parametrize(
    ("axis", "processes", "where"),
    [
        ("local", "2", "4 ranks, one process"),
        ("local", "4", "4 ranks, several processes of one host"),
        ("host", "2", "2 ranks, several processes of one host"),
        ("host,local", "2", "8 ranks, several processes of one host"),
    ],
)
def test_where_the_ranks_are(run, axis, processes, where):
    flags = ["--mesh", "host=2,local=4", "--axis", axis, "--processes", processes]
    assert where in run("all_gather", "--size", "64K", *flags)


def test_several_hosts(run):
    flags = ["--size", "1M", "--mesh", "host=2,local=4", "--processes", "4", "--hosts", "2"]
    out = run("all_reduce", *flags)
    assert "8 ranks, several hosts" in out
    assert "\nhierarchical: its ranks are on several hosts\n" in out
    assert "one host" in run("all_reduce", *flags, "--axis", "local")
    assert "\nxla: its ranks are on several hosts, and this op" in run("broadcast", *flags)


def test_hosts_without_two_levels(run):
    """As the runtime has it, which the same function tells: one rank on each host."""
    flags = ["--size", "1M", "--mesh", "host=2,local=4", "--processes", "2", "--hosts", "2"]
    out = run("all_reduce", *flags, "--axis", "host")
    assert "2 ranks, several hosts" in out
    assert "\nxla: its ranks are on several hosts, one on each or not as many on each\n" in out
    assert "\n*  xla " in out and "\n*  hierarchical " not in out
    mesh = ["--size", "1M", "--mesh", "a=2,host=2,b=2", "--processes", "4", "--hosts", "4"]
    assert "not in equal runs of one host" in run("all_reduce", *mesh, "--axis", "b,a")


@pytest.mark.usefixtures("own_table")
def test_whose_table(run):
    """Within one process of a job the user's own decides nothing: the others may have another."""
    flags = ["all_reduce", "--size", "1M", "--mesh", "host=4,local=4", "--axis"]
    assert "\nring: " in run(*flags, "local")
    assert "\nring: " not in run(*flags, "local", "--processes", "4")
    assert "\ntree: " in run(*flags, "host", "--processes", "4")


def test_narrow(run):
    flags = ["--size", "1M", "--mesh", "d=8", "--dtype", "bfloat16"]
    assert "no: would round partial sums to 16 bits" in run("all_reduce", *flags)
    assert "no:" not in run("all_reduce", *flags, "--op", "max")
    assert "\ndirect: the only one that rounds once\n" in run("all_reduce", *flags, "--op", "mean")
    assert "no:" not in run("all_gather", *flags)


def test_configured(run, monkeypatch):
    monkeypatch.setattr(mesh, "config", dataclasses.replace(mesh.config, algorithm="ring"))
    out = run("all_reduce", "--size", "1M", "--mesh", "d=4")
    assert "\nring: JCOLL_ALGORITHM\n" in out
    assert "\n*  ring " in out
    hosts = ["--size", "1M", "--mesh", "d=4", "--processes", "4", "--hosts", "2"]
    assert "\nhierarchical: its ranks are" in run("all_reduce", *hosts)
    monkeypatch.setattr(mesh, "config", dataclasses.replace(mesh.config, algorithm="xla"))
    assert "\nxla: JCOLL_ALGORITHM\n" in run("all_reduce", *hosts)


def test_configured_wrongly(capsys, monkeypatch):
    monkeypatch.setattr(mesh, "config", dataclasses.replace(mesh.config, algorithm="rnig"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", "all_reduce", "--size", "1M", "--mesh", "d=4"])
    assert caught.value.code == 2
    assert "JCOLL_ALGORITHM='rnig' in the environment is not an algor" in capsys.readouterr().err


def test_configured_for_another_platform(run, monkeypatch):
    """One environment for all: what only CUDA has decides nothing here."""
    monkeypatch.setattr(mesh, "config", dataclasses.replace(mesh.config, algorithm="multimem"))
    assert "JCOLL_ALGORITHM" not in run("all_reduce", "--size", "1M", "--mesh", "d=4")
    assert "JCOLL_ALGORITHM" not in run("all_gather", "--size", "1M", "--mesh", "d=4")
    assert mesh.configured_algorithm("all_reduce", Groups(4)) == "multimem"
    assert mesh.configured_algorithm("all_gather", Groups(4)) == "auto"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["all_reduc", "--size", "1M", "--mesh", "d=4"], "OP is 'all_reduc'; needed is one of"),
        (["all_reduce", "--size", "1X", "--mesh", "d=4"], "'1X' is not a size"),
        (["all_reduce", "--size", "1M", "--mesh", "4"], "--mesh is '4'; axes with sizes"),
        (["all_reduce", "--size", "1M", "--mesh", "d=4,d=2"], "--mesh is 'd=4,d=2'"),
        (["all_reduce", "--size", "1M", "--mesh", "d=4", "--axis", "e"], "--axis has 'e'"),
        (["all_reduce", "--size", "1M", "--mesh", "d=4", "--dtype", "half"], "'half' is not a dty"),
        (["all_reduce", "--size", "1M", "--mesh", "d=4", "--op", "plus"], "--op is 'plus'"),
        (
            ["all_reduce", "--size", "1M", "--mesh", "d=4", "--dtype", "float128"],
            "'float128' is not a dtype",
        ),
        (["all_reduce", "--size", "1M", "--mesh", "d=4", "--processes", "3"], "a divisor of the"),
        (["all_reduce", "--size", "1M", "--mesh", "d=4", "--hosts", "2"], "--hosts is 2; a div"),
        (["all_reduce", "--mesh", "d=4"], "--size"),
        (
            ["all_reduce", "--size", "1M", "--mesh", "d=4", "--axis", "d,d"],
            "every axis is needed o",
        ),
        (["all_reduce", "--size", "9" * 20, "--mesh", "d=300"], "is not a size"),
        (["all_reduce", "--size", "1M", "--mesh", "d=4", "--op", "and"], "op='and' needs integers"),
        (["all_gather", "--size", "1M", "--mesh", "d=4", "--op", "max"], "all_gather does not red"),
    ],
)
def test_refused(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
