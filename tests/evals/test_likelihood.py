"""Context and continuation: the border between them, and the bits of their likelihood."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.evals.likelihood import Likelihood, Pair, likelihoods, split_pair
from kittiwake.llm import LLM
from kittiwake.load import load_tensors
from kittiwake.ops.log_softmax import reference
from kittiwake.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_loaded(load_tensors(random_rwkv7(small(2, 64, 16), seed=2), EngineConfig(threads=1)))


@pytest.mark.parametrize(
    ("context", "continuation", "begin", "expected"),
    [
        ("Hello", " world", None, Pair((33155,), (40213,))),
        ("Hello", " world", 0, Pair((0, 33155), (40213,))),
        ("Hello ", "world", None, Pair((33155,), (40213,))),  # a space at the end goes with the word
        ("。\n", "\nUser", None, Pair((), (28329, 11, 24281))),  # "。\n" is one token: its line break is spanned
        ("", "Hello", 0, Pair((0,), (33155,))),
        ("", "Hello", None, Pair((), (33155,))),
        ("Hello", "", None, Pair((33155,), ())),
    ],
)
def test_pairs_of_the_world_tokenizer(context: str, continuation: str, begin: int | None, expected: Pair) -> None:
    assert split_pair(load_tokenizer("world").encode, context, continuation, begin) == expected


WORDS = st.text(alphabet="ab \n。日", max_size=12)


@settings(deadline=None)
@given(context=WORDS, continuation=WORDS)
def test_no_byte_is_lost_or_scored_twice_at_the_border(context: str, continuation: str) -> None:
    tokenizer = load_tokenizer("world")
    pair = split_pair(tokenizer.encode, context, continuation, None)
    assert tokenizer.decode([*pair.context, *pair.continuation]) == context + continuation
    assert tokenizer.decode(pair.context) == context[: len(tokenizer.decode(pair.context))]


def expected(llm: LLM, pair: Pair) -> Likelihood:
    """The same by the reference softmax over every row, in float64."""
    ids = [*pair.context, *pair.continuation]
    rows = llm.logits(ids)[:-1]
    values = reference.log_probs(rows, np.array(ids[1:], dtype=np.int64)).tolist()
    greedy = [int(row.argmax()) == token for row, token in zip(rows, ids[1:], strict=True)]
    count = len(pair.continuation)
    if pair.context:
        return Likelihood(math.fsum(values[-count:]), all(greedy[-count:]))
    return Likelihood(math.fsum(values) - math.log(256), False)


def test_likelihoods_batched_and_shared_are_those_of_each_pair_alone(llm: LLM) -> None:
    draw = np.random.default_rng(0)
    contexts = [tuple(draw.integers(0, 256, count).tolist()) for count in (20, 20, 9, 3, 0, 1)]
    pairs = [
        Pair(contexts[int(draw.integers(0, 6))], tuple(draw.integers(0, 256, int(draw.integers(1, 9))).tolist()))
        for _ in range(40)
    ]
    alone = [likelihoods(llm, [pair])[0] for pair in pairs]
    for batch in (1, 3, 64):
        assert likelihoods(llm, pairs, batch=batch) == alone
    for pair, found in zip(pairs, alone, strict=True):
        reckoned = expected(llm, pair)
        assert found.log_prob == pytest.approx(reckoned.log_prob, rel=1e-12)
        assert found.is_greedy == reckoned.is_greedy


def test_the_greedy_answer_is_greedy_and_another_is_not(llm: LLM) -> None:
    context = tuple(range(30, 50))
    best = int(llm.logits(context, rows=[-1])[0].argmax())
    found = likelihoods(llm, [Pair(context, (best,)), Pair(context, ((best + 1) % 256,)), Pair(context, ())])
    assert [one.is_greedy for one in found] == [True, False, True]
    assert found[2].log_prob == 0.0
