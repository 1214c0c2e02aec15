"""Sampling on the CPU: one row, one program; thresholds found by bisection on the bits of a float."""

from __future__ import annotations

import numpy as np
from numba import prange

from kittiwake.ops.cpu_math import bits_from_float, exp32
from kittiwake.ops.jit import kernel

NOT_FINITE = -1
"""Drawn for a row whose logits hold NaN or plus infinity."""
NOTHING_LEFT = -2
"""Drawn for a row of nothing but minus infinity: every token is banned."""
_SIGN = np.uint32(0x80000000)
_ALL = np.uint32(0xFFFFFFFF)
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_LARGEST = np.float32(3.4028235e38)


@kernel()
def _philox(seed, position):  # type: ignore[no-untyped-def]
    """First two 32-bit words of Philox4x32-10; seed and position uint64."""
    c0, c1 = position & _LOW32, position >> _SHIFT32
    c2, c3 = np.uint64(0), np.uint64(0)
    k0, k1 = seed & _LOW32, seed >> _SHIFT32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT32) ^ c1 ^ k0, p1 & _LOW32, (p0 >> _SHIFT32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW32, (k1 + np.uint64(0xBB67AE85)) & _LOW32
    return c0, c1


@kernel()
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """A float64 in [0, 1) with 53 random bits, for this seed and position (uint64)."""
    high, low = _philox(seed, position)
    bits = (high >> np.uint64(5)) * np.uint64(67108864) + (low >> np.uint64(6))
    return np.float64(bits) / 9007199254740992.0


@kernel()
def _ordered(x):  # type: ignore[no-untyped-def]
    """uint32 in the order of float32: larger floats have larger keys; both zeros are one."""
    bits = bits_from_float(x + np.float32(0.0))
    return bits ^ _ALL if bits & _SIGN else bits ^ _SIGN


@kernel()
def _best(logits):  # type: ignore[no-untyped-def]
    """Id of the largest logit, the lowest on ties; NOT_FINITE or NOTHING_LEFT when no largest finite one exists."""
    best = NOTHING_LEFT
    top = -np.inf
    for i in range(logits.shape[0]):
        if not logits[i] < np.inf:
            return NOT_FINITE
        if logits[i] > top:
            best, top = i, logits[i]
    return best


@kernel()
def _kth_key(keys, top_k):  # type: ignore[no-untyped-def]
    """The largest threshold that at least top_k keys reach."""
    low, high = np.uint64(0), np.uint64(0xFFFFFFFF)
    while low < high:
        middle = (low + high + np.uint64(1)) >> np.uint64(1)
        threshold = np.uint32(middle)
        count = 0
        for i in range(keys.shape[0]):
            count += keys[i] >= threshold
        if count >= top_k:
            low = middle
        else:
            high = middle - np.uint64(1)
    return np.uint32(low)


@kernel()
def _mass(keys, probs, threshold):  # type: ignore[no-untyped-def]
    """Sum in float64 of the probabilities whose key reaches the threshold, in id order."""
    total = 0.0
    for i in range(keys.shape[0]):
        if keys[i] >= threshold:
            total += np.float64(probs[i])
    return total


@kernel()
def _nucleus_key(keys, probs, wanted):  # type: ignore[no-untyped-def]
    """The largest threshold whose mass is at least ``wanted``."""
    low, high = np.uint64(0), np.uint64(0xFFFFFFFF)
    while low < high:
        middle = (low + high + np.uint64(1)) >> np.uint64(1)
        if _mass(keys, probs, np.uint32(middle)) >= wanted:
            low = middle
        else:
            high = middle - np.uint64(1)
    return np.uint32(low)


@kernel()
def _candidates(logits, probs, keys, floor):  # type: ignore[no-untyped-def]
    """Ids whose key reaches the floor, in id order, with their keys and probabilities."""
    count = 0
    for i in range(keys.shape[0]):
        count += keys[i] >= floor
    ids = np.empty(count, np.int64)
    kept_keys = np.empty(count, np.uint32)
    kept_probs = np.empty(count, np.float32)
    count = 0
    for i in range(keys.shape[0]):
        if keys[i] >= floor:
            ids[count], kept_keys[count], kept_probs[count] = i, keys[i], probs[i]
            count += 1
    return ids, kept_keys, kept_probs


@kernel()
def _nucleus_floor(logits, probs, keys, total, top_p):  # type: ignore[no-untyped-def]
    """A key no nucleus threshold lies below: what is under it holds less than half of 1 - top_p."""
    least = np.float32((1.0 - top_p) * total / (2.0 * keys.shape[0]))
    floor = _ALL
    for i in range(keys.shape[0]):
        if probs[i] >= least and keys[i] < floor:
            floor = keys[i]
    return floor


@kernel()
def _min_p_key(logits, top, reach):  # type: ignore[no-untyped-def]
    """The key of the smallest logit that lies at most ``-reach`` below the largest one; reach float64, 0 or less."""
    least = top
    for i in range(logits.shape[0]):
        if logits[i] < least and np.float64(logits[i]) - np.float64(top) >= reach:
            least = logits[i]
    return _ordered(least)


@kernel()
def draw(logits, temperature, top_k, top_p, min_p, filters_first, u):  # type: ignore[no-untyped-def]
    """One token id from float32 logits [vocab]; temperature, top_p, min_p, u float64, top_k int, filters_first bool."""
    best = _best(logits)
    if temperature == 0.0 or best < 0:
        return best
    vocab = logits.shape[0]
    scale = min(np.float32(1.0) / np.float32(temperature), _LARGEST)
    filter_scale = np.float32(1.0) if filters_first else scale
    top = logits[best]
    probs = np.empty(vocab, np.float32)
    keys = np.empty(vocab, np.uint32)
    for i in range(vocab):
        probs[i] = exp32((logits[i] - top) * filter_scale)
        keys[i] = _ordered(logits[i])
    lowest = _ordered(np.float32(-np.inf)) + np.uint32(1)  # banned tokens never come back
    floor = lowest
    if 0 < top_k < vocab:
        floor = max(floor, _kth_key(keys, top_k))
    if top_p < 1.0:
        among = lowest if filters_first else floor  # what the mass is a share of
        total = _mass(keys, probs, among)
        among = max(among, _nucleus_floor(logits, probs, keys, total, top_p))
        ids, keys, probs = _candidates(logits, probs, keys, among)
        floor = max(floor, _nucleus_key(keys, probs, top_p * total))
    else:
        ids, keys, probs = _candidates(logits, probs, keys, floor)
    if min_p > 0.0:
        floor = max(floor, _min_p_key(logits, top, np.log(min_p) * (1.0 if filters_first else temperature)))
    if filters_first:
        for i in range(ids.shape[0]):
            probs[i] = exp32((logits[ids[i]] - top) * scale)
    target = u * _mass(keys, probs, floor)
    reached = 0.0
    chosen = best
    for i in range(ids.shape[0]):
        if keys[i] >= floor and probs[i] > 0:
            reached += np.float64(probs[i])
            chosen = ids[i]
            if reached > target:
                break
    return chosen


@kernel(parallel=True)
def draw_rows(logits, temperatures, top_ks, top_ps, min_ps, filters_first, seeds, positions, out):  # type: ignore[no-untyped-def]
    """One token a row: logits float32 [W, vocab]; the rest [W], typed as :func:`draw` says, seeds and positions uint64."""
    for row in prange(logits.shape[0]):
        u = uniform(seeds[row], positions[row])
        out[row] = draw(logits[row], temperatures[row], top_ks[row], top_ps[row], min_ps[row], filters_first[row], u)


@kernel()
def adjust(row, ids, biases, is_seen, counts, size, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    """Bias, then penalties, on float32 logits [vocab] in place; float64 inside, rounded once a token.

    The first ``size`` entries name each touched token once: id int64, bias float64 (minus infinity bans), is_seen bool
    (it stands in what was given), count int64 (how often it was drawn). The penalties are float64.
    """
    for i in range(size):
        value = np.float64(row[ids[i]]) + biases[i]
        if is_seen[i] or counts[i] > 0:
            value = value / repetition if value > 0.0 else value * repetition
        if counts[i] > 0:
            value -= presence + frequency * counts[i]
        row[ids[i]] = np.float32(value)
