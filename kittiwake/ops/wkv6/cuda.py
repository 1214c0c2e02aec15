"""WKV-6 and WKV-5 on CUDA: the kernels of wkv6.cu, and which of them a step runs.

Decoding takes one launch a layer, prompts three; both have the arithmetic of the same functions, so their bits agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import torch

from kittiwake.ops.nvrtc import DTYPE_CODES, CudaKernel, padded_head

LOW_ROWS = 4
"""Sequences up to which decoding makes the low-rank product itself."""
BEGIN_NEXT = 2
"""When decoding lets the next kernel begin: 0 when it has ended, 1 at once, 2 when the states are written."""
_SHARED_BYTES = 96 * 1024
"""Shared memory that a block of any card from compute capability 8.0 on may have."""


@dataclass(frozen=True)
class Kind:
    """What a version's time mix has: a decay that follows from the token (RWKV-6), a gate (not RWKV-5.0)."""

    is_by_token: bool
    is_gated: bool

    @property
    def vectors_per_head(self) -> int:
        """Vectors of a head that a token is staged as."""
        return 4 if self.is_by_token else 3


@dataclass(frozen=True)
class Tiling:
    """How a scan is laid out; none of it changes a bit."""

    columns_per_thread: int = 2
    columns_per_block: int = 16
    steps: int = 8
    stages: int = 3

    def ring_values(self, padded_head: int, kind: Kind) -> int:
        """Float32 values staged in shared memory."""
        return self.stages * self.steps * kind.vectors_per_head * padded_head


TILINGS = (
    (16, Tiling(1, 8, 16, 3)),
    (48, Tiling(2, 16, 8, 3)),
    (96, Tiling(2, 32, 8, 3)),
    (1 << 30, Tiling(4, 32, 8, 3)),
)
"""By the number of states, as for WKV-7."""


def source() -> str:
    """The CUDA C++ text."""
    parts = (("kittiwake.ops", "base.cu"), ("kittiwake.ops", "heads.cu"), ("kittiwake.ops.wkv6", "wkv6.cu"))
    return "".join(files(package).joinpath(name).read_text(encoding="utf-8") for package, name in parts)


def defines(head_size: int, dtype: torch.dtype, kind: Kind, tiling: Tiling) -> tuple[str, ...]:
    """What the source is compiled with."""
    return (
        f"D={head_size}",
        f"DP={padded_head(head_size)}",
        f"DT={DTYPE_CODES[dtype]}",
        f"BY_TOKEN={int(kind.is_by_token)}",
        f"GATED={int(kind.is_gated)}",
        f"R={tiling.columns_per_thread}",
        f"ROWS={tiling.columns_per_block}",
        f"STEPS={tiling.steps}",
        f"STAGES={tiling.stages}",
    )


class Wkv6:
    """The kernels for one head size, activation dtype and kind. State [S, H, K, V] float32; the maths is in reference.py.

    ``tilings`` are (states, tiling) pairs: the first whose number of states (heads times sequences) is not exceeded runs
    the scan of a prompt. All give the same bits. In every call ``projected`` [N, r|k|v|g…] is what the products of the
    rows give, ``low`` [N, C] the low-rank product of the decays (None where they are constant), ``vectors`` [4, C] decay
    bias, bonus, and the group norm's weight and bias; ``out`` [N, C] is written.
    """

    def __init__(
        self, head_size: int, dtype: torch.dtype, kind: Kind, tilings: tuple[tuple[int, Tiling], ...] = TILINGS
    ) -> None:
        self.head_size, self.padded, self.kind = head_size, padded_head(head_size), kind
        self._tilings = tilings
        self._dtype = dtype
        text, given = source(), defines(head_size, dtype, kind, tilings[0][1])
        self._decode = CudaKernel(text, "decode", given)
        self._prepare = CudaKernel(text, "prepare", given)
        self._finish = CudaKernel(text, "finish", given)
        self._low: dict[int, CudaKernel] = {}
        self._scans = {
            tiling: CudaKernel(
                text,
                "scan",
                defines(head_size, dtype, kind, tiling),
                shared_bytes=tiling.ring_values(self.padded, kind) * 4,
            )
            for _, tiling in tilings
        }

    def tiling(self, states: int) -> Tiling:
        """What scans so many heads and sequences."""
        return next((tiling for most, tiling in self._tilings if states <= most), self._tilings[-1][1])

    def made_values(self, heads: int) -> int:
        """Float32 values a row that :meth:`prompt` needs in ``made``."""
        return heads * self.kind.vectors_per_head * self.padded

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
        rows, width = out.shape
        lows = projected if low is None else low
        given = (projected, lows, vectors, state, slots, out, projected.stride(0), lows.stride(0), width)
        self._decode((width // self.head_size, rows, 1), 2 * self.padded, (*given, eps, BEGIN_NEXT), overlap=overlap)

    def can_take_low(self, depth: int, rows: int) -> bool:
        """Whether :meth:`decode_low` serves: few rows, a depth its loads can walk, weights that fit shared memory."""
        return (
            rows <= LOW_ROWS
            and self.kind.is_by_token
            and self._dtype.itemsize == 2
            and self.head_size % 32 == 0
            and depth % 8 == 0
            and self._low_bytes(depth) <= _SHARED_BYTES
        )

    def _low_bytes(self, depth: int) -> int:
        return self.head_size * (-(-depth // 16) * 16 + 8) * 2

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
        rows, width = out.shape
        needed = self._low_bytes(depth)
        kernel = self._low.get(needed)
        if kernel is None:
            compiled = defines(self.head_size, self._dtype, self.kind, self._tilings[0][1])
            kernel = self._low[needed] = CudaKernel(source(), "decode_low", compiled, shared_bytes=needed)
        given = (projected, up, vectors, state, slots, out, low_column, depth, projected.stride(0), width)
        kernel((width // self.head_size, rows, 1), 2 * self.padded, (*given, eps, BEGIN_NEXT), overlap=overlap)

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
        warps = -(-rows * heads // 8)
        lows = projected if low is None else low
        given = (projected, lows, vectors, made, projected.stride(0), lows.stride(0), width, rows, heads)
        self._prepare((warps, 1, 1), 256, given, overlap=overlap)
        tile = self.tiling(heads * slots.shape[0])
        blocks = -(-self.head_size // tile.columns_per_block)
        threads = 8 * tile.columns_per_block // tile.columns_per_thread
        self._scans[tile](
            (blocks, heads, slots.shape[0]),
            threads,
            (made, vectors, y, state, starts, slots, rows, width),
            overlap=overlap,
        )
        last = (projected, vectors, made, y, out, projected.stride(0), width, rows, heads, eps)
        self._finish((warps, 1, 1), 256, last, overlap=overlap)


@lru_cache(maxsize=8)
def kernels(head_size: int, dtype: torch.dtype, kind: Kind) -> Wkv6:
    """The kernels, loaded once a process."""
    return Wkv6(head_size, dtype, kind)
