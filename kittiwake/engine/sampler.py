"""Logits → token ids. Apart from the forward, and reading nothing but its row, its parameters and its position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kittiwake.engine.request import SamplingParams
from kittiwake.ops.sampling.cpu import NOT_FINITE, draw_rows


@dataclass(frozen=True)
class Draw:
    """What one row is drawn with: its parameters, the position of the token to come, ids it may not give."""

    params: SamplingParams
    position: int
    banned: Sequence[int] = ()


def sample(logits: np.ndarray, draws: Sequence[Draw]) -> list[int | None]:
    """Token ids of float32 logits [W, vocab], written to where ids are banned; None for a row that is not finite.

    ``seed`` and ``position`` key the noise, so a row's token depends on nothing beside it.
    """
    for row, draw in zip(logits, draws, strict=True):
        if draw.banned:
            row[list(draw.banned)] = -np.inf
    out = np.empty(len(draws), dtype=np.int64)
    draw_rows(
        logits,
        np.array([d.params.temperature for d in draws], dtype=np.float64),
        np.array([d.params.top_k for d in draws], dtype=np.int64),
        np.array([d.params.top_p for d in draws], dtype=np.float64),
        np.array([d.params.seed for d in draws], dtype=np.uint64),
        np.array([d.position for d in draws], dtype=np.uint64),
        out,
    )
    return [None if token == NOT_FINITE else int(token) for token in out]


def warm_up() -> None:
    """Compile the sampling kernels, or fetch them from the cache."""
    sample(np.zeros((1, 2), dtype=np.float32), [Draw(SamplingParams(), 0)])
