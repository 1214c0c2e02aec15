"""Two forms of the WKV-7 prompt path side by side: the serial scan of ops/wkv7, and blocks of tokens in three launches.

    python lab/wkv7_blocks.py                # on a CUDA device: errors, cuts, times, and all of it as a line of JSON
    python lab/wkv7_blocks.py --interpret    # anywhere: errors and cuts of a small case, in Triton's interpreter

Block form, for the L rows of a block that begins at an absolute multiple of L (maths: arXiv 2412.06464 for the scalar
decay; here per channel). With G the sum of log decays since the border, S the state [K, V] at the border:

    A~ = a e^(G of the row before)   R~ = r e^G   B^ = b e^-G   K^ = k e^-G
    Aab = A~ B^T (strictly lower)   Aak = A~ K^T (strictly lower)   Arb = R~ B^T (lower)   Ark = R~ K^T (lower)
    W = (I - Aab)^-1 A~   Z = (I - Aab)^-1 Aak v   U = W S + Z
    S' = e^(G of the block) S + (e^(G of the block) B^)^T U + (e^(G of the block) K^)^T v
    y = (R~ + Arb W) S + (Arb Z + Ark v)

1. everything that does not need S, all blocks at once; 2. the two products of S, block after block; 3. y, its group norm,
bonus and gate, all blocks at once. A row uses earlier rows of its block only, so an open block is computed again from
its raw rows when more arrive, with equal bits. The inverse is built from halves (1, 2, 4 … rows), not from powers of Aab:
those grow like binomials when a token repeats, and cancel. Layers after the first only; head size 64.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
INTERPRET = "--interpret" in sys.argv
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

if INTERPRET:
    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope) -> None:  # type: ignore[no-untyped-def]
        """NumPy no longer takes an array of one element for a whole number, which the interpreter still asks of it."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index

DEVICE = "cpu" if INTERPRET else "cuda"
EPS = 64e-5
Part = Callable[[], object]


@triton.jit
def product(a, b, HALF: tl.constexpr):
    """a b in float32, from float16 operands or from three tf32 products of what tf32 holds of each and what it leaves.

    As ``tf32x3``, but cut off instead of rounded, and without care for infinities: a quarter of its instructions.
    """
    if HALF:
        made = tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        a_high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_high = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
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


@dataclass(frozen=True)
class Inputs:
    """What a layer's products give for packed rows of sequences, as Wkv7.prompt takes it: float16, a later layer."""

    projected: torch.Tensor  # [N, 3 C]: r, k, v
    low: torch.Tensor  # [N, 4 C]: decay, rate, gate, value residual
    v_first: torch.Tensor  # [N, C]
    vectors: torch.Tensor  # [8, C] float32

    def rows(self, at: torch.Tensor) -> Inputs:
        """Some rows of it."""
        return Inputs(self.projected[at], self.low[at], self.v_first[at], self.vectors)


def make(batch: int, rows: int, heads: int, case: str = "random") -> Inputs:
    """``repeated``: each sequence one token over and over, slow decay; ``fast``: the fastest decay, large keys."""
    width, many = heads * 64, batch * rows
    vectors, projected = torch.randn(8, width, device=DEVICE), torch.randn(many, 3 * width, device=DEVICE).half()
    low, v_first = (torch.randn(many, n * width, device=DEVICE).half() for n in (4, 1))
    vectors[0].uniform_(-7, 3)
    if case == "repeated":
        vectors[0], vectors[1] = -7, 5
        first = torch.arange(many, device=DEVICE) // rows * rows
        projected, low = projected[first], low[first]
    if case == "fast":
        vectors[0], vectors[1] = 12, 5
        projected[:, width : 2 * width] *= 2
    return Inputs(projected, low, v_first, vectors)


class Blocks:
    """The block form: blocks of ``length`` rows, float16 operands or tf32x3; ``warps`` of a program of the scan."""

    def __init__(self, length: int, half: bool, warps: int) -> None:
        self.length, self.half, self.warps = length, half, warps
        self.name = f"blocks of {length}, {'fp16' if half else 'tf32x3'}"

    def parts(self, x: Inputs, state: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, longest: int,
              out: torch.Tensor, y_kept: torch.Tensor | None = None) -> dict[str, Part]:  # fmt: skip
        """Launches. state [S, H, K, V] is that of the border on which the first row of each sequence stands."""
        L, half, heads, batch = self.length, self.half, state.shape[1], slots.shape[0]
        nb = -(-longest // L)
        grid, wide, levels, keep = (nb, heads, batch), L // 4, L.bit_length() - 1, y_kept is not None

        def room(values: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(batch * heads * nb * values, dtype=dtype, device=DEVICE)

        w, b, k, v, r = (room(L * 64, torch.float16 if half else torch.float32) for _ in range(5))
        z, y, decay, bonus, borders = (room(values) for values in (L * 64, L * 64, 64, L, 64 * 64))
        made, size = (w, b, k, v, z, r, y, decay, bonus), (heads, nb)

        def scan(warps: int) -> Part:
            given = (w, b, k, v, z, decay, state, starts, slots, borders, *size, L, 16, 3, half)
            return lambda: scan_blocks[(4, heads, batch)](*given, num_warps=warps)

        first = (x.projected, x.low, x.v_first, x.vectors, starts, *made, *size, L, levels, half)
        last = (x.low, x.vectors, v, r, y, bonus, borders, starts, out, y_kept if keep else out, *size, EPS, L, keep, half)
        return {
            "prepare": lambda: prepare_blocks[grid](*first, num_warps=wide),
            "scan": scan(self.warps),
            "finish": lambda: finish_blocks[grid](*last, num_warps=wide),
            **{f"scan in {warps} warps": scan(warps) for warps in (1, 2, 4) if warps != self.warps},
        }

    @staticmethod
    def path(parts: dict[str, Part]) -> list[Part]:
        """What makes the whole prompt path."""
        return [parts["prepare"], parts["scan"], parts["finish"]]


class Serial:
    """The serial form, one launch before and one after its scan, as the engine runs it."""

    name = "serial"

    def __init__(self) -> None:
        from kittiwake.ops.wkv7.cuda import kernels

        self.op = kernels(64, torch.float16)

    def parts(self, x: Inputs, state: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, longest: int,
              out: torch.Tensor, y_kept: torch.Tensor | None = None) -> dict[str, Part]:  # fmt: skip
        """Its whole path, and its scan alone on what the path made."""
        rows, heads = out.shape[0], state.shape[1]
        made = torch.empty(self.op.made_values(rows, heads), device=DEVICE)
        y = torch.empty_like(out, dtype=torch.float32) if y_kept is None else y_kept
        given = (x.projected, x.low, x.v_first, x.vectors, state, starts, slots, made, y, out)
        tile = self.op.tiling(heads * slots.shape[0])
        threads, grid = 8 * tile.rows_per_block // tile.rows_per_thread, (64 // tile.rows_per_block, heads, len(slots))
        scan = self.op._scans[tile]
        return {
            "whole": lambda: self.op.prompt(*given, first_layer=False, eps=EPS, overlap=True),
            "scan": lambda: scan(grid, threads, (made, y, state, starts, slots, rows), overlap=True),
        }

    @staticmethod
    def path(parts: dict[str, Part]) -> list[Part]:
        """What makes the whole prompt path."""
        return [parts["whole"]]


Form = Blocks | Serial


def oracle(x: Inputs, state: torch.Tensor, batch: int, border: int) -> list[torch.Tensor]:
    """Float64: the path's outputs and the scan's, both [N, C], and the state after ``border`` rows."""
    heads, width = state.shape[1], x.vectors.shape[1]
    r, k, v, raw, rate, gate, residual = (
        t.reshape(batch, -1, heads, 64) for t in torch.cat((x.projected, x.low), 1).double().split(width, 1)
    )
    w0, a0, v0, kk, ka, rk, weight, bias = x.vectors.double().view(8, heads, 64)
    decay, rate = torch.exp(-0.6065306597126334 * torch.sigmoid(raw + w0)), torch.sigmoid(rate + a0)
    v = v + (x.v_first.view_as(v) - v) * torch.sigmoid(residual + v0)
    unit = torch.nn.functional.normalize(k * kk, dim=-1, eps=1e-12)
    k = k * (1 + (rate - 1) * ka)
    s, ys, kept = state.double(), [], state.double()
    for t in range(r.shape[1]):
        removed = torch.einsum("bhk,bhkv->bhv", -unit[:, t], s)
        s = s * decay[:, t, :, :, None] + (unit * rate)[:, t, :, :, None] * removed[:, :, None]
        s = s + k[:, t, :, :, None] * v[:, t, :, None]
        ys.append(torch.einsum("bhk,bhkv->bhv", r[:, t], s))
        kept = s if t + 1 == border else kept
    y = torch.stack(ys, 1)
    normed = torch.nn.functional.layer_norm(y, (64,), eps=EPS) * weight + bias
    out = (normed + (r * k * rk).sum(-1, keepdim=True) * v) * gate
    return [out.view(-1, width), y.view(-1, width), kept]


def run(form: Form, x: Inputs, state: torch.Tensor, lengths: list[int], slots: list[int]) -> tuple[torch.Tensor, ...]:
    """Outputs of the path and of the scan; state moves on to the last border, or to the end where the form has none."""
    out, y = torch.empty_like(x.v_first), torch.empty_like(x.v_first, dtype=torch.float32)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    where = (torch.tensor(given, dtype=torch.int32, device=DEVICE) for given in (starts, slots))
    for part in form.path(form.parts(x, state, *where, max(lengths), out, y)):
        part()
    return out, y


def errors(form: Form, x: Inputs, state: torch.Tensor, rows: int, exact: list[torch.Tensor]) -> dict[str, float]:
    """Relative RMS errors of the outputs, and of the state after rows // 32 * 32."""
    batch, border, end = len(state), rows // 32 * 32, state.clone()
    outputs = run(form, x, state.clone(), [rows] * batch, list(range(batch)))
    at = torch.cat([torch.arange(border, device=DEVICE) + i * rows for i in range(batch)])
    run(form, x.rows(at), end, [border] * batch, list(range(batch)))
    found = zip(("out", "y", "state"), (*outputs, end), exact, strict=True)
    return {name: float((made.double() - true).norm() / true.norm()) for name, made, true in found}


def cuts_agree(form: Blocks, x: Inputs, state: torch.Tensor, rows: int, seed: int) -> bool:
    """Each sequence in pieces of its own random lengths, its open block again from raw rows: the bits of one piece?"""
    batch, L, pick = len(state), form.length, random.Random(seed)
    whole_state, table, position = state.clone(), state.clone(), [0] * batch
    whole = run(form, x, whole_state, [rows] * batch, list(range(batch)))
    cut = [torch.zeros_like(t) for t in whole]
    while slots := [b for b in range(batch) if position[b] < rows]:
        begin = {b: position[b] // L * L for b in slots}
        end = {b: min(rows, position[b] + pick.choice((1, 2, 7, 15, 16, 17, 40, 200))) for b in slots}
        at = torch.cat([torch.arange(begin[b], end[b], device=DEVICE) + b * rows for b in slots])
        new = torch.cat([torch.arange(begin[b], end[b], device=DEVICE) >= position[b] for b in slots])
        for to, made in zip(cut, run(form, x.rows(at), table, [end[b] - begin[b] for b in slots], slots), strict=True):
            to[at[new]] = made[new]
        position = [end.get(b, rows) for b in range(batch)]
    return all(map(torch.equal, (*cut, table), (*whole, whole_state)))


def captured(parts: list[Part], repeats: int) -> torch.cuda.CUDAGraph:
    """The parts in order, so many times over, after a warm-up."""
    for part in parts:
        part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for part in parts * repeats:
            part()
    return graph


def times(forms: list[Form], heads: int, rows: int, batch: int) -> dict[str, dict[str, float]]:
    """Median µs of each form's path and of its launches, A B C C B A in each of five rounds."""
    x, repeats = make(batch, rows, heads), 8 if batch == 1 else 1
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * rows
    graphs, kept = {}, []  # what graphs write must outlive them
    for form in forms:
        state, out = torch.zeros(batch, heads, 64, 64, device=DEVICE), torch.empty_like(x.v_first)
        parts = form.parts(x, state, starts, torch.arange(batch, dtype=torch.int32, device=DEVICE), rows, out)
        kept.append(parts)
        graphs[form.name, "path"] = captured(form.path(parts), repeats)
        graphs |= {(form.name, name): captured([part], repeats) for name, part in parts.items() if name != "whole"}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for key in [*graphs, *reversed(graphs)] * 5:
        start.record()
        graphs[key].replay()
        end.record()
        end.synchronize()
        samples[key].append(start.elapsed_time(end) * 1e3 / repeats)
    median = {key: round(statistics.median(taken), 1) for key, taken in samples.items()}
    return {form.name: {part: us for (name, part), us in median.items() if name == form.name} for form in forms}


def main() -> None:
    """Errors and cuts, then times; a table and a line of JSON."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    batch, rows, heads = (2, 37, 2) if INTERPRET else (2, 1000, 3)
    blocks = [Blocks(16, False, 2), Blocks(32, False, 2), Blocks(16, True, 1)]
    forms: list[Form] = [*blocks] if INTERPRET else [Serial(), *blocks]
    report: dict[str, object] = {"device": DEVICE if INTERPRET else torch.cuda.get_device_name()}
    for case in ("random", "repeated", "fast"):
        x, state = make(batch, rows, heads, case), torch.randn(batch, heads, 64, 64, device=DEVICE)
        exact = oracle(x, state, batch, rows // 32 * 32)
        for form in forms:
            found = report[f"errors, {case}, {form.name}"] = errors(form, x, state, rows, exact)
            print(f"{case:9} {form.name:20} errors: ", "  ".join(f"{name} {e:.1e}" for name, e in found.items()), flush=True)
        for form in blocks:
            found = report[f"cuts, {case}, {form.name}"] = [cuts_agree(form, x, state, rows, seed) for seed in range(2)]
            print(f"{case:9} {form.name:20} random cuts with equal bits: {found}", flush=True)
    for heads in () if INTERPRET else (12, 32, 64):
        for rows, batch in ((1024, 1), (4096, 1), (1024, 8), (4096, 8)):
            measured = report[f"us, H {heads} T {rows} B {batch}"] = times(forms, heads, rows, batch)
            for name, parts in measured.items():
                ratio = measured["serial"]["path"] / parts["path"]
                line = "  ".join(f"{part} {us:.1f}" for part, us in parts.items())
                print(f"H {heads:2} T {rows} B {batch}  {name:20} x {ratio:.2f}  µs: {line}", flush=True)
    report["seconds"] = round(time.perf_counter() - begun, 1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
