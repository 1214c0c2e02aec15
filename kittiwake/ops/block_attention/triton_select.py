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


@triton.jit
def _prefetch(addresses):
    """Ask for the lines of memory at these addresses to come to L2, where no write of another launch is missed."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _page_of(own_pages, block, most, PAGE_BLOCKS: tl.constexpr):
    """The page of each block; below 0 for those that a row does not score."""
    return tl.load(own_pages + block // PAGE_BLOCKS, mask=block < most, other=-1).to(tl.int64)


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
    LINE: tl.constexpr,  # values of a line of memory
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """scores = sum over heads of relu(index q . block key), for a tile of rows, one of their sequences after another.

    Few rows score as many blocks as are in their memory: these are on their way before the queries are made.
    """
    if OVERLAP:
        gdc_launch_dependents()
    # the host sent what is read here; the launches in front may still be at work
    begin = first + tl.program_id(1) * ROWS
    row = begin + tl.arange(0, ROWS)
    owner, complete = _complete(positions, owners, row, row < last, RATIO, BUDGET)
    lowest = tl.min(tl.where(complete > 0, owner, 2147483647), 0)
    highest = tl.max(tl.where(complete > 0, owner, -1), 0)
    if OVERLAP:
        soon = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        most_soon = tl.max(tl.where(owner == lowest, complete, 0), 0)
        if (tl.num_programs(1) == 1) & (tl.program_id(0) * COLUMNS < most_soon):
            pages_soon = pages + tl.load(slots + lowest).to(tl.int64) * P
            at_soon = (
                tl.maximum(_page_of(pages_soon, soon, most_soon, PAGE_BLOCKS), 0) * PAGE_BLOCKS + soon % PAGE_BLOCKS
            )
            parts = tl.minimum(tl.arange(0, BLOCK // LINE) * LINE, DIM - 1)
            _prefetch(blocks + at_soon[:, None] * DIM + parts[None, :])
        gdc_wait()
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
                page = _page_of(own_pages, block, most, PAGE_BLOCKS)
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
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _border(bits, low, count, HALVINGS: tl.constexpr):
    """The highest number found that at least ``count`` of the bits reach, as ``low`` >= 0 is, and how many reach it.

    Either these are ``count``, or the number is the ``count``-th highest of the bits. Bits that differ are mostly parted
    long before the last of theirs: at first the middle is that of two scores, which lie side by side, then of two numbers.
    """
    high = tl.max(bits, 0) + 1
    reach = tl.sum((bits >= low).to(tl.int32), 0)
    step = tl.zeros((), tl.int32)
    while (reach > count) & (high - low > 1):
        middle = low + (high - low) // 2
        if step < HALVINGS:
            between = (0.5 * _float(low) + 0.5 * _float(high)).to(tl.int32, bitcast=True)
            middle = tl.minimum(tl.maximum(between, low + 1), high - 1)
        enough = tl.sum((bits >= middle).to(tl.int32), 0)
        is_reached = enough >= count
        low = tl.where(is_reached, middle, low)
        reach = tl.where(is_reached, enough, reach)
        high = tl.where(is_reached, high, middle)
        step += 1
    return low, reach


@triton.jit
def _write(bits, groups, border, equal, written, out):
    """Write, in order, the numbers of bits [G, W] above the border, and of the first ``equal`` that are on it.

    The bits of a group are those of the W numbers from its number times W. Returns how many are on the border (where
    some of these are wanted), and how many were written. A group is a mask of bits by then: threads hold few of them.
    """
    WIDTH: tl.constexpr = bits.shape[1]
    taken = (bits > border).to(tl.int32)
    on_border = tl.zeros((), tl.int32)
    if equal > 0:
        tied = (bits == border).to(tl.int32)
        of_group = tl.sum(tied, 1)
        before = tl.cumsum(of_group, 0) - of_group
        taken += tl.where(before[:, None] + tl.cumsum(tied, 1) <= equal, tied, 0)
        on_border = tl.sum(of_group, 0)
    of_group = tl.sum(taken, 1)
    masks = tl.sum(taken << tl.arange(0, WIDTH)[None, :], 1)
    at = written + tl.cumsum(of_group, 0) - of_group
    for place in range(WIDTH):
        is_taken = (masks >> place) & 1
        tl.store(out + at, groups * WIDTH + place, mask=is_taken > 0)
        at += is_taken
    return on_border, tl.sum(of_group, 0)


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
    HALVINGS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """chosen = the BUDGET blocks of a row's highest scores, ties to the lowest, ascending.

    Tiles that are no more than BUDGET_PADDED are looked at as they are. Of more, the BUDGET-th highest of their maxima,
    or a number that no more than BUDGET reach, is a lower bound of the border: those tiles are gathered that hold what
    reaches it, or, where too many do, what lies above it, and then either they hold the border, or it is the bound.
    """
    n = first + tl.program_id(0)
    own = scores + tl.program_id(0).to(tl.int64) * line
    if OVERLAP:
        gdc_launch_dependents()
    # the host sent what is read here; the launches in front may still be at work
    _, complete = _complete(positions, owners, n, n >= 0, RATIO, BUDGET)
    if OVERLAP:
        gdc_wait()
    if complete > 0:
        WIDE: tl.constexpr = TILE * FOLD
        out = chosen + n.to(tl.int64) * BUDGET
        place = tl.arange(0, BUDGET_PADDED)
        gathered = place
        tiles = tl.cdiv(complete, WIDE)
        bound = tl.full((), -1, tl.int32)
        if tiles > BUDGET_PADDED:
            WIDTH: tl.constexpr = 16 if TILES > 16 else TILES
            group = tl.arange(0, TILES // WIDTH)
            tile = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            small = tile[:, :, None] * FOLD + tl.arange(0, FOLD)[None, None, :]
            own_maxima = maxima + tl.program_id(0).to(tl.int64) * (line // TILE)
            tops = tl.max(_bits(own_maxima, small, small < tl.cdiv(complete, TILE)), 2)
            bound, reach = _border(tl.reshape(tops, (TILES,)), bound + 1, BUDGET, HALVINGS)
            bound = tl.where(reach > BUDGET, bound, bound - 1)
            _, tiles = _write(tops, group, bound, 0, 0, out)
            tl.debug_barrier()
            gathered = tl.load(out + place, mask=place < tiles, other=0)
            tl.debug_barrier()
        small = tl.reshape(gathered[:, None] * FOLD + tl.arange(0, FOLD)[None, :], (BUDGET_PADDED * FOLD,))
        is_tile = tl.arange(0, BUDGET_PADDED * FOLD) < tiles * FOLD
        number = small[:, None] * TILE + tl.arange(0, TILE)[None, :]
        bits = _bits(own, number, is_tile[:, None] & (number < complete))
        flat = tl.reshape(bits, (BUDGET_PADDED * WIDE,))
        equal = BUDGET - tl.sum((flat > bound).to(tl.int32), 0)
        if equal <= 0:
            border, reach = _border(flat, bound + 1, BUDGET, HALVINGS)
            equal = tl.zeros((), tl.int32)
            if reach > BUDGET:
                equal += BUDGET - tl.sum((flat > border).to(tl.int32), 0)
            else:
                border -= 1
            _write(bits, small, border, equal, 0, out)
        else:
            written = tl.zeros((), tl.int32)
            for begin in range(0, complete, 2048):
                group = begin // TILE + tl.arange(0, 2048 // TILE)
                at = group[:, None] * TILE + tl.arange(0, TILE)[None, :]
                on_border, taken = _write(_bits(own, at, at < complete), group, bound, equal, written, out)
                equal = tl.maximum(equal - on_border, 0)
                written += taken
