"""From logits to tokens: every row by its own parameters, position and bans."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.engine.request import SamplingParams
from kittiwake.engine.sampler import Draw
from kittiwake.engine.sampler import sample as sample_rows
from kittiwake.ops.sampling import reference
from kittiwake.ops.sampling.cases import random_rows

GREEDY = SamplingParams(temperature=0.0)


def sample(logits: np.ndarray, draws: list[Draw]) -> list[int | None]:
    """The tokens alone."""
    return [drawn.token for drawn in sample_rows(logits, draws)]


def test_each_row_is_drawn_as_the_reference_draws_it() -> None:
    logits = random_rows(6, 97)
    params = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2**63 - 1, temperature=0.5),
        SamplingParams(seed=3, top_k=4),
        SamplingParams(seed=4, top_p=0.7, temperature=1.2),
        SamplingParams(seed=5, top_k=50, top_p=0.9),
    ]
    for position in (0, 1, 2**40):
        found = sample(logits.copy(), [Draw(one, position) for one in params])
        expected = [
            reference.draw(row, one.temperature, one.top_k, one.top_p, one.seed, position)
            for row, one in zip(logits, params, strict=True)
        ]
        assert found == expected
        assert all(type(token) is int for token in found)


def test_seed_and_position_both_change_the_draw() -> None:
    logits = np.zeros((1, 1000), np.float32)
    found = {sample(logits.copy(), [Draw(SamplingParams(seed=s), p)])[0] for s in range(5) for p in range(5)}
    assert len(found) > 20


def test_bans_hold_for_their_row_only() -> None:
    logits = np.tile(np.array([0, 3, 2, 1], np.float32), (3, 1))
    assert sample(logits, [Draw(GREEDY, 0), Draw(GREEDY, 0, (1,)), Draw(GREEDY, 0, [1, 2])]) == [1, 2, 3]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_a_row_without_a_token_gives_none_and_leaves_the_others(params: SamplingParams) -> None:
    logits = np.tile(np.array([9, -90, -90], np.float32), (4, 1))
    logits[1, 2] = np.nan
    logits[2, 0] = np.inf
    draws = [Draw(params, 0), Draw(params, 0), Draw(params, 0), Draw(params, 0, (0, 1, 2))]
    assert sample(logits, draws) == [0, None, None, None]
