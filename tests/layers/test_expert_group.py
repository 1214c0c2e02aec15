"""Experts of a layer: loading, refusals, and the same bits in any crowd and at any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.errors import ModelError
from kittiwake.layers import experts
from kittiwake.layers.experts import ExpertGroup
from kittiwake.layers.linear import LinearGroup, Pick, Product, Workspace, padded
from kittiwake.ops.experts import cpu
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

EXPERTS, WIDTH, FF, TOP_K = 12, 200, 36, 3
PREFIX = "layers.0.experts."
ROWS = 70


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


GATE_UP, DOWN = draw(1, EXPERTS, 2 * FF, WIDTH), draw(2, EXPERTS, WIDTH, FF)
X, LOGITS = draw(3, ROWS, WIDTH).numpy() * 10, draw(4, ROWS, 5 + EXPERTS).numpy() * 20


def empty_group(dtype: str = "fp32", is_renormalised: bool = True) -> ExpertGroup:
    return ExpertGroup(PREFIX, EXPERTS, WIDTH, FF, TOP_K, is_renormalised, dtype)


def make_group(dtype: str = "fp32", is_renormalised: bool = True) -> ExpertGroup:
    group = empty_group(dtype, is_renormalised)
    group.load(f"{PREFIX}gate_up", GATE_UP)
    group.load(f"{PREFIX}down", DOWN)
    return group


def run(group: ExpertGroup, rows: np.ndarray) -> np.ndarray:
    """The mixture [R, C] of these rows of X; rows of the buffers beyond them are zeros and stay so."""
    workspace, count = Workspace(), len(rows)
    x, logits = workspace.get("x", count, WIDTH), workspace.get("logits", count, LOGITS.shape[1])
    x[:count], logits[:count] = X[rows], LOGITS[rows]
    y = workspace.get("y", count, WIDTH)
    assert group(x, count, logits, 5, workspace, y) is y
    assert not y[count:].any()
    return y[:count].copy()


@pytest.mark.parametrize("is_renormalised", [True, False])
def test_the_mixture_agrees_with_float64(is_renormalised: bool) -> None:
    found = run(make_group(is_renormalised=is_renormalised), np.arange(ROWS))
    expected = hybrid_float64.mix_experts(
        X.astype(np.float64),
        LOGITS[:, 5:].astype(np.float64),
        TOP_K,
        is_renormalised,
        GATE_UP.numpy().astype(np.float64).swapaxes(1, 2),
        DOWN.numpy().astype(np.float64).swapaxes(1, 2),
    )
    assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_have_their_bits_in_any_crowd(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(dtype)
    expected = run(group, np.arange(ROWS))
    for row in range(0, ROWS, 6):
        assert same_bits(run(group, np.array([row])), expected[row : row + 1])
    order = np.random.default_rng(1).permutation(ROWS)[:31]
    for rows_at_once in (1, 7, 16, 30):
        monkeypatch.setattr(experts, "ROWS_AT_ONCE", rows_at_once)
        assert same_bits(run(group, order), expected[order]), rows_at_once


def test_threads_change_no_bit() -> None:
    group, rows = make_group("bf16"), np.arange(ROWS)
    expected = run(group, rows)
    check_threads(lambda: run(group, rows), expected)


def test_an_expert_chosen_alone_has_the_bits_of_a_linear_group() -> None:
    """An expert is a feed-forward block like any other, from whichever kernel."""
    group = ExpertGroup(PREFIX, EXPERTS, WIDTH, FF, 1, True, "bf16")
    group.load(f"{PREFIX}gate_up", GATE_UP)
    group.load(f"{PREFIX}down", DOWN)
    picks = {shape: Pick(cpu.K_BLOCK, 0) for shape in ((WIDTH, 2 * FF), (FF, WIDTH))}
    found = run(group, np.arange(8))
    for row in range(8):
        expert = int(LOGITS[row, 5:].argmax())
        first = LinearGroup([Product("gate_up", WIDTH, 2 * FF, 0)], picks, "bf16", 2)
        second = LinearGroup([Product("down", FF, WIDTH, 0)], picks, "bf16", 2)
        first.load("gate_up", GATE_UP[expert])
        second.load("down", DOWN[expert])
        x, h = np.zeros((padded(1), WIDTH), np.float32), np.zeros((padded(1), FF), np.float32)
        x[0] = X[row]
        cpu.silu_times(first(x, 1, np.zeros((padded(1), 2 * FF), np.float32)), 0, 1, FF, h)
        expected = second(h, 1, np.zeros((padded(1), WIDTH), np.float32))
        assert same_bits(found[row], expected[0])


def test_bytes_of_all_experts_and_of_those_a_row_reads() -> None:
    group = empty_group("bf16")
    assert group.nbytes == EXPERTS * 3 * WIDTH * FF * 2
    assert group.active_nbytes == TOP_K * 3 * WIDTH * FF * 2
    assert empty_group("fp32").nbytes == 2 * group.nbytes


@pytest.mark.parametrize("name", ["layers.0.experts.gate", "layers.1.experts.down", "down"])
def test_a_strange_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is not a weight of these experts"):
        empty_group().load(name, DOWN)


@pytest.mark.parametrize(
    ("part", "tensor"),
    [("down", DOWN[:, :, :-1]), ("down", DOWN[:-1]), ("gate_up", GATE_UP[:, :FF]), ("gate_up", DOWN)],
)
def test_a_wrong_shape_is_refused(part: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ModelError, match=f"{PREFIX}{part} has shape .*, expected"):
        empty_group().load(f"{PREFIX}{part}", tensor)


@pytest.mark.parametrize("top_k", [0, EXPERTS + 1])
def test_more_experts_a_row_than_there_are_is_refused(top_k: int) -> None:
    with pytest.raises(ModelError, match=f"{top_k} experts a row .* expected 1 to {EXPERTS}"):
        ExpertGroup(PREFIX, EXPERTS, WIDTH, FF, top_k, True, "fp32")
