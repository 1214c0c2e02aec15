"""RWKV-7 in numpy float64, one token at a time, written from the equations of the RWKV-7 paper (arXiv:2503.14456).

The constants that the equations leave open follow BlinkDL/RWKV-LM's x070 models: layer norms at 1e-5, group norm at
64e-5 whatever the head size, token shift of the normed activations, the key norm's divisor at least 1e-12.

Letters: T tokens, L layers, H heads, K key and V value size of a head, C = H * K width. A state matrix is [V, K].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
State = dict[str, Array]

LAYER_NORM_EPS = 1e-5
DECAY_SCALE = math.exp(-0.5)


def widen(tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]]) -> dict[str, Array]:
    """Return every tensor as float64 without its leading axes of size 1; widening bfloat16 or float32 is exact."""
    return {name: _widen(tensor) for name, tensor in tensors.items()}


def _widen(tensor: torch.Tensor | npt.NDArray[Any]) -> Array:
    array = tensor.detach().cpu().double().numpy() if isinstance(tensor, torch.Tensor) else tensor.astype(np.float64)
    return array.reshape(array.shape[2:]) if array.ndim == 3 and array.shape[:2] == (1, 1) else array


def zero_state(tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]]) -> State:
    """Return the state before the first token: att_shift [L, C], wkv [L, H, V, K] and ffn_shift [L, C], all zero."""
    layers, width = _count_layers(tensors), tensors["emb.weight"].shape[1]
    heads, size = tensors["blocks.0.att.r_k"].shape
    return {
        "att_shift": np.zeros((layers, width)),
        "wkv": np.zeros((layers, heads, size, size)),
        "ffn_shift": np.zeros((layers, width)),
    }


def _count_layers(tensors: Mapping[str, Any]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))


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
    start = zero_state(tensors) if state is None else state
    after = {part: np.array(start[part], dtype=np.float64) for part in ("att_shift", "wkv", "ffn_shift")}
    last = np.stack([_token(weights, token, after, ln_x_eps) for token in ids])  # [T, C]
    return last @ weights["head.weight"].T, after


def _token(weights: Mapping[str, Array], token: int, state: State, ln_x_eps: float) -> Array:
    """Return the normed last hidden row [C] of one token; the state is advanced in place."""
    x = _layer_norm(weights["emb.weight"][token], weights, "blocks.0.ln0")
    v_first = None
    for layer in range(len(state["wkv"])):
        block = f"blocks.{layer}."
        normed = _layer_norm(x, weights, block + "ln1")
        att = _inner(weights, block + "att.")
        shift, wkv = state["att_shift"][layer], state["wkv"][layer]
        mixed, wkv, v_first = time_mix(att, normed, shift, wkv, v_first, ln_x_eps)
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
    p: Mapping[str, Array], x: Array, previous: Array, wkv: Array, v_first: Array | None, ln_x_eps: float
) -> tuple[Array, Array, Array]:
    """Return the time mix's output [C], the new state matrices [H, V, K] and the value row of layer 0 [C].

    `x` and `previous` are this token's and the last token's normed rows [C]; `v_first` is None in layer 0.
    """
    by_head = p["r_k"].shape  # [H, K]
    x_r, x_w, x_k, x_v, x_a, x_g = (x + (previous - x) * p[f"x_{letter}"] for letter in "rwkvag")

    r = p["receptance.weight"] @ x_r
    key = p["key.weight"] @ x_k
    v = p["value.weight"] @ x_v
    decay = np.exp(-DECAY_SCALE * _sigmoid(p["w0"] + np.tanh(x_w @ p["w1"]) @ p["w2"]))  # within (0.545, 1)
    rate = _sigmoid(p["a0"] + x_a @ p["a1"] @ p["a2"])
    gate = _sigmoid(x_g @ p["g1"]) @ p["g2"]

    if v_first is None:
        v_first = v
    else:
        v = v + (v_first - v) * _sigmoid(p["v0"] + x_v @ p["v1"] @ p["v2"])

    removal = (key * p["k_k"]).reshape(by_head)  # from the key as projected, before `rate` scales it
    removal = removal / np.maximum(np.linalg.norm(removal, axis=-1, keepdims=True), 1e-12)
    k = key * (1 + (rate - 1) * p["k_a"])

    r, k, v_heads, decay, rate = (row.reshape(by_head) for row in (r, k, v, decay, rate))
    y, wkv = wkv7_step(r, decay, k, v_heads, -removal, removal * rate, wkv)  # y [H, V]

    y = _group_norm(y, p["ln_x.weight"], p["ln_x.bias"], ln_x_eps)
    y = y + (r * k * p["r_k"]).sum(axis=-1, keepdims=True) * v_heads
    return p["output.weight"] @ (y.reshape(-1) * gate), wkv, v_first


def channel_mix(p: Mapping[str, Array], x: Array, previous: Array) -> Array:
    """Return the channel mix's output [C] from this token's and the last token's normed rows [C]."""
    hidden = p["key.weight"] @ (x + (previous - x) * p["x_k"])
    mixed: Array = p["value.weight"] @ np.maximum(hidden, 0.0) ** 2
    return mixed


def wkv7_step(r: Array, decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> tuple[Array, Array]:
    """Return y [..., V] and the new state S' [..., V, K] of one token.

    S' = S (diag(decay) + a b^T) + v k^T and y = S' r. v is [..., V]; the other rows are [..., K]; the state is
    [..., V, K] and is not changed in place.
    """
    answer = (state * a[..., None, :]).sum(axis=-1)  # S a, [..., V]
    state = state * decay[..., None, :] + answer[..., :, None] * b[..., None, :] + v[..., :, None] * k[..., None, :]
    return (state * r[..., None, :]).sum(axis=-1), state


def wkv7_scan(r: Array, decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> tuple[Array, Array]:
    """Return the outputs [B, T, H, V] and the final state [B, H, V, K] of the recurrence over T tokens.

    r, decay (not its logarithm), k, a and b are [B, T, H, K]; v is [B, T, H, V]; the state is [B, H, V, K].
    """
    outputs = []
    for t in range(r.shape[1]):
        y, state = wkv7_step(r[:, t], decay[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        outputs.append(y)
    return np.stack(outputs, axis=1), state


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
