"""The gated delta rule on the CPU: serial over tokens in float32, every value head by itself, vectors along the values.

The sums over keys are chains of fused multiply-adds in key order, so neither the number of threads nor the way a
prompt was cut can change a bit. Prompt and decoding are one kernel.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kittiwake.ops.cpu_math import exp32, fma, rms_row, row_square_sum, sigmoid32, silu32, softplus32
from kittiwake.ops.jit import kernel
from kittiwake.ops.wkv7.cpu import read_state

PARALLEL_WORK = 1 << 15
"""Rows times state values below which starting the threads costs more than they save."""

_KEY_EPS = np.float32(1e-6)  # added to the squared length of a query or key
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@kernel()
def _unit_row(x, eps, scale, out):  # type: ignore[no-untyped-def]
    """out = x * scale / sqrt(sum x**2 + eps)."""
    factor = scale / np.sqrt(row_square_sum(x, _ZERO) + eps)
    for i in range(out.shape[0]):
        out[i] = x[i] * factor


@kernel()
def _move_row(row, decay, k, q, delta, o):  # type: ignore[no-untyped-def]
    """One key row of the state: row = decay row + k delta; o += q row."""
    for v in range(row.shape[0]):
        s = fma(delta[v], k, row[v] * decay)
        row[v] = s
        o[v] = fma(s, q, o[v])


@kernel()
def _move_two_rows(row, other, decay, k0, k1, q0, q1, delta, o):  # type: ignore[no-untyped-def]
    """:func:`_move_row` for one key row and the next, so that o is loaded and stored once."""
    for v in range(row.shape[0]):
        d = delta[v]
        s = fma(d, k0, row[v] * decay)
        t = fma(d, k1, other[v] * decay)
        row[v] = s
        other[v] = t
        o[v] = fma(t, q1, fma(s, q0, o[v]))


@kernel()
def _step(state, q, k, v, decay, beta, delta, o):  # type: ignore[no-untyped-def]
    """One token of one head: state [K, V] updated, o [V] written; delta [V] is scratch."""
    keys = state.shape[0]
    read_state(state, k, delta)
    for i in range(delta.shape[0]):
        delta[i] = fma(-decay, delta[i], v[i]) * beta
    for i in range(o.shape[0]):
        o[i] = _ZERO
    i = 0
    while i + 2 <= keys:
        _move_two_rows(state[i], state[i + 1], decay, k[i], k[i + 1], q[i], q[i + 1], delta, o)
        i += 2
    if i < keys:
        _move_row(state[i], decay, k[i], q[i], delta, o)


@kernel()
def _gate_row(z, is_silu, out):  # type: ignore[no-untyped-def]
    """out *= silu(z) or sigmoid(z)."""
    if is_silu:
        for i in range(out.shape[0]):
            out[i] = out[i] * silu32(z[i])
    else:
        for i in range(out.shape[0]):
            out[i] = out[i] * sigmoid32(z[i])


@kernel()
def _head(  # type: ignore[no-untyped-def]
    qkv, key_heads, key_head, abz, a_column, b_column, z_column, rate, dt_bias, norm_weight, eps, is_silu, first, last,
    head, state, out,
):  # fmt: skip
    """All rows of one sequence and value head, from the convolution to the input of the output product."""
    keys, values = state.shape
    q_at = key_head * keys
    k_at = (key_heads + key_head) * keys
    v_at = 2 * key_heads * keys + head * values
    z_at = z_column + head * values
    scale = _ONE / np.sqrt(np.float32(keys))
    q, k = np.empty(keys, np.float32), np.empty(keys, np.float32)
    delta, o = np.empty(values, np.float32), np.empty(values, np.float32)
    for i in range(first, last):
        row, gate, mixed = qkv[i], abz[i], out[i, head * values : (head + 1) * values]
        _unit_row(row[q_at : q_at + keys], _KEY_EPS, scale, q)
        _unit_row(row[k_at : k_at + keys], _KEY_EPS, _ONE, k)
        decay = exp32(-rate * softplus32(gate[a_column + head] + dt_bias))
        _step(state, q, k, row[v_at : v_at + values], decay, sigmoid32(gate[b_column + head]), delta, o)
        rms_row(o, norm_weight, eps, mixed)
        _gate_row(gate[z_at : z_at + values], is_silu, mixed)


@kernel()
def _serial(  # type: ignore[no-untyped-def]
    qkv, key_heads, key_of, abz, a_column, b_column, z_column, decay_rate, dt_bias, norm_weight, eps, is_silu, starts,
    slots, state, out,
):  # fmt: skip
    heads = state.shape[1]
    for task in range(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        _head(
            qkv, key_heads, key_of[head], abz, a_column, b_column, z_column, decay_rate[head], dt_bias[head],
            norm_weight, eps, is_silu, starts[sequence], starts[sequence + 1], head, state[slots[sequence], head], out,
        )  # fmt: skip


@kernel(parallel=True)
def _parallel(  # type: ignore[no-untyped-def]
    qkv, key_heads, key_of, abz, a_column, b_column, z_column, decay_rate, dt_bias, norm_weight, eps, is_silu, starts,
    slots, state, out,
):  # fmt: skip
    heads = state.shape[1]
    for task in prange(slots.shape[0] * heads):
        sequence, head = task // heads, task % heads
        _head(
            qkv, key_heads, key_of[head], abz, a_column, b_column, z_column, decay_rate[head], dt_bias[head],
            norm_weight, eps, is_silu, starts[sequence], starts[sequence + 1], head, state[slots[sequence], head], out,
        )  # fmt: skip


def gated_delta(
    qkv: np.ndarray,
    key_heads: int,
    key_of: np.ndarray,
    abz: np.ndarray,
    a_column: int,
    b_column: int,
    z_column: int,
    decay_rate: np.ndarray,
    dt_bias: np.ndarray,
    norm_weight: np.ndarray,
    eps: np.float32,
    is_silu_gate: bool,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
    out: np.ndarray,
) -> None:
    """One layer's recurrence between its products, for packed rows; nk = ``key_heads`` key heads, nv value heads.

    qkv float32 [≥ N, ≥ 2 nk K + nv V] holds q | k | v after the convolution; key_of int64 [nv] the key head of each value
    head; abz [≥ N, ...] holds a [nv], b [nv] and z [nv V] from their columns on; decay_rate (exp(A_log)) and dt_bias [nv];
    norm_weight [V]; state [S, nv, K, V] is updated; out [≥ N, ≥ nv V] is written.
    """
    work = int(starts[-1]) * state.shape[1] * state.shape[2] * state.shape[3]
    run = _serial if work < PARALLEL_WORK else _parallel
    run(
        qkv, key_heads, key_of, abz, a_column, b_column, z_column, decay_rate, dt_bias, norm_weight, eps, is_silu_gate,
        starts, slots, state, out,
    )  # fmt: skip
