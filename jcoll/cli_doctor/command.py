"""The report, as text and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from jcoll.cli_doctor.features import Feature, features, used
from jcoll.cli_doctor.probes import Facts, Failed, collect

_DESCRIPTION = """\
Print what this machine has (versions, devices, the CUDA driver, NCCL, XLA's FFI), what jcoll uses
on each platform, and what keeps it from more. A fact that cannot be had is printed with "?" and the
reason. Exit status: 1 if `import jcoll` fails.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.add_argument("--json", action="store_true", help="the same for programs")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    found = list(features(facts))
    text = json.dumps(_as_json(facts, found), indent=1) if args.json else None
    print(text or "\n".join(_lines(facts, found)))
    return int(isinstance(facts["jcoll"]["imports"], Failed))


def _as_json(facts: Facts, found: list[Feature]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return {"error": value.why} if isinstance(value, Failed) else value

    sections = {s: {name: plain(v) for name, v in f.items()} for s, f in facts.items()}
    platforms = dict.fromkeys(feature.platform for feature in found)
    uses = {
        platform: {
            "used": used(found, platform),
            "features": {f.name: f.obstacle or "yes" for f in found if f.platform == platform},
        }
        for platform in platforms
    }
    return {**sections, "uses": uses}


def _lines(facts: Facts, found: list[Feature]) -> Iterator[str]:
    width = max(len(name) for section in facts.values() for name in section)
    for section, values in facts.items():
        yield section
        for name, value in values.items():
            yield f"  {name:<{width}}  {_fact_text(value)}"
    for platform in dict.fromkeys(feature.platform for feature in found):
        yield f"on {platform}: {used(found, platform)}"
        previous = None
        for feature in (f for f in found if f.platform == platform):
            same = feature.obstacle is not None and feature.obstacle == previous
            why = "for the same reason" if same else feature.obstacle
            yield f"  {feature.name}: {f'no, {why}' if why else 'yes'}"
            previous = feature.obstacle


def _fact_text(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
