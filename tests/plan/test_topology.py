"""Topologies: presets, files, and what is said about wrong ones."""

import json

import numpy as np
import pytest

from jcoll.plan.topology import PRESETS, Link, Topology, TopologyError, flat
from jcoll.plan.topology_file import get, load

GOOD = """\
# beta = 3 here is a comment
name = "two racks"
gamma = 1e-12

[[links]]
name = "nvlink"
ranks = 8
alpha = 2e-6
beta = 2.2e-12

[[links]]
name = "nic"
alpha = 4e-6
beta = 8e-11
ranks_per_port = 8
gap = 5e-7
"""
AS_DATA = {
    "name": "two racks",
    "gamma": 1e-12,
    "links": [
        {"name": "nvlink", "ranks": 8, "alpha": 2e-6, "beta": 2.2e-12},
        {"name": "nic", "alpha": 4e-6, "beta": 8e-11, "ranks_per_port": 8, "gap": 5e-7},
    ],
}


def written(tmp_path, text, name="mine.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def error_of(path):
    with pytest.raises(TopologyError) as caught:
        load(path)
    return str(caught.value)


def test_toml_and_json_say_the_same(tmp_path):
    toml = load(written(tmp_path, GOOD))
    assert toml == load(written(tmp_path, json.dumps(AS_DATA), "mine.json"))
    assert toml.links[1] == Link("nic", 4e-6, 8e-11, ranks_per_port=8, gap=5e-7)
    assert (toml.name, toml.gamma) == ("two racks", 1e-12)


def test_the_name_is_the_files_by_default(tmp_path):
    path = written(tmp_path, '[[links]]\nname = "x"\nalpha = 0\nbeta = 0\n', "lab.toml")
    assert load(path).name == "lab"


@pytest.mark.parametrize(
    ("old", "new", "line", "needed"),
    [
        ("beta = 8e-11", "beta = -1", 14, "links[1].beta: a number of seconds, 0 or more"),
        ("beta = 2.2e-12", 'beta = "fast"', 9, "links[0].beta: a number of seconds"),
        ("beta = 2.2e-12", "beta = nan", 9, "not nan"),
        ("alpha = 4e-6", "alpha = true", 13, "links[1].alpha: a number of seconds"),
        ("gap = 5e-7", "gap = inf", 16, "links[1].gap: a number of seconds"),
        ("gamma = 1e-12", "gamma = []", 3, "gamma: a number of seconds"),
        ("beta = 8e-11", "beta = 1e300", 14, "(at most 1099511627776), is needed, not 1e+300"),
        ("gap = 5e-7", f"gap = 1{'0' * 400}", 16, "is needed, not a number of 1329 bits"),
        ("ranks = 8", f"ranks = 8{'0' * 30}", 7, "links[0].ranks: a whole number is needed"),
        ("ranks_per_port = 8", f"ranks_per_port = 8{'0' * 30}", 15, "a whole number of ranks"),
        ("ranks = 8", "ranks = 0", 7, "links[0].ranks: a whole number is needed"),
        ("ranks = 8", "ranks = 2.5", 7, "links[0].ranks: a whole number is needed"),
        ("ranks = 8\n", "", 6, "links[0].ranks: a whole number is needed in all link classes but"),
        ("gap = 5e-7", "ranks = 8", 16, 'links[1].ranks: "all" (or nothing) is needed in the last'),
        ("ranks_per_port = 8", "ranks_per_port = 0", 15, "links[1].ranks_per_port: a whole number"),
        ("ranks = 8", "ranks = 8\nranks_per_port = 3", 8, "a divisor of ranks = 8 is needed"),
        ("alpha = 4e-6\n", "", 12, "links[1].alpha: is missing"),
        ("gap = 5e-7", "bandwidth = 3", 16, "links[1].bandwidth: no such field; there are name,"),
        ('name = "nic"', "name = 3", 12, "links[1].name: a text is needed, not 3"),
        ("gamma = 1e-12", "delta = 1", 3, "delta: no such field; there are name, links, gamma."),
        ("gamma = 1e-12", "gamma = ", 3, "not TOML: Invalid value"),
    ],
)
def test_wrong_toml(tmp_path, old, new, line, needed):
    path = written(tmp_path, GOOD.replace(old, new))
    text = error_of(path)
    assert text.startswith(f"{path}:{line}: "), text
    assert needed in text


@pytest.mark.parametrize(
    ("change", "field", "indent"),
    [
        ({"alpha": -1}, "links[1].alpha", 2),
        ({"ranks_per_port": "one"}, "links[1].ranks_per_port", 2),
        ({"alpha": -1}, "links[1].alpha", None),
    ],
)
def test_wrong_json(tmp_path, change, field, indent):
    data = AS_DATA | {"links": [AS_DATA["links"][0], AS_DATA["links"][1] | change]}
    text = json.dumps(data, indent=indent)
    lines = text.splitlines()
    wrong = [i for i, line in enumerate(lines, 1) if f'"{next(iter(change))}"' in line][-1]
    path = written(tmp_path, text, "mine.json")
    assert error_of(path).startswith(f"{path}:{wrong}: {field}: ")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("[1]", "an object with name, gamma and links is needed"),
        ("{}", "links: is missing"),
        ('{"links": []}', "links: at least one link class is needed"),
        ('{"links": [3]}', "links: a list with an object for each link class is needed"),
        ('{"links": [{}]}', "links[0].name: is missing"),
        ('{\n"links": [}', ":2: not JSON: Expecting value"),
        ('{"name": 3, "links": [{"name": "a", "alpha": 0, "beta": 0}]}', "name: a text is needed"),
    ],
)
def test_no_topology_at_all(tmp_path, text, needed):
    assert needed in error_of(written(tmp_path, text, "mine.json"))


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"gamma": 1{"0" * 5000}}}'])
def test_what_cannot_be_read(tmp_path, text):
    path = written(tmp_path, text, "mine.json")
    assert error_of(path).startswith(f"{path}: cannot be read: ")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    assert load(written(tmp_path, f"\ufeff{GOOD}")) == load(written(tmp_path, GOOD))


def test_no_line_is_better_than_a_wrong_one(tmp_path):
    links = [AS_DATA["links"][0], AS_DATA["links"][1] | {"name": 3}]
    path = written(tmp_path, json.dumps({"links": links, "name": "x"}, indent=1), "mine.json")
    assert error_of(path).startswith(f"{path}: links[1].name: ")


def test_get(tmp_path):
    assert get("pcie") is PRESETS["pcie"]
    assert get(written(tmp_path, GOOD)).name == "two racks"
    with pytest.raises(TopologyError, match=r"'fast'.*no such preset or file.\n  One of nvswitch,"):
        get("fast")


def test_wrong_arguments():
    near, far = Link("near", 0, 0, ranks=8), Link("far", 0, 0)
    with pytest.raises(TopologyError, match=r"topology 'x': links: at least one"):
        Topology("x", ())
    with pytest.raises(TopologyError, match=r"links\[1\].ranks: a multiple of the 8 ranks"):
        Topology("x", (near, Link("mid", 0, 0, ranks=12), far))
    with pytest.raises(TopologyError, match=r"links\[0\].alpha"):
        flat(float("nan"), 1)


def test_levels_and_ports():
    topology = Topology(
        "racks",
        (
            Link("chip", 0, 0, ranks=2, ranks_per_port="all"),
            Link("host", 0, 0, ranks=4),
            Link("net", 0, 0, ranks_per_port=4),
        ),
    )
    other = np.arange(8)
    assert topology.level(np.int64(1), other).tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert topology.num_ports(8) == [4, 8, 2]
    assert topology.num_ports(5) == [3, 5, 2]


@pytest.mark.parametrize("topology", PRESETS.values(), ids=lambda t: t.name)
def test_presets_tell_what_they_are(topology):
    text = topology.describe()
    assert text.startswith(f"{topology.name}: ")
    assert all(link.name in text for link in topology.links)
    assert PRESETS[topology.name] is topology
