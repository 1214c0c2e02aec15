"""Picks by rule: for tests on a card, and scripts that time something else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kittiwake.layers.cuda_linear import ROW_LIMITS, Choice, CudaGroup, Picks
from kittiwake.ops.matmul.cuda import Narrow


def untuned(same: Sequence[CudaGroup], out_dtype: torch.dtype) -> Picks:
    """Instead of timing products: a kind for each row count by rule, the narrow kernel, tiles, the library."""
    group, choices = same[0], []
    for most in ROW_LIMITS:
        choice = Choice("narrow", Narrow()) if most <= 8 else Choice("library")
        if 8 < most <= 64 or not group.can_run(choice, out_dtype):
            choice = group.in_order(most)
        choices.append(choice)
    return Picks(tuple(choices), "not measured")
