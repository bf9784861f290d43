"""Tables of costs: between the measured points, and files that are not what they should be."""

from __future__ import annotations

import json
import warnings

import pytest

from jcoll.algorithms import registry
from jcoll.plan.ops import OPS
from jcoll.tuning import table
from jcoll.tuning.candidates import PROCESS, PROCESSES, Request
from jcoll.tuning.select import select
from jcoll.tuning.table import Row, Table, TableError, merged, parse, to_text


def row(nbytes: int, us: dict[str, float], num_ranks: int = 4, op: str = "all_reduce") -> Row:
    return Row("process", op, num_ranks, nbytes, us)


def us_at(t: Table, nbytes: int, num_ranks: int = 4) -> dict[str, float]:
    return dict(t.find("process", "all_reduce", num_ranks, nbytes).us)


def test_between_points():
    t = Table("cpu", "", (row(1024, {"direct": 10.0}), row(16384, {"direct": 40.0})))
    assert us_at(t, 1024)["direct"] == 10.0
    assert us_at(t, 16384)["direct"] == pytest.approx(40.0)
    assert us_at(t, 4096)["direct"] == pytest.approx(20.0), "half way between the logarithms"
    assert us_at(t, 1)["direct"] == 10.0, "no less than the smallest"
    assert us_at(t, 32768)["direct"] == pytest.approx(80.0), "in proportion above the largest"


def test_nearest_number_of_ranks():
    rows = [row(1024, {"direct": float(n)}, num_ranks=n) for n in (2, 4, 16)]
    t = Table("cpu", "", tuple(rows))
    nearest = {n: t.find("process", "all_reduce", n, 1024).num_ranks for n in (1, 3, 6, 9, 100)}
    assert nearest == {1: 2, 3: 4, 6: 4, 9: 16, 100: 16}
    assert us_at(t, 1024, num_ranks=5) == {"direct": 4.0}


def test_never_measured():
    t = Table("cpu", "", (row(1024, {"direct": 1.0}),))
    assert t.find("processes", "all_reduce", 4, 1024) is None
    assert t.find("process", "all_gather", 4, 1024) is None


def test_text_and_back():
    rows = [row(4096, {"direct": 12.3456, "ring": 2.0}), row(1024, {"direct": 1.0, "xla": 1e-3})]
    t = parse(to_text("cpu", "a machine", rows, note="for people"))
    assert (t.device_kind, t.machine) == ("cpu", "a machine")
    assert t.rows == (rows[1], row(4096, {"direct": 12.35, "ring": 2.0}))


def test_merging():
    old = [row(1024, {"direct": 1.0}), row(2048, {"direct": 2.0})]
    new = [row(2048, {"ring": 3.0}), row(4096, {"direct": 4.0})]
    assert merged(old, new) == [old[0], *new]


GOOD = json.loads(to_text("cpu", "", [row(1024, {"direct": 10.0, "ring": 2.0})]))


def changed(**fields):
    return json.dumps(GOOD | fields)


def with_row(**fields):
    return changed(rows=[GOOD["rows"][0] | fields])


def test_unknown_fields_are_ignored():
    assert parse(changed(color="red")).rows == parse(with_row(color=["red"])).rows
    with_stranger = parse(with_row(us={"direct": 1.0, "no_such": 0.5}))
    assert with_stranger.rows[0].us["no_such"] == 0.5


DAMAGED = {
    "": "not JSON",
    '{"format": "jcoll-tu': "not JSON",
    "[" * 100_000: "not JSON",
    "[]": 'no "format"',
    '{"rows": []}': 'no "format"',
    changed(version=2): "version 2, this jcoll reads version 1",
    changed(rows={}): "rows a list",
    changed(device_kind=7): "device_kind",
    changed(rows=[3]): r"rows\[0\] is not an object",
    with_row(placement="moon"): r"rows\[0\].placement is 'moon'",
    with_row(op=None): r"rows\[0\].op is None",
    with_row(num_ranks=0): r"rows\[0\].num_ranks is 0",
    with_row(num_ranks=True): r"rows\[0\].num_ranks is True",
    with_row(num_ranks=10**12): r"rows\[0\].num_ranks is 1000000000000",
    with_row(nbytes=1.5): r"rows\[0\].nbytes is 1.5",
    with_row(us={}): r"rows\[0\].us is \{\}",
    with_row(us={"direct": -1}): r"rows\[0\].us",
    with_row(us={"direct": float("nan")}): r"rows\[0\].us",
    with_row(us={"direct": "1"}): r"rows\[0\].us",
}


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:30] or "empty")
def test_damaged(text):
    with pytest.raises(TableError, match=DAMAGED[text]):
        parse(text)


REQUEST = Request("all_reduce", (4,), 1024)


def test_own_file_decides(tmp_path, tuning_file):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    tuning_file(path)
    assert select(REQUEST).algorithm == "ring"
    assert table.own_digest() == parse(path.read_text()).digest != ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (changed(version=9).encode(), "version 9"),
        (changed(device_kind="gpu").encode(), "it is of 'gpu' devices"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_is_ignored_with_one_warning(tmp_path, tuning_file, content, reason):
    tuning_file("none")
    without = select(REQUEST)
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content)
    tuning_file(path)
    with pytest.warns(RuntimeWarning, match="is ignored") as caught:
        found = [select(Request("all_reduce", (4,), size)) for size in (1024, 2048)]
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert reason in str(caught[0].message)
    assert found[0] == without
    assert table.own_digest() == ""


def test_a_folder_is_no_file(tmp_path, tuning_file):
    tuning_file(tmp_path)
    with pytest.warns(RuntimeWarning, match="Is a directory"):
        select(REQUEST)


def test_the_cache_need_not_exist(tmp_path, tuning_file, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_file("")
    assert table.own_path() == tmp_path / "jcoll/tuning/cpu.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.own("cpu") is None
    table.own_path().parent.mkdir(parents=True)
    table.own_path().write_text(json.dumps(GOOD))
    table.own.cache_clear()
    assert table.own("cpu").rows == parse(json.dumps(GOOD)).rows


# What is shipped


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("placement", [PROCESS, PROCESSES])
def test_shipped(op, placement):
    t = table.shipped("cpu")
    for num_ranks in (2, 4) if placement == PROCESSES else (2, 4, 8):
        for nbytes in (1 << 10, 1 << 24):
            found = t.find(placement, op, num_ranks, nbytes)
            assert found.num_ranks == num_ranks
            assert set(found.us) >= {"direct", *registry.supporting(op, num_ranks)}
