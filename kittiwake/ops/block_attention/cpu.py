"""Block attention on the CPU, float32: keys and values of a split are gathered once for all rows and heads that see them.

Scores are chains of fused multiply-adds over the head's values in order, weighted values chains over the keys in order,
each in a lane of its own: which rows stand side by side, and on how many threads, changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.block_attention import (
    SPLIT,
    AttentionColumns,
    AttentionMemory,
    AttentionNorms,
    AttentionShape,
    RotaryRows,
)
from kittiwake.ops.block_attention.reference import row_positions
from kittiwake.ops.cpu_math import bits_from_float, exp32, fma, rms_row, row_sum, sigmoid32
from kittiwake.ops.jit import kernel

TILE = 8
"""Rows of a sequence that share gathered keys."""
SCORED = 128
"""Block keys scored at a time."""
PAD = 16
"""Values after each line of turned keys: lines a power of two apart would fall on the same places of the cache."""
_APART = 64
"""Threads' scratch begins so many values apart, so that no two write to one line of the cache."""
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)

Take = Callable[[str, int, str], np.ndarray]
"""``take(name, count, dtype)``: a vector of so many values to work in, with what was in it."""
Sizes = dict[str, tuple[int, str]]
"""Count of values and dtype by name."""


@dataclass(frozen=True)
class AttentionRoom:
    """What the layers of one forward work in one after another, and what they have in common."""

    chosen: np.ndarray  # int32 [N, budget blocks], the blocks that a row sees
    owner: np.ndarray  # int64 [N], the sequence of each row
    positions: np.ndarray  # int64 [N], the absolute position of each row
    tiles: np.ndarray  # int64 [tiles, 3], see _tiles
    values: np.ndarray  # float32 [threads, F], scratch of each thread
    places: np.ndarray  # int64 [threads, P], the same


def room_sizes(shape: AttentionShape, rows: int, keys: int, threads: int) -> Sizes:
    """What :func:`attention_room` takes for ``rows`` rows, the last of which sees up to ``keys`` keys."""
    dim, group = shape.head_dim, shape.heads // shape.kv_heads
    attending = dim * (SPLIT + PAD) + SPLIT * dim + 4 * max(dim, SPLIT) + TILE * group * (dim + 2)
    selecting = 0
    if shape.index_heads:
        selecting = shape.index_dim * (SCORED + PAD) + 2 * SCORED + TILE * (keys // shape.ratio)
    each = -(-max(attending, selecting) // _APART) * _APART
    return {
        "attention_chosen": (rows * shape.budget_blocks, "int32"),
        "attention_rows": (5 * rows, "int64"),
        "attention_values": (threads * each, "float32"),
        "attention_places": (threads * (3 * max(SPLIT, SCORED) + _APART), "int64"),
    }


def attention_room(
    shape: AttentionShape, starts: np.ndarray, positions: np.ndarray, take: Take | None = None
) -> AttentionRoom:
    """The room for packed rows of sequences that have seen ``positions`` int64 [B] tokens, for the threads in force.

    ``take`` left out: memory of its own. Raises MemoryError.
    """
    rows, threads = int(starts[-1]), get_num_threads()
    keys = int((positions + np.diff(starts)).max(initial=0))
    found = {
        name: np.empty(count, dtype) if take is None else take(name, count, dtype)
        for name, (count, dtype) in room_sizes(shape, rows, keys, threads).items()
    }
    owner, at, rest = np.split(found["attention_rows"], [rows, 2 * rows])
    owner[:] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    at[:] = row_positions(starts, positions)
    dealt = _tiles(starts, threads)
    tiles = rest[: dealt.size].reshape(dealt.shape)
    tiles[:] = dealt
    return AttentionRoom(
        found["attention_chosen"].reshape(rows, shape.budget_blocks),
        owner,
        at,
        tiles,
        found["attention_values"].reshape(threads, -1),
        found["attention_places"].reshape(threads, -1),
    )


@kernel()
def _turn(position, inv_freq, factor, cos, sin):  # type: ignore[no-untyped-def]
    at = np.float32(position)
    for i in range(inv_freq.shape[0]):
        angle = np.float64(at * inv_freq[i])
        cos[i] = np.float32(math.cos(angle) * factor)
        sin[i] = np.float32(math.sin(angle) * factor)


@kernel()
def _turn_rows(positions, inv_freq, factor, ratio, cos, sin, block_cos, block_sin):  # type: ignore[no-untyped-def]
    for i in range(positions.shape[0]):
        _turn(positions[i], inv_freq, factor, cos[i], sin[i])
        _turn(positions[i] // ratio * ratio, inv_freq, factor, block_cos[i], block_sin[i])


def rotary(
    positions: np.ndarray, inv_freq: np.ndarray, factor: float, ratio: int, out: np.ndarray | None = None
) -> RotaryRows:
    """What turns rows at ``positions``, int64 [N] absolute; made once a forward, the same in all its layers.

    ``inv_freq`` float32 [rotary_dim / 2]; cosines and sines are times ``factor``; ``ratio`` is the size of a block.
    ``out`` float32 [4 N rotary_dim / 2] is where they go; left out: memory of their own.
    """
    shape = (4, positions.shape[0], inv_freq.shape[0])
    made = np.empty(shape, dtype=np.float32) if out is None else out.reshape(shape)
    _turn_rows(positions, inv_freq, float(factor), ratio, made[0], made[1], made[2], made[3])
    return RotaryRows(made[0], made[1], made[2], made[3])


@kernel()
def _rotate(x, cos, sin):  # type: ignore[no-untyped-def]
    """The first values of x turned in pairs (i, i + half), in place."""
    half = cos.shape[0]
    for i in range(half):
        first, second = x[i], x[half + i]
        x[i] = fma(first, cos[i], -(second * sin[i]))
        x[half + i] = fma(second, cos[i], first * sin[i])


@kernel()
def _copy(x, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        out[i] = x[i]


@kernel()
def _enter_rows(  # type: ignore[no-untyped-def]
    proj, at, heads, index_heads, owner, cos, sin, norm_q, norm_k, norm_index_q, eps, slots, positions, pages, keys,
    values, first, last,
):  # fmt: skip
    """Norm and rotate the queries of rows first to last in place; write their keys and values into the pages.

    ``at`` are the columns of q_gate, k, v, index q.
    """
    page_tokens, kv_heads, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    index_dim = norm_index_q.shape[0]
    for i in range(first, last):
        row = proj[i]
        for h in range(heads):
            query = row[at[0] + 2 * h * dim : at[0] + (2 * h + 1) * dim]
            rms_row(query, norm_q, eps, query)
            _rotate(query, cos[i], sin[i])
        page = pages[slots[owner[i]], positions[i] // page_tokens]
        within = positions[i] % page_tokens
        for h in range(kv_heads):
            begin = at[1] + h * dim
            rms_row(row[begin : begin + dim], norm_k, eps, keys[page, within, h])
            _rotate(keys[page, within, h], cos[i], sin[i])
            begin = at[2] + h * dim
            _copy(row[begin : begin + dim], values[page, within, h])
        for h in range(index_heads):
            query = row[at[3] + h * index_dim : at[3] + (h + 1) * index_dim]
            rms_row(query, norm_index_q, eps, query)
            _rotate(query, cos[i], sin[i])


@kernel()
def _pool_rows(  # type: ignore[no-untyped-def]
    proj, column, cos, sin, norm, eps, positions, first, last, slot, pages, page_tokens, open_rows, blocks
):  # fmt: skip
    """Enter the raw index keys of one sequence's rows in order; a block that they complete gets its key."""
    ratio, dim = open_rows.shape[1], open_rows.shape[2]
    size = np.float32(ratio)
    mean = np.empty(dim, np.float32)
    for i in range(first, last):
        position = positions[i]
        _copy(proj[i, column : column + dim], open_rows[slot, position % ratio])
        if (position + 1) % ratio == 0:
            for c in range(dim):
                mean[c] = _ZERO
            for r in range(ratio):
                raw = open_rows[slot, r]
                for c in range(dim):
                    mean[c] += raw[c]
            for c in range(dim):
                mean[c] /= size
            key = blocks[pages[slot, position // page_tokens], position % page_tokens // ratio]
            rms_row(mean, norm, eps, key)
            _rotate(key, cos[i], sin[i])


@kernel()
def _chain_two(q, z, at, k0, k1, k2, k3, s, t):  # type: ignore[no-untyped-def]
    """s[j] += q[at] k0[j], then q[at + 1] k1[j], … in order; t the same with z."""
    a, b, c, d = q[at], q[at + 1], q[at + 2], q[at + 3]
    e, f, g, h = z[at], z[at + 1], z[at + 2], z[at + 3]
    for j in range(s.shape[0]):
        s[j] = fma(d, k3[j], fma(c, k2[j], fma(b, k1[j], fma(a, k0[j], s[j]))))
        t[j] = fma(h, k3[j], fma(g, k2[j], fma(f, k1[j], fma(e, k0[j], t[j]))))


@kernel()
def _dot_two(q, z, turned, s, t):  # type: ignore[no-untyped-def]
    """s [n] = q [D] times turned [D, ≥ n], t = z times turned: chains over D in order."""
    n = s.shape[0]
    for j in range(n):
        s[j] = _ZERO
    for j in range(n):
        t[j] = _ZERO
    d = 0
    while d + 4 <= q.shape[0]:
        _chain_two(q, z, d, turned[d, :n], turned[d + 1, :n], turned[d + 2, :n], turned[d + 3, :n], s, t)
        d += 4
    while d < q.shape[0]:
        line = turned[d, :n]
        for j in range(n):
            s[j] = fma(q[d], line[j], s[j])
            t[j] = fma(z[d], line[j], t[j])
        d += 1


@kernel()
def _softmax_split(s, scale):  # type: ignore[no-untyped-def]
    """Scores s [n] become e**(s * scale - top); returns (top, their sum)."""
    for j in range(s.shape[0]):
        s[j] *= scale
    top = s[0]
    for j in range(1, s.shape[0]):
        top = s[j] if s[j] > top else top
    for j in range(s.shape[0]):
        s[j] = exp32(s[j] - top)
    return top, row_sum(s)


@kernel()
def _mix_two(s, t, values, mixed, other):  # type: ignore[no-untyped-def]
    """mixed [D] = s [n] times values [≥ n, D], other = t times values: chains over the keys in order."""
    n = s.shape[0]
    for c in range(mixed.shape[0]):
        mixed[c] = _ZERO
    for c in range(other.shape[0]):
        other[c] = _ZERO
    j = 0
    while j + 4 <= n:
        _chain_two_columns(s, t, j, values[j], values[j + 1], values[j + 2], values[j + 3], mixed, other)
        j += 4
    while j < n:
        line = values[j]
        for c in range(mixed.shape[0]):
            mixed[c] = fma(s[j], line[c], mixed[c])
            other[c] = fma(t[j], line[c], other[c])
        j += 1


@kernel()
def _chain_two_columns(s, t, at, v0, v1, v2, v3, mixed, other):  # type: ignore[no-untyped-def]
    a, b, c, d = s[at], s[at + 1], s[at + 2], s[at + 3]
    e, f, g, h = t[at], t[at + 1], t[at + 2], t[at + 3]
    for i in range(mixed.shape[0]):
        mixed[i] = fma(d, v3[i], fma(c, v2[i], fma(b, v1[i], fma(a, v0[i], mixed[i]))))
        other[i] = fma(h, v3[i], fma(g, v2[i], fma(f, v1[i], fma(e, v0[i], other[i]))))


@kernel()
def _merge(top, total, mixed, sums, kept):  # type: ignore[no-untyped-def]
    """Add a split to what was kept of those before it: sums = (top, total), kept [D]."""
    highest = top if top > sums[0] else sums[0]
    old, new = exp32(sums[0] - highest), exp32(top - highest)
    for c in range(kept.shape[0]):
        kept[c] = fma(mixed[c], new, kept[c] * old)
    sums[1] = fma(total, new, sums[1] * old)
    sums[0] = highest


@kernel()
def _add_split(row, column, turned, values, count, scale, is_first, room, sums, kept):  # type: ignore[no-untyped-def]
    """Add ``count`` gathered keys to G heads of one row: kept [G, D], sums [G, 2]; room is scratch.

    The query of the first head is at ``column`` of the row, each further one 2 D after the one before.
    """
    group, dim = kept.shape
    s, t = room[0, :count], room[1, :count]
    mixed, other = room[2, :dim], room[3, :dim]
    for head in range(0, group, 2):
        pair = head + 1 if head + 1 < group else head
        at, other_at = column + 2 * head * dim, column + 2 * pair * dim
        _dot_two(row[at : at + dim], row[other_at : other_at + dim], turned, s, t)
        top, total = _softmax_split(s, scale)
        next_top, next_total = _softmax_split(t, scale)
        if is_first:
            _mix_two(s, t, values, kept[head], kept[pair] if pair != head else other)
            sums[head, 0], sums[head, 1] = top, total
            sums[pair, 0], sums[pair, 1] = next_top, next_total
        else:
            _mix_two(s, t, values, mixed, other)
            _merge(top, total, mixed, sums[head], kept[head])
            if pair != head:
                _merge(next_top, next_total, other, sums[pair], kept[pair])


@kernel()
def _turn_eight(k0, k1, k2, k3, k4, k5, k6, k7, at, turned):  # type: ignore[no-untyped-def]
    """Eight keys as columns ``at`` on of turned [D, > SPLIT]: eight values side by side fill a line of the cache."""
    for c in range(k0.shape[0]):
        line = turned[c, at : at + 8]
        line[0] = k0[c]
        line[1] = k1[c]
        line[2] = k2[c]
        line[3] = k3[c]
        line[4] = k4[c]
        line[5] = k5[c]
        line[6] = k6[c]
        line[7] = k7[c]


@kernel()
def _turn_keys(lines, places, offsets, count, turned):  # type: ignore[no-untyped-def]
    """Keys lines[places[j], offsets[j]] as columns of turned [D, > SPLIT]."""
    j = 0
    while j + 8 <= count:
        _turn_eight(
            lines[places[j], offsets[j]], lines[places[j + 1], offsets[j + 1]],
            lines[places[j + 2], offsets[j + 2]], lines[places[j + 3], offsets[j + 3]],
            lines[places[j + 4], offsets[j + 4]], lines[places[j + 5], offsets[j + 5]],
            lines[places[j + 6], offsets[j + 6]], lines[places[j + 7], offsets[j + 7]], j, turned,
        )  # fmt: skip
        j += 8
    while j < count:
        key = lines[places[j], offsets[j]]
        for c in range(key.shape[0]):
            turned[c, j] = key[c]
        j += 1


@kernel()
def _gather(keys, values, pages, head, tokens, room, count, turned, gathered):  # type: ignore[no-untyped-def]
    """Keys of the positions ``tokens`` as columns of turned [D, > SPLIT], their values as rows of gathered [SPLIT, D]."""
    size, heads, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    for j in range(count):
        room[0, j] = pages[tokens[j] // size]
        room[1, j] = tokens[j] % size * heads + head
    lines = keys.reshape(keys.shape[0], size * heads, dim)
    _turn_keys(lines, room[0], room[1], count, turned)
    for j in range(count):
        _copy(values[room[0, j], tokens[j] % size, head], gathered[j])


@kernel()
def _finish(row, gate_column, dim, sums, kept, out):  # type: ignore[no-untyped-def]
    """out [G * D] = kept / total * sigmoid(gate); the gate of each head stands 2 D after that of the one before."""
    for head in range(kept.shape[0]):
        begin = gate_column + 2 * head * dim
        gate, written = row[begin : begin + dim], out[head * dim : (head + 1) * dim]
        mixed, share = kept[head], _ONE / sums[head, 1]
        for c in range(dim):
            written[c] = mixed[c] * share * sigmoid32(gate[c])


@kernel()
def _attend_tile(  # type: ignore[no-untyped-def]
    proj, q_column, group, positions, keys, values, pages, ratio, budget, chosen, first, last, kv_head, own, own_places,
    out,
):  # fmt: skip
    """Rows first to last of one sequence, all query heads of one key head. ``budget`` blocks; below 0 all rows are dense.

    ``own`` and ``own_places`` are the thread's scratch.
    """
    dim, rows = keys.shape[3], last - first
    left = kv_head * group
    column = q_column + 2 * left * dim
    scale = np.float32(1.0 / math.sqrt(dim))
    turned, at = own[: dim * (SPLIT + PAD)].reshape((dim, SPLIT + PAD)), dim * (SPLIT + PAD)
    gathered, at = own[at : at + SPLIT * dim].reshape((SPLIT, dim)), at + SPLIT * dim
    wide = max(dim, SPLIT)
    room, at = own[at : at + 4 * wide].reshape((4, wide)), at + 4 * wide
    kept, at = own[at : at + rows * group * dim].reshape((rows, group, dim)), at + rows * group * dim
    sums = own[at : at + rows * group * 2].reshape((rows, group, 2))
    tokens, places = own_places[:SPLIT], own_places[SPLIT : 3 * SPLIT].reshape((2, SPLIT))
    middle = last  # rows before it are dense
    while budget >= 0 and middle > first and (positions[middle - 1] + 1) // ratio > budget:
        middle -= 1
    longest = positions[middle - 1] + 1 if middle > first else 0
    for begin in range(0, longest, SPLIT):
        most = min(SPLIT, longest - begin)
        for j in range(most):
            tokens[j] = begin + j
        _gather(keys, values, pages, kv_head, tokens, places, most, turned, gathered)
        for i in range(first, middle):
            count = min(SPLIT, positions[i] + 1 - begin)
            if count > 0:
                _add_split(
                    proj[i], column, turned, gathered, count, scale, begin == 0, room,
                    sums[i - first], kept[i - first],
                )  # fmt: skip
    for i in range(middle, last):
        complete = (positions[i] + 1) // ratio
        of_blocks = budget * ratio
        total = of_blocks + positions[i] + 1 - complete * ratio
        for begin in range(0, total, SPLIT):
            count = min(SPLIT, total - begin)
            for j in range(count):
                at = begin + j
                if at < of_blocks:
                    tokens[j] = chosen[i, at // ratio] * ratio + at % ratio
                else:
                    tokens[j] = at - of_blocks + complete * ratio
            _gather(keys, values, pages, kv_head, tokens, places, count, turned, gathered)
            _add_split(
                proj[i], column, turned, gathered, count, scale, begin == 0, room,
                sums[i - first], kept[i - first],
            )  # fmt: skip
    for i in range(first, last):
        _finish(proj[i], column + dim, dim, sums[i - first], kept[i - first], out[i, left * dim : (left + group) * dim])


@kernel()
def _threshold(scores, count):  # type: ignore[no-untyped-def]
    """Bits of the ``count``-th highest of the scores [n], all at least 0, and how many that equal it are among them.

    Bits of such floats rank as the floats do, so a byte at a time tells it exactly.
    """
    found = np.uint64(0)
    tally = np.empty(256, np.int64)
    for shift in (24, 16, 8, 0):
        tally[:] = 0
        for n in range(scores.shape[0]):
            bits = np.uint64(bits_from_float(scores[n]))
            if bits >> np.uint64(shift + 8) == found:
                tally[(bits >> np.uint64(shift)) & np.uint64(255)] += 1
        byte = 255
        while tally[byte] < count:
            count -= tally[byte]
            byte -= 1
        found = (found << np.uint64(8)) | np.uint64(byte)
    return found, count


@kernel()
def _choose(scores, chosen):  # type: ignore[no-untyped-def]
    """chosen int32 [n] = the places of the n highest scores, ties to the lowest place, ascending."""
    border, equal = _threshold(scores, chosen.shape[0])
    n = 0
    for place in range(scores.shape[0]):
        bits = np.uint64(bits_from_float(scores[place]))
        if bits > border or (bits == border and equal > 0):
            equal -= bits == border
            chosen[n] = place
            n += 1


@kernel()
def _add_relu(s, scores):  # type: ignore[no-untyped-def]
    for n in range(scores.shape[0]):
        scores[n] += s[n] if s[n] > _ZERO else _ZERO


@kernel()
def _select_tile(  # type: ignore[no-untyped-def]
    proj, column, heads, positions, blocks, pages, ratio, chosen, first, last, own, own_places
):  # fmt: skip
    """Choose the blocks of rows first to last of one sequence, those that are sparse; own and own_places are scratch."""
    budget, dim = chosen.shape[1], blocks.shape[2]
    while first < last and (positions[first] + 1) // ratio <= budget:
        first += 1
    if first == last:
        return
    most = (positions[last - 1] + 1) // ratio
    turned, used = own[: dim * (SCORED + PAD)].reshape((dim, SCORED + PAD)), dim * (SCORED + PAD)
    room, used = own[used : used + 2 * SCORED].reshape((2, SCORED)), used + 2 * SCORED
    scores = own[used : used + (last - first) * most].reshape((last - first, most))
    places = own_places[: 2 * SCORED].reshape((2, SCORED))
    for begin in range(0, most, SCORED):
        for j in range(min(SCORED, most - begin)):
            places[0, j] = pages[(begin + j) // blocks.shape[1]]
            places[1, j] = (begin + j) % blocks.shape[1]
        _turn_keys(blocks, places[0], places[1], min(SCORED, most - begin), turned)
        for i in range(first, last):
            count = min(SCORED, (positions[i] + 1) // ratio - begin)
            if count <= 0:
                continue
            s, t, sums = room[0, :count], room[1, :count], scores[i - first, begin : begin + count]
            for n in range(count):
                sums[n] = _ZERO
            for head in range(0, heads, 2):
                pair = head + 1 if head + 1 < heads else head
                at, other = column + head * dim, column + pair * dim
                _dot_two(proj[i, at : at + dim], proj[i, other : other + dim], turned, s, t)
                _add_relu(s, sums)
                if pair != head:
                    _add_relu(t, sums)
    for i in range(first, last):
        _choose(scores[i - first, : (positions[i] + 1) // ratio], chosen[i])


@kernel(parallel=True)
def _run(  # type: ignore[no-untyped-def]
    proj, at, heads, index_heads, norm_q, norm_k, norm_index_q, norm_index_k, eps, cos, sin, block_cos, block_sin,
    starts, slots, owner, positions, tiles, keys, values, blocks, open_rows, pages, ratio, budget, chosen, scratch,
    scratch_places, out,
):  # fmt: skip
    rows, kv_heads, parts, count = owner.shape[0], keys.shape[2], scratch.shape[0], tiles.shape[0]
    for part in prange(parts):
        _enter_rows(
            proj, at, heads, index_heads, owner, cos, sin, norm_q, norm_k, norm_index_q, eps, slots, positions, pages,
            keys, values, rows * part // parts, rows * (part + 1) // parts,
        )  # fmt: skip
    if index_heads > 0:
        for b in prange(slots.shape[0]):
            _pool_rows(
                proj, at[4], block_cos, block_sin, norm_index_k, eps, positions, starts[b], starts[b + 1], slots[b],
                pages, keys.shape[1], open_rows, blocks,
            )  # fmt: skip
        for part in prange(parts):
            for n in range(count * part // parts, count * (part + 1) // parts):
                _select_tile(
                    proj, at[3], index_heads, positions, blocks, pages[slots[tiles[n, 0]]], ratio, chosen, tiles[n, 1],
                    tiles[n, 2], scratch[part], scratch_places[part],
                )  # fmt: skip
    tasks = count * kv_heads
    for part in prange(parts):
        for task in range(tasks * part // parts, tasks * (part + 1) // parts):
            n = task // kv_heads
            _attend_tile(
                proj, at[0], heads // kv_heads, positions, keys, values, pages[slots[tiles[n, 0]]], ratio, budget,
                chosen, tiles[n, 1], tiles[n, 2], task % kv_heads, scratch[part], scratch_places[part], out,
            )  # fmt: skip


def _tiles(starts: np.ndarray, threads: int) -> np.ndarray:
    """int64 [tiles, 3] of (sequence, first row, last row), dealt out so that each thread gets early and late ones."""
    found = [
        (sequence, first, min(first + TILE, int(starts[sequence + 1])))
        for sequence in range(len(starts) - 1)
        for first in range(int(starts[sequence]), int(starts[sequence + 1]), TILE)
    ]
    return np.array([one for thread in range(threads) for one in found[thread::threads]], dtype=np.int64)


def block_attention(
    proj: np.ndarray,
    columns: AttentionColumns,
    shape: AttentionShape,
    norms: AttentionNorms,
    rope: RotaryRows,
    starts: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    memory: AttentionMemory,
    out: np.ndarray,
    room: AttentionRoom | None = None,
) -> None:
    """One layer's attention between its products, for packed rows.

    proj float32 [≥ N, X] holds the raw projections at ``columns``; queries are normed and rotated in it. ``positions``
    int64 [B] are the tokens that each sequence has seen before these rows, ``rope`` is of the rows' own positions
    (:func:`rotary`). ``memory`` must have pages for the rows: their keys, values, index keys and completed blocks are
    written there. out [≥ N, heads * head_dim] is written, gated. ``room`` is that of :func:`attention_room` for these rows;
    left out: memory of its own.
    """
    if room is None:
        room = attention_room(shape, starts, positions)
    budget = shape.budget_blocks if shape.index_heads else -1
    at = np.array([columns.q_gate, columns.k, columns.v, columns.index_q, columns.index_k], dtype=np.int64)
    _run(
        proj, at, shape.heads, shape.index_heads, norms.q, norms.k, norms.index_q, norms.index_k, norms.eps,
        rope.cos, rope.sin, rope.block_cos, rope.block_sin, starts, slots, room.owner, room.positions, room.tiles,
        memory.keys, memory.values, memory.blocks, memory.open_rows, memory.pages, shape.ratio, budget, room.chosen,
        room.values, room.places, out,
    )  # fmt: skip
