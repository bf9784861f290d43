"""ragged_all_to_all: rank s writes rows [input_offset, + send_size) of its operand for rank d at
row output_offset of d's output, for all pairs (s, d); the other rows of the output stay.

Derivative. Linear in (operand, output). The transpose in operand sends rows back along the same
pairs; the transpose in output is the cotangent where no row was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.ops import _primitive, _rows
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec
from jcoll.ops.all_to_all import SPEC as ALL_TO_ALL


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Exchanges ragged slices of rows, with `jax.lax.ragged_all_to_all`'s signature; also on CPU.

    Args:
      operand: array [rows, ...], the rows to send.
      output: array [out_rows, ...] of the same dtype and trailing shape: what the result has in
        rows that nobody writes. Its buffer is reused where XLA allows.
      input_offsets, send_sizes: integers [k * num_ranks]; rows input_offsets[i] to
        input_offsets[i] + send_sizes[i] of operand go to rank i // k. Usually k = 1.
      output_offsets: integers [k * num_ranks]; where in the *receiver's* output they go.
      recv_sizes: integers [k * num_ranks]; how many rows arrive from rank i // k.
      axis_name, axis_index_groups, algorithm, timeout_s: as in `all_reduce`; equal groups.

    Returns:
      output with the received rows written.

    Raises: as `all_reduce`. JaxRuntimeError or ValueError as there, naming the pair of ranks:
      sizes that are negative, exceed the operand or the output, disagree between sender and
      receiver, or make two ranks write one row. By "xla" a program cannot fail: there such sizes
      give undefined rows.

    Derivative: linear in operand and output; an error, by "xla" undefined, where the ranges of
    operand that are sent overlap.
    """
    call = make_call(
        "ragged_all_to_all",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    operand, output = (_primitive.as_array(call, x) for x in (operand, output))
    _check_rows(call, operand, output)
    named = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    index = [_rows.check_index(call, name, x, call.num_ranks) for name, x in named.items()]
    if len({x.shape for x in index}) != 1:
        problem = f"offsets and sizes have shapes {[x.shape for x in index]}; they must be equal."
        raise ValueError(errors.text(call.where, problem, "Pass one entry per rank and update."))
    index = _rows.common_index_dtype(*index)
    return _primitive.bind(SPEC, operand, output, *index, call=call)[0]


def _check_rows(call: Call, operand: Any, output: Any) -> None:
    if operand.ndim == 0 or output.ndim == 0:
        problem = f"operand and output need rows; got shapes {operand.shape}, {output.shape}."
        raise ValueError(errors.text(call.where, problem, "Add a leading dimension."))
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:]:
        problem = (
            f"operand is {operand.dtype}{list(operand.shape)}, output "
            f"{output.dtype}{list(output.shape)}; dtype and all but the first dimension must agree."
        )
        raise ValueError(errors.text(call.where, problem, "Cast or reshape one of them."))


def _stacked(
    xp: Any, operand: Any, output: Any, inputs: Any, sends: Any, outputs: Any, recvs: Any
) -> Any:
    num_ranks, num_entries = sends.shape
    num_updates = num_entries // num_ranks
    row = xp.arange(output.shape[1], dtype=sends.dtype)
    results = []
    for dst in range(num_ranks):
        y = output[dst]
        for src in range(num_ranks):
            for entry in range(dst * num_updates, (dst + 1) * num_updates):
                start, size = outputs[src, entry], sends[src, entry]
                hit = _rows.within(row, start, size)
                picked = xp.clip(row - start + inputs[src, entry], 0, max(operand.shape[1] - 1, 0))
                if operand.shape[1]:
                    y = xp.where(_rows.expand(hit, y.ndim), operand[src][picked], y)
        results.append(y)
    return [xp.stack(results)]


def _shapes(avals: Any, call: Call) -> Any:
    return [(avals[1].shape, avals[1].dtype)]


def _motion(avals: Any, call: Call) -> Motion:
    operand, output, index = avals[0], avals[1], avals[2]
    rows = _rows.row_attributes(operand, operand.shape[0], output.shape[0], index)
    rows["num_updates"] = index.shape[0] // call.num_ranks
    return Motion("ragged", rows=rows, aliases=((1, 0),))


def _xla(*arrays: Any, call: Call, platform: str) -> Any:
    if platform == "cpu":  # XLA:CPU has no ragged_all_to_all.
        return _rows.through_gather(SPEC, *arrays, call=call)
    return [jax.lax.ragged_all_to_all(*arrays, **call.lax_args)]


SPEC = CollectiveSpec(
    name="ragged_all_to_all",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    index_inputs=True,
)


def _jvp(primals: Any, tangents: Any, *, call: Call) -> Any:
    operand, output, *index = primals
    outs = _primitive.bind(SPEC, operand, output, *index, call=call)
    if type(tangents[0]) is type(tangents[1]) is _compat.Zero:
        return outs, [_compat.zero_tangent(outs[0])]
    linear = [_compat.instantiate_zeros(t) for t in tangents[:2]]
    return outs, _primitive.bind(SPEC, *linear, *index, call=call)


def _transpose(
    cts: Any,
    operand: Any,
    output: Any,
    inputs: Any,
    sends: Any,
    outputs: Any,
    recvs: Any,
    *,
    call: Call,
) -> Any:
    (ct,) = cts
    linear = [_compat.is_undefined_primal(x) for x in (operand, output)]
    # Where in my output the others wrote, and where in their operands that came from.
    written = _exchange(outputs, call)
    came_from = _exchange(inputs, call)
    operand_ct = output_ct = None
    if linear[0]:
        zeros = jnp.zeros(operand.aval.shape, operand.aval.dtype)
        back = (written, recvs, came_from, sends)
        (operand_ct,) = _primitive.bind(SPEC, ct, zeros, *back, call=call)
    if linear[1]:
        mask = _rows.expand(_rows.covered(written, recvs, ct.shape[0]), ct.ndim)
        output_ct = jnp.where(mask, jnp.zeros_like(ct), ct)
    return [operand_ct, output_ct, None, None, None, None]


def _exchange(index: Any, call: Call) -> Any:
    """all_to_all of index vectors."""
    blocks = index.reshape(call.num_ranks, -1)
    return _primitive.bind(ALL_TO_ALL, blocks, call=call)[0].reshape(index.shape)


def _shifted(offsets: Any, sizes: Any, num_rows: int) -> Any:
    """Offsets [batch, ...] among the rows of all batch elements; -1, which the runtime refuses, for
    those that do not fit their own element and would reach into its neighbours."""
    step = jnp.arange(offsets.shape[0], dtype=offsets.dtype)[:, None]
    fits = (offsets >= 0) & (sizes <= num_rows - offsets)
    return jnp.where(fits, offsets + step * num_rows, -1)


def _batch(spec: Any, size: int, args: Any, dims: Any, *, call: Call) -> Any:
    """The batch elements' rows one after another, with offsets to match: one collective."""
    arrays = [_compat.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    operand, output, inputs, sends, outputs, recvs = arrays
    num_rows = size * max(operand.shape[1], output.shape[1])
    if num_rows > jnp.iinfo(sends.dtype).max:  # Offsets among all elements' rows would wrap.
        return _primitive.batch_sequentially(spec, size, args, dims, call=call)
    inputs = _shifted(inputs, sends, operand.shape[1])
    outputs = _shifted(outputs, sends, output.shape[1])

    def by_rank(x: Any) -> Any:  # [batch, ranks * k] -> [ranks * (batch * k)]
        return jnp.moveaxis(x.reshape(size, call.num_ranks, -1), 0, 1).reshape(-1)

    def rows(x: Any) -> Any:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    index = [by_rank(x) for x in (inputs, sends, outputs, recvs)]
    (y,) = _primitive.bind(spec, rows(operand), rows(output), *index, call=call)
    return [y.reshape(output.shape)], [0]


ragged_all_to_all_p = _primitive.define(SPEC, jvp=_jvp, transpose=_transpose, batch=_batch)
