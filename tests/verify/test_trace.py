"""Fingerprints and the runs they are taken from."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.verify.trace import Table, Trace, fingerprint
from tests.tiny import run_alone, tiny_model

LOGITS = np.array([1.0, 2.0, 3.0], dtype=np.float32)
PARTS = {"wkv": np.ones((2, 3), np.float32), "shift": np.zeros(4, np.float32)}


def test_every_bit_of_logits_and_states_is_in_the_fingerprint() -> None:
    marks = {fingerprint(LOGITS, PARTS)}
    for name in PARTS:
        for index in np.ndindex(PARTS[name].shape):
            changed = {key: part.copy() for key, part in PARTS.items()}
            changed[name][index] = np.nextafter(changed[name][index], np.float32(9))
            marks.add(fingerprint(LOGITS, changed))
    for index in range(3):
        changed_logits = LOGITS.copy()
        changed_logits[index] = np.nextafter(changed_logits[index], np.float32(9))
        marks.add(fingerprint(changed_logits, PARTS))
    negative = {**PARTS, "shift": -PARTS["shift"]}  # zeros of the other sign
    marks.add(fingerprint(LOGITS, negative))
    marks.add(fingerprint(LOGITS, {"shift": PARTS["wkv"], "wkv": PARTS["shift"]}))
    assert len(marks) == 1 + 6 + 4 + 3 + 1 + 1


def test_the_fingerprint_does_not_depend_on_order_or_memory() -> None:
    strided = np.stack([LOGITS, LOGITS], axis=1)[:, 0]
    assert fingerprint(strided, dict(reversed(PARTS.items()))) == fingerprint(LOGITS, PARTS)


def test_a_trace_holds_the_fingerprint_after_every_token() -> None:
    model = tiny_model().model
    trace = Trace(model, [5, 9, 1, 1])
    for count in range(1, 5):
        logits, state = run_alone(model, [5, 9, 1, 1][:count])
        assert trace.marks[count - 1] == fingerprint(logits, state.parts)
    assert len(set(trace.marks)) == 4


@pytest.mark.parametrize("pieces", [[4], [1, 3], [2, 1, 1]])
def test_following_a_trace_tells_whether_every_border_agrees(pieces: list[int]) -> None:
    model = tiny_model().model
    trace, table = Trace(model, [5, 9, 1, 1]), Table(model, 1)
    slot = table.states.allocate()
    assert table.follows(trace, slot, pieces)
    table.states.clear(slot)
    table.states.part("ffn_shift")[0, slot, 3] = 1e-6
    assert not table.follows(trace, slot, pieces)
