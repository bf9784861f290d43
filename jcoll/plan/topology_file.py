"""Topologies of one's own, in TOML or JSON (docs/topologies.md). No jax.

name = "two racks"     # default: the file's name
gamma = 1e-12          # s per byte that a rank reduces or copies by itself (default 0)

[[links]]
name = "nvlink"
ranks = 8              # ranks 0 to 7 are one host, 8 to 15 the next
alpha = 2e-6           # s from the end of sending to arrival
beta = 2.2e-12         # s per byte on a port: 1 / (450 GB/s)

[[links]]              # the last class joins all ranks: no `ranks`
name = "nic"
alpha = 4e-6
beta = 8e-11
ranks_per_port = 8     # one NIC for 8 ranks (default 1: each has its own; "all": one for all)
gap = 5e-7             # s that every message occupies a port besides its bytes (default 0)
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from jcoll.plan.topology import PRESETS, Link, Topology, TopologyError


def get(name: str | Path) -> Topology:
    """A preset by its name, else what the file of that name says. Raises TopologyError."""
    preset = PRESETS.get(str(name))
    if preset is not None:
        return preset
    if not Path(name).is_file():
        fix = f"  One of {', '.join(PRESETS)}, or the path of a .toml or .json file."
        raise TopologyError(f"topology {str(name)!r}", f"no such preset or file.\n{fix}")
    return load(name)


def load(path: str | Path) -> Topology:
    """The topology in a .toml file or, with any other suffix, a JSON file. Raises TopologyError."""
    path = Path(path)
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except json.JSONDecodeError as error:
        raise TopologyError(f"{path}:{error.lineno}", f"not JSON: {error.msg}.") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise TopologyError(where, f"not TOML: {error}.") from None
    except (ValueError, RecursionError) as error:  # A number too long to read; too many brackets.
        raise TopologyError(str(path), f"cannot be read: {error}.") from None
    try:
        return _topology(data, path.stem)
    except TopologyError as error:
        line = _line(text, data, error.link, error.field)
        where = f"{path}:{line}" if line else str(path)
        problem = f"{error.problem}\n  The format is described in docs/topologies.md."
        raise TopologyError(where, problem, field=error.field, link=error.link) from None


def _topology(data: Any, name: str) -> Topology:
    if not isinstance(data, dict):
        raise TopologyError("", "an object with name, gamma and links is needed.")
    _check_fields(Topology, {"name": name} | data, None)
    links = data["links"]
    if not isinstance(links, list) or not all(isinstance(entry, dict) for entry in links):
        raise TopologyError(
            "", "a list with an object for each link class is needed.", field="links"
        )
    for index, entry in enumerate(links):
        _check_fields(Link, entry, index)
    own = tuple(Link(**entry) for entry in links)
    return Topology(data.get("name", name), own, data.get("gamma", 0.0))


def _check_fields(kind: type[Link | Topology], entry: dict[str, Any], link: int | None) -> None:
    known = {field.name: field.default is MISSING for field in fields(kind)}
    for key in entry:
        if key not in known:
            problem = f"no such field; there are {', '.join(known)}."
            raise TopologyError("", problem, field=key, link=link)
    for key, needed in known.items():
        if needed and key not in entry:
            raise TopologyError("", "is missing, and has no default.", field=key, link=link)
    if not isinstance(entry["name"], str):
        problem = f"a text is needed, not {entry['name']!r}."
        raise TopologyError("", problem, field="name", link=link)


def _line(text: str, data: Any, link: int | None, key: str) -> int | None:
    """The line of a field; of a missing one, that of the link's first field. None: not certain.

    Neither parser tells. The fields stand in the text in the order of the data; a field's line is
    found by counting its mentions, if there are as many as the data has.
    """
    mentioned = _mentions(text, key)
    if not isinstance(data, dict):
        return None
    if link is None:
        return mentioned[0] if key in data and len(mentioned) == 1 else None
    links = data["links"]
    if key not in links[link]:
        return _line(text, data, link, next(iter(links[link]))) if links[link] else None
    on_top = key in data
    if len(mentioned) != on_top + sum(key in entry for entry in links):
        return None
    if on_top and mentioned[0] > _mentions(text, "links")[0]:
        return None
    return mentioned[on_top + sum(key in entry for entry in links[:link])]


def _mentions(text: str, key: str) -> list[int]:
    """The lines that have `key =`, `[[key]]` or `"key":`, a line as often as it has them."""
    name = re.escape(key)
    pattern = re.compile(rf'(?:^|[{{,\s])(?:"{name}"\s*[:=]|{name}\s*=|\[\[{name}\]\])')
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
        if "#" not in line[: match.start()]
    ]
