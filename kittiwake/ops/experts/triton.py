"""Experts on CUDA: router, pairs brought together by expert on the device, grouped products that walk K in order, the sum.

A *pair* is a row and one of its experts; the pair of row i and rank r is number i k + r. Pairs are put in *places*: sorted
by expert, and by number within one. A *tile* is up to BM neighbouring places of one expert. Which place and tile a pair has
changes no bit: a row of a product depends on no other, and the sum over K runs in order in float32, ``tl.dot`` by ``tl.dot``
(``ops/matmul/triton.py``; ``layers/cuda_experts.py`` proves it on every card).

Nothing here is read by the host, and every grid follows from shapes alone: there are as many tiles as the worst case has, and
those without a pair end at once.

Rounding: logits, shares, silu and all sums are float32. What lies between two launches has the element type: the hidden row
silu(gate) * up once it is whole, and a pair's output, as the output of any other product; the sum over ranks rounds once more
when it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.matmul.triton import Config
from kittiwake.ops.triton_launch import launch_options, piece_options, row_options, warps_for
from kittiwake.ops.triton_math import sigmoid

SMALLEST_SUM = 2.0**-14
"""The chosen probabilities are divided by no less than this."""
BLOCK = 512
"""Channels of a program in row kernels that take no sum over them."""
MOST_PAIRS_AT_ONCE = 4096
"""Pairs that a program of the grouping looks at in one step;"""
_BLOCKS = (128, 1024)
"""less where there are no more: few sizes, for each is compiled."""


@dataclass(frozen=True)
class Tiling:
    """How both grouped products are launched; none of it changes a bit. Both have the same ``bm``."""

    gate_up: Config
    down: Config

    @property
    def bm(self) -> int:
        """Pairs of a tile."""
        return self.gate_up.bm


@dataclass(frozen=True)
class Grouped:
    """Where the pairs of some rows stand."""

    chosen: torch.Tensor
    """int32 [N, k], the experts of every row."""
    pairs: torch.Tensor | None
    """int32 [≥ N k], the pair at each place; None: pairs stand in their own order, a tile for each."""
    tiles: torch.Tensor | None
    """int32 [≥ tiles, 3]: expert, first place, pairs; None with ``pairs``."""
    count: int
    """Tiles to launch."""


def most_tiles(pairs: int, experts: int, bm: int) -> int:
    """Lines of the table of tiles: no distribution of the pairs over the experts needs more."""
    return min(pairs, pairs // bm + experts)


@triton.jit
def _silu(x):
    return tl.div_rn(x, 1.0 + libdevice.exp(-x))


@triton.jit
def route_kernel(
    logits,  # [N, logits_stride]
    chosen,  # int32 [N, TOP_K]
    shares,  # float32 [N, TOP_K]
    E,
    logits_stride,
    SMALLEST: tl.constexpr,
    RENORMALISES: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,  # a power of two, at least TOP_K
    BLOCK: tl.constexpr,  # a power of two, at least E
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    ranks = tl.arange(0, RANKS)
    inside = experts < E
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + n * logits_stride + experts, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.where(inside, libdevice.exp(x - tl.max(x, 0)), 0.0)
    total = tl.sum(p, 0)
    p = tl.div_rn(p, total)
    # probabilities order like their bits; behind those, the lower index is the larger number; NaN is as good as nothing
    bits = tl.where(p == p, p, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(inside, (bits << 32) + (BLOCK - 1 - experts), -1)
    best_experts = tl.zeros((RANKS,), tl.int32)
    best_shares = tl.zeros((RANKS,), tl.float32)
    summed = 0.0
    for rank in range(TOP_K):
        best = tl.max(keys, 0)
        expert = BLOCK - 1 - (best & (BLOCK - 1)).to(tl.int32)
        share = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        summed += share
        best_experts = tl.where(ranks == rank, expert, best_experts)
        best_shares = tl.where(ranks == rank, share, best_shares)
        keys = tl.where(experts == expert, -1, keys)
    if RENORMALISES:
        best_shares = tl.div_rn(best_shares, tl.maximum(summed, SMALLEST))
    best_shares = tl.where(total == total, best_shares, total)  # a row that is not a number gives none
    at = n * TOP_K + ranks
    tl.store(chosen + at, best_experts, mask=ranks < TOP_K)
    tl.store(shares + at, best_shares, mask=ranks < TOP_K)


@triton.jit
def _expert_of(chosen, owners, pairs, P, E, TOP_K: tl.constexpr, HAS_OWNERS: tl.constexpr):
    """The expert of each pair; E for pairs of spare rows and for those that there are not."""
    expert = tl.load(chosen + pairs, mask=pairs < P, other=0)
    is_real = pairs < P
    if HAS_OWNERS:
        is_real = is_real & (tl.load(owners + pairs // TOP_K, mask=is_real, other=-1) >= 0)
    return tl.where(is_real, expert, E)


@triton.jit(do_not_specialize=["P", "T"])
def group_kernel(
    chosen,  # int32 [N, TOP_K]
    owners,  # int32 [N], -1 for a spare row
    pairs,  # int32 [P]
    tiles,  # int32 [T, 3]
    P,
    E,
    T,
    BM: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    BY_PLACE: tl.constexpr,  # an expert's first tile has the number of its first place
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Every expert finds its own place among all pairs, so that one launch is enough."""
    e = tl.program_id(0)
    some = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    lower = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, P, BLOCK):
        expert = _expert_of(chosen, owners, first + some, P, E, TOP_K, HAS_OWNERS)
        lower += (expert < e).to(tl.int32)
        equal += (expert == e).to(tl.int32)
    begin = tl.sum(lower, 0)
    count = tl.sum(equal, 0)
    # numbers that leave every expert room for its tiles, whatever the others have; the room that is left is empty tiles
    if BY_PLACE:
        tile = begin
        end = begin + count
    else:
        tile = begin // BM + e
        end = (begin + count) // BM + e + 1
    end = tl.where(e == E - 1, T, end)
    for line in range(tile, end, LINES):
        lines = line + tl.arange(0, LINES)
        before = (lines - tile) * BM
        at = tiles + lines * 3
        tl.store(at, e, mask=lines < end)
        tl.store(at + 1, begin + before, mask=lines < end)
        tl.store(at + 2, tl.minimum(tl.maximum(count - before, 0), BM), mask=lines < end)
    if count > 0:
        free = begin
        for first in range(0, P, BLOCK):
            here = first + some
            is_mine = (_expert_of(chosen, owners, here, P, E, TOP_K, HAS_OWNERS) == e).to(tl.int32)
            tl.store(pairs + free + tl.cumsum(is_mine, 0) - 1, here, mask=is_mine > 0)
            free += tl.sum(is_mine, 0)


@triton.jit
def _work(chosen, tiles, outputs, BN: tl.constexpr, DIRECT: tl.constexpr, OVERLAP: tl.constexpr):
    """What a program of a product works on: expert, first place and number of pairs of its tile, and its BN columns."""
    parts = tl.cdiv(outputs, BN)
    tile = tl.program_id(0) // parts
    columns = tl.program_id(0) % parts * BN + tl.arange(0, BN)
    if OVERLAP:
        gdc_wait()
    if DIRECT:
        expert = tl.load(chosen + tile)
        first = tile
        count = 1
    else:
        expert = tl.load(tiles + tile * 3)
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
    return expert.to(tl.int64), first, count, columns


@triton.jit
def _pairs_at(pairs, places, inside, DIRECT: tl.constexpr):
    found = places if DIRECT else tl.load(pairs + places, mask=inside, other=0)
    return found.to(tl.int64)


@triton.jit
def gate_up_kernel(
    x,  # [N, x_stride] elements
    w,  # [E, 2 ff, w_stride], the gate's rows first
    chosen,
    pairs,
    tiles,
    hidden,  # [P, ff], by place
    C,
    ff,
    x_stride,
    w_stride,
    expert_stride,
    TOP_K: tl.constexpr,
    DIRECT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,  # C is a multiple of BK
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert, first, count, columns = _work(chosen, tiles, ff, BN, DIRECT, OVERLAP)
    rm = tl.arange(0, BM)
    rk = tl.arange(0, BK)
    if count > 0:
        inside = rm < count
        rows = _pairs_at(pairs, first + rm, inside, DIRECT) // TOP_K
        # columns beyond the last read its weights, and are not written
        gate_rows = tl.minimum(columns, ff - 1).to(tl.int64)
        gate_w = w + expert * expert_stride + gate_rows[None, :] * w_stride
        up_w = w + expert * expert_stride + (gate_rows + ff)[None, :] * w_stride
        x_rows = x + rows[:, None] * x_stride
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, C, BK):
            at = k + rk
            if EVEN:
                a = tl.load(x_rows + at[None, :], mask=inside[:, None], other=0.0)
                b = tl.load(gate_w + at[:, None])
                c = tl.load(up_w + at[:, None])
            else:
                a = tl.load(x_rows + at[None, :], mask=inside[:, None] & (at < C)[None, :], other=0.0)
                b = tl.load(gate_w + at[:, None], mask=(at < C)[:, None], other=0.0)
                c = tl.load(up_w + at[:, None], mask=(at < C)[:, None], other=0.0)
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            up = tl.dot(a, c, up, input_precision=PRECISION)
        made = (_silu(gate) * up).to(hidden.dtype.element_ty)
        to = hidden + (first + rm)[:, None].to(tl.int64) * ff + columns[None, :]
        tl.store(to, made, mask=inside[:, None] & (columns < ff)[None, :])


@triton.jit
def down_kernel(
    hidden,  # [P, ff], by place
    w,  # [E, C, w_stride]
    chosen,
    pairs,
    tiles,
    made,  # [P, C], by pair
    ff,
    C,
    w_stride,
    expert_stride,
    DIRECT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,  # ff is a multiple of BK
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert, first, count, columns = _work(chosen, tiles, C, BN, DIRECT, OVERLAP)
    rm = tl.arange(0, BM)
    rk = tl.arange(0, BK)
    if count > 0:
        inside = rm < count
        w_rows = w + expert * expert_stride + tl.minimum(columns, C - 1).to(tl.int64)[None, :] * w_stride
        h_rows = hidden + (first + rm)[:, None].to(tl.int64) * ff
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, ff, BK):
            at = k + rk
            if EVEN:
                a = tl.load(h_rows + at[None, :], mask=inside[:, None], other=0.0)
                b = tl.load(w_rows + at[:, None])
            else:
                a = tl.load(h_rows + at[None, :], mask=inside[:, None] & (at < ff)[None, :], other=0.0)
                b = tl.load(w_rows + at[:, None], mask=(at < ff)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        to = made + _pairs_at(pairs, first + rm, inside, DIRECT)[:, None] * C + columns[None, :]
        tl.store(to, acc.to(made.dtype.element_ty), mask=inside[:, None] & (columns < C)[None, :])


@triton.jit
def sum_kernel(
    made,  # [N TOP_K, C]
    shares,  # float32 [N, TOP_K]
    shared,  # [N, shared_stride]
    gate,  # [N, gate_stride], one logit a row
    y,  # [N, y_stride]
    C,
    shared_stride,
    gate_stride,
    y_stride,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = n * TOP_K + rank
        value = tl.load(made + pair * C + columns, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(shares + pair)
    if HAS_SHARED:
        share = sigmoid(tl.load(gate + n * gate_stride).to(tl.float32))
        total += tl.load(shared + n * shared_stride + columns, mask=inside, other=0.0).to(tl.float32) * share
    tl.store(y + n * y_stride + columns, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def silu_times_kernel(
    gate_up,  # [N, stride]: gate [ff], up [ff]
    out,  # [N, out_stride]
    ff,
    stride,
    out_stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < ff
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + n * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + n * stride + ff + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n * out_stride + columns, (_silu(gate) * up).to(out.dtype.element_ty), mask=inside)


def route(
    logits: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, is_renormalised: bool, *, overlap: bool
) -> None:
    """The router: logits [N, E], a view or not, any float type → chosen int32 and shares float32 [N, k] (written), k ≤ E.

    Softmax over all experts in float32; the k largest probabilities in falling order, of equal ones the lowest index
    first. Experts of a row that is not finite are ones that exist, and its shares are not numbers.
    """
    rows, experts = logits.shape
    top_k = chosen.shape[1]
    route_kernel[(rows,)](
        logits,
        chosen,
        shares,
        experts,
        logits.stride(0),
        SMALLEST=SMALLEST_SUM,
        RENORMALISES=is_renormalised,
        TOP_K=top_k,
        RANKS=triton.next_power_of_2(top_k),
        **row_options(experts, overlap),
    )


def group_pairs(
    chosen: torch.Tensor,
    owners: torch.Tensor | None,
    experts: int,
    pairs: torch.Tensor,
    tiles: torch.Tensor,
    bm: int,
    *,
    overlap: bool,
) -> Grouped:
    """Bring the pairs of chosen int32 [N, k] together by expert, in tiles of ``bm``; those of rows with owner -1 are left out.

    pairs int32 [≥ N k] and tiles int32 [≥ most_tiles(N k, experts, bm), 3] are written.
    """
    rows, top_k = chosen.shape
    count = rows * top_k
    lines = most_tiles(count, experts, bm)
    block = next((size for size in _BLOCKS if count <= size < MOST_PAIRS_AT_ONCE), MOST_PAIRS_AT_ONCE)
    group_kernel[(experts,)](
        chosen,
        chosen if owners is None else owners,
        pairs,
        tiles,
        count,
        experts,
        lines,
        BM=bm,
        TOP_K=top_k,
        HAS_OWNERS=owners is not None,
        BY_PLACE=count <= count // bm + experts,
        LINES=32,
        **launch_options(overlap, BLOCK=block, num_warps=warps_for(block)),
    )
    return Grouped(chosen, pairs, tiles, lines)


def as_they_are(chosen: torch.Tensor) -> Grouped:
    """A tile for every pair of chosen int32 [N, k]: no launch is needed, but an expert's weights are read for each pair."""
    return Grouped(chosen, None, None, chosen.numel())


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, grouped: Grouped, hidden: torch.Tensor, config: Config, *, overlap: bool
) -> None:
    """hidden [N k, ff] (written, by place) = silu(gate) * up of every pair; x [N, C], weight [E, 2 ff, C], see the module."""
    width, ff = x.shape[1], hidden.shape[1]
    gate_up_kernel[(grouped.count * triton.cdiv(ff, config.bn),)](
        x,
        weight,
        *_places(grouped),
        hidden,
        width,
        ff,
        x.stride(0),
        weight.stride(1),
        weight.stride(0),
        TOP_K=grouped.chosen.shape[1],
        DIRECT=grouped.tiles is None,
        **_tile_options(config, width, overlap),
    )


def down(
    hidden: torch.Tensor, weight: torch.Tensor, grouped: Grouped, made: torch.Tensor, config: Config, *, overlap: bool
) -> None:
    """made [N k, C] (written, by pair) = hidden [N k, ff] (by place) times weight [E, C, ff] of every pair's expert."""
    ff, width = hidden.shape[1], made.shape[1]
    down_kernel[(grouped.count * triton.cdiv(width, config.bn),)](
        hidden,
        weight,
        *_places(grouped),
        made,
        ff,
        width,
        weight.stride(1),
        weight.stride(0),
        DIRECT=grouped.tiles is None,
        **_tile_options(config, ff, overlap),
    )


def _places(grouped: Grouped) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """chosen, pairs and tiles; where pairs stand in their own order, the last two are not read."""
    if grouped.pairs is None or grouped.tiles is None:
        return grouped.chosen, grouped.chosen, grouped.chosen
    return grouped.chosen, grouped.pairs, grouped.tiles


def _tile_options(config: Config, depth: int, overlap: bool) -> dict[str, Any]:
    return launch_options(
        overlap,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        EVEN=depth % config.bk == 0,
        PRECISION="ieee",
        num_warps=config.warps,
        num_stages=config.stages,
    )


def sum_pairs(
    made: torch.Tensor,
    shares: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    y: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """y [N, C] (written) = sum of shares * made in the router's order, then + sigmoid(shared_gate) * shared.

    made [N k, C], shares float32 [N, k], shared [N, C], shared_gate [N, 1] (logits); float32 sums, y of any float type.
    """
    rows, width = y.shape
    assert (shared is None) == (shared_gate is None)
    added = y if shared is None else shared
    gate = y if shared_gate is None else shared_gate
    options = piece_options(width, BLOCK, overlap)
    sum_kernel[(rows, triton.cdiv(width, options["BLOCK"]))](
        made,
        shares,
        added,
        gate,
        y,
        width,
        added.stride(0),
        gate.stride(0),
        y.stride(0),
        TOP_K=shares.shape[1],
        HAS_SHARED=shared is not None,
        **options,
    )


def silu_times(gate_up: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
    """out [N, ff] (written) = silu(gate) * up; gate_up [N, 2 ff], a view or not, holds gate [ff] | up [ff]."""
    rows, ff = out.shape
    options = piece_options(ff, BLOCK, overlap)
    grid = (rows, triton.cdiv(ff, options["BLOCK"]))
    silu_times_kernel[grid](gate_up, out, ff, gate_up.stride(0), out.stride(0), **options)
