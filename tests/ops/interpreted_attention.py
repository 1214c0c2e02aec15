"""Block attention's kernels in Triton's interpreter; test_attention_kernels.py runs this in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kittiwake.errors import ModelError
from kittiwake.ops.block_attention import AttentionMemory, AttentionShape, reference, triton, triton_sizes
from kittiwake.ops.block_attention.cases import CASES, AttentionCase, AttentionInputs
from kittiwake.ops.block_attention.triton import (
    AttentionRooms,
    AttentionRows,
    DeviceMemory,
    DeviceNorms,
    block_attention,
    make_rooms,
    turn_rows,
    workspace_bytes,
)
from kittiwake.ops.block_attention.triton_select import TILE, select_kernel
from kittiwake.ops.packed import Packed
from tests.ops.attention_pieces import copied, same_memory, turns
from tests.ops.bits import same_bits
from tests.ops.interpreted_kernels import _interpretable, dot_in_order  # noqa: F401  a fixture
from tests.oracles import block_attention_float64
from tests.oracles.measure import relative_error

CPU = torch.device("cpu")
SMALL = AttentionShape(2, 1, 4, 2, 1, 4, ratio=4, budget=8)
NAMES = ("keys", "values", "blocks", "open_rows")
FEWER = (*CASES[:3], *CASES[5:7])
"""The interpreter takes milliseconds for a program: cases of few rows, and deep ones below."""


@pytest.fixture(autouse=True)
def _dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of equal keys have equal scores, wherever they stand."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)


def tensors(memory: AttentionMemory) -> DeviceMemory:
    """The same arrays, as tensors."""
    return DeviceMemory(*(torch.from_numpy(array) for array in vars(memory).values()))


@dataclass(frozen=True)
class Launch:
    """How rows are launched, none of which may change a bit."""

    spare_rows: int = 2
    spare_sequences: int = 1
    tells_keys: bool = False
    element: torch.dtype = torch.float32


def padded(values: Any, spare: int, fill: int) -> torch.Tensor:
    return torch.tensor([*values, *[fill] * spare], dtype=torch.int32)


def run(
    case: AttentionCase,
    inputs: AttentionInputs,
    memory: AttentionMemory,
    rows: Any,
    starts: list[int],
    slots: Any,
    seen: list[int],
    launch: Launch,
) -> np.ndarray:
    """Some rows of the case's sequences as one launch, with spare ones behind them; what is written beyond them shows."""
    shape, count = case.shape, len(rows)
    lengths = np.diff(starts)
    at = reference.row_positions(np.array(starts), np.array(seen))
    total = count + launch.spare_rows
    half = shape.rotary_dim // 2
    turns = torch.full((total + 1, 4, half), torch.nan)
    positions = padded(at, launch.spare_rows, 0)
    turn_rows(positions, torch.from_numpy(inputs.inv_freq), shape.ratio, turns, overlap=False)
    meta = AttentionRows(
        padded(np.repeat(np.arange(len(slots)), lengths), launch.spare_rows, -1),
        padded(starts, launch.spare_sequences, count),
        padded(slots, launch.spare_sequences, 0),
        padded(seen, launch.spare_sequences, 0),
        positions,
        turns,
    )
    norms = inputs.norms
    weights = (torch.from_numpy(vector) for vector in (norms.q, norms.k, norms.index_q, norms.index_k))
    device = tensors(memory)
    given = (shape, total + 1, device.most_tokens, launch.element)
    rooms = make_rooms(*given, CPU)
    assert sum(room.nbytes for room in vars(rooms).values()) == workspace_bytes(*given)
    rooms = poisoned(rooms)
    proj = torch.from_numpy(np.concatenate([inputs.proj[rows], *[inputs.proj[-1:]] * (launch.spare_rows + 1)]))
    wide = torch.full((total + 1, shape.heads * shape.head_dim + 3), torch.nan, dtype=launch.element)
    block_attention(
        proj.to(launch.element), inputs.columns, shape, DeviceNorms(*weights, float(norms.eps)), meta, device, rooms,
        wide[:, 3:], overlap=False, most_keys=int(at.max()) + 1 if launch.tells_keys else None,
    )  # fmt: skip
    assert torch.isnan(wide[count:]).all() and torch.isnan(wide[:, :3]).all()
    return wide[:count, 3:].float().numpy()


def poisoned(rooms: AttentionRooms) -> AttentionRooms:
    for name, room in vars(rooms).items():
        room.fill_(1 << 30 if name == "chosen" else torch.nan)
    return rooms


def run_whole(
    case: AttentionCase, inputs: AttentionInputs, launch: Launch = Launch()
) -> tuple[np.ndarray, AttentionMemory]:
    """All rows at once, and what is kept after them."""
    memory, packed = copied(inputs.memory), case.packed
    count = len(packed.lengths)
    everything = np.arange(packed.rows)
    out = run(case, inputs, memory, everything, packed.starts.tolist(), packed.slots, [0] * count, launch)
    return out, memory


def run_cut(
    case: AttentionCase, inputs: AttentionInputs, sizes: list[int], together: int, launch: Launch = Launch()
) -> tuple[np.ndarray, AttentionMemory]:
    """Each sequence in pieces of these sizes over and over, ``together`` sequences side by side."""
    memory, packed = copied(inputs.memory), case.packed
    out = np.full((packed.rows, case.shape.heads * case.shape.head_dim), np.nan, dtype=np.float32)
    for rows, starts, sequences, before in turns(packed, sizes, together):
        out[rows] = run(case, inputs, memory, rows, starts, packed.slots[sequences], before, launch)
    return out, memory


def deep(
    shape: AttentionShape, seen: int, rows: int, page_tokens: int, seed: int
) -> tuple[AttentionCase, AttentionInputs]:
    """One sequence whose first ``seen`` tokens are in the pages already, with keys like those of the kernels' own."""
    case = AttentionCase(Packed((seen + rows,)), shape, page_tokens)
    inputs = case.make(seed)
    rng = np.random.default_rng(seed)
    memory = inputs.memory
    for name in NAMES:
        array = getattr(memory, name)
        array[:] = rng.standard_normal(array.shape)
    return case, replace(inputs, proj=inputs.proj[seen:], positions=np.array([seen]))


def run_deep(
    case: AttentionCase, inputs: AttentionInputs, sizes: list[int], launch: Launch = Launch()
) -> tuple[np.ndarray, AttentionMemory]:
    """The rows behind what was seen, in pieces of these sizes."""
    memory, seen, at, found = copied(inputs.memory), int(inputs.positions[0]), 0, []
    for size in sizes:
        rows = np.arange(at, at + size)
        found.append(run(case, inputs, memory, rows, [0, size], case.packed.slots, [seen + at], launch))
        at += size
    assert at == len(inputs.proj) - 1
    return np.concatenate(found), memory


def by_reference(case: AttentionCase, inputs: AttentionInputs) -> tuple[np.ndarray, AttentionMemory]:
    memory, packed = copied(inputs.memory), case.packed
    starts = packed.starts if not inputs.positions.any() else np.array([0, len(inputs.proj) - 1])
    at = reference.row_positions(starts, inputs.positions)
    rope = reference.rotary(at, inputs.inv_freq, 1.0, case.shape.ratio)
    given = (inputs.proj, inputs.columns, case.shape, inputs.norms, rope, starts, packed.slots)
    return reference.block_attention(*given, inputs.positions, memory), memory


def check_against_reference(
    case: AttentionCase, inputs: AttentionInputs, found: np.ndarray, kept: AttentionMemory
) -> None:
    expected, memory = by_reference(case, inputs)
    assert relative_error(found, expected) < 1e-6
    for name in NAMES:
        ours, theirs = getattr(kept, name), getattr(memory, name)
        assert (np.isnan(ours) == np.isnan(theirs)).all()  # nothing is written where nothing belongs
        assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_it_agrees_with_the_reference(case: AttentionCase) -> None:
    inputs = case.make()
    check_against_reference(case, inputs, *run_whole(case, inputs))


DEEP = (
    (AttentionShape(4, 2, 8, 4, 3, 6, ratio=4, budget=32), 1500, 8),
    (AttentionShape(3, 1, 40, 4, 1, 5, ratio=1, budget=70), 2100, 64),
    (AttentionShape(2, 2, 20, 0, 2, 33, ratio=3, budget=9), 1217, 96),
)


@pytest.mark.parametrize(("shape", "seen", "page_tokens"), DEEP)
def test_it_agrees_deep_in_a_sequence_and_cuts_change_no_bit(
    shape: AttentionShape, seen: int, page_tokens: int
) -> None:
    case, inputs = deep(shape, seen, 7, page_tokens, 1)
    found, kept = run_deep(case, inputs, [7])
    check_against_reference(case, inputs, found, kept)
    for sizes in ([1] * 7, [3, 4]):
        other, memory = run_deep(case, inputs, sizes, Launch(0, 0, tells_keys=len(sizes) == 2))
        assert same_bits(other, found) and same_memory(memory, kept)


@pytest.mark.parametrize("case", [AttentionCase(Packed((9, 1, 21)), SMALL, 8)], ids=str)
def test_it_agrees_with_the_equations_in_float64(case: AttentionCase) -> None:
    inputs = case.make(1)
    found, _ = run_whole(case, inputs)
    for rows, expected in block_attention_float64.sequences(case, inputs):
        assert relative_error(found[rows], expected) < 1e-6


@pytest.mark.parametrize(("element", "most"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_16_bit_models_agree_to_their_rounding(element: torch.dtype, most: float) -> None:
    """All keys are seen: another choice among near ties would be no rounding."""
    case = AttentionCase(Packed((19,)), AttentionShape(6, 2, 32, 8), 16)
    inputs = case.make(3)
    rounded = torch.from_numpy(inputs.proj).to(element).float().numpy()
    expected, _ = by_reference(case, replace(inputs, proj=rounded))
    found, _ = run_whole(case, inputs, Launch(element=element))
    assert relative_error(found, expected) < most
    again, _ = run_cut(case, inputs, [1, 7], 1, Launch(element=element))
    assert same_bits(again, found)


@pytest.mark.parametrize(("sizes", "together"), [([1], 99), ([7, 1, 2], 2), ([13, 3, 5], 1)])
def test_however_rows_are_cut_and_mixed_it_gives_the_same_bits(sizes: list[int], together: int) -> None:
    case = AttentionCase(Packed((27, 3, 16)), SMALL, 8)
    inputs = case.make(2)
    expected, memory = run_whole(case, inputs)
    found, kept = run_cut(case, inputs, sizes, together, Launch(spare_rows=0, spare_sequences=3))
    assert same_bits(found, expected) and same_memory(kept, memory)


def test_the_budget_is_crossed_at_every_alignment_with_the_same_bits() -> None:
    case = AttentionCase(Packed((23,)), SMALL, 8)
    inputs = case.make(4)
    expected, memory = run_whole(case, inputs)
    for first in range(8, 16):
        for second in (1, 3)[first % 2 :]:
            found, kept = run_cut(case, inputs, [first, second, 23], 1, Launch(0, 0))
            assert same_bits(found, expected) and same_memory(kept, memory), (first, second)


def test_whichever_program_merges_and_however_many_rows_are_scored_at_once_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = AttentionShape(4, 2, 8, 4, 16, 6, ratio=4, budget=80)
    case, inputs = deep(shape, 390, 9, 16, 5)
    expected, _ = run_deep(case, inputs, [9])
    for module, name, value in (
        (triton, "FEW_PROGRAMS", 0),
        (triton, "PARTIAL_BYTES", 4000),
        (triton, "SCORE_BYTES", 1),
        (triton_sizes, "MOST_TILES", 2),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            found, _ = run_deep(case, inputs, [9])
        assert same_bits(found, expected), name


@pytest.mark.parametrize("seen", [509, 552])
def test_more_splits_than_are_fetched_together_and_heads_in_parts_are_merged_with_the_same_bits(
    seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, inputs = deep(AttentionShape(2, 1, 70, 4), seen, 3, 64, 5)
    found, _ = run_deep(case, inputs, [3])
    monkeypatch.setattr(triton, "FEW_PROGRAMS", 0)
    expected, _ = run_deep(case, inputs, [3])
    assert same_bits(found, expected)


def test_pages_of_any_size_and_order_give_the_same_bits() -> None:
    case = AttentionCase(Packed((41,)), SMALL, 4)
    inputs = case.make(5)
    expected, _ = run_whole(case, inputs)
    for page_tokens in (8, 64):
        other = AttentionCase(case.packed, SMALL, page_tokens)
        found, _ = run_whole(other, replace(inputs, memory=other.make(9).memory))
        assert same_bits(found, expected)


def test_what_has_no_page_is_neither_read_nor_written() -> None:
    """The scratch slot of a graph's spare rows."""
    case = AttentionCase(Packed((1, 1)), SMALL, 8)
    inputs = case.make(6)
    inputs.memory.pages[0] = -1
    memory = copied(inputs.memory)
    out = run(case, inputs, memory, np.arange(2), [0, 1, 2], [int(case.packed.slots[0]), 0], [0, 0], Launch())
    expected, kept = run_whole(case, inputs)
    assert same_bits(out[:1], expected[:1]) and np.isfinite(out).all()
    for name in NAMES[:3]:
        assert np.isfinite(getattr(memory, name)).sum() == np.isfinite(getattr(kept, name)).sum() / 2


def test_large_scores_stay_finite() -> None:
    case = AttentionCase(Packed((30,)), SMALL, 8)
    inputs = case.make(7)
    inputs.norms.q[:] *= 1e4
    inputs.norms.k[:] *= 1e4
    found, _ = run_whole(case, inputs)
    expected, _ = by_reference(case, inputs)
    assert np.isfinite(found).all() and relative_error(found, expected) < 1e-3


# Selection


def selected(scores: np.ndarray, budget: int, fold: int, halvings: int) -> np.ndarray:
    """The chosen blocks of rows of scores [rows, blocks], as a launch would have them."""
    rows, blocks = scores.shape
    line = -(-blocks // 64) * 64
    wide = np.full((rows, line), np.nan, np.float32)
    wide[:, :blocks] = scores
    filled = np.full((rows, line), -1, np.float32)
    filled[:, :blocks] = scores
    maxima = filled.reshape(rows, line // TILE, TILE).max(2)
    maxima[maxima < 0] = np.nan
    chosen = torch.full((rows + 1, budget), -7, dtype=torch.int32)
    owners, positions = padded(np.zeros(rows), 0, 0), padded(np.full(rows, 2 * blocks), 0, 0)
    select_kernel[(rows,)](
        torch.from_numpy(wide), torch.from_numpy(maxima), owners, positions, chosen, 0, line, BUDGET=budget,
        BUDGET_PADDED=1 << (budget - 1).bit_length(), RATIO=2, TILE=TILE, FOLD=fold,
        TILES=1 << (line // TILE // fold).bit_length(), HALVINGS=halvings, OVERLAP=False,
    )  # fmt: skip
    assert (chosen[-1] == -7).all()
    return chosen[:-1].numpy()


@pytest.mark.parametrize(("fold", "halvings"), [(1, 0), (4, 3), (1, 16)])
@pytest.mark.parametrize(
    ("blocks", "budget"), [(6, 5), (64, 1), (65, 3), (512, 32), (513, 32), (700, 20), (2100, 20), (2100, 150)]
)
def test_the_best_blocks_are_chosen_and_ties_go_to_the_lowest(
    blocks: int, budget: int, fold: int, halvings: int
) -> None:
    rng = np.random.default_rng(blocks)
    smooth = rng.random(blocks).astype(np.float32)
    scores = np.stack([
        smooth,
        np.sort(smooth),
        np.sort(smooth)[::-1],
        np.zeros_like(smooth),
        np.full_like(smooth, 3.5),
        np.floor(smooth * 4) / 4,  # many ties, some zero
        np.where(rng.random(blocks) < budget / blocks / 2, smooth, 0).astype(np.float32),  # fewer than wanted above 0
        np.where(np.arange(blocks) < budget, np.float32(np.inf), smooth * np.float32(1e-42)),
        np.where(np.arange(blocks) % 16 == 15, np.float32(2), np.floor(smooth * 4) / 4),  # ties of whole tiles
        np.where(np.arange(blocks) < budget // 2, np.float32(3e38), smooth),
        1 + np.floor(smooth * 3) * np.float32(2**-23),  # neighbouring numbers
    ]).astype(np.float32)  # fmt: skip
    expected = np.stack([reference.select_blocks(row, budget) for row in scores])
    assert (selected(scores, budget, fold, halvings) == expected).all()


def test_rows_choose_what_the_reference_chooses() -> None:
    """End to end, scores of equal blocks and of none among them: without a rotation equal raw keys are equal blocks."""
    shape = AttentionShape(1, 1, 4, 0, 2, 4, ratio=2, budget=6)
    case = AttentionCase(Packed((60,)), shape, 16)
    inputs = case.make(8)
    at = inputs.columns.index_k
    inputs.proj[:60, at : at + 4] = inputs.proj[:60, at : at + 4][np.arange(60) // 2 % 5]
    inputs.proj[50:60, inputs.columns.index_q :][:, :8] = -np.tile(inputs.proj[50:60, at : at + 4], 2)
    check_against_reference(case, inputs, *run_whole(case, inputs))


# Refusals


def test_rooms_that_are_too_small_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(Packed((3,)), SMALL, 64)
    inputs = case.make()

    monkeypatch.setitem(globals(), "poisoned", lambda rooms: replace(rooms, scores=rooms.scores[:5]))
    with pytest.raises(ModelError, match="64 rows of 68 scores do not fit the rooms of an attention, which hold 5"):
        run_whole(case, inputs)
    monkeypatch.setitem(globals(), "poisoned", lambda rooms: replace(rooms, q=rooms.q[:1]))
    with pytest.raises(ModelError, match="5 rows do not fit the rooms of an attention, which were made for 1"):
        run_whole(case, inputs)
