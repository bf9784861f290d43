"""What the XLA FFI of the running jaxlib offers, by its headers. Imports neither jax nor jaxlib, so
that `python -m jcoll doctor` can ask where these fail."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

Version = tuple[int, int]


def api() -> Version | None:
    """Of the FFI itself."""
    return _version("c_api.h", "XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR")


def collectives() -> Version | None:
    """Of the extension by which XLA lends its communicators to others; None: there is none."""
    name = "XLA_FFI_Extension_Collectives"
    return _version("collectives_c_api.h", f"{name}_MajorVersion", f"{name}_MinorVersion")


def folder() -> Path:
    # find_spec() on a top-level package locates it without importing it.
    spec = importlib.util.find_spec("jaxlib")
    return Path((spec and spec.origin) or "").parent / "include" / "xla" / "ffi" / "api"


@functools.cache
def _version(header: str, major: str, minor: str) -> Version | None:
    try:
        text = (folder() / header).read_text(encoding="utf-8")
    except OSError:
        return None
    found = [re.search(rf"#define\s+{name}\s+(\d+)", text) for name in (major, minor)]
    numbers = [int(match[1]) for match in found if match]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None
