"""Laws of models that choose what they attend to, or that look n-grams up: chunks up to the largest, the budget crossed
at every alignment, states kept within a block, ends inside n-grams, rows read ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SavedState, StateTable, new_states
from kittiwake.families.contract import ModelConfig
from kittiwake.load import Loaded
from kittiwake.verify.trace import Table, fingerprint

CHUNKS = (1, 7, 64, 512, 2048, 4096)
"""Sizes of the chunks that a text is cut into."""
SMALL_CHUNK = 64
"""Chunks below this size cut only the beginning of a text, up to beyond the budget: the rest of it would take hours."""
BEYOND = 40
"""Tokens of the text beyond the budget, or beyond the largest chunk."""
SPLITS = 4
ENDS_EVERY = 9
"""About so many tokens lie between two ends."""
MOST_ALIGNMENTS = 16
"""Most places within a block where a text is cut."""


def chunk_sizes(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """A text longer than the largest chunk, in chunks of every size and of random ones."""
    beginning = max(_crossing(loaded.model.config) + BEYOND, 4 * SMALL_CHUNK)
    ids = _text(loaded, draw, max(beginning, CHUNKS[-1]) + BEYOND)
    cuts = []
    for size in CHUNKS:
        small = min(beginning, len(ids)) if size < SMALL_CHUNK else len(ids)
        cuts.append([*_even(small, size), len(ids) - small])
    cuts += [_random_cut(draw, len(ids)) for _ in range(SPLITS)]
    yield from _all_equal(loaded, ids, cuts)


def long_texts(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """A text cut in two at every place around the budget, whole, step by step, and with a token there by itself."""
    config = loaded.model.config
    ids = _text(loaded, draw, _crossing(config) + BEYOND)
    places = _around(config)
    cuts = [_even(len(ids), 1), [len(ids)], *([first, len(ids) - first] for first in places)]
    cuts += [_random_cut(draw, len(ids)) for _ in range(SPLITS)]
    yield from _all_equal(loaded, ids, cuts)
    table = Table(loaded.model, 1)
    slot = table.states.allocate()
    last = table.step([(slot, ids)])[0]
    table.states.clear(slot)
    table.step([(slot, ids[: places[0]])])
    near = table.states.save(slot)
    for at in places[1:]:
        table.states.restore(slot, near)
        table.step([(slot, ids[places[0] : at])])
        table.step([(slot, ids[at : at + 1])])
        yield table.step([(slot, ids[at + 1 :])])[0] == last


def both_sides(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """Sequences on both sides of the budget in one batch: each has the bits that it has alone."""
    config = loaded.model.config
    ids = _text(loaded, draw, _crossing(config) + BEYOND)
    places = _around(config)
    table = Table(loaded.model, 3)
    low, near, far = (table.states.allocate() for _ in range(3))
    table.step([(near, ids[: places[0]])])
    kept, alone = {places[0]: table.states.save(near)}, dict[int, str]()
    for at in range(places[0], len(ids)):
        alone[at + 1] = table.step([(near, ids[at : at + 1])])[0]
        if at + 1 in (*places, len(ids) - 3):
            kept[at + 1] = table.states.save(near)
    for at in places:
        for slot, seen in ((low, places[0]), (near, at), (far, len(ids) - 3)):
            table.states.restore(slot, kept[seen])
        # one about to cross the budget, one anywhere around it, one beyond it
        marks = table.step([(near, ids[at : at + 2]), (far, ids[-3:-2]), (low, ids[places[0] : at + 1])])
        yield marks == [alone[at + 2], alone[len(ids) - 2], alone[at + 1]]


def kept_within_a_block(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """A state saved at every place of a block, beyond the budget and below it, and gone on with in a slot that others had."""
    config = loaded.model.config
    ids = _text(loaded, draw, _crossing(config) + BEYOND)
    other = _text(loaded, draw, len(ids))
    table = Table(loaded.model, 2)
    home, away = table.states.allocate(), table.states.allocate()
    last = table.step([(home, ids)])[0]
    table.states.clear(home)
    done = 0
    for at in _around(config):
        table.step([(home, ids[done:at])])
        done = at
        saved = table.states.save(home)
        table.states.clear(away)
        table.step([(away, other[: len(other) - draw.randrange(BEYOND)])])
        table.states.restore(away, saved)
        yield table.step([(away, ids[at:])])[0] == last


def rewound_within_a_block(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """Tokens taken back at every place of a block, after a state was kept: what comes then, and a state kept then, have the
    bits of a text that never had them."""
    config = loaded.model.config
    ids = _text(loaded, draw, _crossing(config) + BEYOND)
    table = Table(loaded.model, 1)
    slot = table.states.allocate()
    last = table.step([(slot, ids)])[0]
    table.states.clear(slot)
    done, kept = 0, list[SavedState]()
    for at in _around(config):
        table.step([(slot, ids[done:at])])
        done = at
        snapshot = table.states.snapshot(slot)
        table.step([(slot, _text(loaded, draw, 1 + draw.randrange(2 * config.selection_block + 2)))])
        kept.append(table.states.save(slot))  # states kept later share its pages, as far as the text is not taken back
        table.states.rewind(slot, snapshot)
    table.step([(slot, ids[done:-1])])
    table.states.restore(slot, table.states.save(slot))
    yield table.step([(slot, ids[-1:])])[0] == last


def ends_in_ngrams(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """Ends at every place of the n-grams around a cut, alone and in pairs; cut, cut twice, and kept at the cut."""
    config = loaded.model.config
    size, end = config.ngram_tokens, config.ngram_end
    cut, length = 2 * size, 4 * size + 2
    window = range(cut - size, cut + size + 1)
    pairs = [(first, first + apart) for first in window for apart in range(size + 1)]
    for ends in [*pairs, (0, cut - 1), tuple(window)]:
        ids = [draw.randrange(config.vocab_size) for _ in range(length)]
        ids = [token if token != end else (token + 1) % config.vocab_size for token in ids]
        for place in ends:
            ids[min(place, length - 1)] = end
        table = Table(loaded.model, 2)
        slot, other = table.states.allocate(), table.states.allocate()
        whole = table.step([(slot, ids)])[0]
        same = True
        for pieces in ([cut, length - cut], [cut, 1, length - cut - 1], [1] * length):
            same &= _in_pieces(table, other, ids, pieces) == whole
        table.states.clear(other)
        table.step([(other, ids[:cut])])
        saved = table.states.save(other)
        table.step([(other, ids[::-1])])
        table.states.restore(other, saved)
        yield same and table.step([(other, ids[cut:])])[0] == whole


def read_ahead(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """What a batch expects next may be right, wrong, of another text or out of date: it changes no bit."""
    for size in (1, 5, 3 * SMALL_CHUNK):
        ids, other = _text(loaded, draw, 4 * size), _text(loaded, draw, size)
        alone = Table(loaded.model, 1)
        slot = alone.states.allocate()
        expected = [alone.step([(slot, ids[first : first + size])])[0] for first in range(0, len(ids), size)]
        longer = [*ids[size : 2 * size], *other]
        for guess in ("right", "other tokens", "fewer tokens", "more tokens", "others between"):
            table = new_states(loaded.model, 2)
            slot, beside = table.allocate(), table.allocate()
            found = []
            for first in range(0, len(ids), size):
                piece, following = ids[first : first + size], ids[first + size : first + 2 * size]
                told = {"other tokens": other, "fewer tokens": following[:-1], "more tokens": longer}.get(
                    guess, following
                )
                found.append(_step_ahead(loaded, table, slot, piece, told))
                if guess == "others between":
                    loaded.model.forward(Batch.pack([(beside, other)]), table)
            yield found == expected
        yield from _moved_histories(loaded, draw, ids, size)


def _moved_histories(loaded: Loaded, draw: random.Random, ids: list[int], size: int) -> Iterator[bool]:
    """The expected tokens come in the expected slot, but after other ones: the text before them was exchanged."""
    config = loaded.model.config
    prefix, following = ids[:size], ids[size : 2 * size]
    for back in range(1, config.ngram_tokens):
        before = [*prefix, *prefix][-max(size, config.ngram_tokens) :]
        before[-back] = (before[-back] + 1 + draw.randrange(config.vocab_size - 1)) % config.vocab_size
        alone = Table(loaded.model, 1)
        slot = alone.states.allocate()
        alone.step([(slot, before)])
        kept = alone.states.save(slot)
        expected = alone.step([(slot, following)])[0]
        table = new_states(loaded.model, 1)
        slot = table.allocate()
        _step_ahead(loaded, table, slot, prefix, following)
        table.restore(slot, kept)
        yield _step_ahead(loaded, table, slot, following, []) == expected


def _step_ahead(loaded: Loaded, table: StateTable, slot: int, ids: list[int], following: list[int]) -> str:
    """One forward that expects ``following`` next in this slot; the fingerprint after it."""
    ahead = ((slot, following),) if following else ()
    logits = loaded.model.forward(replace(Batch.pack([(slot, ids)]), ahead=ahead), table)
    return fingerprint(logits[0], table.save(slot, whole=True).parts)


def _crossing(config: ModelConfig) -> int:
    """Tokens of the shortest text whose last token chooses what it attends to; 0 where none ever does."""
    budget = config.selection_budget
    return budget + config.selection_block if budget else 0


def _around(config: ModelConfig) -> list[int]:
    """Places to cut a text at: from two before the budget on, every one of two blocks, or some of large ones."""
    block = config.selection_block
    places = range(max(1, config.selection_budget - 2), config.selection_budget + 2 * block + 2)
    return list(places) if block <= MOST_ALIGNMENTS else [*places[:: 2 * block // MOST_ALIGNMENTS], places[-1]]


def _text(loaded: Loaded, draw: random.Random, length: int) -> list[int]:
    """Random tokens with ends among them."""
    config = loaded.model.config
    ids = [draw.randrange(config.vocab_size) for _ in range(length)]
    if ends := list(config.end_ids or loaded.tokenizer.eos_ids):
        ids = [draw.choice(ends) if draw.random() < 1 / ENDS_EVERY else token for token in ids]
    return ids


def _even(length: int, size: int) -> list[int]:
    return [*[size] * (length // size), length % size]


def _random_cut(draw: random.Random, length: int) -> list[int]:
    borders = sorted({draw.randrange(1, length) for _ in range(12)})
    pieces: list[int] = np.diff([0, *borders, length]).tolist()
    return pieces


def _all_equal(loaded: Loaded, ids: list[int], cuts: Sequence[list[int]]) -> Iterator[bool]:
    """Run one text cut in all these ways: logits after each piece, and the state at the end, have the bits of the rest.

    Compared are the runs with each other, by their shared borders.
    """
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
    return found, fingerprint(logits[0], states.save(slot, whole=True).parts)


def _in_pieces(table: Table, slot: int, ids: list[int], pieces: Sequence[int]) -> str:
    """Run a text in a slot from its beginning; the fingerprint at its end."""
    table.states.clear(slot)
    at, mark = 0, ""
    for length in pieces:
        mark = table.step([(slot, ids[at : at + length])])[0]
        at += length
    return mark
