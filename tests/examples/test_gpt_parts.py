"""The parts of the example program, in this process."""

import argparse
import functools
import json
import math

import example_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("optax", "rich", "matplotlib"):
    pytest.importorskip(package, reason="comes with jcoll[examples]")

demo = example_programs.load("demo")
data = example_programs.load("gpt.data")
history = example_programs.load("gpt.history")
model = example_programs.load("gpt.model")
operators = example_programs.load("gpt.operators")
plots = example_programs.load("gpt.plots")

SHAPE = model.Shape(seq=16, layers=2, width=16, heads=2)


@pytest.fixture(autouse=True)
def as_users_have_it():
    with example_programs.as_users_have_it():
        yield


@functools.cache
def initial():
    return jax.jit(lambda: model.init(jax.random.key(0), SHAPE))()


@jax.jit
def logits_of(params, tokens):
    return model.logits_of(params, tokens[None], SHAPE)[0][0]


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


def test_batch_depends_on_step_and_seed_alone(corpus):
    batch = corpus.batch(3, seed=0, num_rows=8, seq=16)
    np.testing.assert_array_equal(batch, corpus.batch(3, 0, 8, 16))
    assert batch.shape == (8, 17)
    assert batch.dtype == np.uint8
    assert not np.array_equal(batch, corpus.batch(4, 0, 8, 16))
    assert not np.array_equal(batch, corpus.batch(3, 1, 8, 16))


def test_validation_batches_are_fixed_and_differ(corpus):
    batches = [corpus.validation_batch(i, 8, 16) for i in (0, 1, 0)]
    np.testing.assert_array_equal(batches[0], batches[2])
    assert not np.array_equal(batches[0], batches[1])


def test_corpus_without_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"found 0 Python sources.*need at least 20"):
        data.Corpus(tmp_path)


def test_model_does_not_look_ahead():
    params = initial()
    tokens = jnp.arange(16, dtype=jnp.int32)
    changed = tokens.at[9].set(200)
    before, after = logits_of(params, tokens), logits_of(params, changed)
    np.testing.assert_array_equal(before[:9], after[:9])
    assert not np.allclose(before[9:], after[9:])


def test_first_logits_are_those_of_guessing():
    tokens = jax.random.randint(jax.random.key(1), (16,), 0, 256)
    probabilities = jax.nn.softmax(logits_of(initial(), tokens))
    assert float(jnp.mean(-jnp.log(probabilities))) == pytest.approx(np.log(256), rel=0.02)


def test_experts_weigh_and_balance():
    """One expert, and several that are all alike, do the same; then the balance is 1."""
    x = jax.random.normal(jax.random.key(2), (2, 3, 4), jnp.float32)
    router = jnp.zeros((4, 6), jnp.float32)
    expert_in, expert_out = (jnp.ones((6, *shape), jnp.float32) for shape in ((4, 5), (5, 4)))
    experts = jax.jit(functools.partial(operators.experts, top_k=3))
    many, routed = experts(x, router, expert_in, expert_out)
    one = jax.nn.gelu(x @ expert_in[0]) @ expert_out[0]
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert float(routed.balance) == pytest.approx(1.0)
    assert float(routed.dropped) == 0.0


def test_sample_continues_the_prompt():
    text = model.sample(initial(), SHAPE, b"import ", 40, seed=0)
    assert text.startswith(b"import ")
    assert len(text) == 47


def run_report(num_sites):
    """As train_gpt.py writes it, of 3 steps on a mesh."""
    log = history.History(tokens_per_step=8, first=2)
    for loss in (3.0, 2.0, 1.0):
        log.add(loss, 0.0, None)
    ops = ("all_gather", "ppermute")
    log.sites = [
        {"op": ops[i % 2], "site": f"x.py:{i}", "calls": 3, "bytes": 9, "exec_s": 0.03, "skew_s": 0}
        for i in range(num_sites)
    ]
    args = argparse.Namespace(mesh={"data": 2, "tensor": 4}, dtype="float32", batch=2, seq=4)
    device = {"count": 8, "kind": "cpu", "parameters": 10}
    return history.make_report(args, device, log, 1.0)


def test_a_report_is_json_whatever_the_loss(tmp_path):
    report = run_report(num_sites=1)
    report["history"][1]["loss"], report["val_loss"] = math.nan, math.inf
    path = tmp_path / "new" / "x.json"
    history.write_json(str(path), report)
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [row["loss"] for row in read["history"]] == [3.0, None, 1.0]
    assert read["val_loss"] is None
    again = history.read_json(str(path))
    assert math.isnan(again["val_loss"]) and math.isnan(again["history"][1]["loss"])
    assert again["history"][2]["loss"] == 1.0


def test_picture_has_every_kind_and_the_number_of_places_left_out(tmp_path, monkeypatch):
    drawn = {}

    def keep(axes, title, *labels):
        drawn[title] = [bar.get_width() for bar in axes.patches if bar.get_width()]

    monkeypatch.setattr(plots, "_dress", keep)
    report = run_report(num_sites=20)
    plots.plot_runs(str(tmp_path / "x.png"), {"jcoll": run_report(0), "lax": run_report(0)}, report)
    (kinds,) = [bars for title, bars in drawn.items() if "by kind" in title]
    assert kinds[:2] == pytest.approx([100, 100])  # Of 20 calls that take 10 ms a step.
    (places,) = [title for title in drawn if "by place" in title]
    assert "6 more, 60.0 ms a step together" in places


def test_legends_cover_no_curve(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    runs = {"jcoll": run_report(4), "lax": run_report(0)}
    plots.plot_runs(str(tmp_path / "x.png"), runs, run_report(9))
    (figure,) = figures
    legends = [axes.get_legend() for axes in figure.get_axes() if axes.get_legend()]
    assert len(legends) == 4
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.get_axes())


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


def test_demo_says_when_its_legs_had_different_machines():
    assert demo.disturbance(1.8, 1.7) == ""
    assert "jcoll had 1.0 cores, lax 1.9" in demo.disturbance(1.03, 1.88)


@pytest.mark.parametrize(
    ("total", "steps"), [(1, [1]), (7, [1, 2, 5, 7]), (50, [1, 2, 5, 10, 20, 50])]
)
def test_demo_shows_steps_by_size(total, steps):
    assert demo.shown_steps(total) == steps
