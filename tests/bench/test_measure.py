"""What is measured besides the collectives."""

import numpy as np

from jcoll.bench import measure


def test_processes_share_a_copy(monkeypatch):
    """Together they copy what one would alone, on as many cores."""
    copied = []
    monkeypatch.setattr(measure, "num_cores", lambda: 4)
    monkeypatch.setattr(np, "copyto", lambda dst, src: copied.append(dst.nbytes))
    measure.copy_seconds(1024, repeats=1)
    assert set(copied) == {1024, 256}
    copied.clear()
    assert measure.copy_seconds(1024, sharers=2, repeats=1) >= 0
    assert set(copied) == {512, 256}
    copied.clear()
    measure.copy_seconds(2, sharers=8, repeats=1)
    assert set(copied) == {0}
