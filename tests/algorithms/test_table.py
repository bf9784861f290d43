from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from project_scripts import load

from jcoll.algorithms import table
from jcoll.algorithms.registry import names

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_committed_table_is_that_of_today():
    text = DOCS.read_text()
    assert text == table.update(text), "python -m jcoll.algorithms.table"


def test_every_algorithm_is_described():
    ours = [row for row in table._families().splitlines() if row.startswith("| [`")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in ours]
    assert {name.strip("[").split("`")[1] for name, *_ in cells} <= set(names())
    assert len(cells) >= 11
    assert all(all(row) for row in cells)
    assert ": ." not in table.markdown_table()  # A source for each.


def test_the_pictures_are_those_of_today():
    script = load("draw_algorithms")
    drawn, stored = script.plans(), {p.name for p in script.PICTURES.iterdir()}
    assert stored == {*drawn, script.CROSSOVERS}
    text = DOCS.read_text()
    for name in stored:
        assert f"](pictures/{name})" in text
    fix = "python scripts/draw_algorithms.py"
    assert all((script.PICTURES / name).read_text() == svg for name, svg in drawn.items()), fix
    plot = (script.PICTURES / script.CROSSOVERS).read_text()
    assert escape(script.described(script.crossovers())) in plot, fix


def test_where_there_is_no_table():
    with pytest.raises(ValueError, match="0 tables between"):
        table.update("# Algorithms\n")
