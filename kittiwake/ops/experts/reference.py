"""Readable float32 reference, a row at a time."""

from __future__ import annotations

import numpy as np

SMALLEST_SUM = np.float32(2.0**-14)
"""The chosen probabilities are divided by no less than this."""


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def route(logits: np.ndarray, top_k: int, is_renormalised: bool) -> tuple[np.ndarray, np.ndarray]:
    """logits [N, E] → chosen int64 [N, k] and shares float32 [N, k], the largest first."""
    probs = np.exp(logits - logits.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    chosen = np.argsort(-probs, axis=1, kind="stable")[:, :top_k]
    shares = np.take_along_axis(probs, chosen, axis=1)
    if is_renormalised:
        shares = shares / np.maximum(shares.sum(1, keepdims=True), SMALLEST_SUM)
    return chosen, shares


def silu_times(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, [N, ff]."""
    return gate * _sigmoid(gate) * up


def mix_experts(
    x: np.ndarray, chosen: np.ndarray, shares: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    """x [N, C], chosen, shares [N, k], gate_up [E, C, 2 ff], down [E, ff, C] → [N, C]."""
    y = np.zeros_like(x)
    for i in range(len(x)):
        for expert, share in zip(chosen[i], shares[i], strict=True):
            gate, up = np.split(x[i] @ gate_up[expert], 2)
            y[i] += share * (silu_times(gate, up) @ down[expert])
    return y


def add_gated(y: np.ndarray, shared: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """y, shared [N, C], gate [N] (logits) → [N, C]."""
    return y + _sigmoid(gate)[:, None] * shared
