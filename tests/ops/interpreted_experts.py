"""Experts and the n-gram layer's mix in Triton's interpreter; test_expert_kernels.py runs this in its own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kittiwake.errors import DeviceError
from kittiwake.layers import cuda_experts
from kittiwake.layers.cuda_experts import CudaExpertGroup, ExpertPicks, prove_experts, tilings
from kittiwake.ops.experts import reference
from kittiwake.ops.experts import triton as kernels
from kittiwake.ops.experts.cases import CASES, ExpertsCase
from kittiwake.ops.experts.triton import Grouped, Tiling, as_they_are, group_pairs, most_tiles, sum_pairs
from kittiwake.ops.matmul.triton import Config
from kittiwake.ops.ngram_mix import reference as ngram_reference
from kittiwake.ops.ngram_mix import triton as ngram_kernels
from kittiwake.ops.ngram_mix.cases import CASES as NGRAM_CASES
from kittiwake.ops.ngram_mix.cases import NgramMixCase
from kittiwake.ops.packed import Packed
from tests.ops.bits import same_bits
from tests.ops.interpreted_kernels import dot_in_order, make_interpretable
from tests.ops.pieces import cut_in_two
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

CPU = torch.device("cpu")
EPS = 1e-6
SPARE = 3
Arrays = dict[str, np.ndarray]
CROWDS = (*CASES[:3], ExpertsCase(9, 4, 3, 20, 5, False), ExpertsCase(21, 5, 2, 20, 18, True))
COARSE = (Tiling(Config(64, 256, 128, 1, 1), Config(64, 256, 128, 1, 1)),) * 4
"""Few programs, each of which costs the interpreter milliseconds."""
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_crowd = pytest.mark.parametrize("case", CROWDS, ids=str)
CUT = (NGRAM_CASES[1], NgramMixCase(Packed((11, 1, 2, 7)), 2, 33, 4, 3), NgramMixCase(Packed((5, 1)), 1, 40, 1, 2))
every_cut_case = pytest.mark.parametrize("case", CUT, ids=str)
SHORT = tuple(
    replace(case, packed=Packed(tuple(min(length, 24) for length in case.packed.lengths))) for case in NGRAM_CASES
)
"""With sequences as long as the interpreter has time for, and longer than what any convolution carries."""
every_ngram_case = pytest.mark.parametrize("case", SHORT, ids=str)


@pytest.fixture(autouse=True)
def _interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    make_interpretable(monkeypatch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)


# The router


def route(logits: np.ndarray, top_k: int, is_renormalised: bool, dtype: torch.dtype = torch.float32) -> Arrays:
    """chosen and shares [N, k], of logits that stand in wider rows; spare rows stay as they are."""
    rows, experts = logits.shape
    wide = torch.full((rows, experts + 9), 1e4, dtype=dtype)
    wide[:, 5 : 5 + experts] = torch.from_numpy(logits)
    chosen = torch.full((rows + SPARE, top_k), -7, dtype=torch.int32)
    shares = torch.full((rows + SPARE, top_k), torch.nan)
    given = wide[:, 5 : 5 + experts]
    kernels.route(given, chosen[:rows], shares[:rows], is_renormalised, overlap=False)
    assert (chosen[rows:] == -7).all() and torch.isnan(shares[rows:]).all()
    return {"chosen": chosen[:rows].numpy(), "shares": shares[:rows].numpy()}


def routed(case: ExpertsCase, logits: np.ndarray) -> Arrays:
    return route(logits, case.top_k, case.is_renormalised)


@every_case
def test_the_router_agrees_with_the_reference(case: ExpertsCase) -> None:
    """Logits of halves are the same numbers in bfloat16."""
    logits = case.make()["logits"][-70:]
    found = route(logits, case.top_k, case.is_renormalised, torch.bfloat16 if case.rows % 2 else torch.float32)
    chosen, shares = reference.route(logits, case.top_k, case.is_renormalised)
    assert np.array_equal(found["chosen"], chosen)
    assert relative_error(found["shares"], shares) < 1e-6


@every_case
def test_of_equal_experts_the_first_are_chosen_and_each_one_once(case: ExpertsCase) -> None:
    found = routed(case, np.full((2, case.experts), 0.7, np.float32))
    assert np.array_equal(found["chosen"], np.tile(np.arange(case.top_k), (2, 1)))
    assert len(np.unique(found["shares"])) == 1
    drawn = routed(case, case.make()["logits"][:9])
    assert all(len(set(row)) == case.top_k for row in drawn["chosen"].tolist())
    assert (np.diff(drawn["shares"], axis=1) <= 0).all()


def test_more_experts_than_a_power_of_two_and_many_ranks() -> None:
    """With nothing to tell them apart but their numbers, where probabilities underflow to nothing."""
    logits = np.full((2, 515), -200, np.float32)
    logits[0, 514], logits[1, [3, 300]] = 1, (1, 2)
    found = route(logits, 40, True)
    assert found["chosen"][0].tolist() == [514, *range(39)]
    assert found["chosen"][1].tolist() == [300, 3, *(e for e in range(39) if e != 3)]
    assert found["shares"][0].tolist() == [1.0, *[0.0] * 39]


def test_chosen_probabilities_are_divided_by_no_less_than_the_smallest_sum() -> None:
    found = route(np.zeros((1, 20_000), np.float32), 1, True)
    assert found["shares"][0, 0] == pytest.approx(2**14 / 20_000, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_choose_experts_that_exist(value: float) -> None:
    case = CASES[5]
    logits = case.make()["logits"][:5]
    expected = routed(case, logits)
    logits[1, 3], logits[2] = value, value
    found = routed(case, logits)
    for row in (1, 2):
        chosen = found["chosen"][row]
        assert ((chosen >= 0) & (chosen < case.experts)).all() and len(set(chosen.tolist())) == case.top_k
    assert np.isnan(found["shares"][2]).all()
    assert np.isnan(found["shares"][1]).all() or value == -np.inf  # which is a probability of nothing
    for row in (0, 3, 4):
        assert same_bits(found["shares"][row], expected["shares"][row])


@every_case
def test_a_row_chooses_alone_as_in_a_crowd(case: ExpertsCase) -> None:
    logits = case.make()["logits"][-30:]
    expected = routed(case, logits)
    for row in range(0, len(logits), max(1, len(logits) // 5)):
        found = routed(case, logits[row : row + 1])
        assert np.array_equal(found["chosen"], expected["chosen"][row : row + 1])
        assert same_bits(found["shares"], expected["shares"][row : row + 1])


# Pairs brought together


def grouped_pairs(chosen: np.ndarray, experts: int, bm: int, owners: np.ndarray | None = None) -> Grouped:
    count = chosen.size
    pairs = torch.full((count + SPARE,), -9, dtype=torch.int32)
    tiles = torch.full((most_tiles(count, experts, bm) + SPARE, 3), -9, dtype=torch.int32)
    own = None if owners is None else torch.from_numpy(owners.astype(np.int32))
    found = group_pairs(torch.from_numpy(chosen.astype(np.int32)), own, experts, pairs, tiles, bm, overlap=False)
    assert (pairs[count:] == -9).all() and (tiles[found.count :] == -9).all()
    return found


def check_grouping(chosen: np.ndarray, experts: int, bm: int, owners: np.ndarray | None = None) -> None:
    """Every pair of a real row is in one tile of its expert, in order; no tile is more than full."""
    found = grouped_pairs(chosen, experts, bm, owners)
    assert found.pairs is not None and found.tiles is not None
    pairs, tiles = found.pairs.numpy(), found.tiles[: found.count].numpy()
    real = np.ones(len(chosen), bool) if owners is None else owners >= 0
    wanted = {
        e: [p for p in range(chosen.size) if chosen.flat[p] == e and real[p // chosen.shape[1]]] for e in range(experts)
    }
    met: dict[int, list[int]] = {e: [] for e in range(experts)}
    for expert, first, count in tiles.tolist():
        assert 0 <= count <= bm and 0 <= expert < experts
        met[expert] += pairs[first : first + count].tolist()
    assert met == wanted
    assert (tiles[:, 2] > 0).sum() == sum(-(-len(some) // bm) for some in wanted.values())


@pytest.mark.parametrize("bm", [16, 64])
@every_case
def test_pairs_stand_by_expert_and_number(case: ExpertsCase, bm: int) -> None:
    chosen, _ = reference.route(case.make()["logits"], case.top_k, case.is_renormalised)
    check_grouping(chosen, case.experts, bm)


@pytest.mark.parametrize("block", [128, 4096])
def test_pairs_of_spare_rows_are_left_out(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PAIRS_AT_ONCE", block)
    rng = np.random.default_rng(1)
    for rows, experts, top_k in ((1, 1, 1), (70, 9, 4), (5, 20, 2)):
        chosen = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k]
        for last in {-1, 0, rows // 2, rows - 1}:
            check_grouping(chosen, experts, 16, np.where(np.arange(rows) <= last, 0, -1))
    everything = np.zeros((300, 1), int)
    check_grouping(everything, 2, 16)
    check_grouping(everything + 1, 2, 16)


# Products and sums


def made_group(case: ExpertsCase, inputs: Arrays, element: torch.dtype = torch.float32) -> CudaExpertGroup:
    group = CudaExpertGroup("e.", case.experts, case.width, case.ff, case.top_k, case.is_renormalised, element, CPU)
    for part in ("gate_up", "down"):
        group.load(f"e.{part}", torch.from_numpy(np.ascontiguousarray(inputs[part].swapaxes(1, 2))))
    return group


def mixed(
    group: CudaExpertGroup,
    inputs: Arrays,
    rows: np.ndarray | None = None,
    *,
    has_shared: bool = True,
    owners: np.ndarray | None = None,
) -> np.ndarray:
    """y [N, C] of some rows, all of them in wider rows; what is beside them and rooms beyond stay as they are."""
    some = np.arange(len(inputs["x"])) if rows is None else rows
    element, width, experts = group.shape.element, group.shape.width, group.shape.experts
    x = torch.full((len(some), width + 3), torch.nan, dtype=element)
    x[:, :width] = torch.from_numpy(inputs["x"][some])
    beside = torch.full((len(some), experts + 4), torch.nan, dtype=torch.float32)
    beside[:, 2 : 2 + experts] = torch.from_numpy(inputs["logits"][some])
    beside[:, 3 + experts :] = torch.from_numpy(inputs["shared_gate"][some])
    shared = torch.from_numpy(inputs["shared"][some]).to(element)
    y = torch.full((len(some) + SPARE, width + 2), torch.nan, dtype=element)
    rooms = group.make_rooms(len(some) + 1)
    for room in (rooms.hidden, rooms.made, rooms.shares):
        room.fill_(torch.nan)
    own = None if owners is None else torch.from_numpy(owners.astype(np.int32))
    group(
        x[:, :width],
        beside[:, 2 : 2 + experts],
        shared if has_shared else None,
        beside[:, 3 + experts :] if has_shared else None,
        rooms,
        y[: len(some), :width],
        overlap=False,
        owners=own,
    )
    assert torch.isnan(y[len(some) :]).all() and torch.isnan(y[:, width:]).all()
    pairs = len(some) * group.shape.top_k
    if len(some) < cuda_experts.ROWS_AT_ONCE:
        assert torch.isnan(rooms.hidden[pairs:]).all() and torch.isnan(rooms.made[pairs:]).all()
    return y[: len(some), :width].float().numpy()


def expected_mix(case: ExpertsCase, inputs: Arrays) -> np.ndarray:
    """In float64, by another way than the reference goes."""
    exact = {name: array.astype(np.float64) for name, array in inputs.items()}
    y = hybrid_float64.mix_experts(
        exact["x"], exact["logits"], case.top_k, case.is_renormalised, exact["gate_up"], exact["down"]
    )
    return np.asarray(y + hybrid_float64.sigmoid(exact["shared_gate"]) * exact["shared"])


@every_case
def test_the_mixture_agrees_with_the_reference_and_with_float64(case: ExpertsCase) -> None:
    inputs = case.make()
    inputs |= {name: inputs[name][-50:] for name in ("x", "logits", "shared", "shared_gate")}
    group = made_group(case, inputs)
    group.picks = ExpertPicks(COARSE)
    found = mixed(group, inputs)
    assert relative_error(found, expected_mix(case, inputs)) < 2e-6
    chosen, shares = reference.route(inputs["logits"], case.top_k, case.is_renormalised)
    expected = reference.mix_experts(inputs["x"], chosen, shares, inputs["gate_up"], inputs["down"])
    expected = reference.add_gated(expected, inputs["shared"], inputs["shared_gate"][:, 0])
    assert relative_error(found, expected) < 2e-6


def test_without_a_shared_expert_nothing_is_added() -> None:
    case = CASES[1]
    inputs = case.make()
    chosen, shares = reference.route(inputs["logits"], case.top_k, case.is_renormalised)
    expected = reference.mix_experts(inputs["x"], chosen, shares, inputs["gate_up"], inputs["down"])
    assert relative_error(mixed(made_group(case, inputs), inputs, has_shared=False), expected) < 2e-6


@pytest.mark.parametrize(("element", "most"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str)
def test_sixteen_bits_are_rounded_between_launches(element: torch.dtype, most: float) -> None:
    case = CASES[2]
    inputs = {
        name: array if name == "logits" else torch.from_numpy(array).to(element).float().numpy()
        for name, array in case.make().items()
    }
    found = mixed(made_group(case, inputs, element), inputs)
    assert 0 < relative_error(found, expected_mix(case, inputs)) < most


@every_crowd
def test_rows_have_their_bits_in_any_crowd(case: ExpertsCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in another order, beside spare rows, cut in groups of rows."""
    inputs = case.make()
    group = made_group(case, inputs)
    expected = mixed(group, inputs)
    for row in {0, case.rows // 2, case.rows - 1}:
        assert same_bits(mixed(group, inputs, np.array([row])), expected[row : row + 1]), row
    order = np.random.default_rng(2).permutation(case.rows)
    owners = np.arange(case.rows) % 3 - 1
    found = mixed(group, inputs, order, owners=owners)
    assert same_bits(found[owners >= 0], expected[order[owners >= 0]])
    if case.rows > cuda_experts.DIRECT_ROWS:
        assert np.isnan(found[owners < 0]).all()  # nothing was computed for them
    monkeypatch.setattr(cuda_experts, "ROWS_AT_ONCE", 7)
    assert same_bits(mixed(group, inputs, order), expected[order])


def test_tiles_change_no_bit() -> None:
    case = CROWDS[-1]
    inputs = case.make()
    group = made_group(case, inputs)
    expected = mixed(group, inputs)
    for bm, bn, bk in ((16, 16, 16), (32, 32, 16), (64, 16, 32)):
        group.picks = ExpertPicks((Tiling(Config(bm, bn, bk, 1, 1), Config(bm, bn, bk, 1, 1)),) * 4)
        assert same_bits(mixed(group, inputs), expected), (bm, bn, bk)


def test_all_rows_may_want_the_same_experts() -> None:
    case = ExpertsCase(40, 17, 2, 20, 18, True)
    inputs = case.make()
    inputs["logits"][:] = -1
    inputs["logits"][:, [16, 4]] = (5, 4)
    group = made_group(case, inputs)
    found = mixed(group, inputs)
    assert relative_error(found, expected_mix(case, inputs)) < 2e-6
    assert same_bits(mixed(group, inputs, np.array([39])), found[39:])


def test_weights_nobody_wants_are_not_read() -> None:
    case = ExpertsCase(12, 7, 2, 20, 17, True)
    inputs = case.make()
    chosen, _ = reference.route(inputs["logits"], case.top_k, case.is_renormalised)
    expected = mixed(made_group(case, inputs), inputs)
    idle = np.setdiff1d(np.arange(case.experts), chosen)
    some = np.flatnonzero((chosen != chosen[0, 0]).all(axis=1))
    inputs["gate_up"][[*idle, chosen[0, 0]]] = np.nan
    group = made_group(case, inputs)
    assert len(some) and same_bits(mixed(group, inputs, some), expected[some])


def test_a_row_that_is_not_finite_harms_no_neighbour() -> None:
    case = ExpertsCase(12, 6, 3, 20, 17, True)
    inputs = case.make()
    group = made_group(case, inputs)
    expected = mixed(group, inputs)
    inputs["x"][5], inputs["logits"][6], inputs["logits"][7, 3] = np.nan, np.nan, np.inf
    found = mixed(group, inputs)
    assert np.isnan(found[5:8]).all()
    others = np.setdiff1d(np.arange(case.rows), [5, 6, 7])
    assert same_bits(found[others], expected[others])


@every_crowd
def test_sums_go_in_the_routers_order(case: ExpertsCase) -> None:
    rng = np.random.default_rng(4)
    made = rng.standard_normal((case.rows * case.top_k, case.width)).astype(np.float32)
    shares = rng.random((case.rows, case.top_k)).astype(np.float32)
    y = torch.full((case.rows, case.width), torch.nan)
    sum_pairs(torch.from_numpy(made), torch.from_numpy(shares), None, None, y, overlap=False)
    total = np.zeros((case.rows, case.width), np.float32)
    for rank in range(case.top_k):
        total += made[rank :: case.top_k] * shares[:, rank : rank + 1]
    assert same_bits(y.numpy(), total)


@every_case
def test_gate_and_up_lie_in_their_columns(case: ExpertsCase) -> None:
    wide = np.random.default_rng(3).standard_normal((case.rows, 2 + 2 * case.ff + 1)).astype(np.float32) * 9
    out = torch.full((case.rows, case.ff + 2), torch.nan)
    kernels.silu_times(torch.from_numpy(wide)[:, 2:-1], out[:, : case.ff], overlap=False)
    expected = reference.silu_times(wide[:, 2 : 2 + case.ff], wide[:, 2 + case.ff : -1])
    assert relative_error(out[:, : case.ff].numpy(), expected) < 1e-6
    assert torch.isnan(out[:, case.ff :]).all()


# The proof


def proof_group() -> CudaExpertGroup:
    case = ExpertsCase(1, 4, 1, 24, 20, True)
    return made_group(case, case.make())


def test_tilings_with_the_same_bits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_experts, "_PROOF_ROWS", 40)
    first, second, told = proof_group(), proof_group(), []
    prove_experts([first, second], lambda *what: told.append(what))
    assert first.picks.tilings == tilings(24, 20, torch.float32) and first.picks.replaced == ()
    assert first.picks is second.picks and told == [("proving experts", 1, 1)]
    assert first.describe()["reason"] == "default; bits proved"


def faulty(bm: int, bn: int, fault: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    """A product that goes wrong in one tiling."""
    right = kernels.down

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, grouped: Grouped, made: torch.Tensor, config: Config, **more: bool
    ) -> None:
        right(hidden, weight, grouped, made, config, **more)
        if (config.bm, config.bn) == (bm, bn):
            fault(made)

    return run


def one_bit(made: torch.Tensor) -> None:
    made.view(torch.int32)[-1, -1] ^= 1


def too_large(made: torch.Tensor) -> None:
    raise RuntimeError("out of shared memory")


@pytest.mark.parametrize("fault", [one_bit, too_large, lambda made: made[3].fill_(torch.nan)])
def test_a_tiling_with_other_bits_is_replaced_by_the_narrow_one(
    fault: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_experts, "_PROOF_ROWS", 40)
    monkeypatch.setattr(cuda_experts, "down", faulty(32, 64, fault))
    group = proof_group()
    prove_experts([group])
    narrow, *wider = tilings(24, 20, torch.float32)
    assert group.picks.tilings == (narrow, *wider[:-1], narrow)
    assert group.picks.replaced == ("32x32x32x4x3 32x64x32x4x3 for more pairs an expert",)
    assert group.describe()["replaced"] == list(group.picks.replaced)


def test_a_bit_that_no_output_shows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hidden channel that every expert's output leaves out."""
    monkeypatch.setattr(cuda_experts, "_PROOF_ROWS", 40)
    right = kernels.gate_up

    def run(
        x: torch.Tensor, weight: torch.Tensor, grouped: Grouped, hidden: torch.Tensor, config: Config, **more: bool
    ) -> None:
        right(x, weight, grouped, hidden, config, **more)
        if config.bm > 16:
            one_bit(hidden)

    monkeypatch.setattr(cuda_experts, "gate_up", run)
    group = proof_group()
    group.load("e.down", torch.nn.functional.pad(torch.ones((4, 24, 19)), (0, 1)))
    prove_experts([group])
    assert set(group.picks.tilings) == {tilings(24, 20, torch.float32)[0]} and len(group.picks.replaced) == 3


def test_a_card_whose_rows_change_with_their_neighbours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_experts, "_PROOF_ROWS", 40)
    right = kernels.down

    def crowded(
        hidden: torch.Tensor, weight: torch.Tensor, grouped: Grouped, made: torch.Tensor, *rest: Config, **more: bool
    ) -> None:
        right(hidden, weight, grouped, made, *rest, **more)
        if grouped.tiles is not None:
            made += 1

    monkeypatch.setattr(cuda_experts, "down", crowded)
    with pytest.raises(DeviceError, match=r"1 of 4 experts 24x20: this card gives a row .* other bits"):
        prove_experts([proof_group()])


def test_pairs_as_they_are_and_brought_together_are_the_same() -> None:
    case = ExpertsCase(9, 5, 2, 40, 17, True)
    inputs = case.make()
    group = made_group(case, inputs)
    chosen, _ = reference.route(inputs["logits"], case.top_k, True)
    rooms, x = group.make_rooms(case.rows), torch.from_numpy(inputs["x"])
    outputs = []
    for grouped in (as_they_are(torch.from_numpy(chosen.astype(np.int32))), grouped_pairs(chosen, case.experts, 16)):
        rooms.made.fill_(torch.nan)
        outputs.append(group.products(x, grouped, rooms, group.picks.tilings[0], overlap=False).numpy().copy())
    assert same_bits(*outputs)


# The n-gram layer's mix

WEIGHTS = ("norm_key", "norm_query", "norm_conv", "conv_weight")


def ngram_mix(
    case: NgramMixCase,
    inputs: Arrays,
    starts: np.ndarray,
    slots: np.ndarray,
    spare: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Arrays:
    """x and state after the mix, with spare rows and an empty spare sequence in slot 0; x and kv stand in wider rows."""
    rows, columns = inputs["x"].shape
    x = torch.full((rows + spare, columns + 3), torch.nan)
    x[:rows, :columns] = torch.from_numpy(inputs["x"])
    kv = torch.full((rows + spare, inputs["kv"].shape[1] + 5), torch.nan, dtype=dtype)
    kv[:rows, 2:-3] = torch.from_numpy(inputs["kv"])
    owners = np.concatenate([np.repeat(np.arange(len(slots)), np.diff(starts)), np.full(spare, -1)])
    meta = (owners, [*starts, *[starts[-1]] * spare], [*slots, *[0] * spare])
    state = torch.from_numpy(inputs["state"].copy())
    scales = torch.full((rows + spare, 2 * case.streams), torch.nan)
    ngram_kernels.ngram_mix(
        x[:, :columns],
        kv[:, 2:-3],
        case.streams,
        *(torch.from_numpy(inputs[name]) for name in WEIGHTS),
        case.dilation,
        EPS,
        *(torch.from_numpy(np.array(array, np.int32)) for array in meta),
        state,
        scales,
        overlap=False,
    )
    assert torch.isnan(x[rows:]).all() and torch.isnan(x[:, columns:]).all() and torch.isnan(scales[rows:]).all()
    return {"x": x[:rows, :columns].numpy().copy(), "state": state.numpy()}


def whole_ngram_mix(case: NgramMixCase) -> Arrays:
    return ngram_mix(case, case.make(), case.packed.starts, case.packed.slots)


@every_ngram_case
def test_the_ngram_mix_agrees_with_float64(case: NgramMixCase) -> None:
    inputs = {name: array.astype(np.float64) for name, array in case.make().items()}
    x = ngram_reference.ngram_mix(
        inputs["x"], inputs["kv"], case.streams, *(inputs[name] for name in WEIGHTS), case.dilation, EPS,
        case.packed.starts, case.packed.slots, inputs["state"],
    )  # fmt: skip
    found = whole_ngram_mix(case)
    for name, exact in {"x": x, "state": inputs["state"]}.items():
        # the square root of a |d| near 0 magnifies its error: rows are of very different size, so each has its own scale
        scale = np.abs(exact).max(axis=-1, keepdims=True) + 1e-30
        assert (np.abs(found[name] - exact) / scale).max() < 2e-5, name
    others = np.setdiff1d(np.arange(case.packed.table_slots), case.packed.slots)
    assert same_bits(found["state"][others], case.make()["state"][others])


@pytest.mark.parametrize("seed", range(2))
@every_cut_case
def test_cuts_change_no_bit_of_the_ngram_mix(case: NgramMixCase, seed: int) -> None:
    inputs, expected = case.make(), whole_ngram_mix(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        found = ngram_mix(
            case, inputs | {"x": inputs["x"][rows], "kv": inputs["kv"][rows]}, starts, slots, len(rows) % 3
        )
        assert same_bits(found["x"], expected["x"][rows])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"], expected["state"])


def test_one_row_at_a_time_changes_no_bit_of_the_ngram_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    case = NgramMixCase(Packed((12,)), 2, 33, 2, 5)
    inputs, expected = case.make(), whole_ngram_mix(case)
    monkeypatch.setattr(ngram_kernels, "BLOCK", 16)  # other blocks of channels, too
    for row in range(case.packed.rows):
        part = inputs | {name: inputs[name][row : row + 1] for name in ("x", "kv")}
        found = ngram_mix(case, part, np.array([0, 1]), case.packed.slots)
        assert same_bits(found["x"], expected["x"][row : row + 1])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"], expected["state"])


def test_a_key_of_zeros_opens_the_gate_by_half() -> None:
    case = NGRAM_CASES[1]
    inputs = case.make()
    columns = case.streams * case.width
    inputs["kv"][:, :columns], inputs["conv_weight"][:] = 0, 0
    found = ngram_mix(case, inputs, case.packed.starts, case.packed.slots)
    half = np.tile(np.float32(0.5) * inputs["kv"][:, columns:], case.streams)
    assert same_bits(found["x"], inputs["x"] + half)


def test_keys_and_values_of_sixteen_bits_are_those_numbers() -> None:
    case = CUT[1]
    inputs = case.make()
    inputs["kv"] = torch.from_numpy(inputs["kv"]).bfloat16().float().numpy()
    given = (case, inputs, case.packed.starts, case.packed.slots)
    narrow, wide = ngram_mix(*given, dtype=torch.bfloat16), ngram_mix(*given)
    assert all(same_bits(narrow[name], wide[name]) for name in wide)
