"""WKV-7 on CUDA: the kernels of wkv7.cu, and which of them a step runs.

Decoding takes one launch a layer, prompts three; both have the arithmetic of the same functions, so their bits agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import torch

from kittiwake.ops.nvrtc import DTYPE_CODES, CudaKernel, padded_head, shared_memory_limit

VECTORS_PER_HEAD = 6
LOW_ROWS = 4
"""Sequences up to which decoding makes the low-rank products itself."""
MOST_LOW_BYTES = 160 * 1024
"""Shared memory that their weights may take, where a card has as much."""
BEGIN_NEXT = 2
"""When decoding lets the next kernel begin: 0 when it has ended, 1 at once, 2 when the states are written."""


@dataclass(frozen=True)
class Tiling:
    """How a scan is laid out; none of it changes a bit."""

    rows_per_thread: int = 2
    rows_per_block: int = 16
    steps: int = 8
    stages: int = 3

    def ring_values(self, padded_head: int) -> int:
        """Float32 values staged in shared memory."""
        return self.stages * self.steps * VECTORS_PER_HEAD * padded_head


TILINGS = (
    (16, Tiling(1, 8, 16, 3)),
    (48, Tiling(2, 16, 8, 3)),
    (96, Tiling(2, 32, 8, 3)),
    (1 << 30, Tiling(4, 32, 8, 3)),
)
"""By the number of states; measured on an H200 (lab/LOG.md)."""


def source() -> str:
    """The CUDA C++ text."""
    parts = (("kittiwake.ops", "base.cu"), ("kittiwake.ops", "heads.cu"), ("kittiwake.ops.wkv7", "wkv7.cu"))
    return "".join(files(package).joinpath(name).read_text(encoding="utf-8") for package, name in parts)


def defines(head_size: int, dtype: torch.dtype, tiling: Tiling) -> tuple[str, ...]:
    """What the source is compiled with."""
    return (
        f"D={head_size}",
        f"DP={padded_head(head_size)}",
        f"DT={DTYPE_CODES[dtype]}",
        f"R={tiling.rows_per_thread}",
        f"ROWS={tiling.rows_per_block}",
        f"STEPS={tiling.steps}",
        f"STAGES={tiling.stages}",
    )


class Wkv7:
    """The kernels for one head size and activation dtype. State [S, H, K, V] float32; see reference.py for the maths.

    ``tilings`` are (states, tiling) pairs: the first whose number of states (heads times sequences) is not exceeded runs
    the scan of a prompt. All give the same bits.
    """

    def __init__(
        self, head_size: int, dtype: torch.dtype, tilings: tuple[tuple[int, Tiling], ...] | None = None
    ) -> None:
        self.head_size, self.padded = head_size, padded_head(head_size)
        self._tilings = tilings or TILINGS
        text, given = source(), defines(head_size, dtype, self._tilings[0][1])
        self._decode = CudaKernel(text, "decode", given)
        self._low: dict[int, CudaKernel] = {}
        self._most_low_bytes = min(MOST_LOW_BYTES, shared_memory_limit() - 32 * 4 * self.padded)  # and what is static
        self._source = (text, given, dtype)
        self._prepare = CudaKernel(text, "prepare", given)
        self._finish = CudaKernel(text, "finish", given)
        self._scans = {
            tiling: CudaKernel(
                text, "scan", defines(head_size, dtype, tiling), shared_bytes=tiling.ring_values(self.padded) * 4
            )
            for _, tiling in self._tilings
        }

    def tiling(self, states: int) -> Tiling:
        """What scans so many heads and sequences."""
        return next((tiling for most, tiling in self._tilings if states <= most), self._tilings[-1][1])

    def made_values(self, rows: int, heads: int) -> int:
        """Float32 values that ``prompt`` needs in ``made`` for so many rows."""
        return rows * heads * VECTORS_PER_HEAD * self.padded

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
        rows, width = out.shape
        self._decode(
            (width // self.head_size, rows, 1),
            2 * self.padded,
            (
                projected,
                low,
                v_first,
                vectors,
                state,
                slots,
                out,
                projected.stride(0),
                low.stride(0),
                width,
                int(first_layer),
                eps,
                BEGIN_NEXT,
            ),
            overlap=overlap,
        )

    def can_take_low(self, depths: Sequence[int], rows: int) -> bool:
        """Whether :meth:`decode_low` serves: few rows, depths its loads can walk, weights that fit shared memory."""
        return (
            rows <= LOW_ROWS
            and self._source[2].itemsize == 2
            and self.head_size % 32 == 0
            and all(depth % 8 == 0 for depth in depths)
            and self._low_bytes(depths) <= self._most_low_bytes
        )

    def _low_bytes(self, depths: Sequence[int]) -> int:
        return sum(self.head_size * (-(-depth // 16) * 16 + 8) for depth in depths) * 2

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
        rows, width = out.shape
        needed = self._low_bytes(depths)
        kernel = self._low.get(needed)
        if kernel is None:
            text, given, _ = self._source
            kernel = self._low[needed] = CudaKernel(text, "decode_low", given, shared_bytes=needed)
        passed = (projected, up, v_first, vectors, state, slots, out, lines, projected.stride(0), width)
        kernel(
            (width // self.head_size, rows, 1),
            2 * self.padded,
            (*passed, int(first_layer), eps, BEGIN_NEXT),
            overlap=overlap,
        )

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
        warps = -(-rows * heads // 8)
        common = (projected.stride(0), low.stride(0), width, int(first_layer), rows, heads)
        self._prepare((warps, 1, 1), 256, (projected, low, v_first, vectors, made, *common), overlap=overlap)
        tile = self.tiling(heads * slots.shape[0])
        blocks = -(-self.head_size // tile.rows_per_block)
        threads = 8 * tile.rows_per_block // tile.rows_per_thread
        self._scans[tile](
            (blocks, heads, slots.shape[0]), threads, (made, y, state, starts, slots, rows), overlap=overlap
        )
        last = (low.stride(0), width, rows, heads, eps)
        self._finish((warps, 1, 1), 256, (low, vectors, made, y, out, *last), overlap=overlap)


@lru_cache(maxsize=8)
def kernels(head_size: int, dtype: torch.dtype) -> Wkv7:
    """The kernels, loaded once a process."""
    return Wkv7(head_size, dtype)
