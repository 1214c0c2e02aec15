"""The ops of gated-delta hybrids in float64, each by another way than our references go.

Sources: transformers, models/qwen4_exp/modeling_qwen4_exp.py; arXiv 2412.06464.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    """By the hyperbolic tangent."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis."""
    return weight * x * (np.mean(x**2, axis=-1, keepdims=True) + eps) ** -0.5


def gated_delta_layer(
    q: Array, k: Array, v: Array, z: Array, a: Array, b: Array, rate: Array, dt_bias: Array, weight: Array, eps: float,
    is_silu: bool, state: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """One sequence, every head with its own q and k [T, H, K]; v, z [T, H, V]; a, b [T, H]; state [H, V, K].

    Equation 10 of the paper as it stands: S = S (decay (1 - beta k k^T)) + beta v k^T, with [V, K] states. Returns the
    rows [T, H V] and the state after them.
    """
    q = q / np.sqrt(np.sum(q**2, -1, keepdims=True) + 1e-6) / np.sqrt(q.shape[-1])
    k = k / np.sqrt(np.sum(k**2, -1, keepdims=True) + 1e-6)
    decay = np.exp(-rate * np.log1p(np.exp(a + dt_bias)))
    beta = sigmoid(b)
    identity = np.eye(k.shape[-1])
    rows = []
    for t in range(len(q)):
        erase = identity - beta[t][:, None, None] * np.einsum("hi,hj->hij", k[t], k[t])
        state = np.einsum("h,hvi,hij->hvj", decay[t], state, erase)
        state = state + beta[t][:, None, None] * np.einsum("hv,hk->hvk", v[t], k[t])
        rows.append(np.einsum("hvk,hk->hv", state, q[t]))
    gate = silu(z) if is_silu else sigmoid(z)
    return (rms_norm(np.array(rows), weight, eps) * gate).reshape(len(q), -1), state


def short_conv(history: Array, x: Array, weight: Array, dilation: int, is_silu: bool) -> Array:
    """history [(taps - 1) dilation, C] and x [T, C] one after the other, convolved channel by channel; weight [taps, C]."""
    spread = np.zeros(((len(weight) - 1) * dilation + 1, weight.shape[1]))
    spread[::dilation] = weight
    rows = np.concatenate([history, x])
    channels = [np.convolve(rows[:, c], spread[::-1, c], "valid") for c in range(x.shape[1])]
    out = np.stack(channels, axis=1)
    return silu(out) if is_silu else out


def mix_experts(x: Array, logits: Array, top_k: int, is_renormalised: bool, gate_up: Array, down: Array) -> Array:
    """All experts for all rows, those not chosen weighed with nothing; [N, C]."""
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shares = np.zeros_like(probs)
    for row, (p, least) in enumerate(zip(probs, np.sort(probs, axis=1)[:, -top_k], strict=True)):
        above, equal = np.flatnonzero(p > least), np.flatnonzero(p == least)
        chosen = np.concatenate([above, equal[: top_k - len(above)]])
        shares[row, chosen] = p[chosen] / (max(p[chosen].sum(), 2**-14) if is_renormalised else 1)
    gate, up = np.split(np.einsum("nc,eci->eni", x, gate_up), 2, axis=-1)
    return np.einsum("ne,eni,eic->nc", shares, silu(gate) * up, down)
