"""train_gpt.py on meshes of two and three axes: 50 steps with the losses of one device.

Equal up to the order of sums. Adam as it is used would amplify that: it divides by the size of a
gradient, however tiny, and a difference of rounding becomes a different step. So eps is large here
(1e-2, where gradients have about 1e-3), and the learning rate too, so that the loss falls all the
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
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

FAST = [
    "--mesh data=2,tensor=2 --sequence-parallel --overlap --zero 2",
    f"--mesh data=2,expert=2 {EXPERTS} --zero 1",
    "--mesh data=2,context=2 --attention ring --zero 0",
    f"--mesh data=2,tensor=2,expert=2 {EXPERTS} --zero 3",
    "--mesh data=2,tensor=2,context=2 --attention ulysses --zero 3 --dtype bf16",
]


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


def losses_on_mesh(flags, steps=STEPS):
    """The loss of each step as train_gpt.py computes it."""
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
def losses_of_one_device(dtype="float32", model_flags="", clip=1.0):
    """The same without a mesh, with optax alone."""
    args = parsed(model_flags)
    shape = state.shape_of(args)
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip),
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
    return losses


def check(flags):
    args = parsed(flags)
    got, _, _ = losses_on_mesh(flags)
    want = losses_of_one_device(args.dtype, EXPERTS if args.experts else "")
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[args.dtype])
    assert got[-1] < got[0] - 1.5


@pytest.mark.parametrize("flags", FAST)
def test_losses_are_those_of_one_device(flags):
    check(flags)
