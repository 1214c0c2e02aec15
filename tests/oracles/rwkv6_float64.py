"""RWKV-5 and RWKV-6 in numpy float64, one token at a time, from the equations of arXiv 2404.05892 and BlinkDL's code.

The constants that the equations leave open follow BlinkDL/RWKV-LM: layer norms at 1e-5, group norm at 64e-5 whatever
the head size. RWKV-5.0 has no gate; 5.0 and 5.1 have one decay and bonus a head, 5.2 and 6 one a channel; a bonus named
``time_first`` is a logarithm, one named ``time_faaaa`` is not.

Letters: T tokens, L layers, H heads, K key and V value size of a head, C = H * K width. A state matrix is [K, V].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.oracles.rwkv7_float64 import Array, State, widen

LAYER_NORM_EPS = 1e-5


def heads_of(tensors: Mapping[str, Any]) -> int:
    """H, from the first layer's bonus or decay."""
    for name in ("blocks.0.att.time_faaaa", "blocks.0.att.time_first", "blocks.0.att.time_decay"):
        if name in tensors:
            return int(tensors[name].shape[0])
    raise KeyError("no bonus and no decay")


def zero_state(tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]]) -> State:
    """Return the state before the first token: att_shift [L, C], wkv [L, H, K, V] and ffn_shift [L, C], all zero."""
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    width, heads = tensors["emb.weight"].shape[1], heads_of(tensors)
    size = width // heads
    return {
        "att_shift": np.zeros((layers, width)),
        "wkv": np.zeros((layers, heads, size, size)),
        "ffn_shift": np.zeros((layers, width)),
    }


def run(
    tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]],
    ids: Sequence[int],
    state: Mapping[str, npt.NDArray[Any]] | None = None,
    ln_x_eps: float = 64e-5,
) -> tuple[Array, State]:
    """Return the logits [T, vocabulary] at every position and the state after the last one.

    `tensors` is a checkpoint in BlinkDL's names. `state` (see zero_state) is left as it was; None starts a sequence.
    """
    weights = widen(tensors)
    heads = heads_of(tensors)
    start = zero_state(tensors) if state is None else state
    after = {part: np.array(start[part], dtype=np.float64) for part in ("att_shift", "wkv", "ffn_shift")}
    last = np.stack([_token(weights, token, after, heads, ln_x_eps) for token in ids])
    return last @ weights["head.weight"].T, after


def _token(weights: Mapping[str, Array], token: int, state: State, heads: int, ln_x_eps: float) -> Array:
    x = _layer_norm(weights["emb.weight"][token], weights, "blocks.0.ln0")
    for layer in range(len(state["wkv"])):
        block = f"blocks.{layer}."
        normed = _layer_norm(x, weights, block + "ln1")
        mixed, wkv = time_mix(
            _inner(weights, block + "att."), normed, state["att_shift"][layer], state["wkv"][layer], heads, ln_x_eps
        )
        state["att_shift"][layer], state["wkv"][layer] = normed, wkv
        x = x + mixed
        normed = _layer_norm(x, weights, block + "ln2")
        mixed = channel_mix(_inner(weights, block + "ffn."), normed, state["ffn_shift"][layer])
        state["ffn_shift"][layer] = normed
        x = x + mixed
    return _layer_norm(x, weights, "ln_out")


def _inner(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def time_mix(
    p: Mapping[str, Array], x: Array, previous: Array, wkv: Array, heads: int, ln_x_eps: float
) -> tuple[Array, Array]:
    """Return the time mix's output [C] and the new state matrices [H, K, V]."""
    if "time_maa_x" in p:
        mixed, exponent = _mix_by_token(p, x, previous)
    else:
        mixed = {
            letter: p[f"time_mix_{letter}"] * x + (1 - p[f"time_mix_{letter}"]) * previous
            for letter in "kvrg"
            if f"time_mix_{letter}" in p
        }
        exponent = p["time_decay"]
    bonus = p["time_faaaa"] if "time_faaaa" in p else np.exp(p["time_first"])
    by_head = (heads, len(x) // heads)
    decay = np.exp(-np.exp(exponent))
    decay, bonus = (np.broadcast_to(row.reshape(heads, -1), by_head) for row in (decay, bonus))
    r = (p["receptance.weight"] @ mixed["r"]).reshape(by_head)
    k = (p["key.weight"] @ mixed["k"]).reshape(by_head)
    v = (p["value.weight"] @ mixed["v"]).reshape(by_head)
    y, wkv = wkv6_step(r, decay, k, v, bonus, wkv)
    out = _group_norm(y, p["ln_x.weight"], p["ln_x.bias"], ln_x_eps).reshape(-1)
    if "gate.weight" in p:
        gate = p["gate.weight"] @ mixed["g"]
        out = out * gate * _sigmoid(gate)
    return p["output.weight"] @ out, wkv


def _mix_by_token(p: Mapping[str, Array], x: Array, previous: Array) -> tuple[dict[str, Array], Array]:
    """RWKV-6's inputs of the products by letter, and the decay's exponent."""
    difference = previous - x
    low = np.tanh((x + difference * p["time_maa_x"]) @ p["time_maa_w1"]).reshape(5, -1)
    mixed = {
        letter: x + difference * (p[f"time_maa_{letter}"] + low[i] @ p["time_maa_w2"][i])
        for i, letter in enumerate("wkvrg")
    }
    return mixed, p["time_decay"] + np.tanh(mixed["w"] @ p["time_decay_w1"]) @ p["time_decay_w2"]


def channel_mix(p: Mapping[str, Array], x: Array, previous: Array) -> Array:
    """Return the channel mix's output [C] from this token's and the last token's normed rows [C]."""
    if "time_maa_k" in p:
        x_k, x_r = (x + (previous - x) * p[f"time_maa_{letter}"] for letter in "kr")
    else:
        x_k, x_r = (x * p[f"time_mix_{letter}"] + previous * (1 - p[f"time_mix_{letter}"]) for letter in "kr")
    hidden = np.maximum(p["key.weight"] @ x_k, 0.0) ** 2
    mixed: Array = _sigmoid(p["receptance.weight"] @ x_r) * (p["value.weight"] @ hidden)
    return mixed


def wkv6_step(r: Array, decay: Array, k: Array, v: Array, bonus: Array, state: Array) -> tuple[Array, Array]:
    """Return y [..., V] and the new state S' [..., K, V] of one token.

    y = r^T (diag(bonus) k v^T + S) and S' = diag(decay) S + k v^T. v is [..., V]; the other rows are [..., K]; the
    state is not changed in place.
    """
    added = k[..., :, None] * v[..., None, :]
    y = ((bonus[..., :, None] * added + state) * r[..., :, None]).sum(axis=-2)
    return y, decay[..., :, None] * state + added


def wkv6_scan(r: Array, decay: Array, k: Array, v: Array, bonus: Array, state: Array) -> tuple[Array, Array]:
    """Return the outputs [T, H, V] and the final state [H, K, V]; r, decay, k [T, H, K], v [T, H, V], bonus [H, K]."""
    outputs = []
    for t in range(len(r)):
        y, state = wkv6_step(r[t], decay[t], k[t], v[t], bonus, state)
        outputs.append(y)
    return np.stack(outputs), state


def _layer_norm(x: Array, weights: Mapping[str, Array], name: str) -> Array:
    centred = x - x.mean()
    normed: Array = centred / np.sqrt((centred**2).mean() + LAYER_NORM_EPS)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _group_norm(y: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Norm y [H, V] head by head; weight and bias are [H * V]."""
    centred = y - y.mean(axis=-1, keepdims=True)
    normed: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return normed * weight.reshape(y.shape) + bias.reshape(y.shape)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))
