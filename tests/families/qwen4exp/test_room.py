"""The room that a forward works in: what is planned is what is taken, and where it is refused no state has moved."""

from __future__ import annotations

import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, random_qwen4exp
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.cli.inspect import examine
from kittiwake.config import EngineConfig
from kittiwake.device import resolve_threads
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import DeviceError, PagesError
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.families.qwen4exp.row_pool import PLANNING_BYTES, GatherBuffers
from kittiwake.layers.linear import Workspace
from kittiwake.load import load_model
from tests.families.qwen4exp_layouts import write_hf

SHAPE = Qwen4ExpShape(ngram_layers=(0, 2), ngram_heads=3)
ROWS = 300
IDS = np.random.default_rng(0).integers(0, SHAPE.vocab, 3 * ROWS).tolist()
PLANNED_IN = ("linear.py", "row_pool.py", "ngram.py", "model.py")
"""Where all that grows with the rows is asked for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("m"), SHAPE, random_qwen4exp(SHAPE, 1))


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[dict[str, Any]]:
    """The same in both precisions."""
    found = {dtype: load_model(folder, EngineConfig(threads=1, dtype=dtype)).model for dtype in ("fp32", "bf16")}
    yield found
    for model in found.values():
        model.close()  # type: ignore[attr-defined]


def emptied(model: Any) -> Any:
    """A model that has given all its room back."""
    model._workspace = Workspace()
    for reader in model.readers:
        if reader._ahead is not None:
            reader._drop_ahead()
        reader.forget_rows()
        reader._buffers = [GatherBuffers(reader.table.row_bytes, reader.table.row_values) for _ in range(2)]
    return model


def begun(model: Any) -> tuple[StateTable, int]:
    """A table with one sequence in the middle of a block, and the room for that given back."""
    table = StateTable(model.state_spec, 2, 8)
    slot = table.allocate()
    model.forward(Batch.pack([(slot, IDS[:7])]), table)
    emptied(model)
    return table, slot


def batch_of(slot: int, rows: int = ROWS) -> Batch:
    packed = Batch.pack([(slot, IDS[7 : 7 + rows])])
    return Batch(
        packed.token_ids, packed.starts, packed.slots, packed.want_rows, ((slot, IDS[7 + rows : 7 + 2 * rows]),)
    )


def everything(table: StateTable) -> tuple[object, ...]:
    """All that a table holds, spare pages included."""
    parts = [table.part(part.name).tobytes() for part in table.spec.parts]
    return parts, table.positions.tobytes(), table.pages.tobytes(), table.free_pages, list(table._held)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_held_after_a_forward_is_what_was_planned(models: dict[str, Any], dtype: str) -> None:
    model = models[dtype]
    table, slot = begun(model)
    model.forward(batch_of(slot), table)
    planning = PLANNING_BYTES * ROWS * model.readers[0].hashing.heads
    assert model.workspace_bytes == model.plan_bytes(ROWS, 7 + ROWS) - planning
    model.forward(batch_of(slot, 5), table)
    assert model.workspace_bytes == model.plan_bytes(ROWS, 7 + ROWS) - planning, "a smaller one works in the same room"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [40, ROWS])
def test_no_forward_takes_more_than_planned(models: dict[str, Any], dtype: str, rows: int) -> None:
    model = models[dtype]
    table, slot = begun(model)
    for part in table.spec.parts:
        table.part(part.name).fill(0)  # pages are there before the count begins
    tracemalloc.start()
    try:
        logits = model.forward(batch_of(slot, rows), table)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planned, others = model.plan_bytes(rows, 7 + rows), 4 * logits.nbytes + (48 << 10) + 512 * rows
    assert model.workspace_bytes <= held and peak <= planned + others
    assert planned <= 1.1 * peak, "nor is much more planned than is taken"


def refusing(after: int) -> Callable[[Callable[..., np.ndarray]], Callable[..., np.ndarray]]:
    """What makes numpy's ways to ask for memory refuse once ``after`` arrays were had by the code under test."""
    had = [0]

    def wrap(ask: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def spy(*arguments: Any, **more: Any) -> np.ndarray:
            if Path(sys._getframe(1).f_code.co_filename).name in PLANNED_IN:
                had[0] += 1
                if had[0] > after:
                    raise MemoryError
            return ask(*arguments, **more)

        return spy

    return wrap


def test_whatever_is_refused_no_state_has_moved(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is refused at the first request, at the second, and so on until there is no more to refuse."""
    model = models["bf16"]
    table, slot = begun(model)
    saved = table.save(slot)
    expected = model.forward(batch_of(slot), table).tobytes()
    table.free(slot)
    slot = table.allocate()
    table.restore(slot, saved)
    told: set[str] = set()
    before, refused, found = everything(table), 0, b""
    while not found:
        assert refused < 500, "every forward was refused"
        emptied(model)
        with monkeypatch.context() as patch:
            wrap = refusing(refused)
            for name in ("empty", "zeros", "argsort"):
                patch.setattr(np, name, wrap(getattr(np, name)))
            try:
                found = model.forward(batch_of(slot), table).tobytes()
            except DeviceError as error:
                told.add(re.sub("[0-9,]+", "_", error.message))
                refused += 1
        if not found:
            assert everything(table) == before, refused
    # what was refused last is what reading ahead asks for, which nobody is refused for
    assert found == expected
    assert told == {
        "the system refuses _ bytes to work in for _ rows",
        "the system refuses _ bytes for the n-gram rows of _ tokens",
    }
    assert refused > 40
    assert table.save(slot).digest != saved.digest and table.positions[slot] == 7 + ROWS


def test_too_few_pages_are_told_before_anything_moves_and_what_was_read_is_let_go(models: dict[str, Any]) -> None:
    model = models["fp32"]
    table = StateTable(model.state_spec, 1, 1)
    slot = table.allocate()
    model.forward(Batch.pack([(slot, IDS[:7])]), table)
    before = everything(table)
    with pytest.raises(PagesError):
        model.forward(batch_of(slot), table)
    assert everything(table) == before and all(reader._ticket is None for reader in model.readers)
    model.forward(Batch.pack([(slot, IDS[7:9])]), table)


def test_room_to_read_ahead_may_be_refused_and_changes_nothing(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["fp32"]
    table, slot = begun(model)
    saved = table.save(slot)
    expected = model.forward(batch_of(slot), table).tobytes()
    table.restore(slot, saved)
    emptied(model)
    make_room, used = GatherBuffers.make_room, [reader.stats.ahead_used for reader in model.readers]

    def refuse(buffers: GatherBuffers, asked: int, out_rows: int) -> None:
        if any(buffers is reader._buffers[1] for reader in model.readers):
            raise MemoryError
        make_room(buffers, asked, out_rows)

    monkeypatch.setattr(GatherBuffers, "make_room", refuse)
    assert model.forward(batch_of(slot), table).tobytes() == expected
    monkeypatch.undo()
    model.forward(Batch.pack([(slot, IDS[7 + ROWS : 7 + 2 * ROWS])]), table)
    assert [reader.stats.ahead_used for reader in model.readers] == used


def test_the_plan_is_told_before_loading_and_after(folder: Path, models: dict[str, Any]) -> None:
    report = examine(
        folder, constants=EngineConfig(max_chunk=512, threads=1), tokenizer="bytes", progress=lambda *_: None
    )
    described = models["bf16"].describe()
    assert report["memory"]["workspace_bytes"] == described["workspace_plan_bytes"]["512"]
    assert described["workspace_bytes"] == models["bf16"].workspace_bytes
    with open_checkpoint(folder) as source:
        config = Qwen4ExpFamily().read_config(source)
    family, threads = Qwen4ExpFamily(), resolve_threads(2)
    plans = [family.workspace_bytes(config, rows, threads) for rows in (1, 512, 4096)]
    assert plans == sorted(plans) and plans[0] > 0
    assert family.workspace_bytes(config, 512, 1) < plans[1], "each thread has scratch of its own"
    assert torch.get_num_threads() >= 1
