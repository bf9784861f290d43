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
processes see (a shared file system). The folder gets its name last, by an atomic rename: under that
name there is a whole checkpoint or nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from jcoll import _compat, errors
from jcoll.layers.layout import Layout

FORMAT, VERSION = "jcoll.sharded_state", 1
MANIFEST = "manifest.json"
_WAIT_S = 600
_barriers = itertools.count()


def save(
    folder: str | os.PathLike[str],
    state: Any,
    layout: Any,
    *,
    metadata: Any = None,
) -> None:
    """Writes `state` into the new folder `folder`. Outside jit; all processes call it.

    Args:
      folder: must not exist yet. While it is written it is called `folder` + ".writing".
      state: a pytree of arrays: parameters (whole or shards, as global jax.Arrays), optimizer
        state, a step count.
      layout: the pytree of their Layouts (`zero.layouts`, `zero.layouts_of_state`), which say what
        is padding.
      metadata: anything that JSON holds, for `read_metadata`.

    Raises: FileExistsError: a checkpoint is there already. ValueError: state and layout differ.
    """
    where = f"layers.sharded_state.save to {os.fspath(folder)!r}"
    final = Path(folder)
    leaves = _checked_leaves(where, state, layout)
    process, num_processes = jax.process_index(), jax.process_count()
    if final.exists():
        problem = "it exists already; a checkpoint is never overwritten."
        raise FileExistsError(errors.text(where, problem, "Choose another folder, or remove it."))
    partial = final.with_name(final.name + ".writing")
    _barrier()  # None creates what another still looks for.
    if process == 0:
        with contextlib.suppress(FileNotFoundError):  # Of a run that was killed.
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    _barrier()
    blocks = [
        _write_block(partial, index, number, start, data)
        for index, (_, leaf, part) in enumerate(leaves)
        for number, start, data in _own_blocks(leaf, part)
    ]
    _write_json(partial / _process_file(process), {"blocks": blocks})
    if process == 0:
        manifest = _manifest(leaves, num_processes, metadata)
        _write_json(partial / MANIFEST, manifest)
    _barrier()
    if process == 0:
        partial.rename(final)
    _barrier()


def _checked_leaves(where: str, state: Any, layout: Any) -> list[tuple[str, Any, Layout]]:
    entries, treedef = tree_flatten_with_path(state)
    plan, expected = jax.tree.flatten(layout)
    if treedef != expected:
        problem = f"state is a tree {treedef}, its layout {expected}."
        fix = "Make the layout by zero.layouts and zero.layouts_of_state of this state."
        raise ValueError(errors.text(where, problem, fix))
    found = []
    for (path, leaf), part in zip(entries, plan, strict=True):
        name, leaf = keystr(path), _as_array(where, keystr(path), leaf)
        if leaf.shape not in (part.shape, part.padded_shape):
            problem = f"leaf {name} has shape {leaf.shape}, by its layout {part.padded_shape}."
            fix = "Pass global arrays, as jit returns them, and the layout they were made by."
            raise ValueError(errors.text(where, problem, fix))
        found.append((name, leaf, part))
    return found


def _as_array(where: str, name: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        problem = f"leaf {name} has dtype {leaf.dtype}, which has no bytes to save."
        fix = "Save jax.random.key_data(key), and restore by jax.random.wrap_key_data."
        raise TypeError(errors.text(where, problem, fix))
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _own_blocks(leaf: Any, part: Layout) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """(number, start, data) of the blocks of a leaf that this process is to write.

    The number is that of the device, so no two processes have the same.
    """
    if not isinstance(leaf, jax.Array):  # Of numpy, the same in every process.
        if jax.process_index() == 0:
            yield 0, [0] * leaf.ndim, leaf
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
    np.save(folder / file, raw, allow_pickle=False)
    return {
        "leaf": leaf,
        "start": start,
        "shape": list(data.shape),
        "file": file,
        "nbytes": raw.nbytes,
        "crc32": zlib.crc32(raw.data),
    }


def _manifest(
    leaves: list[tuple[str, Any, Layout]], num_processes: int, metadata: Any
) -> dict[str, Any]:
    meshes = [leaf.sharding.mesh for _, leaf, _ in leaves if _is_named(leaf)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "mesh": dict(meshes[0].shape) if meshes else {},
        "num_processes": num_processes,
        "metadata": metadata,
        "leaves": [
            {"path": name, "shape": list(part.shape), "dtype": str(leaf.dtype)}
            for name, leaf, part in leaves
        ],
    }


def _is_named(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _process_file(process: int) -> str:
    return f"process-{process:05}.json"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _barrier() -> None:
    """All processes of the job have come here, as often as this one."""
    if jax.process_count() > 1:
        name = f"jcoll.sharded_state:{next(_barriers)}"
        _compat.distributed_client().wait_at_barrier(name, _WAIT_S * 1000)


def read_metadata(folder: str | os.PathLike[str]) -> Any:
    """The metadata that the checkpoint was saved with."""
    return _Checkpoint(folder).manifest["metadata"]


def restore(
    folder: str | os.PathLike[str], layout: Any, axis_name: Any, mesh: Mesh, *, cast: bool = False
) -> Any:
    """The state saved in `folder`, laid out for this mesh. Outside jit; all processes call it.

    Args:
      folder: of `save`.
      layout: the pytree of Layouts to restore into, of the same paths, shapes and dtypes; its
        num_ranks, split dimensions and specs may be others, and so the ZeRO stage.
      axis_name: the axis, or axes, of `mesh` that the layouts are split over.
      mesh: may be of another size, with other axes, than the one that saved.
      cast: convert leaves to the layout's dtypes where the checkpoint's are others.

    Returns: a pytree like `layout` of global jax.Arrays with zero.shardings(layout, ...).

    Raises: FileNotFoundError: there is no checkpoint. ValueError: it is damaged (a file is missing,
      or has other bytes), or is not of this model (names the leaves).
    """
    checkpoint = _Checkpoint(folder)
    entries, treedef = tree_flatten_with_path(layout)
    wanted = {keystr(path): part for path, part in entries}
    checkpoint.check_leaves(wanted, cast)
    restored = []
    for name, part in wanted.items():
        sharding = NamedSharding(mesh, part.full_spec(axis_name))
        restored.append(checkpoint.array(name, part, sharding))
    return jax.tree.unflatten(treedef, restored)


class _Checkpoint:
    """A checkpoint's folder, open for reading. Each file is checked once, when first used."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._where = f"layers.sharded_state.restore from {os.fspath(folder)!r}"
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
                self._blocks[block["leaf"]].append(block)

    def check_leaves(self, wanted: dict[str, Layout], cast: bool) -> None:
        """Refuses a checkpoint of another model, and one with holes."""
        for kind, names in (
            ("without", set(wanted) - set(self._index)),
            ("with unknown", set(self._index) - set(wanted)),
        ):
            if names:
                shown = ", ".join(sorted(names)[:8]) + (" ..." if len(names) > 8 else "")
                problem = f"the checkpoint is of another tree, {kind} leaves {shown}."
                raise ValueError(self._text(problem, "Restore into the tree that was saved."))
        for name, part in wanted.items():
            saved = self.manifest["leaves"][self._index[name]]
            if tuple(saved["shape"]) != part.shape:
                problem = f"leaf {name} has shape {tuple(saved['shape'])} there, {part.shape} here."
                raise ValueError(self._text(problem, "Make the model of the saved sizes."))
            if not cast and saved["dtype"] != str(np.dtype(part.dtype)):
                problem = f"leaf {name} has dtype {saved['dtype']} there, {part.dtype} here."
                fix = "Pass cast=True to convert, or make the layout of the saved type."
                raise ValueError(self._text(problem, fix))
            self._check_complete(name, part)

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
        except (ValueError, EOFError, OSError) as error:
            problem = f"file {block['file']} cannot be read ({error})"
            raise ValueError(self._damaged(problem)) from None
        if block["file"] not in self._sound:
            if raw.nbytes != block["nbytes"] or zlib.crc32(raw.data) != block["crc32"]:
                raise ValueError(self._damaged(f"file {block['file']} has other bytes"))
            self._sound.add(block["file"])
        return raw

    def _check_complete(self, name: str, part: Layout) -> None:
        """Blocks are the shards of one array, which do not overlap: sizes tell if all are there."""
        blocks = self._blocks[self._index[name]]
        found = sum(int(np.prod(block["shape"])) for block in blocks)
        if found != int(np.prod(part.shape)):
            problem = f"leaf {name} has {found} elements of {int(np.prod(part.shape))}"
            raise ValueError(self._damaged(problem))

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
        return value

    def _damaged(self, problem: str) -> str:
        return self._text(f"the checkpoint is damaged: {problem}.", "Restore an earlier one.")

    def _text(self, problem: str, fix: str) -> str:
        return errors.text(self._where, problem, fix)
