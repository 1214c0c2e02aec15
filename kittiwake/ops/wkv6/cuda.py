"""WKV-6 and WKV-5 on CUDA: the kernels of wkv6.cu, and which of them a step runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kittiwake.ops.head_kernels import TILINGS, HeadKernels, Tilings, can_take_low

_SHARED_BYTES = 96 * 1024
"""Shared memory that a block of any card from compute capability 8.0 on may have."""
LOW_ROWS = 8
"""Sequences up to which decoding makes the low-rank product itself: of one decay a head's weights are few."""


@dataclass(frozen=True)
class Kind:
    """What a version's time mix has: a decay that follows from the token (RWKV-6), a gate (not RWKV-5.0)."""

    is_by_token: bool
    is_gated: bool

    @property
    def vectors_per_head(self) -> int:
        """Vectors of a head that a token is staged as."""
        return 4 if self.is_by_token else 3

    @property
    def defines(self) -> tuple[str, ...]:
        """What the source is compiled with for it."""
        return (f"BY_TOKEN={int(self.is_by_token)}", f"GATED={int(self.is_gated)}")


class Wkv6(HeadKernels):
    """The kernels for one head size, activation dtype and kind.

    In every call ``projected`` [N, r|k|v|g…] is what the products of the rows give, ``low`` [N, C] the low-rank product of
    the decays (None where they are constant), ``vectors`` [4, C] decay bias, bonus, and the group norm's weight and bias;
    ``out`` [N, C] is written.
    """

    def __init__(self, head_size: int, dtype: torch.dtype, kind: Kind, tilings: Tilings = TILINGS) -> None:
        self.kind = kind
        super().__init__("wkv6", head_size, dtype, kind.vectors_per_head, tilings, kind.defines)

    def can_take_low(self, depth: int, rows: int) -> bool:
        """Whether :meth:`decode_low` serves."""
        given = (self.head_size, self.dtype, (depth,), rows, _SHARED_BYTES, LOW_ROWS)
        return self.kind.is_by_token and can_take_low(*given)

    def decode(
        self,
        projected: torch.Tensor,
        low: torch.Tensor | None,
        vectors: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        eps: float,
        overlap: bool,
    ) -> None:
        """One row a sequence; slots int32 [B]."""
        lows = projected if low is None else low
        strides = (projected.stride(0), lows.stride(0), out.shape[1])
        self._launch_decode(out, (projected, lows, vectors, state, slots, out, *strides, eps), overlap)

    def decode_low(
        self,
        projected: torch.Tensor,
        up: torch.Tensor,
        low_column: int,
        depth: int,
        vectors: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        eps: float,
        overlap: bool,
    ) -> None:
        """:meth:`decode` with the low-rank product inside, of ``projected`` from ``low_column`` on with the weights ``up``.

        Those are [C, depth rounded up to 16], as :class:`kittiwake.layers.cuda_linear.CudaGroup` keeps them.
        """
        sizes = (low_column, depth, projected.stride(0), out.shape[1])
        self._launch_decode(out, (projected, up, vectors, state, slots, out, *sizes, eps), overlap, (depth,))

    def prompt(
        self,
        projected: torch.Tensor,
        low: torch.Tensor | None,
        vectors: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        made: torch.Tensor,
        y: torch.Tensor,
        out: torch.Tensor,
        *,
        eps: float,
        overlap: bool,
    ) -> None:
        """Any rows of any sequences: starts int32 [B + 1]; ``made`` and ``y`` [N, C] float32 are room to work in."""
        rows, width = out.shape
        heads = width // self.head_size
        lows = projected if low is None else low
        first = (projected.stride(0), lows.stride(0), width, rows, heads)
        self._launch_rows(self._prepare, out, (projected, lows, vectors, made, *first), overlap)
        self._launch_scan(heads, slots.shape[0], (made, vectors, y, state, starts, slots, rows, width), overlap)
        last = (projected.stride(0), width, rows, heads, eps)
        self._launch_rows(self._finish, out, (projected, vectors, made, y, out, *last), overlap)


@lru_cache(maxsize=8)
def kernels(head_size: int, dtype: torch.dtype, kind: Kind) -> Wkv6:
    """The kernels, loaded once a process."""
    return Wkv6(head_size, dtype, kind)
