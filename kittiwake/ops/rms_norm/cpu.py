"""Row kernels on the CPU; every row is computed by the same code whatever stands beside it."""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import rms_row
from kittiwake.ops.jit import kernel

PARALLEL_VALUES = 1 << 15
"""Work (rows times columns) below which starting the threads costs more than they save."""


@kernel()
def _norm_rows(x, x_column, heads, weight, eps, first, last):  # type: ignore[no-untyped-def]
    dim = weight.shape[0]
    for i in range(first, last):
        for head in range(heads):
            at = x_column + head * dim
            rms_row(x[i, at : at + dim], weight, eps, x[i, at : at + dim])


@kernel(parallel=True)
def _norm_parallel(x, x_column, heads, weight, eps, rows, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _norm_rows(x, x_column, heads, weight, eps, rows * part // parts, rows * (part + 1) // parts)


def norm_heads(
    x: np.ndarray, x_column: int, heads: int, dim: int, weight: np.ndarray, eps: np.float32, rows: int
) -> None:
    """Norm ``heads`` heads of ``dim`` channels from column ``x_column`` on: x float32 [≥ N, ...], weight [dim]."""
    assert weight.shape == (dim,)
    if rows * heads * dim < PARALLEL_VALUES:
        _norm_rows(x, x_column, heads, weight, eps, 0, rows)
    else:
        _norm_parallel(x, x_column, heads, weight, eps, rows, get_num_threads())
