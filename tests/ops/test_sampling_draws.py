"""Drawing: the kernel against the reference on random and hostile rows, its noise against known answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kittiwake.ops.sampling import cpu, reference
from kittiwake.ops.sampling.cases import SETTINGS, hostile_rows, not_finite_rows, random_rows
from tests.ops.pieces import THREADS, numba_threads

HOSTILE, NOT_FINITE_ROWS = hostile_rows(), not_finite_rows()
SLACK = 5e-6
"""Share of the probability within which float32 exponentials may move a border, as the reference says."""
settings_of_a_draw = pytest.mark.parametrize("setting", SETTINGS, ids=str)


def draw(logits: np.ndarray, setting: tuple[float, int, float], seed: int, position: int) -> int:
    u = cpu.uniform(np.uint64(seed), np.uint64(position))
    return int(cpu.draw(logits, *setting, 0.0, False, u))


def is_near_a_border(logits: np.ndarray, setting: tuple[float, int, float], u: float) -> bool:
    """Whether rounding may decide: u close to a step of the distribution, or top_p close to a step of the mass."""
    temperature, top_k, top_p = setting
    if temperature == 0:
        return False
    scaled = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    steps = np.cumsum(np.where(reference.kept(logits, *setting), scaled, 0))
    distances = np.abs(steps[:-1] / steps[-1] - u)
    if top_p < 1:
        mass = np.cumsum(np.sort(np.where(reference.kept(logits, temperature, top_k, 1.0), scaled, 0))[::-1])
        distances = np.append(distances, np.abs(mass[:-1] / mass[-1] - top_p))
    return bool(distances.min(initial=1) < SLACK)


# Noise


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """All four words of Philox4x32-10, written from the paper with arbitrary precision."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_has_the_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], answer: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32(counter, key)) == answer


EDGES = (0, 1, 2**32 - 1, 2**32, 2**63 - 1)


@pytest.mark.parametrize("seed", EDGES)
@pytest.mark.parametrize("position", EDGES)
def test_noise_is_philox_keyed_by_seed_and_counted_by_position(seed: int, position: int) -> None:
    words = philox4x32((position % 2**32, position >> 32, 0, 0), (seed % 2**32, seed >> 32))
    assert reference.philox(seed, position) == words[:2]
    exact = (words[0] >> 5 << 26 | words[1] >> 6) / 2**53
    assert cpu.uniform(np.uint64(seed), np.uint64(position)) == reference.uniform(seed, position) == exact


def test_noise_of_the_zero_counter_is_the_known_answer() -> None:
    assert reference.philox(0, 0) == (0x6627E8D5, 0xE169C58D)


def test_noise_lies_in_the_unit_interval_evenly() -> None:
    found = np.array([cpu.uniform(np.uint64(7), np.uint64(position)) for position in range(20_000)])
    assert found.min() >= 0 and found.max() < 1
    counts, _ = np.histogram(found, bins=50, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 95  # chi-square, 49 degrees: 1 in 10,000
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03


# Draws


def count_differing(logits: np.ndarray, setting: tuple[float, int, float], keys: list[tuple[int, int]]) -> int:
    """Draws, by (seed, position), that differ from the reference's; rounding may explain some, nothing else may."""
    differing = 0
    for seed, position in keys:
        if draw(logits, setting, seed, position) != reference.draw(logits, *setting, seed, position):
            assert is_near_a_border(logits, setting, reference.uniform(seed, position)), (seed, position)
            differing += 1
    return differing


@settings_of_a_draw
@pytest.mark.parametrize("vocab", [1, 2, 63, 65, 257, 4099])
def test_random_rows_give_the_token_of_the_reference(vocab: int, setting: tuple[float, int, float]) -> None:
    differing = 0
    for row, logits in enumerate(random_rows(12, vocab)):
        differing += count_differing(logits, setting, [(row, 5), (3, row), (2**63 - 1 - row, 10**6)])
    assert differing <= 1


@settings_of_a_draw
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows_give_the_token_of_the_reference(name: str, setting: tuple[float, int, float]) -> None:
    assert count_differing(HOSTILE[name], setting, [(11, position) for position in range(40)]) == 0


@settings_of_a_draw
@pytest.mark.parametrize("name", NOT_FINITE_ROWS)
def test_rows_that_are_not_finite_give_nothing(name: str, setting: tuple[float, int, float]) -> None:
    logits = NOT_FINITE_ROWS[name]
    expected = cpu.NOTHING_LEFT if (logits == -np.inf).all() else cpu.NOT_FINITE
    assert draw(logits, setting, 0, 0) == reference.draw(logits, *setting, 0, 0) == expected


def test_every_kept_token_is_drawn_and_no_other() -> None:
    """Ties at the border of top_k are kept, all of them; so are those at the border of top_p."""
    logits = HOSTILE["ties at every border"]
    for setting, likeliest in (((1.0, 5, 1.0), 1.0), ((1.0, 0, 0.1), 2.0), ((1.0, 2, 1.0), 2.0), ((1.0, 4, 0.5), 1.0)):
        found = {draw(logits, setting, 1, position) for position in range(400)}
        assert found == set(np.flatnonzero(logits >= likeliest).tolist()), setting


@pytest.mark.parametrize("setting", [(1.0, 0, 1e-9), (0.7, 1, 1.0), (1.0, 1, 0.5), (1e-5, 0, 1.0)], ids=str)
def test_the_narrowest_settings_are_greedy(setting: tuple[float, int, float]) -> None:
    for logits in random_rows(6, 101):
        assert {draw(logits, setting, 4, position) for position in range(30)} == {int(logits.argmax())}


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.array([-1.0, 3.0, 3.0, -np.inf, 3.0], dtype=np.float32)
    assert draw(logits, (0.0, 0, 1.0), 9, 9) == 1


def test_the_borders_of_the_distribution_belong_to_the_token_above() -> None:
    logits = np.zeros(4, np.float32)
    for u, token in ((0.0, 0), (np.nextafter(0.25, 0), 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2**-53, 3)):
        assert cpu.draw(logits, 1.0, 0, 1.0, 0.0, False, u) == token


def test_banned_tokens_are_never_drawn() -> None:
    logits = HOSTILE["most are banned"]
    allowed = set(np.flatnonzero(logits > -np.inf).tolist())
    for setting in SETTINGS[1:]:
        assert {draw(logits, setting, 2, position) for position in range(200)} <= allowed


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_follow_the_distribution(along: str) -> None:
    logits = np.linspace(0, 3, 16, dtype=np.float32)[np.random.default_rng(1).permutation(16)]
    probs = np.exp(logits.astype(np.float64) / 1.5)
    probs /= probs.sum()
    setting, count = (1.5, 0, 1.0), 20_000
    pairs = ((5, i) for i in range(count)) if along == "positions" else ((i, 5) for i in range(count))
    found = Counter(draw(logits, setting, seed, position) for seed, position in pairs)
    expected = probs * count
    chi_square = sum((found[token] - expected[token]) ** 2 / expected[token] for token in range(16))
    assert chi_square < 44.3  # 15 degrees: 1 in 10,000


def test_a_filtered_draw_follows_what_is_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
    found = Counter(draw(logits, (1.0, 0, 0.6), 8, position) for position in range(10_000))
    assert set(found) == {0, 1}
    assert abs(found[0] / 10_000 - 4 / 7) < 0.02


# Rows of a batch


def draw_rows(logits: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Every row with settings, seed and position of its own, in this order; tokens by the rows' own numbers."""
    chosen = [SETTINGS[row % len(SETTINGS)] for row in order]
    out = np.full(len(order), -7)
    temperatures, top_ks, top_ps = (np.array(column) for column in zip(*chosen, strict=True))
    seeds, positions = order.astype(np.uint64) * np.uint64(3), order.astype(np.uint64) + np.uint64(100)
    no_min_p, in_order = np.zeros(len(order)), np.zeros(len(order), dtype=bool)
    cpu.draw_rows(logits[order], temperatures, top_ks, top_ps, no_min_p, in_order, seeds, positions, out)
    tokens = np.empty(len(logits), dtype=np.int64)
    tokens[order] = out
    return tokens


def test_a_row_draws_the_same_wherever_it_stands_and_whatever_stands_beside_it() -> None:
    logits = random_rows(41, 131)
    logits[7], logits[20] = np.nan, -np.inf
    alone = np.array([draw_rows(logits, np.array([row]))[row] for row in range(41)])
    assert (alone == cpu.NOT_FINITE).nonzero()[0].tolist() == [7]
    assert (alone == cpu.NOTHING_LEFT).nonzero()[0].tolist() == [20]
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(41)
        for threads in THREADS:
            with numba_threads(threads):
                assert np.array_equal(draw_rows(logits, order), alone)


def test_drawing_writes_nothing_into_the_logits() -> None:
    logits = random_rows(5, 64)
    before = logits.copy()
    draw_rows(logits, np.arange(5))
    assert np.array_equal(logits, before)
