"""``verify``: it proves an exact model, and finds every kind of inexactness that was ever built in on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.checkpoints.bundle import Golden
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.sampler import Draw, sample
from kittiwake.engine.scheduler import Plan, Scheduler
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.errors import KittiwakeError
from kittiwake.layers.linear import LinearGroup
from kittiwake.layers.probe import Pick
from kittiwake.llm import LLM
from kittiwake.load import Loaded, load_tensors
from kittiwake.verify.laws import LAWS, _laws_for, verify
from tests.engine.drive import Tampered
from tests.tiny import tiny_model, tiny_tensors

CONFIG = EngineConfig(threads=1)
Forward = Callable[[], np.ndarray]


def differing(loaded: Loaded, *laws: str, seed: int = 0) -> set[str]:
    """Of these laws, or all, those with cases that are not equal."""
    with patch.dict(LAWS, {name: LAWS[name] for name in laws or LAWS}, clear=True):
        return {law.name for law in verify(loaded, CONFIG, seed) if law.differing}


def tampered(tamper: Callable[[Batch, StateTable, Forward], np.ndarray]) -> Loaded:
    return replace(tiny_model(), model=Tampered(tamper))


# What is exact


def test_a_tiny_model_is_exact_in_at_least_a_hundred_cases() -> None:
    results = verify(tiny_model(threads=2), EngineConfig(threads=2))
    assert [law.name for law in results] == list(LAWS)
    assert all(law.cases > 0 and law.differing == 0 for law in results)
    assert sum(law.cases for law in results) >= 100


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_are_exact_too_and_draw_other_cases(seed: int) -> None:
    seen: dict[int, list[list[int]]] = {seed: [], 0: []}
    for one, calls in seen.items():

        def record(batch: Batch, states: StateTable, run: Forward, calls: list[list[int]] = calls) -> np.ndarray:
            calls.append(batch.token_ids.tolist())
            return run()

        assert not differing(tampered(record), seed=one)
    assert seen[seed] != seen[0]


def test_progress_is_told_law_by_law() -> None:
    told: list[str] = []
    verify(tiny_model(), CONFIG, progress=lambda what, done, total: told.append(what))
    assert [what.removeprefix("law: ") for what in told if what.startswith("law: ")] == list(LAWS)


# Goldens


def with_goldens(*changes: Callable[[Golden], Golden]) -> Loaded:
    loaded = tiny_model()
    params = SamplingParams(max_tokens=6, temperature=0.0)
    prompts = [f"golden {index}" for index in range(3)]
    answers = LLM.from_loaded(loaded, CONFIG).generate(prompts, params)
    goldens = [
        Golden(prompt, tuple(loaded.tokenizer.encode(prompt)), answer.token_ids)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for index, change in enumerate(changes):
        goldens[index] = change(goldens[index])
    return replace(loaded, goldens=tuple(goldens))


def test_goldens_are_one_law_more() -> None:
    results = verify(with_goldens(), CONFIG)
    assert (results[-1].name, results[-1].cases, results[-1].differing) == ("goldens of the bundle", 3, 0)
    assert len(results) == len(LAWS) + 1


def test_goldens_are_no_law_on_another_device_than_the_one_they_were_recorded_on() -> None:
    config = SimpleNamespace(selection_budget=0, ngram_tokens=0)
    on_card: Any = SimpleNamespace(goldens=(1,), model=SimpleNamespace(device="cuda", config=config))
    assert _laws_for(on_card) == LAWS


def test_a_golden_of_other_tokens_or_another_tokenizer_is_found() -> None:
    loaded = with_goldens(
        lambda golden: replace(golden, completion_ids=(*golden.completion_ids[:-1], golden.completion_ids[-1] ^ 1)),
        lambda golden: replace(golden, prompt="golden X"),
    )
    results = verify(loaded, CONFIG)
    assert [(law.name, law.differing) for law in results if law.differing] == [("goldens of the bundle", 2)]


# What is not exact: each fault is one that serving code has had


def nudge(array: np.ndarray) -> None:
    """Change the last bit of the first value, in place."""
    first = (0,) * array.ndim
    array[first] = np.nextafter(array[first], np.float32(np.inf))


def nudge_logits_if(is_wrong: Callable[[Batch, int], bool]) -> Callable[[Batch, StateTable, Forward], np.ndarray]:
    """Change one bit of the logits of sequence b wherever ``is_wrong(batch, b)``."""

    def tamper(batch: Batch, states: StateTable, run: Forward) -> np.ndarray:
        logits = run()
        owners = np.searchsorted(batch.starts, batch.want_rows, side="right") - 1
        for row, owner in zip(logits, owners, strict=True):
            if is_wrong(batch, int(owner)):
                nudge(row)
        return logits

    return tamper


def has_twin_before(batch: Batch, b: int) -> bool:
    rows = [batch.token_ids[batch.starts[i] : batch.starts[i + 1]].tolist() for i in range(b + 1)]
    return len(rows[b]) > 1 and rows[b] in rows[:b]


@pytest.mark.parametrize(
    ("is_wrong", "law"),
    [
        (lambda batch, b: len(batch.slots) > 1, "alone = in a crowd"),
        (lambda batch, b: batch.starts[b + 1] - batch.starts[b] == 1 and batch.rows > 2, "alone = in a crowd"),
        (lambda batch, b: b == 16, "batch widths 1 to 17"),
        (lambda batch, b: len(batch.slots) == 13, "batch widths 1 to 17"),
        (lambda batch, b: batch.rows == 129, "row counts"),
        (lambda batch, b: batch.rows == 513, "row counts"),
        (lambda batch, b: batch.slots[b] == 4, "moved slot"),
        (has_twin_before, "two identical requests"),
        (lambda batch, b: batch.rows == 66 and len(batch.slots) == 1, "chunked = stepwise"),
    ],
    ids="crowd one-of-many 17th-sequence width-13 129-rows 513-rows slot-4 twin whole-prompt".split(),
)
def test_logits_that_depend_on_more_than_the_tokens_are_found(is_wrong: Callable[[Batch, int], bool], law: str) -> None:
    assert differing(tampered(nudge_logits_if(is_wrong)), law)


def test_a_state_that_depends_on_the_chunk_is_found() -> None:
    def tamper(batch: Batch, states: StateTable, run: Forward) -> np.ndarray:
        logits = run()
        for slot, rows in zip(batch.slots, np.diff(batch.starts), strict=True):
            if rows == 16:
                nudge(states.part("wkv")[1, slot])
        return logits

    assert differing(tampered(tamper), "prefill chunk 1 to unlimited")


def test_a_product_summed_in_other_blocks_for_wide_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(k_block: int) -> Loaded:
        monkeypatch.setattr(
            "kittiwake.families.rwkv_cpu.pick_products",
            lambda shapes, threads, progress=None: {shape: Pick(k_block, 0) for shape in shapes},
        )
        return load_tensors(tiny_tensors(), CONFIG)

    whole, blocked = load(192), load(8)
    laws = ("chunked = stepwise", "alone = in a crowd", "row counts")
    assert differing(whole, *laws) == differing(blocked, *laws) == set()

    def tamper(batch: Batch, states: StateTable, run: Forward) -> np.ndarray:
        return (blocked if batch.rows >= 33 else whole).model.forward(batch, states)

    assert differing(tampered(tamper), *laws) == set(laws)


def test_torchs_product_without_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library by itself: one row goes through another kernel than many."""
    x, weight = torch.randn(17, 1024), torch.randn(1024, 256)
    if all(torch.equal(torch.mm(x[:rows], weight), torch.mm(x, weight)[:rows]) for rows in (1, 2, 3, 5)):
        pytest.skip("this torch gives a row the same bits at every row count")
    weights: dict[tuple[int, str], torch.Tensor] = {}
    load = LinearGroup.load

    def keep(group: LinearGroup, name: str, tensor: torch.Tensor) -> None:
        load(group, name, tensor)
        weights[id(group), name] = tensor.t().float().contiguous()

    def plain(group: LinearGroup, x: np.ndarray, rows: int, y: np.ndarray) -> np.ndarray:
        group.run_narrow(x, rows, y)
        column = 0
        for product in group.products:
            if product.activation == "none":
                part = torch.from_numpy(x)[:rows, product.x_column : product.x_column + product.depth]
                y[:rows, column : column + product.columns] = torch.mm(part, weights[id(group), product.name]).numpy()
            column += product.columns
        return y

    monkeypatch.setattr(LinearGroup, "load", keep)
    loaded = load_tensors(random_rwkv7(small(2, 256, 64), 1), CONFIG)
    monkeypatch.setattr(LinearGroup, "__call__", plain)
    assert differing(loaded, "chunked = stepwise")


@pytest.mark.parametrize("reads", ["row", "call"])
def test_a_sampler_that_reads_the_row_or_counts_its_calls_is_found(monkeypatch: pytest.MonkeyPatch, reads: str) -> None:
    calls = itertools.count()

    def wrong(logits: np.ndarray, draws: Sequence[Draw]) -> list[int | None]:
        call = next(calls)
        shifts = [row if reads == "row" else call for row in range(len(draws))]
        moved = [replace(draw, position=draw.position + shift) for draw, shift in zip(draws, shifts, strict=True)]
        return sample(logits, moved)

    monkeypatch.setattr("kittiwake.engine.engine.sample", wrong)
    engine_laws = ("order of arrival", "prefill chunk 1 to unlimited")
    assert differing(tiny_model(), "alone = in a crowd", *engine_laws) == set(engine_laws)


@pytest.mark.parametrize("part", ["att_shift", "wkv", "ffn_shift"])
def test_a_slot_that_is_not_cleared_is_found(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    clear = StateTable.clear

    def leaves_a_part(table: StateTable, slot: int) -> None:
        left = table.part(part)[:, slot].copy()
        clear(table, slot)
        table.part(part)[:, slot] = left

    monkeypatch.setattr(StateTable, "clear", leaves_a_part)
    assert differing(tiny_model(), "reused slot", "moved slot") >= {"reused slot"}


@pytest.mark.parametrize("part", ["att_shift", "wkv", "ffn_shift"])
def test_a_state_that_is_not_restored_whole_is_found(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    restore = StateTable.restore

    def forgets_a_part(table: StateTable, slot: int, saved: SavedState) -> None:
        before = table.part(part)[:, slot].copy()
        restore(table, slot, saved)
        table.part(part)[:, slot] = before

    monkeypatch.setattr(StateTable, "restore", forgets_a_part)
    assert differing(tiny_model(), "reused slot", "moved slot") == {"moved slot"}


def test_a_token_lost_between_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def loses(scheduler: Scheduler) -> Plan:
        made = plan(scheduler)
        for request, count in made.parts:
            if count == 7 and request.due > 7:
                request.tokens[request.fed] = request.tokens[request.fed + 1]
        return made

    monkeypatch.setattr(Scheduler, "plan", loses)
    engine_laws = ("order of arrival", "prefill chunk 1 to unlimited")
    assert differing(tiny_model(), *engine_laws) == {"prefill chunk 1 to unlimited"}


def test_a_model_without_numbers_is_not_proved() -> None:
    """Every NaN equals every other: what cannot answer must not pass for exact."""

    def tamper(batch: Batch, states: StateTable, run: Forward) -> np.ndarray:
        return np.full_like(run(), np.nan)

    with pytest.raises(KittiwakeError, match="not finite"):
        verify(tampered(tamper), CONFIG)
