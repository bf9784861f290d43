"""serve_tp.py as a user runs it, and its model against one without a cache on one device."""

import json

import example_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

SCRIPT = example_programs.EXAMPLES / "serve_tp.py"
serve_tp = example_programs.load("serve_tp")
engine = example_programs.load("serve.engine")
model = example_programs.load("serve.model")
serve_report = example_programs.load("serve.report")

TINY = ["--layers=1", "--width=32", "--heads=8", "--vocabulary=50", "--tokens=20", "--warmup=2"]


def test_comparison_and_its_report(tmp_path):
    file = tmp_path / "serve.json"
    flags = ["--compare", "--batch=3", "--json", file]
    output = example_programs.run_here("serve_tp", *TINY, *flags)
    report = json.loads(file.read_text())
    assert report["same_tokens"] == 1 + 2 + 20
    assert report["device"]["count"] == 8
    assert set(report["runs"]) == {"jcoll", "lax"}
    for name, numbers in report["runs"].items():
        p50, p95, p99 = (numbers["latency_ms"][p] for p in ("p50", "p95", "p99"))
        assert 0 < p50 <= p95 <= p99
        assert numbers["tokens_per_s"] == pytest.approx(3 * 20 / numbers["wall_s"])
        assert f"{name:5}  {numbers['tokens_per_s']:7.0f} tokens/s" in output
    rates = [report["runs"][name]["tokens_per_s"] for name in ("jcoll", "lax")]
    assert report["speedup"] == pytest.approx(rates[0] / rates[1])
    assert report["runs"]["lax"]["collectives"] is None
    counted = report["runs"]["jcoll"]["collectives"]
    assert counted["calls"] == 20 * (1 + 2 + 1)
    assert counted["bytes"] == 20 * 4 * 3 * ((1 + 2) * 32 + 8 * 2)
    assert 0 < counted["share"] < 1


def test_several_processes():
    launch = ["-m", "jcoll", "launch", "-n", 2, "--devices-per-process", 1, SCRIPT]
    output = example_programs.run(*launch, *TINY)
    assert output.count("tokens/s") == 1
    assert "on 2 cpu devices" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads=12", "--width=48"], "--heads 12 does not split over 8 devices"),
        (["--heads=12", "--width=48"], "Try --heads 16"),
        (["--heads=8", "--width=36"], "Try --width 40"),
        (["--tokens=0"], "--tokens 0 is not possible"),
        (["--compare", "--collectives=lax"], "not allowed with"),
        (["--seed=-1"], "--seed -1 is not possible"),
        (["--json=/dev/null/serve.json"], "/dev/null is none"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        serve_tp.main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help():
    assert "--compare" in example_programs.run(SCRIPT, "--help")


# The model


def whole_model(params, tokens, shape):
    """[B, T] -> [B, T, V], every token looking at all before it; no cache, one device."""
    x = params["embedding"][tokens] + params["position"][None, : tokens.shape[1]]
    for layer in params["layers"]:
        h = model.norm(x, broadcast(layer["attention_norm"], x))
        qkv = (h @ layer["qkv"]).reshape(*h.shape[:2], shape.heads, 3, shape.head_size)
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / shape.head_size**0.5
        past = jnp.broadcast_to(jnp.tri(tokens.shape[1], dtype=bool), scores.shape)
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ layer["attention_out"]
        h = model.norm(x, broadcast(layer["mlp_norm"], x))
        inner = h @ layer["mlp_in"]
        x = x + jax.nn.gelu(inner + broadcast(layer["mlp_bias"], inner)) @ layer["mlp_out"]
    return model.norm(x, broadcast(params["final_norm"], x)) @ params["head"]


def broadcast(vector, like):
    return jnp.broadcast_to(vector, like.shape)


def test_decodes_what_the_whole_model_says():
    """Token by token, from a cache split over 4 ranks, with a vocabulary that 4 do not divide."""
    shape = model.Shape(layers=2, width=32, heads=8, vocabulary=50, context=16)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (model.AXIS,))
    with example_programs.as_users_have_it():
        params = engine.make_params(shape, mesh, 1, "float32")
        prompt = np.array([[3, 49, 7], [0, 1, 2]], np.int32)
        serving = engine.Engine("jcoll", shape, mesh, params)
        serving.start(prompt, "float32")
        serving.decode(12, timed=True)
    text = serving.text()
    assert text.shape == (2, 13)
    assert len(serving.latencies_s) == 12
    params = jax.tree.map(lambda leaf: jnp.asarray(jax.device_get(leaf)), params)
    seen = jnp.concatenate([prompt, text], axis=1)
    logits = whole_model(params, seen, shape)[..., : shape.vocabulary]
    np.testing.assert_array_equal(text, jnp.argmax(logits, -1)[:, 2:-1])


def test_likeliest_takes_the_first_of_equals():
    """Of equal logits on one rank and on several, and never a word of the padding."""
    logits = np.zeros((4, 16), np.float32)
    logits[1, [6, 9]] = 1
    logits[2, [4, 5]] = 1
    logits[3, 14:] = 9

    def rank(logits):
        return model.likeliest(logits, 14, {"axis_name": model.AXIS})

    mesh = jax.sharding.Mesh(np.array(jax.devices()), (model.AXIS,))
    fn = jax.shard_map(
        rank, mesh=mesh, in_specs=P(None, model.AXIS), out_specs=P(), check_vma=False
    )
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(jax.jit(fn)(logits), [0, 6, 4, 0])


def test_same_tokens():
    a = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert serve_report.same_tokens(a, a) == 4
    assert serve_report.same_tokens(a, np.array([[1, 2, 3, 4], [5, 6, 0, 8]])) == 2
    assert serve_report.same_tokens(a, a + 1) == 0
