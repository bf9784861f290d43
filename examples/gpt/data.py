"""Real bytes to learn from: the sources of Python's standard library, on every machine already."""

import sysconfig
from pathlib import Path

import numpy as np

# Not part of the library proper; some systems install them elsewhere or not at all.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
HOLD_OUT_EVERY = 20


class Corpus:
    """Training and validation bytes; whole files are held out, every 20th in sorted order."""

    def __init__(self, root: Path | None = None):
        root = root or Path(sysconfig.get_paths()["stdlib"])
        self.files = source_files(root)
        if len(self.files) < HOLD_OUT_EVERY:
            raise FileNotFoundError(
                f"Corpus: found {len(self.files)} Python sources under {root}, and need at least "
                f"{HOLD_OUT_EVERY}. Use a Python whose standard library is installed as files."
            )
        self.train = joined(f for i, f in enumerate(self.files) if i % HOLD_OUT_EVERY)
        self.validation = joined(self.files[::HOLD_OUT_EVERY])

    def batch(self, step: int, seed: int, num_rows: int, seq: int) -> np.ndarray:
        """The training batch of `step`, the same in all processes: uint8 [num_rows, seq + 1]."""
        rng = np.random.default_rng((seed, step))
        return windows(self.train, rng.integers(0, self.train.size - seq, num_rows), seq)

    def validation_batch(self, index: int, num_rows: int, seq: int) -> np.ndarray:
        """The same rows in every run: evenly spaced through the held-out bytes."""
        space = self.validation.size - seq
        starts = (np.arange(num_rows) + index * num_rows) * 7919 * seq % space
        return windows(self.validation, starts, seq)


def source_files(root: Path) -> list[Path]:
    """The library's .py files in the order of their names relative to `root`."""
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / file for file in sorted(files) if not SKIPPED_FOLDERS & set(file.parts)]


def joined(files) -> np.ndarray:
    """The bytes of all files, end to end."""
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def windows(data: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    """data[start : start + seq + 1] for every start: the inputs, and one byte more to predict."""
    return data[starts[:, None] + np.arange(seq + 1)]
