"""Tables of the tests' own in place of the shipped one and the user's."""

from __future__ import annotations

import dataclasses

import pytest

from jcoll.tuning import select, table


@pytest.fixture
def use(monkeypatch):
    """use(shipped=rows, own=rows): the tables from here on; None: there is none."""

    def use(shipped=None, own=None):
        def made(rows):
            return None if rows is None else table.Table("cpu", "test", tuple(rows), str(rows))

        tables = {"shipped": made(shipped), "own": made(own)}
        for name, value in tables.items():
            monkeypatch.setattr(table, name, lambda kind, value=value: value)
        select.select.cache_clear()

    yield use
    select.select.cache_clear()


@pytest.fixture
def tuning_file(monkeypatch):
    """tuning_file(path): JCOLL_TUNING_FILE from here on; "": unset."""

    def tuning_file(path):
        config = dataclasses.replace(table.config, tuning_file=str(path))
        monkeypatch.setattr(table, "config", config)
        table.own.cache_clear()
        select.select.cache_clear()

    yield tuning_file
    table.own.cache_clear()
    select.select.cache_clear()
