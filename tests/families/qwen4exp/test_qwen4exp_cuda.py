"""The CUDA path of qwen4exp without a card: interpreted as a whole, and what of it needs no kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake import load
from kittiwake.bench.draw import made
from kittiwake.bench.qwen4exp_shapes import QWEN4EXP_SHAPES, Qwen4ExpShape, one_table, qwen4exp_config, qwen4exp_recipes
from kittiwake.bench.random import RandomSource, RandomWeights
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.runner import Runner
from kittiwake.engine.states import SCRATCH_SLOT, StateTable
from kittiwake.errors import DeviceError
from kittiwake.families.cuda_rows import Shape, padded_shape
from kittiwake.families.qwen4exp.cuda_model import all_workspace_bytes, workspace_bytes
from kittiwake.families.qwen4exp.cuda_rooms import MOST_ROWS, Rooms, most_rows_for, plan, room_bytes
from kittiwake.families.qwen4exp.cuda_rows import MetaBuffer, graph_shape, pieces_of
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.state import state_spec
from kittiwake.layers.cuda_linear import ROW_PADDING
from kittiwake.load import TensorDict, choose_device
from tests.ops.without_card import run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_cuda.py")
CPU = torch.device("cpu")
FAMILY = Qwen4ExpFamily()


def geometry_of(shape: Qwen4ExpShape) -> Geometry:
    return Geometry.of(FAMILY.read_config(RandomSource(RandomWeights(shape), "random")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_model_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED, "--timeout=0")


# Launches and what they are told of their rows


def batch_of(*lengths: int, want: list[list[int]] | None = None) -> Batch:
    """Sequences in slots 3, 5, 7, …, every token another number."""
    numbers = iter(range(100, 10**6))
    sequences = [(3 + 2 * index, [next(numbers) for _ in range(length)]) for index, length in enumerate(lengths)]
    return Batch.pack(sequences, want)


def test_a_batch_that_fits_is_one_launch_so_that_weights_are_read_once() -> None:
    (mixed,) = pieces_of(batch_of(1, 9, 1), 64)
    assert not mixed.is_decode and graph_shape(mixed, 64) is None and mixed.rows.tolist() == list(range(11))
    (steps,) = pieces_of(batch_of(1, 1, 1, want=[[], [0], []]), 64)
    assert steps.is_decode and graph_shape(steps, 64) == Shape(True, 3, 3, 3) and steps.want.tolist() == [1]
    assert graph_shape(steps, 2) is None


def test_a_batch_that_does_not_fit_is_cut() -> None:
    pieces = pieces_of(batch_of(1, 9, 1, 4), 5)
    assert [len(piece.rows) for piece in pieces] == [2, 5, 5, 3]
    assert sorted(np.concatenate([piece.rows for piece in pieces]).tolist()) == list(range(15))


def test_rows_are_told_their_sequences_and_positions() -> None:
    meta = MetaBuffer(64, CPU)
    meta._device.fill_(-77)
    (piece,) = pieces_of(batch_of(3, 1, 2, want=[[2], [], [0, 1]]), 64)
    rows = meta.fill(piece, np.array([10, 0, 255]), padded_shape(piece, 64))
    assert rows.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert rows.owners.tolist() == [0, 0, 0, 1, 2, 2] and rows.positions.tolist() == [10, 11, 12, 0, 255, 256]
    assert rows.starts.tolist() == [0, 3, 4, 6] and rows.slots.tolist() == [3, 5, 7]
    assert rows.seen.tolist() == [10, 0, 255] and rows.want.tolist() == [2, 4, 5]


def test_prompts_are_padded_to_counts_at_which_products_are_proved() -> None:
    meta = MetaBuffer(64, CPU)
    (piece,) = pieces_of(batch_of(9, 4), 64)
    rows = meta.fill(piece, np.array([0, 5]), padded_shape(piece, 64))
    assert rows.shape == Shape(False, 16, 2, 2)
    assert rows.owners.tolist() == [0] * 9 + [1] * 4 + [-1] * 3 and rows.starts.tolist() == [0, 9, 13]
    assert rows.positions.tolist() == [*range(9), 5, 6, 7, 8, 0, 0, 0] and rows.want.tolist() == [8, 12]


def test_spare_rows_of_a_bucket_belong_to_nobody() -> None:
    meta, shape = MetaBuffer(64, CPU), Shape(True, 4, 4, 4)
    (piece,) = pieces_of(batch_of(1, 1, want=[[], [0]]), 64)
    rows = meta.fill(piece, np.array([7, 300]), shape)
    assert rows.owners.tolist() == [0, 1, -1, -1] and rows.positions.tolist() == [7, 300, 0, 0]
    assert rows.starts.tolist() == [0, 1, 2, 2, 2] and rows.slots.tolist() == [3, 5, SCRATCH_SLOT, SCRATCH_SLOT]
    assert rows.seen.tolist() == [7, 300, 0, 0] and rows.want.tolist() == [1, 0, 0, 0]
    nobody = meta.fill_nobody(shape)
    assert nobody.owners.tolist() == [-1] * 4 and nobody.starts.tolist() == [0] * 5
    assert nobody.slots.tolist() == [SCRATCH_SLOT] * 4 and nobody.owners.data_ptr() == rows.owners.data_ptr()
    for part in (rows.owners, rows.positions, rows.starts, rows.slots, rows.seen, rows.want):
        assert part.storage_offset() % 4 == 0  # 16 bytes, which kernels are compiled for


# Rooms


@pytest.mark.parametrize("name", QWEN4EXP_SHAPES)
def test_the_planned_rooms_are_those_that_are_made(name: str) -> None:
    g = geometry_of(QWEN4EXP_SHAPES[name])
    for element in (torch.float32, torch.bfloat16):
        rooms = Rooms(g, 64, element, torch.device("meta"))
        assert rooms.nbytes == room_bytes(g, 64, element.itemsize)
    assert workspace_bytes(g, 128, torch.bfloat16) > room_bytes(g, 128, 2)
    assert all_workspace_bytes(g, 1 << 20, torch.bfloat16) > workspace_bytes(g, MOST_ROWS, torch.bfloat16)


def test_rows_of_rooms_begin_where_products_read_them() -> None:
    g = geometry_of(Qwen4ExpShape(stream_rank=13))
    rooms = Rooms(g, 32, torch.bfloat16, CPU)
    for name, room in plan(g).items():
        view = rooms.get(name, 32, room.columns)
        assert view.shape == (32, room.columns) and view.stride(0) % ROW_PADDING == 0 and view.stride(1) == 1
    assert rooms.get("low", 3, 13).data_ptr() == rooms.get("low", 32, 17).data_ptr()


def test_smaller_cards_take_fewer_rows_at_once() -> None:
    assert most_rows_for(141 << 30) == most_rows_for(32 << 30) == MOST_ROWS
    assert most_rows_for(24 << 30) == 3072 and most_rows_for(0) == 512


# States and the engine


def test_what_the_hash_reads_lies_on_the_host_and_goes_every_way_of_a_state() -> None:
    spec = state_spec(geometry_of(Qwen4ExpShape()))
    ours, theirs = StateTable(spec, 2, 4), CudaStateTable(spec, 2, CPU, 4)
    saved = []
    for table in (ours, theirs):
        slot, other = table.allocate(), table.allocate()
        history = table.part("ngram_ids")
        assert isinstance(history, np.ndarray) and history.dtype == np.int64 and (history == -1).all()
        history[0, slot] = [4, 9]
        saved.append(table.save(slot))
        table.restore(other, saved[-1])
        before = table.snapshot(other)
        history[0, other] = [5, 4]
        table.rewind(other, before)
        assert history[0, other].tolist() == [4, 9]
        table.clear(slot)
        assert history[0, slot].tolist() == [-1, -1]
    assert saved[0].digest == saved[1].digest
    assert isinstance(theirs.part("conv"), torch.Tensor)


def test_a_model_that_cannot_run_ahead_has_graphs_and_no_device_steps() -> None:
    captured = []
    model: Any = SimpleNamespace(device="cuda", can_run_ahead=False, capture_decoding=captured.append)
    runner = Runner.__new__(Runner)
    runner.model, runner.states = model, CudaStateTable(state_spec(geometry_of(Qwen4ExpShape())), 1, CPU, 2)
    assert runner.device_steps(()) is None and captured == [runner.states]


def test_tables_are_drawn_on_the_host_wherever_the_model_runs() -> None:
    shape = Qwen4ExpShape()
    here, there = (one_table(shape, qwen4exp_recipes(shape, 0, torch.bfloat16, device)) for device in ("cpu", "cuda"))
    name = next(name for name in here if name.endswith("ngram_embedding.weight"))
    assert here[name].shape == (shape.table_rows(0), shape.ngram_row)
    assert torch.equal(here[name].make(), there[name].make())


def test_a_table_does_not_choose_the_type_of_the_weights() -> None:
    """It is the largest tensor by far, and is never loaded."""
    shape = Qwen4ExpShape(ngram_base=20_000)
    tensors = made(one_table(shape, qwen4exp_recipes(shape, 0, torch.bfloat16)))
    name = next(name for name in tensors if name.endswith("ngram_embedding.weight"))
    tensors[name] = tensors[name].half()
    source = TensorDict(tensors, "memory", qwen4exp_config(shape))
    assert tensors[name].nbytes > sum(tensor.nbytes for tensor in tensors.values()) / 2
    assert load._dtype("auto", FAMILY, FAMILY.read_config(source), source, "cuda") == "bf16"


def test_without_a_card_the_reason_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert choose_device("auto", FAMILY) == "cpu"
    with pytest.raises(DeviceError, match="device cuda cannot be used: torch"):
        choose_device("cuda", FAMILY)
