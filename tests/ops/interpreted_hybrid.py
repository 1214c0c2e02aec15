"""Hyper-connections, short convolutions and the gated delta rule of the CUDA path in Triton's interpreter.

test_hybrid_kernels.py runs this in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kittiwake.ops.gated_delta import reference as delta_reference
from kittiwake.ops.gated_delta import triton as delta_kernels
from kittiwake.ops.gated_delta.cases import CASES as DELTA_CASES
from kittiwake.ops.gated_delta.cases import GatedDeltaCase
from kittiwake.ops.hyper_mix import reference as mix_reference
from kittiwake.ops.hyper_mix import triton as mix_kernels
from kittiwake.ops.hyper_mix.cases import CASES as MIX_CASES
from kittiwake.ops.hyper_mix.cases import HyperMixCase
from kittiwake.ops.packed import Packed
from kittiwake.ops.short_conv import reference as conv_reference
from kittiwake.ops.short_conv import triton as conv_kernels
from kittiwake.ops.short_conv.cases import CASES as CONV_CASES
from kittiwake.ops.short_conv.cases import ShortConvCase
from tests.ops.bits import same_bits
from tests.ops.interpreted_kernels import _interpretable  # noqa: F401  a fixture
from tests.ops.pieces import cut_in_two
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

EPS = 1e-6
Arrays = dict[str, np.ndarray]
UNITS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the relative distance of two neighbours of a dtype, float32's being in the tolerance anyway."""
every_dtype = pytest.mark.parametrize("dtype", list(UNITS), ids=str)


def kept(array: np.ndarray, dtype: torch.dtype = torch.float32, spare: int = 0, beside: int = 0) -> torch.Tensor:
    """The rows in this dtype, with spare rows and columns of NaN around them; the columns are left out of the view."""
    rows, columns = array.shape
    room = torch.full((rows + spare, columns + 2 * beside), torch.nan, dtype=dtype)
    view = room[:, beside : beside + columns]
    view[:rows] = torch.from_numpy(array)
    return view


def room(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A view of columns with others on either side, all NaN."""
    return torch.full((rows, columns + 6), torch.nan, dtype=dtype)[:, 2 : 2 + columns]


def beside(view: torch.Tensor) -> torch.Tensor:
    """What stands around the columns of a :func:`room`."""
    assert view._base is not None
    around = view._base.clone()
    around[:, 2 : 2 + view.shape[1]] = torch.nan
    return around


def agree(found: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    """As near as float32 arithmetic and one rounding to ``dtype`` allow."""
    units = UNITS[dtype]
    bound = 2 * units * np.abs(expected) + (2e-6 + (1e-7 if units else 0)) * np.abs(expected).max()
    assert (np.abs(found.float().numpy() - expected) <= bound).all()


@dataclass(frozen=True)
class Launch:
    """Rows of a batch padded to a shape: spare rows belong to nobody, spare sequences are empty, in slot 0."""

    starts: np.ndarray
    slots: np.ndarray
    spare_rows: int = 0
    spare_sequences: int = 0

    def metadata(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """owners, starts, slots."""
        rows, sequences = int(self.starts[-1]), len(self.slots)
        owners = np.concatenate([np.repeat(np.arange(sequences), np.diff(self.starts)), np.full(self.spare_rows, -1)])
        starts = np.concatenate([self.starts, np.full(self.spare_sequences, rows)])
        slots = np.concatenate([self.slots, np.zeros(self.spare_sequences, np.int64)])
        made = [torch.from_numpy(array.astype(np.int32)) for array in (owners, starts, slots)]
        return made[0], made[1], made[2]


Run = Callable[[Arrays, np.ndarray, Launch], tuple[np.ndarray, np.ndarray]]
"""(inputs, which of their rows, launch) → their outputs and the states after them."""


def pieces(packed: Packed, seed: int) -> Iterator[tuple[np.ndarray, Launch]]:
    """Two launches of random parts of the sequences, with spare rows and sequences or without."""
    for place, (rows, starts, slots) in enumerate(cut_in_two(packed, seed)):
        yield rows, Launch(starts, slots, (seed + place) % 3, 2 * (seed + place) % 5)


def steps(packed: Packed) -> Iterator[tuple[np.ndarray, Launch]]:
    """A row of every sequence that has one left, launch after launch."""
    for step in range(max(packed.lengths)):
        going = [b for b, length in enumerate(packed.lengths) if step < length]
        rows = packed.starts[going] + step
        yield rows, Launch(np.arange(len(going) + 1), packed.slots[going])


def alone(packed: Packed) -> Iterator[tuple[np.ndarray, Launch]]:
    """A sequence a launch."""
    for b, slot in enumerate(packed.slots):
        rows = np.arange(packed.starts[b], packed.starts[b + 1])
        yield rows, Launch(np.array([0, len(rows)]), np.array([slot]), spare_rows=b % 2)


def bits_do_not_depend_on_launches(run: Run, inputs: Arrays, packed: Packed, ways: str) -> None:
    """The rows and the last states of the whole are those of its parts."""
    expected, expected_state = run(inputs, np.arange(packed.rows), Launch(packed.starts, packed.slots))
    launches = {
        "cut": pieces(packed, 3),
        "cut elsewhere": pieces(packed, 4),
        "steps": steps(packed),
        "alone": alone(packed),
    }
    state = inputs["state"]
    for rows, launch in launches[ways]:
        found, state = run(inputs | {"state": state}, rows, launch)
        assert same_bits(found, expected[rows])
    assert same_bits(state, expected_state)


every_way = pytest.mark.parametrize("ways", ["cut", "cut elsewhere", "steps", "alone"])


# Hyper-connections


def run_mix(inputs: Arrays, case: HyperMixCase, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All kernels on copies of the inputs, in columns of wider rows."""
    rows, streams, wide = len(inputs["x"]), case.streams, case.streams * case.width
    x, combined = kept(inputs["x"], beside=3), kept(inputs["x"])
    y, low = (kept(inputs[name], dtype, beside=1) for name in ("y", "low"))
    normed, again, mixed = room(rows, wide, dtype), room(3, wide, dtype), room(rows, case.width, dtype)
    mean, weight = room(rows, case.width), torch.from_numpy(inputs["weight"])
    inject = low[:, case.rank :]
    mix_kernels.combine_and_norm(x, y, inject, streams, weight, EPS, normed, overlap=False)
    mix_kernels.combine_streams(combined, y, inject, streams, overlap=False)
    want = torch.tensor([rows - 1, 0, rows // 2], dtype=torch.int32)
    mix_kernels.norm_wanted(combined, want, streams, weight, EPS, again, overlap=False)
    mix_kernels.mean_streams(combined, streams, mean)
    mix_kernels.mix_low(low[:, : case.rank], streams, overlap=False)
    normed_in, gate = (kept(inputs[name], dtype, beside=2) for name in ("normed", "gate"))
    mix_kernels.mix_streams(normed_in, gate, streams, mixed, overlap=False)
    assert torch.equal(again, normed[want.long()])
    for view in (normed, again, mixed, mean):
        assert torch.isnan(beside(view)).all()
    return {
        "x": x, "combined": combined, "normed": normed, "mean": mean, "low": low, "mixed": mixed
    }  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for case in MIX_CASES
        for dtype in UNITS
        if case.rows < 60 or (case.rows < 100 and dtype == torch.float32)
    ],
    ids=str,
)
def test_the_mix_agrees_with_the_reference(case: HyperMixCase, dtype: torch.dtype) -> None:
    inputs = case.make()
    found = run_mix(inputs, case, dtype)
    there = {name: kept(inputs[name], dtype).float().numpy() for name in ("y", "low", "normed", "gate")}
    x = mix_reference.combine_streams(inputs["x"], there["y"], there["low"][:, case.rank :])
    agree(found["x"], x, torch.float32)
    assert same_bits(found["x"].numpy(), found["combined"].numpy())
    normed = mix_reference.norm_streams(found["x"].numpy(), case.streams, inputs["weight"], EPS)
    agree(found["normed"], normed, dtype)
    agree(found["mean"], found["x"].numpy().reshape(case.rows, case.streams, -1).mean(1), torch.float32)
    agree(found["low"][:, : case.rank], mix_reference.mix_low(there["low"][:, : case.rank], case.streams), dtype)
    assert same_bits(found["low"][:, case.rank :].float().numpy(), there["low"][:, case.rank :])
    agree(found["mixed"], mix_reference.mix_streams(there["normed"], there["gate"], case.streams), dtype)


@pytest.mark.parametrize("case", [case for case in MIX_CASES if case.rows < 60], ids=str)
def test_a_row_of_the_mix_alone_has_the_bits_it_has_in_a_crowd(case: HyperMixCase) -> None:
    inputs = case.make()
    expected = run_mix(inputs, case)
    for row in {0, case.rows // 2, case.rows - 1}:
        part = {name: array if array.ndim == 1 else array[row : row + 1] for name, array in inputs.items()}
        found = run_mix(part, case)
        assert all(same_bits(found[name].numpy(), expected[name][row : row + 1].numpy()) for name in expected)


@pytest.mark.parametrize("case", [case for case in MIX_CASES if case.rows < 60], ids=str)
def test_with_nothing_to_add_the_streams_are_normed_as_they_are(case: HyperMixCase) -> None:
    inputs = case.make()
    x, normed = torch.from_numpy(inputs["x"].copy()), torch.full(inputs["x"].shape, torch.nan)
    weight = torch.from_numpy(inputs["weight"])
    mix_kernels.combine_and_norm(x, None, None, case.streams, weight, EPS, normed, overlap=False)
    assert same_bits(x.numpy(), inputs["x"])
    agree(normed, mix_reference.norm_streams(inputs["x"], case.streams, inputs["weight"], EPS), torch.float32)


def test_shares_of_large_logits_are_nothing_or_two() -> None:
    x, y, inject = torch.ones((1, 6)), torch.full((1, 2), 3.0), torch.tensor([[-1e6, 0.0, 1e6]])
    mix_kernels.combine_streams(x, y, inject, 3, overlap=False)
    assert x.tolist() == [[1, 1, 4, 4, 7, 7]]


@every_dtype
@pytest.mark.parametrize("width", [1, 65, 513])
def test_streams_open_with_the_embedding_or_that_of_the_token_drawn_last(width: int, dtype: torch.dtype) -> None:
    table = torch.randn((11, width), generator=torch.Generator().manual_seed(width)).to(dtype)
    ids = torch.tensor([10, 0, -1, 3, -1, 0], dtype=torch.int32)
    owners, slots = (
        torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32),
        torch.tensor([4, 1, 3, 2, 0], dtype=torch.int32),
    )
    drawn = torch.tensor([-7, 9, 9, 5, 9])  # a fault of the sampler stands below 0: any row will do, but none outside
    x = room(6, 3 * width)
    mix_kernels.open_streams(ids, owners, slots, drawn, table, 3, x, overlap=False)
    assert same_bits(x.numpy(), table[[10, 0, 5, 3, 0, 0]].float().repeat(1, 3).numpy())
    assert torch.isnan(beside(x)).all()


# Short convolutions


def run_conv(
    case: ShortConvCase, inputs: Arrays, rows: np.ndarray, launch: Launch, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, np.ndarray]:
    """out [N, C] and the states after; spare rows and columns stay as they are."""
    own = slice(case.beside, case.beside + case.width)
    x = kept(inputs["x"][rows][:, own], dtype, launch.spare_rows, case.beside)
    out, state = room(len(x), case.width, dtype), torch.from_numpy(inputs["state"].copy())
    weight = torch.from_numpy(inputs["weight"])
    conv_kernels.short_conv(
        x, weight, case.dilation, case.is_silu, *launch.metadata(), state, out, overlap=False
    )  # fmt: skip
    assert torch.isnan(out[len(rows) :]).all() and torch.isnan(beside(out)).all()
    return out[: len(rows)].float().numpy(), state.numpy()


@every_dtype
@pytest.mark.parametrize("case", CONV_CASES, ids=str)
def test_a_convolution_agrees_with_the_reference(case: ShortConvCase, dtype: torch.dtype) -> None:
    inputs, packed = case.make(), case.packed
    inputs["x"] = torch.from_numpy(inputs["x"]).to(dtype).float().numpy()
    state = inputs["state"].copy()
    own = np.ascontiguousarray(inputs["x"][:, case.beside : case.beside + case.width])
    expected = conv_reference.short_conv(
        own, inputs["weight"], case.dilation, case.is_silu, packed.starts, packed.slots, state
    )
    launch = Launch(packed.starts, packed.slots)
    found, found_state = run_conv(case, inputs, np.arange(packed.rows), launch, dtype)
    agree(torch.from_numpy(found), expected, dtype)
    assert same_bits(found_state, state)


@every_way
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CONV_CASES if case.packed.rows < 60),
        ShortConvCase(Packed((29,)), 5, 4, 3, True, 1),
        ShortConvCase(Packed((11, 2, 1, 7)), 300, 3, 2, False, 4),
        ShortConvCase(Packed((3, 2)), 5, 1, 1, False, 0),
    ],
    ids=str,
)
def test_launches_change_no_bit_of_a_convolution(case: ShortConvCase, ways: str) -> None:
    """Both layouts are among them: a program a sequence where each has one row, else a program a few rows."""

    def run(inputs: Arrays, rows: np.ndarray, launch: Launch) -> tuple[np.ndarray, np.ndarray]:
        return run_conv(case, inputs, rows, launch)

    bits_do_not_depend_on_launches(run, case.make(), case.packed, ways)


def test_as_many_rows_as_sequences_need_not_be_one_of_each() -> None:
    """Four rows of one sequence beside three empty ones go through the layout for decoding, to the same bits."""
    case = ShortConvCase(Packed((4,)), 6, 4, 3, True, 2)
    inputs = case.make()
    expected = run_conv(case, inputs, np.arange(4), Launch(case.packed.starts, case.packed.slots))
    found = run_conv(case, inputs, np.arange(4), Launch(case.packed.starts, case.packed.slots, 0, 3))
    assert all(map(same_bits, found, expected))


# The gated delta rule


def grouped(case: GatedDeltaCase) -> GatedDeltaCase:
    return replace(case, order="grouped")


def parts_of(case: GatedDeltaCase, inputs: Arrays) -> tuple[np.ndarray, ...]:
    """q, k [N, nk, K], v, z [N, nv, V], a, b [N, nv]."""
    rows, keys, heads = len(inputs["qkv"]), case.key_heads * case.keys, case.value_heads
    q, k, v = np.split(inputs["qkv"], [keys, 2 * keys], axis=1)
    z, a, b = np.split(inputs["gates"], [case.width, case.width + heads], axis=1)
    by_key, by_value = (rows, case.key_heads, case.keys), (rows, heads, case.values)
    return q.reshape(by_key), k.reshape(by_key), v.reshape(by_value), z.reshape(by_value), a, b


def run_delta(
    case: GatedDeltaCase, inputs: Arrays, rows: np.ndarray, launch: Launch, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, np.ndarray]:
    """out [N, nv V] and the states after."""
    heads, width = case.value_heads, case.width
    qkv = kept(inputs["qkv"][rows], dtype, launch.spare_rows, 1)
    gates = kept(inputs["gates"][rows], dtype, launch.spare_rows, 3)
    z, a, b = gates[:, :width], gates[:, width : width + heads], gates[:, width + heads :]
    rates, bias, norm = (torch.from_numpy(inputs[name]) for name in ("decay_rate", "dt_bias", "norm_weight"))
    state, out = torch.from_numpy(inputs["state"].copy()), room(len(qkv), width, dtype)
    made = room(len(qkv), delta_kernels.made_columns(case.key_heads, heads, case.keys, case.values))
    _, starts, slots = launch.metadata()
    delta_kernels.gated_delta(
        qkv, case.key_heads, z, a, b, rates, bias, norm, EPS, case.is_silu_gate, starts, slots, state, made, out,
        overlap=False,
    )  # fmt: skip
    assert torch.isnan(beside(out)).all() and torch.isnan(beside(made)).all()
    return out[: len(rows)].float().numpy(), state.numpy()


def run_whole(
    case: GatedDeltaCase, inputs: Arrays, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, np.ndarray]:
    launch = Launch(case.packed.starts, case.packed.slots)
    return run_delta(case, inputs, np.arange(case.packed.rows), launch, dtype)


def check_delta(case: GatedDeltaCase, inputs: Arrays, dtype: torch.dtype) -> None:
    """Rows and states against the reference on what is left of the inputs in ``dtype``."""
    for name in ("qkv", "gates"):
        inputs[name] = torch.from_numpy(inputs[name]).to(dtype).float().numpy()
    packed, state = case.packed, inputs["state"].copy()
    params = delta_reference.Params(
        case.key_of, inputs["decay_rate"], inputs["dt_bias"], inputs["norm_weight"], EPS, case.is_silu_gate
    )
    expected = delta_reference.gated_delta(*parts_of(case, inputs), params, packed.starts, packed.slots, state)
    found, found_state = run_whole(case, inputs, dtype)
    assert relative_error(found_state[packed.slots], state[packed.slots]) < 1e-6
    assert relative_error(found, expected) < 2e-6 + UNITS[dtype]
    others = np.setdiff1d(np.arange(packed.table_slots), packed.slots)
    assert same_bits(found_state[others], inputs["state"][others])


@pytest.mark.parametrize("case", [grouped(case) for case in DELTA_CASES], ids=str)
def test_the_rule_agrees_with_the_reference(case: GatedDeltaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.values >= 60:  # a program costs the interpreter as much as a few hundred values
        monkeypatch.setattr(delta_kernels, "COLUMNS", 64)
    check_delta(case, case.make(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [grouped(DELTA_CASES[1]), grouped(DELTA_CASES[5])], ids=str)
def test_the_rule_agrees_with_the_reference_on_narrow_inputs(case: GatedDeltaCase, dtype: torch.dtype) -> None:
    check_delta(case, case.make(), dtype)


@every_way
@pytest.mark.parametrize(
    "case",
    [
        GatedDeltaCase(Packed((9, 1, 4)), 2, 4, 7, 5, "grouped", False),
        GatedDeltaCase(Packed((1,) * 5), 1, 1, 33, 20, "grouped", True),
        GatedDeltaCase(Packed((13,)), 1, 2, 16, 33, "grouped", False),
    ],
    ids=str,
)
def test_launches_change_no_bit_of_the_rule(case: GatedDeltaCase, ways: str) -> None:
    def run(inputs: Arrays, rows: np.ndarray, launch: Launch) -> tuple[np.ndarray, np.ndarray]:
        return run_delta(case, inputs, rows, launch)

    bits_do_not_depend_on_launches(run, case.make(), case.packed, ways)


def test_a_slot_changes_no_bit() -> None:
    case = GatedDeltaCase(Packed((5,)), 1, 2, 8, 6, "grouped", True)
    inputs = case.make()
    expected, expected_state = run_whole(case, inputs)
    moved = inputs | {"state": inputs["state"][[2, 0, 1]]}
    found, state = run_delta(case, moved, np.arange(5), Launch(case.packed.starts, np.array([2])))
    assert same_bits(found, expected) and same_bits(state[2], expected_state[1])


def test_spare_rows_of_decoding_move_no_state_but_the_scratch_slots() -> None:
    """Decoding is padded with sequences of one row, all in slot 0."""
    case = GatedDeltaCase(Packed((1, 1, 1)), 1, 2, 8, 6, "grouped", False)
    inputs = case.make()
    expected, expected_state = run_whole(case, inputs)
    padded = Launch(np.arange(6), np.concatenate([case.packed.slots, [0, 0]]))
    found, state = run_delta(case, inputs, np.array([0, 1, 2, 0, 1]), padded)
    assert same_bits(found[:3], expected) and same_bits(state[1:], expected_state[1:])


def test_decays_from_none_to_all_are_those_of_float64() -> None:
    case = GatedDeltaCase(Packed((70,)), 1, 3, 8, 6, "grouped", False)
    inputs, heads, slot = case.make(), case.value_heads, case.packed.slots[0]
    rows = np.arange(70)
    inputs["decay_rate"][:] = [1e-4, 3.0, 1e4]
    inputs["gates"][:, case.width : case.width + heads] = np.linspace(-80, 80, 70)[:, None]
    q, k, v, z, a, b = (array.astype(np.float64) for array in parts_of(case, inputs))
    rate, bias, weight = (inputs[name].astype(np.float64) for name in ("decay_rate", "dt_bias", "norm_weight"))
    before = inputs["state"][slot].swapaxes(-1, -2).astype(np.float64)
    expected, after = hybrid_float64.gated_delta_layer(
        q[:, case.key_of], k[:, case.key_of], v, z, a, b, rate, bias, weight, EPS, False, before
    )
    found, state = run_delta(case, inputs, rows, Launch(case.packed.starts, case.packed.slots))
    assert relative_error(found, expected) < 3e-6
    assert relative_error(state[slot].swapaxes(-1, -2), after) < 1e-6


def test_gates_far_out_keep_a_state_as_it_is_or_end_it() -> None:
    case = GatedDeltaCase(Packed((2,)), 1, 2, 4, 3, "grouped", False)
    inputs, heads, slot = case.make(), case.value_heads, case.packed.slots[0]
    inputs["gates"][:, case.width : case.width + heads] = [-1e4, 1e4]
    inputs["decay_rate"][:], inputs["dt_bias"][:] = 16, 0
    inputs["gates"][:, case.width + heads :] = -1e4  # beta 0: nothing is written
    _, state = run_whole(case, inputs)
    assert same_bits(state[slot, 0], inputs["state"][slot, 0])
    assert not state[slot, 1].any()


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = GatedDeltaCase(Packed((3, 4, 2)), 1, 2, 8, 6, "grouped", True)
    inputs = case.make()
    expected, expected_state = run_whole(case, inputs)
    inputs["qkv"][4] = np.nan
    inputs["state"][case.packed.slots[1]] = np.inf
    found, state = run_whole(case, inputs)
    assert np.isnan(found[4]).all()
    for rows, sequence in ((slice(0, 3), 0), (slice(7, 9), 2)):
        slot = case.packed.slots[sequence]
        assert same_bits(found[rows], expected[rows]) and same_bits(state[slot], expected_state[slot])
