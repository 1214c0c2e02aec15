"""The n-gram hash: the kernel gives the reference's very rows, however a sequence is cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.ngram_hash import reference
from kittiwake.ops.ngram_hash.cases import CASES, NgramHashCase
from kittiwake.ops.ngram_hash.cpu import ngram_hash

EOS = 0
CONSTANTS = ("multipliers", "head_sizes", "offsets")
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(inputs: dict[str, np.ndarray], starts: np.ndarray) -> np.ndarray:
    rows = np.full((len(inputs["token_ids"]), len(inputs["head_sizes"])), -1, np.int64)
    constants = [inputs[name] for name in CONSTANTS]
    ngram_hash(inputs["token_ids"], starts, inputs["history"], EOS, *constants, rows)
    return rows


@every_case
def test_the_kernel_gives_the_references_rows(case: NgramHashCase) -> None:
    inputs, starts = case.make(), case.packed.starts
    constants = [inputs[name] for name in CONSTANTS]
    expected = reference.ngram_hash(inputs["token_ids"], starts, inputs["history"], EOS, *constants)
    found = run(inputs, starts)
    assert np.array_equal(found, expected)
    assert found.min() >= 0 and (found < inputs["offsets"] + inputs["head_sizes"]).all()


def test_a_missing_token_is_an_end_token_and_cuts_what_is_older() -> None:
    assert reference.window(7, [5, 3], EOS) == [7, 5, 3]
    assert reference.window(7, [EOS, 3], EOS) == [7, EOS, EOS]
    assert reference.window(7, [-1, -1], EOS) == [7, EOS, EOS]
    assert reference.window(EOS, [5, EOS], EOS) == [EOS, 5, EOS]  # its own end does not cut its window
    case = NgramHashCase(CASES[0].packed, 3, 8)
    inputs = case.make() | {"token_ids": np.array([7])}
    ended, missing, none = (
        run(inputs | {"history": np.array([history])}, case.packed.starts)
        for history in ((EOS, 3), (-1, -1), (EOS, EOS))
    )
    assert np.array_equal(ended, missing) and np.array_equal(ended, none)
    assert not np.array_equal(ended, run(inputs | {"history": np.array([[5, 3]])}, case.packed.starts))
