"""Checkpoints: onto other meshes and stages, across processes, and what is refused."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layers import zero_model as model
from layers.zero_model import TX, assert_close, mesh_of, one_device
from multiprocess.jobs import run_ok

from jcoll.layers import sharded_state, zero

STEPS = 6


def layouts(stage, num_ranks):
    """The Layouts of (params, opt_state) in a stage."""
    params = model.layout_of(model.init(), num_ranks)
    state = zero.layouts_of_state(jax.eval_shape(TX.init, zero.shapes(params)), params)
    whole = zero.layouts(model.init(), num_ranks, split=False)
    return (params if stage == 3 else whole), state


def trained(stage, mesh, params, opt_state, steps):
    layout = model.layout_of(model.init(), mesh.size)
    step, _, _ = model.trainer(stage, mesh, layout)
    data = model.placed(model.batch(), mesh, P("data"))
    for _ in range(steps):
        params, opt_state, _ = step(params, opt_state, data)
    return params, opt_state


def fresh(stage, mesh):
    params_layout, state_layout = layouts(stage, mesh.size)
    padded = zero.pad(model.init(), model.layout_of(model.init(), mesh.size))
    params = padded if stage == 3 else model.init()
    shardings = [zero.shardings(x, "data", mesh) for x in (params_layout, state_layout)]
    return jax.device_put((params, TX.init(padded)), tuple(shardings))


def test_goes_on_elsewhere(tmp_path):
    """Half of the steps by stage 3 on 8, the other half by stage 1 on 2: as if never stopped."""
    state = trained(3, mesh_of(8), *fresh(3, mesh_of(8)), STEPS // 2)
    folder = tmp_path / "run" / "checkpoint"
    sharded_state.save(folder, state, layouts(3, 8), metadata={"step": STEPS // 2})
    assert sharded_state.read_metadata(folder) == {"step": STEPS // 2}
    restored = sharded_state.restore(folder, layouts(1, 2), "data", mesh_of(2))
    params, _ = trained(1, mesh_of(2), *restored, STEPS - STEPS // 2)
    assert_close(params, one_device(steps=STEPS)[1])


@pytest.mark.parametrize(
    ("before", "after"), [((3, 8), (3, 2)), ((2, 4), (3, 8)), ((1, 2), (3, 1))], ids=str
)
def test_other_stages_and_sizes(before, after, tmp_path):
    """The same values, bit by bit, and laid out as the new stage and mesh have them."""
    state = fresh(before[0], mesh_of(before[1]))
    sharded_state.save(tmp_path / "c", state, layouts(*before))
    got = sharded_state.restore(tmp_path / "c", layouts(*after), "data", mesh_of(after[1]))
    want = fresh(after[0], mesh_of(after[1]))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.sharding == w.sharding
        np.testing.assert_array_equal(g, w)


DTYPES = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float64, jnp.int8, jnp.bool_, jnp.complex64]


def small(num_ranks=4):
    """(state, layout, mesh): a leaf of each dtype, padded, and two along two axes."""
    params = {str(jnp.dtype(d)): jnp.arange(1, 8).astype(d) for d in DTYPES}
    params |= {"scalar": jnp.float32(3), "empty": jnp.zeros((0, 2)), "w": jnp.ones((8, 6))}
    mesh = mesh_of(num_ranks)
    layout = zero.layouts(params, num_ranks)
    return zero.place(params, layout, "data", mesh), layout, mesh


def test_every_dtype_keeps_its_bits(tmp_path):
    state, layout, mesh = small()
    sharded_state.save(tmp_path / "c", state, layout)
    got = sharded_state.restore(tmp_path / "c", layout, "data", mesh)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert g.dtype == w.dtype
        assert g.sharding == w.sharding
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


def test_other_axes_of_the_mesh(tmp_path):
    """data x tensor -> data alone: the tensor ranks' parts find together."""
    w = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    layout = zero.layouts(w, 4, specs=P(None, "tensor"))
    assert layout.full_spec("data") == P("data", "tensor")
    sharded_state.save(tmp_path / "c", zero.place(w, layout, "data", mesh), layout)
    new = zero.layouts(w, 8)
    got = sharded_state.restore(tmp_path / "c", new, "data", mesh_of(8))
    np.testing.assert_array_equal(zero.trim(got, new), w)


@pytest.mark.parametrize("x64", [True, False])
def test_numpy_arrays_and_numbers(tmp_path, x64):
    """In jax's types, which with x64 off are not numpy's; padding is not saved."""
    state = {"step": 7, "rate": 0.5, "seed": np.arange(3), "padded": np.arange(4.0)}
    with jax.enable_x64(x64):
        layout = zero.layouts(state | {"padded": np.arange(3.0)}, 2)
        sharded_state.save(tmp_path / "c", state, layout)
        got = sharded_state.restore(tmp_path / "c", layout, "data", mesh_of(2))
        assert got["step"].dtype == (jnp.int64 if x64 else jnp.int32)
        got = zero.trim(got, layout)
    want = state | {"padded": np.arange(3.0)}
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_part_of_a_checkpoint(saved):
    folder, layout, mesh = saved
    got = sharded_state.restore(folder, {"w": layout["w"]}, "data", mesh, strict=False)
    np.testing.assert_array_equal(got["w"], np.ones((8, 6)))
    refused(saved, r"without leaves \['new'\]", layout={"new": layout["w"]}, strict=False)


def test_replicas_are_written_once(tmp_path):
    """Whole on 8 devices: 1 file; split over 8: 8 files, and no byte of padding."""
    x = jnp.arange(10, dtype=jnp.float32)
    for split, files in ((False, 1), (True, 5)):  # Blocks of 2: the last three are padding.
        layout = zero.layouts(x, 8, split=split)
        folder = tmp_path / str(split)
        sharded_state.save(folder, zero.place(x, layout, "data", mesh_of(8)), layout)
        found = [np.load(path) for path in folder.glob("*.npy")]
        assert len(found) == files
        assert sum(raw.nbytes for raw in found) == 40


@pytest.mark.slow
def test_across_processes(tmp_path):
    """Saved by 2 processes of 2 devices, each its own, at the second attempt; restored by them, and
    by 3 of 1; and by none if one of them misses a file."""
    folder, failed = str(tmp_path / "c"), []
    for action, processes, devices in (("save", 2, 2), ("restore", 3, 1)):
        for result in run_ok(
            "checkpoints.py", action, folder, num_processes=processes, num_devices=devices
        ):
            done = result.report("done")
            assert (done["saved_by"], done["metadata"]) == (2, {"ranks": 4})
            failed.append(done["failed"])
    assert re.match(r"(?s)RuntimeError: .*process 1 failed \(TypeError: .*step 'check'", failed[0])
    assert failed[1].startswith("TypeError: ")
    damaged = run_ok("checkpoints.py", "restore damaged", folder, num_processes=2, num_devices=2)
    failed = [result.report("done")["failed"] for result in damaged]
    assert re.match(r"(?s)RuntimeError: .*process 1 failed \(ValueError: .*missing", failed[0])
    assert failed[1].startswith("ValueError: ") and "damaged" in failed[1]


# Bad input.


@pytest.fixture
def saved(tmp_path):
    """(folder, layout, mesh) of a checkpoint to damage."""
    state, layout, mesh = small()
    sharded_state.save(tmp_path / "c", state, layout)
    return tmp_path / "c", layout, mesh


def refused(saved, match, error=ValueError, layout=None, **options):
    folder, saved_layout, mesh = saved
    with pytest.raises(error, match=f"(?s)sharded_state.*{match}.*\n  "):
        sharded_state.restore(folder, layout or saved_layout, "data", mesh, **options)


def test_missing_file(saved):
    next(saved[0].glob("00008-*.npy")).unlink()
    refused(saved, "damaged: file 00008-.* is missing")


def test_flipped_byte(saved):
    path = next(saved[0].glob("00008-*.npy"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    refused(saved, "damaged: file 00008-.* has other bytes")


def test_cut_file(saved):
    path = next(saved[0].glob("00008-*.npy"))
    path.write_bytes(path.read_bytes()[:-4])
    refused(saved, "damaged: file 00008-.* cannot be read")


def test_flipped_header(saved):
    """The header is Python; its parser's errors are none of damage."""
    path = next(saved[0].glob("00008-*.npy"))
    whole = path.read_bytes()
    for at in range(len(whole) - 48):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        problem = ""
        try:
            sharded_state.restore(*saved[:2], "data", saved[2])
        except ValueError as error:
            problem = str(error)
        assert not problem or "damaged: file 00008-" in problem


def test_missing_process_file(saved):
    (saved[0] / "process-00000.json").unlink()
    refused(saved, r"damaged: process-00000.json cannot be read")


def test_missing_block(saved):
    path = saved[0] / "process-00000.json"
    content = json.loads(path.read_text())
    del content["crc32"]  # As a writer that has lost blocks would write it.
    content["blocks"] = [b for b in content["blocks"] if b["leaf"] != 8 or b["start"] == [0, 0]]
    path.write_text(json.dumps(content))
    refused(saved, r"damaged: of leaf \['w'\] there are 12 elements of 48")


@pytest.mark.parametrize(
    ("key", "value"),
    [("start", [-1, 0]), ("start", [10**30, 0]), ("start", None), ("shape", ["x", 1]), ("file", 1)],
)
def test_block_that_is_none(key, value, saved):
    path = saved[0] / "process-00000.json"
    content = json.loads(path.read_text())
    del content["crc32"]  # As in checkpoints of before there was one.
    content["blocks"][-1][key] = value
    path.write_text(json.dumps(content))
    refused(saved, "damaged: its JSON files are not as save")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("process-00000.json", '"leaf": 8', '"leaf": 6'),
        ("process-00000.json", '"start"', '"stars"'),
        ("manifest.json", '"step": 7', '"step": 3'),
        ("manifest.json", '"shape"', '"shade"'),
    ],
)
def test_another_letter(file, old, new, tmp_path):
    """Each of these would be another state, or step, or an error that says nothing."""
    state, layout, mesh = small()
    sharded_state.save(tmp_path / "c", state, layout, metadata={"step": 7})
    path = tmp_path / "c" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    refused((tmp_path / "c", layout, mesh), f"damaged: {file} has other bytes")
    with pytest.raises(ValueError, match="has other bytes"):
        sharded_state.read_metadata(tmp_path / "c")


def test_metadata_is_as_json_has_it(tmp_path):
    state, layout, _ = small()
    metadata = {1: "a", "1": "b", "none": None, "infinite": float("inf"), "text": "ä\ud800"}
    sharded_state.save(tmp_path / "c", state, layout, metadata=metadata)
    assert sharded_state.read_metadata(tmp_path / "c") == json.loads(json.dumps(metadata))


@pytest.mark.parametrize("name", ["", ".", "..", "a/.."])
def test_save_refuses_what_is_no_new_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)save to .*no name of a new folder.*Pass e.g."):
        sharded_state.save(name, ONE, zero.layouts(ONE, 1))
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_a_link_to_nothing(tmp_path):
    (tmp_path / "c").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="exists already"):
        sharded_state.save(tmp_path / "c", ONE, zero.layouts(ONE, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_restore_refuses_flags_that_are_none(saved):
    refused(saved, "strict='no' is not a bool", TypeError, strict="no")
    refused(saved, "cast='no' is not a bool", TypeError, cast="no")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "manifest.json cannot be read"),
        ("[]", "manifest.json is not a JSON object"),
        ("{}", "not of format jcoll.sharded_state"),
        ('{"format": "jcoll.sharded_state", "version": 2}', "version 2; this jcoll reads 1"),
        ('{"format": "jcoll.sharded_state", "version": 1}', "not as save.* writes them"),
    ],
)
def test_bad_manifest(saved, text, match):
    (saved[0] / "manifest.json").write_text(text)
    refused(saved, match)


def test_no_checkpoint(saved, tmp_path):
    refused((tmp_path / "nope", *saved[1:]), "no checkpoint: no file manifest", FileNotFoundError)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p: {**p, "new": p["w"]}, r"another tree, without leaves \['new'\]"),
        (lambda p: {k: v for k, v in p.items() if k != "w"}, r"with unknown leaves \['w'\]"),
        (lambda p: {**p, "w": jnp.ones((9, 6))}, r"\['w'\] has shape \(8, 6\) there, \(9, 6\)"),
        (
            lambda p: {**p, "w": p["w"].astype("float32")},
            r"\['w'\] has dtype float64 there, float32 here",
        ),
    ],
)
def test_another_model(saved, change, match):
    params = {name: jnp.zeros(x.shape, x.dtype) for name, x in saved[1].items()}
    refused(saved, match, layout=zero.layouts(change(params), 4))


def test_cast(saved):
    folder, layout, mesh = saved
    wanted = dict(layout) | {"w": zero.layouts(jnp.zeros((8, 6), jnp.float32), 4)}
    got = sharded_state.restore(folder, wanted, "data", mesh, cast=True)
    np.testing.assert_array_equal(got["w"], np.ones((8, 6), np.float32))


def test_never_overwrites(saved):
    folder, layout, _ = saved
    with pytest.raises(FileExistsError, match=r"(?s)save to .*exists already.*\n  Choose"):
        sharded_state.save(folder, small()[0], layout)


def test_rest_of_a_killed_save_is_replaced(tmp_path):
    (tmp_path / "c.writing").mkdir()
    (tmp_path / "c.writing" / "00000-00099.npy").write_text("half")
    state, layout, mesh = small()
    sharded_state.save(tmp_path / "c", state, layout)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "00000-00099.npy").exists()
    sharded_state.restore(tmp_path / "c", layout, "data", mesh)


ONE = {"a": np.ones(4)}


@pytest.mark.parametrize(
    ("state", "like", "options", "error", "match"),
    [
        (ONE, {"b": np.ones(4)}, {}, ValueError, "state is a tree.*its layout"),
        (ONE, {"a": np.ones(5)}, {}, ValueError, r"\['a'\] has shape \(4,\).*\(6,\)"),
        ({"a": lambda: jax.random.key(0)}, {"a": np.ones(())}, {}, TypeError, "key_data"),
        (ONE, {"a": np.ones(4, "f4")}, {}, TypeError, r"\['a'\] has dtype float64.*float32"),
        ({"a": lambda: jnp.ones(4)}, {"a": np.ones(4, "f4")}, {}, TypeError, "layout float32"),
        (ONE, ONE, {"metadata": {"step": np.int64(5)}}, TypeError, r"metadata=.*int\(step\)"),
        (ONE, ONE, {"timeout_s": 0}, ValueError, "timeout_s=0 is not a positive number"),
        (ONE, ONE, {"timeout_s": 10**400}, ValueError, "is not a positive number"),
        ({"a": lambda: "text"}, ONE, {}, TypeError, r"\['a'\] is a str; arrays"),
    ],
)
def test_save_refuses(state, like, options, error, match, tmp_path):
    state = {name: leaf() if callable(leaf) else leaf for name, leaf in state.items()}
    with pytest.raises(error, match=f"(?s)sharded_state.save.*{match}"):
        sharded_state.save(tmp_path / "c", state, zero.layouts(like, 2), **options)
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_integers_that_do_not_fit(tmp_path):
    state = np.array([1, 2**40])
    with jax.enable_x64(False):
        layout = zero.layouts(state, 1)
        with pytest.raises(ValueError, match="do not fit int32"):
            sharded_state.save(tmp_path / "c", state, layout)


def test_save_refuses_holes(tmp_path, monkeypatch):
    """No checkpoint gets its name that could not be restored."""
    monkeypatch.setattr(sharded_state, "_own_blocks", lambda leaf, part: iter(()))
    with pytest.raises(ValueError, match=r"(?s)of leaf \['a'\] there are 0 elements of 4.*global"):
        sharded_state.save(tmp_path / "c", ONE, zero.layouts(ONE, 1))
    assert not (tmp_path / "c").exists()
