"""Rows of logits and settings on which every implementation must draw what the reference draws."""

from __future__ import annotations

import numpy as np

SETTINGS: tuple[tuple[float, int, float], ...] = (
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 1, 1.0),
    (1.0, 7, 1.0),
    (1.3, 1_000_000, 1.0),
    (1.0, 0, 0.9),
    (1.0, 0, 0.3),
    (0.8, 0, 1e-9),
    (1.0, 0, 0.9999),
    (0.6, 20, 0.93),
    (100.0, 3, 0.55),
    (0.01, 0, 0.9),
)
"""(temperature, top_k, top_p): each filter off, on, beyond the vocabulary and so small that one token is left."""


def _row(*logits: float) -> np.ndarray:
    return np.array(logits, dtype=np.float32)


def hostile_rows() -> dict[str, np.ndarray]:
    """Float32 rows a draw must survive, by what is hostile about them."""
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(513) * 3).astype(np.float32)
    banned = noise.copy()
    banned[rng.permutation(513)[:500]] = -np.inf
    lone = np.full(129, -np.inf, dtype=np.float32)
    lone[77] = -3.0
    ties = np.repeat(_row(2.0, 1.0, 0.5, -1.0), (3, 9, 64, 100))
    peak = np.zeros(65, dtype=np.float32)
    peak[40] = 90.0
    largest = float(np.finfo(np.float32).max)
    return {
        "one token": _row(-7.5),
        "two tokens": _row(0.0, 0.0),
        "all equal": np.full(67, 1.5, dtype=np.float32),
        "ties at every border": rng.permutation(ties),
        "zeros of both signs": _row(*(0.0, -0.0) * 17),
        "most are banned": banned,
        "all but one are banned": lone,
        "one far above": peak,
        "the ends of the range": _row(largest, 0.0, -largest, largest, -np.inf),
        "neighbours in the last place": np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2**-23),
        "denormals": np.arange(-9, 24, dtype=np.float32) * np.float32(1e-45),
    }


def not_finite_rows() -> dict[str, np.ndarray]:
    """Float32 rows that nothing can be drawn from."""
    ramp = np.arange(37, dtype=np.float32)
    rows: dict[str, np.ndarray] = {
        "NaN": ramp.copy(),
        "NaN alone": _row(np.nan),
        "NaN of negative sign first": ramp.copy(),
        "plus infinity": ramp.copy(),
        "NaN after plus infinity": ramp.copy(),
        "nothing but minus infinity": np.full(37, -np.inf, dtype=np.float32),
    }
    rows["NaN"][36] = np.nan
    rows["NaN of negative sign first"][0] = -np.nan
    rows["plus infinity"][5] = np.inf
    rows["NaN after plus infinity"][[5, 6]] = np.inf, np.nan
    return rows


def random_rows(count: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Float32 [count, vocab] like a model's: a few likely tokens above much noise, at several temperatures."""
    rng = np.random.default_rng([seed, count, vocab])
    rows = rng.standard_normal((count, vocab)) * rng.uniform(0.5, 6, (count, 1))
    return rows.astype(np.float32)
