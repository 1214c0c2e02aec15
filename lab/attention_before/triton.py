"""Block attention on CUDA: rows enter the pages, sparse ones choose their blocks, and every row walks the keys it sees.

A prompt and a decode step run the same compiled kernels, with the same tiles: nothing that differs between launches is
specialised or shapes a sum. A split's share of the softmax is made from scratch and merged in ascending order, value by
value, by the program that made it or, where there are few rows, by a launch behind it; both round alike.

Keys, values and block keys are kept in float32 and multiplied in the model's dtype, with float32 sums. Float32 models
multiply in three passes of TF32, which keep 21 bits of both sides: that error is below what the sums round, and plain
multiply-adds would need more registers than there are. Products of 16-bit models are those of 16-bit tensor cores: a
query, a key and a share of the softmax are rounded once, to as many bits as the projections that they are made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton

from attention_before.triton_kernels import attend_kernel, enter_kernel, merge_kernel, turn_kernel
from attention_before.triton_select import COLUMNS, TILE, score_kernel, select_kernel
from attention_before.triton_sizes import (
    MOST_DIM,
    attend_options,
    attend_sizes,
    enter_sizes,
    merge_sizes,
    most_splits,
    options,
    partial_values,
    score_line,
    score_options,
    score_rows,
    score_sizes,
    select_options,
    select_sizes,
)
from kittiwake.errors import ModelError
from kittiwake.ops.block_attention import AttentionColumns, AttentionShape

SCORE_BYTES = 1 << 27
"""Scores are made for as many rows at a time as fit; at least for one tile of rows."""
PARTIAL_BYTES = 1 << 26
"""Most room for shares of splits that a launch of its own merges."""
FEW_PROGRAMS = 64
"""Rows times key heads up to which each split has a program of its own."""
MOST_SPLIT_PROGRAMS = 65535
"""Most splits that have programs of their own: a card counts no further along that side of a grid."""
SCORE_PROGRAMS = 1024
"""About so many programs share the scores of a launch."""


@dataclass(frozen=True)
class DeviceNorms:
    """As :class:`AttentionNorms`, tensors."""

    q: torch.Tensor
    k: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    eps: float


@dataclass(frozen=True)
class DeviceMemory:
    """As :class:`AttentionMemory`, contiguous tensors; without a selector ``blocks`` and ``open_rows`` may be empty."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: torch.Tensor
    open_rows: torch.Tensor
    pages: torch.Tensor
    """int32 [S, P], below 0 where a slot has no page: such positions are neither written nor read."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    @property
    def most_tokens(self) -> int:
        """The longest sequence that the pages have places for."""
        return self.pages.shape[1] * self.page_tokens


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one launch, int32; made once a forward, the same in all its layers."""

    owners: torch.Tensor
    """[N], the sequence of each row; -1: a spare one, which touches nothing."""
    starts: torch.Tensor
    """[B + 1]"""
    slots: torch.Tensor
    """[B]"""
    seen: torch.Tensor
    """[B], tokens that each sequence had before these rows."""
    positions: torch.Tensor
    """[N], absolute."""
    turns: torch.Tensor
    """float32 [≥ N, 4, rotary_dim / 2], of :func:`turn_rows`."""


@dataclass(frozen=True)
class AttentionRooms:
    """What a launch works in; nothing in it outlives a layer, so that all layers share it."""

    q: torch.Tensor  # element [rows, heads * head_dim], normed and rotated
    index_q: torch.Tensor  # element [rows, index_heads * index_dim], the same
    chosen: torch.Tensor  # int32 [rows, budget_blocks]
    scores: torch.Tensor  # float32, flat
    partials: torch.Tensor  # float32, flat

    @property
    def element(self) -> torch.dtype:
        """What products are made in."""
        return self.q.dtype


def _room_sizes(shape: AttentionShape, rows: int, most_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the rooms, in their order."""
    scores = 0
    if shape.is_sparse(most_tokens):
        line, tile = score_line(shape, most_tokens), score_rows(shape)
        scores = line * max(tile, min(-(-rows // tile) * tile, SCORE_BYTES // (4 * line) // tile * tile))
    few = min(rows, FEW_PROGRAMS // shape.kv_heads)
    partials = min(few * partial_values(shape, most_tokens), PARTIAL_BYTES // 4)
    return (
        (rows, shape.heads * shape.head_dim),
        (rows, shape.index_heads * shape.index_dim),
        (rows, shape.budget_blocks),
        (scores,),
        (partials,),
    )


def workspace_bytes(shape: AttentionShape, rows: int, most_tokens: int, element: torch.dtype) -> int:
    """Bytes of the rooms for launches of up to ``rows`` rows, of sequences of up to ``most_tokens`` tokens.

    By row: queries, and the numbers of chosen blocks. Beside them at most ``SCORE_BYTES`` for scores (or one tile of
    rows, where sequences are longer than that holds) and ``PARTIAL_BYTES``.
    """
    q, index_q, *others = (math.prod(size) for size in _room_sizes(shape, rows, most_tokens))
    return (q + index_q) * element.itemsize + 4 * sum(others)


def make_rooms(
    shape: AttentionShape, rows: int, most_tokens: int, element: torch.dtype, device: torch.device
) -> AttentionRooms:
    """The rooms of :func:`workspace_bytes`; ``most_tokens`` is that of the memory (:class:`DeviceMemory`)."""
    dtypes = (element, element, torch.int32, torch.float32, torch.float32)
    sizes = _room_sizes(shape, rows, most_tokens)
    return AttentionRooms(
        *(torch.empty(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes, strict=True))
    )


def turn_rows(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    ratio: int,
    turns: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """Cosines and sines of each row, once a forward: int32 [N], float32 [half] → turns float32 [≥ N, 4, half].

    The four are cosine and sine at the row's position, then at the first position of its block. The angle is the
    float32 product of position and frequency; its cosine and sine are made in float64.
    """
    half = frequencies.shape[0]
    if half:
        turn_kernel[(positions.shape[0],)](
            positions, frequencies, turns, HALF=half, BLOCK=triton.next_power_of_2(half), RATIO=ratio,
            **options(1, overlap),
        )  # fmt: skip


def block_attention(
    proj: torch.Tensor,
    columns: AttentionColumns,
    shape: AttentionShape,
    norms: DeviceNorms,
    rows: AttentionRows,
    memory: DeviceMemory,
    rooms: AttentionRooms,
    context: torch.Tensor,
    *,
    overlap: bool,
    most_keys: int | None = None,
) -> None:
    """One layer's attention between its products, for the N packed rows of ``rows``.

    proj [≥ N, X], of any float dtype, holds the raw projections at ``columns``, rows any stride apart; it stays as it
    is. context [≥ N, heads * head_dim] is written, gated, in its own dtype, except for spare rows. ``memory`` must have
    pages for the rows: their keys, values, index keys and completed blocks are written there. Products are made in the
    dtype of ``rooms.q``; the rooms are those of :func:`make_rooms` for at least so many rows.

    ``most_keys`` tells the longest of these sequences, its rows here included, where it is known and no graph is
    captured: less is launched then, to the same bits. Raises ModelError where the rooms are too small.
    """
    _check(shape, rows, memory, rooms)
    most = memory.most_tokens if most_keys is None else min(most_keys, memory.most_tokens)
    _enter(proj, columns, shape, norms, rows, memory, rooms, overlap)
    if shape.is_sparse(most):
        _select(shape, rows, memory, rooms, most, overlap)
    _attend(proj, columns, shape, rows, memory, rooms, context, most, overlap)


def _check(shape: AttentionShape, rows: AttentionRows, memory: DeviceMemory, rooms: AttentionRooms) -> None:
    """Raise ModelError where a launch does not fit what it is given."""
    count, page_tokens = rows.positions.shape[0], memory.page_tokens
    if max(shape.head_dim, shape.index_dim) > MOST_DIM:
        raise ModelError(f"attention heads of {max(shape.head_dim, shape.index_dim)}; on a card at most {MOST_DIM}")
    if rooms.q.shape[0] < count:
        raise ModelError(f"{count} rows do not fit the rooms of an attention, which were made for {rooms.q.shape[0]}")
    if shape.index_heads and page_tokens % shape.ratio:
        raise ModelError(f"pages of {page_tokens} tokens do not hold whole blocks of {shape.ratio}")


def _enter(
    proj: torch.Tensor,
    columns: AttentionColumns,
    shape: AttentionShape,
    norms: DeviceNorms,
    rows: AttentionRows,
    memory: DeviceMemory,
    rooms: AttentionRooms,
    overlap: bool,
) -> None:
    """Queries to their rooms; keys, values, block keys and open rows to the memory."""
    units = shape.heads + 2 * shape.kv_heads + (shape.index_heads + 1 if shape.index_heads else 0)
    enter_kernel[(rows.positions.shape[0], units)](
        proj,
        norms.q,
        norms.k,
        norms.index_q,
        norms.index_k,
        rows.turns,
        rows.owners,
        rows.starts,
        rows.slots,
        rows.seen,
        rows.positions,
        memory.pages,
        memory.keys,
        memory.values,
        memory.blocks,
        memory.open_rows,
        rooms.q,
        rooms.index_q,
        proj.stride(0),
        columns.q_gate,
        columns.k,
        columns.v,
        columns.index_q,
        columns.index_k,
        memory.pages.shape[1],
        norms.eps,
        **enter_sizes(shape, memory.page_tokens),
        **options(1, overlap),
    )


def _select(
    shape: AttentionShape,
    rows: AttentionRows,
    memory: DeviceMemory,
    rooms: AttentionRooms,
    most: int,
    overlap: bool,
) -> None:
    """The blocks of every row that is sparse, as many rows at a time as the room for scores holds."""
    count, tile, line = rows.positions.shape[0], score_rows(shape), score_line(shape, most)
    at_once = min(rooms.scores.shape[0] // line // tile * tile, -(-count // tile) * tile)
    if not at_once:
        raise ModelError(
            f"{tile} rows of {line} scores do not fit the rooms of an attention, which hold {rooms.scores.shape[0]}",
            "make them for the longest sequence of the memory",
        )
    blocks = line // (TILE + 1) * TILE
    scores, maxima = rooms.scores, rooms.scores[at_once * blocks :]
    score_fixed = score_sizes(shape, memory.page_tokens, rooms.element)
    select_fixed = select_sizes(shape, memory.most_tokens)
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        tiles = -(-(last - first) // tile)
        programs = min(blocks // COLUMNS, max(1, SCORE_PROGRAMS // tiles))
        score_kernel[(programs, tiles)](
            rooms.index_q,
            memory.blocks,
            memory.pages,
            rows.owners,
            rows.slots,
            rows.positions,
            scores,
            maxima,
            first,
            last,
            memory.pages.shape[1],
            blocks,
            **score_fixed,
            **score_options(rooms.element, overlap),
        )
        select_kernel[(last - first,)](
            scores,
            maxima,
            rows.owners,
            rows.positions,
            rooms.chosen,
            first,
            blocks,
            **select_fixed,
            **select_options(shape, memory.most_tokens, overlap),
        )


def _attend(
    proj: torch.Tensor,
    columns: AttentionColumns,
    shape: AttentionShape,
    rows: AttentionRows,
    memory: DeviceMemory,
    rooms: AttentionRooms,
    context: torch.Tensor,
    most: int,
    overlap: bool,
) -> None:
    """The keys that each row sees. With few rows each split is a program's, and another launch merges them."""
    count, splits = rows.positions.shape[0], most_splits(shape, most)
    values = count * shape.heads * splits
    is_split = (
        count * shape.kv_heads <= FEW_PROGRAMS
        and 1 < splits <= MOST_SPLIT_PROGRAMS
        and values * (shape.head_dim + 2) <= rooms.partials.shape[0]
    )
    partials, sums = rooms.partials, rooms.partials[values * shape.head_dim :] if is_split else rooms.partials
    attend_kernel[(count, shape.kv_heads, splits if is_split else 1)](
        rooms.q,
        proj,
        memory.keys,
        memory.values,
        rooms.chosen,
        memory.pages,
        rows.owners,
        rows.slots,
        rows.positions,
        partials,
        sums,
        context,
        proj.stride(0),
        columns.q_gate,
        context.stride(0),
        memory.pages.shape[1],
        float(np.float32(math.log2(math.e) / math.sqrt(shape.head_dim))),
        1 if is_split else splits + 1,
        splits,
        **attend_sizes(shape, memory.page_tokens, rooms.element),
        **attend_options(shape, rooms.element, overlap),
    )
    if is_split:
        merge_kernel[(count, shape.heads)](
            proj,
            rows.owners,
            rows.positions,
            partials,
            sums,
            context,
            proj.stride(0),
            columns.q_gate,
            context.stride(0),
            splits,
            **merge_sizes(shape),
            **options(1, overlap),
        )
