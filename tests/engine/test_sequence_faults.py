"""A forward that fails for some of its sequences ends those requests, and the others go on as if alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.states import StateTable
from kittiwake.errors import CheckpointError
from kittiwake.families.contract import SequencesError
from tests.engine.drive import Tampered, ask, finish, make_engine, prompt_of

PARAMS = SamplingParams(max_tokens=12)


def test_a_sequence_that_fails_ends_alone_with_its_own_error() -> None:
    prompts = [prompt_of(40, seed) for seed in range(3)]
    expected = [ask(make_engine(), prompt, PARAMS).tokens for prompt in prompts]
    failing: set[int] = set()

    def fail_some(batch: Batch, states: StateTable, run: Callable[[], np.ndarray]) -> np.ndarray:
        logits = run()
        if lost := failing & set(batch.slots.tolist()):
            raise SequencesError({slot: CheckpointError(f"the row of slot {slot} is lost") for slot in lost}, logits)
        return logits

    engine = make_engine(chunk=7, max_rows=30, model=Tampered(fail_some))  # type: ignore[arg-type]
    numbers = [engine.add(prompt, PARAMS) for prompt in prompts]
    engine.step()
    failing.add(2)  # the second to come has the second slot
    outcomes = finish(engine, *numbers)
    assert outcomes[1].reason == "error" and str(outcomes[1].deltas[-1].error) == "the row of slot 2 is lost"
    assert [outcomes[0].tokens, outcomes[2].tokens] == [expected[0], expected[2]]
    assert engine.free_slots == 4
    failing.clear()
    assert ask(engine, prompts[1], PARAMS).tokens == expected[1]
