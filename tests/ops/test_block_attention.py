"""Block attention: right against the reference, float64 and transformers; the same bits however rows are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys

from kittiwake.errors import ModelError
from kittiwake.ops.block_attention import AttentionMemory, AttentionShape, cpu, reference
from kittiwake.ops.block_attention.cases import CASES, AttentionCase, AttentionInputs
from kittiwake.ops.packed import Packed
from tests.ops.attention_pieces import copied, same_memory, turns
from tests.ops.bits import same_bits
from tests.ops.pieces import THREADS, numba_threads
from tests.oracles import block_attention_float64
from tests.oracles.measure import relative_error

SMALL = AttentionShape(4, 2, 8, 4, 2, 6, ratio=4, budget=8)
cases = pytest.mark.parametrize("case", CASES, ids=str)


def run(
    case: AttentionCase,
    inputs: AttentionInputs,
    memory: AttentionMemory,
    rows: np.ndarray,
    starts: list[int],
    sequences: list[int],
    positions: list[int],
) -> np.ndarray:
    """Some rows of the case's sequences as one batch; what is written beyond them shows."""
    begins, seen = np.array(starts, dtype=np.int64), np.array(positions, dtype=np.int64)
    rope = cpu.rotary(reference.row_positions(begins, seen), inputs.inv_freq, 1.0, case.shape.ratio)
    out = np.full((len(rows) + 1, case.shape.heads * case.shape.head_dim), np.nan, dtype=np.float32)
    proj = np.concatenate([inputs.proj[rows], inputs.proj[-1:]])
    slots = case.packed.slots[sequences]
    cpu.block_attention(proj, inputs.columns, case.shape, inputs.norms, rope, begins, slots, seen, memory, out)
    assert np.isnan(out[-1]).all()
    return out[:-1]


def run_whole(case: AttentionCase, inputs: AttentionInputs) -> tuple[np.ndarray, AttentionMemory]:
    """All rows at once, and what is kept after them."""
    memory, packed = copied(inputs.memory), case.packed
    everything = np.arange(packed.rows)
    count = len(packed.lengths)
    return run(case, inputs, memory, everything, packed.starts.tolist(), list(range(count)), [0] * count), memory


def run_cut(
    case: AttentionCase, inputs: AttentionInputs, sizes: list[int], together: int
) -> tuple[np.ndarray, AttentionMemory]:
    """Each sequence in pieces of these sizes over and over, ``together`` sequences side by side."""
    memory, packed = copied(inputs.memory), case.packed
    out = np.full((packed.rows, case.shape.heads * case.shape.head_dim), np.nan, dtype=np.float32)
    for turn in turns(packed, sizes, together):
        out[turn.rows] = run(case, inputs, memory, *turn)
    return out, memory


@cases
def test_it_agrees_with_the_reference(case: AttentionCase) -> None:
    inputs = case.make()
    found, kept = run_whole(case, inputs)
    memory, packed = copied(inputs.memory), case.packed
    at = reference.row_positions(packed.starts, inputs.positions)
    rope = reference.rotary(at, inputs.inv_freq, 1.0, case.shape.ratio)
    expected = reference.block_attention(
        inputs.proj,
        inputs.columns,
        case.shape,
        inputs.norms,
        rope,
        packed.starts,
        packed.slots,
        inputs.positions,
        memory,
    )
    assert relative_error(found, expected) < 1e-6
    for name in ("keys", "values", "blocks", "open_rows"):
        ours, theirs = getattr(kept, name), getattr(memory, name)
        assert (np.isnan(ours) == np.isnan(theirs)).all()  # nothing is written where nothing belongs
        assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@cases
def test_it_agrees_with_the_equations_in_float64(case: AttentionCase) -> None:
    inputs = case.make(1)
    found, _ = run_whole(case, inputs)
    for rows, expected in block_attention_float64.sequences(case, inputs):
        assert relative_error(found[rows], expected) < 1e-6


@cases
@pytest.mark.parametrize(("sizes", "together"), [([1], 1), ([1], 99), ([7, 1, 2], 2), ([64], 99), ([13, 3, 40, 5], 3)])
def test_however_rows_are_cut_and_mixed_the_bits_are_the_same(
    case: AttentionCase, sizes: list[int], together: int
) -> None:
    inputs = case.make(2)
    expected, memory = run_whole(case, inputs)
    found, kept = run_cut(case, inputs, sizes, together)
    assert same_bits(found, expected) and same_memory(kept, memory)


@cases
def test_the_number_of_threads_changes_no_bit(case: AttentionCase) -> None:
    inputs = case.make(3)
    expected, memory = run_whole(case, inputs)
    for count in THREADS:
        with numba_threads(count):
            found, kept = run_whole(case, inputs)
        assert same_bits(found, expected) and same_memory(kept, memory)


def test_the_budget_is_crossed_at_every_alignment_with_the_same_bits() -> None:
    case = AttentionCase(Packed((31,)), SMALL, 8)
    inputs = case.make(4)
    expected, memory = run_cut(case, inputs, [1], 1)
    for first in range(1, 24):
        for second in range(1, 31 - first):
            found, kept = run_cut(case, inputs, [first, second, 31], 1)
            assert same_bits(found, expected) and same_memory(kept, memory), (first, second)


def test_pages_of_any_size_and_order_give_the_same_bits() -> None:
    case = AttentionCase(Packed((90,)), SMALL, 4)
    inputs = case.make(5)
    expected, _ = run_whole(case, inputs)
    for page_tokens in (8, 32, 128):
        other = AttentionCase(case.packed, SMALL, page_tokens)
        found, _ = run_whole(other, replace(inputs, memory=other.make(9).memory))
        assert same_bits(found, expected)


def test_a_row_reads_the_selected_keys_only() -> None:
    case = AttentionCase(Packed((61,)), SMALL, 4)
    inputs = case.make(6)
    expected, memory = run_whole(case, inputs)
    slot, last = int(case.packed.slots[0]), 60
    index_q = inputs.proj[last, inputs.columns.index_q :][:12].reshape(2, 6)
    rope = cpu.rotary(np.array([last]), inputs.inv_freq, 1.0, 4)
    normed = index_q / np.sqrt((index_q**2).mean(1, keepdims=True) + 1e-6) * inputs.norms.index_q
    turned = normed.copy()
    turned[:, :2] = normed[:, :2] * rope.cos[0] - normed[:, 2:4] * rope.sin[0]
    turned[:, 2:4] = normed[:, 2:4] * rope.cos[0] + normed[:, :2] * rope.sin[0]
    blocks = memory.blocks[memory.pages[slot]].reshape(-1, 6)[:15]
    scores = np.maximum(turned @ blocks.T, 0).sum(0)
    best = set(np.argsort(-scores)[:2].tolist())
    poisoned = copied(memory)
    for block in set(range(15)) - best:
        poisoned.keys[memory.pages[slot, block]] = np.nan
        poisoned.values[memory.pages[slot, block]] = np.nan
    found = run(case, inputs, poisoned, np.array([last]), [0, 1], [0], [last])
    assert same_bits(found, expected[-1:])
    for block in best:
        poisoned.values[memory.pages[slot, block]] = np.nan
    assert np.isnan(run(case, inputs, poisoned, np.array([last]), [0, 1], [0], [last])).all()


def test_blocks_of_equal_score_are_taken_from_the_lowest() -> None:
    case = AttentionCase(Packed((61,)), SMALL, 4)
    inputs = case.make(7)
    inputs.proj[:-1, inputs.columns.index_q : inputs.columns.index_q + 12] = 0  # all scores are 0
    expected, memory = run_whole(case, inputs)
    poisoned = copied(memory)
    for block in range(2, 15):
        poisoned.values[memory.pages[int(case.packed.slots[0]), block]] = np.nan
    found = run(case, inputs, poisoned, np.array([60]), [0, 1], [0], [60])
    assert same_bits(found, expected[-1:])


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_exact_with_ties_to_the_lowest_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 400))
    scores = rng.choice(np.array([0, 1e-45, 1e-20, 1, 1 + 2**-23, 3.5, np.inf], np.float32), count)
    if seed % 2:
        scores = np.maximum(rng.standard_normal(count), 0).astype(np.float32)
    chosen = np.full(int(rng.integers(1, count + 1)), -1, dtype=np.int32)
    cpu._choose(scores, chosen)
    assert chosen.tolist() == reference.select_blocks(scores, len(chosen)).tolist()


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"heads": 3, "kv_heads": 2}, "3 attention heads cannot share 2"),
        ({"rotary_dim": 3}, "rotary_dim 3 must be even"),
        ({"rotary_dim": 10}, "rotary_dim 10 must be even and at most head_dim 8"),
        ({"rotary_dim": 8}, "above the indexer's head dim 6"),
        ({"budget": 9}, "9 keys is not one or more blocks of 4"),
        ({"budget": 0}, "0 keys is not"),
    ],
)
def test_sizes_that_make_no_attention_are_refused(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        replace(SMALL, **sizes)  # type: ignore[arg-type]


def test_the_room_is_told_beforehand_and_nothing_else_is_taken_that_grows_with_the_rows() -> None:
    """One thread's room for each thread. Beside it a row that chooses has a tally for as long as it counts."""
    taken = []
    _nrt_python.memsys_enable_stats()
    try:
        for rows in (8, 200):
            case = AttentionCase(Packed((rows,)), SMALL, 4)
            inputs = case.make(8)
            expected, memory = run_whole(case, inputs)
            for count in (1, 2):
                with numba_threads(count):
                    asked: dict[str, tuple[int, str]] = {}

                    def take(
                        name: str, count: int, dtype: str, asked: dict[str, tuple[int, str]] = asked
                    ) -> np.ndarray:
                        asked[name] = count, dtype
                        return np.full(count, -1 if "int" in dtype else np.nan, dtype=dtype)

                    seen = np.zeros(1, dtype=np.int64)
                    room = cpu.attention_room(SMALL, case.packed.starts, seen, take)
                    assert asked == cpu.room_sizes(SMALL, rows, rows, count)
                    kept = copied(inputs.memory)
                    rope = cpu.rotary(room.positions, inputs.inv_freq, 1.0, SMALL.ratio)
                    out, proj = np.empty_like(expected), inputs.proj.copy()
                    arguments = (inputs.columns, SMALL, inputs.norms, rope, case.packed.starts, case.packed.slots, seen)
                    before = rtsys.get_allocation_stats().mi_alloc
                    cpu.block_attention(proj, *arguments, kept, out, room)
                    chooses = sum(SMALL.is_sparse(keys) for keys in range(1, rows + 1))
                    taken.append(rtsys.get_allocation_stats().mi_alloc - before - chooses)
                assert same_bits(out, expected) and same_memory(kept, memory)
    finally:
        _nrt_python.memsys_disable_stats()
    assert len(set(taken)) == 1
