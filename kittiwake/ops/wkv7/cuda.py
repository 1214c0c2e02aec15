"""WKV-7 on CUDA: the kernels of wkv7.cu, and which of them a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from kittiwake.ops.head_kernels import TILINGS, HeadKernels, Tilings, can_take_low
from kittiwake.ops.nvrtc import shared_memory_limit

VECTORS_PER_HEAD = 6
_LOWS = 4
"""Low-rank products of a head; the first layer has one less."""
MOST_LOW_BYTES = 160 * 1024
"""Shared memory that the weights of low-rank products may take, where a card has as much."""


class Wkv7(HeadKernels):
    """The kernels for one head size and activation dtype."""

    def __init__(self, head_size: int, dtype: torch.dtype, tilings: Tilings = TILINGS) -> None:
        super().__init__("wkv7", head_size, dtype, VECTORS_PER_HEAD, tilings)
        self._most_low_bytes = min(MOST_LOW_BYTES, shared_memory_limit() - 32 * 4 * self.padded)  # and what is static

    def can_take_low(self, depths: Sequence[int], rows: int) -> bool:
        """Whether :meth:`decode_low` serves."""
        return can_take_low(self.head_size, self.dtype, depths, rows, self._most_low_bytes)

    def decode(
        self,
        projected: torch.Tensor,
        low: torch.Tensor,
        v_first: torch.Tensor,
        vectors: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        first_layer: bool,
        eps: float,
        overlap: bool,
    ) -> None:
        """One row a sequence: projected [B, r|k|v], low [B, w|a|g|v], v_first and out [B, C], slots int32 [B]."""
        strides = (projected.stride(0), low.stride(0), out.shape[1])
        given = (projected, low, v_first, vectors, state, slots, out, *strides, int(first_layer), eps)
        self._launch_decode(out, given, overlap)

    def decode_low(
        self,
        projected: torch.Tensor,
        up: torch.Tensor,
        lines: torch.Tensor,
        depths: Sequence[int],
        v_first: torch.Tensor,
        vectors: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        first_layer: bool,
        eps: float,
        overlap: bool,
    ) -> None:
        """:meth:`decode` with the low-rank products inside; ``up`` and ``lines`` are that group's weights and table."""
        given = (projected, up, v_first, vectors, state, slots, out, lines, projected.stride(0), out.shape[1])
        all_depths = (*depths, *[0] * (_LOWS - len(depths)))
        self._launch_decode(out, (*given, int(first_layer), eps), overlap, all_depths)

    def prompt(
        self,
        projected: torch.Tensor,
        low: torch.Tensor,
        v_first: torch.Tensor,
        vectors: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        made: torch.Tensor,
        y: torch.Tensor,
        out: torch.Tensor,
        *,
        first_layer: bool,
        eps: float,
        overlap: bool,
    ) -> None:
        """Any rows of any sequences: starts int32 [B + 1]; ``made`` and ``y`` float32 are room to work in."""
        rows, width = out.shape
        heads = width // self.head_size
        first = (projected.stride(0), low.stride(0), width, int(first_layer), rows, heads)
        self._launch_rows(self._prepare, out, (projected, low, v_first, vectors, made, *first), overlap)
        self._launch_scan(heads, slots.shape[0], (made, y, state, starts, slots, rows), overlap)
        last = (low.stride(0), width, rows, heads, eps)
        self._launch_rows(self._finish, out, (low, vectors, made, y, out, *last), overlap)


@lru_cache(maxsize=8)
def kernels(head_size: int, dtype: torch.dtype) -> Wkv7:
    """The kernels, loaded once a process."""
    return Wkv7(head_size, dtype)
