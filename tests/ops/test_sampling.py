from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kittiwake.ops.sampling import reference
from kittiwake.ops.sampling.cpu import NOT_FINITE, NOTHING_LEFT, adjust, draw, draw_rows, uniform

MARGIN = 1e-5
"""Float32 and float64 may disagree about a border this close; hypothesis leaves such cases out."""


class Filters(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters_first: bool = False


def _draw(logits: np.ndarray, filters: Filters, u: float) -> int:
    return int(draw(logits, *filters, u))


def _kept(logits: np.ndarray, filters: Filters) -> np.ndarray:
    return reference.kept(
        logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p, filters.filters_first
    )


def _shares(logits: np.ndarray, filters: Filters) -> np.ndarray:
    """Borders of each token's share of [0, 1), [vocab + 1], by the reference."""
    gaps = (logits.astype(np.float64) - logits.max()) / filters.temperature
    probs = np.where(_kept(logits, filters), np.exp(gaps), 0.0)
    return np.concatenate([[0.0], np.cumsum(probs) / probs.sum()])


def _is_clear(logits: np.ndarray, filters: Filters) -> bool:
    """Whether the same tokens are kept when every filter moves by a margin."""
    moved = [
        filters._replace(
            top_p=min(max(filters.top_p + sign * MARGIN, MARGIN), 1.0) if filters.top_p < 1 else 1.0,
            min_p=min(max(filters.min_p * (1 + sign * MARGIN), 0.0), 1.0),
        )
        for sign in (-1, 1)
    ]
    return all(np.array_equal(_kept(logits, filters), _kept(logits, other)) for other in moved)


# Quarters make ties common; minus infinity is a banned token.
LOGITS = st.lists(st.one_of(st.integers(-16, 16).map(lambda n: n / 4), st.just(-np.inf)), min_size=1, max_size=12).map(
    lambda values: np.array(values, dtype=np.float32)
)
FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from((0.3, 0.5, 1.0, 1.7)),
    top_k=st.integers(0, 13),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    filters_first=st.booleans(),
)


@given(LOGITS, FILTERS)
@settings(max_examples=300, deadline=None)
def test_every_token_has_the_share_the_reference_gives_it(logits: np.ndarray, filters: Filters) -> None:
    assume(bool((logits > -np.inf).any()))
    assume(_is_clear(logits, filters))
    shares = _shares(logits, filters)
    for token, (low, high) in enumerate(pairwise(shares)):
        if high - low > 3 * MARGIN:
            for u in (low + MARGIN, (low + high) / 2, high - MARGIN):
                assert _draw(logits, filters, u) == token


@given(LOGITS, FILTERS, st.floats(0.0, 1.0, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_a_banned_token_is_never_drawn(logits: np.ndarray, filters: Filters, u: float) -> None:
    token = _draw(logits, filters, u)
    if (logits > -np.inf).any():
        assert logits[token] > -np.inf
    else:
        assert token == NOTHING_LEFT


def test_min_p_keeps_the_border_and_its_ties() -> None:
    logits = np.log(np.array([8.0, 2.0, 4.0, 2.0, 1.0], dtype=np.float32))
    shares = _shares(logits, Filters(min_p=0.249))
    assert (np.diff(shares) > 0).tolist() == [True, True, True, True, False]
    drawn = {_draw(logits, Filters(min_p=0.249), u) for u in np.linspace(0, 0.999, 50)}
    assert drawn == {0, 1, 2, 3}
    ties = np.array([1.0, 3.0, 3.0, 2.0], dtype=np.float32)
    assert {_draw(ties, Filters(min_p=1.0), u) for u in np.linspace(0, 0.999, 20)} == {1, 2}


def test_order_of_temperature_and_filters() -> None:
    """0.6, 0.3, 0.1: at temperature 2 they are 0.473, 0.334, 0.193, so 0.6 of the mass is one token or two."""
    logits = np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32))
    everywhere = np.linspace(0, 0.999, 200)
    first = Filters(temperature=2.0, top_p=0.59, filters_first=True)
    assert {_draw(logits, first, u) for u in everywhere} == {0}
    assert {_draw(logits, first._replace(filters_first=False), u) for u in everywhere} == {0, 1}
    least = Filters(temperature=2.0, min_p=0.45, filters_first=True)  # 0.3 / 0.6 passes, 0.1 / 0.6 does not
    assert {_draw(logits, least, u) for u in everywhere} == {0, 1}
    assert {_draw(logits, least._replace(filters_first=False, min_p=0.4), u) for u in everywhere} == {0, 1, 2}


def test_filters_first_takes_top_p_of_all_and_the_standard_order_of_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    everywhere = np.linspace(0, 0.999, 200)
    both = Filters(top_k=2, top_p=0.55)  # 0.4 / 0.7 is enough of what two leave, 0.4 is not enough of all
    assert {_draw(logits, both, u) for u in everywhere} == {0}
    assert {_draw(logits, both._replace(filters_first=True), u) for u in everywhere} == {0, 1}


def test_filters_first_is_the_convention_of_rwkv_tools() -> None:
    """Softmax, zero below the cutoff where the sorted sum reaches top_p, zero below the k likeliest, p ** (1 / T)."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        logits = (rng.standard_normal(40) * 2).astype(np.float32)
        filters = Filters(float(rng.uniform(0.4, 2)), int(rng.integers(1, 30)), float(rng.uniform(0.1, 0.95)), 0, True)
        if not _is_clear(logits, filters):
            continue
        probs = np.exp(logits.astype(np.float64) - logits.max())
        probs /= probs.sum()
        down = np.sort(probs)[::-1]
        cutoff = down[np.argmax(np.cumsum(down) >= filters.top_p)]
        probs[(probs < cutoff) | (probs < down[filters.top_k - 1])] = 0
        powered = probs ** (1 / filters.temperature)
        np.testing.assert_allclose(np.diff(_shares(logits, filters)), powered / powered.sum(), atol=1e-12)


@pytest.mark.parametrize("filters_first", [False, True])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_stay_sane(temperature: float, filters_first: bool) -> None:
    logits = np.array([3.0, 1.0, 3.0, -3e38, -np.inf], dtype=np.float32)
    filters = Filters(temperature, 0, 0.9, 0.1, filters_first)
    assert {_draw(logits, filters, u) for u in np.linspace(0, 0.999, 30)} <= {0, 1, 2, 3}
    if temperature < 1:
        assert {_draw(logits, filters, u) for u in np.linspace(0, 0.999, 30)} == {0, 2}


@pytest.mark.parametrize("filters", [Filters(), Filters(0.0), Filters(0.5, 3, 0.5, 0.5, True)])
def test_rows_nothing_can_be_drawn_from(filters: Filters) -> None:
    for bad in (np.nan, np.inf):
        assert _draw(np.array([1.0, bad, 2.0], dtype=np.float32), filters, 0.5) == NOT_FINITE
        assert _draw(np.array([bad], dtype=np.float32), filters, 0.5) == NOT_FINITE
    assert _draw(np.full(3, -np.inf, dtype=np.float32), filters, 0.5) == NOTHING_LEFT
    assert _draw(np.array([-2.0], dtype=np.float32), filters, 0.5) == 0


def test_greedy_takes_the_lowest_of_ties() -> None:
    assert _draw(np.array([1.0, 5.0, 5.0], dtype=np.float32), Filters(0.0), 0.9) == 1


def test_frequencies_are_the_distribution() -> None:
    """Chi-squared over 20,000 positions, in both orders."""
    logits = np.log(np.array([0.02, 0.3, 0.08, 0.25, 0.35], dtype=np.float32))
    count = 20_000
    for filters in (Filters(0.8, min_p=0.1), Filters(1.4, 4, 0.8, 0.0, True), Filters(1.0)):
        out = np.empty(count, dtype=np.int64)
        draw_rows(
            np.tile(logits, (count, 1)),
            *(np.full(count, value) for value in filters),
            np.full(count, 11, dtype=np.uint64),
            np.arange(count, dtype=np.uint64),
            out,
        )
        expected = np.diff(_shares(logits, filters)) * count
        found = np.bincount(out, minlength=len(logits))
        assert (found[expected == 0] == 0).all()
        some = expected > 0
        chi_squared = float(((found - expected)[some] ** 2 / expected[some]).sum())
        assert chi_squared < 23.5  # four degrees of freedom: one in 10,000


def test_noise_is_philox() -> None:
    """Known answers of Philox4x32-10, and the reference on random keys."""
    assert reference.philox(0, 0) == (0x6627E8D5, 0xE169C58D)
    assert reference.philox(2**64 - 1, 2**64 - 1) != reference.philox(0, 0)
    rng = np.random.default_rng(2)
    for seed, position in rng.integers(0, 2**63, size=(50, 2)).tolist():
        assert uniform(np.uint64(seed), np.uint64(position)) == reference.uniform(seed, position)


def test_derived_seeds_are_distinct_and_fixed() -> None:
    assert [reference.derived_seed(9, 0), reference.derived_seed(0, 0)] == [9, 0]
    seeds = {reference.derived_seed(seed, index) for seed in range(100) for index in range(1, 100)}
    assert len(seeds) == 9900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert reference.derived_seed(0, 1) == 8784053537116834823  # what was drawn once must be drawn again


TOKENS = st.lists(st.integers(0, 9), max_size=12)


@given(
    logits=st.lists(
        st.one_of(st.floats(-100, 100, width=32), st.sampled_from((0.0, -0.0, -np.inf))), min_size=10, max_size=10
    ),
    bias=st.dictionaries(st.integers(0, 9), st.one_of(st.floats(-100, 100), st.just(-np.inf)), max_size=10),
    given_tokens=TOKENS,
    drawn=TOKENS,
    repetition=st.floats(0.01, 100),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_sparse_adjustments_are_the_reference_bit_for_bit_in_any_order(
    logits: list[float],
    bias: dict[int, float],
    given_tokens: list[int],
    drawn: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    order: object,
) -> None:
    row = np.array(logits, dtype=np.float32)
    expected = reference.adjusted(row, bias, given_tokens, drawn, repetition, presence, frequency)
    ids = list(set(bias) | set(given_tokens) | set(drawn))
    order.shuffle(ids)  # type: ignore[attr-defined]
    spare = 2  # entries beyond size are not looked at
    adjust(
        row,
        np.array([*ids, *[0] * spare], dtype=np.int64),
        np.array([*(bias.get(token, 0.0) for token in ids), *[1.0] * spare]),
        np.array([*(token in given_tokens for token in ids), *[True] * spare]),
        np.array([*(drawn.count(token) for token in ids), *[3] * spare], dtype=np.int64),
        len(ids),
        repetition,
        presence,
        frequency,
    )
    # the sign of a zero may differ, which no draw sees
    assert (row + np.float32(0)).tobytes() == (expected + np.float32(0)).tobytes()


def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -2.0, 4.0, 1.0, 0.5], dtype=np.float32)
    found = reference.adjusted(logits, {2: 2.0, 4: -np.inf}, [0, 0], [1, 2, 2], 2.0, 0.5, 0.25)
    # 0 given twice: halved once · 1 drawn once: -2 * 2 - 0.75 · 2 drawn twice: (4 + 2) / 2 - 1 · 3 untouched · 4 banned
    assert found.tolist() == [1.0, -4.75, 2.0, 1.0, -np.inf]
