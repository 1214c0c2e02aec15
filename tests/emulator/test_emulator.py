"""The emulator of CUDA C++ runs what is right, and finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.emulator import kernels
from tests.emulator.kernels import EmulatedKernel

pytestmark = pytest.mark.skipif(
    not kernels.IS_AVAILABLE, reason="g++ is not installed: it compiles kernels for the host"
)

REVERSE = """
extern "C" __global__ void __launch_bounds__(64) reverse(const int* x, int* y, int count) {
  __shared__ int kept[64];
  kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < count) y[threadIdx.x] = kept[63 - threadIdx.x];
}
"""
SUM = """
extern "C" __global__ void __launch_bounds__(32) sum(const float* x, float* y) {
  float total = x[threadIdx.x];
  for (int apart = 16; apart; apart >>= 1) total += __shfl_xor_sync(~0u, total, apart);
  y[threadIdx.x] = total;
}
"""
STAGED = """
extern "C" __global__ void __launch_bounds__(32) staged(const float* x, float* y, int rows) {
  extern __shared__ __align__(16) float ring[];
  const unsigned to = (unsigned)__cvta_generic_to_shared(ring + threadIdx.x * 4);
  for (int row = 0; row < 2; row++) {
    const float* from = x + row * 128 + threadIdx.x * 4;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + row * 512), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (int row = 0; row < rows; row++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
    __syncthreads();
    for (int i = 0; i < 4; i++) y[row * 128 + i * 32 + threadIdx.x] = ring[row * 128 + i * 32 + threadIdx.x];
  }
}
"""


def reversed_by(source: str, count: int = 64, threads: int = 64) -> torch.Tensor:
    x, y = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    EmulatedKernel(source, "reverse", ("DT=0",))((1, 1, 1), threads, (x, y, count))
    return y


def test_threads_meet_at_barriers() -> None:
    assert reversed_by(REVERSE).tolist() == list(range(63, -1, -1))
    assert reversed_by(REVERSE, count=3).tolist() == [63, 62, 61, *[0] * 61]


def summed_by(source: str) -> torch.Tensor:
    x, y = torch.arange(32.0), torch.zeros(32)
    EmulatedKernel(source, "sum", ("DT=0",))((1, 1, 1), 32, (x, y))
    return y


def test_warps_exchange() -> None:
    assert summed_by(SUM).tolist() == [496.0] * 32


def staged_by(source: str, shared_bytes: int = 1024) -> torch.Tensor:
    x, y = torch.arange(256.0), torch.zeros(256)
    EmulatedKernel(source, "staged", ("DT=0",), shared_bytes=shared_bytes)((1, 1, 1), 32, (x, y, 2))
    return y


def test_copies_ahead_have_come_after_their_wait() -> None:
    assert staged_by(STAGED).tolist() == list(range(256))


BARRIERS = "if (threadIdx.x) {\n__syncthreads();\n} else {\n__syncthreads();\n}"
FAULTS: dict[str, tuple[str, Callable[[], object]]] = {
    "no barrier": ("a race", lambda: reversed_by(REVERSE.replace("__syncthreads();", ""))),
    "two barriers": ("two barriers", lambda: reversed_by(REVERSE.replace("__syncthreads();", BARRIERS))),
    "a larger block": ("more threads than", lambda: reversed_by(REVERSE, threads=96)),
    "half a wait": ("a race", lambda: staged_by(STAGED.replace('"n"(0)', '"n"(1)'))),
    "odd addresses": ("16 bytes that do not begin", lambda: staged_by(STAGED.replace("row * 128 +", "row * 127 +"))),
    "less shared memory": ("beyond the shared memory", lambda: staged_by(STAGED, shared_bytes=512)),
    "half a shuffle": ("a shuffle of part", lambda: summed_by(SUM.replace("~0u", "1u"))),
    "a lane that left": (
        "wait for others",
        lambda: summed_by(SUM.replace("float total", "if (threadIdx.x == 5) return;\nfloat total")),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_goes_wrong_is_told(name: str) -> None:
    said, launch = FAULTS[name]
    with pytest.raises(AssertionError, match=said):
        launch()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.zeros(64), torch.zeros(64, dtype=torch.int32), 3), "float32 for const int"),
        ((torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), 3.0), "3.0 for int"),
        ((torch.zeros(64, dtype=torch.int32), None, 3), "None for int"),
        ((torch.zeros(64, dtype=torch.int32), 3), "takes 3 arguments, got 2"),
    ],
)
def test_arguments_are_those_that_the_source_declares(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        EmulatedKernel(REVERSE, "reverse", ("DT=0",))((1, 1, 1), 64, given)
