"""Checkpoints of sharded training state, which another mesh and another ZeRO stage can take up.

    sharded_state.save("run/step-1000", state, layout, metadata={"step": 1000})
    state = sharded_state.restore("run/step-1000", other_layout, "data", other_mesh)

A checkpoint is a folder:

    manifest.json        format, version, mesh, metadata; shape and dtype of each leaf by its path
    process-00000.json   the blocks that this process wrote: leaf, place, file, bytes, CRC-32
    00003-00001.npy      one block: a part of one leaf that one device held

Blocks are parts of *whole* leaves: padding is not saved. So nothing in a checkpoint depends on how
many ranks wrote it, and a device that restores reads just the blocks that overlap its own. Each
process writes what its devices hold, a block that several hold only once, into one folder that all
processes see (a shared file system). The folder gets its name last, by an atomic rename, when all
blocks are there and on the disk: under that name there is a whole checkpoint or nothing. What fails
in one process fails in all. The JSON files have CRC-32s of themselves.

Sources: that a checkpoint is of whole leaves in blocks, whatever wrote it: PyTorch's Distributed
Checkpoint, and Orbax / TensorStore in JAX; a manifest that lists them, and a rename that commits:
the same, and the usual way to replace a file whole on POSIX (Pillai et al. 2014, "All File Systems
Are Not Created Equal").
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from jcoll import errors
from jcoll.comm.mesh import static_bool
from jcoll.layers._agreement import Agreement
from jcoll.layers.data_parallel import check_leaf
from jcoll.layers.layout import Layout, check_mesh, flat_plan

FORMAT, VERSION = "jcoll.sharded_state", 1
MANIFEST = "manifest.json"


def save(
    folder: str | os.PathLike[str],
    state: Any,
    layout: Any,
    *,
    metadata: Any = None,
    timeout_s: float = 600.0,
) -> None:
    """Writes `state` into the new folder `folder`. Outside jit; all processes call it.

    Args:
      folder: must not exist yet. While it is written it is called `folder` + ".writing".
      state: a pytree of arrays: parameters (whole or shards, as global jax.Arrays), optimizer
        state, a step count. What is no global array (a number, an array of numpy, or one on this
        process's devices alone) is taken to be the same in all processes; process 0 writes its own.
      layout: the pytree of their Layouts (`zero.layouts`, `zero.layouts_of_state`), which say what
        is padding, and the dtype.
      metadata: anything that JSON holds, for `read_metadata`; process 0's is saved.
      timeout_s: how long the processes wait for the slowest one to write its part.

    Raises, and nothing is left under `folder`: FileExistsError: a checkpoint is there already.
      ValueError, TypeError: state and layout differ; metadata is not JSON's. OSError: it cannot be
      written. RuntimeError: one of these in another process. TimeoutError.
    """
    where = f"layers.sharded_state.save to {os.fspath(folder)!r}"
    final = Path(folder)
    if final.name in ("", ".."):
        problem = "that is no name of a new folder."
        raise ValueError(errors.text(where, problem, "Pass e.g. 'run/step-1000'."))
    partial = final.with_name(final.name + ".writing")
    is_first = jax.process_index() == 0
    together = Agreement(where, f"sharded_state/{final.name}", timeout_s)

    def write() -> None:
        _write_blocks(partial, leaves)
        if is_first:
            _write_text(partial / MANIFEST, manifest)
        _flush_folder(partial)

    def finish() -> None:
        if hole := _Checkpoint(partial, where).hole():
            fix = "Pass global arrays that all processes have, as jit and zero.place make them."
            raise ValueError(errors.text(where, f"of {hole}: no process has the rest.", fix))
        partial.rename(final)
        _flush_folder(final.parent)

    leaves, manifest = together.step(
        "check", lambda: _checked(where, final, state, layout, metadata)
    )
    together.step("make the folder", lambda: is_first and _make_empty(partial))
    together.step("write", write)
    together.step("finish", lambda: is_first and finish())


def _checked(
    where: str, final: Path, state: Any, layout: Any, metadata: Any
) -> tuple[list[tuple[str, Any, Layout]], str]:
    """(leaves, the text of the manifest)"""
    leaves = _checked_leaves(where, state, layout)
    try:
        manifest = _json_text(_manifest(leaves, metadata))
    except (TypeError, ValueError) as error:
        problem = f"metadata={metadata!r} cannot be written as JSON ({error})."
        fix = "Pass Python's own numbers, text, lists and dicts, e.g. int(step)."
        raise TypeError(errors.text(where, problem, fix)) from None
    if final.exists() or final.is_symlink():
        problem = "it exists already; a checkpoint is never overwritten."
        raise FileExistsError(errors.text(where, problem, "Choose another folder, or remove it."))
    return leaves, manifest


def _checked_leaves(where: str, state: Any, layout: Any) -> list[tuple[str, Any, Layout]]:
    plan = flat_plan(where, state, layout, "state")
    found = []
    for (path, leaf), part in zip(tree_leaves_with_path(state), plan, strict=True):
        name, leaf = keystr(path), _as_array(where, keystr(path), leaf, part)
        if leaf.shape not in (part.shape, part.padded_shape):
            problem = f"leaf {name} has shape {leaf.shape}, by its layout {part.padded_shape}."
            fix = "Pass global arrays, as jit returns them, and the layout they were made by."
            raise ValueError(errors.text(where, problem, fix))
        found.append((name, leaf, part))
    return found


def _as_array(where: str, name: str, leaf: Any, part: Layout) -> Any:
    """A jax.Array as it is, all else as a numpy array; of the layout's dtype, or an error."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        problem = f"leaf {name} has dtype {leaf.dtype}, which has no bytes to save."
        fix = "Save jax.random.key_data(key), and restore by jax.random.wrap_key_data."
        raise TypeError(errors.text(where, problem, fix))
    check_leaf(where, name, leaf)
    # As jax has it: with x64 off, numbers and numpy's 64 bits are of 32 bits in a layout.
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    given, dtype = np.dtype(jax.numpy.result_type(leaf)), np.dtype(part.dtype)
    if given != dtype:
        problem = f"leaf {name} has dtype {given}, by its layout {dtype}."
        fix = "Convert it, or make the layout of this state."
        raise TypeError(errors.text(where, problem, fix))
    if array.dtype == dtype:
        return array
    converted = array.astype(dtype)
    if jax.numpy.issubdtype(dtype, np.integer) and (converted != array).any():
        problem = f"leaf {name} has integers that do not fit {dtype}, its layout's dtype."
        raise ValueError(errors.text(where, problem, "Turn on jax_enable_x64, or save a float."))
    return converted


def _make_empty(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # Of a run that was killed.
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_blocks(folder: Path, leaves: list[tuple[str, Any, Layout]]) -> None:
    """This process's, and the file that lists them."""
    blocks = [
        _write_block(folder, index, number, start, data)
        for index, (_, leaf, part) in enumerate(leaves)
        for number, start, data in _own_blocks(leaf, part)
    ]
    _write_text(folder / _process_file(jax.process_index()), _json_text({"blocks": blocks}))


def _own_blocks(leaf: Any, part: Layout) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """(number, start, data) of the blocks of a leaf that this process is to write.

    The number is that of the device, so no two processes have the same.
    """
    if not isinstance(leaf, jax.Array) or (
        leaf.is_fully_addressable and jax.process_count() > 1
    ):  # Each process has its own, and by contract the same.
        if jax.process_index() == 0:
            yield 0, [0] * leaf.ndim, np.asarray(leaf)[tuple(map(slice, part.shape))]
        return
    for piece in leaf.addressable_shards:
        if piece.replica_id == 0:
            start = [index.start or 0 for index in piece.index]
            keep = tuple(slice(0, max(0, n - s)) for n, s in zip(part.shape, start, strict=True))
            data = np.asarray(piece.data)[keep]
            if data.size:
                yield piece.device.id, start, data


def _write_block(
    folder: Path, leaf: int, number: int, start: list[int], data: np.ndarray
) -> dict[str, Any]:
    file = f"{leaf:05}-{number:05}.npy"
    # NumPy's format knows NumPy's types alone; the manifest has the real one.
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    with _flushed(folder / file) as out:
        np.save(out, raw, allow_pickle=False)
    return {
        "leaf": leaf,
        "start": start,
        "shape": list(data.shape),
        "file": file,
        "nbytes": raw.nbytes,
        "crc32": zlib.crc32(raw.data),
    }


def _manifest(leaves: list[tuple[str, Any, Layout]], metadata: Any) -> dict[str, Any]:
    meshes = [leaf.sharding.mesh for _, leaf, _ in leaves if _is_named(leaf)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "mesh": dict(meshes[0].shape) if meshes else {},
        "num_processes": jax.process_count(),
        "metadata": metadata,
        "leaves": [
            {"path": name, "shape": list(part.shape), "dtype": str(np.dtype(part.dtype))}
            for name, leaf, part in leaves
        ],
    }


def _is_named(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _process_file(process: int) -> str:
    return f"process-{process:05}.json"


@contextlib.contextmanager
def _flushed(path: Path) -> Iterator[BinaryIO]:
    """A new file, whose bytes are on the disk when the context ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _json_text(content: dict[str, Any]) -> str:
    """With its CRC-32: a digit of a block's place that has changed would be another state."""
    content = json.loads(json.dumps(content))  # As it will be read.
    return json.dumps({**content, "crc32": _crc32(content)}, indent=1) + "\n"


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _write_text(path: Path, text: str) -> None:
    with _flushed(path) as out:
        out.write(text.encode())


def _flush_folder(folder: Path) -> None:
    """The names of its files are on the disk, too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_metadata(folder: str | os.PathLike[str]) -> Any:
    """The metadata that the checkpoint was saved with."""
    return _Checkpoint(Path(folder), _where(folder)).manifest["metadata"]


def _where(folder: str | os.PathLike[str]) -> str:
    return f"layers.sharded_state.restore from {os.fspath(folder)!r}"


def restore(
    folder: str | os.PathLike[str],
    layout: Any,
    axis_name: Any,
    mesh: Mesh,
    *,
    cast: bool = False,
    strict: bool = True,
    timeout_s: float = 600.0,
) -> Any:
    """The state saved in `folder`, laid out for this mesh. Outside jit; all processes call it.

    Args:
      folder: of `save`.
      layout: the pytree of Layouts to restore into, of the same paths, shapes and dtypes; its
        num_ranks, split dimensions and specs may be others, and so the ZeRO stage.
      axis_name: the axis, or axes, of `mesh` that the layouts are split over.
      mesh: may be of another size, with other axes, than the one that saved.
      cast: convert leaves to the layout's dtypes where the checkpoint's are others.
      strict: False: leaves of the checkpoint that `layout` has not are left out and not read, e.g.
        the optimizer's of a saved (params, opt_state) by the layout (params_layout, None).
      timeout_s: how long the processes wait for the slowest one to read its part.

    Returns: a pytree like `layout` of global jax.Arrays with zero.shardings(layout, ...).

    Raises: FileNotFoundError: there is no checkpoint. ValueError: it is damaged (a file is missing,
      or has other bytes), or is not of this model (names the leaves). RuntimeError: one of these in
      another process, which may read other files. TimeoutError.
    """
    where = _where(folder)
    cast = static_bool(where, "cast", cast)
    strict = static_bool(where, "strict", strict)
    together = Agreement(where, f"sharded_state.restore/{Path(folder).name}", timeout_s)

    def read() -> list[jax.Array]:
        checkpoint = _Checkpoint(Path(folder), where)
        check_mesh(where, layout, axis_name, mesh)
        checkpoint.check_leaves(wanted, cast, strict)
        shardings = [NamedSharding(mesh, part.full_spec(axis_name)) for part in wanted.values()]
        return [
            checkpoint.array(name, part, sharding)
            for (name, part), sharding in zip(wanted.items(), shardings, strict=True)
        ]

    entries, treedef = tree_flatten_with_path(layout)
    wanted = {keystr(path): part for path, part in entries}
    return jax.tree.unflatten(treedef, together.step("read", read))


class _Checkpoint:
    """A checkpoint's folder, open for reading. Each file is checked once, when first used."""

    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self.where = where
        self._sound: set[str] = set()
        self.manifest = self._read_manifest()
        try:
            self._read_blocks()
        except (KeyError, IndexError, TypeError) as error:
            problem = f"its JSON files are not as save() writes them ({error!r})"
            raise ValueError(self._damaged(problem)) from None

    def _read_blocks(self) -> None:
        self._index = {leaf["path"]: i for i, leaf in enumerate(self.manifest["leaves"])}
        self._blocks: list[list[dict[str, Any]]] = [[] for _ in self._index]
        for process in range(self.manifest["num_processes"]):
            for block in self._read_json(_process_file(process))["blocks"]:
                leaf = self.manifest["leaves"][block["leaf"]]
                if not _is_within(block, leaf["shape"]):
                    raise TypeError(f"block {block} of a leaf of shape {leaf['shape']}")
                self._blocks[block["leaf"]].append(block)

    def check_leaves(self, wanted: dict[str, Layout], cast: bool, strict: bool) -> None:
        """Refuses a checkpoint of another model, and one with holes."""
        for kind, names, fix in (
            ("without", set(wanted) - set(self._index), ""),
            ("with unknown", set(self._index) - set(wanted), ", or pass strict=False for a part"),
        ):
            if names and (strict or kind == "without"):
                shown = ", ".join(sorted(names)[:8]) + (" ..." if len(names) > 8 else "")
                problem = f"the checkpoint is of another tree, {kind} leaves {shown}."
                raise ValueError(self._text(problem, f"Restore into the tree that was saved{fix}."))
        for name, part in wanted.items():
            saved = self.manifest["leaves"][self._index[name]]
            if tuple(saved["shape"]) != part.shape:
                problem = f"leaf {name} has shape {tuple(saved['shape'])} there, {part.shape} here."
                raise ValueError(self._text(problem, "Make the model of the saved sizes."))
            if not cast and saved["dtype"] != str(np.dtype(part.dtype)):
                problem = f"leaf {name} has dtype {saved['dtype']} there, {part.dtype} here."
                fix = "Pass cast=True to convert, or make the layout of the saved type."
                raise ValueError(self._text(problem, fix))
        if hole := self.hole(wanted):
            raise ValueError(self._damaged(f"of {hole}"))

    def array(self, name: str, part: Layout, sharding: NamedSharding) -> jax.Array:
        """A leaf, each device's part read from the blocks that overlap it."""
        saved = self.manifest["leaves"][self._index[name]]
        dtype = np.dtype(jax.numpy.dtype(saved["dtype"]))

        def read(index: Any) -> np.ndarray:
            shape = part.padded_shape
            bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
            data = np.zeros([stop - start for start, stop in bounds], dtype)
            for block in self._blocks[self._index[name]]:
                self._copy(block, [start for start, _ in bounds], data)
            return data.astype(part.dtype)

        return jax.make_array_from_callback(part.padded_shape, sharding, read)

    def _copy(self, block: dict[str, Any], origin: list[int], data: np.ndarray) -> None:
        """What a block and `data`, which starts at `origin` of the leaf, have in common."""
        into, out_of = [], []
        for first, size, start, length in zip(
            block["start"], block["shape"], origin, data.shape, strict=True
        ):
            low, high = max(first, start), min(first + size, start + length)
            if low >= high:
                return
            into.append(slice(low - start, high - start))
            out_of.append(slice(low - first, high - first))
        raw = self._load(block)
        data[tuple(into)] = raw.view(data.dtype).reshape(block["shape"])[tuple(out_of)]

    def _load(self, block: dict[str, Any]) -> np.ndarray:
        path = self._folder / block["file"]
        try:
            raw = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise ValueError(self._damaged(f"file {block['file']} is missing")) from None
        except Exception as error:  # Its header is Python, and what reads it raises what it likes.
            problem = f"file {block['file']} cannot be read ({error})"
            raise ValueError(self._damaged(problem)) from None
        if block["file"] not in self._sound:
            if raw.nbytes != block["nbytes"] or zlib.crc32(raw.data) != block["crc32"]:
                raise ValueError(self._damaged(f"file {block['file']} has other bytes"))
            self._sound.add(block["file"])
        return raw

    def hole(self, names: Iterable[str] | None = None) -> str:
        """A leaf, of these or of all, of which blocks are missing; "" if there is none.

        Blocks are the shards of one array, which do not overlap: sizes tell if all are there.
        """
        for name in self._index if names is None else names:
            leaf = self._index[name]
            found = sum(int(np.prod(block["shape"])) for block in self._blocks[leaf])
            size = int(np.prod(self.manifest["leaves"][leaf]["shape"]))
            if found != size:
                return f"leaf {name} there are {found} elements of {size}"
        return ""

    def _read_manifest(self) -> dict[str, Any]:
        if not (self._folder / MANIFEST).exists():
            problem = f"there is no checkpoint: no file {MANIFEST}."
            fix = "Name a folder that save() has written; one in the making ends in .writing."
            raise FileNotFoundError(self._text(problem, fix))
        manifest = self._read_json(MANIFEST)
        if manifest.get("format") != FORMAT:
            raise ValueError(self._damaged(f"{MANIFEST} is not of format {FORMAT}"))
        if manifest.get("version") != VERSION:
            problem = f"it is of version {manifest.get('version')}; this jcoll reads {VERSION}."
            raise ValueError(self._text(problem, "Read it by the jcoll that wrote it."))
        return manifest

    def _read_json(self, file: str) -> dict[str, Any]:
        try:
            value = json.loads((self._folder / file).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(self._damaged(f"{file} cannot be read ({error})")) from None
        if not isinstance(value, dict):
            raise ValueError(self._damaged(f"{file} is not a JSON object"))
        crc32 = value.pop("crc32", None)  # Older checkpoints have none.
        if crc32 is not None and crc32 != _crc32(value):
            raise ValueError(self._damaged(f"{file} has other bytes"))
        return value

    def _damaged(self, problem: str) -> str:
        return self._text(f"the checkpoint is damaged: {problem}.", "Restore an earlier one.")

    def _text(self, problem: str, fix: str) -> str:
        return errors.text(self.where, problem, fix)


def _is_within(block: dict[str, Any], shape: list[int]) -> bool:
    """Whether a block names a file, and a part of an array of that shape."""
    start, size = block["start"], block["shape"]
    if len(start) != len(shape) or len(size) != len(shape) or not isinstance(block["file"], str):
        return False
    if not all(type(n) is int for n in (*start, *size)):
        return False
    return all(0 <= a <= a + n <= most for a, n, most in zip(start, size, shape, strict=True))
