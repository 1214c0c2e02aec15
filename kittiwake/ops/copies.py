"""Few numbers between pinned memory and a card by a kernel, which begins sooner than a copy by the card's copy engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from kittiwake.ops.nvrtc import CudaKernel, read_sources

MOST_BYTES = 16 * 1024
"""Longer copies are left to the copy engine."""


@lru_cache(maxsize=1)
def _kernel() -> CudaKernel:
    return CudaKernel(read_sources("base.cu", "copies.cu"), "copy_numbers", ("DT=0",))


def prepared_copy(to: torch.Tensor, given: torch.Tensor) -> Callable[[], object]:
    """What enqueues the copy of ``given`` to ``to`` on torch's current stream, over and over.

    Both contiguous, of one type of 4 or 8 bytes and one size; one on the current card, the other in pinned memory. They
    are kept alive. On the CPU the copy is made at once.
    """
    if not (to.is_cuda or given.is_cuda) or to.nbytes > MOST_BYTES:
        return lambda: to.copy_(given, non_blocking=True)
    assert to.dtype == given.dtype and to.shape == given.shape and to.nbytes % 4 == 0
    return _kernel().prepared((1, 1, 1), 256, (to, given, to.nbytes // 4))
