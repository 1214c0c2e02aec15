"""The sampler's kernels in Triton: rows are split into parts, and every sum is one of whole numbers.

A probability becomes a count of 2**-44 of the likeliest token's (:func:`_mass`), so a sum has the same bits in whatever
order, split and number of programs it is made. A threshold is defined by such sums alone ("the largest logit that at
least this much reaches"), so how it is searched changes its cost and nothing else: the guesses of :func:`measure_levels`
may be as rough as they like.

One draw is, for rows that are not greedy, eight launches: adjust, measure levels, collect and settle for ``top_k``, the
same two for ``top_p``, weigh, pick. Greedy rows take part in the first and the last, and leave the others at once.
Logits are compared by their key, an int32 in the order of the floats. ``parts`` arrays are [row, PARTS, …], one entry for
each BLOCK logits of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(16)
"""int64 words of a slot's record; floats stand in them as the bits of a float64."""
FLAGS = tl.constexpr(0)
SEED = tl.constexpr(1)
POSITION = tl.constexpr(2)
TOP_K = tl.constexpr(3)
MARKS = tl.constexpr(4)
"""Address of int32 [vocab], 0 for none: bit 0 banned, bit 1 given, the rest how often it was drawn."""
BIAS = tl.constexpr(5)
"""Address of float64 [vocab], 0 for none."""
TOP_P = tl.constexpr(6)
REACH = tl.constexpr(7)
"""How far below the largest logit ``min_p`` lets one lie; 0 or less."""
REPETITION = tl.constexpr(8)
PRESENCE = tl.constexpr(9)
FREQUENCY = tl.constexpr(10)
SCALE = tl.constexpr(11)
"""What logits are multiplied by: one over the temperature, in float32."""

ACTIVE = tl.constexpr(1)
SAMPLED = tl.constexpr(2)
FILTERS_FIRST = tl.constexpr(4)
HAS_MIN_P = tl.constexpr(8)

LEVELS = tl.constexpr(16)
_LOWEST_KEY = tl.constexpr(-2139095040)
"""The key after that of minus infinity: banned tokens never reach it."""
_LARGEST_KEY = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(2147483647)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_QUANTA = tl.constexpr(17592186044416.0)  # 2**44


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """int32 in the order of float32; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, top, scale):  # type: ignore[no-untyped-def]
    """e**((x - top) * scale) in whole 2**-44; 0 for a banned token."""
    gap = tl.maximum(x - top, -_LARGEST)
    share = tl.exp(gap * scale)
    return tl.where(x > float("-inf"), (share * _QUANTA).to(tl.int64), 0)


@triton.jit
def _number(record, FIELD: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(record + FIELD).to(tl.float64, bitcast=True)


@triton.jit
def _slot_and_flags(slots, records, row):  # type: ignore[no-untyped-def]
    """Slot and flags of a row; flags 0 for a spare row."""
    slot = tl.load(slots + row).to(tl.int64)
    flags = tl.load(records + slot * FIELDS + FLAGS, mask=slot > 0, other=0)
    return slot, flags


@triton.jit
def _best(part_tops, part_ids, row, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(id, logit) of a row's largest, the lowest id on ties; -1 and -2 as ids: see NOT_FINITE and NOTHING_LEFT."""
    part = tl.arange(0, PARTS)
    tops = tl.load(part_tops + row * PARTS + part, mask=part < parts, other=float("-inf"))
    ids = tl.load(part_ids + row * PARTS + part, mask=part < parts, other=-2)
    top = tl.max(tops, axis=0)
    best = tl.min(tl.where((tops == top) & (ids >= 0), ids, _NO_TOKEN), axis=0)
    best = tl.where(best == _NO_TOKEN, -2, best)
    return tl.where(tl.min(tl.where(ids == -1, 0, 1), axis=0) == 0, -1, best), top


@triton.jit
def _scale(record, flags, FOR_FILTERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What gaps are multiplied by, before the filters or for the draw."""
    scale = _number(record, SCALE).to(tl.float32)
    if FOR_FILTERS:
        scale = tl.where((flags & FILTERS_FIRST) != 0, 1.0, scale)
    return scale


@triton.jit
def adjust(  # type: ignore[no-untyped-def]
    logits, stride, slots, records, never, adjusted, part_tops, part_ids, part_moments, vocab, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Logits with bias, penalties and bans, kept for rows that are sampled; the best of each part, and its moments."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot, flags = _slot_and_flags(slots, records, row)
    if (flags & ACTIVE) != 0:
        record = records + slot * FIELDS
        ids = part * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
        bias = tl.load(record + BIAS)
        marks = tl.load(record + MARKS)
        is_banned = tl.load(never + ids, mask=inside, other=0) != 0
        if (bias != 0) | (marks != 0):
            wide = x.to(tl.float64)
            if bias != 0:
                wide += tl.load(bias.to(tl.pointer_type(tl.float64)) + ids, mask=inside, other=0.0)
            if marks != 0:
                mark = tl.load(marks.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=0)
                repetition = _number(record, REPETITION)
                count = mark >> 2
                weighed = tl.where(wide > 0, wide / repetition, wide * repetition)
                wide = tl.where((mark >> 1) != 0, weighed, wide)
                taken = _number(record, PRESENCE) + _number(record, FREQUENCY) * count.to(tl.float64)
                wide = tl.where(count > 0, wide - taken, wide)
                is_banned |= (mark & 1) != 0
            x = wide.to(tl.float32)
        x = tl.where(is_banned, float("-inf"), x)
        is_bad = inside & ~(x < float("inf"))
        clean = tl.where(is_bad, float("-inf"), x)
        top = tl.max(clean, axis=0)
        best = tl.min(tl.where((clean == top) & inside, ids, _NO_TOKEN), axis=0)
        best = tl.where(top == float("-inf"), -2, best)
        best = tl.where(tl.max(is_bad.to(tl.int32), axis=0) != 0, -1, best)
        tl.store(part_tops + row * PARTS + part, top)
        tl.store(part_ids + row * PARTS + part, best)
        if (flags & SAMPLED) != 0:
            tl.store(adjusted + row * vocab + ids, x, mask=inside)
            some = tl.where(clean > float("-inf"), clean, 0.0)
            moments = part_moments + (row * PARTS + part) * 3
            tl.store(moments, tl.sum((clean > float("-inf")).to(tl.float32), axis=0))
            tl.store(moments + 1, tl.sum(some, axis=0))
            tl.store(moments + 2, tl.sum(some * some, axis=0))


@triton.jit
def _wants_levels(record, flags):  # type: ignore[no-untyped-def]
    """(whether top_k is on, whether top_p is) of a row."""
    is_sampled = (flags & SAMPLED) != 0
    return is_sampled & (tl.load(record + TOP_K) > 0), is_sampled & (_number(record, TOP_P) < 1.0)


@triton.jit
def _moment(part_moments, row, parts, WHICH: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(part_moments + (row * PARTS + part) * 3 + WHICH, mask=part < parts, other=0.0), axis=0)


@triton.jit
def _spread(part_moments, row, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(mean, standard deviation) of a row's logits that are not banned, roughly."""
    count = _moment(part_moments, row, parts, 0, PARTS)
    mean = _moment(part_moments, row, parts, 1, PARTS) / count
    square = _moment(part_moments, row, parts, 2, PARTS) / count
    return mean, tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@triton.jit
def measure_levels(  # type: ignore[no-untyped-def]
    slots, records, adjusted, part_tops, part_ids, part_moments, levels, part_counts, part_masses, vocab,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """How many logits of each part, and how much mass, reach each of LEVELS thresholds; the same thresholds in all parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    slot, flags = _slot_and_flags(slots, records, row)
    if (flags & SAMPLED) != 0:
        record = records + slot * FIELDS
        wants_count, wants_mass = _wants_levels(record, flags)
        best, top = _best(part_tops, part_ids, row, parts, PARTS)
        if (wants_count | wants_mass) & (best >= 0):
            scale = _scale(record, flags, True)
            mean, deviation = _spread(part_moments, row, parts, PARTS)
            ids = part * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(adjusted + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            masses = _mass(x, top, scale)
            out = (row * PARTS + part) * LEVELS
            for level in range(LEVELS):
                # All that is not banned; nine along a bell curve like the row's; six at doubling gaps below the top.
                step = tl.full([], level, dtype=tl.float32)
                bell = mean + deviation * (0.4 * step - 1.8)
                below = top - 0.5 * tl.exp2(step - 10.0) / tl.maximum(scale, 1e-30)
                value = tl.where(level < 10, bell, below)
                is_number = (value > -_LARGEST) & (value < _LARGEST) & (level > 0)
                value = tl.where(is_number, value, -_LARGEST)
                reached = x >= value
                if part == 0:
                    tl.store(levels + row * LEVELS + level, value)
                if wants_count:
                    tl.store(part_counts + out + level, tl.sum(reached.to(tl.int32), axis=0).to(tl.int64))
                if wants_mass:
                    tl.store(part_masses + out + level, tl.sum(tl.where(reached, masses, 0), axis=0))


@triton.jit
def _level_sums(part_sums, row, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 [LEVELS]: a measure of the whole row at each level."""
    part, level = tl.arange(0, PARTS)[:, None], tl.arange(0, LEVELS)[None, :]
    return tl.sum(tl.load(part_sums + (row * PARTS + part) * LEVELS + level, mask=part < parts, other=0), axis=0)


@triton.jit
def _wanted(record, totals, row, BY_MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What must reach a threshold: top_k logits, or a share top_p of the mass."""
    if BY_MASS:
        share = _number(record, TOP_P) * tl.load(totals + row).to(tl.float64)
        wanted = share.to(tl.int64)
        wanted += (wanted.to(tl.float64) < share).to(tl.int64)
        wanted = tl.maximum(wanted, 1)
    else:
        wanted = tl.load(record + TOP_K)
    return wanted


@triton.jit
def _bracket(levels, sums, wanted, row, top):  # type: ignore[no-untyped-def]
    """(lowest, highest) key that the threshold may be, by what is known at the levels."""
    keys = _key(tl.load(levels + row * LEVELS + tl.arange(0, LEVELS))).to(tl.int64)
    low = tl.max(tl.where(sums >= wanted, keys, _LOWEST_KEY), axis=0)
    high = tl.min(tl.where(sums < wanted, keys - 1, _LARGEST_KEY), axis=0)
    return low, tl.minimum(high, _key(top).to(tl.int64))


@triton.jit
def collect(  # type: ignore[no-untyped-def]
    slots, records, adjusted, part_tops, part_ids, levels, part_sums, totals, lists, list_sizes, vocab,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Keys of a row that the threshold may be, in any order: of top_k, or BY_MASS of top_p."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(1)
    slot, flags = _slot_and_flags(slots, records, row)
    if (flags & SAMPLED) != 0:
        record = records + slot * FIELDS
        wants_count, wants_mass = _wants_levels(record, flags)
        best, top = _best(part_tops, part_ids, row, parts, PARTS)
        if (wants_mass if BY_MASS else wants_count) & (best >= 0):
            sums = _level_sums(part_sums, row, parts, PARTS)
            wanted = _wanted(record, totals, row, BY_MASS)
            low, high = _bracket(levels, sums, wanted, row, top)
            ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(adjusted + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            keys = _key(x)
            is_in = (keys >= low) & (keys <= high)
            taken = is_in.to(tl.int32)
            place = tl.cumsum(taken, axis=0) - taken
            first = tl.atomic_add(list_sizes + row * 2 + (1 if BY_MASS else 0), tl.sum(taken, axis=0))
            tl.store(lists + row * vocab + first + place, keys, mask=is_in)


@triton.jit
def _chunk(keys_at, start, size, top, scale, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(keys, what each weighs) of CHUNK entries of a list: one, or BY_MASS its mass; nothing beyond the end."""
    place = start + tl.arange(0, CHUNK)
    keys = tl.load(keys_at + place, mask=place < size, other=_LOWEST_KEY)
    weights = _mass(_from_key(keys), top, scale) if BY_MASS else tl.full([CHUNK], 1, dtype=tl.int64)
    return keys, tl.where(place < size, weights, 0)


@triton.jit
def _reaching(  # type: ignore[no-untyped-def]
    keys_at, start, size, threshold, top, scale, BY_MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """How many keys of a list, from ``start`` on, reach a threshold, or BY_MASS how much mass."""
    total = tl.full([], 0, dtype=tl.int64)
    at = tl.full([], 0, dtype=tl.int32) + start
    while at < size:
        keys, weights = _chunk(keys_at, at, size, top, scale, BY_MASS, CHUNK)
        total += tl.sum(tl.where(keys >= threshold, weights, 0), axis=0)
        at += CHUNK
    return total


@triton.jit
def settle(  # type: ignore[no-untyped-def]
    slots, records, part_tops, part_ids, levels, part_counts, part_masses, floors, totals, lists, list_sizes, vocab,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The threshold of top_k, or BY_MASS of top_p, by bisection over what was collected; one program a row.

    Writes the key that tokens must reach to ``floors``. For top_k also to ``totals`` the mass that top_p is a share of.
    """
    row = tl.program_id(0).to(tl.int64)
    slot, flags = _slot_and_flags(slots, records, row)
    if (flags & SAMPLED) != 0:
        record = records + slot * FIELDS
        parts = tl.cdiv(vocab, BLOCK)
        wants_count, wants_mass = _wants_levels(record, flags)
        best, top = _best(part_tops, part_ids, row, parts, PARTS)
        scale = _scale(record, flags, True)
        keys_at = lists + row * vocab
        size = tl.load(list_sizes + row * 2 + (1 if BY_MASS else 0))
        wanted = _wanted(record, totals, row, BY_MASS)
        floor = tl.full([], _LOWEST_KEY, dtype=tl.int64)
        if BY_MASS:
            floor = tl.load(floors + row).to(tl.int64)
        if (wants_mass if BY_MASS else wants_count) & (best >= 0):
            sums = _level_sums(part_masses if BY_MASS else part_counts, row, parts, PARTS)
            low, high = _bracket(levels, sums, wanted, row, top)
            above = tl.max(tl.where(sums < wanted, sums, 0), axis=0)
            keys, weights = _chunk(keys_at, 0, size, top, scale, BY_MASS, CHUNK)  # all of a list, nearly always
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                reached = above + tl.sum(tl.where(keys >= middle, weights, 0), axis=0)
                if size > CHUNK:
                    reached += _reaching(keys_at, CHUNK, size, middle, top, scale, BY_MASS, CHUNK)
                if reached >= wanted:
                    low = middle
                else:
                    high = middle - 1
            floor = tl.maximum(floor, low)
        tl.debug_barrier()  # every thread has read the floor of top_k before it is written over
        tl.store(floors + row, floor.to(tl.int32))
        if not BY_MASS:  # noqa: SIM102 (the first is known when compiling)
            if wants_mass & (best >= 0):
                masses = _level_sums(part_masses, row, parts, PARTS)
                total = tl.max(masses, axis=0)
                if wants_count & ((flags & FILTERS_FIRST) == 0):
                    counts = _level_sums(part_counts, row, parts, PARTS)
                    total = tl.max(tl.where(counts < wanted, masses, 0), axis=0)
                    total += _reaching(keys_at, 0, size, floor, top, scale, True, CHUNK)
                tl.store(totals + row, total)


@triton.jit
def _kept_masses(record, flags, adjusted, floors, row, ids, top, vocab):  # type: ignore[no-untyped-def]
    """int64 mass of each of these ids that the draw may give, 0 for the others."""
    x = tl.load(adjusted + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    masses = _mass(x, top, _scale(record, flags, False))
    masses = tl.where(_key(x) >= tl.load(floors + row), masses, 0)
    if (flags & HAS_MIN_P) != 0:
        gaps = x.to(tl.float64) - top.to(tl.float64)
        masses = tl.where(gaps >= _number(record, REACH), masses, 0)
    return masses


@triton.jit
def weigh(  # type: ignore[no-untyped-def]
    slots, records, adjusted, part_tops, part_ids, floors, part_kept, list_sizes, vocab, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Mass of each part that the draw may give; empties the row's lists for the next draw."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot, flags = _slot_and_flags(slots, records, row)
    if (flags & SAMPLED) != 0:
        best, top = _best(part_tops, part_ids, row, tl.num_programs(1), PARTS)
        if best >= 0:
            ids = part * BLOCK + tl.arange(0, BLOCK)
            kept = _kept_masses(records + slot * FIELDS, flags, adjusted, floors, row, ids, top, vocab)
            tl.store(part_kept + row * PARTS + part, tl.sum(kept, axis=0))
        if part == 0:
            tl.store(list_sizes + row * 2 + tl.arange(0, 2), tl.zeros([2], dtype=tl.int32))


@triton.jit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """A float64 in [0, 1) with 53 random bits of Philox4x32-10; seed and position int64."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low ^ low
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (first >> 5).to(tl.int64) * 67108864 + (second >> 6).to(tl.int64)
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def pick(  # type: ignore[no-untyped-def]
    slots, records, adjusted, part_tops, part_ids, floors, part_kept, tokens, vocab, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The token of each row into ``tokens`` [slot]; it is counted, and the row's position moves on. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    slot, flags = _slot_and_flags(slots, records, row)
    if (flags & ACTIVE) != 0:
        record = records + slot * FIELDS
        token, top = _best(part_tops, part_ids, row, tl.cdiv(vocab, BLOCK), PARTS)
        if ((flags & SAMPLED) != 0) & (token >= 0):
            part = tl.arange(0, PARTS)
            kept = tl.load(part_kept + row * PARTS + part, mask=part < tl.cdiv(vocab, BLOCK), other=0)
            total = tl.sum(kept, axis=0)
            number = uniform(tl.load(record + SEED), tl.load(record + POSITION))
            target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
            reached = tl.cumsum(kept, axis=0)
            chosen = tl.min(tl.where(reached > target, part, PARTS), axis=0)
            target -= tl.sum(tl.where(part < chosen, kept, 0), axis=0)
            ids = chosen * BLOCK + tl.arange(0, BLOCK)
            masses = _kept_masses(record, flags, adjusted, floors, row, ids, top, vocab)
            reaches = (tl.cumsum(masses, axis=0) > target) & (masses > 0)
            token = tl.min(tl.where(reaches, ids, _NO_TOKEN), axis=0)
            # masses that were not weighed for this draw may reach nothing: the token is an index, here and of embeddings
            token = tl.where(token == _NO_TOKEN, -2, token)
        tl.store(tokens + slot, token.to(tl.int64))
        if token >= 0:
            # Every thread has read the position before the one that moves it on goes past the barrier.
            tl.debug_barrier()
            tl.atomic_add(record + POSITION, 1)
            marks = tl.load(record + MARKS)
            if marks != 0:
                tl.atomic_add(marks.to(tl.pointer_type(tl.int32)) + token, 4)
