"""sync_gradients, the layers and a step of the examples, lowered for CUDA on this machine: which
custom calls they are made of, backward passes too, and the attributes of each.

Values are the business of test_values.py, for the ops, and of tests/layers.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import example_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_programs import (
    ATTRIBUTES,
    ROW_ATTRIBUTES,
    XLA_COLLECTIVE,
    custom_calls,
    lowered,
)
from ops.meshes import mesh_of

import jcoll
from jcoll import layers
from jcoll.layers import zero
from jcoll.runtime import cuda

N = 4
ROWS, WIDTH = 4, 8  # A rank's.
P = jax.P


@pytest.fixture(autouse=True)
def available(monkeypatch):
    """jcoll's CUDA runtime is there, so that "auto" and "direct" are its kernels."""
    monkeypatch.setattr(cuda, "obstacle", lambda: None)


def ones(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def calls_of(body: Any, shape: tuple[int, ...] = (ROWS, WIDTH)) -> list[dict]:
    """The custom calls of `body`, of a float32 array of each rank, and of its gradient. They are of
    all ranks and named for the line here; and XLA has no collective besides."""

    def both(x: Any) -> Any:
        value, grad = jax.value_and_grad(lambda v: (body(v) ** 2).sum())(x)
        return value[None], grad

    mapped = jax.shard_map(
        both, mesh=mesh_of(N), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((N * shape[0], *shape[1:]), np.float32)
    assert not XLA_COLLECTIVE.search(lowered(mapped, x).as_text())
    calls = custom_calls(mapped, x)
    for call in calls:
        check(call)
        assert (call["axis"], call["groups"], call["group_size"]) == ("'x'", [*range(N)], N)
        assert call["call_site"].startswith("cuda_surface/test_layers.py:")
        assert call["dtype"] == call["signature"].partition("[")[0]
    return calls


def check(call: dict[str, Any]) -> None:
    rows = ROW_ATTRIBUTES if call["op"] == "ragged_all_to_all" else ()
    assert set(call) == {*ATTRIBUTES, *rows}
    for name, kind in ATTRIBUTES.items():
        assert isinstance(call[name], kind), name


def moe(x: Any, **more: Any) -> Any:
    experts = ones(1, WIDTH, 6), ones(1, 6, WIDTH)
    router = ones(WIDTH, N)
    return layers.moe_layer(x, router, experts, "x", num_experts=N, top_k=2, **more)[0]


def two_matmuls(x: Any, **more: Any) -> Any:
    hidden = layers.column_parallel(x, ones(WIDTH, 6), "x", **more)
    return layers.row_parallel(hidden, ones(6, WIDTH), "x", **more)


def embedding(table: Any) -> Any:
    return layers.vocab_parallel_embedding(jnp.zeros((3,), jnp.int32), table, "x")


def cross_entropy(logits: Any) -> Any:
    return layers.vocab_parallel_cross_entropy(logits, jnp.zeros((ROWS,), jnp.int32), "x")


def whole_layout() -> Any:
    return zero.layouts({"w": ones(N * ROWS, WIDTH)}, N)


def gathered(x: Any) -> Any:
    return zero.gather({"w": x}, whole_layout(), "x")["w"]


def regathered(x: Any) -> Any:
    layer = zero.regathered(lambda params, v: v @ params["w"].T, whole_layout(), "x")
    return layer({"w": x}, x)


def redirected(x: Any) -> Any:
    whole = {"w": ones(N * ROWS, WIDTH)}
    return zero.redirect_gradients(whole, {"w": x}, whole_layout(), "x")["w"]


def reduce_scattered(x: Any) -> Any:
    grads = {"w": jnp.tile(x, (N, 1))}
    return zero.reduce_scatter_gradients(grads, whole_layout(), "x")["w"]


def norm(x: Any) -> Any:
    return layers.global_norm(x, specs=P("x"))


def synced(x: Any, **more: Any) -> Any:
    return jcoll.sync_gradients({"a": x, "b": x[:1]}, "x", **more)["a"]


def finite(x: Any) -> Any:
    return layers.check_finite(x, "x").counts.astype(np.float32)


# What is called how often, forwards and backwards: op, reduction, elements of a block, type.
LAYERS: dict[str, tuple[Any, dict[str, int]]] = {
    "sync_gradients": (synced, {"all_reduce mean 40 float32": 2}),
    "sync_in_backward": (
        lambda x: layers.sync_in_backward(x, "x"),
        {"all_reduce mean 32 float32": 1},
    ),
    "tensor parallel": (two_matmuls, {"all_reduce sum 32 float32": 2}),
    "sequence parallel": (
        partial(two_matmuls, sequence_parallel=True),
        {"all_gather  32 float32": 2, "reduce_scatter sum 32 float32": 2},
    ),
    # Four rings of N - 1 hops, as the derivative of either is the other.
    "overlap": (
        partial(two_matmuls, sequence_parallel=True, overlap=True),
        {"ragged_all_to_all  32 float32": 4 * (N - 1)},
    ),
    "moe, dropless": (
        moe,
        {
            "all_gather  4 int32": 1,
            "ragged_all_to_all  64 float32": 2,
            "ragged_all_to_all  128 float32": 2,
        },
    ),
    "moe, capacity": (partial(moe, mode="capacity"), {"all_to_all  32 float32": 4}),
    "vocabulary, embedding": (embedding, {"all_reduce sum 24 float32": 1}),
    "vocabulary, cross entropy": (
        cross_entropy,
        {"all_reduce max 4 float32": 1, "all_reduce sum 8 float32": 1},
    ),
    "zero.gather": (gathered, {"all_gather  32 float32": 1, "reduce_scatter mean 32 float32": 1}),
    "zero.regathered": (
        regathered,
        {"all_gather  32 float32": 2, "reduce_scatter mean 32 float32": 1},
    ),
    "zero.redirect_gradients": (redirected, {"reduce_scatter mean 32 float32": 1}),
    "zero.reduce_scatter_gradients": (
        reduce_scattered,
        {"all_gather  32 float32": 1, "reduce_scatter mean 32 float32": 1},
    ),
    "global_norm": (norm, {"all_reduce max 1 float32": 1, "all_reduce sum 1 float32": 2}),
    "check_finite": (finite, {"all_gather  1 int32": 1}),
}
HEADS = (2, 8, N, 8)
ATTENTIONS: dict[str, dict[str, int]] = {
    # In the text a tour has two hops, one before the loop and one in it, of keys and values; that
    # of their gradients has one more, behind it.
    "ring_attention": {"ragged_all_to_all  512 float32": 2 * 2 + 2 * 2 + 3 * 2},
    "ulysses_attention": {"all_to_all  128 float32": 8},
    "all_gather_attention": {"all_gather  512 float32": 2, "reduce_scatter sum 512 float32": 2},
}


def described(calls: list[dict]) -> Counter[str]:
    return Counter(f"{c['op']} {c['reduce_op']} {c['count']} {c['dtype']}" for c in calls)


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    body, expected = LAYERS[name]
    calls = calls_of(body)
    assert described(calls) == expected
    assert {(c["algorithm"], c["plan_op"]) for c in calls} == {("direct", "")}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    attention = getattr(layers, name)
    assert described(calls_of(lambda x: attention(x, x, x, "x"), HEADS)) == ATTENTIONS[name]


@pytest.mark.parametrize("body", [synced, two_matmuls])
def test_what_a_layer_is_told_reaches_the_call(body: Any) -> None:
    for call in calls_of(partial(body, algorithm="ring", timeout_s=7.5)):
        assert (call["algorithm"], call["plan_op"]) == ("ring", "all_reduce")
        assert call["timeout_s"] == 7.5


# Steps of the examples

STEPS = {
    "--mesh data=2,tensor=2 --zero 2 --sequence-parallel": {
        ("all_gather", "'tensor'", 2),
        ("reduce_scatter", "'tensor'", 2),
        ("all_reduce", "'tensor'", 2),
        ("all_gather", "'data'", 2),
        ("reduce_scatter", "'data'", 2),
        ("all_reduce", "'data'", 2),
        ("all_reduce", "('data', 'tensor')", 4),
    },
    "--mesh data=2,expert=2 --zero 1 --experts 4 --top-k 2": {
        ("all_gather", "'expert'", 2),
        ("ragged_all_to_all", "'expert'", 2),
        ("all_reduce", "'expert'", 2),
        ("all_gather", "'data'", 2),
        ("reduce_scatter", "'data'", 2),
        ("all_reduce", "'data'", 2),
        ("all_reduce", "('data', 'expert')", 4),
    },
}


def lowered_step(flags: str) -> tuple[str, list[dict]]:
    """The text of a training step of train_gpt.py, and its custom calls."""
    parallel, state = (example_programs.load(f"gpt.{name}") for name in ("parallel", "state"))
    tiny = "--layers 1 --width 16 --heads 4 --seq 16 --batch 8"
    _, args = example_programs.load("gpt.options").parse(f"{tiny} {flags}".split())
    with example_programs.as_users_have_it():
        made = parallel.make_trainer(args)
        start = jax.eval_shape(
            partial(state.initial, args, made.mesh, made.layouts, made.optimizer)
        )
        tokens = jax.ShapeDtypeStruct((8, 16), np.uint8)
        traced = *start, (tokens, tokens)
        return lowered(made.step, *traced).as_text(), custom_calls(made.step, *traced)


@pytest.mark.parametrize("flags", STEPS, ids=["dense", "experts"])
def test_step_of_the_example(flags: str) -> None:
    """Everything goes through jcoll, the gradient of the balance loss too, which is one value for
    all ranks: JAX would sum it by its own transposition."""
    pytest.importorskip("optax", reason="comes with jcoll[examples]")
    text, calls = lowered_step(flags)
    for call in calls:
        check(call)
        assert (call["algorithm"], call["plan_op"]) == ("direct", "")
        assert sorted(call["groups"]) == [*range(4)]
    assert {(c["op"], c["axis"], c["group_size"]) for c in calls} == STEPS[flags]
    assert not XLA_COLLECTIVE.search(text)
