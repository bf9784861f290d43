"""`python -m jcoll plan`, in this process: what it prints, writes and refuses."""

import json

import numpy as np
import pytest

from jcoll import cli
from jcoll.algorithms import registry
from jcoll.algorithms.hierarchical import hierarchical
from jcoll.cli_plan import arguments, comparison
from jcoll.plan.simulate import simulate
from jcoll.plan.topology import PRESETS

GOOD_MODULE = """\
from jcoll.algorithms import algorithm

@algorithm("mine_for_test", op="all_gather")
def all_gather(p):
    for k in range(1, p.num_ranks):
        p.send(p.ranks, (p.ranks + k) % p.num_ranks, chunk=p.ranks)
"""
WRONG_MODULE = """\
from jcoll.algorithms import algorithm

@algorithm("wrong_for_test", op="all_reduce")
def all_reduce(p):
    for k in range(1, p.num_ranks):
        p.send(p.ranks, (p.ranks + 1) % p.num_ranks, reduce=True)

@algorithm("raises_for_test", op="all_reduce")
def other(p):
    if p.num_ranks > 2:
        p.send(0, p.num_ranks)
"""


@pytest.fixture
def run(capsys):
    def run(*argv, status=0):
        assert cli.main(["plan", *map(str, argv)]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    def refused(*argv):
        with pytest.raises(SystemExit) as caught:
            cli.main(["plan", *map(str, argv)])
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return refused


def module(tmp_path, text):
    path = tmp_path / "user.py"
    path.write_text(text)
    return path


# -- show and draw ---------------------------------------------------------------------------------


def test_show(run):
    out = run("show", "all_reduce", "ring", "-n", 4)
    assert out.startswith("ring all_reduce of 4 ranks: 6 rounds")
    assert "rank 3: 12 steps" in out


def test_show_one_rank(run):
    out = run("show", "broadcast", "binomial", "-n", 4, "--root", 1, "--rank", 1).splitlines()
    assert out[0].startswith("binomial broadcast of 4 ranks: rank 1, ")
    assert "send input[0] to " in out[1]


def test_show_all(run):
    short = run("show", "all_gather", "ring", "-n", 64)
    assert "more ranks" in short and "more steps" in short
    full = run("show", "all_gather", "ring", "-n", 64, "--all")
    assert "more" not in full and "rank 33: " in full


def test_draw(run, tmp_path):
    path = tmp_path / "plan.svg"
    assert f"wrote {path}: " in run("draw", "all_reduce", "halving_doubling", "-n", 8, "-o", path)
    assert path.read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["all_reduce", "ring", "-n", "0"], "-n/--ranks is '0'; a number of ranks from 1"),
        (["all_reduce", "ring", "-n", "eight"], "-n/--ranks is 'eight'"),
        (["everything", "ring", "-n", "4"], "OP 'everything' is not an op with plans; needed"),
        (["all_reduce", "rong", "-n", "4"], "'rong' is not an algorithm of all_reduce; needed is"),
        (["all_to_all", "ring", "-n", "4"], "'ring' is not an algorithm of all_to_all; needed is"),
        (["all_reduce", "hierarchical", "-n", "5"], "cannot serve 5 ranks"),
        (["all_reduce", "ring", "-n", "4", "-r", "4"], "-r/--root is '4'; a rank from 0 to 3"),
        (["all_reduce", "ring", "-n", "4", "--rank", "9"], "--rank is '9'; a rank from 0 to 3"),
        (["all_reduce", "ring", "-n", "4096"], "more than 4,000,000 steps, which are not kept"),
        (["all_reduce", "ring"], "required: -n/--ranks"),
        (["all_reduce", "ring", "-n", "4", "--fast"], "unknown: --fast"),
    ],
)
def test_show_refuses(refused, argv, needed):
    assert needed in refused("show", *argv)


@pytest.mark.parametrize(
    ("name", "needed"),
    [("x.png", "one of .svg is needed"), ("x", "no suffix"), ("none/x.svg", "cannot be written")],
)
def test_draw_refuses(refused, tmp_path, name, needed):
    assert needed in refused("draw", "all_reduce", "ring", "-n", 2, "-o", tmp_path / name)


# -- verify ----------------------------------------------------------------------------------------


def test_verify_one(run):
    out = run("verify", "all_reduce", "ring", "-n", "1..5,8").splitlines()
    assert out[1].split() == ["all_reduce", "ring", "6", "14", "1.75", out[1].split()[5], "1..5,8"]
    assert out[-1] == "6 plans, all proved."


def test_verify_all(run):
    out = run("verify", "-n", "1..5")
    for a in registry.all_algorithms():
        assert f"{a.op:<15} {a.name} " in out


def test_verify_tries_three_roots_or_the_one_given(run):
    assert "3 plans" in run("verify", "broadcast", "binomial", "-n", 8)
    assert "1 plans" in run("verify", "broadcast", "binomial", "-n", 8, "-r", 5)


def test_verify_tells_what_is_wrong(run, tmp_path):
    path = module(tmp_path, WRONG_MODULE)
    out = run("verify", "--module", path, "-n", "1..4", "all_reduce", "wrong_for_test", status=1)
    assert "WRONG, see below; right: 1..2" in out
    assert "wrong_for_test all_reduce of 3 ranks: rank " in out
    out = run("verify", "--module", path, "-n", "2,3", "all_reduce", "raises_for_test", status=1)
    assert "raises_for_test all_reduce: dst=3 is not a rank of 3." in out


def test_verify_tells_which_ranks_are_not_served(run):
    served = registry.Algorithm(
        "even_for_test", "all_reduce", lambda p: None, lambda n: 1, unsupported=lambda n: "not 1"
    )
    registry.register(served)
    out = run("verify", "all_reduce", "even_for_test", "-n", "2..4", status=1)
    assert "none; not for 2..4" in out
    assert "No plan was proved" in out and "all proved" not in out


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["-n", "4..2"], "the smaller number is needed first"),
        (["-n", "4,,5"], "-n/--ranks is ''"),
        (["-n", "9" * 5000], "a number of ranks from 1 to"),
        (["-n", "2,4", "-r", "2"], "-r/--root is '2'; a rank from 0 to 1"),
        (["all_gather", "ring", "-n", "4096"], "steps, which are not kept"),
        (["--module", "/nonexistent.py"], "an existing .py file is needed"),
    ],
)
def test_verify_refuses(refused, argv, needed):
    assert needed in refused("verify", *argv)


def test_counts_are_spelt_as_they_are_read():
    text = "1..17,32,64"
    assert arguments.spell_counts(arguments.counts("-n", text)) == text


# -- simulate --------------------------------------------------------------------------------------


def test_simulate(run):
    flags = ["-t", "ethernet", "-e", "64M", "-f", 4, "-a", "ring,butterfly"]
    lines = run("simulate", "all_reduce", "-n", 16, *flags).splitlines()
    assert lines[0].startswith(
        "all_reduce of 16 ranks, simulated on ethernet: ethernet 20 us, 3.13"
    )
    assert lines[2].split() == ["size", "ring", "butterfly"]
    sizes = [line.split()[0] for line in lines[3:12]]
    assert ",".join(sizes) == "1K,4K,16K,64K,256K,1M,4M,16M,64M"
    assert lines[3].count("*") == 1 and lines[3].endswith("*")
    assert lines[13].startswith("1K to ") and lines[13].endswith("butterfly")
    assert lines[14].endswith(" to 64M: ring")


def test_simulate_as_json(run):
    out = run("simulate", "broadcast", "-n", 8, "-r", 3, "-t", "ethernet", "-e", "1M", "--json")
    data = json.loads(out)
    assert (data["op"], data["num_ranks"], data["topology"]) == ("broadcast", 8, "ethernet")
    assert set(data["seconds"]) == set(registry.supporting("broadcast", 8))
    assert len(data["seconds"]["binomial"]) == len(data["sizes"]) == 11
    assert data["best"][0]["from"] == 1024 and data["best"][-1]["to"] == 1 << 20


def test_simulate_with_ones_own_topology_and_algorithm(run, tmp_path):
    topology = tmp_path / "lab.toml"
    topology.write_text('[[links]]\nname = "wire"\nalpha = 1.0\nbeta = 0\n')
    argv = ["-t", topology, "--module", module(tmp_path, GOOD_MODULE), "-a", "mine_for_test,ring"]
    data = json.loads(run("simulate", "all_gather", "-n", 5, *argv, "--json"))
    assert data["topology"] == "lab"
    assert data["seconds"]["mine_for_test"] == pytest.approx([4.0] * 21)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_simulate_plots(run, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"times{suffix}"
    out = run("simulate", "all_reduce", "-n", 8, "-f", 64, "--plot", path)
    assert out.endswith(f"\nwrote {path}\n")
    assert path.stat().st_size > 5000
    json.loads(run("simulate", "all_reduce", "-n", 8, "-f", 64, "--plot", path, "--json"))


@pytest.mark.parametrize(
    ("topology", "num_ranks", "num_local"),
    [
        ("nvswitch", 256, 8),
        ("pcie", 256, 8),
        ("nvswitch", 24, 8),
        ("nvswitch", 8, None),
        ("ethernet", 256, None),
        ("cpu_host", 16, None),
    ],
)
def test_simulated_hierarchy_is_that_of_the_machine(run, topology, num_ranks, num_local):
    argv = ["-n", num_ranks, "-t", topology, "-b", "1M", "-e", "1M", "-a", "hierarchical"]
    data = json.loads(run("simulate", "all_reduce", *argv, "--json"))
    a = hierarchical("all_reduce", num_local=num_local)
    seconds = simulate(a, num_ranks, np.array([1 << 20]), PRESETS[topology])
    assert data["seconds"]["hierarchical"] == seconds.tolist()
    line = "hierarchical: in groups of 8 ranks"
    assert (line in run("simulate", "all_reduce", *argv)) == (num_local is not None)


def test_simulated_hierarchy_needs_whole_hosts(run):
    argv = ["simulate", "all_gather", "-n", "12", "-e", "1K"]
    assert "left out: hierarchical: they do not divide into hosts of 8" in run(*argv)


def test_simulate_says_what_is_left_out(run):
    left_out = registry.Algorithm(
        "odd_for_test", "reduce", lambda p: None, lambda n: 1, unsupported=lambda n: "8 is even"
    )
    registry.register(left_out)
    assert "left out: odd_for_test: 8 is even" in run("simulate", "reduce", "-n", 8, "-f", 64)


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        (["-t", "moon"], "no such preset or file.\n  One of nvswitch,"),
        (["-b", "1T"], "-b/--begin: '1T' is not a size"),
        (["-b", "2M", "-e", "1M"], "needed is 0 < begin <= end"),
        (["-e", "99999999999999999999G"], "-e/--end: '99999999999999999999G' is not a size"),
        (["-f", "1"], "-f/--factor is 1; at least 2"),
        (["-a", "ring,rong"], "'rong' is not an algorithm of all_reduce"),
        (["--plot", "x.txt"], "one of .png, .svg, .pdf is needed"),
    ],
)
def test_simulate_refuses(refused, argv, needed):
    assert needed in refused("simulate", "all_reduce", "-n", 8, *argv)


def test_simulate_shows_the_line_of_a_wrong_topology(refused, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text('[[links]]\nname = "wire"\nalpha = -1\nbeta = 0\n')
    assert f"{path}:3: links[0].alpha: " in refused("simulate", "reduce", "-n", 8, "-t", path)


def test_who_cannot_say_what_it_serves_is_not_proved(tmp_path, capsys):
    text = """
from jcoll.algorithms import algorithm

@algorithm("asks_for_test", op="all_reduce", unsupported=lambda n: None if n % 2 == 0 else missing)
def asks(p): pass
"""
    argv = ["plan", "verify", "--module", module(tmp_path, text), "all_reduce", "asks_for_test"]
    assert cli.main([*map(str, argv), "-n", "3,5"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "of 3 ranks: its function `unsupported` failed, NameError" in out


def test_nothing_to_prove_is_not_proved(capsys):
    assert cli.main(["plan", "verify", "all_reduce", "hierarchical", "-n", "7"]) == 1
    assert "No plan was proved" in capsys.readouterr().out


def test_output_is_replaced_whole(tmp_path, capsys):
    """Also where it is read only, as what can_write has tried."""
    path = tmp_path / "p.svg"
    path.write_text("old")
    path.chmod(0o444)
    assert cli.main(["plan", "draw", "all_reduce", "ring", "-n", "4", "-o", str(path)]) == 0
    assert path.read_text().lstrip().startswith("<")
    loop = tmp_path / "loop.svg"
    loop.symlink_to("loop.svg")
    with pytest.raises(SystemExit):
        cli.main(["plan", "draw", "all_reduce", "ring", "-n", "4", "-o", str(loop)])
    assert "cannot be written" in capsys.readouterr().err


def test_a_module_that_fails_is_named_with_its_line(refused, tmp_path):
    path = module(tmp_path, "x = 1\nraise KeyError('no')\n")
    text = refused("simulate", "all_reduce", "-n", 8, "--module", path)
    assert f"--module: {path}:2: KeyError: 'no'" in text


def test_a_module_that_exits_is_named_too(refused, tmp_path, monkeypatch):
    module(tmp_path, "import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    text = refused("simulate", "all_reduce", "-n", 8, "--module", "user.py")
    assert "--module: user.py:2: SystemExit: 0" in text


@pytest.mark.parametrize("action", [["show"], ["draw", "-o", "plan.svg"]])
def test_an_algorithm_that_fails_is_named_with_its_line(capsys, tmp_path, monkeypatch, action):
    path = module(tmp_path, WRONG_MODULE.replace("p.send(0, p.num_ranks)", "p.ranks[p.num_ranks]"))
    monkeypatch.chdir(tmp_path)
    argv = [*action, "all_reduce", "raises_for_test", "-n", "3", "--module", str(path)]
    assert cli.main(["plan", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"raises_for_test all_reduce of 3 ranks: IndexError at {path}:11: " in err


def test_too_little_memory_is_told(refused, monkeypatch):
    def build(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(registry, "builder_for", build)
    text = refused("show", "all_reduce", "ring", "-n", 60000)
    assert "-n/--ranks is 60000; more memory than there is would be needed: lower it" in text


def test_crossovers():
    found = comparison.crossovers([1, 2, 4, 8], ["a", "a", "b", "a"])
    assert found == [(1, 2, "a"), (4, 4, "b"), (8, 8, "a")]


def test_a_span_of_one_size_is_one_size(run):
    assert run("simulate", "reduce", "-n", 2, "-e", "1K", "-a", "tree").endswith("\n1K: tree\n")


def test_help_lists_the_catalogue(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    out = capsys.readouterr().out
    assert "all_reduce " in out and "ring" in out
