"""Laws of texts long enough to cross the budget of a block selector, with ends inside."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import new_states
from kittiwake.load import Loaded
from kittiwake.verify.trace import fingerprint

CHUNKS = (1, 7, 64, 512, 2048, 4096)
"""Sizes of the chunks that a text is cut into."""
BEYOND = 40
"""Tokens of the text beyond the budget."""
AROUND = range(-2, 10)
"""Places relative to the budget where a text is cut in two: with blocks of up to nine tokens, every alignment."""
SPLITS = 4
ENDS_EVERY = 9
"""About so many tokens lie between two ends."""


def long_texts(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """One text cut in every way: logits after each piece, and the state after the last, have the bits of the rest.

    Compared are runs with each other by their shared borders; a model without a budget has no such cases.
    """
    config = loaded.model.config
    budget = config.selection_budget
    if budget == 0:
        return
    ids = [draw.randrange(config.vocab_size) for _ in range(budget + BEYOND)]
    ends = config.end_ids or loaded.tokenizer.eos_ids
    for place in range(len(ids)):
        if ends and draw.random() < 1 / ENDS_EVERY:
            ids[place] = draw.choice(list(ends))
    cuts = [[size] * (len(ids) // size) + [len(ids) % size] for size in CHUNKS]
    cuts += [[budget + shift, len(ids) - budget - shift] for shift in AROUND]
    for _ in range(SPLITS):
        borders = sorted({draw.randrange(1, len(ids)) for _ in range(12)})
        cuts.append(np.diff([0, *borders, len(ids)]).tolist())
    expected: dict[int, bytes] = {}
    last = ""
    for pieces in cuts:
        borders_seen, mark = _run(loaded, ids, [piece for piece in pieces if piece > 0])
        last = last or mark
        yield mark == last and all(expected.setdefault(at, row) == row for at, row in borders_seen.items())


def _run(loaded: Loaded, ids: list[int], pieces: list[int]) -> tuple[dict[int, bytes], str]:
    """Logits after each piece, by how many tokens that is, and the fingerprint at the end."""
    states = new_states(loaded.model, 1)
    slot, at, found = states.allocate(), 0, dict[int, bytes]()
    logits = np.empty((0, 0), dtype=np.float32)
    for length in pieces:
        logits = loaded.model.forward(Batch.pack([(slot, ids[at : at + length])]), states)
        at += length
        found[at] = logits[0].tobytes()
    return found, fingerprint(logits[0], states.save(slot).parts)
