from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kittiwake.errors import RequestError
from kittiwake.ops.log_softmax import reference
from kittiwake.ops.log_softmax.cpu import log_probs, top_log_probs

ODD_WIDTHS = (1, 2, 3, 7, 8, 9, 127, 128, 129, 1000, 65536)

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def _logits(rows: int, vocab: int, seed: int = 0, scale: float = 10.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


@pytest.mark.parametrize("vocab", ODD_WIDTHS)
@pytest.mark.parametrize("scale", [1e-3, 10.0, 1e4])
def test_agrees_with_the_reference(vocab: int, scale: float) -> None:
    logits = _logits(5, vocab, seed=vocab, scale=scale)
    targets = np.random.default_rng(1).integers(0, vocab, 5)
    np.testing.assert_allclose(log_probs(logits, targets), reference.log_probs(logits, targets), rtol=1e-13, atol=1e-13)
    k = min(vocab, 6)
    ids, values = top_log_probs(logits, k)
    wanted_ids, wanted = reference.top_log_probs(logits, k)
    assert ids.tolist() == wanted_ids.tolist()
    np.testing.assert_allclose(values, wanted, rtol=1e-13, atol=1e-13)


def test_probabilities_sum_to_one() -> None:
    _, values = top_log_probs(_logits(4, 300), 300)
    np.testing.assert_allclose(np.exp(values).sum(axis=1), 1.0, rtol=1e-14)


def test_a_row_has_its_bits_alone_in_a_crowd_and_at_every_thread_count() -> None:
    logits = _logits(37, 1003)
    targets = np.arange(37) * 7
    before = numba.get_num_threads()
    try:
        crowds = []
        for threads in (1, 2, 3, 5, 7):
            numba.set_num_threads(threads)
            crowds.append(log_probs(logits, targets).tobytes())
    finally:
        numba.set_num_threads(before)
    assert len(set(crowds)) == 1
    alone = np.concatenate([log_probs(logits[w : w + 1], targets[w : w + 1]) for w in range(37)])
    assert alone.tobytes() == crowds[0]


def test_both_calls_give_a_token_the_same_bits() -> None:
    logits = _logits(9, 517)
    ids, values = top_log_probs(logits, 20)
    for j in range(20):
        assert log_probs(logits, ids[:, j]).tobytes() == values[:, j].tobytes()


def test_rows_of_a_larger_buffer_count_as_any_other() -> None:
    wide = _logits(8, 64)
    part = wide[1:7:2]
    assert log_probs(part, np.zeros(3, int)).tobytes() == log_probs(part.copy(), np.zeros(3, int)).tobytes()


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([[1, 3, 3, 0, 3, -0.0]], dtype=np.float32)
    assert top_log_probs(logits, 6)[0].tolist() == [[1, 2, 4, 0, 3, 5]]


def test_banned_tokens_have_no_probability_and_the_rest_shares_it() -> None:
    logits = np.array([[-np.inf, 2, 2]], dtype=np.float32)
    assert log_probs(logits, np.array([0]))[0] == -np.inf
    assert log_probs(logits, np.array([1]))[0] == -np.log(2.0)
    assert top_log_probs(logits, 3)[0].tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_nan_and_its_neighbours_nothing_of_it(poison: float) -> None:
    logits = _logits(3, 40)
    clean = log_probs(logits, np.zeros(3, int))
    logits[1, 17] = poison
    found = log_probs(logits, np.zeros(3, int))
    assert np.isnan(found[1])
    assert found[[0, 2]].tobytes() == clean[[0, 2]].tobytes()
    assert np.isnan(top_log_probs(logits, 2)[1][1]).all()
    logits[1] = -np.inf
    assert np.isnan(log_probs(logits, np.zeros(3, int))[1])


@settings(deadline=None, max_examples=200)
@given(arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=FINITE))
def test_any_finite_logits_have_log_probabilities_of_at_most_zero(logits: np.ndarray) -> None:
    ids, values = top_log_probs(logits, logits.shape[1])
    assert (values <= 0).all()
    assert (np.diff(values, axis=1) <= 0).all()
    assert np.sort(ids, axis=1).tolist() == [list(range(logits.shape[1]))] * len(logits)
    np.testing.assert_allclose(values, reference.top_log_probs(logits, logits.shape[1])[1], rtol=1e-12, atol=1e-12)


def test_targets_are_checked() -> None:
    logits = _logits(2, 5)
    for targets in ([0, 5], [-1, 0], [0], [[0], [1]]):
        with pytest.raises(RequestError):
            log_probs(logits, np.array(targets))
    for k in (-1, 6):
        with pytest.raises(RequestError):
            top_log_probs(logits, k)
    assert log_probs(logits[:0], np.zeros(0, int)).shape == (0,)
    assert top_log_probs(logits, 0)[0].shape == (2, 0)
