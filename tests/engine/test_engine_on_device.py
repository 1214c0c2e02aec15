"""The engine a step ahead of the host gives what the engine gives that waits for every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import PrefixCache
from kittiwake.engine.request import SamplingParams
from tests.engine.drive import Outcome, ask, finish, make_engine, prompt_of
from tests.engine.late_device import use_late_device
from tests.tiny import tiny_model


def _params(rng: np.random.Generator, tokens: int = 0) -> SamplingParams:
    """Anything a request may ask for."""
    temperature = float(rng.choice([0.0, 0.7, 1.3]))
    some: dict[str, Any] = {"max_tokens": tokens or int(rng.integers(1, 24)), "temperature": temperature}
    some["seed"] = int(rng.integers(1000))
    if temperature and rng.random() < 0.5:
        some |= {"top_p": 0.8, "top_k": int(rng.integers(0, 40))}
    if rng.random() < 0.3:
        some |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if rng.random() < 0.3:
        some["stop"] = (chr(int(rng.integers(97, 123))), "ab")
    if rng.random() < 0.3:
        some["stop_token_ids"] = tuple(rng.integers(0, 256, 12).tolist())
        some["min_tokens"] = int(rng.integers(0, some["max_tokens"] + 1))
    if rng.random() < 0.2:
        some |= {"logprobs": True, "top_logprobs": 2}
    if rng.random() < 0.2:
        some["logit_bias"] = {int(rng.integers(256)): 5.0, int(rng.integers(256)): -100.0}
    return SamplingParams(**some)


def _all(outcome: Outcome) -> tuple[Any, ...]:
    logprobs = [one for delta in outcome.deltas for one in delta.logprobs]
    return outcome.tokens, outcome.text, outcome.reason, logprobs


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_an_engine_that_waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    work = [
        (prompt_of(int(rng.integers(1, 60)), i), _params(rng), bool(rng.random() < 0.2), int(rng.integers(0, 9)))
        for i in range(24)
    ]
    plain = make_engine(slots=3)
    expected = [_all(ask(plain, prompt, params, keep_state=keeps)) for prompt, params, keeps, _ in work]
    made = use_late_device(monkeypatch)
    engine = make_engine(slots=5, chunk=7, max_rows=24)
    numbers: list[int] = []
    outcomes: dict[int, Outcome] = {}
    for prompt, params, keeps, steps in work:
        numbers.append(engine.add(prompt, params, keep_state=keeps))
        outcomes[numbers[-1]] = Outcome()
        for _ in range(steps):
            engine.step()
            for number, outcome in outcomes.items():
                if outcome.reason is None:
                    outcome.deltas += engine.collect(number)
    open_ones = [number for number in numbers if outcomes[number].reason is None]
    for number, rest in zip(open_ones, finish(engine, *open_ones), strict=True):
        outcomes[number].deltas += rest.deltas
    assert [_all(outcomes[number]) for number in numbers] == expected
    assert made[0].ran_ahead > 0
    engine.step()
    assert engine.free_slots == 5 and not engine.has_work


def test_a_lone_answer_runs_one_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_late_device(monkeypatch)
    engine = make_engine()
    outcome = ask(engine, prompt_of(5), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    # the prompt and eight tokens are launched; no step eats a token that the limit makes the last
    assert len(outcome.tokens) == 9 and made[0].launches == 9 and made[0].ran_ahead == 8


def test_a_kept_state_stands_at_the_last_accepted_token(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    plain = ask(make_engine(), prompt_of(9), params, keep_state=True)
    use_late_device(monkeypatch)
    engine = make_engine()
    first = ask(engine, prompt_of(9), params, keep_state=True)
    assert first.tokens == plain.tokens
    assert first.state.saved.position == plain.state.saved.position == 9 + 12
    for name, part in plain.state.saved.parts.items():
        assert first.state.saved.parts[name].tobytes() == part.tobytes()
    on = ask(engine, [], params, start_from=first.state)
    assert on.tokens == ask(make_engine(), [], params, start_from=plain.state).tokens


def test_a_request_that_settles_draws_no_more_beside_one_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of steps draws for all slots that have settings; here the sampled one ends, and its state is still to come."""
    greedy = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=6, temperature=0.9, repetition_penalty=1.2, seed=6, ignore_eos=True)
    alone = [ask(make_engine(), prompt_of(7, i), one, keep_state=True) for i, one in enumerate((greedy, sampled))]
    made = use_late_device(monkeypatch)
    engine = make_engine()
    numbers = [engine.add(prompt_of(7, i), one, keep_state=True) for i, one in enumerate((greedy, sampled))]
    crowd = finish(engine, *numbers)
    assert [one.tokens for one in crowd] == [one.tokens for one in alone]
    for found, expected in zip(crowd, alone, strict=True):
        assert found.state.logits is not None and expected.state.logits is not None
        assert found.state.logits.tobytes() == expected.state.logits.tobytes()
    # the sampled one's last token is eaten beside a draw of the other
    assert made[0].settled_beside_a_draw == 1


def test_aborting_in_flight_frees_the_slot_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = ask(make_engine(), prompt_of(6, 1), params).tokens
    use_late_device(monkeypatch)
    engine = make_engine(slots=1)
    number = engine.add(prompt_of(6), params)
    for _ in range(5):
        engine.step()
    engine.abort(number)
    assert engine.free_slots == 1
    # the flight of the first one is still to land when the second one has its slot
    assert ask(engine, prompt_of(6, 1), params).tokens == expected


def test_samples_of_a_prompt_and_the_cache_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, n=3, seed=5, ignore_eos=True)
    plain = make_engine()
    expected = [one.tokens for one in finish(plain, *plain.add_samples(prompt_of(40), params))]
    use_late_device(monkeypatch)
    cache = PrefixCache(1 << 20, min_tokens=4)
    engine = make_engine(cache=cache)
    for _ in range(2):
        assert [one.tokens for one in finish(engine, *engine.add_samples(prompt_of(40), params))] == expected
    assert cache.stats().hits


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_lone_prompt_is_as_long_as_its_own_limit_where_the_host_is_not_behind(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runs_ahead:
        use_late_device(monkeypatch)
    loaded, rows = tiny_model(), list[int]()
    engine = Engine(loaded.model, loaded.tokenizer, slots=2, prefill_chunk=0, max_rows=8, max_chunk=32)
    engine.observer = lambda report: rows.append(report.rows)
    ask(engine, prompt_of(30), SamplingParams(max_tokens=1, temperature=0.0))
    assert rows[0] == (8 if runs_ahead else 30)
