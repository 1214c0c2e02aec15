"""TileLang kernels that tilelang_compare.py holds against ours: token shift, products with prologue or epilogue, a scan."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

VECTORS = 6
TOKEN = VECTORS * 64
W, K, A, B, R, V = range(VECTORS)
"""Order of a token's vectors, as ops/wkv7/wkv7.cu has them."""


def product(M: int, N: int, K: int, bm: int, bn: int, bk: int, stages: int, threads: int, squares: bool) -> Any:
    """x [M, K] · w [N, K] → y [M, N], float16; with ``squares`` the squared ReLU of the rounded sum, saturating."""

    @T.prim_func
    def main(
        x: T.Tensor((M, K), "float16"),
        w: T.Tensor((N, K), "float16"),
        y: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=threads) as (bx, by):
            xs = T.alloc_shared((bm, bk), "float16")
            ws = T.alloc_shared((bn, bk), "float16")
            ys = T.alloc_shared((bm, bn), "float16")
            acc = T.alloc_fragment((bm, bn), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=stages):
                T.copy(x[by * bm, k * bk], xs)
                T.copy(w[bx * bn, k * bk], ws)
                T.gemm(xs, ws, acc, transpose_B=True)
            if squares:
                for i, j in T.Parallel(bm, bn):
                    acc[i, j] = T.cast(T.cast(acc[i, j], "float16"), "float32")
                    acc[i, j] = T.if_then_else(acc[i, j] <= 0.0, 0.0, acc[i, j])
                    acc[i, j] = T.min(acc[i, j] * acc[i, j], 65504.0)
            T.copy(acc, ys)
            T.copy(ys, y[by * bm, bx * bn])

    return main


def mixed_products(M: int, N: int, K: int, bm: int, bn: int, bk: int, stages: int, threads: int) -> Any:
    """kept [2, M, K] (normed rows and gaps, float32), mixes [3, K], w [3, N, K] → y [M, 3, N]: mixes made on the way in."""

    @T.prim_func
    def main(
        kept: T.Tensor((2, M, K), "float32"),
        mixes: T.Tensor((3, K), "float32"),
        w: T.Tensor((3, N, K), "float16"),
        y: T.Tensor((M, 3, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), 3, threads=threads) as (bx, by, which):
            normed = T.alloc_shared((bm, bk), "float32")
            gaps = T.alloc_shared((bm, bk), "float32")
            share = T.alloc_shared((bk,), "float32")
            xs = T.alloc_shared((bm, bk), "float16")
            ws = T.alloc_shared((bn, bk), "float16")
            acc = T.alloc_fragment((bm, bn), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=stages):
                T.copy(kept[0, by * bm, k * bk], normed)
                T.copy(kept[1, by * bm, k * bk], gaps)
                T.copy(mixes[which, k * bk], share)
                T.copy(w[which, bx * bn, k * bk], ws)
                for i, j in T.Parallel(bm, bk):
                    xs[i, j] = T.cast(T.ieee_add(normed[i, j], T.ieee_mul(gaps[i, j], share[j])), "float16")
                T.gemm(xs, ws, acc, transpose_B=True)
            T.copy(acc, y[by * bm : (by + 1) * bm, which, bx * bn : (bx + 1) * bn])

    return main


def shift(M: int, C: int, rows: int, mixes_count: int, threads: int) -> Any:
    """One sequence from a clear state: x, y [M, C] → their sum, the mixed rows [mixes, M, C], the last normed row.

    A block takes ``rows`` rows and the one before them, so that a row's norm is made once, or twice at a block's border.
    """

    @T.prim_func
    def main(
        x: T.Tensor((M, C), "float32"),
        y: T.Tensor((M, C), "float16"),
        norm: T.Tensor((2, C), "float32"),
        mixes: T.Tensor((mixes_count, C), "float32"),
        before: T.Tensor((C,), "float32"),
        x_out: T.Tensor((M, C), "float32"),
        mixed: T.Tensor((mixes_count, M, C), "float16"),
        last: T.Tensor((C,), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as block:
            here = T.alloc_fragment((1, C), "float32")
            square = T.alloc_fragment((1, C), "float32")
            normed = T.alloc_fragment((1, C), "float32")
            above = T.alloc_fragment((1, C), "float32")
            mean = T.alloc_fragment((1,), "float32")
            variance = T.alloc_fragment((1,), "float32")
            T.clear(above)
            for step in T.serial(rows + 1):
                n = block * rows + step - 1
                if n >= 0 and n < M:
                    for i, j in T.Parallel(1, C):
                        here[i, j] = x[n, j] + T.cast(y[n, j], "float32")
                    if step > 0:
                        for i, j in T.Parallel(1, C):
                            x_out[n, j] = here[i, j]
                    T.reduce_sum(here, mean, dim=1)
                    for i, j in T.Parallel(1, C):
                        normed[i, j] = here[i, j] - mean[i] / C
                        square[i, j] = normed[i, j] * normed[i, j]
                    T.reduce_sum(square, variance, dim=1)
                    for i, j in T.Parallel(1, C):
                        normed[i, j] = normed[i, j] * (1.0 / T.sqrt(variance[i] / C + 1e-5)) * norm[0, j] + norm[1, j]
                    if step > 0:
                        for m in T.serial(mixes_count):
                            for i, j in T.Parallel(1, C):
                                mixed[m, n, j] = T.cast(
                                    normed[i, j] + (above[i, j] - normed[i, j]) * mixes[m, j], "float16"
                                )
                    if n == M - 1:
                        for i, j in T.Parallel(1, C):
                            last[j] = normed[i, j]
                    for i, j in T.Parallel(1, C):
                        above[i, j] = normed[i, j]
                elif n < 0:
                    for i, j in T.Parallel(1, C):
                        above[i, j] = before[j]

    return main


def scan(H: int, N: int, rows: int, per_thread: int, steps: int, stages: int) -> Any:
    """made [H, N, 6, 64] float32 (ops/wkv7/wkv7.cu, ``prepare``) → y [N, H, 64]; state [H, K, V] in place; one sequence.

    A row of the state is held by 8 threads, as in wkv7.cu; ``steps`` tokens are staged together, ``stages`` times.
    """
    threads = rows // per_thread * 8
    held = T.Fragment(
        (rows, 64),
        forward_fn=lambda i, j: (i // per_thread * 8 + j // 4 % 8, i % per_thread * 8 + j // 32 * 4 + j % 4),
    )

    @T.prim_func
    def main(
        made: T.Tensor((H, N * TOKEN), "float32"),
        state: T.Tensor((H, 64, 64), "float32"),
        y: T.Tensor((N, H, 64), "float32"),
    ):
        with T.Kernel(64 // rows, H, threads=threads) as (block, h):
            s = T.alloc_fragment((rows, 64), "float32")
            share = T.alloc_fragment((rows, 64), "float32")
            removed = T.alloc_fragment((rows,), "float32")
            out = T.alloc_fragment((rows,), "float32")
            ring = T.alloc_shared((steps * TOKEN,), "float32")
            T.annotate_layout({s: held, share: held})
            for i, j in T.Parallel(rows, 64):
                s[i, j] = state[h, j, block * rows + i]
            for stage in T.Pipelined(N // steps, num_stages=stages):
                T.copy(made[h, stage * steps * TOKEN], ring)
                for t in T.unroll(steps):
                    for i, j in T.Parallel(rows, 64):
                        share[i, j] = s[i, j] * ring[t * TOKEN + A * 64 + j]
                    T.reduce_sum(share, removed, dim=1)
                    for i, j in T.Parallel(rows, 64):
                        s[i, j] = s[i, j] * ring[t * TOKEN + W * 64 + j] + (
                            removed[i] * ring[t * TOKEN + B * 64 + j]
                            + ring[t * TOKEN + V * 64 + block * rows + i] * ring[t * TOKEN + K * 64 + j]
                        )
                        share[i, j] = s[i, j] * ring[t * TOKEN + R * 64 + j]
                    T.reduce_sum(share, out, dim=1)
                    for i in T.Parallel(rows):
                        y[stage * steps + t, h, block * rows + i] = out[i]
            for i, j in T.Parallel(rows, 64):
                state[h, j, block * rows + i] = s[i, j]

    return main
