"""States that grow with the length: pages, budgets, and the verbs that nobody outside sees a difference in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import PrefixCache, ram_budget
from kittiwake.engine.request import KeptState, SamplingParams
from kittiwake.engine.state_file import StateOwner, load_state, save_state
from kittiwake.engine.states import (
    MOST_TOKENS,
    NO_PAGE,
    PartKind,
    SavedState,
    StatePart,
    StateSpec,
    StateTable,
    growing_budget,
    new_states,
)
from kittiwake.errors import PagesError, RequestError, StateError, StateFileError, UsageError
from tests.engine.drive import ask, finish, make_engine, prompt_of
from tests.tiny import tiny_model

KEYS = StatePart("keys", (2, 3), kind=PartKind.GROWING, layers=2)
BLOCKS = StatePart("blocks", (5,), "float16", PartKind.GROWING, layers=2, every=4)
SPEC = StateSpec(
    3,
    (
        KEYS,
        StatePart("sum", (4,)),
        StatePart("open", (4, 5), kind=PartKind.OPEN_ROWS, layers=2),
        BLOCKS,
        StatePart("ids", (2,), "int64", fill=-1, layers=1),
    ),
    page_tokens=8,
)


def eat(table: StateTable, slot: int, count: int) -> None:
    """What a forward does: rows are written at their places, then the position moves on."""
    table.reserve(np.array([slot]), np.array([count]))
    for token in range(int(table.positions[slot]), int(table.positions[slot]) + count):
        page, within = table.pages[slot, token // 8], token % 8
        assert page != NO_PAGE
        table.part("keys")[:, page, within] = token + 1000 * slot
        table.part("open")[:, slot, token % 4] = token
        if token % 4 == 3:
            table.part("blocks")[:, page, within // 4] = token
        table.part("sum")[:, slot] += token
    table.positions[slot] += count


def same(found: SavedState, expected: SavedState) -> bool:
    return found.position == expected.position and all(
        np.array_equal(found.parts[name], expected.parts[name]) for name in expected.parts
    )


# The table


def test_growing_parts_have_rows_in_pages_and_the_others_places_in_slots() -> None:
    table = StateTable(SPEC, 4, pages=6)
    assert {part.name: table.part(part.name).shape for part in SPEC.parts} == {
        "keys": (2, 6, 8, 2, 3),
        "sum": (3, 5, 4),
        "open": (2, 5, 4, 5),
        "blocks": (2, 6, 2, 5),
        "ids": (1, 5, 2),
    }
    assert (table.part("ids") == -1).all()
    assert SPEC.slot_bytes == 3 * 16 + 2 * 80 + 16
    assert SPEC.page_bytes == 2 * 8 * 24 + 2 * 2 * 10
    assert [SPEC.pages_for(tokens) for tokens in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert SPEC.bytes_for(9) == SPEC.slot_bytes + 2 * SPEC.page_bytes
    assert table.nbytes == 5 * SPEC.slot_bytes + 6 * SPEC.page_bytes


def test_pages_hold_whole_rows_or_are_refused() -> None:
    with pytest.raises(StateError, match="pages of 6 tokens do not hold whole rows of part 'blocks'"):
        replace(SPEC, page_tokens=6)


def test_saved_states_are_as_long_as_what_was_seen() -> None:
    table = StateTable(SPEC, 1, pages=4)
    slot = table.allocate()
    sizes = []
    for count in (0, 1, 3, 1, 4, 12):
        eat(table, slot, count)
        saved = table.save(slot)
        rows = saved.position
        assert saved.parts["keys"].shape == (2, rows, 2, 3) and saved.parts["blocks"].shape == (2, rows // 4, 5)
        assert saved.parts["keys"][1, :, 0, 0].tolist() == [token + 1000 * slot for token in range(rows)]
        assert saved.parts["blocks"][0, :, 0].tolist() == list(range(3, rows, 4))
        sizes.append(saved.nbytes)
    assert sizes == [SPEC.slot_bytes + 48 * rows + 20 * (rows // 4) for rows in (0, 1, 4, 5, 9, 21)]


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 7, 8, 9, 16, 21])
def test_a_restored_state_goes_on_as_if_it_had_never_left(tokens: int) -> None:
    table = StateTable(SPEC, 3, pages=12)
    first = table.allocate()
    eat(table, first, tokens)
    saved = table.save(first)
    table.allocate(5)  # so that the pages are others
    other = table.allocate()
    table.restore(other, saved)
    assert same(table.save(other), saved)
    for slot in (first, other):
        table.reserve(np.array([slot]), np.array([1]))
        table.part("keys")[:, table.pages[slot, tokens // 8], tokens % 8] = slot
        table.positions[slot] += 1
    kept = table.save(first).parts["keys"], table.save(other).parts["keys"]
    assert np.array_equal(kept[0][:, :tokens], kept[1][:, :tokens])
    assert (kept[0][:, tokens] == first).all() and (kept[1][:, tokens] == other).all()
    assert same(saved, replace(saved))  # a saved state is a copy
    assert saved.parts["keys"].shape[1] == tokens


def test_slots_never_share_a_page_and_free_pages_are_used_again() -> None:
    table = StateTable(SPEC, 3, pages=5)
    rng = np.random.default_rng(0)
    slots: list[int] = []
    for _ in range(200):
        if slots and (len(slots) == 3 or rng.integers(2)):
            table.free(slots.pop(int(rng.integers(len(slots)))))
        else:
            try:
                slots.append(table.allocate(int(rng.integers(0, 20))))
                eat(table, slots[-1], int(rng.integers(0, 9)))
            except PagesError:
                pass
        held = [page for slot in range(4) for page in table.pages[slot].tolist() if page != NO_PAGE]
        assert len(held) == len(set(held)) and table.free_pages == 5 - len(held)
        assert all(0 <= page < 5 for page in held)


def test_too_few_pages_are_refused_before_anything_changes() -> None:
    table = StateTable(SPEC, 4, pages=4)
    one, two = table.allocate(8), table.allocate()
    eat(table, one, 7)
    before = table.save(one), table.pages.copy(), table.positions.copy(), table.free_slots
    long = SavedState(25, {name: np.zeros(shape, kind) for name, (shape, kind) in SPEC.saved_kinds(25).items()})
    with pytest.raises(PagesError, match="25 tokens needs 4 pages more of 8 tokens, and 3 of 4 are free"):
        table.allocate(25)
    with pytest.raises(PagesError, match="and 3 of 4 are free"):
        table.reserve(np.array([one, two]), np.array([18, 9]))
    with pytest.raises(PagesError, match="and 3 of 4 are free"):
        table.restore(two, long)
    with pytest.raises(PagesError, match="33 tokens is longer than the 32"):
        table.allocate(33)
    assert same(table.save(one), before[0]) and np.array_equal(table.pages, before[1])
    assert np.array_equal(table.positions, before[2]) and table.free_slots == before[3] == 2
    table.reserve(np.array([one, two]), np.array([9, 8]))
    assert table.free_pages == 1
    assert table.can_hold(8) and not table.can_hold(9)


def test_a_cleared_slot_keeps_its_pages_and_begins_anew() -> None:
    table = StateTable(SPEC, 1, pages=2)
    slot = table.allocate(16)
    eat(table, slot, 9)
    table.clear(slot)
    assert table.positions[slot] == 0 and table.free_pages == 0
    assert table.save(slot).parts["keys"].shape == (2, 0, 2, 3)
    assert (table.part("ids")[:, slot] == -1).all()


@pytest.mark.parametrize("tokens", [0, 3, 7, 8, 13])
@pytest.mark.parametrize("more", [0, 1, 5, 9])
def test_a_rewound_slot_goes_on_as_if_nothing_had_come_after(tokens: int, more: int) -> None:
    table = StateTable(SPEC, 2, pages=12)
    slot, other = table.allocate(), table.allocate()
    eat(table, slot, tokens)
    snapshot, before = table.snapshot(slot), table.save(slot)
    assert snapshot.nbytes == SPEC.slot_bytes
    eat(table, slot, more)
    table.rewind(slot, snapshot)
    assert same(table.save(slot), before)
    eat(table, slot, 6)
    table.restore(other, before)
    table.reserve(np.array([other]), np.array([6]))
    eat(table, other, 6)
    found, expected = table.save(slot).parts, table.save(other).parts
    assert all(np.array_equal(found[name], expected[name]) for name in ("sum", "open", "blocks", "ids"))
    assert np.array_equal(found["keys"] % 1000, expected["keys"] % 1000)
    table.clear(slot)
    if tokens:
        with pytest.raises(StateError, match=f"slot {slot} is at 0, its snapshot at {tokens}"):
            table.rewind(slot, snapshot)


def test_states_of_another_length_or_shape_are_refused() -> None:
    table = StateTable(SPEC, 2, pages=4)
    slot = table.allocate()
    eat(table, slot, 9)
    saved = table.save(slot)
    for wrong in (
        replace(saved, position=8),
        replace(saved, parts={**saved.parts, "blocks": saved.parts["blocks"][:, :1]}),
        replace(saved, parts={**saved.parts, "sum": saved.parts["sum"][:2]}),
    ):
        with pytest.raises(StateError, match="saved state part"):
            table.restore(slot, wrong)
    assert same(table.save(slot), saved)


def test_a_table_of_tensors_has_the_same_verbs_and_tells_the_device_its_pages() -> None:
    ours, theirs = StateTable(SPEC, 2, pages=6), CudaStateTable(SPEC, 2, torch.device("cpu"), pages=6)
    table = theirs.device_pages
    saved = []
    for one in (ours, theirs):
        slot = one.allocate(3)
        one.allocate(9)
        eat(one, slot, 13)
        saved.append(one.save(slot))
        one.free(slot)
        slot = one.allocate()
        one.restore(slot, saved[0])
        eat(one, slot, 6)
        saved.append(one.save(slot))
    assert same(saved[2], saved[0]) and same(saved[3], saved[1])
    assert np.array_equal(theirs.pages, ours.pages) and np.array_equal(table.numpy(), theirs.pages)
    assert theirs.device_pages is table
    kept = saved[2].parts["sum"].copy()
    theirs.part("sum")[:] = 7
    assert np.array_equal(saved[2].parts["sum"], kept)


# The budget


class Grower:
    """A model whose state grows: logits tell the sum of all tokens, read back from the pages."""

    def __init__(self) -> None:
        self.inner = tiny_model().model
        self.config, self.device = self.inner.config, "cpu"
        self.state_spec = StateSpec(1, (StatePart("seen", (1,), kind=PartKind.GROWING),), page_tokens=4)
        self.weight_bytes = 1
        self.runs: list[int] = []

    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        states.reserve(batch.slots, np.diff(batch.starts))
        self.runs.append(batch.rows)
        logits = np.zeros((batch.rows, self.config.vocab_size), dtype=np.float32)
        seen = states.part("seen")[0]
        for b, slot in enumerate(batch.slots):
            for row in range(batch.starts[b], batch.starts[b + 1]):
                position = int(states.positions[slot])
                seen[states.pages[slot, position // 4], position % 4] = batch.token_ids[row]
                states.positions[slot] += 1
                past = seen[states.pages[slot, : position // 4 + 1]].ravel()[: position + 1]
                logits[row, int(past.sum()) % 200 + 40] = 1
        return logits[batch.want_rows]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def grower_engine(tokens: int, *, slots: int = 4, cache: PrefixCache | None = None) -> Engine:
    loaded, model = tiny_model(), Grower()
    budget = tokens * model.state_spec.page_bytes // 4
    return Engine(
        model,  # type: ignore[arg-type]
        loaded.tokenizer,
        slots=slots,
        prefill_chunk=0,
        max_rows=2048,
        cache=cache,
        growing_bytes=budget,
    )


def test_requests_wait_for_pages_in_turn_and_answer_as_alone() -> None:
    prompts = [prompt_of(length, length) for length in (9, 30, 3, 17, 5)]
    alone = [ask(grower_engine(64), prompt, greedy(6)).tokens for prompt in prompts]
    engine = grower_engine(40)
    numbers = [engine.add(prompt, greedy(6)) for prompt in prompts]
    engine.step()
    # 16 tokens of the first leave 24, too few for the 36 of the second, and nobody overtakes it
    assert (engine.stats().running, engine.stats().waiting) == (1, 4)
    outcomes = finish(engine, *numbers)
    assert [outcome.tokens for outcome in outcomes] == alone
    assert engine.runner.states.free_pages == engine.runner.states.total_pages == 10


def test_a_request_that_could_never_fit_is_refused_when_it_comes() -> None:
    engine = grower_engine(40)
    with pytest.raises(RequestError, match="a prompt of 30 tokens and max_tokens 11 are more than the 40 tokens"):
        engine.add(prompt_of(30), greedy(11))
    assert ask(engine, prompt_of(30), greedy(10)).reason == "length"
    kept = ask(engine, prompt_of(20), greedy(2), keep_state=True).state
    with pytest.raises(RequestError, match=f"a prompt of 9 tokens after {kept.saved.position} and max_tokens 10"):
        engine.add(prompt_of(9), greedy(10), start_from=kept)


def test_kept_states_go_on_and_samples_share_a_prompt() -> None:
    engine = grower_engine(400)
    prompt = prompt_of(23)
    whole = ask(engine, prompt, greedy(9))
    kept = ask(engine, prompt, greedy(4), keep_state=True).state
    assert kept.saved.parts["seen"].shape == (1, kept.saved.position, 1)
    assert (
        whole.tokens[:4] == list(kept.tokens[23:])
        and ask(engine, [], greedy(5), start_from=kept).tokens == whole.tokens[4:]
    )
    params = replace(greedy(5), temperature=1.0, n=3)
    outcomes = finish(engine, *engine.add_samples(prompt, params))
    assert len({tuple(outcome.tokens) for outcome in outcomes}) > 1
    for index, outcome in enumerate(outcomes):
        assert outcome.tokens == ask(engine, prompt, params.for_sample(index)).tokens


def test_the_cache_counts_states_by_their_length_and_serves_them() -> None:
    cache = PrefixCache(1 << 20, min_tokens=4)
    engine = grower_engine(4000, cache=cache)
    short, long = prompt_of(10), prompt_of(900)
    ask(engine, short, greedy(1))
    before = cache.stats().bytes
    ask(engine, long, greedy(1))
    assert cache.stats().bytes - before > 900 * 4 > before - 4 * 1024
    rows = len(engine.model.runs)  # type: ignore[attr-defined]
    again = ask(engine, [*long, 7, 8], greedy(3))
    assert sum(engine.model.runs[rows:]) < 900  # type: ignore[attr-defined]
    assert again.tokens == ask(grower_engine(4000), [*long, 7, 8], greedy(3)).tokens


def test_turns_of_a_chat_cost_the_cache_what_is_new() -> None:
    cache = PrefixCache(1 << 20, min_tokens=4)
    engine, text, states = grower_engine(4000, cache=cache), prompt_of(900), []
    for _ in range(8):
        found = ask(engine, text, greedy(5), keep_state=True)
        assert found.tokens == ask(grower_engine(4000), text, greedy(5)).tokens
        states.append(found.state.saved)
        text = [*text, *found.tokens, 7, 8]
    pages = {page for entry in cache._by_use for page in entry.prefix.saved.pages}
    assert cache.stats().entries >= 16 and len(pages) == len(states[-1].pages) == states[-1].position // 4
    beside = sum(entry.own_bytes for entry in cache._by_use)
    assert cache.stats().bytes == beside + sum(page.nbytes for page in pages)
    assert all(saved.pages == states[-1].pages[: len(saved.pages)] for saved in states)
    cache.clear()
    assert cache.stats().bytes == 0


def test_a_budget_too_small_or_for_what_does_not_grow_is_refused() -> None:
    model = Grower()
    with pytest.raises(UsageError, match="growing_bytes is 15, and 4 tokens of one sequence take 16"):
        new_states(model, 1, 15)  # type: ignore[arg-type]
    assert new_states(model, 1, 49).total_pages == 3  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not grow, so growing_bytes cannot be 4096"):
        new_states(tiny_model().model, 1, 4096)
    with pytest.raises(UsageError, match="growing_bytes must be a whole number from -1"):
        EngineConfig(growing_bytes=-2)
    assert make_engine().runner.states.pages.size == 0


def test_left_to_itself_it_takes_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, page_tokens=256)
    monkeypatch.setattr("kittiwake.engine.states.available_memory", lambda: 100 * spec.page_bytes)
    assert growing_budget(spec, 4, -1) == 50 * spec.page_bytes
    monkeypatch.setattr("kittiwake.engine.states.available_memory", lambda: 1 << 50)
    assert growing_budget(spec, 4, -1) == 4 * MOST_TOKENS // 256 * spec.page_bytes
    monkeypatch.setattr("kittiwake.engine.states.available_memory", lambda: 0)
    assert growing_budget(spec, 4, -1) == spec.page_bytes
    assert growing_budget(tiny_model().model.state_spec, 4, -1) == 0
    monkeypatch.setattr("kittiwake.engine.prefix.available_memory", lambda: 1000)
    assert (ram_budget(-1), ram_budget(-1, 600), ram_budget(-1, 2000), ram_budget(7, 2000)) == (500, 200, 0, 7)


def test_memory_that_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(table: StateTable, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(StateTable, "_make", refuse)
    with pytest.raises(PagesError, match="refuses 160 bytes for what grows and 2 slots"):
        new_states(Grower(), 2, 160)  # type: ignore[arg-type]


# The file


def test_a_file_holds_a_state_of_any_length_and_refuses_another(tmp_path: Path) -> None:
    table = StateTable(SPEC, 2, pages=8)
    slot = table.allocate()
    eat(table, slot, 21)
    owner = StateOwner("grower", "ab" * 32, "fp32", SPEC, 50)
    logits = np.arange(50, dtype=np.float32)
    kept = KeptState(table.save(slot), tuple(range(21)), logits)
    save_state(tmp_path / "one.state", kept, owner)
    found = load_state(tmp_path / "one.state", owner)
    other = table.allocate()
    table.restore(other, found.saved)
    assert same(table.save(other), kept.saved) and found.saved.digest == kept.saved.digest
    with pytest.raises(StateFileError, match="part blocks is float16"):
        load_state(
            tmp_path / "one.state",
            replace(owner, spec=replace(SPEC, parts=(KEYS, *SPEC.parts[1:3], replace(BLOCKS, every=2), SPEC.parts[4]))),
        )
    with pytest.raises(StateError, match="part keys is float32"):
        save_state(tmp_path / "two.state", replace(kept, saved=replace(kept.saved, position=20)), owner)
