"""WKV-4 on the CPU: serial over tokens in float32, every channel by itself, vectors along the channels."""

from __future__ import annotations

import numpy as np
from numba import prange

from kittiwake.ops.cpu_math import exp32, fma
from kittiwake.ops.jit import kernel

PARALLEL_VALUES = 1 << 13
"""Rows times channels below which starting the threads costs more than they save."""
BLOCK = 128
"""Channels a thread takes at a time."""

_ONE = np.float32(1.0)


@kernel()
def _weigh(past, new, past_weight, new_weight):  # type: ignore[no-untyped-def]
    """e^past and e^new, relative to the larger of the two, whose weight is 1: one exponential serves both."""
    for c in range(past.shape[0]):
        difference = past[c] - new[c]
        smaller = exp32(-abs(difference))
        past_weight[c] = _ONE if difference >= 0 else smaller
        new_weight[c] = smaller if difference >= 0 else _ONE


@kernel()
def _read(r, v, past, new, num, den, out):  # type: ignore[no-untyped-def]
    """out = r times the weighted mean of the past and v."""
    for c in range(out.shape[0]):
        out[c] = r[c] * (fma(past[c], num[c], new[c] * v[c]) / fma(past[c], den[c], new[c]))


@kernel()
def _update(v, past, new, num, den):  # type: ignore[no-untyped-def]
    """num and den take in v at the weight of the new."""
    for c in range(v.shape[0]):
        num[c] = fma(past[c], num[c], new[c] * v[c])
    for c in range(v.shape[0]):
        den[c] = fma(past[c], den[c], new[c])


@kernel()
def _mix_block(rkv, log_decay, bonus, first, last, at, end, num, den, top, out):  # type: ignore[no-untyped-def]
    """All rows of one sequence, channels ``at`` to ``end``; num, den, top [C] of its slot."""
    width = num.shape[0]
    log_decay, bonus = log_decay[at:end], bonus[at:end]
    num, den, top = num[at:end], den[at:end], top[at:end]
    scratch = np.empty((3, end - at), np.float32)
    sums, past, new = scratch[0], scratch[1], scratch[2]
    for i in range(first, last):
        r, k = rkv[i, at:end], rkv[i, width + at : width + end]
        v = rkv[i, 2 * width + at : 2 * width + end]
        for c in range(sums.shape[0]):
            sums[c] = bonus[c] + k[c]
        _weigh(top, sums, past, new)
        _read(r, v, past, new, num, den, out[i, at:end])
        for c in range(sums.shape[0]):
            sums[c] = top[c] + log_decay[c]
        _weigh(sums, k, past, new)
        _update(v, past, new, num, den)
        for c in range(sums.shape[0]):
            top[c] = max(sums[c], k[c])


@kernel()
def _mix_serial(rkv, log_decay, bonus, starts, slots, num, den, top, out):  # type: ignore[no-untyped-def]
    width = num.shape[1]
    for b in range(slots.shape[0]):
        slot = slots[b]
        _mix_block(rkv, log_decay, bonus, starts[b], starts[b + 1], 0, width, num[slot], den[slot], top[slot], out)


@kernel(parallel=True)
def _mix_parallel(rkv, log_decay, bonus, starts, slots, num, den, top, out):  # type: ignore[no-untyped-def]
    width = num.shape[1]
    blocks = (width + BLOCK - 1) // BLOCK
    for task in prange(slots.shape[0] * blocks):
        b, at = task // blocks, task % blocks * BLOCK
        slot, end = slots[b], min(at + BLOCK, width)
        _mix_block(rkv, log_decay, bonus, starts[b], starts[b + 1], at, end, num[slot], den[slot], top[slot], out)


def time_mix(
    rkv: np.ndarray,
    log_decay: np.ndarray,
    bonus: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
    num: np.ndarray,
    den: np.ndarray,
    top: np.ndarray,
    out: np.ndarray,
) -> None:
    """One layer's time mix between its products, for packed rows.

    rkv float32 [≥ N, ≥ 3 C] holds r | k | v, r in [0, 1]; log_decay (below 0) and bonus [C]; num, den and top [S, C] are
    updated; out [≥ N, C] is written.
    """
    run = _mix_serial if int(starts[-1]) * num.shape[1] < PARALLEL_VALUES else _mix_parallel
    run(rkv, log_decay, bonus, starts, slots, num, den, top, out)
