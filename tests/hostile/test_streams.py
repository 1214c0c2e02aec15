"""Stop strings and streams through the whole engine: whatever the model draws and wherever it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.request import SamplingParams
from kittiwake.llm import LLM
from tests.models import tiny_llm

# Few letters, spaces and the bytes of "é" and "€", so that stops are met and characters lie across tokens.
BIAS = dict.fromkeys(b"ab \xc3\xa9\xe2\x82\xac", 60.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(slots=3)


def _first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop that is completed first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=60, deadline=None)
@given(
    stops=st.lists(st.text("ab é€\ufffd", min_size=1, max_size=4), max_size=4),
    seed=st.integers(0, 5),
    chunk=st.integers(1, 9),
)
def test_answers_end_before_the_first_stop(llm: LLM, stops: list[str], seed: int, chunk: int) -> None:
    params = SamplingParams(max_tokens=24, seed=seed, logit_bias=BIAS)
    whole = llm.generate("ab" * chunk, params)[0]
    expected = _first_stop(whole.text, stops)
    stopped = SamplingParams(max_tokens=24, seed=seed, logit_bias=BIAS, stop=tuple(stops))
    deltas = list(llm.stream("ab" * chunk, stopped, keep_state=True))
    assert "".join(delta.text for delta in deltas) == expected
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    assert tokens == whole.token_ids[: len(tokens)]
    state = deltas[-1].state
    assert state is not None
    kept = llm.decode(state.tokens[2 * chunk :])
    assert expected.startswith(kept)
    assert llm.engine.free_slots == 3
