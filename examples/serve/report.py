"""What a run measured: rates, latencies, and the share of the collectives."""

import numpy as np

PERCENTILES = (50, 95, 99)


def measured(engine, batch: int) -> dict:
    """The numbers of one engine's run."""
    latencies_s = np.array(engine.latencies_s)
    total_s = float(latencies_s.sum())
    percentiles = np.percentile(latencies_s, PERCENTILES)
    return {
        "tokens_per_s": batch * len(latencies_s) / total_s,
        "latency_ms": {
            f"p{p}": 1e3 * float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)
        },
        "wall_s": total_s,
        "collectives": shares(engine.counters, total_s),
    }


def shares(counters: dict, total_s: float) -> dict | None:
    """Of the time, how much collectives took from the last rank's arrival on, and how much passed
    before that from the first one's: where ranks share cores, these compute meanwhile. None if
    nobody counted: those of jax.lax, or on GPUs.
    """
    if not counters["calls"]:
        return None
    return {
        "calls": int(counters["calls"]),
        "bytes": int(counters["bytes"]),
        "share": counters["exec_s"] / total_s,
        "waiting_share": counters["skew_s"] / total_s,
    }


def same_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts [B, count] begin with in common. Sums in another order may choose
    another token of two that are as likely, and the texts then part for good.
    """
    differs = (a != b).any(axis=0)
    return int(np.argmax(differs)) if differs.any() else len(differs)


def line(name: str, numbers: dict) -> str:
    """One engine's numbers for people."""
    latency = ", ".join(f"{p} {ms:.2f}" for p, ms in numbers["latency_ms"].items())
    text = f"{name:5}  {numbers['tokens_per_s']:7.0f} tokens/s   ms a token: {latency}"
    if numbers["collectives"]:
        counted = numbers["collectives"]
        text += f"   in collectives {counted['share']:.1%}, until the last rank came "
        text += f"{counted['waiting_share']:.0%}"
    return text
