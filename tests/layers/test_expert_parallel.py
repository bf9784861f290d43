"""Mixtures of experts against the one-device model that applies every expert to every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll import layers
from jcoll.layers import grouped_mlp
from jcoll.layers.expert_dispatch import fit

WIDTH, HIDDEN, TOKENS, EXPERTS, K = 16, 24, 16, 16, 2
CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
BALANCE, Z = 0.01, 0.001
MODES = {
    "dropless": {},
    "room": {"output_size": TOKENS * K * 6},
    "capacity": {"mode": "capacity", "capacity_factor": 8.0},
}


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("data", "expert")[-len(sizes) :])


def specs_of(mesh):
    """Of x, router_w, w_in, w_out."""
    return P(mesh.axis_names), P(), P("expert"), P("expert")


def arrays(num_tokens, dtype=jnp.float32, num_experts=EXPERTS):
    rng = np.random.default_rng(1)
    shapes = (
        (num_tokens, WIDTH),
        (WIDTH, num_experts),
        (num_experts, WIDTH, HIDDEN),
        (num_experts, HIDDEN, WIDTH),
    )
    values = [
        rng.normal(size=shape) / max(1, shape[-2]) ** (0.5 * (i > 1))
        for i, shape in enumerate(shapes)
    ]
    return [jnp.asarray(v, dtype if i != 1 else jnp.float32) for i, v in enumerate(values)]


def place(values, mesh, specs):
    return [
        jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(values, specs, strict=True)
    ]


def run(fn, mesh, in_specs, out_specs, *values, check_vma=True):
    body = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(body)(*place(values, mesh, in_specs))


def dense(x, router_w, w_in, w_out, k=K, kept=None):
    """(y, losses): every expert on every token, the weights of those not chosen zero."""
    routing = layers.top_k_router(x.astype(jnp.float32) @ router_w, top_k=k)
    # Products in float32: XLA:CPU has no such einsums of bfloat16. Results are rounded as there.
    wide, w_in, w_out = (a.astype(jnp.float32) for a in (x, w_in, w_out))
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", wide, w_in)).astype(x.dtype)
    out = jnp.einsum("tef,efd->ted", hidden.astype(jnp.float32), w_out)
    chosen = jax.nn.one_hot(routing.experts, router_w.shape[1], dtype=jnp.float32)  # [T, k, E]
    weights = routing.weights if kept is None else routing.weights * kept
    y = jnp.einsum("tke,tk,ted->td", chosen, weights, out.astype(x.dtype).astype(jnp.float32))
    return y.astype(x.dtype), BALANCE * routing.load_balancing_loss + Z * routing.z_loss


def dense_loss(*values):
    y, losses = dense(*values)
    return jnp.mean(jnp.sin(y.astype(jnp.float32))) + losses


def moe(x, router_w, *weights, num_experts=EXPERTS, **options):
    options = {"axis_name": "expert", "top_k": K, **options}
    return layers.moe_layer(x, router_w, weights, num_experts=num_experts, **options)


def share_of_loss(mesh, *values, **options):
    """This rank's part of the loss of all; and aux."""
    y, aux = moe(*values, balance_axes=mesh.axis_names, **options)
    losses = BALANCE * aux.load_balancing_loss + Z * aux.z_loss
    return jnp.sin(y.astype(jnp.float32)).sum() / (y.size * mesh.size) + losses / mesh.size, aux


def train_step(mesh, check_vma, *values, wrap=lambda f: f, **options):
    """(loss, gradients, rows dropped) of all ranks."""
    loss = wrap(functools.partial(share_of_loss, mesh, **options))
    (part, aux), grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*values)
    if not check_vma:  # Else JAX has done it.
        rest = tuple(a for a in mesh.axis_names if a != "expert")
        grads = [grads[0], *(jax.lax.psum(g, rest) if rest else g for g in grads[1:])]
        grads[1] = jax.lax.psum(grads[1], "expert")
    total = jax.lax.psum((part, aux.dropped), mesh.axis_names)
    return total[0], tuple(grads), total[1]


def step_of(mesh, check_vma, values, **options):
    specs = specs_of(mesh)
    step = functools.partial(train_step, mesh, check_vma, **options)
    return run(step, mesh, specs, (P(), specs, P()), *values, check_vma=check_vma)


def assert_close(got, want, rel):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape
        assert np.abs(g - w).max() <= rel * np.abs(w).max(), g.shape


# The whole layer.


@pytest.mark.parametrize(
    ("sizes", "mode", "check_vma", "dtype"),
    [
        ((8,), "dropless", True, jnp.float32),
        ((8,), "room", False, jnp.float32),
        ((8,), "capacity", True, jnp.float32),
        ((2,), "dropless", False, jnp.float32),
        ((4,), "room", True, jnp.float32),
        ((2, 2), "capacity", False, jnp.float32),
        ((2, 4), "dropless", True, jnp.float32),
        ((2, 4), "dropless", False, jnp.float32),
        ((4,), "dropless", True, jnp.bfloat16),
        ((4,), "capacity", False, jnp.bfloat16),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(sizes, mode, check_vma, dtype):
    mesh = mesh_of(*sizes)
    values = arrays(TOKENS * mesh.size, dtype)
    loss, grads, dropped = step_of(mesh, check_vma, values, **MODES[mode])
    want = jax.jit(jax.value_and_grad(dense_loss, argnums=(0, 1, 2, 3)))(*values)
    assert dropped == 0
    assert_close((loss, grads), want, 1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("wrap", ["remat", "scan"])
def test_under_remat_and_scan(wrap):
    mesh, values = mesh_of(4), arrays(TOKENS * 4)

    def twice(loss):
        def looped(x, *params):
            def body(total, part):
                loss_of_part, aux = loss(part, *params)
                return total + loss_of_part, aux

            zero = jax.lax.pcast(jnp.float32(0), "expert", to="varying")
            total, aux = jax.lax.scan(body, zero, x.reshape(2, -1, WIDTH))
            return total / 2, jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), aux)

        return looped

    def dense_twice(x, *params):
        # The halves that the ranks see together: each rank's first tokens, each rank's last ones.
        parts = x.reshape(4, 2, -1, WIDTH).swapaxes(0, 1).reshape(2, -1, WIDTH)
        return (dense_loss(parts[0], *params) + dense_loss(parts[1], *params)) / 2

    reference = dense_loss if wrap == "remat" else dense_twice
    got = step_of(mesh, True, values, wrap=jax.checkpoint if wrap == "remat" else twice)
    want = jax.jit(jax.value_and_grad(reference, argnums=(0, 1, 2, 3)))(*values)
    assert_close(got[:2], want, 1e-5)


def zipf(num_tokens, num_experts=EXPERTS, one=None):
    """Tokens and a router that prefers some experts, or wants `one` alone."""
    x, router_w, *weights = arrays(num_tokens, num_experts=num_experts)
    popularity = -3 * np.log(np.arange(1, num_experts + 1))
    if one is not None:
        popularity = np.where(np.arange(num_experts) == one, 100.0, 0.0)
    return [x.at[:, 0].set(1), router_w.at[0].set(jnp.asarray(popularity, jnp.float32)), *weights]


@CHECK_VMA
@pytest.mark.parametrize("one", [None, 5])
def test_hot_and_empty_experts(check_vma, one):
    mesh, values = mesh_of(8), zipf(TOKENS * 8, one=one)
    loss, grads, dropped = step_of(mesh, check_vma, values)
    want = jax.jit(jax.value_and_grad(dense_loss, argnums=(0, 1, 2, 3)))(*values)
    assert dropped == 0
    assert_close((loss, grads), want, 1e-5)
    rows = np.asarray(layers.top_k_router(values[0] @ values[1], top_k=K).rows_per_expert)
    assert rows.max() > 4 * rows.mean()
    assert one is not None or (rows == 0).any()
    assert np.abs(np.asarray(grads[2]))[rows == 0].sum() == 0


def forward(mesh, values, check_vma=True, **options):
    """y and aux, dropped by rank."""
    specs = specs_of(mesh)

    def fn(*local):
        y, aux = moe(*local, **options)
        return y, aux._replace(dropped=aux.dropped[None])

    aux_specs = layers.MoeAux(P(), P(), P(mesh.axis_names), P())
    return run(fn, mesh, specs, (specs[0], aux_specs), *values, check_vma=check_vma)


def by_hand(values, num_ranks, keep):
    """y by numpy's order of rows, keep(counts [rank, expert]) rows of each block; rows dropped."""
    routing = layers.top_k_router(values[0] @ values[1], top_k=K)
    experts = np.asarray(routing.experts).reshape(num_ranks, -1, K)
    counts = np.stack([np.bincount(e.ravel(), minlength=EXPERTS) for e in experts])
    kept = keep(counts)
    there = np.zeros(experts.shape, np.float32)
    for rank in range(num_ranks):
        used = np.zeros(EXPERTS, int)
        for j in range(K):  # First choices first.
            for t in range(experts.shape[1]):
                e = experts[rank, t, j]
                there[rank, t, j] = used[e] < kept[rank, e]
                used[e] += 1
    y, _ = dense(*values, kept=jnp.asarray(there.reshape(-1, K)))
    return y, (counts - kept).sum(1), counts.sum(0)


def levelled(counts, num_ranks, size):
    """The largest common height of each rank's blocks at which at most `size` rows come."""
    kept = counts.reshape(num_ranks, num_ranks, -1).copy()
    for rank in range(num_ranks):
        blocks = kept[:, rank]
        height = blocks.max()
        while np.minimum(blocks, height).sum() > size:
            height -= 1
        kept[:, rank] = np.minimum(blocks, height)
    return kept.reshape(counts.shape)


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"output_size": 40}, lambda counts: levelled(counts, 4, 40)),
        ({"output_size": 3}, lambda counts: levelled(counts, 4, 3)),
        ({"mode": "capacity", "capacity_factor": 1.0}, lambda counts: np.minimum(counts, 2)),
        ({"mode": "capacity", "capacity_factor": 0.01}, lambda counts: np.minimum(counts, 1)),
    ],
    ids=["room for 40", "room for 3", "capacity 1", "capacity 0.01"],
)
def test_dropped_rows_are_counted_and_add_nothing(options, keep):
    mesh, values = mesh_of(4), zipf(TOKENS * 4)
    y, aux = forward(mesh, values, **options)
    want, dropped, rows = by_hand(values, 4, keep)
    assert dropped.sum() > 0
    np.testing.assert_array_equal(aux.dropped, dropped)
    np.testing.assert_array_equal(aux.rows_per_expert, rows)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", list(MODES.values()), ids=list(MODES))
def test_padding_goes_nowhere(options):
    mesh, values = mesh_of(4), arrays(TOKENS * 4)
    mask = np.ones(TOKENS * 4, bool)
    mask[TOKENS : 2 * TOKENS] = False  # A rank without a token.
    mask[5] = False
    specs = (*specs_of(mesh), P("expert"))

    def fn(*local):
        y, aux = moe(*local[:4], mask=local[4], **options)
        return y, aux.rows_per_expert, jax.lax.psum(aux.dropped, "expert"), aux[0]

    got = run(fn, mesh, specs, (P("expert"), P(), P(), P()), *values, jnp.asarray(mask))
    y, rows, dropped, balance = got
    alone = layers.top_k_router(values[0][mask] @ values[1], top_k=K)
    assert dropped == 0
    assert rows.sum() == K * mask.sum()
    np.testing.assert_array_equal(rows, alone.rows_per_expert)
    np.testing.assert_allclose(balance, alone.load_balancing_loss, rtol=1e-6)
    want, _ = dense(*values)
    np.testing.assert_allclose(y, np.where(mask[:, None], want, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", list(MODES.values()), ids=list(MODES))
def test_no_tokens_at_all(options):
    y, aux = forward(mesh_of(4), arrays(0), **options)
    assert y.shape == (0, WIDTH)
    assert (int(aux.dropped.sum()), float(aux.load_balancing_loss)) == (0, 0.0)


@CHECK_VMA
def test_own_experts_and_leading_dimensions(check_vma):
    """A function of rows and group sizes, and tokens that are [batch, sequence, width]."""
    mesh, values = mesh_of(4), arrays(TOKENS * 4)
    specs = specs_of(mesh)

    def fn(x, router_w, w_in, w_out):
        def experts(rows, sizes):
            return jax.lax.ragged_dot(
                jax.nn.gelu(jax.lax.ragged_dot(rows, w_in, sizes)), w_out, sizes
            )

        options = {"axis_name": "expert", "num_experts": EXPERTS, "top_k": K}
        y, _ = layers.moe_layer(x.reshape(2, -1, WIDTH), router_w, experts, **options)
        return y.reshape(-1, WIDTH)

    y = run(fn, mesh, specs, P("expert"), *values, check_vma=check_vma)
    np.testing.assert_allclose(y, dense(*values)[0], rtol=1e-5, atol=1e-5)


def test_experts_over_two_axes():
    mesh, values = mesh_of(2, 4), arrays(TOKENS * 8)
    both = P(("data", "expert"))
    specs = (both, P(), both, both)
    layer = functools.partial(moe, axis_name=("data", "expert"))
    y = run(lambda *local: layer(*local)[0], mesh, specs, both, *values)
    np.testing.assert_allclose(y, dense(*values)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("output_size", [None, TOKENS * K + 3], ids=["all", "some"])
def test_dropless_moves_the_kept_rows_and_no_others(output_size):
    """Counted by the runtime as it moves them, there and back, and back again in the backward."""
    mesh, values = mesh_of(8), zipf(TOKENS * 8)

    def fn(x, router_w, *_):
        routing = layers.top_k_router(x @ router_w, top_k=K)
        options = {"axis_name": "expert", "num_experts": EXPERTS, "output_size": output_size}

        def loss(x):
            rows, dispatch = layers.dispatch_to_experts(x, routing.experts, **options)
            y = layers.combine_from_experts(rows, routing.weights, dispatch)
            return (y**2).sum(), (dispatch.group_sizes, dispatch.dropped[None])

        gradient, (sizes, dropped) = jax.grad(loss, has_aux=True)(x)
        return gradient, sizes, dropped

    jcoll.reset_metrics()
    rank = P("expert")
    gradient, sizes, dropped = run(fn, mesh, specs_of(mesh), (rank, rank, rank), *values)
    jax.block_until_ready(gradient)
    kept = int(sizes.sum())
    assert kept == TOKENS * K * 8 - dropped.sum()
    assert (dropped.sum() > 0) == (output_size is not None)
    moved = [r["row_bytes"] for r in jcoll.metrics() if r["op"] == "ragged_all_to_all"]
    assert moved == [kept * WIDTH * 4] * 4


def test_capacity_moves_blocks_of_one_size():
    mesh, values = mesh_of(8), zipf(TOKENS * 8)

    def fn(x, router_w, *_):
        experts = layers.top_k_router(x @ router_w, top_k=K).experts
        options = {"axis_name": "expert", "num_experts": EXPERTS, "mode": "capacity"}
        return layers.dispatch_to_experts(x, experts, **options)[0]

    jcoll.reset_metrics()
    jax.block_until_ready(run(fn, mesh, specs_of(mesh), P("expert"), *values))
    (row,) = (r for r in jcoll.metrics() if r["op"] == "all_to_all")
    assert row["bytes"] == 2 * TOKENS * K * WIDTH * 4, "capacity_factor times the routed rows"


def test_backward_of_dispatch_is_combine():
    """One exchange of rows each way, and none of sizes: the layout is kept."""
    mesh, values = mesh_of(8), arrays(TOKENS * 8)
    specs = specs_of(mesh)
    step = functools.partial(train_step, mesh, True)
    body = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs, P()))
    text = str(jax.make_jaxpr(body)(*place(values, mesh, specs)))
    assert text.count("= jcoll_ragged_all_to_all[") == 4
    assert text.count("= jcoll_all_gather[") == 1
    assert "jcoll_all_to_all[" not in text


def test_overflow_height():
    for counts, size in (([5, 1, 9], 9), ([5, 1, 9], 15), ([5, 1, 9], 0), ([4, 4], 7), ([0], 0)):
        got = np.asarray(fit(jnp.asarray(counts, jnp.int32), size))
        height = max(h for h in range(16) if np.minimum(counts, h).sum() <= size)
        np.testing.assert_array_equal(got, np.minimum(counts, height))


def test_an_expert_named_twice():
    """There is room for k different experts; rows beyond it are dropped and counted."""
    mesh, num_tokens = mesh_of(8), 4

    def fn(x):
        experts = jnp.zeros((num_tokens, 2), jnp.int32)
        options = {"axis_name": "expert", "num_experts": 8}
        rows, dispatch = layers.dispatch_to_experts(x, experts, **options)
        y = layers.combine_from_experts(rows, jnp.ones((num_tokens, 2), jnp.float32), dispatch)
        return y, dispatch.group_sizes, dispatch.dropped[None]

    x = jnp.ones((num_tokens * 8, 3), jnp.float32)
    y, sizes, dropped = run(fn, mesh, (P("expert"),), (P("expert"),) * 3, x)
    np.testing.assert_array_equal(sizes, [num_tokens * 8] + [0] * 7)
    np.testing.assert_array_equal(dropped, [num_tokens] * 8)
    np.testing.assert_array_equal(y, x)  # First choices come first, so the second are dropped.


# Bad input.


@pytest.mark.parametrize("mode", ["dropless", "capacity"])
@pytest.mark.parametrize(
    ("rows", "weights", "match"),
    [
        (slice(None), (2, 4), r"weights \(2, 4\); .*\[tokens, k\] = \[4, 2\]"),
        (slice(None), (8,), r"weights \(8,\)"),
        (slice(1, None), (4, 2), r"rows have shape .*dispatch needs \["),
    ],
)
def test_combine_refuses(mode, rows, weights, match):
    def fn(x):
        options = {"axis_name": "expert", "num_experts": 8, "mode": mode}
        got, dispatch = layers.dispatch_to_experts(x, jnp.zeros((4, 2), int), **options)
        return layers.combine_from_experts(got[rows], jnp.ones(weights, x.dtype), dispatch)

    with pytest.raises(ValueError, match=f"(?s)combine_from_experts over.*'expert'.*{match}"):
        run(fn, mesh_of(8), (P("expert"),), P("expert"), jnp.ones((32, 3), jnp.float32))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"top_k": 17}, ValueError, "top_k=17 experts a token of 16"),
        ({"top_k": 0}, ValueError, "top_k=0"),
        ({"top_k": 2.0}, TypeError, "top_k=2.0 is not an integer"),
        (
            {"num_experts": 12},
            ValueError,
            "moe_layer over axis 'expert': num_experts=12.*8 ranks.*Use 16",
        ),
        ({"num_experts": 0}, ValueError, "num_experts=0.*Use 8"),
        ({"num_experts": 24}, ValueError, r"router_w has shape \(16, 16\).*24 experts"),
        ({"mode": "dropped"}, ValueError, "mode='dropped' is unknown.*dropless, capacity"),
        ({"output_size": 0}, ValueError, "output_size=0.*at least 1"),
        ({"output_size": 1.5}, TypeError, "output_size=1.5 is not an integer"),
        ({"mode": "capacity", "capacity_factor": 0}, ValueError, "capacity_factor=0 is not"),
        ({"mode": "capacity", "capacity_factor": float("nan")}, ValueError, "capacity_factor=nan"),
        ({"mode": "capacity", "output_size": 16}, ValueError, "output_size=16 has no.*dropless"),
        ({"capacity_factor": 1.5}, ValueError, "capacity_factor=1.5 has no.*mode='capacity'"),
        ({"algorithm": "no_such"}, ValueError, "no_such"),
        ({"timeout_s": -1}, ValueError, "timeout_s=-1"),
        ({"axis_name": "nope"}, NameError, "moe_layer.*'nope'"),
    ],
    ids=str,
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        forward(mesh_of(8), arrays(TOKENS * 8), **options)


def test_tokens_without_features_are_refused():
    def fn(x):
        router = jnp.zeros((0, 8))
        layers.moe_layer(x, router, lambda rows, _: rows, "expert", num_experts=8, top_k=1)

    with pytest.raises(ValueError, match=r"(?s)moe_layer.*x has shape \(4, 0\).*at least 1"):
        run(fn, mesh_of(8), (P("expert"),), P("expert"), jnp.zeros((32, 0)))


def test_weights_of_all_ranks_are_refused():
    mesh, values = mesh_of(8), arrays(TOKENS * 8)
    specs = (P("expert"), P(), P(), P())
    with pytest.raises(
        ValueError, match=r"(?s)w_in and w_out.*\(16, 16, 24\).*\[2, 16, hidden\].*in_specs"
    ):
        run(lambda *local: moe(*local)[0], mesh, specs, P("expert"), *values)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda x: layers.top_k_router(x.astype(int), top_k=1),
            TypeError,
            r"int64\[4, 3\]; floats",
        ),
        (lambda x: layers.top_k_router(x[0], top_k=1), TypeError, r"float32\[3\]"),
        (
            lambda x: layers.top_k_router(x, top_k=1, mask=x),
            ValueError,
            r"mask is float32.*bool\[4\]",
        ),
        (lambda x: grouped_mlp(x, x, x, x), ValueError, "x, w_in and w_out have shapes"),
        (
            lambda x: grouped_mlp(x, x[None, :3], x[:2, :, None], jnp.arange(1)),
            ValueError,
            r"\(1, 3, 3\) and \(2, 3, 1\)",
        ),
        (
            lambda x: grouped_mlp(x, x[None, :3], x[None].astype(jnp.bfloat16), jnp.arange(1)),
            ValueError,
            "bfloat16",
        ),
        (
            lambda x: grouped_mlp(x, x[None, :3], x[None], jnp.zeros(2, int)),
            ValueError,
            r"group_sizes is int64\[2\] for 1 groups",
        ),
    ],
)
def test_bad_input_of_the_parts(call, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        call(jnp.ones((4, 3), jnp.float32))
