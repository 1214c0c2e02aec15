"""Log-probabilities on the CPU: one row, one program; float64 sums in one fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from kittiwake.errors import RequestError
from kittiwake.ops.jit import kernel

_F64 = ir.DoubleType()
_LOG2E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01  # 33 bits: n * _LN2_HIGH is exact for |n| < 2**20
_LN2_LOW = 1.90821492927058770002e-10  # ln 2 - _LN2_HIGH
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding and subtracting it rounds to a whole number
_LEAST = -700.0  # e**-700 beside the 1 of the largest logit is nothing, and 2**n stays a normal number
_BLOCK = 128
# Taylor coefficients 1/n!; on |r| <= ln(2)/2 the first one left out is below 2**-57
_C2 = 1 / 2
_C3 = 1 / 6
_C4 = 1 / 24
_C5 = 1 / 120
_C6 = 1 / 720
_C7 = 1 / 5040
_C8 = 1 / 40320
_C9 = 1 / 362880
_C10 = 1 / 3628800
_C11 = 1 / 39916800
_C12 = 1 / 479001600
_C13 = 1 / 6227020800


@intrinsic
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """float64 a * b + c, rounded once."""
    signature = types.float64(types.float64, types.float64, types.float64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return signature, codegen


@intrinsic
def _power_of_two(typingctx: Any, n: Any) -> Any:
    """2**n as float64 for a whole float64 n from -1022 to 1023."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.sext(builder.fptosi(args[0], ir.IntType(32)), ir.IntType(64))
        biased = builder.add(whole, ir.Constant(ir.IntType(64), 1023))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(64), 52)), _F64)

    return types.float64(types.float64), codegen


@kernel()
def _exp(x):  # type: ignore[no-untyped-def]
    """e**x in float64 for x from -700 to 0, at most one unit in the last place off; lower x as -700."""
    x = x if x > _LEAST else _LEAST
    n = (x * _LOG2E + _ROUND) - _ROUND
    r = _fma(-n, _LN2_LOW, _fma(-n, _LN2_HIGH, x))
    p = _fma(_C13, r, _C12)
    p = _fma(p, r, _C11)
    p = _fma(p, r, _C10)
    p = _fma(p, r, _C9)
    p = _fma(p, r, _C8)
    p = _fma(p, r, _C7)
    p = _fma(p, r, _C6)
    p = _fma(p, r, _C5)
    p = _fma(p, r, _C4)
    p = _fma(p, r, _C3)
    p = _fma(p, r, _C2)
    return (1.0 + _fma(p * r, r, r)) * _power_of_two(n)


@kernel()
def _top(row):  # type: ignore[no-untyped-def]
    """The largest logit as float64; NaN for a row that holds NaN or plus infinity, or nothing finite."""
    top = np.float32(-np.inf)
    bad = 0
    for i in range(row.shape[0]):
        x = row[i]
        top = x if x > top else top
        bad += not x < np.float32(np.inf)
    return np.nan if bad or top == -np.inf else np.float64(top)


@kernel()
def _log_sum(row, top):  # type: ignore[no-untyped-def]
    """log of the sum of e**(x - top) over a row, its values added in eight interleaved chains, then in pairs."""
    exps = np.empty(_BLOCK, np.float64)
    a = b = c = d = e = f = g = h = 0.0
    for first in range(0, row.shape[0], _BLOCK):
        count = min(_BLOCK, row.shape[0] - first)
        part = row[first : first + count]
        for i in range(count):
            exps[i] = _exp(np.float64(part[i]) - top)
        exps[count:] = 0.0
        for i in range(0, _BLOCK, 8):
            a += exps[i]
            b += exps[i + 1]
            c += exps[i + 2]
            d += exps[i + 3]
            e += exps[i + 4]
            f += exps[i + 5]
            g += exps[i + 6]
            h += exps[i + 7]
    return np.log(((a + b) + (c + d)) + ((e + f) + (g + h)))


@kernel()
def normaliser(row):  # type: ignore[no-untyped-def]
    """(top, log sum) of a float32 row [vocab]: log p[v] = (row[v] - top) - log sum, in float64."""
    top = _top(row)
    return top, (np.nan if np.isnan(top) else _log_sum(row, top))


@kernel()
def _pick_row(row, target):  # type: ignore[no-untyped-def]
    top, log_sum = normaliser(row)
    return (np.float64(row[target]) - top) - log_sum


@kernel()
def _top_row(row, ids, values):  # type: ignore[no-untyped-def]
    """Insertion into a short list in descending order; a later equal logit stays behind an earlier one."""
    k = ids.shape[0]
    count = 0
    for v in range(row.shape[0]):
        if count == k and not row[v] > row[ids[k - 1]]:
            continue
        place = min(count, k - 1)
        while place > 0 and row[v] > row[ids[place - 1]]:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = v
        count = min(count + 1, k)
    top, log_sum = normaliser(row)
    for j in range(k):
        values[j] = (np.float64(row[ids[j]]) - top) - log_sum


@kernel(parallel=True)
def _pick_rows(logits, targets, out):  # type: ignore[no-untyped-def]
    for w in prange(logits.shape[0]):
        out[w] = _pick_row(logits[w], targets[w])


@kernel(parallel=True)
def _top_rows(logits, ids, values):  # type: ignore[no-untyped-def]
    for w in prange(logits.shape[0]):
        _top_row(logits[w], ids[w], values[w])


def log_probs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Natural-log probabilities of one token a row.

    logits float32 [W, vocab], targets whole numbers [W] → float64 [W]. Raises RequestError for a target outside the
    vocabulary.
    """
    wanted = np.asarray(targets, dtype=np.int64)
    if wanted.shape != logits.shape[:1]:
        raise RequestError(f"{logits.shape[0]} rows of logits need as many targets, got shape {wanted.shape}")
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < logits.shape[1]):
        raise RequestError(f"a target is outside the {logits.shape[1]} columns of the logits")
    out = np.empty(len(wanted), dtype=np.float64)
    if len(out) == 1:  # threads cost more to start than a row takes
        out[0] = _pick_row(logits[0], wanted[0])
    elif len(out):
        _pick_rows(logits, wanted, out)
    return out


def top_log_probs(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest tokens of each row, likeliest first, ties to the lowest id.

    logits float32 [W, vocab] → ids int64 [W, k], natural-log probabilities float64 [W, k]; k from 0 to vocab, meant to
    be small. Raises RequestError for another k.
    """
    rows, vocab = logits.shape
    if not 0 <= k <= vocab:
        raise RequestError(f"the likeliest {k} of {vocab} tokens were asked for")
    ids, values = np.zeros((rows, k), dtype=np.int64), np.empty((rows, k), dtype=np.float64)
    if k and rows == 1:
        _top_row(logits[0], ids[0], values[0])
    elif k and rows:
        _top_rows(logits, ids, values)
    return ids, values


def warm_up() -> None:
    """Compile the kernels, or fetch them from the cache."""
    logits = np.zeros((2, 2), dtype=np.float32)
    for rows in (1, 2):
        log_probs(logits[:rows], np.zeros(rows, dtype=np.int64))
        top_log_probs(logits[:rows], 1)
