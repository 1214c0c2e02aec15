"""RWKV-4 in float64, written from the paper's sums, not from the recurrence: the weights of all past tokens at once.

Reads BlinkDL's tensor names. Source: arXiv 2305.13048, equations 11 to 20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]


def wkv(
    k: Array, v: Array, log_decay: Array, bonus: Array, before: tuple[Array, Array, Array] | None = None
) -> tuple[Array, Array, Array, Array]:
    """k, v [T, C] of one sequence → wkv [T, C], and num, den, top [C] after it; ``before`` is (num, den, top) before it.

    Every token's weights are formed anew, as exponents that are compared before any is raised.
    """
    tokens = k.shape[0]
    num0, den0, top0 = before if before is not None else (np.zeros(k.shape[1]), np.zeros(k.shape[1]), k[0])
    values, counts = np.concatenate([num0[None], v]), np.concatenate([den0[None], np.ones_like(v)])
    keys = np.concatenate([top0[None], k])
    y = np.empty_like(v)
    for t in range(tokens + 1):
        ages = np.append(t, np.arange(t - 1, -1, -1))[:, None].astype(np.float64)
        exponents = keys[: t + 1] + ages * log_decay
        if t < tokens:
            exponents = np.concatenate([exponents, (bonus + k[t])[None]])
        top = np.where(counts[: len(exponents)] > 0, exponents, -np.inf).max(axis=0)
        weights = np.exp(np.where(counts[: len(exponents)] > 0, exponents - top, -np.inf))
        num = (weights * values[: len(exponents)]).sum(axis=0)
        den = (weights * counts[: len(exponents)]).sum(axis=0)
        if t < tokens:
            y[t] = num / den
    return y, num, den, top


def run(
    tensors: Mapping[str, torch.Tensor], ids: Sequence[int], *, eps: float = 1e-5, rescale_every: int = 0
) -> tuple[Array, dict[str, Array]]:
    """Logits [T, vocabulary] and the state after the ids: att_shift, num, den, top, ffn_shift, each [L, C].

    With ``rescale_every`` as transformers computes in evaluation: the products into the stream of layer i are divided by
    2 ** (i // rescale_every), and the stream is halved after every such number of layers.
    """
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    x = _norm(w["emb.weight"][list(ids)], w, "blocks.0.ln0", eps)
    parts: dict[str, list[Array]] = {name: [] for name in ("att_shift", "num", "den", "top", "ffn_shift")}
    for layer in range(layers):
        block = f"blocks.{layer}."
        scale = 2.0 ** (layer // rescale_every) if rescale_every else 1.0
        normed = _norm(x, w, block + "ln1", eps)
        k, v, r = (
            _mix(normed, w[f"{block}att.time_mix_{letter}"]) @ w[f"{block}att.{name}.weight"].T
            for letter, name in (("k", "key"), ("v", "value"), ("r", "receptance"))
        )
        decay, bonus = -np.exp(w[block + "att.time_decay"].ravel()), w[block + "att.time_first"].ravel()
        y, num, den, top = wkv(k, v, decay, bonus)
        x = x + (_sigmoid(r) * y) @ w[block + "att.output.weight"].T / scale
        for name, value in (("att_shift", normed[-1]), ("num", num), ("den", den), ("top", top)):
            parts[name].append(value)
        normed = _norm(x, w, block + "ln2", eps)
        k, r = (
            _mix(normed, w[f"{block}ffn.time_mix_{letter}"]) @ w[f"{block}ffn.{name}.weight"].T
            for letter, name in (("k", "key"), ("r", "receptance"))
        )
        x = x + _sigmoid(r) * (np.maximum(k, 0) ** 2 @ w[block + "ffn.value.weight"].T) / scale
        parts["ffn_shift"].append(normed[-1])
        if rescale_every and (layer + 1) % rescale_every == 0:
            x = x / 2
    logits = _norm(x, w, "ln_out", eps) @ w["head.weight"].T
    return logits, {name: np.stack(rows) for name, rows in parts.items()}


def _mix(rows: Array, kept: Array) -> Array:
    before = np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])
    return rows * kept.ravel() + before * (1 - kept.ravel())


def _norm(x: Array, w: Mapping[str, Any], name: str, eps: float) -> Array:
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[name + ".weight"] + w[name + ".bias"]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
