"""WKV-7 prompts in blocks of tokens on absolute positions: the three launches that wkv7_blocks.py measures.

For the L rows of a block that begins at an absolute multiple of L, with G the sum of log decays since its border, S the
state [K, V] there, and E = e^(G of the whole block):

    A~ = a e^(G of the row before)   R~ = r e^G   B^ = b e^-G   K^ = k e^-G
    Aab, Aak = A~ B^T, A~ K^T (below the diagonal)   Arb, Ark = R~ B^T, R~ K^T (and on it)
    W = (I - Aab)^-1 A~   Z = (I - Aab)^-1 Aak v   U = W S + Z
    S' = E S + (E B^)^T U + (E K^)^T v   y = (R~ + Arb W) S + (Arb Z + Ark v)

1. everything that does not need S, all blocks at once; 2. the two products of S, block after block; 3. y, its group norm,
bonus and gate, all blocks at once. A row uses earlier rows of its block only, so an open block is computed again from
its raw rows when more arrive. The inverse is joined from halves (1, 2, 4 … rows), not made of powers of Aab: where a
token repeats these grow like binomials, and cancel. Head size 64, layers after the first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, HALF: tl.constexpr):
    """a b in float32, from float16 operands or from three tf32 products, as ``tf32x3`` but without its care for infinities."""
    if HALF:
        made = tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        a_high = ((a.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        b_high = ((b.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        made = tl.dot(a - a_high, b_high, input_precision="tf32")
        made = tl.dot(a_high, b - b_high, made, input_precision="tf32")
        made = tl.dot(a_high, b_high, made, input_precision="tf32")
    return made


@triton.jit(do_not_specialize=["H", "NB"])
def prepare_blocks(
    projected, low, v_first, vectors, starts, w_out, b_out, k_out, v_out, z_out, r_out, y_out, decay_out, bonus_out,
    H, NB, L: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (block, head, sequence): all that does not need the state. L = 2 ** LEVELS."""
    i, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + n)
    count = tl.load(starts + n + 1) - first
    if i * L < count:
        C = H * 64
        row, d = tl.arange(0, L), h * 64 + tl.arange(0, 64)
        there = (i * L + row < count)[:, None] & (d >= 0)[None, :]
        at = first + i * L + row
        p, q = projected + at[:, None] * (3 * C) + d[None, :], low + at[:, None] * (4 * C) + d[None, :]
        r = tl.load(p, mask=there, other=0.0).to(tl.float32)
        k = tl.load(p + C, mask=there, other=0.0).to(tl.float32)
        v = tl.load(p + 2 * C, mask=there, other=0.0).to(tl.float32)
        earlier = tl.load(v_first + at[:, None] * C + d[None, :], mask=there, other=0.0).to(tl.float32)
        raw = tl.load(q, mask=there, other=0.0).to(tl.float32) + tl.load(vectors + d)[None, :]
        rate = tl.sigmoid(tl.load(q + C, mask=there, other=0.0).to(tl.float32) + tl.load(vectors + C + d)[None, :])
        residual = tl.load(q + 3 * C, mask=there, other=0.0).to(tl.float32) + tl.load(vectors + 2 * C + d)[None, :]
        v += (earlier - v) * tl.sigmoid(residual)
        unit = k * tl.load(vectors + 3 * C + d)[None, :]
        unit = unit / tl.maximum(tl.sqrt(tl.sum(unit * unit, 1)), 1e-12)[:, None]
        k *= 1.0 + (rate - 1.0) * tl.load(vectors + 4 * C + d)[None, :]
        bonus = tl.sum(r * k * tl.load(vectors + 5 * C + d)[None, :], 1)
        b = unit * rate
        log_w = tl.where(there, -0.6065306597126334 * tl.sigmoid(raw), 0.0)
        g = tl.cumsum(log_w, 0)
        total = tl.sum(log_w, 0)

        # Float16 holds e^-G of 16 rows (up to e^9.7) times a key only if moved down; by a constant, so that no row sees a
        # later one.
        shift: tl.constexpr = 128.0 if HALF else 1.0
        a_in, r_in = -unit * tl.exp(g - log_w), r * tl.exp(g)
        grow = tl.exp(-g) / shift
        b_back, k_back = tl.trans(b * grow), tl.trans(k * grow)
        below, upto = row[:, None] > row[None, :], row[:, None] >= row[None, :]
        ab = tl.where(below, product(a_in * shift, b_back, HALF), 0.0)
        ak = tl.where(below, product(a_in * shift, k_back, HALF), 0.0)
        rb = tl.where(upto, product(r_in * shift, b_back, HALF), 0.0)
        rk = tl.where(upto, product(r_in * shift, k_back, HALF), 0.0)

        pairs = row[:, None] // 2 == row[None, :] // 2
        inverse = tl.where(row[:, None] == row[None, :], 1.0, tl.where(pairs, ab, 0.0))
        for level in tl.static_range(1, LEVELS):  # of blocks of 2 ** level rows are known; join two
            apart = row[:, None] // (1 << level) != row[None, :] // (1 << level)
            joined = row[:, None] // (2 << level) == row[None, :] // (2 << level)
            cross = tl.where(apart & joined, ab, 0.0)
            inverse += product(product(inverse, cross, HALF), inverse, HALF)
        w = product(inverse, a_in, HALF)
        z = product(inverse, product(ak, v, HALF), HALF)

        block = (n * H + h) * NB + i
        j = tl.arange(0, 64)
        o = (block * L + row)[:, None] * 64 + j[None, :]
        rest = tl.exp(total[None, :] - g)
        OPERAND: tl.constexpr = tl.float16 if HALF else tl.float32
        tl.store(w_out + o, w.to(OPERAND))
        tl.store(b_out + o, (b * rest).to(OPERAND))
        tl.store(k_out + o, (k * rest).to(OPERAND))
        tl.store(v_out + (block * 64 + j)[:, None] * L + row[None, :], tl.trans(v).to(OPERAND))
        tl.store(r_out + o, (r_in + product(rb, w, HALF)).to(OPERAND))
        tl.store(y_out + o, product(rb, z, HALF) + product(rk, v, HALF))
        tl.store(z_out + (block * 64 + j)[:, None] * L + row[None, :], tl.trans(z))
        tl.store(decay_out + block * 64 + j, tl.exp(total))
        tl.store(bonus_out + block * L + row, bonus)


@triton.jit(do_not_specialize=["H", "NB"])
def scan_blocks(
    w_in, b_in, k_in, v_in, z_in, decay_in, state, starts, slots, borders,
    H, NB, L: tl.constexpr, VB: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (value columns, head, sequence): the state from block border to block border, two halves of its keys."""
    h, n = tl.program_id(1), tl.program_id(2)
    count = tl.load(starts + n + 1) - tl.load(starts + n)
    row, key, value = tl.arange(0, L), tl.arange(0, 32), tl.program_id(0) * VB + tl.arange(0, VB)
    mine = state + ((tl.load(slots + n) * H + h) * 64 + key[None, :]) * 64 + value[:, None]
    s0, s1 = tl.load(mine), tl.load(mine + 32 * 64)  # [VB, 32]: transposed, as it is the left factor of both products
    head = (n * H + h) * NB
    full = count // L
    for i in tl.range(0, full, num_stages=STAGES):
        block = head + i
        border = borders + (block * 64 + value[:, None]) * 64 + key[None, :]
        tl.store(border, s0)
        tl.store(border + 32, s1)
        o = (block * L + row)[:, None] * 64 + key[None, :]
        across = (block * 64 + value)[:, None] * L + row[None, :]
        v, z = tl.load(v_in + across), tl.load(z_in + across)
        kept0, kept1 = tl.load(decay_in + block * 64 + key), tl.load(decay_in + block * 64 + 32 + key)
        added0, added1 = product(v, tl.load(k_in + o), HALF), product(v, tl.load(k_in + o + 32), HALF)
        u0 = product(s0, tl.trans(tl.load(w_in + o)), HALF)
        u1 = product(s1, tl.trans(tl.load(w_in + o + 32)), HALF)
        u = u0 + u1 + z
        s0 = s0 * kept0[None, :] + added0 + product(u, tl.load(b_in + o), HALF)
        s1 = s1 * kept1[None, :] + added1 + product(u, tl.load(b_in + o + 32), HALF)
    if full * L < count:
        border = borders + ((head + full) * 64 + value[:, None]) * 64 + key[None, :]
        tl.store(border, s0)
        tl.store(border + 32, s1)
    tl.store(mine, s0)
    tl.store(mine + 32 * 64, s1)


@triton.jit(do_not_specialize=["H", "NB"])
def finish_blocks(
    low, vectors, v_in, r_in, y_in, bonus_in, borders, starts, out, y_kept,
    H, NB, eps, L: tl.constexpr, KEEP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (block, head, sequence): the outputs of its rows; KEEP also stores them before the norm."""
    i, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + n)
    count = tl.load(starts + n + 1) - first
    if i * L < count:
        C, block = H * 64, (n * H + h) * NB + i
        row, j, d = tl.arange(0, L), tl.arange(0, 64), h * 64 + tl.arange(0, 64)
        there = (i * L + row < count)[:, None] & (j >= 0)[None, :]
        at = first + i * L + row
        o = (block * L + row)[:, None] * 64 + j[None, :]
        s = tl.load(borders + (block * 64 + j)[:, None] * 64 + j[None, :])
        y = tl.load(y_in + o) + product(tl.load(r_in + o), tl.trans(s), HALF)
        if KEEP:
            tl.store(y_kept + at[:, None] * C + d[None, :], y, mask=there)
        y -= (tl.sum(y, 1) / 64)[:, None]
        normed = y * (1.0 / tl.sqrt(tl.sum(y * y, 1) / 64 + eps))[:, None]
        normed = normed * tl.load(vectors + 6 * C + d)[None, :] + tl.load(vectors + 7 * C + d)[None, :]
        bonus = tl.load(bonus_in + block * L + row)
        v = tl.trans(tl.load(v_in + (block * 64 + j)[:, None] * L + row[None, :])).to(tl.float32)
        gate = tl.load(low + at[:, None] * (4 * C) + 2 * C + d[None, :], mask=there, other=0.0).to(tl.float32)
        made = tl.minimum(tl.maximum((normed + bonus[:, None] * v) * gate, -65504.0), 65504.0)
        tl.store(out + at[:, None] * C + d[None, :], made.to(out.dtype.element_ty), mask=there)
