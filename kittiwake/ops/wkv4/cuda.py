"""WKV-4 on CUDA: the kernels of wkv4.cu. A layer's time mix takes one launch, of a prompt as of a decode step."""

from __future__ import annotations

from functools import lru_cache

import torch

from kittiwake.ops.nvrtc import DTYPE_CODES, CudaKernel, read_sources

WARPS, TOKENS = 8, 8
"""Warps of a prompt's block, and tokens that each takes at a time."""
DECODE_CHANNELS, SCAN_CHANNELS = 128, 32
"""Channels of a block; of a prompt's, one a lane."""


def source() -> str:
    """The CUDA C++ text."""
    return read_sources("base.cu", "wkv4/wkv4.cu")


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """What the source is compiled with."""
    return (f"DT={DTYPE_CODES[dtype]}", f"WARPS={WARPS}", f"TOKENS={TOKENS}")


class Wkv4:
    """The kernels for one activation dtype. States (num, den, top), each [S, C] float32; see reference.py for the maths."""

    def __init__(self, dtype: torch.dtype) -> None:
        text, given = source(), defines(dtype)
        self._decode = CudaKernel(text, "decode", given)
        self._scan = CudaKernel(text, "scan", given)

    def decode(
        self,
        projected: torch.Tensor,
        vectors: torch.Tensor,
        sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        """One row a sequence: projected [B, r|k|v], vectors [2, C], slots int32 [B] → out [B, C], the states moved on."""
        rows, width = out.shape
        grid = (-(-width // DECODE_CHANNELS), rows, 1)
        given = (projected, vectors, *sums, slots, out, projected.stride(0), out.stride(0), width)
        self._decode(grid, DECODE_CHANNELS, given, overlap=overlap)

    def prompt(
        self,
        projected: torch.Tensor,
        vectors: torch.Tensor,
        sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        starts: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        """Any rows of any sequences: starts int32 [B + 1]."""
        width = out.shape[1]
        grid = (-(-width // SCAN_CHANNELS), slots.shape[0], 1)
        given = (projected, vectors, *sums, starts, slots, out, projected.stride(0), out.stride(0), width)
        self._scan(grid, 32 * WARPS, given, overlap=overlap)


@lru_cache(maxsize=4)
def kernels(dtype: torch.dtype) -> Wkv4:
    """The kernels, loaded once a process."""
    return Wkv4(dtype)
