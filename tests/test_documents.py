"""What the documents show is true as far as a program can tell: the README's first program prints
what it says, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "examples/README.md",
]
README = ROOT / "README.md"


@pytest.fixture(autouse=True)
def _checkout() -> None:
    if not README.exists():
        pytest.skip("the documents are not beside the tests")


def test_the_first_program() -> None:
    program = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    (said,) = re.findall(r"print\(.*\) *# (.*)", program)
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=env | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == said


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
