"""Rows: what the JSON holds, one object per op, devices, dtype, size, mode and allocator."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcoll.bench import catalog


@dataclass(frozen=True)
class Row:
    """Times are microseconds per collective, bandwidths GB/s (1e9 bytes) of jcoll.

    A row that could not be measured has `error` set and None in the fields after `processes`.
    """

    op: str
    devices: int
    dtype: str
    size: int  # S in bytes
    mode: str  # single, chain<N>, loop<N>
    redop: str | None  # None: the op takes none
    algorithm: str  # as asked for
    peer: str  # the jax.lax program in lax_us
    malloc: str  # default or reuse
    dispatch: str = "default"  # or async, sync
    processes: int = 1  # that the devices are in
    jcoll_us: float | None = None
    lax_us: float | None = None
    ratio: float | None = None  # lax / jcoll, formed per repeat, median
    ratio_low: float | None = None  # its quartiles
    ratio_high: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None  # mismatching elements of jcoll; None: not checked
    lax_wrong: int | None = None
    carried_by: str | None = None  # jcoll, or xla where algorithm selection chose XLA's own
    calls: int | None = None  # per side and repeat
    copy_us: float | None = None  # plain copy of the bytes that the op must read or write
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.wrong)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def to_line(row: Row) -> str:
    return json.dumps(row.as_dict())


def from_line(line: str) -> Row:
    return Row(**json.loads(line))


def bandwidths(op: str, nbytes: int, num_ranks: int, seconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s of an op over a buffer of `nbytes` bytes."""
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * catalog.bus_factor(op, num_ranks)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write whole or not at all, so that an interrupted run never leaves half a file.

    What is no file, as a pipe is, is written to; what a link names is replaced, not it.
    """
    if str(path) == "/dev/stdout":  # Where it is a file, that has what was printed before.
        sys.stdout.write(data.decode())
        return
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_figure(path: Path, figure: Any, **options: Any) -> None:
    """`write_bytes` of a figure of matplotlib's; the suffix says which format."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=130, **options)
    write_bytes(path, picture.getvalue())


def can_write(path: Path) -> bool:
    """Whether write_bytes can. Tried, not asked: root may write anywhere, but not into /proc."""
    try:
        if path.exists() and not path.is_file():
            return not path.is_dir() and os.access(path, os.W_OK)
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=f".{path.name}."):
            return True
    except (OSError, RuntimeError):  # RuntimeError: a link to itself, before Python 3.13.
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def to_json(rows: list[Row]) -> str:
    return "[\n" + ",\n".join(f"  {to_line(row)}" for row in rows) + "\n]\n"
