"""The time mix of RWKV-7 on a card: prompts, decoding and every tiling give the same bits, and those are right."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.ops.packed import LENGTHS, Packed
from kittiwake.ops.wkv7 import reference
from kittiwake.ops.wkv7.cases import TIME_MIX_CASES, TimeMixCase
from tests.device.ledger import LEDGER
from tests.ops.bits import same_bits
from tests.ops.composed import EPS, composed
from tests.ops.pieces import cut_in_two
from tests.oracles.measure import relative_error

# Without a device these tests are skipped, but their module is imported: on machines that have no Triton too.
if torch.cuda.is_available():
    from kittiwake.layers.cuda_linear import Choice, CudaGroup, CudaProduct
    from kittiwake.ops.head_kernels import TILINGS, Tiling
    from kittiwake.ops.matmul.triton import Config
    from kittiwake.ops.wkv7.cuda import Wkv7

pytestmark = pytest.mark.device
Arrays = dict[str, np.ndarray]
HALVES = (torch.float16, torch.bfloat16)
OUT_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CASES = (
    TIME_MIX_CASES[0],
    TIME_MIX_CASES[1],
    TIME_MIX_CASES[3],
    *(TimeMixCase(Packed(lengths), 2, 64, index % 2 == 0) for index, lengths in enumerate(LENGTHS)),
    TimeMixCase(Packed((3, 1, 7, 1, 31, 5, 1, 9)), 3, 32, False),
)


@cache
def kernels(head_size: int, dtype: torch.dtype, tiling: Tiling | None = None) -> Wkv7:
    """The kernels with one tiling."""
    return Wkv7(head_size, dtype, ((1 << 30, tiling or Tiling()),))


def sent(array: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to("cuda", dtype)


def rounded(case: TimeMixCase, dtype: torch.dtype, seed: int = 0) -> Arrays:
    """The inputs of a case as ``dtype`` holds them, in float32."""
    inputs = case.make(seed)
    kept = {name: torch.from_numpy(inputs[name]).to(dtype).float().numpy() for name in ("rkv", "low", "v_first")}
    return inputs | kept


def run(
    case: TimeMixCase,
    inputs: Arrays,
    starts: np.ndarray,
    slots: np.ndarray,
    dtype: torch.dtype,
    *,
    decode: bool = False,
    tiling: Tiling | None = None,
    overlap: bool = False,
) -> Arrays:
    """One launch on copies of the inputs: out, v_first, state after it, and the float32 ``made`` and ``y`` of a prompt."""
    ours = kernels(case.size, dtype, tiling)
    rows = len(inputs["rkv"])
    projected, low, v_first = (sent(inputs[name], dtype) for name in ("rkv", "low", "v_first"))
    state, vectors = sent(inputs["state"]), sent(inputs["vectors"])
    out = torch.full((rows, case.width), torch.nan, device="cuda", dtype=dtype)
    settings: dict[str, Any] = {"first_layer": case.is_first_layer, "eps": float(EPS), "overlap": overlap}
    given = (projected, low, v_first, vectors, state)
    made = torch.full((rows * ours.made_values(case.heads),), torch.nan, device="cuda")
    y = torch.full((rows, case.width), torch.nan, device="cuda")
    if decode:
        ours.decode(*given, sent(slots, torch.int32), out, **settings)
    else:
        ours.prompt(*given, sent(starts, torch.int32), sent(slots, torch.int32), made, y, out, **settings)
    found = {"out": out, "v_first": v_first, "state": state, "y": y.view(rows, case.heads, case.size)}
    found["made"] = made.view(case.heads, rows, 6, ours.padded)[..., : case.size]
    return {name: tensor.float().cpu().numpy() for name, tensor in found.items()}


def whole(case: TimeMixCase, dtype: torch.dtype, **settings: Any) -> Arrays:
    return run(case, rounded(case, dtype), case.packed.starts, case.packed.slots, dtype, **settings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_agrees_with_the_reference(case: TimeMixCase) -> None:
    """States are [H, K, V] as the reference's; those of no sequence stay as they are."""
    dtypes = (torch.float32, *HALVES) if case.size == 64 else (torch.float32,)
    for dtype in dtypes:
        inputs, found = rounded(case, dtype), whole(case, dtype)
        expected = composed(case, inputs)
        name = str(dtype).removeprefix("torch.")
        assert same_bits(found["v_first"], expected["v_first"])
        error = relative_error(found["state"][case.packed.slots], expected["state"][case.packed.slots])
        assert LEDGER.figure(f"time mix: relative error of states, {name}", error) < 3e-6
        error = relative_error(found["out"], expected["out"])
        assert LEDGER.figure(f"time mix: relative error of outputs, {name}", error) < OUT_ERROR[dtype]
        others = np.setdiff1d(np.arange(case.packed.table_slots), case.packed.slots)
        assert same_bits(found["state"][others], inputs["state"][others])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_change_no_bit(case: TimeMixCase) -> None:
    dtype = torch.float16 if case.size == 64 else torch.float32
    expected = whole(case, dtype)
    for seed in range(4):
        inputs, same = rounded(case, dtype), True
        for rows, starts, slots in cut_in_two(case.packed, seed):
            part = inputs | {name: inputs[name][rows] for name in ("rkv", "low", "v_first")}
            found = run(case, part, starts, slots, dtype, overlap=True)
            same &= same_bits(found["out"], expected["out"][rows])
            inputs["state"] = found["state"]
        LEDGER.case("scan: cuts", same and same_bits(inputs["state"], expected["state"]))
    assert LEDGER.holds("scan: cuts")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_has_the_bits_of_a_prompt(case: TimeMixCase) -> None:
    """All sequences a step at a time, those that have ended leaving the batch."""
    dtype = torch.float16 if case.size in (32, 64) else torch.float32
    inputs, expected, packed = rounded(case, dtype), whole(case, dtype), case.packed
    same = True
    for step in range(max(packed.lengths)):
        alive = [b for b, length in enumerate(packed.lengths) if step < length]
        rows = packed.starts[alive] + step
        part = inputs | {name: inputs[name][rows] for name in ("rkv", "low", "v_first")}
        found = run(
            case, part, np.arange(len(rows) + 1), packed.slots[alive], dtype, decode=True, overlap=step % 2 == 0
        )
        same &= same_bits(found["out"], expected["out"][rows]) and same_bits(
            found["v_first"], expected["v_first"][rows]
        )
        inputs["state"] = found["state"]
    LEDGER.case("scan: prompt = decode", same and same_bits(inputs["state"], expected["state"]))
    assert LEDGER.holds("scan: prompt = decode")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("first_layer", [True, False])
def test_decoding_with_the_low_rank_products_inside_has_the_same_bits(dtype: torch.dtype, first_layer: bool) -> None:
    for ranks, rows in (((64, 64, 128, 32), 1), ((8, 24, 40, 16), 3), ((96, 96, 256, 64), 4)):
        case = TimeMixCase(Packed((1,) * rows), 2, 64, first_layer)
        inputs, ours = rounded(case, dtype), kernels(64, dtype)
        depths = ranks[: 3 if first_layer else 4]
        products, at = [], 3 * case.width
        for index, depth in enumerate(depths):
            products.append(CudaProduct(str(index), depth, case.width, 0, at))
            at += depth
        group = CudaGroup(products, dtype, torch.device("cuda"))
        generator = torch.Generator("cuda").manual_seed(1)
        for product in products:
            weight = torch.randn((case.width, product.depth), generator=generator, device="cuda")
            group.load(product.name, weight * product.depth**-0.5)
        down = torch.randn((rows, at - 3 * case.width), generator=generator, device="cuda").to(dtype)
        projected = torch.cat([sent(inputs["rkv"], dtype), down], 1)
        low = torch.full((rows, group.columns), torch.nan, device="cuda", dtype=dtype)
        group.run(Choice("tile", Config(16, 32, 32, 2, 3)), projected, low, overlap=False)
        assert ours.can_take_low(depths, rows)
        results = []
        for is_inside in (False, True):
            v_first, state = sent(inputs["v_first"], dtype), sent(inputs["state"])
            out = torch.full((rows, case.width), torch.nan, device="cuda", dtype=dtype)
            settings: dict[str, Any] = {"first_layer": first_layer, "eps": float(EPS), "overlap": True}
            given = (v_first, sent(inputs["vectors"]), state, sent(case.packed.slots, torch.int32), out)
            if is_inside:
                ours.decode_low(projected, group.weight, group.lines, depths, *given, **settings)
            else:
                ours.decode(projected, low, *given, **settings)
            results.append((out, v_first, state))
        LEDGER.case("scan: decode = decode_low", all(map(torch.equal, *results)))
    assert LEDGER.holds("scan: decode = decode_low")


@pytest.mark.parametrize("size", [33, 64])
def test_tilings_change_no_bit(size: int) -> None:
    case = TimeMixCase(Packed((127, 3, 1, 65)), 2, size, False)
    dtype = torch.float16 if size == 64 else torch.float32
    expected = whole(case, dtype)
    others = [Tiling(1, 4, 1, 2), Tiling(4, 64, 4, 4), Tiling(2, 8, 5, 3)] if size == 64 else []
    for tiling in [*(tiling for _, tiling in TILINGS), *others]:
        found = whole(case, dtype, tiling=tiling)
        LEDGER.case("scan: tilings", all(same_bits(found[name], expected[name]) for name in ("out", "state", "y")))
    assert LEDGER.holds("scan: tilings")


def test_the_scan_is_as_near_to_float64_as_the_serial_reference() -> None:
    """Over 1,500 tokens; both from the float32 vectors that the first kernel made."""
    case = TimeMixCase(Packed((1500,)), 2, 64, False)
    inputs = rounded(case, torch.float32)
    found = run(case, inputs, case.packed.starts, case.packed.slots, torch.float32)
    w, k, a, b, r, v = (np.ascontiguousarray(found["made"][:, :, index].swapaxes(0, 1)) for index in range(6))
    serial_state, exact_state = inputs["state"].copy(), inputs["state"].astype(np.float64)
    serial = reference.scan(r, w, k, v, a, b, case.packed.starts, case.packed.slots, serial_state)
    doubles = [array.astype(np.float64) for array in (r, w, k, v, a, b)]
    exact = reference.scan(*doubles, case.packed.starts, case.packed.slots, exact_state)
    ran = case.packed.slots
    truths = {"states": exact_state[ran], "outputs": exact}
    answers = {"states": (found["state"][ran], serial_state[ran]), "outputs": (found["y"], serial)}
    errors = {name: [relative_error(one, truths[name]) for one in pair] for name, pair in answers.items()}
    for name, (ours, serially) in errors.items():
        LEDGER.figure(f"scan over 1,500 tokens: relative error of {name} against float64", ours)
        LEDGER.figure(f"the same of the serial float32 reference: {name}", serially)
        assert ours <= serially


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_keys_stay_finite_and_alike_in_prompts_and_decoding(dtype: torch.dtype) -> None:
    case = TimeMixCase(Packed((40,)), 2, 64, False)
    inputs = rounded(case, dtype)
    inputs["rkv"] = np.sign(inputs["rkv"]).astype(np.float32) * np.float32(60000)
    inputs["rkv"] = torch.from_numpy(inputs["rkv"]).to(dtype).float().numpy()
    found = run(case, inputs, case.packed.starts, case.packed.slots, dtype)
    assert all(np.isfinite(found[name]).all() for name in ("out", "state", "v_first"))
    stepped = dict(inputs)
    for row in range(40):
        part = stepped | {name: inputs[name][row : row + 1] for name in ("rkv", "low", "v_first")}
        one = run(case, part, np.array([0, 1]), case.packed.slots, dtype, decode=True)
        assert same_bits(one["out"], found["out"][row : row + 1])
        stepped["state"] = one["state"]
    assert same_bits(stepped["state"], found["state"])


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = TimeMixCase(Packed((3, 4, 5)), 2, 64, False)
    inputs, expected = rounded(case, torch.float16), whole(case, torch.float16)
    inputs["rkv"][4] = np.nan
    inputs["state"][case.packed.slots[1]] = np.inf
    found = run(case, inputs, case.packed.starts, case.packed.slots, torch.float16)
    for rows, slot in ((slice(0, 3), 0), (slice(7, 12), 2)):
        assert same_bits(found["out"][rows], expected["out"][rows])
        assert same_bits(found["state"][case.packed.slots[slot]], expected["state"][case.packed.slots[slot]])
