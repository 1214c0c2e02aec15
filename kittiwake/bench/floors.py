"""What a device allows at best: its measured rates, and what a case must move and compute.

A forward reads every product weight once, reads and writes each sequence's state once, and multiplies every row with
every weight, the head's for the last row of each sequence only. The floor is the larger of the two times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kittiwake.bench.timing import Effort, measure_ms, median_ms, timed
from kittiwake.families.contract import Model

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ceilings:
    """Rates measured on this device, now."""

    copy_bytes_s: float
    """Bytes read and bytes written of a copy from device memory to device memory."""
    flop_s: float
    """A wide product in the weights' type, a multiplication and an addition counted as two."""
    product: str
    """What product that was."""

    @property
    def line(self) -> str:
        """The rates in a few words."""
        return f"copy {self.copy_bytes_s / 1e12:.2f} TB/s (read + written), {self.product} {self.flop_s / 1e12:.0f} TFLOP/s"


@dataclass(frozen=True)
class Demand:
    """What a case cannot do without."""

    nbytes: int
    flops: int

    def floor(self, ceilings: Ceilings) -> tuple[float, str]:
        """(ms, "bytes" or "operations")."""
        move_ms = 1000 * self.nbytes / ceilings.copy_bytes_s
        compute_ms = 1000 * self.flops / ceilings.flop_s
        return (move_ms, "bytes") if move_ms >= compute_ms else (compute_ms, "operations")


def demand(model: Model, dtype: str, batch: int, tokens: int) -> Demand:
    """The demand of ``batch`` sequences of ``tokens`` tokens, logits for the last row of each."""
    weights = model.weight_bytes // TORCH_DTYPES[dtype].itemsize
    head = model.config.width * model.config.vocab_size
    return Demand(
        nbytes=model.weight_bytes + 2 * batch * model.state_spec.slot_bytes,
        flops=2 * batch * (tokens * (weights - head) + head),
    )


def measure_ceilings(device: str, dtype: str, *, copy_bytes: int = 1 << 30, size: int = 8192) -> Ceilings:
    """Measure both rates: a copy of ``copy_bytes``, and a product of ``size`` × ``size`` random matrices.

    A card that is nearly full copies less. What was taken of it is given back.
    """
    if device != "cpu":
        copy_bytes = max(1 << 20, min(copy_bytes, torch.cuda.mem_get_info()[0] // 4))
    product_ms = _product_ms(device, TORCH_DTYPES[dtype], size)
    copy_s, product_s = _copy_ms(device, copy_bytes) / 1000, product_ms / 1000
    if device != "cpu":
        torch.cuda.empty_cache()
    return Ceilings(2 * (copy_bytes // 4 * 4) / copy_s, 2 * size**3 / product_s, f"{dtype} {size}³ product")


def _copy_ms(device: str, nbytes: int) -> float:
    source = torch.randint(0, 1 << 20, (nbytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return _median_ms(device, lambda: target.copy_(source))


def _product_ms(device: str, kind: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(kind) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=kind)
    return _median_ms(device, lambda: torch.mm(left, right, out=out))


def _median_ms(device: str, work: Callable[[], object]) -> float:
    """Median of several runs after warming up; ten a turn, so that what one launch costs does not count."""
    turns = 10 if device != "cpu" else 1

    def run() -> None:
        for _ in range(turns):
            work()
        if device != "cpu":
            torch.cuda.synchronize()

    run()
    return median_ms(measure_ms(timed(run), Effort(3, 10, 0.2))) / turns
