"""The references checked against one another: float64 equations, the `rwkv` package, a recorded naive recurrence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kittiwake.bench.shapes import Rwkv7Shape, random_rwkv7, small
from tests.oracles import fla_wkv7, rwkv7_float64, rwkv_package
from tests.oracles.measure import random_ids, relative_error

needs_rwkv = pytest.mark.skipif(not rwkv_package.is_available(), reason=rwkv_package.SKIP_REASON)

ONE_HEAD = small(2, 64)
THREE_HEADS = small(3, 192, vocab=300)
SMALL_HEADS = small(2, 96, 32)
TINY_HEADS = small(2, 64, 16, vocab=300)
CUTS = (1, 2, 9, 10, 31)


def assert_states_agree(
    found: dict[str, npt.NDArray[np.float32]], expected: rwkv7_float64.State, tolerance: float
) -> None:
    for part in ("att_shift", "wkv", "ffn_shift"):
        assert found[part].shape == expected[part].shape
        assert relative_error(found[part], expected[part]) < tolerance, part


@needs_rwkv
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [(ONE_HEAD, ()), (THREE_HEADS, ()), (THREE_HEADS, CUTS), (SMALL_HEADS, CUTS), (TINY_HEADS, ())],
    ids=["one head", "three heads", "three heads, cut", "heads of 32, cut", "heads of 16"],
)
def test_equations_agree_with_the_rwkv_package(shape: Rwkv7Shape, cuts: tuple[int, ...]) -> None:
    tensors, ids = random_rwkv7(shape, seed=shape.heads), random_ids(shape, 40)
    expected, expected_state = rwkv7_float64.run(tensors, ids)
    found = rwkv_package.run(tensors, ids, cuts=cuts)
    assert found.logits.shape == (40, shape.vocab)
    assert relative_error(found.logits, expected) < 1e-5
    assert_states_agree(found.state, expected_state, 1e-5)


@needs_rwkv
def test_a_given_state_continues_alike_in_both() -> None:
    tensors, ids = random_rwkv7(THREE_HEADS, seed=5, dtype=torch.float32), random_ids(THREE_HEADS, 30)
    _, middle = rwkv7_float64.run(tensors, ids[:17])
    expected, expected_state = rwkv7_float64.run(tensors, ids[17:], middle)
    found = rwkv_package.run(tensors, ids[17:], middle)
    assert relative_error(found.logits, expected) < 1e-5
    assert_states_agree(found.state, expected_state, 1e-5)


@needs_rwkv
def test_a_head_whose_keys_are_zero_is_finite_and_agrees() -> None:
    tensors, ids = random_rwkv7(THREE_HEADS, seed=6), random_ids(THREE_HEADS, 12)
    tensors["blocks.1.att.key.weight"][64:128] = 0
    expected, expected_state = rwkv7_float64.run(tensors, ids)
    assert np.isfinite(expected).all()
    assert not expected_state["wkv"][1, 1].any()
    assert relative_error(rwkv_package.run(tensors, ids).logits, expected) < 1e-5


@needs_rwkv
def test_the_package_ignores_value_residual_tensors_of_layer_0_and_so_do_the_equations() -> None:
    plain, extra = (random_rwkv7(ONE_HEAD, seed=7, unused_layer0=unused) for unused in (False, True))
    ids = random_ids(ONE_HEAD, 8)
    expected, _ = rwkv7_float64.run(plain, ids)
    assert np.array_equal(rwkv7_float64.run(extra, ids)[0], expected)
    assert relative_error(rwkv_package.run(extra, ids).logits, expected) < 1e-5


@needs_rwkv
def test_the_package_is_timed_in_its_own_process() -> None:
    was_here = "rwkv" in sys.modules  # another test may have imported it
    tensors = random_rwkv7(ONE_HEAD, seed=1)
    timing = rwkv_package.time_package(tensors, prompt_tokens=6, decode_tokens=2, repeats=3)
    assert len(timing.prompt_samples_s) == 3 and len(timing.decode_samples_s) == 6
    assert timing.prompt_s > 0 and timing.decode_s > 0
    assert ("rwkv" in sys.modules) == was_here


@needs_rwkv
def test_a_failure_of_the_package_is_shown() -> None:
    tensors = random_rwkv7(ONE_HEAD, seed=1)
    del tensors["ln_out.weight"]
    with pytest.raises(RuntimeError, match=r"ln_out\.weight"):
        rwkv_package.run(tensors, [1, 2])


def test_the_package_oracle_imports_without_the_package() -> None:
    code = "import sys; sys.modules['rwkv'] = None; sys.path.insert(0, sys.argv[1]); import rwkv_package"
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True)


@pytest.mark.parametrize("shape", [THREE_HEADS, TINY_HEADS], ids=["three heads", "heads of 16"])
def test_a_sequence_cut_anywhere_gives_the_same_logits(shape: Rwkv7Shape) -> None:
    tensors, ids = random_rwkv7(shape, seed=2), random_ids(shape, 20)
    whole, whole_state = rwkv7_float64.run(tensors, ids)
    state, rows = None, []
    for token in ids:
        logits, state = rwkv7_float64.run(tensors, [token], state)
        rows.append(logits)
    assert relative_error(np.concatenate(rows), whole) < 1e-14
    assert state is not None
    assert all(np.array_equal(state[part], whole_state[part]) for part in whole_state)


def test_a_given_state_is_left_as_it_was() -> None:
    tensors = random_rwkv7(ONE_HEAD, seed=3)
    _, state = rwkv7_float64.run(tensors, [1, 2, 3])
    before = {part: array.copy() for part, array in state.items()}
    rwkv7_float64.run(tensors, [4], state)
    assert all(np.array_equal(state[part], before[part]) for part in state)


@pytest.mark.parametrize("name", fla_wkv7.NAMES)
def test_the_scan_agrees_with_the_recorded_naive_recurrence(name: str) -> None:
    fixture = fla_wkv7.load(name)
    r, log_decay, k, v, a, b, state = (
        rows.astype(np.float64)
        for rows in (fixture.r, fixture.log_decay, fixture.k, fixture.v, fixture.a, fixture.b, fixture.initial_state)
    )
    y, final_state = rwkv7_float64.wkv7_scan(r, np.exp(log_decay), k, v, a, b, state)
    assert relative_error(fixture.y, y) < 1e-6
    assert relative_error(fixture.final_state, final_state) < 1e-6


@pytest.mark.parametrize("name", fla_wkv7.NAMES)
def test_recorded_inputs_are_those_of_a_time_mix(name: str) -> None:
    fixture = fla_wkv7.load(name)
    assert fixture.initial_state.shape[-2:] == (fixture.v.shape[-1], fixture.k.shape[-1])
    assert -0.6066 < fixture.log_decay.min() < -0.55 and -0.01 < fixture.log_decay.max() < 0
    np.testing.assert_allclose(np.linalg.norm(fixture.a, axis=-1), 1, atol=1e-6)
    rate = -(fixture.a * fixture.b).sum(-1)
    assert rate.max() < 1 and rate.min() > 0
