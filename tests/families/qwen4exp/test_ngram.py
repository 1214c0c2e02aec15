"""The constants of the released model's n-gram hash, its published rows, and the history a sequence carries."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kittiwake.errors import ModelError
from kittiwake.families.qwen4exp.ngram import NgramHash, next_history

EOS = 248_044
NONE = np.full((1, 2), -1, dtype=np.int64)


def released() -> NgramHash:
    return NgramHash.derive(248_320, 3, 8, 20_000_000, 0, 1234, EOS)


def rows_of(hashing: NgramHash, ids: list[int], history: np.ndarray = NONE) -> np.ndarray:
    return hashing.rows(np.array(ids), np.array([0, len(ids)]), history)


def test_the_released_constants() -> None:
    hashing = released()
    assert hashing.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert hashing.head_sizes[:3] == (20000003, 20000023, 20000033) and hashing.head_sizes[-1] == 20000171
    assert hashing.heads == 16 and len(hashing.multipliers) == 3
    assert hashing.total_rows() == 320_001_446 and hashing.total_rows(128) == 320_001_536
    assert 248_319 * max(hashing.multipliers) < 1 << 63


def test_the_published_rows() -> None:
    rows = rows_of(released(), [151644, 872, 198, EOS, 9707, 11])
    assert rows.shape == (6, 16)
    assert rows[0, :3].tolist() == [9213577, 25503567, 59963735]
    assert rows[4, [0, 1, 2, 15]].tolist() == [16410909, 39682429, 55103279, 300984276]  # after the end token


def test_the_token_after_an_end_reads_what_it_reads_at_the_very_start() -> None:
    hashing = released()
    assert np.array_equal(rows_of(hashing, [5, 6, EOS, 9707])[3], rows_of(hashing, [9707])[0])


@pytest.mark.parametrize("base", [1, 2, 50, 2000])
def test_small_bases_give_primes_in_order_layer_after_layer(base: int) -> None:
    layers = [NgramHash.derive(100, 3, 4, base, rank, 1234, 0) for rank in range(2)]
    sizes = layers[0].head_sizes + layers[1].head_sizes
    assert all(size >= base and all(size % d for d in range(2, size)) for size in sizes)
    assert all(a < b and not any(all(n % d for d in range(2, n)) for n in range(a + 1, b)) for a, b in pairwise(sizes))
    assert layers[0].multipliers != layers[1].multipliers
    assert layers[0].offsets[0] == 0 and layers[0].offsets[2] == sum(layers[0].head_sizes[:2])
    assert layers[0].total_rows(128) % 128 == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eos": 100}, "end token of the n-gram hash is 100, expected 0 to 99"),
        ({"ngram_size": 1}, "ngram_size is 1"),
        ({"heads_per_ngram": 0}, "heads_per_ngram is 0"),
        ({"base": 0}, "ngram_vocab_size_base is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sizes_no_model_has_are_refused(changes: dict[str, int], told: str) -> None:
    arguments = {
        "vocab_size": 100, "ngram_size": 3, "heads_per_ngram": 2, "base": 50, "layer_rank": 0, "seed": 1, "eos": 0,
    }  # fmt: skip
    with pytest.raises(ModelError, match=told):
        NgramHash.derive(**(arguments | changes))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_cut_of_a_sequence_gives_the_same_rows(size: int) -> None:
    hashing = NgramHash.derive(7, size, 2, 50, 0, 1234, 0)
    ids = np.random.default_rng(size).integers(0, 7, 60)
    none = np.full((1, size - 1), -1, dtype=np.int64)
    whole = rows_of(hashing, ids.tolist(), none)
    for step in (1, 2, 3, 7):
        history, parts = none, []
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            parts.append(rows_of(hashing, part.tolist(), history))
            history = next_history(part, np.array([0, len(part)]), history)
        assert np.array_equal(np.concatenate(parts), whole)


def test_the_history_is_newest_first_and_each_sequences_own() -> None:
    history = np.array([[9, 8], [-1, -1], [5, -1]])
    after = next_history(np.array([1, 2, 3, 4]), np.array([0, 3, 4, 4]), history)
    assert after.tolist() == [[3, 2], [4, -1], [5, -1]]
