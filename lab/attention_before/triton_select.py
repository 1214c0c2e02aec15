"""Kernels that choose the blocks of sparse rows: scores against all complete blocks, and an exact selection of the best.

Scores are at least 0, so their bits rank as they do: what is chosen follows from counts alone, and no order of sums or
programs can change it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COLUMNS = 64
"""Blocks scored at a time."""
TILE = 16
"""Neighbouring blocks whose highest score is kept beside them."""


@triton.jit
def _complete(positions, owners, row, inside, RATIO: tl.constexpr, BUDGET: tl.constexpr):
    """Owners, and how many complete blocks each row scores: 0 for one that sees all keys, or that is spare."""
    owner = tl.load(owners + row, mask=inside, other=-1)
    complete = (tl.load(positions + row, mask=inside, other=0) + 1) // RATIO
    return owner, tl.where((owner >= 0) & (complete > BUDGET), complete, 0)


@triton.jit(do_not_specialize=["first", "last", "P", "line"])
def score_kernel(
    index_q,  # [N, HEADS, DIM]
    blocks,  # float32 [*, PAGE_BLOCKS, DIM]
    pages,  # int32 [S, P]
    owners,  # int32 [N]
    slots,  # int32 [B]
    positions,  # int32 [N]
    scores,  # float32 [rows, line]
    maxima,  # float32 [rows, line / TILE]
    first,
    last,  # the rows from first to last are scored
    P,
    line,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,  # values of a step of the products' chain
    RATIO: tl.constexpr,
    BUDGET: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """scores = sum over heads of relu(index q . block key), for a tile of rows, one of their sequences after another."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    begin = first + tl.program_id(1) * ROWS
    row = begin + tl.arange(0, ROWS)
    owner, complete = _complete(positions, owners, row, row < last, RATIO, BUDGET)
    lowest = tl.min(tl.where(complete > 0, owner, 2147483647), 0)
    highest = tl.max(tl.where(complete > 0, owner, -1), 0)
    if highest >= 0:
        lines = tl.arange(0, ROWS * HEADS_PADDED)
        head = lines % HEADS_PADDED
        of_row = begin + lines // HEADS_PADDED
        query_at = index_q + ((of_row.to(tl.int64) * HEADS + head) * DIM)[:, None]
        is_line = (of_row < last) & (head < HEADS)
        depth = tl.arange(0, DEPTH)
        element: tl.constexpr = index_q.dtype.element_ty
        out = (row - first).to(tl.int64)
        for sequence in range(lowest, highest + 1):
            own = tl.where(owner == sequence, complete, 0)
            most = tl.max(own, 0)
            own_pages = pages + tl.load(slots + sequence).to(tl.int64) * P
            for tile in range(tl.program_id(0), tl.cdiv(most, COLUMNS), tl.num_programs(0)):
                block = tile * COLUMNS + tl.arange(0, COLUMNS)
                page = tl.load(own_pages + block // PAGE_BLOCKS, mask=block < most, other=-1).to(tl.int64)
                key_at = (page * PAGE_BLOCKS + block % PAGE_BLOCKS) * DIM
                is_kept = page >= 0
                product = tl.zeros((ROWS * HEADS_PADDED, COLUMNS), tl.float32)
                for step in range(0, BLOCK, DEPTH):
                    at = step + depth
                    is_value = (at < DIM)[None, :]
                    query = tl.load(query_at + at[None, :], mask=is_line[:, None] & is_value, other=0.0)
                    key_spot = blocks + key_at[:, None] + at[None, :]
                    key = tl.load(key_spot, mask=is_kept[:, None] & is_value, other=0.0)
                    product = tl.dot(query, tl.trans(key.to(element)), product, input_precision=PRECISION)
                product = tl.where(product > 0.0, product, 0.0)
                score = tl.sum(tl.reshape(product, (ROWS, HEADS_PADDED, COLUMNS)), 1)
                is_own = block[None, :] < own[:, None]
                tl.store(scores + out[:, None] * line + block[None, :], score, mask=is_own)
                small = tl.reshape(tl.where(is_own, score, -1.0), (ROWS, COLUMNS // TILE, TILE))
                place = tile * (COLUMNS // TILE) + tl.arange(0, COLUMNS // TILE)
                spot = maxima + out[:, None] * (line // TILE) + place[None, :]
                tl.store(spot, tl.max(small, 2), mask=(place * TILE)[None, :] < own[:, None])


@triton.jit
def _bits(scores, at, inside):
    """Scores as whole numbers that rank as they do; below 0 outside."""
    return tl.load(scores + at, mask=inside, other=-1.0).to(tl.int32, bitcast=True)


@triton.jit
def _border(bits, count):
    """The ``count``-th highest of the bits, at least so many of which are not below 0."""
    found = tl.zeros((), tl.int32)
    for step in range(31):
        trial = found | (1 << (30 - step))
        enough = tl.sum((bits >= trial).to(tl.int32), 0) >= count
        found = tl.where(enough, trial, found)
    return found


@triton.jit
def _take(bits, numbers, border, equal, written, out):
    """Write, in order, the numbers of bits above the border, and of the first ``equal`` that are on it.

    Returns how many are on it, and how many were written.
    """
    on_border = (bits == border).to(tl.int32)
    taken = (bits > border) | ((on_border > 0) & (tl.cumsum(on_border, 0) <= equal))
    counted = tl.cumsum(taken.to(tl.int32), 0)
    tl.store(out + written + counted - 1, numbers, mask=taken)
    return tl.sum(on_border, 0), tl.sum(taken.to(tl.int32), 0)


@triton.jit(do_not_specialize=["first", "line"])
def select_kernel(
    scores,  # float32 [rows, line]
    maxima,  # float32 [rows, line / TILE]
    owners,
    positions,
    chosen,  # int32 [N, BUDGET]
    first,
    line,
    BUDGET: tl.constexpr,
    BUDGET_PADDED: tl.constexpr,
    RATIO: tl.constexpr,
    TILE: tl.constexpr,
    FOLD: tl.constexpr,  # small tiles that are looked at as one
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """chosen = the BUDGET blocks of a row's highest scores, ties to the lowest, ascending.

    The BUDGET-th highest of the tiles' maxima is a lower bound of the border. What lies above it is in fewer than
    BUDGET tiles: these are gathered, and either hold the border, or it is the bound.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    n = first + tl.program_id(0)
    own = scores + tl.program_id(0).to(tl.int64) * line
    _, complete = _complete(positions, owners, n, n >= 0, RATIO, BUDGET)
    if complete > 0:
        WIDE: tl.constexpr = TILE * FOLD
        tile = tl.arange(0, TILES)
        small = tile[:, None] * FOLD + tl.arange(0, FOLD)[None, :]
        own_maxima = maxima + tl.program_id(0).to(tl.int64) * (line // TILE)
        tops = tl.max(_bits(own_maxima, small, small < tl.cdiv(complete, TILE)), 1)
        bound = tl.full((), -1, tl.int32)
        if tl.cdiv(complete, WIDE) >= BUDGET:
            bound = _border(tops, BUDGET)
        out = chosen + n.to(tl.int64) * BUDGET
        _, tiles = _take(tops, tile, bound, 0, 0, out)
        tl.debug_barrier()
        place = tl.arange(0, BUDGET_PADDED)
        gathered = tl.load(out + place, mask=place < tiles, other=0)
        tl.debug_barrier()
        number = gathered[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        bits = _bits(own, number, (place < tiles)[:, None] & (number < complete))
        bits = tl.reshape(bits, (BUDGET_PADDED * WIDE,))
        number = tl.reshape(number, (BUDGET_PADDED * WIDE,))
        above = tl.sum((bits > bound).to(tl.int32), 0)
        if above >= BUDGET:
            border = _border(bits, BUDGET)
            _take(bits, number, border, BUDGET - tl.sum((bits > border).to(tl.int32), 0), 0, out)
        else:
            equal = BUDGET - above
            written = tl.zeros((), tl.int32)
            for begin in range(0, complete, 2048):
                at = begin + tl.arange(0, 2048)
                on_border, taken = _take(_bits(own, at, at < complete), at, bound, equal, written, out)
                equal = tl.maximum(equal - on_border, 0)
                written += taken
