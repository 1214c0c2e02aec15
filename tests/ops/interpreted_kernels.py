"""Products and row kernels of the CUDA path in Triton's interpreter; test_cuda_kernels.py runs this in its own process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.ops import triton_math
from kittiwake.ops.experts import triton as experts
from kittiwake.ops.matmul import triton as products
from kittiwake.ops.matmul.cases import CASES as PRODUCT_CASES
from kittiwake.ops.matmul.cases import MatmulCase
from kittiwake.ops.matmul.triton import Config
from kittiwake.ops.packed import Packed
from kittiwake.ops.shift_mix import reference
from kittiwake.ops.shift_mix import triton as row_kernels
from kittiwake.ops.shift_mix.cases import CASES as SHIFT_CASES
from kittiwake.ops.shift_mix.cases import ShiftMixCase
from tests.ops.bits import same_bits
from tests.ops.cuda_pieces import EPS, check_shift, shift_mix
from tests.ops.pieces import cut_in_two

CPU = torch.device("cpu")
_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, *rest: Any) -> None:
    """NumPy no longer takes an array of one element for a whole number, which the interpreter still asks of it."""
    _patch(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def dot_in_order(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """A sum over K in order in float32, as the kernels count on.

    The interpreter's own is a library's product, whose bits may depend on where a column stands.
    """
    left, right = (_widened(part) for part in (a, b))
    terms = left.T[:, :, None] * right[:, None, :]
    return interpreter.TensorHandle(np.add.reduce(np.concatenate([d.data[None], terms])), d.dtype.scalar)


def _widened(part: Any) -> np.ndarray:
    """A tile in float32; the interpreter keeps bfloat16 as whole numbers of the same bits."""
    if part.dtype == tl.bfloat16:
        return (part.data.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(part.data, np.float32)


def make_interpretable(patch: pytest.MonkeyPatch) -> None:
    """CUDA's library of functions has no interpreter: stand-ins of the same meaning, not of the same bits."""
    functions = SimpleNamespace(tanh=lambda x: 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0), exp=lambda x: tl.exp(x))
    for module in (products, experts, triton_math):
        patch.setattr(module, "libdevice", functions)
    patch.setattr(interpreter, "_patch_lang_tensor", _patch_with_index)


@pytest.fixture(autouse=True)
def _interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    make_interpretable(monkeypatch)


# Products


def made_group(*given: CudaProduct, seed: int = 0, dtype: torch.dtype = torch.float32) -> CudaGroup:
    """A group with random weights."""
    generator = torch.Generator().manual_seed(seed)
    group = CudaGroup(given, dtype, CPU)
    for product in given:
        group.load(product.name, torch.randn((product.columns, product.depth), generator=generator))
    return group


def tiled(group: CudaGroup, x: torch.Tensor, config: Config, out_dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The outputs [M, columns], with spare columns and rows around them that must stay as they are."""
    rows = x.shape[-2]
    room = torch.full((rows + 3, group.columns + 5), torch.nan, dtype=out_dtype)
    group.tiled(x, room[:rows, : group.columns], config, overlap=False)
    assert torch.isnan(room[rows:]).all() and torch.isnan(room[:, group.columns :]).all()
    return room[:rows, : group.columns].float().numpy()


def expected_product(x: np.ndarray, weight: np.ndarray, activation: str = "none") -> np.ndarray:
    """In float64: x [M, K] times weight [N, K]."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    if activation == "tanh":
        return np.tanh(y)
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-y))
    return np.maximum(y, 0) ** 2 if activation == "relu2" else y


@pytest.mark.parametrize(
    ("case", "config"),
    [(case, Config(32, 64, 32, 1, 1)) for case in PRODUCT_CASES]
    + [(case, Config(16, 16, 16, 1, 1)) for case in PRODUCT_CASES if case.columns < 200],
    ids=str,
)
def test_products_are_those_of_float64(case: MatmulCase, config: Config) -> None:
    x, weight = case.make()
    group = CudaGroup([CudaProduct("one", case.depth, case.columns)], torch.float32, CPU)
    group.load("one", torch.from_numpy(weight.T.copy()))
    found = tiled(group, torch.from_numpy(x), config)
    most = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64)
    assert (np.abs(found - expected_product(x, weight.T)) <= 2e-6 * most).all()


@pytest.mark.parametrize(("rows", "bn"), [(1, 16), (17, 16), (65, 16), (1, 32), (17, 32), (63, 32), (127, 32)])
def test_a_group_reads_the_inputs_and_columns_of_each_product(rows: int, bn: int) -> None:
    given = (
        CudaProduct("a", 33, 17, 0, 0, "relu2"),
        CudaProduct("b", 7, 40, 1, 3, "tanh"),
        CudaProduct("c", 16, 1, 2, 16, "sigmoid"),
        CudaProduct("d", 40, 65, 0, 0),
    )
    group = made_group(*given)
    x = torch.randn((3, rows, 45), generator=torch.Generator().manual_seed(rows))
    found = tiled(group, x, Config(16, bn, 16, 1, 1))
    first = 0
    for product in given:
        rows_in = x[product.input, :, product.input_column : product.input_column + product.depth].numpy()
        expected = expected_product(rows_in, group.matrix(product.name).numpy(), product.activation)
        np.testing.assert_allclose(found[:, first : first + product.columns], expected, rtol=2e-5, atol=2e-5)
        first += product.columns


def test_squares_that_float16_cannot_hold_are_its_largest_number() -> None:
    group = made_group(CudaProduct("a", 16, 32, activation="relu2"), dtype=torch.float16)
    group.matrix("a").fill_(1)
    x = torch.full((2, 16), 25.0, dtype=torch.float16)  # 400 squared is 160,000
    x[1] = -25
    found = tiled(group, x, Config(16, 32, 16, 1, 1), torch.float16)
    assert (found[0] == 65504).all() and (found[1] == 0).all()


# Embedding, norms, token shift


@pytest.mark.parametrize("case", SHIFT_CASES, ids=str)
def test_a_shift_agrees_with_the_reference(case: ShiftMixCase) -> None:
    check_shift(case, 2e-6)


@pytest.mark.parametrize("case", [case for case in SHIFT_CASES if case.packed.rows < 100], ids=str)
def test_cuts_change_no_bit_of_a_shift(case: ShiftMixCase) -> None:
    """Both layouts are among the launches: one program a mix for few rows, one program a row for many."""
    inputs = case.make()
    expected = shift_mix(inputs, case.packed.starts, case.packed.slots)
    for rows, starts, slots in cut_in_two(case.packed, 1):
        part = inputs | {"x": inputs["x"][rows], "y": inputs["y"][rows] if case.adds else inputs["y"]}
        found = shift_mix(part, starts, slots, spare=len(rows) % 3)
        assert same_bits(found["out"], expected["out"][rows]) and same_bits(found["x"], expected["x"][rows])
        inputs["shift"] = found["shift"]
    assert same_bits(inputs["shift"], expected["shift"])


@pytest.mark.parametrize("width", [1, 63, 65, 128])
def test_embedded_rows_are_gathered_and_normed_or_those_drawn_last(width: int) -> None:
    rng = np.random.default_rng(width)
    table = torch.from_numpy(rng.standard_normal((11, width)).astype(np.float32)).half()
    norm = torch.from_numpy(rng.standard_normal((2, width)).astype(np.float32))
    ids = torch.tensor([10, 0, -1, 3, -1], dtype=torch.int32)
    owners, slots = torch.arange(5, dtype=torch.int32), torch.tensor([4, 1, 3, 2, 0], dtype=torch.int32)
    drawn = torch.tensor([-7, 9, 9, 5, 9])  # a fault of the sampler stands below 0: any row will do, but none outside
    x = torch.full((5, width), torch.nan)
    row_kernels.embed_rows(ids, owners, slots, drawn, table, norm, EPS, x, overlap=False)
    expected = reference.layer_norm(table.float().numpy()[[10, 0, 5, 3, 0]], norm[0].numpy(), norm[1].numpy(), EPS)
    np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("width", [1, 63, 65])
def test_wanted_rows_are_added_up_and_normed(width: int) -> None:
    case = ShiftMixCase(Packed((65,)), width, 1, True)
    inputs = case.make()
    want = torch.tensor([64, 0, 33, 33], dtype=torch.int32)
    norm = torch.from_numpy(np.stack([inputs["weight"], inputs["bias"]]))
    out = torch.full((4, width), torch.nan)
    row_kernels.norm_rows(
        torch.from_numpy(inputs["x"]), torch.from_numpy(inputs["y"]), want, norm, EPS, out, overlap=False
    )
    rows = (inputs["x"] + inputs["y"])[want.numpy()]
    expected = reference.layer_norm(rows, inputs["weight"], inputs["bias"], EPS)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert same_bits(out[2].numpy(), out[3].numpy())
