"""The CUDA C++ kernels emulated: right by the references, and the same bits in prompts as in steps, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.layers.cuda_linear import Choice, CudaGroup, CudaProduct
from kittiwake.ops import head_kernels
from kittiwake.ops.head_kernels import TILINGS
from kittiwake.ops.matmul import cuda as narrow
from kittiwake.ops.matmul import float32
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.matmul.float32 import Plain
from kittiwake.ops.packed import Packed
from kittiwake.ops.wkv4 import cuda as wkv4
from kittiwake.ops.wkv4.cases import TimeMixCase as Case4
from kittiwake.ops.wkv4.reference import time_mix as time_mix4
from kittiwake.ops.wkv6.cases import TimeMixCase as Case6
from kittiwake.ops.wkv6.cuda import Kind, Wkv6
from kittiwake.ops.wkv6.reference import HeadParams
from kittiwake.ops.wkv6.reference import time_mix as time_mix6
from kittiwake.ops.wkv7 import cuda as wkv7
from kittiwake.ops.wkv7.cuda import Wkv7
from tests.emulator import kernels
from tests.emulator.kernels import EmulatedKernel
from tests.oracles.measure import relative_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.IS_AVAILABLE, reason="g++ is not installed: it compiles kernels for the host"),
]
CPU, EPS = torch.device("cpu"), 1e-5
LENGTHS = (3, 1, 19, 5)
State = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (wkv4, head_kernels, narrow, float32):
        monkeypatch.setattr(module, "CudaKernel", EmulatedKernel)
    monkeypatch.setattr(wkv7, "shared_memory_limit", lambda: 227 * 1024)
    for found in (narrow._product, float32._product):
        found.cache_clear()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def step_by_step(
    packed: Packed, columns: int, dtype: torch.dtype, step: Callable[[list[int], torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """The rows of ``packed`` as decoding runs them, a row of every sequence that has one left at a time: [N, columns]."""
    out = torch.full((packed.rows, columns), torch.nan, dtype=dtype)
    for at in range(max(packed.lengths)):
        left = [index for index, length in enumerate(packed.lengths) if length > at]
        rows = [int(packed.starts[index]) + at for index in left]
        made = torch.full((len(rows), columns), torch.nan, dtype=dtype)
        step(rows, torch.from_numpy(packed.slots[left]).int(), made)
        out[rows] = made
    return out


def meta(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(packed.starts).int(), torch.from_numpy(packed.slots).int()


@pytest.mark.parametrize(("width", "lengths"), [(7, LENGTHS), (130, LENGTHS), (33, (8, 9, 64, 141))])
def test_wkv4(width: int, lengths: tuple[int, ...]) -> None:
    case = Case4(Packed(lengths), width, 30.0)
    given, kernel = case.make(), wkv4.Wkv4(torch.float32)
    states: list[State] = [tuple(torch.from_numpy(given[name].copy()) for name in ("num", "den", "top")) for _ in "ab"]
    projected, vectors = (
        torch.from_numpy(given["rkv"]),
        torch.from_numpy(np.stack([given["log_decay"], given["bonus"]])),
    )
    out = torch.full((case.packed.rows, width), torch.nan)
    kernel.prompt(projected, vectors, states[0], *meta(case.packed), out, overlap=True)  # type: ignore[arg-type]

    def step(rows: list[int], slots: torch.Tensor, to: torch.Tensor) -> None:
        kernel.decode(projected[rows].contiguous(), vectors, states[1], slots, to, overlap=True)  # type: ignore[arg-type]

    stepped = step_by_step(case.packed, width, torch.float32, step)
    assert bits(out) == bits(stepped) and list(map(bits, states[0])) == list(map(bits, states[1]))
    expected = [given[name] for name in ("num", "den", "top")]
    rkv = np.split(given["rkv"], 3, axis=1)
    y = time_mix4(*rkv, given["log_decay"], given["bonus"], case.packed.starts, case.packed.slots, *expected)
    assert relative_error(out.numpy(), y) < 1e-6
    for found, state in zip(states[0], expected, strict=True):
        assert relative_error(found.numpy(), state) < 1e-6


@pytest.mark.parametrize(
    ("place", "heads", "size", "kind", "dtype"),
    [
        (0, 2, 33, Kind(True, True), torch.float32),
        (1, 3, 10, Kind(False, True), torch.float16),
        (2, 1, 64, Kind(False, False), torch.bfloat16),
        (3, 2, 64, Kind(True, True), torch.bfloat16),
    ],
)
def test_wkv6(place: int, heads: int, size: int, kind: Kind, dtype: torch.dtype) -> None:
    case = Case6(Packed(LENGTHS), heads, size, not kind.is_by_token, kind.is_gated)
    given, kernel = case.make(), Wkv6(size, dtype, kind, TILINGS[place : place + 1])
    projected, vectors = torch.from_numpy(given["rkvg"]).to(dtype), torch.from_numpy(given["vectors"])
    low = torch.from_numpy(given["decay_low"]).to(dtype) if kind.is_by_token else None
    states = [torch.from_numpy(given["state"].copy()) for _ in "ab"]
    rows, width = case.packed.rows, case.width
    made, scanned = torch.full((rows, kernel.made_values(heads)), torch.nan), torch.full((rows, width), torch.nan)
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    where = (vectors, states[0], *meta(case.packed), made, scanned, out)
    kernel.prompt(projected, low, *where, eps=EPS, overlap=True)

    def step(some: list[int], slots: torch.Tensor, to: torch.Tensor) -> None:
        lows = None if low is None else low[some].contiguous()
        kernel.decode(projected[some].contiguous(), lows, vectors, states[1], slots, to, eps=EPS, overlap=True)

    stepped = step_by_step(case.packed, width, dtype, step)
    assert bits(out) == bits(stepped) and bits(states[0]) == bits(states[1])
    parts = np.split(projected.float().numpy(), projected.shape[1] // width, axis=1)
    params, state = HeadParams(*given["vectors"], EPS, heads), given["state"]
    lows = None if low is None else low.float().numpy()
    gate = parts[3] if kind.is_gated else None
    y = time_mix6(*parts[:3], gate, lows, params, case.packed.starts, case.packed.slots, state)
    assert relative_error(out.float().numpy(), y) < {4: 1e-5, 2: 1e-2}[dtype.itemsize]
    assert relative_error(states[0].numpy(), state) < 1e-5


def group(dtype: torch.dtype, *given: CudaProduct) -> CudaGroup:
    made, generator = CudaGroup(given, dtype, CPU), torch.Generator().manual_seed(1)
    for product in given:
        made.load(product.name, torch.randn((product.columns, product.depth), generator=generator))
    return made


@pytest.fixture(params=[head_kernels.MOST_HELD, 0], ids=["weights held", "weights in shared memory"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places for the weights of low-rank products."""
    monkeypatch.setattr(head_kernels, "MOST_HELD", request.param)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_that_makes_its_low_rank_product_has_the_bits_of_two_launches(dtype: torch.dtype) -> None:
    size, heads, depth, rng = 32, 2, 40, np.random.default_rng(1)
    width, kernel = size * heads, Wkv6(size, dtype, Kind(True, True), TILINGS[:1])
    projected = torch.from_numpy(rng.standard_normal((3, 4 * width + depth), np.float32)).to(dtype)
    up = group(dtype, CudaProduct("up", depth, width, 0, 4 * width))
    vectors = torch.from_numpy(rng.standard_normal((4, width), np.float32))
    states = [torch.from_numpy(rng.standard_normal((5, heads, size, size), np.float32))]
    states.append(states[0].clone())
    slots = torch.tensor([3, 1, 4], dtype=torch.int32)
    low, out, other = (torch.full((3, width), torch.nan, dtype=dtype) for _ in range(3))
    up.run(Choice("narrow", Narrow()), projected, low, overlap=True)
    kernel.decode(projected, low, vectors, states[0], slots, out, eps=EPS, overlap=True)
    given = (projected, up.weight, 4 * width, depth, vectors, states[1])
    kernel.decode_low(*given, slots, other, eps=EPS, overlap=True)
    assert bits(out) == bits(other) and bits(states[0]) == bits(states[1]) and bool(torch.isfinite(out).all())


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(("dtype", "depths"), [(torch.float16, (24, 16, 72, 8)), (torch.bfloat16, (24, 16, 72))])
def test_a_step_that_makes_its_low_rank_products_has_the_bits_of_two_launches(
    dtype: torch.dtype, depths: tuple[int, ...]
) -> None:
    """RWKV-7: four products, three in the first layer."""
    size, heads, rng = 64, 2, np.random.default_rng(1)
    width, kernel, columns = size * heads, Wkv7(size, dtype, TILINGS[:1]), np.cumsum([0, *depths])
    projected = torch.from_numpy(rng.standard_normal((3, 3 * width + sum(depths)), np.float32)).to(dtype)
    ups = [CudaProduct(f"up {i}", d, width, 0, 3 * width + int(columns[i])) for i, d in enumerate(depths)]
    up = group(dtype, *ups)
    vectors = torch.from_numpy(rng.standard_normal((8, width), np.float32))
    states = [torch.from_numpy(rng.standard_normal((5, heads, size, size), np.float32))]
    states.append(states[0].clone())
    firsts = [torch.from_numpy(rng.standard_normal((3, width), np.float32)).to(dtype)]
    firsts.append(firsts[0].clone())
    slots = torch.tensor([3, 1, 4], dtype=torch.int32)
    low = torch.full((3, len(depths) * width), torch.nan, dtype=dtype)
    out, other = (torch.full((3, width), torch.nan, dtype=dtype) for _ in range(2))
    up.run(Choice("narrow", Narrow()), projected, low, overlap=True)
    settings = {"first_layer": len(depths) == 3, "eps": EPS, "overlap": True}
    kernel.decode(projected, low, firsts[0], vectors, states[0], slots, out, **settings)
    kernel.decode_low(projected, up.weight, up.lines, depths, firsts[1], vectors, states[1], slots, other, **settings)
    for one, two in ((out, other), states, firsts):
        assert bits(one) == bits(two) and bool(torch.isfinite(one).all())


PRODUCTS = (
    CudaProduct("a", 40, 33, 0, 0, "relu2"),
    CudaProduct("b", 40, 5, 1, 8, "sigmoid"),
    CudaProduct("c", 16, 64, 0, 8, "tanh"),
)


def expected(products: CudaGroup, x: torch.Tensor) -> np.ndarray:
    """In float64."""
    acts: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "relu2": lambda y: np.maximum(y, 0) ** 2, "sigmoid": lambda y: 1 / (1 + np.exp(-y)), "tanh": np.tanh,
    }  # fmt: skip
    parts = []
    for product in products.products:
        given = x[product.input, :, product.input_column : product.input_column + product.depth].double().numpy()
        y = given @ products.matrix(product.name).double().numpy().T
        parts.append(acts[product.activation](y))
    return np.concatenate(parts, axis=1)


def same_in_all(products: CudaGroup, choices: Sequence[Choice], rows: int) -> None:
    """Every layout writes the same bits, and no column beyond its own."""
    dtype = products.dtype
    x, found = torch.randn((2, rows, 48), generator=torch.Generator().manual_seed(rows)).to(dtype), set()
    for choice in choices:
        assert products.can_run(choice, dtype)
        room = torch.full((rows + 1, products.columns + 3), torch.nan, dtype=dtype)
        products.run(choice, x, room[:rows, : products.columns], overlap=True)
        assert torch.isnan(room[rows:]).all() and torch.isnan(room[:, products.columns :]).all()
        out = room[:rows, : products.columns]
        assert relative_error(out.float().numpy(), expected(products, x)) < {4: 1e-6, 2: 1e-2}[dtype.itemsize]
        found.add(bits(out))
    assert len(found) == 1


@pytest.mark.parametrize("rows", [1, 37])
def test_products_in_float32(rows: int) -> None:
    layouts: list[Any] = [(8, 8, 2, 1, 256, 3), (8, 32, 2, 1, 64, 4), (32, 16, 4, 2, 16, 4), (64, 32, 8, 2, 32, 2)]
    same_in_all(group(torch.float32, *PRODUCTS), [Choice("plain", Plain(*layout)) for layout in layouts], rows)


def chains(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [M, K], weight [N, K] → [M, N]: a chain of fused multiply-adds over K in order, rounded to float32 in each.

    A product of two float32 is exact in float64, and so is its sum with a float32 of these sizes but for the last bits: what is
    rounded twice is told by the odd one out (it is rounded to odd first).
    """
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for k in range(x.shape[1]):
        made = np.multiply.outer(x[:, k].astype(np.float64), weight[:, k].astype(np.float64))
        old = total.astype(np.float64)
        rounded = made + old
        back = rounded - made
        error = (made - (rounded - back)) + (old - back)
        is_even = rounded.view(np.int64) % 2 == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        rounded = np.where((error != 0) & is_even, np.nextafter(rounded, toward), rounded)
        total = rounded.astype(np.float32)
    return total


@pytest.mark.parametrize(
    "layout",
    [(16, 24, 2, 3, 32, 3), (32, 48, 4, 6, 16, 3), (64, 96, 8, 4, 32, 2), (8, 8, 2, 1, 256, 3), (16, 32, 4, 4, 32, 2)],
)
def test_a_sum_in_float32_is_one_chain(layout: tuple[int, ...]) -> None:
    rows, depth = 37, 100  # the last stage is not full, nor are the last block of rows and the last of columns
    products = group(torch.float32, CudaProduct("a", depth, 90), CudaProduct("b", depth, 192, 1, 4, "relu2"))
    x = torch.randn((2, rows, depth + 4), generator=torch.Generator().manual_seed(1))
    out = torch.full((rows, products.columns), torch.nan)
    choice = Choice("plain", Plain(*layout))
    assert products.can_run(choice, torch.float32)
    products.run(choice, x, out, overlap=True)
    a = chains(x[0, :, :depth].numpy(), products.matrix("a").numpy())
    b = chains(x[1, :, 4:].numpy(), products.matrix("b").numpy())
    assert bits(out) == np.concatenate([a, np.maximum(b, 0) ** 2], axis=1).tobytes()


def test_no_block_has_columns_of_two_products() -> None:
    products = group(torch.float32, CudaProduct("a", 16, 33), CudaProduct("b", 16, 64))
    assert not products.can_run(Choice("plain", Plain(32, 24, 2, 3, 32, 3)), torch.float32)
    assert products.can_run(Choice("plain", Plain(64, 64, 4, 4, 32, 3)), torch.float32)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_narrow_products(rows: int) -> None:
    layouts: list[Any] = [(16, 8, 256, 3), (32, 8, 128, 3), (8, 8, 256, 9, 8)]
    same_in_all(group(torch.float16, *PRODUCTS), [Choice("narrow", Narrow(*layout)) for layout in layouts], rows)
