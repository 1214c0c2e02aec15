"""Options of an engine, each default written once; the comment after a field is its help text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kittiwake.errors import UsageError

DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cpu")
MAX_ROWS = 2**31 - 1
_MOST = {"threads": 512, "slots": 1 << 20}


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. None of these changes a bit of any answer, except ``dtype`` where it rounds weights, and
    ``group_norm_eps`` and ``rescale_every``, which make it another model."""

    device: str = "auto"
    """auto or cpu"""
    dtype: str = "auto"
    """how weights are kept: auto (as stored), fp32, or bf16 (fp32 arithmetic on widened weights)"""
    threads: int = 0
    """CPU threads; 0 takes one a core"""
    slots: int = 64
    """sequences that can be in flight at once; each costs one state"""
    prefill_chunk: int = 0
    """most prompt tokens of one sequence in a step; 0 sets no limit"""
    max_rows: int = 2048
    """most rows in one step, decode rows and prompt tokens together; bounds the workspace"""
    group_norm_eps: float | None = None
    """epsilon of the group norm, instead of the model's own"""
    rescale_every: int | None = None
    """RWKV-4: norms as in a stream halved every so many layers, as transformers computes; 0 is exact, the default"""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name, low in (("threads", 0), ("slots", 1), ("prefill_chunk", 0), ("max_rows", 1)):
            value = getattr(self, name)
            most = _MOST.get(name, MAX_ROWS)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
                raise UsageError(f"{name} must be a whole number from {low} to {most}, got {value!r}")
        eps = self.group_norm_eps
        is_number = isinstance(eps, (int, float)) and not isinstance(eps, bool)
        if eps is not None and not (is_number and math.isfinite(eps) and 0 < eps < 1):
            raise UsageError(f"group_norm_eps must be a number above 0 and below 1, got {eps!r}")
        every = self.rescale_every
        if every is not None and (type(every) is not int or not 0 <= every <= MAX_ROWS):
            raise UsageError(f"rescale_every must be a whole number of layers of at least 0, got {every!r}")
