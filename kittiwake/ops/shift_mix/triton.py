"""Embedding, norms and token shift on CUDA. The readable twins are in reference.py.

Contraction is off in all of them (``enable_fp_fusion=False``): a row's norm is computed where the row stands and again as
the row before the next one, and both must round alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_launch import row_options

EARLY_ROWS = 4
"""Rows up to which the next kernel may begin at once, rather than when these have ended; with more it takes their place."""


@dataclass(frozen=True)
class Added:
    """What a block adds to the residual stream: scale * gate * y, in float32."""

    y: torch.Tensor
    """[N, C], of the block's last product."""
    gate: torch.Tensor | None = None
    """[N, C], columns of wider rows or not; None: 1."""
    scale: float = 1.0
    """A power of two."""

    def to(self, x: torch.Tensor) -> torch.Tensor:
        """The stream with it."""
        added = self.y.float() * self.scale
        return x + (added if self.gate is None else added * self.gate.float())


def _as_added(y: torch.Tensor | Added) -> Added:
    return y if isinstance(y, Added) else Added(y)


def _options(rows: int, width: int, overlap: bool) -> dict[str, Any]:
    return row_options(width, overlap) | {"EARLY": rows <= EARLY_ROWS}


@triton.jit
def _norm(x, weight, bias, columns, C, eps):
    """Layer norm of one row, zeros beyond C."""
    mean = tl.sum(x, 0) / C
    gap = tl.where(columns < C, x - mean, 0.0)
    variance = tl.sum(gap * gap, 0) / C
    return gap * (1.0 / tl.sqrt_rn(variance + eps)) * weight + bias


@triton.jit
def _added(y, gate, at, gate_at, inside, scale, HAS_GATE: tl.constexpr):
    """What a block adds to a part of a row, see :class:`Added`."""
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_GATE:
        value = value * tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def embed_kernel(
    ids,
    owners,
    slots,
    drawn,
    table,
    weight,
    bias,
    x,
    C,
    eps,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    n = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(weight + columns, mask=inside, other=0.0)
    b = tl.load(bias + columns, mask=inside, other=0.0)
    if OVERLAP:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    row = tl.load(ids + n).to(tl.int64)
    if row < 0:
        row = tl.maximum(tl.load(drawn + tl.load(slots + tl.load(owners + n))), 0)
    value = tl.load(table + row * C + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + n.to(tl.int64) * C + columns, _norm(value, w, b, columns, C, eps), mask=inside)


@triton.jit
def shift_kernel(
    x,  # float32 [N, C], the residual stream
    y,  # [N, C], what the last block adds to it, with
    gate,  # [N, *]: see Added
    x_out,  # float32 [N, C], the sum; another tensor than x
    norm,  # float32 [2, C]
    mixes,  # float32 [MIXES, C]
    shift,  # float32 [S, C], what the rows before were after the norm
    owners,  # int32 [N], the sequence of each row, -1 for a spare one
    starts,  # int32 [B + 1]
    slots,  # int32 [B]
    mixed,  # [MIXES, N, C]
    kept,  # float32 [2, N, C]: the normed rows, and what is to be added to make them the rows before
    last,  # float32 [B, C]: the normed last row of each sequence, for the state
    C,
    mixed_stride,  # elements from one mix to the next
    gate_stride,  # from a row to the next
    kept_stride,  # from normed rows to differences
    eps,
    scale,
    HAS_Y: tl.constexpr,
    HAS_GATE: tl.constexpr,
    KEEPS: tl.constexpr,
    MIXES: tl.constexpr,
    SPLIT: tl.constexpr,  # a program for each mix, else one for all of a row
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    n = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(norm + columns, mask=inside, other=0.0)
    b = tl.load(norm + C + columns, mask=inside, other=0.0)
    owner = tl.load(owners + n)
    is_first = owner < 0
    is_last = owner < 0
    slot = 0
    if owner >= 0:
        is_first = n == tl.load(starts + owner)
        is_last = n == tl.load(starts + owner + 1) - 1
        slot = tl.load(slots + owner)
    before = tl.load(shift + slot.to(tl.int64) * C + columns, mask=inside & is_first, other=0.0)  # type: ignore[attr-defined]
    if SPLIT:
        mix = tl.load(mixes + tl.program_id(1) * C + columns, mask=inside, other=0.0)
    if OVERLAP:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()  # all above was written before the kernel in front began
    at = n.to(tl.int64) * C + columns
    gate_at = n.to(tl.int64) * gate_stride + columns
    here = tl.load(x + at, mask=inside, other=0.0)
    if HAS_Y:
        here += _added(y, gate, at, gate_at, inside, scale, HAS_GATE)
    if not is_first:
        above = tl.load(x + at - C, mask=inside, other=0.0)
        if HAS_Y:
            above += _added(y, gate, at - C, gate_at - gate_stride, inside, scale, HAS_GATE)
        before = _norm(above, w, b, columns, C, eps)
    normed = _norm(here, w, b, columns, C, eps)
    gap = before - normed
    if SPLIT:
        m = tl.program_id(1)
        tl.store(
            mixed + m.to(tl.int64) * mixed_stride + at, (normed + gap * mix).to(mixed.dtype.element_ty), mask=inside
        )
        leads = m == 0
    else:
        for m in tl.static_range(MIXES):
            mix = tl.load(mixes + m * C + columns, mask=inside, other=0.0)
            spot = mixed + m * mixed_stride.to(tl.int64) + at
            tl.store(spot, (normed + gap * mix).to(mixed.dtype.element_ty), mask=inside)
        leads = owner >= -1
    tl.store(x_out + at, here, mask=inside & leads)
    if KEEPS:
        tl.store(kept + at, normed, mask=inside & leads)
        tl.store(kept + kept_stride.to(tl.int64) + at, gap, mask=inside & leads)
    tl.store(last + owner.to(tl.int64) * C + columns, normed, mask=inside & leads & is_last & (owner >= 0))


@triton.jit
def norm_kernel(
    x,
    y,
    gate,
    rows,
    norm,
    out,
    C,
    gate_stride,
    eps,
    scale,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The wanted rows after the last addition and norm."""
    i = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(norm + columns, mask=inside, other=0.0)
    b = tl.load(norm + C + columns, mask=inside, other=0.0)
    if OVERLAP:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows + i).to(tl.int64)
    at = row * C + columns
    value = tl.load(x + at, mask=inside, other=0.0)
    value += _added(y, gate, at, row * gate_stride + columns, inside, scale, HAS_GATE)
    normed = _norm(value, w, b, columns, C, eps)
    tl.store(out + i.to(tl.int64) * C + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["L", "B", "S"])
def commit_kernel(
    last, first, second, slots, L, B, S, C, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr
):
    """last [2, L, B, C] → the shift states first and second, each [L, S, C], at the sequences' slots."""
    b = tl.program_id(0)
    layer = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    if OVERLAP:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    to = (layer.to(tl.int64) * S + tl.load(slots + b)) * C + columns
    at = (layer.to(tl.int64) * B + b) * C + columns
    tl.store(first + to, tl.load(last + at, mask=inside), mask=inside)
    tl.store(second + to, tl.load(last + L.to(tl.int64) * B * C + at, mask=inside), mask=inside)


def embed_rows(
    ids: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    drawn: torch.Tensor,
    table: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """ids int32 [N], table [V, C], norm float32 [2, C] → x float32 [N, C], normed.

    An id below 0 stands for the token drawn last for its sequence's slot, ``drawn`` int64 [S].
    """
    rows, width = x.shape
    options = _options(rows, width, overlap)
    embed_kernel[(rows,)](ids, owners, slots, drawn, table, norm[0], norm[1], x, width, eps, **options)


def shift_mix(
    x: torch.Tensor,
    y: torch.Tensor | Added | None,
    x_out: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    mixes: torch.Tensor,
    shift: torch.Tensor,
    owners: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    mixed: torch.Tensor,
    last: torch.Tensor,
    *,
    overlap: bool,
    kept: torch.Tensor | None = None,
) -> None:
    """Add, norm, and mix each row with the one before it; shapes as in :func:`shift_kernel`."""
    rows, width = x.shape
    added = Added(x) if y is None else _as_added(y)
    gate = x if added.gate is None else added.gate
    count = mixes.shape[0]
    is_split = rows <= 32
    shift_kernel[(rows, count if is_split else 1)](
        x,
        added.y,
        gate,
        x_out,
        norm,
        mixes,
        shift,
        owners,
        starts,
        slots,
        mixed,
        x_out if kept is None else kept,
        last,
        width,
        mixed.stride(0),
        gate.stride(0),
        0 if kept is None else kept.stride(0),
        eps,
        added.scale,
        HAS_Y=y is not None,
        HAS_GATE=added.gate is not None,
        KEEPS=kept is not None,
        MIXES=count,
        SPLIT=is_split,
        **_options(rows, width, overlap),
    )


def norm_rows(
    x: torch.Tensor,
    y: torch.Tensor | Added,
    rows: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """Rows (int32 [W]) of x + y, normed → out [W, C]."""
    width = x.shape[1]
    added = _as_added(y)
    gate = x if added.gate is None else added.gate
    norm_kernel[(rows.shape[0],)](
        x,
        added.y,
        gate,
        rows,
        norm,
        out,
        width,
        gate.stride(0),
        eps,
        added.scale,
        HAS_GATE=added.gate is not None,
        **_options(len(rows), width, overlap),
    )


def commit_shifts(
    last: torch.Tensor, first: torch.Tensor, second: torch.Tensor, slots: torch.Tensor, *, overlap: bool
) -> None:
    """Write the last rows of a forward into the shift states; see :func:`commit_kernel`."""
    _, layers, sequences, width = last.shape
    commit_kernel[(sequences, layers)](
        last,
        first,
        second,
        slots,
        layers,
        sequences,
        first.shape[1],
        width,
        **_options(sequences, width, overlap),
    )
