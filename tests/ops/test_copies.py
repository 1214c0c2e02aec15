"""Few numbers between host and card: what is enqueued, and that what is launched over and over is passed whole."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kittiwake.ops import nvrtc
from kittiwake.ops.copies import prepared_copy
from kittiwake.ops.nvrtc import CudaKernel, read_sources
from tests.emulator import kernels
from tests.emulator.kernels import EmulatedKernel


def test_on_the_cpu_every_call_copies_what_is_there() -> None:
    to, given = torch.zeros(3, dtype=torch.int64), torch.tensor([1, -2, 3])
    send = prepared_copy(to, given)
    assert to.tolist() == [0, 0, 0]
    send()
    given[1] = 7
    assert to.tolist() == [1, -2, 3]
    send()
    assert to.tolist() == [1, 7, 3]


@pytest.mark.skipif(not kernels.IS_AVAILABLE, reason="g++ is not installed: it compiles kernels for the host")
@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_the_kernel_copies_so_many_words(count: int) -> None:
    kernel = EmulatedKernel(read_sources("base.cu", "copies.cu"), "copy_numbers", ("DT=0",))
    given, to = torch.randint(-(2**31), 2**31, (1024,), dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    kernel((1, 1, 1), 256, (to, given, count))
    assert torch.equal(to[:count], given[:count]) and not to[count:].any()


def test_a_prepared_launch_passes_its_arguments_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> tuple[int]:
        addresses = (ctypes.c_void_p * 3).from_address(given[-2])
        pointer, count, scale = (
            kind.from_address(address)
            for kind, address in zip((ctypes.c_void_p, ctypes.c_int, ctypes.c_float), addresses, strict=True)
        )
        seen.append((*given[:-2], pointer.value, count.value, scale.value, given[-1]))
        return (0,)

    kernel: Any = object.__new__(CudaKernel)
    kernel._driver, kernel._shared_bytes = SimpleNamespace(cuLaunchKernel=launch), 64
    kernel._by_device = {0: SimpleNamespace(function="function", context="context")}
    monkeypatch.setattr(nvrtc, "_current", SimpleNamespace(device=0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=11))
    tensor = torch.zeros(4)
    run, address = kernel.prepared((5, 6, 7), 32, (tensor, 3, 0.5)), tensor.data_ptr()
    del tensor
    run()
    run()
    assert seen == [("function", 5, 6, 7, 32, 1, 1, 64, 11, address, 3, 0.5, 0)] * 2
