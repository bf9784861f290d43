"""train_gpt.py on meshes of two and three axes: 50 steps with the losses of one device.

Equal up to the order of sums. Adam as it is used would amplify that: it divides by the size of a
gradient, however tiny, and a difference of rounding becomes a different step. So eps is large here
(1e-2, more than most gradients), and the learning rate too, so that the loss falls all the
same. Zeros of ZeRO's padding, clipping and weight decay are in it.
"""

import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax", reason="comes with jcoll[examples]")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

data = importlib.import_module("gpt.data")
mesh_options = importlib.import_module("gpt.mesh_options")
model = importlib.import_module("gpt.model")
options = importlib.import_module("gpt.options")
parallel = importlib.import_module("gpt.parallel")
ranks = importlib.import_module("gpt.ranks")
state = importlib.import_module("gpt.state")

STEPS = 50
TINY = "--layers 2 --width 32 --heads 8 --seq 32 --batch 8 --lr 0.1 --adam-eps 0.01"
EXPERTS = "--experts 4 --top-k 2"
BF16 = "--dtype bf16 --lr 0.05"  # Rounded at 2^-9, runs drift apart faster.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

FAST = [
    "--mesh data=2,tensor=2 --zero 2 --sequence-parallel --overlap",
    f"--mesh data=2,expert=2 --zero 1 {EXPERTS}",
    "--mesh data=2,context=2 --zero 0 --attention ring --overlap",
    f"--mesh data=2,tensor=2,expert=2 --zero 3 {EXPERTS}",
    f"--mesh data=2,tensor=2,context=2 --zero 3 --attention ulysses {BF16}",
]
SLOW = [
    "--mesh data=2,tensor=2 --zero 0 --overlap",
    "--mesh data=3,tensor=2 --zero 1 --batch 9",
    "--mesh data=2,tensor=4 --zero 3 --sequence-parallel",
    "--mesh data=4,tensor=2 --zero 2 --accumulate 2",
    f"--mesh data=2,expert=2 --zero 0 --overlap {EXPERTS}",
    f"--mesh data=4,expert=2 --zero 2 {EXPERTS}",
    f"--mesh data=2,expert=4 --zero 3 {EXPERTS} {BF16}",
    "--mesh data=2,context=4 --zero 3 --attention ring",
    "--mesh data=4,context=2 --zero 1 --attention ulysses",
    "--mesh data=2,context=2 --zero 2 --attention gathered --accumulate 4",
    f"--mesh data=2,tensor=2,expert=2 --zero 0 --sequence-parallel --overlap {EXPERTS}",
    f"--mesh data=2,tensor=2,expert=2 --zero 1 {EXPERTS} {BF16}",
    f"--mesh data=2,tensor=2,expert=2 --zero 2 --sequence-parallel {EXPERTS}",
    "--mesh data=2,tensor=2,context=2 --zero 0 --attention ulysses --accumulate 2",
    "--mesh data=2,tensor=2,context=2 --zero 1 --attention gathered --sequence-parallel",
    "--mesh data=2,tensor=2,context=2 --zero 2 --attention ring --sequence-parallel --overlap",
    f"--mesh data=2,expert=2,context=2 --zero 3 --attention ring {EXPERTS}",
]


@pytest.fixture(autouse=True, scope="module")
def compiled_fast():
    """Compiling is most of the time, and 50 small steps are little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def as_users_have_it():
    """The examples rely on broadcasting and on 32 bits being the default."""
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(False),
    ):
        yield


def parsed(flags):
    parser, args = options.parse(f"{TINY} {flags}".split())
    size = np.prod(list((args.mesh or {"data": 1}).values()))
    mesh_options.check_mesh(parser, args, int(size))
    return args


corpus = functools.cache(data.Corpus)


def train_on_mesh(flags, steps=STEPS):
    """(losses, final state, Trainer) of the steps as train_gpt.py takes them."""
    args = parsed(flags)
    trainer = parallel.make_trainer(args)
    (params, opt_state), first = parallel.first_state(trainer)
    losses = []
    for index in range(first, first + steps):
        windows = corpus().batch(index, args.seed, args.batch, args.seq)
        tokens = parallel.place(trainer, windows)
        params, opt_state, loss = trainer.step(params, opt_state, tokens)
        losses.append(float(loss))
    return losses, (params, opt_state), trainer


@functools.cache
def train_on_one_device(dtype="float32", batch=8, experts=0, lr=0.1):
    """(losses, final parameters) without a mesh, by jax and optax alone."""
    args = parsed(f"--batch {batch} --experts {experts} --lr {lr}")
    shape = state.shape_of(args)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(parallel.schedule(args.lr), b2=0.98, eps=args.adam_eps, weight_decay=0.01),
    )

    def loss(params, tokens):
        values = ranks.cast(params, dtype)
        cross_entropy, balance = model.losses(values, tokens, shape)
        return cross_entropy + model.BALANCE * balance, cross_entropy

    @jax.jit
    def step(params, opt_state, tokens):
        (_, cross_entropy), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, cross_entropy

    params = jax.jit(state.initializer(args))()
    opt_state = optimizer.init(params)
    losses = []
    for index in range(STEPS):
        windows = jnp.asarray(corpus().batch(index, args.seed, args.batch, args.seq))
        tokens = windows[:, :-1], windows[:, 1:]
        params, opt_state, loss_value = step(params, opt_state, tokens)
        losses.append(float(loss_value))
    return losses, jax.device_get(params)


def check(flags):
    args = parsed(flags)
    losses, (params, _), trainer = train_on_mesh(flags)
    settings = args.dtype, args.batch, args.experts, args.lr
    same_losses, same_params = train_on_one_device(*settings)
    np.testing.assert_allclose(losses, same_losses, rtol=TOLERANCE[args.dtype])
    assert losses[-1] < losses[0] - 1
    if args.dtype == "float32":
        jax.tree.map(check_leaf, params, same_params, trainer.layouts.params)


def check_leaf(got, want, layout):
    """50 updates of each leaf were the same: so were its gradients."""
    got = np.asarray(got)[tuple(map(slice, layout.shape))]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("flags", FAST)
def test_losses_are_those_of_one_device(flags):
    check(flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags", SLOW)
def test_losses_of_more_combinations(flags):
    check(flags)


def test_checkpoint_goes_on_elsewhere(tmp_path):
    """Saved by ZeRO-3 on one mesh, taken up by ZeRO-1 on another."""
    folder = str(tmp_path / "step-2")
    before, trained, trainer = train_on_mesh("--mesh data=4 --zero 3", steps=2)
    state.save(folder, trained, 2, trainer.layouts)
    after, _, _ = train_on_mesh(f"--mesh data=2,tensor=2 --zero 1 --resume {folder}", steps=3)
    np.testing.assert_allclose(before + after, train_on_one_device()[0][:5], rtol=1e-5)
