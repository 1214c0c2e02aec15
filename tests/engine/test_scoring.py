"""Scores, logits and hidden rows: the bits of generation, however they are packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.scoring import Given, run_rows, score
from kittiwake.engine.states import StateTable
from kittiwake.errors import RequestError, UsageError
from kittiwake.llm import LLM
from kittiwake.load import load_tensors
from kittiwake.ops.log_softmax import reference

LAYERS = 3


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_loaded(load_tensors(random_rwkv7(small(LAYERS, 64, 16), seed=2), EngineConfig(threads=1)))


def stepwise(llm: LLM, ids: list[int]) -> np.ndarray:
    """Float32 [T, vocab], one token at a time."""
    table = StateTable(llm.loaded.model.state_spec, 1)
    slot = table.allocate()
    return np.concatenate([llm.loaded.model.forward(Batch.pack([(slot, [token])]), table) for token in ids])


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def test_scores_are_those_of_the_reference_softmax(llm: LLM) -> None:
    ids = random_ids(40)
    expected = reference.log_probs(stepwise(llm, ids)[:-1], np.array(ids[1:]))
    np.testing.assert_allclose(llm.score(ids), expected, rtol=1e-12)
    assert llm.score(ids).shape == (39,)


@settings(deadline=None, max_examples=25)
@given(
    texts=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=60), min_size=1, max_size=20),
    max_rows=st.sampled_from([1, 2, 7, 64, 256]),
    top=st.integers(0, 3),
)
def test_any_packing_gives_the_bits_of_a_text_alone(llm: LLM, texts: list[list[int]], max_rows: int, top: int) -> None:
    packed = score(llm.loaded.model, [Given(np.array(ids)) for ids in texts], top=top, max_rows=max_rows)
    for ids, found in zip(texts, packed, strict=True):
        alone = llm.score_all([ids], top=top)[0]
        assert found.token_ids.tolist() == ids[1:]
        assert found.log_probs.tobytes() == alone.log_probs.tobytes()
        assert found.top_ids.tolist() == alone.top_ids.tolist()
        assert found.top_log_probs.tobytes() == alone.top_log_probs.tobytes()


def test_scored_equals_generated_to_the_last_bit(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=7, ignore_eos=True, logprobs=True, top_logprobs=4)
    prompt = random_ids(9)
    generated = llm.generate([prompt], params)[0]
    scored = llm.score_all([[*prompt, *generated.token_ids]], top=4)[0]
    assert generated.logprobs is not None
    for index, given_ in enumerate(generated.logprobs):
        place = len(prompt) - 1 + index
        assert given_.logprob.hex() == float(scored.log_probs[place]).hex()
        assert [one.token_id for one in given_.top] == scored.top_ids[place].tolist()
        assert [one.logprob for one in given_.top] == scored.top_log_probs[place].tolist()


def test_after_a_kept_state_every_token_is_scored(llm: LLM) -> None:
    first, rest = random_ids(11), random_ids(8, seed=1)
    start = llm.generate([first], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), keep_state=True)[
        0
    ].state
    assert start is not None
    whole = llm.score([*start.tokens, *rest])
    assert llm.score(rest, start_from=start).tobytes() == whole[-8:].tobytes()
    assert llm.score(rest[:1], start_from=start).tobytes() == whole[-8:-7].tobytes()
    forks = llm.score_all([rest, rest[:3], rest], start_from=start)
    assert [len(fork.log_probs) for fork in forks] == [8, 3, 8]
    assert forks[0].total == forks[2].total


def test_likeliest_tokens_tell_whether_a_text_is_greedy(llm: LLM) -> None:
    prompt = random_ids(5)
    answer = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))[0]
    start = llm.generate([prompt[:-1]], SamplingParams(max_tokens=1, ignore_eos=True, seed=1), keep_state=True)[0].state
    assert start is not None
    found = llm.score_all([[*prompt, *answer.token_ids]], top=1)[0]
    assert found.top_ids[-6:, 0].tolist() == list(answer.token_ids)
    assert not found.is_greedy
    with pytest.raises(UsageError):
        _ = llm.score_all([prompt])[0].is_greedy


def test_logits_of_every_row_or_of_those_named(llm: LLM) -> None:
    ids = random_ids(300)  # more than one piece
    every = llm.logits(ids)
    assert every.tobytes() == stepwise(llm, ids).tobytes()
    assert llm.logits(ids, rows=[299, 0, -1, 256]).tobytes() == every[[299, 0, 299, 256]].tobytes()
    for rows in ([300], [-301]):
        with pytest.raises(RequestError, match="of a prompt of 300 tokens"):
            llm.logits(ids, rows=rows)


def test_hidden_rows_are_the_residual_stream(llm: LLM) -> None:
    ids = random_ids(270)
    hidden = llm.hidden_states(ids)
    assert hidden.shape == (270, LAYERS + 1, 64)
    assert llm.hidden_states(ids, layers=[3, 1]).tobytes() == hidden[:, [3, 1]].tobytes()
    # row 0 is the normed embedding: it depends on the token alone
    assert llm.hidden_states([ids[5]], layers=[0])[0, 0].tobytes() == hidden[5, 0].tobytes()
    # the last one, normed, through the head, gives the logits
    weights = random_rwkv7(small(LAYERS, 64, 16), seed=2)
    last = hidden[:, -1].astype(np.float64)
    centred = last - last.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    normed = normed * weights["ln_out.weight"].double().numpy() + weights["ln_out.bias"].double().numpy()
    np.testing.assert_allclose(
        normed @ weights["head.weight"].double().numpy().T, llm.logits(ids), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(RequestError, match="0 to 3"):
        llm.hidden_states(ids, layers=[4])


def test_asking_for_hidden_rows_changes_no_bit(llm: LLM) -> None:
    ids = np.array(random_ids(50))
    plain = [rows.logits.tobytes() for rows in run_rows(llm.loaded.model, [Given(ids)])]
    tapped = [rows.logits.tobytes() for rows in run_rows(llm.loaded.model, [Given(ids)], layers=range(LAYERS + 1))]
    assert plain == tapped


def test_bad_requests_are_refused(llm: LLM) -> None:
    for ids in ([], [256], [-1], [1.5]):
        with pytest.raises(RequestError):
            llm.score(ids)
    with pytest.raises(RequestError, match="top must be"):
        llm.score_all(["abc"], top=257)
    assert llm.score([7]).shape == (0,)
