"""WKV-6 on the CPU: serial over tokens in float32, every head by itself, vectors along the values.

A decay multiplies the state when its token comes: no power or quotient of decays is formed, so a decay may be 0 and a
prompt as long as it likes. The sums over keys are chains of fused multiply-adds in key order, so neither the number of
threads nor the way a prompt was cut can change a bit.
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


@kernel()
def _move_row(row, decay, k, r, values, y):  # type: ignore[no-untyped-def]
    """One key row of the state: y += r row, then row = decay row + k values."""
    for v in range(row.shape[0]):
        s = row[v]
        y[v] = fma(s, r, y[v])
        row[v] = fma(s, decay, k * values[v])


@kernel()
def _move_two_rows(row, other, decay0, decay1, k0, k1, r0, r1, values, y):  # type: ignore[no-untyped-def]
    """:func:`_move_row` for one key row and the next, so that y is loaded and stored once."""
    for v in range(row.shape[0]):
        s, t, value = row[v], other[v], values[v]
        y[v] = fma(t, r1, fma(s, r0, y[v]))
        row[v] = fma(s, decay0, k0 * value)
        other[v] = fma(t, decay1, k1 * value)


@kernel()
def _step(state, r, w, k, v, u, y, products):  # type: ignore[no-untyped-def]
    """One token of one head: state [K, V] updated, y [V] written; products [K] is scratch."""
    keys = state.shape[0]
    for i in range(y.shape[0]):
        y[i] = _ZERO
    i = 0
    while i + 2 <= keys:
        _move_two_rows(state[i], state[i + 1], w[i], w[i + 1], k[i], k[i + 1], r[i], r[i + 1], v, y)
        i += 2
    if i < keys:
        _move_row(state[i], w[i], k[i], r[i], v, y)
    for i in range(keys):
        products[i] = r[i] * u[i] * k[i]
    bonus = row_sum(products)
    for i in range(y.shape[0]):
        y[i] = fma(bonus, v[i], y[i])


@kernel()
def _scan_head(r, w, k, v, u, first, last, head, state, y):  # type: ignore[no-untyped-def]
    products = np.empty(r.shape[2], np.float32)
    for i in range(first, last):
        _step(state, r[i, head], w[i, head], k[i, head], v[i, head], u[head], y[i, head], products)


@kernel(parallel=True)
def scan(r, w, k, v, u, starts, slots, state, y):  # type: ignore[no-untyped-def]
    """r, w (decay), k float32 [N, H, K], v [N, H, V], u [H, K], state [S, H, K, V] (updated), y [N, H, V] (written)."""
    heads = r.shape[1]
    for task in prange(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        _scan_head(r, w, k, v, u, starts[sequence], starts[sequence + 1], head, state[slots[sequence], head], y)


@kernel()
def _decay_constant(bias, decay):  # type: ignore[no-untyped-def]
    """decay = exp(-exp(bias)); the inner exponential may be infinite, the decay is then 0."""
    for i in range(decay.shape[0]):
        decay[i] = exp32(-exp32(bias[i]))


@kernel()
def _decay_by_token(bias, low, decay):  # type: ignore[no-untyped-def]
    """decay = exp(-exp(bias + low))."""
    for i in range(decay.shape[0]):
        decay[i] = exp32(-exp32(bias[i] + low[i]))


@kernel()
def _norm_head(y, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    """Group norm of one head."""
    size = np.float32(y.shape[0])
    mean = row_sum(y) / size
    scale = _ONE / np.sqrt(row_square_sum(y, mean) / size + eps)
    for i in range(y.shape[0]):
        out[i] = fma((y[i] - mean) * scale, weight[i], bias[i])


@kernel()
def _gate_head(gate, out):  # type: ignore[no-untyped-def]
    """out *= silu(gate)."""
    for i in range(out.shape[0]):
        out[i] = out[i] * (gate[i] * sigmoid32(gate[i]))


@kernel()
def _mix_head(rkvg, decay_low, vectors, eps, is_gated, first, last, head, state, out):  # type: ignore[no-untyped-def]
    """All rows of one sequence and head, from products to the input of the output product."""
    size = state.shape[0]
    width = out.shape[1]
    at = head * size
    end = at + size
    scratch = np.empty((3, size), np.float32)
    decay, y, products = scratch[0], scratch[1], scratch[2]
    decay_bias, bonus = vectors[0, at:end], vectors[1, at:end]
    norm_weight, norm_bias = vectors[2, at:end], vectors[3, at:end]
    is_by_token = decay_low.shape[0] > 0
    if not is_by_token:
        _decay_constant(decay_bias, decay)
    for i in range(first, last):
        row, mixed = rkvg[i], out[i, at:end]
        if is_by_token:
            _decay_by_token(decay_bias, decay_low[i, at:end], decay)
        k, v = row[width + at : width + end], row[2 * width + at : 2 * width + end]
        _step(state, row[at:end], decay, k, v, bonus, y, products)
        _norm_head(y, norm_weight, norm_bias, eps, mixed)
        if is_gated:
            _gate_head(row[3 * width + at : 3 * width + end], mixed)


@kernel()
def _mix_serial(rkvg, decay_low, vectors, eps, is_gated, starts, slots, state, out):  # type: ignore[no-untyped-def]
    heads = state.shape[1]
    for task in range(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        first, last = starts[sequence], starts[sequence + 1]
        _mix_head(rkvg, decay_low, vectors, eps, is_gated, first, last, head, state[slots[sequence], head], out)


@kernel(parallel=True)
def _mix_parallel(rkvg, decay_low, vectors, eps, is_gated, starts, slots, state, out):  # type: ignore[no-untyped-def]
    heads = state.shape[1]
    for task in prange(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        first, last = starts[sequence], starts[sequence + 1]
        _mix_head(rkvg, decay_low, vectors, eps, is_gated, first, last, head, state[slots[sequence], head], out)


def time_mix(
    rkvg: np.ndarray,
    decay_low: np.ndarray,
    vectors: np.ndarray,
    eps: np.float32,
    is_gated: bool,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
    out: np.ndarray,
) -> None:
    """One layer's time mix between its products, for packed rows.

    rkvg float32 [≥ N, ≥ 4 C] holds r | k | v | g, the gate before its activation, or without a gate [≥ N, ≥ 3 C];
    decay_low [≥ N, C] is the low-rank product, bias not yet added, or [0, C] where decays are constant; vectors [4, C]
    are decay bias, bonus, group norm weight and bias; state [S, H, K, K] is updated; out [≥ N, C] is written.
    """
    work = int(starts[-1]) * state.shape[1] * state.shape[2] * state.shape[3]
    run = _mix_serial if work < PARALLEL_WORK else _mix_parallel
    run(rkvg, decay_low, vectors, eps, is_gated, starts, slots, state, out)
