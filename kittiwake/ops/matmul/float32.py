"""Products in float32 on CUDA: the kernel of float32.cu, for any number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kittiwake.ops.nvrtc import CudaKernel, read_sources

BEGIN_NEXT = {16: 1, 1 << 30: 0}
"""When a kernel lets the next begin, by the most rows: 0 when it has ended, 1 at once, 2 when its sums are done.

Few rows wait for memory, which the next one's weights may use as well. Many keep the multiply-adds busy, and blocks that come
early are dealt out to what this one's leave free, unevenly.
"""


@dataclass(frozen=True)
class Plain:
    """How a float32 product is laid out; none of it changes a bit.

    A block makes ``bm`` rows of ``bn`` columns, a thread ``tm`` of the rows and ``tn`` of the columns. A warp is 4 threads
    by 8, so ``bm / tm`` is a multiple of 4 and ``bn / tn`` one of 8. Of the threads and ``bk / 4`` one divides the other.
    """

    bm: int = 32
    bn: int = 32
    tm: int = 4
    tn: int = 2
    bk: int = 32
    stages: int = 4

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.bm // self.tm) * (self.bn // self.tn)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.stages * (self.bm + self.bn) * (self.bk + 4) * 4


def source() -> str:
    """The CUDA C++ text."""
    return read_sources("base.cu", "matmul/narrow.cu", "matmul/float32.cu")


def defines(layout: Plain) -> tuple[str, ...]:
    """What the source is compiled with."""
    sizes = {
        "BM": layout.bm,
        "BN": layout.bn,
        "TM": layout.tm,
        "TN": layout.tn,
        "BK": layout.bk,
        "STAGES": layout.stages,
    }
    return ("DT=0", *(f"{name}={size}" for name, size in sizes.items()))


@lru_cache(maxsize=64)
def _product(layout: Plain) -> CudaKernel:
    return CudaKernel(source(), "product_float32", defines(layout), shared_bytes=layout.shared_bytes)


def float32_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    lines: torch.Tensor,
    activations: torch.Tensor,
    layout: Plain,
    *,
    overlap: bool,
) -> None:
    """x [inputs, M, *] or [M, *] → out [M, *]; weights and their table as ``ops/matmul/triton.py`` describes them.

    The columns of a block must be of one product: ``bn`` divides the padded columns of each.
    """
    rows = out.shape[0]
    begin_next = next(when for most, when in BEGIN_NEXT.items() if rows <= most)
    grid = (lines.shape[0] * 32 // layout.bn, -(-rows // layout.bm), 1)
    group = x.stride(0) if x.dim() == 3 else 0
    given = (x, weight, out, lines, activations, rows, x.stride(-2), group, out.stride(0), begin_next)
    _product(layout)(grid, layout.threads, given, overlap=overlap)
