"""Kernels of block attention that rows go through whether they choose blocks or not; ``triton.py`` launches them.

Contraction is off in all of them, and what they are specialised on is the same in every launch of a model: one binary
makes the sums of a row, whatever it is launched with.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def turn_kernel(
    positions,  # int32 [N]
    frequencies,  # float32 [HALF]
    turns,  # float32 [N, 4, HALF]
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    frequency = tl.load(frequencies + pair, mask=inside, other=0.0)
    position = tl.load(positions + n)
    for part in tl.static_range(2):
        at = position if part == 0 else position // RATIO * RATIO
        angle = (at.to(tl.float32) * frequency).to(tl.float64)
        spot = turns + (n * 4 + part * 2) * HALF + pair
        tl.store(spot, tl.cos(angle).to(tl.float32), mask=inside)
        tl.store(spot + HALF, tl.sin(angle).to(tl.float32), mask=inside)


@triton.jit
def _row(owners, slots, positions, n):
    """Owner, slot and position of a row, which the host sent: they may be read before the launches in front have ended."""
    owner = tl.load(owners + n)
    return owner, tl.load(slots + tl.maximum(owner, 0)).to(tl.int64), tl.load(positions + n)


@triton.jit
def _other(columns, HALF: tl.constexpr):
    """The partner of each value in its rotated pair."""
    return tl.where(columns < HALF, columns + HALF, columns - HALF)


@triton.jit
def _norm_and_turn(x, partner, weight, turn, columns, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """One head, zeros beyond DIM, and the same with pairs swapped → normed, the first 2 HALF values turned."""
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps)
    y = x * scale * tl.load(weight + columns, mask=columns < DIM, other=0.0)
    if HALF > 0:
        turned = columns < 2 * HALF
        z = partner * scale * tl.load(weight + _other(columns, HALF), mask=turned, other=0.0)
        z = tl.where(columns < HALF, -z, z)
        cos = tl.load(turn + columns % HALF, mask=turned, other=1.0)
        sin = tl.load(turn + HALF + columns % HALF, mask=turned, other=0.0)
        y = tl.where(turned, y * cos + z * sin, y)
    return y


@triton.jit
def _load_head(at, columns, DIM: tl.constexpr, HALF: tl.constexpr):
    """The values of a head, and those of their partners."""
    x = tl.load(at + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    return x, tl.load(at + _other(columns, HALF), mask=columns < 2 * HALF, other=0.0).to(tl.float32)


@triton.jit
def _raw_key(row, is_here, open_row, columns, inside):
    """A raw index key, of a row of this launch or of an open row."""
    here = tl.load(row + columns, mask=inside & is_here, other=0.0).to(tl.float32)
    return here + tl.load(open_row + columns, mask=inside & (is_here == 0), other=0.0)


@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["open_rows"])
def enter_kernel(
    proj,  # [N, *], rows proj_stride apart; per head q [DIM], gate [DIM] at q_at, and so on
    q_norm,  # float32 [DIM]
    k_norm,
    index_q_norm,  # float32 [INDEX_DIM]
    index_k_norm,
    turns,  # float32 [N, 4, HALF]
    owners,  # int32 [N]
    starts,  # int32 [B + 1]
    slots,  # int32 [B]
    seen,  # int32 [B]
    positions,  # int32 [N]
    pages,  # int32 [S, P]
    keys,  # float32 [*, PAGE, KV_HEADS, DIM]
    values,  # float32 [*, PAGE, KV_HEADS, DIM]
    blocks,  # float32 [*, PAGE / RATIO, INDEX_DIM]
    open_rows,  # float32 [S, RATIO, INDEX_DIM]
    q,  # [N, HEADS, DIM]
    index_q,  # [N, INDEX_HEADS, INDEX_DIM]
    proj_stride,
    q_at,
    k_at,
    v_at,
    index_q_at,
    index_k_at,
    P,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    HALF: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program for each head of a row: queries, keys, values, index queries, and one for the raw index key.

    A block whose positions all are in this launch is pooled by the program of its last row. One that was open before
    is pooled by that of the sequence's first row, which reads the open rows and then writes those that are open now.
    """
    n = tl.program_id(0)
    unit = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
    owner, slot, position = _row(owners, slots, positions, n)
    own_page = tl.load(pages + slot * P + position // PAGE).to(tl.int64)
    if OVERLAP:
        gdc_wait()
    if owner >= 0:
        row = proj + n.to(tl.int64) * proj_stride
        turn = turns + n.to(tl.int64) * 4 * HALF
        columns = tl.arange(0, BLOCK)
        index_columns = tl.arange(0, INDEX_BLOCK)
        if unit < HEADS:
            x, partner = _load_head(row + q_at + unit * 2 * DIM, columns, DIM, HALF)
            y = _norm_and_turn(x, partner, q_norm, turn, columns, eps, DIM, HALF)
            spot = q + (n.to(tl.int64) * HEADS + unit) * DIM + columns
            tl.store(spot, y.to(q.dtype.element_ty), mask=columns < DIM)
        elif unit < HEADS + 2 * KV_HEADS:
            head = (unit - HEADS) % KV_HEADS
            at = ((own_page * PAGE + position % PAGE) * KV_HEADS + head) * DIM + columns
            inside = (columns < DIM) & (own_page >= 0)
            if unit < HEADS + KV_HEADS:
                x, partner = _load_head(row + k_at + head * DIM, columns, DIM, HALF)
                y = _norm_and_turn(x, partner, k_norm, turn, columns, eps, DIM, HALF)
                tl.store(keys + at, y, mask=inside)
            else:
                x = tl.load(row + v_at + head * DIM + columns, mask=inside, other=0.0).to(tl.float32)
                tl.store(values + at, x, mask=inside)
        elif unit < HEADS + 2 * KV_HEADS + INDEX_HEADS:
            head = unit - HEADS - 2 * KV_HEADS
            x, partner = _load_head(row + index_q_at + head * INDEX_DIM, index_columns, INDEX_DIM, HALF)
            y = _norm_and_turn(x, partner, index_q_norm, turn, index_columns, eps, INDEX_DIM, HALF)
            spot = index_q + (n.to(tl.int64) * INDEX_HEADS + head) * INDEX_DIM + index_columns
            tl.store(spot, y.to(index_q.dtype.element_ty), mask=index_columns < INDEX_DIM)
        elif INDEX_HEADS > 0:
            first = tl.load(starts + owner)
            end = tl.load(starts + owner + 1)
            before = tl.load(seen + owner)
            open_row = open_rows + slot * RATIO * INDEX_DIM
            inside = index_columns < INDEX_DIM
            swapped = _other(index_columns, HALF)
            has_swapped = index_columns < 2 * HALF
            is_open = (n == first) & (before % RATIO != 0)
            last = tl.where(is_open, n + RATIO - 1 - before % RATIO, n)  # row of the block's last position
            begin = position + last - n - RATIO + 1
            is_whole = ((position + 1) % RATIO == 0) & (begin >= before) & (is_open == 0)
            if (is_open & (last < end)) | is_whole:
                mean = tl.zeros((INDEX_BLOCK,), tl.float32)
                partner = tl.zeros((INDEX_BLOCK,), tl.float32)
                for r in range(RATIO):
                    at = row + (last - n - RATIO + 1 + r).to(tl.int64) * proj_stride + index_k_at
                    is_here = begin + r >= before
                    mean += _raw_key(at, is_here, open_row + r * INDEX_DIM, index_columns, inside)
                    if HALF > 0:
                        partner += _raw_key(at, is_here, open_row + r * INDEX_DIM, swapped, has_swapped)
                turn_last = turns + (last.to(tl.int64) * 4 + 2) * HALF
                y = _norm_and_turn(
                    mean / RATIO, partner / RATIO, index_k_norm, turn_last, index_columns, eps, INDEX_DIM, HALF
                )
                page = tl.load(pages + slot * P + begin // PAGE).to(tl.int64)
                spot = blocks + (page * (PAGE // RATIO) + begin % PAGE // RATIO) * INDEX_DIM + index_columns
                tl.store(spot, y, mask=inside & (page >= 0))
            if n == first:
                tl.debug_barrier()
                for at in range(tl.maximum(first, end - RATIO), end):
                    x = tl.load(row + (at - n).to(tl.int64) * proj_stride + index_k_at + index_columns, mask=inside)
                    where = (before + at - first) % RATIO
                    tl.store(open_row + where * INDEX_DIM + index_columns, x.to(tl.float32), mask=inside)


@triton.jit
def _counts(position, RATIO: tl.constexpr, BUDGET: tl.constexpr):
    """Keys of chosen blocks that a row sees, all keys that it sees, and the first that is not of a chosen block."""
    count = position + 1
    complete = count // RATIO
    is_sparse = (BUDGET > 0) & (complete > BUDGET)
    of_blocks = tl.where(is_sparse, BUDGET * RATIO, 0)
    tail = tl.where(is_sparse, complete * RATIO, 0)
    return of_blocks, of_blocks + count - tail, tail


@triton.jit
def _merged(top, total, mixed, new_top, new_total, new_mixed):
    """Two shares as one, value by value: no sum over values, so the layout of a program decides nothing."""
    highest = tl.maximum(top, new_top)
    old = tl.exp2(top - highest)
    new = tl.exp2(new_top - highest)
    return highest, total * old + new_total * new, mixed * old + new_mixed * new


@triton.jit
def _gated(mixed, total, gate):
    return mixed * tl.div_rn(1.0, total) * tl.div_rn(1.0, 1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["P", "each", "most_splits"], do_not_specialize_on_alignment=["sums"])
def attend_kernel(
    q,  # [N, HEADS, DIM]
    proj,  # [N, *], with gates at q_at + DIM
    keys,
    values,
    chosen,  # int32 [N, BUDGET], ascending
    pages,
    owners,
    slots,
    positions,
    partials,  # float32 [N, HEADS, most_splits, DIM]
    sums,  # float32 [N, HEADS, most_splits, 2]: top and sum
    context,  # [N, HEADS, DIM], rows context_stride apart
    proj_stride,
    q_at,
    context_stride,
    P,
    scale,
    each,  # splits of a program; 1: its share is kept
    most_splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    BUDGET: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The heads of one key head: splits of a program merged and gated where it walks them all, else kept one by one."""
    n = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    element: tl.constexpr = q.dtype.element_ty
    if OVERLAP:
        gdc_launch_dependents()
    owner, slot, position = _row(owners, slots, positions, n)
    if OVERLAP:
        gdc_wait()
    of_blocks, seen_keys, tail = _counts(position, RATIO, BUDGET)
    first = tl.program_id(2) * each
    last = tl.minimum(first + each, tl.cdiv(seen_keys, SPLIT))
    if (owner >= 0) & (first < last):
        own_pages = pages + slot * P
        group = tl.arange(0, GROUP_BLOCK)
        columns = tl.arange(0, BLOCK)
        is_head = group < GROUP
        inside = is_head[:, None] & (columns < DIM)[None, :]
        heads = kv * GROUP + group
        query = tl.load(q + (n * HEADS + heads)[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
        top = tl.full((GROUP_BLOCK, 1), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK, 1), tl.float32)
        mixed = tl.zeros((GROUP_BLOCK, BLOCK), tl.float32)
        for split in range(first, last):
            at = split * SPLIT + tl.arange(0, SPLIT)
            is_seen = at < seen_keys
            token = at - of_blocks + tail
            if BUDGET > 0:
                is_chosen = at < of_blocks
                block = tl.load(chosen + n * BUDGET + at // RATIO, mask=is_chosen, other=0)
                token = tl.where(is_chosen, block * RATIO + at % RATIO, token)
            page = tl.load(own_pages + token // PAGE, mask=is_seen, other=-1).to(tl.int64)
            line = ((page * PAGE + token % PAGE) * KV_HEADS + kv) * DIM
            is_kept = (is_seen & (page >= 0))[:, None] & (columns < DIM)[None, :]
            key = tl.load(keys + line[:, None] + columns[None, :], mask=is_kept, other=0.0)
            score = tl.dot(query, tl.trans(key.to(element)), input_precision=PRECISION) * scale
            score = tl.where(is_seen[None, :], score, float("-inf"))
            split_top = tl.max(score, 1)
            share = tl.exp2(score - split_top[:, None])
            split_total = tl.sum(share, 1)
            value = tl.load(values + line[:, None] + columns[None, :], mask=is_kept, other=0.0)
            split_mixed = tl.dot(share.to(element), value.to(element), input_precision=PRECISION)
            if each == 1:
                place = (n * HEADS + heads) * most_splits + split
                tl.store(partials + place[:, None] * DIM + columns[None, :], split_mixed, mask=inside)
                tl.store(sums + place * 2, split_top, mask=is_head)
                tl.store(sums + place * 2 + 1, split_total, mask=is_head)
            else:
                top, total, mixed = _merged(top, total, mixed, split_top[:, None], split_total[:, None], split_mixed)
        if each > 1:
            gates = proj + n * proj_stride + q_at + (heads * 2 + 1)[:, None] * DIM + columns[None, :]
            gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
            out = _gated(mixed, total, gate)
            spot = context + n * context_stride + heads[:, None] * DIM + columns[None, :]
            tl.store(spot, out.to(context.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["most_splits"])
def merge_kernel(
    proj,
    owners,
    positions,
    partials,
    sums,
    context,
    proj_stride,
    q_at,
    context_stride,
    most_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    BUDGET: tl.constexpr,
    PART: tl.constexpr,  # values of a program
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,  # splits that are fetched together
    OVERLAP: tl.constexpr,
):
    """Some values of a head of a row: its splits in ascending order, merged and gated as :func:`attend_kernel` does it."""
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.program_id(2) * PART + tl.arange(0, PART)
    inside = columns < DIM
    if OVERLAP:
        gdc_launch_dependents()
    owner = tl.load(owners + n)
    _, seen_keys, _ = _counts(tl.load(positions + n), RATIO, BUDGET)
    if OVERLAP:
        gdc_wait()
    if owner >= 0:
        gate = tl.load(proj + n * proj_stride + q_at + (head * 2 + 1) * DIM + columns, mask=inside, other=0.0)
        place = (n * HEADS + head) * most_splits
        splits = tl.cdiv(seen_keys, SPLIT)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        mixed = tl.zeros((PART,), tl.float32)
        for first in range(0, splits, AT_ONCE):
            for more in tl.static_range(AT_ONCE):
                # where there are no more the last one again, and not a mask: too few of these hold so many loads together
                split = place + tl.minimum(first + more, splits - 1)
                new_mixed = tl.load(partials + split * DIM + columns, mask=inside, other=0.0)
                new_top = tl.load(sums + split * 2)
                new_total = tl.load(sums + split * 2 + 1)
                merged_top, merged_total, merged = _merged(top, total, mixed, new_top, new_total, new_mixed)
                is_split = first + more < splits
                top = tl.where(is_split, merged_top, top)
                total = tl.where(is_split, merged_total, total)
                mixed = tl.where(is_split, merged, mixed)
        out = _gated(mixed, total, gate.to(tl.float32))
        spot = context + n * context_stride + head * DIM + columns
        tl.store(spot, out.to(context.dtype.element_ty), mask=inside)
