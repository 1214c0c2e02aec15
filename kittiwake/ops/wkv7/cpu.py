"""WKV-7 on the CPU: serial over tokens in float32, every head by itself, vectors along the values.

The sums over keys are chains of fused multiply-adds in key order, so neither the number of threads nor the way a
prompt was cut can change a bit.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kittiwake.ops.cpu_math import exp32, fma, row_square_sum, row_sum, sigmoid32
from kittiwake.ops.jit import kernel

PARALLEL_WORK = 1 << 15
"""Rows times state values below which starting the threads costs more than they save."""

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_DECAY_SCALE = np.float32(-0.6065306597126334)  # -e**-0.5
_SMALLEST_NORM = np.float32(1e-12)


@kernel()
def read_state(state, a, sa):  # type: ignore[no-untyped-def]
    """sa [V] = a [K] times state [K, V], four keys at a time in one chain."""
    keys = state.shape[0]
    for v in range(sa.shape[0]):
        sa[v] = _ZERO
    k = 0
    while k + 4 <= keys:
        s0, s1, s2, s3 = state[k], state[k + 1], state[k + 2], state[k + 3]
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        for v in range(sa.shape[0]):
            sa[v] = fma(s3[v], a3, fma(s2[v], a2, fma(s1[v], a1, fma(s0[v], a0, sa[v]))))
        k += 4
    while k < keys:
        for v in range(sa.shape[0]):
            sa[v] = fma(state[k, v], a[k], sa[v])
        k += 1


@kernel()
def _update_row(row, decay, b, k, r, sa, values, y):  # type: ignore[no-untyped-def]
    """One key row of the state: row = decay row + b sa + k values; y += r row."""
    for v in range(row.shape[0]):
        s = fma(row[v], decay, fma(sa[v], b, values[v] * k))
        row[v] = s
        y[v] = fma(s, r, y[v])


@kernel()
def _step(state, r, w, k, v, a, b, sa, y):  # type: ignore[no-untyped-def]
    """One token of one head: state [K, V] updated, y [V] written; sa [V] is scratch."""
    read_state(state, a, sa)
    for i in range(y.shape[0]):
        y[i] = _ZERO
    for i in range(state.shape[0]):
        _update_row(state[i], w[i], b[i], k[i], r[i], sa, v, y)


@kernel()
def _scan_head(r, w, k, v, a, b, first, last, head, state, y):  # type: ignore[no-untyped-def]
    sa = np.empty(v.shape[2], np.float32)
    for i in range(first, last):
        _step(state, r[i, head], w[i, head], k[i, head], v[i, head], a[i, head], b[i, head], sa, y[i, head])


@kernel(parallel=True)
def scan(r, w, k, v, a, b, starts, slots, state, y):  # type: ignore[no-untyped-def]
    """r, w (decay), k, a, b float32 [N, H, K], v [N, H, V], state [S, H, K, V] (updated), y [N, H, V] (written)."""
    heads = r.shape[1]
    for task in prange(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        _scan_head(r, w, k, v, a, b, starts[sequence], starts[sequence + 1], head, state[slots[sequence], head], y)


@kernel()
def _prepare(rkv, low, v_first, vectors, is_first_layer, width, at, decay, a, b, k, v):  # type: ignore[no-untyped-def]
    """Decay, removal key, replacement key and value of one row and head, channels from ``at`` on.

    One output a loop: LLVM vectorises a loop only while it can check that few arrays do not overlap.
    """
    end = at + decay.shape[0]
    key, value = rkv[width + at : width + end], rkv[2 * width + at : 2 * width + end]
    low_w, low_a = low[at:end], low[width + at : width + end]
    w0, a0, k_k, k_a = vectors[0, at:end], vectors[1, at:end], vectors[3, at:end], vectors[4, at:end]
    for i in range(decay.shape[0]):
        decay[i] = exp32(_DECAY_SCALE * sigmoid32(w0[i] + low_w[i]))
    for i in range(b.shape[0]):
        b[i] = sigmoid32(a0[i] + low_a[i])
    for i in range(k.shape[0]):
        k[i] = key[i] * fma(b[i] - _ONE, k_a[i], _ONE)
    for i in range(a.shape[0]):
        a[i] = key[i] * k_k[i]
    scale = _ONE / max(np.sqrt(row_square_sum(a, _ZERO)), _SMALLEST_NORM)
    for i in range(a.shape[0]):
        a[i] = -(a[i] * scale)
    for i in range(b.shape[0]):
        b[i] = -a[i] * b[i]
    first = v_first[at:end]
    if is_first_layer:
        for i in range(v.shape[0]):
            v[i] = value[i]
            first[i] = value[i]
    else:
        v0, low_v = vectors[2, at:end], low[3 * width + at : 3 * width + end]
        for i in range(v.shape[0]):
            v[i] = fma(first[i] - value[i], sigmoid32(v0[i] + low_v[i]), value[i])


@kernel()
def _finish(r, k, v, y, gate, r_k, norm_weight, norm_bias, eps, products, out):  # type: ignore[no-untyped-def]
    """Group norm of one head, bonus and gate: out = (norm(y) + (sum r k r_k) v) * gate; ``products`` is scratch."""
    size = np.float32(y.shape[0])
    mean = row_sum(y) / size
    scale = _ONE / np.sqrt(row_square_sum(y, mean) / size + eps)
    for i in range(k.shape[0]):
        products[i] = r[i] * k[i] * r_k[i]
    bonus = row_sum(products)
    for i in range(y.shape[0]):
        normed = fma((y[i] - mean) * scale, norm_weight[i], norm_bias[i])
        out[i] = fma(bonus, v[i], normed) * gate[i]


@kernel()
def _mix_head(rkv, low, v_first, vectors, eps, is_first_layer, first, last, head, state, out):  # type: ignore[no-untyped-def]
    """All rows of one sequence and head, from products to the input of the output product."""
    size = state.shape[0]
    width = out.shape[1]
    at = head * size
    scratch = np.empty((8, size), np.float32)
    decay, a, b, k, v, sa, y, products = (
        scratch[0], scratch[1], scratch[2], scratch[3], scratch[4], scratch[5], scratch[6], scratch[7],
    )  # fmt: skip
    r_k, norm_weight, norm_bias = vectors[5], vectors[6], vectors[7]
    for i in range(first, last):
        r = rkv[i, at : at + size]
        _prepare(rkv[i], low[i], v_first[i], vectors, is_first_layer, width, at, decay, a, b, k, v)
        _step(state, r, decay, k, v, a, b, sa, y)
        _finish(
            r, k, v, y, low[i, 2 * width + at : 2 * width + at + size], r_k[at : at + size],
            norm_weight[at : at + size], norm_bias[at : at + size], eps, products, out[i, at : at + size],
        )  # fmt: skip


@kernel()
def _mix_serial(rkv, low, v_first, vectors, eps, is_first_layer, starts, slots, state, out):  # type: ignore[no-untyped-def]
    heads = state.shape[1]
    for task in range(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        first, last = starts[sequence], starts[sequence + 1]
        _mix_head(rkv, low, v_first, vectors, eps, is_first_layer, first, last, head, state[slots[sequence], head], out)


@kernel(parallel=True)
def _mix_parallel(rkv, low, v_first, vectors, eps, is_first_layer, starts, slots, state, out):  # type: ignore[no-untyped-def]
    heads = state.shape[1]
    for task in prange(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        first, last = starts[sequence], starts[sequence + 1]
        _mix_head(rkv, low, v_first, vectors, eps, is_first_layer, first, last, head, state[slots[sequence], head], out)


def time_mix(
    rkv: np.ndarray,
    low: np.ndarray,
    v_first: np.ndarray,
    vectors: np.ndarray,
    eps: np.float32,
    is_first_layer: bool,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
    out: np.ndarray,
) -> None:
    """One layer's time mix between its products, for packed rows.

    rkv float32 [≥ N, ≥ 3 C] holds r | k | v; low [≥ N, ≥ 3 C or 4 C] holds w | a | g | v of the low-rank pairs, biases
    not yet added; v_first [≥ N, C] is written in the first layer, read later; vectors [8, C] are w0, a0, v0, k_k, k_a,
    r_k, group norm weight and bias; state [S, H, K, K] is updated; out [≥ N, C] is written.
    """
    work = int(starts[-1]) * state.shape[1] * state.shape[2] * state.shape[3]
    run = _mix_serial if work < PARALLEL_WORK else _mix_parallel
    run(rkv, low, v_first, vectors, eps, is_first_layer, starts, slots, state, out)
