"""What recurrences with a matrix state share on CUDA: how a scan is laid out, and the kernels that heads.cu is part of.

Decoding takes one launch a layer, prompts three; both have the arithmetic of the same functions, so their bits agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kittiwake.ops.nvrtc import DTYPE_CODES, CudaKernel, padded_head, read_sources

LOW_ROWS = 4
"""Sequences up to which decoding makes the low-rank products itself, where an op says nothing else."""
MOST_HELD = 512
"""Depth of all low-rank products of a head together up to which their weights wait in registers: 4 of a thread for 16 of it."""
BEGIN_NEXT = 2
"""When decoding lets the next kernel begin: 0 when it has ended, 1 at once, 2 when the states are written."""
LOW_BEGIN_NEXT = 3
"""The same where it makes low-rank products itself; 3: when its inputs are there, so that what the next one fetches is on its
way while it computes, and none of that is in front of what it waits for."""


@dataclass(frozen=True)
class Tiling:
    """How a scan is laid out, in columns of the states (value channels) and tokens; none of it changes a bit."""

    columns_per_thread: int = 2
    columns_per_block: int = 16
    steps: int = 8
    stages: int = 3

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 8 * self.columns_per_block // self.columns_per_thread

    def ring_bytes(self, padded_head: int, vectors: int) -> int:
        """Shared memory for the tokens that are staged, each as so many vectors of a head."""
        return self.stages * self.steps * vectors * padded_head * 4


Tilings = Sequence[tuple[int, Tiling]]
"""(states, tiling): the first whose number of states (heads times sequences) is not exceeded runs a scan."""
TILINGS: Tilings = (
    (16, Tiling(1, 8, 16, 3)),
    (48, Tiling(2, 16, 8, 3)),
    (96, Tiling(2, 32, 8, 3)),
    (1 << 30, Tiling(4, 32, 8, 3)),
)
"""Measured on an H200 (lab/LOG.md)."""


def head_source(op: str) -> str:
    """The CUDA C++ text of an op of this kind."""
    return read_sources("base.cu", "heads.cu", f"{op}/{op}.cu")


def head_defines(head_size: int, dtype: torch.dtype, tiling: Tiling) -> tuple[str, ...]:
    """What every such source is compiled with."""
    return (
        f"D={head_size}",
        f"DP={padded_head(head_size)}",
        f"DT={DTYPE_CODES[dtype]}",
        f"R={tiling.columns_per_thread}",
        f"ROWS={tiling.columns_per_block}",
        f"STEPS={tiling.steps}",
        f"STAGES={tiling.stages}",
    )


def choose_tiling(tilings: Tilings, states: int) -> Tiling:
    """What scans so many heads and sequences."""
    return next((tiling for most, tiling in tilings if states <= most), tilings[-1][1])


def padded_depths(depths: Sequence[int]) -> tuple[int, ...]:
    """Depths of low-rank products as the matrix units walk them."""
    return tuple(-(-depth // 16) * 16 for depth in depths)


def holds_low(depths: Sequence[int]) -> bool:
    """Whether a thread's registers have room for its share of the weights of low-rank products of these depths."""
    return sum(padded_depths(depths)) <= MOST_HELD


def low_bytes(head_size: int, depths: Sequence[int]) -> int:
    """Shared memory for the inputs of a head's low-rank products of these depths, and for weights that are not held."""
    padded = padded_depths(depths)
    weights = 0 if holds_low(depths) else sum(head_size * (depth + 8) for depth in padded)
    return (sum(padded) + weights) * 2


def low_defines(depths: Sequence[int]) -> tuple[str, ...]:
    """What a kernel that makes low-rank products of these depths is compiled with."""
    return "LOW_DEPTHS=" + ",".join(map(str, padded_depths(depths))), f"LOW_HELD={int(holds_low(depths))}"


def can_take_low(
    head_size: int, dtype: torch.dtype, depths: Sequence[int], rows: int, most_bytes: int, most_rows: int = LOW_ROWS
) -> bool:
    """Whether decoding can make them itself: few rows, depths its loads can walk, weights that fit shared memory."""
    return (
        rows <= most_rows
        and dtype.itemsize == 2
        and head_size % 32 == 0
        and all(depth % 8 == 0 for depth in depths)
        and low_bytes(head_size, depths) <= most_bytes
    )


class HeadKernels:
    """The kernels of one op, head size and activation dtype. State [S, H, K, V] float32; the maths is in its reference.py.

    All tilings give the same bits.
    """

    def __init__(
        self, op: str, head_size: int, dtype: torch.dtype, vectors: int, tilings: Tilings, own: tuple[str, ...] = ()
    ) -> None:
        """``vectors`` of a head are what a token is staged as, ``own`` what only this op is compiled with."""
        self.head_size, self.padded, self.dtype = head_size, padded_head(head_size), dtype
        self._vectors, self._tilings = vectors, tilings
        self._source, self._defines = head_source(op), (*head_defines(head_size, dtype, tilings[0][1]), *own)
        self._decode, self._prepare, self._finish = (self._kernel(name) for name in ("decode", "prepare", "finish"))
        self._low: dict[tuple[int, ...], CudaKernel] = {}
        self._scans = {
            tiling: CudaKernel(
                self._source,
                "scan",
                (*head_defines(head_size, dtype, tiling), *own),
                shared_bytes=tiling.ring_bytes(self.padded, vectors),
            )
            for _, tiling in tilings
        }

    def made_values(self, heads: int) -> int:
        """Float32 values a row that prompts need in ``made``."""
        return heads * self._vectors * self.padded

    def random_step(
        self, rows: int, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For proofs: random vectors like a layer's [*, C], states and slots of so many sequences, and room [rows, C] for
        what a step makes. The same for the same number of rows."""
        place, width = vectors.device, vectors.shape[1]
        generator = torch.Generator(place).manual_seed(rows)
        state = torch.empty((rows, width // self.head_size, self.head_size, self.head_size), device=place)
        out = torch.full((rows, width), torch.nan, dtype=self.dtype, device=place)
        drawn = [torch.empty_like(like).normal_(generator=generator) for like in (vectors, state)]
        return drawn[0], drawn[1], torch.arange(rows, dtype=torch.int32, device=place), out

    def _kernel(self, name: str, shared_bytes: int = 0, more: tuple[str, ...] = ()) -> CudaKernel:
        return CudaKernel(self._source, name, (*self._defines, *more), shared_bytes=shared_bytes)

    def _launch_decode(
        self, out: torch.Tensor, given: Sequence[Any], overlap: bool, depths: Sequence[int] = ()
    ) -> None:
        """A block a head and row; with ``depths`` the kernel that makes the low-rank products of these depths itself."""
        kernel, begin_next = self._decode, BEGIN_NEXT
        if depths:
            begin_next = LOW_BEGIN_NEXT
            key = tuple(depths)
            if key not in self._low:
                self._low[key] = self._kernel("decode_low", low_bytes(self.head_size, key), low_defines(key))
            kernel = self._low[key]
        rows, width = out.shape
        kernel((width // self.head_size, rows, 1), 2 * self.padded, (*given, begin_next), overlap=overlap)

    def _launch_rows(self, kernel: CudaKernel, out: torch.Tensor, given: Sequence[Any], overlap: bool) -> None:
        """A warp a head and row."""
        rows, width = out.shape
        kernel((-(-rows * (width // self.head_size) // 8), 1, 1), 256, given, overlap=overlap)

    def _launch_scan(self, heads: int, sequences: int, given: Sequence[Any], overlap: bool) -> None:
        """A block some columns of a head and sequence."""
        tile = choose_tiling(self._tilings, heads * sequences)
        blocks = -(-self.head_size // tile.columns_per_block)
        self._scans[tile]((blocks, heads, sequences), tile.threads, given, overlap=overlap)
