"""Saved states share the full pages that they have in common, and nobody can tell them from whole copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.named_states import NamedStates
from kittiwake.engine.prefix import ENTRY_BYTES, Origin, Prefix, PrefixCache
from kittiwake.engine.prefix_disk import DiskTier
from kittiwake.engine.request import KeptState
from kittiwake.engine.state_file import StateOwner, encode_state, load_state, save_state
from kittiwake.engine.states import NO_PAGE, PartKind, SavedState, StatePart, StateSpec, StateTable
from kittiwake.engine.token_tree import as_tokens
from kittiwake.errors import PagesError, StateBudgetError

PAGE, EVERY = 4, 2
SPEC = StateSpec(
    3,
    (
        StatePart("keys", (2, 3), kind=PartKind.GROWING, layers=2),
        StatePart("sum", (4,)),
        StatePart("blocks", (5,), "float16", PartKind.GROWING, layers=2, every=EVERY),
        StatePart("ids", (2,), "int64", fill=-1, layers=1),
    ),
    page_tokens=PAGE,
)
OWNER = StateOwner("grower", "ab" * 32, "fp32", SPEC, 50)
OPEN = 3 * 48 + 20
"""Bytes of the rows of an open page of three tokens."""
LOGITS = np.arange(50, dtype=np.float32)


class Truth:
    """What a slot holds, told by whole arrays alone."""

    def __init__(self, parts: dict[str, np.ndarray] | None = None) -> None:
        kinds = SPEC.saved_kinds(0)
        self.parts = parts or {name: np.zeros(shape, kind) for name, (shape, kind) in kinds.items()}
        if parts is None:
            self.parts["ids"] -= 1

    @property
    def position(self) -> int:
        return self.parts["keys"].shape[1]

    def copy(self) -> Truth:
        return Truth({name: array.copy() for name, array in self.parts.items()})

    def equals(self, saved: SavedState) -> bool:
        return saved.position == self.position and all(
            np.array_equal(saved.parts[name], array) and saved.kinds()[name] == (array.shape, array.dtype.name)
            for name, array in self.parts.items()
        )


class Writer:
    """Does to a table what a forward does, with other values every time, and to its truth the same."""

    def __init__(self, table: StateTable) -> None:
        self.table, self.value = table, 0

    def eat(self, slot: int, truth: Truth | None, count: int) -> None:
        """Write ``count`` tokens; without a truth, as a forward that fails before the position moves on."""
        table = self.table
        table.reserve(np.array([slot]), np.array([count]))
        for token in range(int(table.positions[slot]), int(table.positions[slot]) + count):
            self.value += 1
            page, within = int(table.pages[slot, token // PAGE]), token % PAGE
            assert page != NO_PAGE
            table.part("keys")[:, page, within] = self.value
            if (token + 1) % EVERY == 0:
                table.part("blocks")[:, page, within // EVERY] = self.value % 1000
            if truth is None:
                continue
            table.part("sum")[:, slot] = self.value
            table.part("ids")[:, slot] = self.value
            parts = truth.parts
            parts["keys"] = np.append(parts["keys"], np.full((2, 1, 2, 3), self.value, np.float32), axis=1)
            if (token + 1) % EVERY == 0:
                row = np.full((2, 1, 5), self.value % 1000, np.float16)
                parts["blocks"] = np.append(parts["blocks"], row, axis=1)
            parts["sum"][...] = parts["ids"][...] = self.value
        if truth is not None:
            table.positions[slot] += count


class Verbs(RuleBasedStateMachine):
    """Slots, snapshots and saved states by random verbs, each beside a truth that shares nothing."""

    make: Callable[[], StateTable] = staticmethod(lambda: StateTable(SPEC, 3, pages=16))

    def __init__(self) -> None:
        super().__init__()
        self.table = self.make()
        self.writer = Writer(self.table)
        self.slots: dict[int, Truth] = {}
        self.snapshots: dict[int, list[tuple[SavedState, Truth]]] = {}
        self.saved: list[tuple[SavedState, Truth]] = []

    def pick(self, draw: st.DataObject) -> int:
        return int(draw.draw(st.sampled_from(sorted(self.slots))))

    @precondition(lambda self: len(self.slots) < 3)
    @rule()
    def allocate(self) -> None:
        slot = self.table.allocate()
        self.slots[slot], self.snapshots[slot] = Truth(), []

    @precondition(lambda self: self.slots)
    @rule(draw=st.data(), count=st.integers(1, 9), fails=st.integers(0, 9))
    def eat(self, draw: st.DataObject, count: int, fails: int) -> None:
        slot = self.pick(draw)
        try:
            self.writer.eat(slot, None if fails == 0 else self.slots[slot], count)
        except PagesError:
            assert self.table.free_pages < 3

    @precondition(lambda self: self.slots)
    @rule(draw=st.data())
    def snapshot(self, draw: st.DataObject) -> None:
        slot = self.pick(draw)
        self.snapshots[slot].append((self.table.snapshot(slot), self.slots[slot].copy()))

    @precondition(lambda self: self.slots)
    @rule(draw=st.data(), count=st.integers(1, 9), saves=st.booleans())
    def take_back(self, draw: st.DataObject, count: int, saves: bool) -> None:
        slot = self.pick(draw)
        before, truth = self.table.snapshot(slot), self.slots[slot].copy()
        try:
            self.writer.eat(slot, truth, count)
        except PagesError:
            return
        if saves:
            self.saved.append((self.table.save(slot), truth))
        self.table.rewind(slot, before)

    @precondition(lambda self: any(self.snapshots.values()))
    @rule(draw=st.data())
    def rewind(self, draw: st.DataObject) -> None:
        slot = draw.draw(st.sampled_from([slot for slot, taken in self.snapshots.items() if taken]))
        index = draw.draw(st.integers(0, len(self.snapshots[slot]) - 1))
        snapshot, truth = self.snapshots[slot][index]
        del self.snapshots[slot][index + 1 :]
        self.table.rewind(slot, snapshot)
        self.slots[slot] = truth.copy()

    @precondition(lambda self: self.slots)
    @rule(draw=st.data())
    def save(self, draw: st.DataObject) -> None:
        slot = self.pick(draw)
        self.saved.append((self.table.save(slot), self.slots[slot].copy()))

    @precondition(lambda self: self.slots and self.saved)
    @rule(draw=st.data(), how=st.sampled_from(["as it is", "as it is", "whole", "from a file"]))
    def restore(self, draw: st.DataObject, how: str) -> None:
        slot = self.pick(draw)
        saved, truth = draw.draw(st.sampled_from(self.saved))
        if how != "as it is":
            saved = SavedState(saved.position, dict(saved.parts))
        if how == "from a file":
            saved = SPEC.in_pages(saved)
            self.saved.append((saved, truth))
        try:
            self.table.restore(slot, saved)
        except PagesError:
            assert self.table.free_pages < SPEC.pages_for(truth.position)
            return
        self.slots[slot], self.snapshots[slot] = truth.copy(), []

    @precondition(lambda self: self.slots)
    @rule(draw=st.data())
    def clear(self, draw: st.DataObject) -> None:
        slot = self.pick(draw)
        self.table.clear(slot)
        self.slots[slot], self.snapshots[slot] = Truth(), []

    @precondition(lambda self: self.slots)
    @rule(draw=st.data())
    def free(self, draw: st.DataObject) -> None:
        slot = self.pick(draw)
        self.table.free(slot)
        del self.slots[slot], self.snapshots[slot]

    @precondition(lambda self: self.saved)
    @rule(draw=st.data())
    def forget(self, draw: st.DataObject) -> None:
        del self.saved[draw.draw(st.integers(0, len(self.saved) - 1))]

    @invariant()
    def saved_states_are_what_they_were(self) -> None:
        assert all(truth.equals(saved) for saved, truth in self.saved)

    @invariant()
    def slots_hold_what_they_should_and_would_save_it(self) -> None:
        for slot, truth in self.slots.items():
            assert truth.equals(self.table.save(slot, whole=True))
            known = list(self.table._saved_pages[slot])
            assert truth.equals(self.table.save(slot))
            self.table._saved_pages[slot] = known  # looking changes nothing


WALK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("where", ["host", "device"])
def test_random_verbs_save_what_whole_copies_would(where: str) -> None:
    class Walk(Verbs):
        make = staticmethod(
            lambda: (
                StateTable(SPEC, 3, pages=16)
                if where == "host"
                else CudaStateTable(SPEC, 3, torch.device("cpu"), pages=16)
            )
        )

    run_state_machine_as_test(Walk, settings=WALK)


@pytest.mark.parametrize("verb", ["rewind", "clear", "restore"])
def test_a_verb_that_does_not_forget_saved_pages_is_found(verb: str) -> None:
    class Faulty(StateTable):
        pass

    def keeping(self: Faulty, slot: int, *more: Any) -> None:
        known = list(self._saved_pages[slot])
        getattr(StateTable, verb)(self, slot, *more)
        self._saved_pages[slot] = known

    setattr(Faulty, verb, keeping)

    class Walk(Verbs):
        make = staticmethod(lambda: Faulty(SPEC, 3, pages=16))

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Walk, settings=settings(WALK, max_examples=300, phases=[Phase.generate]))


# Sharing


class Counting(StateTable):
    """A table that counts the bytes it copies out."""

    copied = 0

    def _copy(self, *args: Any) -> np.ndarray:
        array = super()._copy(*args)
        self.copied += array.nbytes
        return array

    def take(self, slot: int) -> tuple[SavedState, int]:
        """Save, and what it copied."""
        self.copied = 0
        return self.save(slot), self.copied


def filled(tokens: int, pages: int = 512) -> tuple[Counting, int, Truth]:
    table, truth = Counting(SPEC, 4, pages=pages), Truth()
    slot = table.allocate()
    Writer(table).eat(slot, truth, tokens)
    return table, slot, truth


def test_a_second_save_copies_what_is_new() -> None:
    table, slot, truth = filled(100 * PAGE + 3)
    first, copied = table.take(slot)
    assert copied == first.nbytes == SPEC.slot_bytes + 100 * SPEC.page_bytes + OPEN
    again, copied = table.take(slot)
    assert copied == again.own_nbytes == SPEC.slot_bytes + OPEN
    Writer(table).eat(slot, truth, 2 * PAGE)
    second, copied = table.take(slot)
    assert copied == SPEC.slot_bytes + 2 * SPEC.page_bytes + OPEN
    assert second.pages[:100] == first.pages == again.pages and len(second.pages) == 102
    assert truth.equals(second) and second.nbytes == sum(array.nbytes for array in truth.parts.values())


def test_forks_share_the_pages_that_they_came_from() -> None:
    table, slot, truth = filled(10 * PAGE + 1)
    saved = table.save(slot)
    forks = [table.allocate() for _ in range(2)]
    kept = []
    for fork in forks:
        table.restore(fork, saved)
        mine = truth.copy()
        Writer(table).eat(fork, mine, PAGE)
        found, copied = table.take(fork)
        assert mine.equals(found) and found.pages[:10] == saved.pages
        assert copied == SPEC.slot_bytes + SPEC.page_bytes + 48
        kept.append(found)
    assert kept[0].pages[10] is not kept[1].pages[10]  # equal, but of two lineages
    other = Counting(SPEC, 1, pages=16)
    away = other.allocate()
    other.restore(away, saved)
    assert other.take(away)[0].pages == saved.pages


def test_equal_tokens_share_nothing() -> None:
    one, two = filled(3 * PAGE), filled(3 * PAGE)
    pages = {*one[0].save(one[1]).pages, *two[0].save(two[1]).pages}
    assert len(pages) == 6


def test_slots_keep_no_page_alive() -> None:
    table, slot, truth = filled(5 * PAGE)
    first = table.save(slot)
    page = first.pages[0]
    del first
    second, copied = table.take(slot)
    assert second.pages[0] is page and copied == SPEC.slot_bytes + 4 * SPEC.page_bytes
    assert truth.equals(second)


def test_pages_of_another_size_are_joined_and_copied() -> None:
    table, slot, truth = filled(5 * PAGE + 2)
    saved = table.save(slot)
    other = StateTable(replace(SPEC, page_tokens=2), 1, pages=16)
    away = other.allocate()
    other.restore(away, saved)
    found = other.save(away)
    assert truth.equals(found) and len(found.pages) == 11 and not {*found.pages} & {*saved.pages}


def test_a_state_with_a_part_exchanged_shares_nothing() -> None:
    table, slot, truth = filled(2 * PAGE)
    saved = table.save(slot)
    truth.parts["keys"] += 1
    table.restore(slot, replace(saved, parts={**saved.parts, "keys": truth.parts["keys"]}))
    assert truth.equals(table.save(slot)) and not {*table.save(slot).pages} & {*saved.pages}


# Values and files


@pytest.mark.parametrize("tokens", [0, 1, PAGE, 3 * PAGE + 5])
def test_digests_and_files_are_those_of_whole_copies(tokens: int, tmp_path: Path) -> None:
    table, slot, truth = filled(tokens)
    shared = table.save(slot)
    whole = table.save(slot, whole=True)
    assert len(shared.pages) == tokens // PAGE and not whole.pages
    assert shared.digest == whole.digest == SPEC.in_pages(whole).digest and shared.nbytes == whole.nbytes
    kept = KeptState(shared, tuple(range(tokens)), LOGITS)
    files = [b"".join(encode_state(replace(kept, saved=saved), OWNER)) for saved in (shared, whole)]
    assert files[0] == files[1]
    save_state(tmp_path / "a.state", kept, OWNER)
    found = load_state(tmp_path / "a.state", OWNER)
    assert truth.equals(found.saved) and len(found.saved.pages) == tokens // PAGE
    # no array holds on to the bytes of the whole file
    arrays = [*found.saved.paged.own.values(), *(rows for page in found.saved.pages for rows in page.rows.values())]
    assert found.saved.nbytes == sum(array.nbytes for array in arrays)
    assert not found.saved.pages or all(array.base is None for array in arrays)


# Bytes


def prefix_of(saved: SavedState) -> Prefix:
    return Prefix(saved.position, saved, LOGITS.copy())


def chat(turns: int, branches: int = 1) -> list[list[SavedState]]:
    """States after each turn of conversations that part after the first turn."""
    table, slot, truth = filled(5 * PAGE + 3)
    first = table.save(slot)
    found = []
    for _ in range(branches):
        table.restore(slot, first)
        states = [first]
        for _ in range(turns - 1):
            Writer(table).eat(slot, truth.copy(), PAGE + 2)
            states.append(table.save(slot))
        found.append(states)
    return found


def keep(cache: PrefixCache, branch: int, saved: SavedState) -> None:
    text = [7] * (5 * PAGE + 3) + [branch] * (saved.position - 5 * PAGE - 3)
    cache.keep(Origin(), as_tokens(text), prefix_of(saved))


def beside(saved: SavedState) -> int:
    return LOGITS.nbytes + 4 * saved.position + ENTRY_BYTES


def test_a_cache_counts_shared_pages_once() -> None:
    cache = PrefixCache(1 << 20)
    states = chat(6)[0]
    for saved in states:
        keep(cache, 1, saved)
    last = states[-1]
    assert cache.stats().bytes == sum(saved.own_nbytes + beside(saved) for saved in states) + SPEC.page_bytes * len(
        last.pages
    )
    assert cache.stats().bytes < sum(saved.nbytes + beside(saved) for saved in states)
    keep(cache, 1, last)  # is there already
    assert cache.stats().entries == 6
    cache.clear()
    assert cache.stats().bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_evictions_in_any_order_free_what_nobody_else_holds(seed: int) -> None:
    draw = random.Random(seed)
    branches = chat(6, branches=4)
    everything = [(branch, saved) for branch, states in enumerate(branches) for saved in states]
    cache = PrefixCache(draw.randrange(8_000, 35_000))
    for _ in range(60):
        branch, saved = draw.choice(everything)
        if draw.random() < 0.2:
            cache.find("", as_tokens([7] * (5 * PAGE + 3) + [branch] * 99))
        keep(cache, branch, saved)
        held = [entry.prefix.saved for entry in cache._by_use]
        pages = {page for one in held for page in one.pages}
        expected = sum(one.own_nbytes + beside(one) for one in held) + sum(page.nbytes for page in pages)
        assert cache.stats().bytes == expected <= cache.budget_bytes
    assert cache.stats().evicted
    left = list(cache._by_use)
    draw.shuffle(left)
    for entry in left:
        cache._evict(entry)
    assert cache.stats().bytes == cache.stats().entries == 0 and not cache._holders._holders


def test_a_state_larger_than_the_budget_is_not_kept_though_others_share_its_pages() -> None:
    states = chat(6)[0]
    cache = PrefixCache(states[-1].nbytes + beside(states[-1]) - 1)
    for saved in states[-2:]:
        keep(cache, 1, saved)
    assert cache.stats().entries == 1
    keep(PrefixCache(states[-1].nbytes + beside(states[-1])), 1, states[-1])


def test_named_states_count_shared_pages_once() -> None:
    states = chat(6)[0]
    kept = [KeptState(saved, tuple([7] * saved.position), LOGITS) for saved in states]
    beside = LOGITS.nbytes + sum(4 * one.saved.position + one.saved.own_nbytes for one in kept) + 5 * LOGITS.nbytes
    total = beside + SPEC.page_bytes * len(states[-1].pages)
    named = NamedStates(OWNER, budget_bytes=total)
    for index, one in enumerate(kept):
        named.save(f"turn-{index}", one)
        assert named.get(f"turn-{index}").nbytes == one.saved.nbytes + LOGITS.nbytes + 4 * one.saved.position
    named.fork("turn-2", "fork")
    assert named.nbytes == total
    tight = NamedStates(OWNER, budget_bytes=total - 1)
    for index, one in enumerate(kept[:-1]):
        tight.save(f"turn-{index}", one)
    with pytest.raises(StateBudgetError, match=f"would bring all named states to {total:,}"):
        tight.save("turn-5", kept[-1])
    for name in ("turn-5", "turn-0", "fork", "turn-3", "turn-1", "turn-4", "turn-2"):
        named.delete(name)
    assert named.nbytes == 0


def test_the_disk_tier_writes_whole_states_and_gives_pages_back(tmp_path: Path) -> None:
    states = chat(4)[0]
    tier = DiskTier(tmp_path, 1 << 20, OWNER, "cd" * 32)
    cache = PrefixCache(1 << 20, disk=tier)
    for saved in states:
        keep(cache, 1, saved)
    cache.close()
    sizes = sorted(path.stat().st_size for path in tmp_path.iterdir())
    assert all(size > saved.nbytes for size, saved in zip(sizes, states, strict=True))
    again = PrefixCache(1 << 20, disk=DiskTier(tmp_path, 1 << 20, OWNER, "cd" * 32))
    found = again.find("", as_tokens([7] * (5 * PAGE + 3) + [1] * 99)).prefix
    assert found is not None and found.count == states[-1].position and found.saved.digest == states[-1].digest
    assert len(found.saved.pages) == len(states[-1].pages)
    table = Counting(SPEC, 1, pages=64)
    slot = table.allocate()
    table.restore(slot, found.saved)
    assert table.take(slot)[1] == found.saved.own_nbytes
    again.close()
