"""What the parent asks of one child: everything that fits one device count and one allocator."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

from jcoll.bench import catalog
from jcoll.bench.rows import Row


@dataclass(frozen=True)
class Job:
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    num_ranks: int
    malloc: str = "default"
    redop: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    form: str = "single"
    steps: int = 1
    calls: int | None = None
    warmup: int = 3
    repeats: int = 5
    seconds: float = 2.0
    check: bool = True
    copy: bool = False
    dispatch: str = "default"
    processes: int = 1  # num_ranks, or 1: all ranks in one process
    skip: int = 0  # leading rows that need no measuring

    def blank_rows(self) -> Iterator[Row]:
        """The rows this job is to fill, in order, without results yet."""
        return itertools.islice(self._all_rows(), self.skip, None)

    def _all_rows(self) -> Iterator[Row]:
        """Sizes are rounded to whole blocks per rank; those that become equal make one row."""
        for op, dtype in itertools.product(self.ops, self.dtypes):
            itemsize = catalog.parse_dtype(dtype).itemsize
            counts = (
                catalog.element_count(op, size, itemsize, self.num_ranks) for size in self.sizes
            )
            for count in dict.fromkeys(counts):
                yield self._blank(op, dtype, count * itemsize)

    def _blank(self, op: str, dtype: str, size: int) -> Row:
        return Row(
            op=op,
            devices=self.num_ranks,
            dtype=dtype,
            size=size,
            mode=self.form if self.form == "single" else f"{self.form}{self.steps}",
            redop=self.redop if catalog.CATALOG[op].reduces else None,
            algorithm=self.algorithm,
            peer=catalog.peer_name(op, self.redop),
            malloc=self.malloc,
            dispatch=self.dispatch,
            processes=self.processes,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        for name in ("ops", "dtypes", "sizes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
