"""Processes of a job come to one choice, also if each has measured for itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jcoll.tuning.table import Row, to_text

PROGRAM = """
import os, sys, warnings
rank = int(os.environ["JAX_PROCESS_ID"])
os.environ["JCOLL_TUNING_FILE"] = sys.argv[1 + rank]
import jax, numpy as np
import jcoll

def chosen(num_devices):
    mesh = jax.make_mesh((len(jax.devices()) // num_devices, num_devices), ("other", "x"))
    x = jax.ShapeDtypeStruct((8, 64), np.float32, sharding=jax.NamedSharding(mesh, jax.P(None)))
    fn = jax.shard_map(lambda x: jcoll.all_reduce(x, "x"), mesh=mesh, in_specs=jax.P(None),
                       out_specs=jax.P(None), check_vma=False)
    return jcoll.explain(fn, x)[0].algorithm

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print("chosen", chosen(2), chosen(4), sum("tuning" in str(w.message) for w in caught))
"""


def table_of(path, best):
    rows = [
        Row(placement, "all_reduce", 4, 1024, {"direct": 10.0, best: 1.0})
        for placement in ("process", "processes")
    ]
    path.write_text(to_text("cpu", "test", rows))
    return str(path)


@pytest.mark.parametrize("same", [True, False])
def test_own_tables(tmp_path, same):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tables = [table_of(tmp_path / "0.json", "ring"), table_of(tmp_path / "1.json", "tree")]
    tables = tables[:1] * 2 if same else tables
    launch = [sys.executable, "-m", "jcoll", "launch", "-n", "2", "--devices-per-process", "2"]
    done = subprocess.run(
        [*launch, str(program), *tables],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.partition("chosen ")[2] for line in done.stdout.splitlines() if "chosen" in line}
    assert len(said) == 1, said
    inside, across, num_warnings = said.pop().split()
    assert inside != "ring", "within a process the shipped table decides"
    assert (across == "ring") == same
    assert across != "tree"
    assert int(num_warnings) == (0 if same else 1)
