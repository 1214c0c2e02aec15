from __future__ import annotations

import pytest

from kittiwake.bench.floors import Ceilings, Demand, demand, measure_ceilings

from .fakes import VOCAB, SumModel


def test_demand_reads_weights_once_and_states_twice() -> None:
    model = SumModel()
    model.weight_bytes = 2 * (100 + VOCAB)  # a hundred elements beside the head [16, 1], in two bytes each
    found = demand(model, "bf16", batch=3, tokens=5)
    assert found.nbytes == model.weight_bytes + 3 * 2 * 4
    assert found.flops == 2 * 3 * (5 * 100 + VOCAB)


def test_floor_is_the_longer_of_moving_and_computing() -> None:
    ceilings = Ceilings(copy_bytes_s=1e12, flop_s=1e15, product="")
    assert Demand(nbytes=10**9, flops=10**9).floor(ceilings) == (1.0, "bytes")
    assert Demand(nbytes=10**9, flops=10**13).floor(ceilings) == (10.0, "operations")


def test_a_published_decode_step_has_the_floor_that_is_written_down() -> None:
    # RWKV-7 1.5B in two bytes on one H200: about 1,390 tokens/s for one request at 3.9 TB/s
    ceilings = Ceilings(copy_bytes_s=3.9e12, flop_s=734e12, product="")
    ms, by = Demand(nbytes=2_790_000_000 + 2 * 12_800_000, flops=2 * 1_400_000_000).floor(ceilings)
    assert by == "bytes"
    assert 1000 / ms == pytest.approx(1390, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ceilings_are_measured_where_the_model_runs(dtype: str) -> None:
    found = measure_ceilings("cpu", dtype, copy_bytes=1 << 20, size=64)
    assert 1e6 < found.copy_bytes_s < 1e13
    assert 1e6 < found.flop_s < 1e13
    assert f"{dtype} 64³ product" in found.line
