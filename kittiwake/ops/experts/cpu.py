"""Experts on the CPU: rows brought together by expert, every product the row's own, sums in the router's order.

A *pair* is a row and one of its experts; the pair of row i and rank r is number i k + r. Pairs are put in *places*: sorted
by expert, and by number within one. Which place a pair has changes no bit.

Weights are kept in tiles of some columns, [K, columns] each, so that a thread reads what it needs front to back.
"""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import exp32, fma, row_sum, sigmoid32, silu32
from kittiwake.ops.jit import kernel
from kittiwake.ops.matmul.cpu import product_strip

PARALLEL_VALUES = 1 << 15
"""Work (rows times columns) below which starting the threads costs more than they save."""
K_BLOCK = 192
"""The block of a product's sum over K, see :mod:`kittiwake.ops.matmul`."""
ROWS_TOGETHER = 16
"""Rows of an expert that go over its weights at once."""
MOST_TILE_COLUMNS = 640
LEAST_TILE_COLUMNS = 64
_SMALLEST_SUM = np.float32(2.0**-14)
_ZERO = np.float32(0.0)


def tile_columns(columns: int) -> int:
    """Columns of a tile of weights with this many outputs: their largest divisor in the range, or all of them."""
    largest = max(tile for tile in range(1, min(columns, MOST_TILE_COLUMNS) + 1) if columns % tile == 0)
    return largest if largest >= LEAST_TILE_COLUMNS else columns


@kernel()
def _softmax(logits, probs):  # type: ignore[no-untyped-def]
    """probs [E] = softmax of logits [E]."""
    top = logits[0]
    for e in range(1, logits.shape[0]):
        top = max(top, logits[e])
    for e in range(probs.shape[0]):
        probs[e] = exp32(logits[e] - top)
    total = row_sum(probs)
    for e in range(probs.shape[0]):
        probs[e] = probs[e] / total


@kernel()
def _take_largest(probs, is_taken, chosen, shares):  # type: ignore[no-untyped-def]
    """chosen and shares [k]: the largest probabilities in falling order, of equal ones the lowest index first."""
    for e in range(is_taken.shape[0]):
        is_taken[e] = False
    for rank in range(chosen.shape[0]):
        best = -1
        for e in range(probs.shape[0]):
            if not is_taken[e] and (best < 0 or probs[e] > probs[best]):
                best = e
        is_taken[best] = True
        chosen[rank] = best
        shares[rank] = probs[best]


@kernel()
def _route_rows(logits, column, experts, is_renormalised, chosen, shares, first, last):  # type: ignore[no-untyped-def]
    probs = np.empty(experts, np.float32)
    is_taken = np.empty(experts, np.bool_)
    for i in range(first, last):
        _softmax(logits[i, column : column + experts], probs)
        _take_largest(probs, is_taken, chosen[i], shares[i])
        if is_renormalised:
            total = _ZERO
            for rank in range(shares.shape[1]):
                total += shares[i, rank]
            total = max(total, _SMALLEST_SUM)
            for rank in range(shares.shape[1]):
                shares[i, rank] = shares[i, rank] / total


@kernel(parallel=True)
def _route_parallel(logits, column, rows, experts, is_renormalised, chosen, shares, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        _route_rows(logits, column, experts, is_renormalised, chosen, shares, first, last)


def route(
    logits: np.ndarray,
    column: int,
    rows: int,
    experts: int,
    is_renormalised: bool,
    chosen: np.ndarray,
    shares: np.ndarray,
) -> None:
    """The router: logits float32 [≥ N, ≥ column + E] → chosen int64 and shares float32 [≥ N, k] (written), k ≤ E."""
    if rows * experts < PARALLEL_VALUES:
        _route_rows(logits, column, experts, is_renormalised, chosen, shares, 0, rows)
    else:
        _route_parallel(logits, column, rows, experts, is_renormalised, chosen, shares, get_num_threads())


@kernel()
def _gate_row(gate, up, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up."""
    for i in range(out.shape[0]):
        out[i] = silu32(gate[i]) * up[i]


@kernel()
def _silu_times_rows(gate_up, column, ff, out, first, last):  # type: ignore[no-untyped-def]
    up = column + ff
    for i in range(first, last):
        _gate_row(gate_up[i, column:up], gate_up[i, up : up + ff], out[i, :ff])


@kernel(parallel=True)
def _silu_times_parallel(gate_up, column, rows, ff, out, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _silu_times_rows(gate_up, column, ff, out, rows * part // parts, rows * (part + 1) // parts)


def silu_times(gate_up: np.ndarray, column: int, rows: int, ff: int, out: np.ndarray) -> None:
    """out [≥ N, ≥ ff] (written) = silu(gate) * up; gate_up float32 holds gate [ff] | up [ff] from ``column`` on."""
    if rows * ff < PARALLEL_VALUES:
        _silu_times_rows(gate_up, column, ff, out, 0, rows)
    else:
        _silu_times_parallel(gate_up, column, rows, ff, out, get_num_threads())


@kernel()
def _place_pairs(chosen, rows, begins, pairs, places):  # type: ignore[no-untyped-def]
    """begins int64 [E + 1]: first place of each expert; pairs [P]: the pair at each place; places [P]: its inverse."""
    ranks = chosen.shape[1]
    for e in range(begins.shape[0]):
        begins[e] = 0
    for i in range(rows):
        for rank in range(ranks):
            begins[chosen[i, rank] + 1] += 1
    for e in range(1, begins.shape[0]):
        begins[e] += begins[e - 1]
    free = begins.copy()
    for i in range(rows):
        for rank in range(ranks):
            expert = chosen[i, rank]
            places[i * ranks + rank] = free[expert]
            pairs[free[expert]] = i * ranks + rank
            free[expert] += 1


@kernel()
def _share_out(begins, tiles, threads):  # type: ignore[no-untyped-def]
    """int64 [tasks, 3]: (expert, tile, thread) for the experts that have rows; the threads have about as much to do."""
    active = 0
    for e in range(begins.shape[0] - 1):
        active += begins[e + 1] > begins[e]
    tasks = np.empty((active * tiles, 3), np.int64)
    total = begins[begins.shape[0] - 1] * tiles
    at = 0
    done = 0
    for e in range(begins.shape[0] - 1):
        size = begins[e + 1] - begins[e]
        if size > 0:
            for tile in range(tiles):
                # a task belongs to the thread in whose part of the work its middle lies
                thread = min((2 * done + size) * threads // (2 * total), threads - 1)
                tasks[at, 0], tasks[at, 1], tasks[at, 2] = e, tile, thread
                done += size
                at += 1
    return tasks


@kernel()
def _gate_up_task(x, pairs, ranks, first, last, gate, up, left, h):  # type: ignore[no-untyped-def]
    """h[first:last] from column ``left`` on: gate, up [C, n] of one expert; place p reads row pairs[p] // ranks of x."""
    width, columns = gate.shape
    gathered = np.empty((ROWS_TOGETHER, width), np.float32)
    products = np.empty((ROWS_TOGETHER, 2 * columns), np.float32)
    for begin in range(first, last, ROWS_TOGETHER):
        count = min(ROWS_TOGETHER, last - begin)
        for r in range(count):
            row, copied = x[pairs[begin + r] // ranks], gathered[r]
            for c in range(width):
                copied[c] = row[c]
        product_strip(gathered, count, gate, products, 0, 0, K_BLOCK, 0, 0, columns)
        product_strip(gathered, count, up, products, 0, columns, K_BLOCK, 0, 0, columns)
        for r in range(count):
            row = products[r]
            _gate_row(row[:columns], row[columns : 2 * columns], h[begin + r, left : left + columns])


@kernel(parallel=True)
def _gate_up(x, ranks, begins, pairs, tasks, threads, weights, h):  # type: ignore[no-untyped-def]
    """h [P, ff] = silu(gate) * up of every pair; weights [E, 2 tiles, C, n]."""
    tiles, columns = weights.shape[1] // 2, weights.shape[3]
    for thread in prange(threads):
        for at in range(tasks.shape[0]):
            if tasks[at, 2] == thread:
                e, tile = tasks[at, 0], tasks[at, 1]
                gate, up = weights[e, tile], weights[e, tiles + tile]
                _gate_up_task(x, pairs, ranks, begins[e], begins[e + 1], gate, up, tile * columns, h)


@kernel()
def _down_task(h, first, last, weight, left, d):  # type: ignore[no-untyped-def]
    """d[first:last] from column ``left`` on = h[first:last] times weight [ff, n] of one expert."""
    for begin in range(first, last, ROWS_TOGETHER):
        end = min(begin + ROWS_TOGETHER, last)
        product_strip(h[begin:end], end - begin, weight, d[begin:end], 0, left, K_BLOCK, 0, 0, weight.shape[1])


@kernel(parallel=True)
def _down(h, begins, tasks, threads, weights, d):  # type: ignore[no-untyped-def]
    """d [P, C] = h times the weights of every pair's expert; weights [E, tiles, ff, n]."""
    for thread in prange(threads):
        for at in range(tasks.shape[0]):
            if tasks[at, 2] == thread:
                e, tile = tasks[at, 0], tasks[at, 1]
                _down_task(h, begins[e], begins[e + 1], weights[e, tile], tile * weights.shape[3], d)


@kernel()
def _sum_rows(d, places, shares, out, first, last):  # type: ignore[no-untyped-def]
    """out = the experts' rows times their shares, in the router's order."""
    ranks = shares.shape[1]
    width = d.shape[1]
    for i in range(first, last):
        mixed = out[i, :width]
        for rank in range(ranks):
            row, share = d[places[i * ranks + rank]], shares[i, rank]
            if rank == 0:
                for c in range(width):
                    mixed[c] = row[c] * share
            else:
                for c in range(width):
                    mixed[c] = fma(row[c], share, mixed[c])


@kernel(parallel=True)
def _sum_parallel(d, places, shares, out, rows, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _sum_rows(d, places, shares, out, rows * part // parts, rows * (part + 1) // parts)


def mix_experts(
    x: np.ndarray,
    rows: int,
    chosen: np.ndarray,
    shares: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    h: np.ndarray,
    d: np.ndarray,
    y: np.ndarray,
) -> None:
    """Every row's experts, weighed and summed; N = ``rows``.

    x float32 [≥ N, ≥ C], chosen int64 and shares float32 [≥ N, k]; gate_up [E, 2 tiles, C, n] holds the gate's tiles, then
    the other half's, down [E, tiles, ff, n] (another n), float32 or the bits of bfloat16, see :func:`tile_columns`;
    h [≥ N k, ff] and d [≥ N k, C] are scratch; y [≥ N, ≥ C] is written.
    """
    threads = get_num_threads()
    pairs, places = np.empty((2, rows * chosen.shape[1]), np.int64)
    begins = np.empty(gate_up.shape[0] + 1, np.int64)
    _place_pairs(chosen, rows, begins, pairs, places)
    tasks = _share_out(begins, gate_up.shape[1] // 2, threads)
    _gate_up(x, chosen.shape[1], begins, pairs, tasks, threads, gate_up, h)
    _down(h, begins, _share_out(begins, down.shape[1], threads), threads, down, d)
    if rows * d.shape[1] < PARALLEL_VALUES:
        _sum_rows(d, places, shares, y, 0, rows)
    else:
        _sum_parallel(d, places, shares, y, rows, threads)


@kernel()
def _add_gated_rows(y, shared, gate, gate_column, first, last):  # type: ignore[no-untyped-def]
    width = shared.shape[1]
    for i in range(first, last):
        mixed, row, share = y[i, :width], shared[i], sigmoid32(gate[i, gate_column])
        for c in range(width):
            mixed[c] = fma(row[c], share, mixed[c])


@kernel(parallel=True)
def _add_gated_parallel(y, shared, gate, gate_column, rows, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _add_gated_rows(y, shared, gate, gate_column, rows * part // parts, rows * (part + 1) // parts)


def add_gated(y: np.ndarray, shared: np.ndarray, gate: np.ndarray, gate_column: int, rows: int) -> None:
    """y += shared * sigmoid(gate[:, gate_column]): y float32 [≥ N, ≥ C], shared [≥ N, C], gate [≥ N, > gate_column]."""
    if rows * shared.shape[1] < PARALLEL_VALUES:
        _add_gated_rows(y, shared, gate, gate_column, 0, rows)
    else:
        _add_gated_parallel(y, shared, gate, gate_column, rows, get_num_threads())
