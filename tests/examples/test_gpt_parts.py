"""The parts of the example program, in this process."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("optax", "rich", "matplotlib"):
    pytest.importorskip(package, reason="comes with jcoll[examples]")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

demo = importlib.import_module("demo")
data = importlib.import_module("gpt.data")
model = importlib.import_module("gpt.model")
operators = importlib.import_module("gpt.operators")

SHAPE = model.Shape(seq=16, layers=2, width=16, heads=2)


@pytest.fixture(autouse=True)
def plain_promotion():
    """The model relies on broadcasting, as users' code does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def initial():
    return jax.jit(lambda: model.init(jax.random.key(0), SHAPE))()


@pytest.fixture(scope="module")
def corpus():
    return data.Corpus()


def test_corpus_is_real_and_splits_by_file(corpus):
    assert corpus.train.size > 1_000_000
    assert b"def __init__(self" in corpus.train.tobytes()
    assert corpus.train.size + corpus.validation.size == sum(
        path.stat().st_size for path in corpus.files
    )
    assert corpus.files == sorted(corpus.files)


def test_batch_does_not_depend_on_the_number_of_processes(corpus):
    whole = corpus.batch(3, seed=0, num_rows=8, seq=16, rows=slice(None))
    parts = [corpus.batch(3, 0, 8, 16, rows=slice(i, i + 4)) for i in (0, 4)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert whole.shape == (8, 17)
    assert whole.dtype == np.uint8
    assert not np.array_equal(whole, corpus.batch(4, 0, 8, 16, slice(None)))
    assert not np.array_equal(whole, corpus.batch(3, 1, 8, 16, slice(None)))


def test_validation_batches_are_fixed_and_differ(corpus):
    batches = [corpus.validation_batch(i, 8, 16, slice(None)) for i in (0, 1, 0)]
    np.testing.assert_array_equal(batches[0], batches[2])
    assert not np.array_equal(batches[0], batches[1])


def test_corpus_without_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"found 0 Python sources.*need at least 20"):
        data.Corpus(tmp_path)


def test_model_does_not_look_ahead():
    params = initial()
    tokens = jnp.arange(16, dtype=jnp.int32)
    changed = tokens.at[9].set(200)
    logits_of = jax.jit(lambda tokens: model.logits_of(params, tokens[None], SHAPE)[0][0])
    before, after = logits_of(tokens), logits_of(changed)
    np.testing.assert_array_equal(before[:9], after[:9])
    assert not np.allclose(before[9:], after[9:])


def test_first_loss_is_that_of_guessing():
    params = initial()
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 256).astype(jnp.uint8)
    loss, balance = jax.jit(lambda t: model.losses(params, (t[:, :-1], t[:, 1:]), SHAPE))(tokens)
    assert float(balance) == 0.0
    assert float(loss) == pytest.approx(np.log(256), rel=0.02)


def test_experts_weigh_and_balance():
    """One expert, and several that are all alike, do the same; then the balance is 1."""
    x = jax.random.normal(jax.random.key(2), (2, 3, 4), jnp.float32)
    router = jnp.zeros((4, 6), jnp.float32)
    expert_in, expert_out = (jnp.ones((6, *shape), jnp.float32) for shape in ((4, 5), (5, 4)))
    many, balance = operators.experts(x, router, expert_in, expert_out, top_k=3)
    one = jax.nn.gelu(x @ expert_in[0]) @ expert_out[0]
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert float(balance) == pytest.approx(1.0)


def test_sample_continues_the_prompt():
    params = initial()
    text = model.sample(params, SHAPE, b"import ", 40, seed=0)
    assert text.startswith(b"import ")
    assert len(text) == 47
    assert text == model.sample(params, SHAPE, b"import ", 40, seed=0)


def falling(count=100, factor=1.0):
    return [factor * (2 + 3 / (step + 1)) for step in range(count)]


def test_demo_accepts_rounding_and_late_drift():
    ours, theirs = falling(), falling()
    ours[3] *= 1 + 5e-6
    ours[50:] = [loss * (1 + 0.01 * (-1) ** i) for i, loss in enumerate(ours[50:])]
    assert demo.disagreements(ours, theirs) == []


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        (falling(factor=1 + 1e-4), "step 1"),
        ([float("nan")] * 100, "step 1"),
        (falling(90), "90 steps and lax 100"),
        (falling(50) + falling(50, 1.1)[:50], "the last steps"),
    ],
)
def test_demo_reports_disagreement(ours, word):
    problems = demo.disagreements(ours, falling())
    assert any(word in problem for problem in problems)


@pytest.mark.parametrize(
    ("total", "steps"), [(1, [1]), (7, [1, 2, 5, 7]), (50, [1, 2, 5, 10, 20, 50])]
)
def test_demo_shows_steps_by_size(total, steps):
    assert demo.shown_steps(total) == steps
