"""The laws of long texts, of n-grams and of rows read ahead: a sound model keeps them, and each fault breaks its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, random_qwen4exp
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.prefix import Found, PrefixCache
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.families.qwen4exp import blocks, ngram, ngram_reader
from kittiwake.families.qwen4exp.ngram_reader import NgramReader, Ticket
from kittiwake.load import Loaded, load_model
from kittiwake.ops.block_attention import AttentionShape
from kittiwake.verify import cache_laws, laws, long_laws
from tests.families.qwen4exp_layouts import write_hf

Law = Callable[[Loaded, random.Random], Iterator[bool]]
SHAPES = {
    # budget 8 in blocks of 4, two query heads a key head, three value heads a key head, 4 of 8 index dimensions rotated
    "one n-gram layer": Qwen4ExpShape(),
    "two n-gram layers, blocks of 3": Qwen4ExpShape(ngram_layers=(0, 2), gate="silu", kv_heads=1, budget=9, ratio=3),
}
OF_SELECTORS: dict[str, Law] = laws._OF_SELECTORS
OF_NGRAMS: dict[str, Law] = laws._OF_NGRAMS
LAWS = OF_SELECTORS | OF_NGRAMS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    found = {}
    for name, shape in SHAPES.items():
        folder = write_hf(tmp_path_factory.mktemp("m"), shape, random_qwen4exp(shape, 1, torch.float32))
        found[name] = load_model(folder, EngineConfig(threads=1))
    return found


@pytest.fixture
def loaded(models: dict[str, Loaded]) -> Loaded:
    return models["one n-gram layer"]


def outcomes(law: Law, loaded: Loaded) -> list[bool]:
    return list(law(loaded, random.Random(0)))


@pytest.mark.parametrize("law", [name for name in LAWS if name != "chunks of 1 to 4,096 tokens"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_model_keeps_them(law: str, shape: str, models: dict[str, Loaded]) -> None:
    found = outcomes(LAWS[law], models[shape])
    assert found and all(found)


def test_chunks_up_to_the_largest_are_equal(loaded: Loaded) -> None:
    sizes = []
    forward = loaded.model.forward

    def counted(batch: Batch, states: StateTable, **more: Any) -> np.ndarray:
        sizes.append(batch.rows)
        return forward(batch, states, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.model, "forward", counted)
        assert outcomes(long_laws.chunk_sizes, loaded) == [True] * (len(long_laws.CHUNKS) + long_laws.SPLITS)
    assert {1, 7, 64, 512, 2048, 4096} <= set(sizes) and sizes.count(2048) == 2 and sizes.count(512) >= 8


def test_every_alignment_is_cut(models: dict[str, Loaded]) -> None:
    for name, (budget, ratio) in {"one n-gram layer": (8, 4), "two n-gram layers, blocks of 3": (9, 3)}.items():
        places = long_laws._around(models[name].model.config)
        first_chosen = budget + ratio  # the first token that has more complete blocks than the budget allows
        assert {place % ratio for place in places if place < first_chosen} == set(range(ratio))
        assert {place % ratio for place in places if place >= first_chosen} == set(range(ratio))


def test_blocks_too_large_for_every_place_are_cut_at_some(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loaded.model.config.extra, "index_ratio", 500)
    places = long_laws._around(loaded.model.config)
    assert len(places) <= 2 * long_laws.MOST_ALIGNMENTS and places[-1] == 8 + 2 * 500 + 1


def test_which_laws_a_model_has(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(laws._laws_for(loaded)) == [*laws.LAWS, *LAWS]
    monkeypatch.setitem(loaded.model.config.extra, "index_budget", 0)
    assert list(laws._laws_for(loaded)) == [*laws.LAWS, *OF_NGRAMS]
    monkeypatch.setitem(loaded.model.config.extra, "ngram_size", 0)
    assert laws._laws_for(loaded) == laws.LAWS


# Faults


def broken(loaded: Loaded, *names: str) -> set[str]:
    """Of these laws those that are broken."""
    return {name for name in names if not all(outcomes(LAWS[name], loaded))}


def test_a_launch_that_is_dense_because_it_begins_below_the_budget_is_found(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = blocks.block_attention

    def by_launch(proj: Any, columns: Any, shape: AttentionShape, *rest: Any) -> None:
        seen = rest[4]
        if (int(seen[0]) + 1) // shape.ratio <= shape.budget_blocks:
            shape = dataclasses.replace(shape, budget=256 * shape.ratio)
            rest = rest[:-1]  # with a room of its own
        attend(proj, columns, shape, *rest)

    monkeypatch.setattr(blocks, "block_attention", by_launch)
    names = ("beyond the budget, cut anywhere", "both sides of the budget in one batch", "restored within a block")
    assert broken(loaded, *names) == set(names)


def test_a_selection_that_reads_the_longest_sequence_of_the_batch_is_found(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense for all as long as nobody in the batch is beyond the budget, else by a budget one block smaller."""
    attend = blocks.block_attention

    def by_batch(proj: Any, columns: Any, shape: AttentionShape, *rest: Any) -> None:
        starts, seen = rest[2], rest[4]
        if len(seen) > 1 and int((seen + np.diff(starts)).max()) // shape.ratio > shape.budget_blocks:
            shape, rest = dataclasses.replace(shape, budget=shape.budget - shape.ratio), rest[:-1]
        attend(proj, columns, shape, *rest)

    monkeypatch.setattr(blocks, "block_attention", by_batch)
    names = ("beyond the budget, cut anywhere", "both sides of the budget in one batch")
    assert broken(loaded, *names) == {"both sides of the budget in one batch"}


@pytest.mark.parametrize("rows", [7, 512, 2048])
def test_a_model_that_looks_at_the_chunk_is_found(loaded: Loaded, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = loaded.model.forward

    def spoiled(batch: Batch, states: StateTable, **more: Any) -> np.ndarray:
        logits = forward(batch, states, **more)
        if batch.rows == rows:
            states.part("conv")[0, batch.slots[0], 0, 0] += np.float32(1e-3)
        return logits

    monkeypatch.setattr(loaded.model, "forward", spoiled)
    monkeypatch.setattr(long_laws, "CHUNKS", (64, rows))
    monkeypatch.setattr(long_laws, "SPLITS", 0)
    assert not all(outcomes(long_laws.chunk_sizes, loaded))


@pytest.mark.parametrize("part", ["index_rows", "index_blocks", "keys", "ngram_ids", "ngram_conv", "conv", "delta"])
def test_a_restore_that_forgets_a_part_is_found(loaded: Loaded, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = StateTable.restore

    def forgetful(table: StateTable, slot: int, saved: SavedState) -> None:
        restore(table, slot, replace(saved, parts={**saved.parts, part: np.zeros_like(saved.parts[part])}))

    monkeypatch.setattr(StateTable, "restore", forgetful)
    assert broken(loaded, "restored within a block", "beyond the budget, cut anywhere") >= {"restored within a block"}


def test_a_rewind_that_forgets_open_rows_is_found(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    rewind = StateTable.rewind

    def forgetful(table: StateTable, slot: int, snapshot: SavedState) -> None:
        left = table.part("index_rows")[:, slot].copy()
        rewind(table, slot, snapshot)
        table.part("index_rows")[:, slot] = left

    monkeypatch.setattr(StateTable, "rewind", forgetful)
    assert broken(loaded, "restored within a block", "rewound within a block") == {"rewound within a block"}


def test_saved_pages_that_outlive_a_rewind_are_found(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.model, "state_spec", replace(loaded.model.state_spec, page_tokens=4))
    assert all(outcomes(LAWS["rewound within a block"], loaded))
    rewind = StateTable.rewind

    def forgetful(table: StateTable, slot: int, snapshot: SavedState) -> None:
        left = list(table._saved_pages[slot])
        rewind(table, slot, snapshot)
        table._saved_pages[slot] = left

    monkeypatch.setattr(StateTable, "rewind", forgetful)
    assert broken(loaded, "restored within a block", "rewound within a block") == {"rewound within a block"}


def test_a_cache_whose_states_forget_open_rows_is_found(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def forgetful(cache: PrefixCache, key: str, tokens: np.ndarray) -> Found:
        found = find(cache, key, tokens)
        if found.prefix is None:
            return found
        saved = found.prefix.saved
        parts = {**saved.parts, "index_rows": np.zeros_like(saved.parts["index_rows"])}
        return replace(found, prefix=replace(found.prefix, saved=replace(saved, parts=parts)))

    monkeypatch.setattr(PrefixCache, "find", forgetful)
    assert broken(loaded, "cached within a block") == {"cached within a block"}


def test_a_cache_that_finds_nothing_proves_nothing(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "find", lambda *_: Found(None, "none", 0))
    found = list(cache_laws.within_a_block(loaded, random.Random(0)))
    assert all(found[:-1]) and not found[-1]


def test_a_history_that_stops_one_token_short_is_found(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = ngram.next_history

    def short(*arguments: Any) -> np.ndarray:
        after = follow(*arguments)
        after[:, -1] = -1
        return after

    monkeypatch.setattr(ngram, "next_history", short)
    assert broken(loaded, "ends inside n-grams") == {"ends inside n-grams"}


def test_an_end_that_does_not_cut_what_a_chunk_before_carried_is_found(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The carried ids lose their ends: n-grams then reach over an end, but only over the border of a chunk."""
    follow, end = ngram.next_history, loaded.model.config.ngram_end

    def endless(*arguments: Any) -> np.ndarray:
        after = follow(*arguments)
        return np.where(after == end, end + 1, after)

    monkeypatch.setattr(ngram, "next_history", endless)
    assert broken(loaded, "ends inside n-grams") == {"ends inside n-grams"}


def fits_any_history(self: Any, token_ids: np.ndarray, history: np.ndarray) -> bool:
    return np.array_equal(self.token_ids, token_ids)


def fits_any_tokens(self: Any, token_ids: np.ndarray, history: np.ndarray) -> bool:
    return len(self.token_ids) == len(token_ids)


@pytest.mark.parametrize("fits", [fits_any_history, fits_any_tokens])
def test_rows_read_ahead_for_another_text_are_found(
    loaded: Loaded, fits: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_reader._LookAhead, "fits", fits)
    assert broken(loaded, "ends inside n-grams", "rows read ahead") == {"rows read ahead"}


def test_rows_read_ahead_that_others_overwrite_are_found(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    take = NgramReader.take

    def overwriting(reader: NgramReader, ticket: Ticket) -> np.ndarray:
        rows = take(reader, ticket)
        if ticket.ahead_sequence < 0 and reader._ahead is not None and not ticket.batch.ahead:
            reader._pool.finish(reader._ahead.gather)
            reader._buffers[1].out[:1] = rows.reshape(-1, reader._buffers[1].out.shape[1])[:1]
        return rows

    monkeypatch.setattr(NgramReader, "take", overwriting)
    assert broken(loaded, "ends inside n-grams", "rows read ahead") == {"rows read ahead"}
