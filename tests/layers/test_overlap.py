"""What may overlap, by the dependences of the traced programs: a transfer waits for no product that
it is meant to run beside, nor does the product for it. What a device makes of that is its own.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from layers.sharded import mesh_of

import jcoll
from jcoll import layers

PRODUCT = "dot_general"
AXIS = "tensor"


def body_of(fn, n, *shapes):
    """The jaxpr of fn on one rank."""
    specs = tuple(P() for _ in shapes)
    mapped = jax.shard_map(fn, mesh=mesh_of(n), in_specs=specs, out_specs=P(AXIS), check_vma=False)
    outer = jax.make_jaxpr(mapped)(*(jnp.zeros(shape) for shape in shapes))
    (eqn,) = (e for e in outer.eqns if e.primitive.name == "shard_map")
    return eqn.params["jaxpr"]


def subjaxprs(eqn):
    found = [p for p in jax.tree.leaves(list(eqn.params.values())) if hasattr(p, "eqns")]
    return [getattr(p, "jaxpr", p) for p in found]


def contains(eqn, name):
    inside = (contains(e, name) for sub in subjaxprs(eqn) for e in sub.eqns)
    return eqn.primitive.name == name or any(inside)


def before(jaxpr, later, earlier=PRODUCT):
    """For each equation `later`, in order: which equations `earlier` it waits for."""
    made, rows = {}, []
    for number, eqn in enumerate(jaxpr.eqns):
        deps = set().union(*(made.get(id(v), set()) for v in eqn.invars))
        if contains(eqn, later):
            rows.append(deps)
        own = {number} if contains(eqn, earlier) else set()
        made |= {id(v): deps | own for v in eqn.outvars}
    return rows


def waits(jaxpr, later, earlier):
    """How many equations `later` depend on an equation `earlier`."""
    return sum(map(bool, before(jaxpr, later, earlier)))


def loops_with(jaxpr, name):
    """The bodies of loops, anywhere inside, that have an equation `name` of their own."""
    for eqn in jaxpr.eqns:
        for sub in subjaxprs(eqn):
            if any(e.primitive.name == name for e in sub.eqns) and eqn.primitive.name in (
                "while",
                "scan",
            ):
                yield sub
            yield from loops_with(sub, name)


def body_of_product(product, **options):
    """The jaxpr of a collective product on one rank, of the function that it is inside."""
    jaxpr = body_of(lambda x, w: product(x, w, AXIS, **options), 4, (8, 12), (12, 6))
    (inner,) = (sub for e in jaxpr.eqns for sub in subjaxprs(e))
    return inner


@pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "one"])
def test_gathered_blocks_travel_before_any_product(bidirectional):
    inner = body_of_product(layers.all_gather_matmul, bidirectional=bidirectional)
    assert before(inner, "jcoll_ppermute") == 3 * [set()]
    assert waits(inner, PRODUCT, "jcoll_ppermute") == 3  # All but that of the rank's own block.


@pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "one"])
def test_products_of_a_scattered_sum_wait_for_no_transfer(bidirectional):
    inner = body_of_product(layers.matmul_reduce_scatter, bidirectional=bidirectional)
    assert waits(inner, PRODUCT, "jcoll_ppermute") == 0
    assert all(before(inner, "jcoll_ppermute"))  # A sum waits for the product that it adds.


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_keys_move_while_a_block_is_attended(backward):
    def attend(q, k, v):
        return layers.ring_attention(q, k, v, AXIS, causal=True)

    def gradients(*qkv):
        return jax.grad(lambda *a: attend(*a).sum(), (0, 1, 2))(*qkv)

    jaxpr = body_of(gradients if backward else attend, 4, *3 * [(1, 8, 2, 4)])
    bodies = list(loops_with(jaxpr, "jcoll_ppermute"))
    assert len(bodies) == 1 + backward  # A tour for the result, and one for the gradients.
    for body in bodies:
        assert not set().union(*before(body, "jcoll_ppermute"))
        assert waits(body, PRODUCT, "jcoll_ppermute") == 0


def test_a_layers_gradients_leave_before_those_below_are_there():
    """The all_reduce of each layer waits for one product more than that of the layer above, the one
    that brings the cotangent down to it; and no product waits for an all_reduce."""
    depth = 4

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ layers.sync_in_backward(w, AXIS))
        return x.sum()

    def fn(x, *ws):
        return jax.tree.map(lambda g: g[None], jax.grad(loss)(list(ws), x))

    jaxpr = body_of(fn, 4, (8, 12), *depth * [(12, 12)])
    numbers = [len(deps) for deps in before(jaxpr, "jcoll_all_reduce")]
    forward = depth  # tanh's derivative needs what the layer gave.
    assert numbers == [forward + 1 + layer for layer in range(depth)]
    assert waits(jaxpr, PRODUCT, "jcoll_all_reduce") == 0


def test_one_sync_at_the_end_has_no_order_of_its_own():
    """What the test above tells apart: joined into one bucket, all gradients wait for the last."""

    def fn(x, *ws):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
            return y.sum()

        synced = jcoll.sync_gradients(jax.grad(loss)(list(ws)), AXIS)
        return jax.tree.map(lambda g: g[None], synced)

    jaxpr = body_of(fn, 4, (8, 12), *4 * [(12, 12)])
    (deps,) = before(jaxpr, "jcoll_all_reduce")
    assert len(deps) == 4 + 4 + 3  # Forward; gradients; cotangents of all layers but the first.
