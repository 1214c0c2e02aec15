"""Experts: the router's choice, every row's product the bits it has alone, and sums in the router's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.ops.experts import cpu, reference
from kittiwake.ops.experts.cases import CASES, ExpertsCase
from kittiwake.ops.matmul import reference as matmul
from tests.ops.bits import same_bits
from tests.ops.pieces import SPARE, THREADS, check_threads, numba_threads, spared, unwritten
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def route(case: ExpertsCase, logits: np.ndarray, column: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """chosen and shares [N, k]; spare rows stay as they are."""
    rows = len(logits)
    chosen, shares = np.full((rows + SPARE, case.top_k), -1), unwritten(rows, case.top_k)
    cpu.route(spared(logits), column, rows, case.experts, case.is_renormalised, chosen, shares)
    assert (chosen[rows:] == -1).all() and np.isnan(shares[rows:]).all()
    return chosen[:rows], shares[:rows]


def tiles(weights: np.ndarray) -> np.ndarray:
    """[E, K, N] → [E, tiles, K, n], as the kernels want them."""
    experts, depth, columns = weights.shape
    split = weights.reshape(experts, depth, -1, cpu.tile_columns(columns))
    return np.ascontiguousarray(split.swapaxes(1, 2))


def mix(case: ExpertsCase, inputs: Arrays, chosen: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """y [N, C]; the rows of the scratch that no pair has stay as they are, and so do spare rows of y."""
    rows = len(inputs["x"])
    h = unwritten(rows * case.top_k, case.ff)
    d = unwritten(rows * case.top_k, case.width)
    y = unwritten(rows, case.width)
    gate_up = np.concatenate([tiles(half) for half in np.split(inputs["gate_up"], 2, axis=2)], axis=1)
    cpu.mix_experts(spared(inputs["x"]), rows, chosen, shares, gate_up, tiles(inputs["down"]), h, d, y)
    assert all(np.isnan(array[used:]).all() for array, used in ((h, len(h) - SPARE), (d, len(d) - SPARE), (y, rows)))
    return y[:rows]


def whole(case: ExpertsCase, inputs: Arrays) -> np.ndarray:
    return mix(case, inputs, *route(case, inputs["logits"]))


# The router


@every_case
def test_the_router_agrees_with_the_reference(case: ExpertsCase) -> None:
    logits = case.make()["logits"]
    chosen, shares = route(case, logits)
    expected, expected_shares = reference.route(logits, case.top_k, case.is_renormalised)
    assert np.array_equal(chosen, expected)
    assert relative_error(shares, expected_shares) < 1e-6


@every_case
def test_of_equal_experts_the_first_are_chosen(case: ExpertsCase) -> None:
    chosen, shares = route(case, np.full((2, case.experts), 0.7, np.float32))
    assert np.array_equal(chosen, np.tile(np.arange(case.top_k), (2, 1)))
    assert len(np.unique(shares)) == 1


@every_case
def test_shares_fall_and_experts_differ(case: ExpertsCase) -> None:
    chosen, shares = route(case, case.make()["logits"])
    assert (np.diff(shares, axis=1) <= 0).all()
    assert all(len(set(row)) == case.top_k for row in chosen.tolist())
    if case.is_renormalised:
        assert np.allclose(shares.sum(1), 1, atol=1e-6)


def test_chosen_probabilities_are_divided_by_no_less_than_the_smallest_sum() -> None:
    case = ExpertsCase(1, 20_000, 1, 1, 1, True)  # the one chosen has 1/20000 < 2**-14
    _, shares = route(case, np.zeros((1, case.experts), np.float32))
    assert shares[0, 0] == pytest.approx(2**14 / 20_000, rel=1e-6)


def test_the_router_reads_its_own_columns() -> None:
    case = CASES[3]
    logits = case.make()["logits"]
    beside = np.full((case.rows, 5), 1e9, np.float32)
    found = route(case, np.concatenate([beside, logits, beside], axis=1), column=5)
    expected = route(case, logits)
    assert np.array_equal(found[0], expected[0]) and same_bits(found[1], expected[1])


def test_logits_that_are_not_finite_choose_experts_that_exist() -> None:
    case = CASES[2]
    for value in (np.nan, np.inf, -np.inf):
        logits = case.make()["logits"]
        logits[0, 3] = value
        chosen, _ = route(case, logits)
        assert ((chosen >= 0) & (chosen < case.experts)).all() and len(set(chosen[0].tolist())) == case.top_k


# Products and sums


@every_case
def test_the_mixture_agrees_with_the_reference_and_with_float64(case: ExpertsCase) -> None:
    inputs = case.make()
    chosen, shares = route(case, inputs["logits"])
    found = mix(case, inputs, chosen, shares)
    expected = reference.mix_experts(inputs["x"], chosen, shares, inputs["gate_up"], inputs["down"])
    assert relative_error(found, expected) < 2e-6
    exact = {name: array.astype(np.float64) for name, array in inputs.items()}
    expected = hybrid_float64.mix_experts(
        exact["x"], exact["logits"], case.top_k, case.is_renormalised, exact["gate_up"], exact["down"]
    )
    assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("most", [1, 3, 64, 1 << 20])
@every_case
def test_tiles_change_no_bit(case: ExpertsCase, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.make()
    expected = whole(case, inputs)
    monkeypatch.setattr(cpu, "MOST_TILE_COLUMNS", most)
    monkeypatch.setattr(cpu, "LEAST_TILE_COLUMNS", 1)
    assert same_bits(whole(case, inputs), expected)


@pytest.mark.parametrize(("columns", "tile"), [(1, 1), (640, 640), (2560, 640), (641, 641), (1408, 352), (515, 515)])
def test_tiles_divide_their_columns(columns: int, tile: int) -> None:
    assert cpu.tile_columns(columns) == tile


@every_case
def test_every_product_has_the_bits_of_the_definition(case: ExpertsCase) -> None:
    """One expert a row with a share of one: what is left is the definition's product, gate, and product again."""
    inputs = case.make()
    rows = min(case.rows, 5)
    chosen = np.random.default_rng(7).integers(0, case.experts, (rows, 1))
    alone = ExpertsCase(rows, case.experts, 1, case.width, case.ff, True)
    part = inputs | {"x": inputs["x"][:rows]}
    found = mix(alone, part, chosen, np.ones((rows, 1), np.float32))
    for row in range(rows):
        gate_up = matmul.product(part["x"][row : row + 1], inputs["gate_up"][chosen[row, 0]], cpu.K_BLOCK)
        h = np.empty((1, case.ff), np.float32)
        cpu.silu_times(gate_up, 0, 1, case.ff, h)
        assert same_bits(found[row : row + 1], matmul.product(h, inputs["down"][chosen[row, 0]], cpu.K_BLOCK))


@every_case
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(case: ExpertsCase) -> None:
    inputs = case.make()
    expected = whole(case, inputs)
    for row in range(0, case.rows, max(1, case.rows // 9)):
        part = inputs | {name: inputs[name][row : row + 1] for name in ("x", "logits")}
        assert same_bits(whole(case, part), expected[row : row + 1]), row


@pytest.mark.parametrize("seed", range(3))
@every_case
def test_other_neighbours_in_another_order_change_no_bit(case: ExpertsCase, seed: int) -> None:
    inputs = case.make()
    order = np.random.default_rng(seed).permutation(case.rows)[: max(1, case.rows * 2 // 3)]
    part = inputs | {name: inputs[name][order] for name in ("x", "logits")}
    assert same_bits(whole(case, part), whole(case, inputs)[order])


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: ExpertsCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.make()
    expected = whole(case, inputs)
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: whole(case, inputs), expected)


@every_case
def test_sums_go_in_the_routers_order(case: ExpertsCase) -> None:
    """The bits are those of the experts' rows added one after the other, the most liked first."""
    inputs = case.make()
    chosen, shares = route(case, inputs["logits"])
    alone = ExpertsCase(case.rows, case.experts, 1, case.width, case.ff, True)
    ones = np.ones((case.rows, 1), np.float32)
    total = np.zeros((case.rows, case.width), np.float32)
    for rank in range(case.top_k):
        row = mix(alone, inputs, np.ascontiguousarray(chosen[:, rank : rank + 1]), ones)
        exact = row.astype(np.float64) * shares[:, rank : rank + 1].astype(np.float64)
        total = (total.astype(np.float64) + exact).astype(np.float32)  # a fused multiply-add
    assert same_bits(mix(case, inputs, chosen, shares), total)


@every_case
def test_bfloat16_weights_give_the_bits_of_the_same_weights_widened(case: ExpertsCase) -> None:
    inputs = case.make()
    narrow = {name: torch.from_numpy(inputs[name]).to(torch.bfloat16) for name in ("gate_up", "down")}
    stored = inputs | {name: tensor.view(torch.uint16).numpy() for name, tensor in narrow.items()}
    widened = inputs | {name: tensor.float().numpy() for name, tensor in narrow.items()}
    assert same_bits(whole(case, stored), whole(case, widened))


def test_a_row_that_is_not_finite_harms_no_neighbour() -> None:
    case = CASES[4]
    inputs = case.make()
    expected = whole(case, inputs)
    inputs["x"][5], inputs["logits"][6] = np.nan, np.nan
    found = whole(case, inputs)
    assert np.isnan(found[5:7]).all()
    others = np.setdiff1d(np.arange(case.rows), [5, 6])
    assert same_bits(found[others], expected[others])


# The shared expert


@every_case
def test_the_shared_expert_is_gated_and_added(case: ExpertsCase, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.make()
    y, gate = spared(inputs["x"]), spared(np.tile(inputs["shared_gate"], 3))
    cpu.add_gated(y, spared(inputs["shared"]), gate, 2, case.rows)
    expected = reference.add_gated(inputs["x"], inputs["shared"], inputs["shared_gate"][:, 0])
    assert relative_error(y[: case.rows], expected) < 1e-6
    assert np.isnan(y[case.rows :]).all()
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", 0)
    for threads in THREADS:
        with numba_threads(threads):
            again = spared(inputs["x"])
            cpu.add_gated(again, spared(inputs["shared"]), gate, 2, case.rows)
        assert same_bits(again[: case.rows], y[: case.rows])


@every_case
def test_gate_and_up_lie_in_their_columns(case: ExpertsCase, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    gate_up = rng.standard_normal((case.rows, 2 + 2 * case.ff + 1)).astype(np.float32) * 9
    out = unwritten(case.rows, case.ff)
    cpu.silu_times(spared(gate_up), 2, case.rows, case.ff, out)
    expected = reference.silu_times(gate_up[:, 2 : 2 + case.ff], gate_up[:, 2 + case.ff : 2 + 2 * case.ff])
    assert relative_error(out[: case.rows], expected) < 1e-6
    assert np.isnan(out[case.rows :]).all()
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", 0)
    for threads in THREADS:
        with numba_threads(threads):
            again = np.full_like(out, np.nan)
            cpu.silu_times(spared(gate_up), 2, case.rows, case.ff, again)
        assert same_bits(again[: case.rows], out[: case.rows])
