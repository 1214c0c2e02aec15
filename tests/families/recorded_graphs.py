"""Graphs without a card: a capture writes down launches, which a replay then makes, with the arguments of the capture.

So numbers that the host gives a launch stay as they were, as on a card, and a capture may do nothing but launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from triton.runtime import interpreter

from kittiwake.engine import device_steps
from kittiwake.families import cuda_model
from kittiwake.families.qwen4exp import cuda_model as qwen4exp
from tests.emulator.kernels import EmulatedKernel

_ASKED_OF_NO_DEVICE = {
    f"torch.Tensor.{name}"
    for name in (
        "__len__", "data_ptr", "device.__get__", "dim", "dtype.__get__", "itemsize.__get__", "numel", "shape.__get__",
        "size", "stride", "tensor_split", "view",
    )
}  # fmt: skip
"""What of a tensor the host knows, and views of it."""


class OnlyLaunches(TorchFunctionMode):
    """Refuses, with AssertionError, whatever would wait for a device, ask it for memory or launch what is not ours."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = resolve_name(function)
        if name == "torch.Tensor.__getitem__":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert all(part is None or isinstance(part, int | slice) for part in parts), (
                f"{name} by values in a capture"
            )
        else:
            assert name in _ASKED_OF_NO_DEVICE, f"{name} in a capture"
        return function(*args, **(kwargs or {}))


class RecordedGraph:
    """In place of a captured graph."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Make the launches."""
        for launch in self.launches:
            launch()


_open: list[RecordedGraph] = []


def recorded(work: Callable[[], Any], pool: Any = None) -> RecordedGraph:
    """In place of :func:`kittiwake.device.captured`."""
    graph = RecordedGraph()
    _open.append(graph)
    try:
        with OnlyLaunches():
            work()
    finally:
        _open.pop()
    return graph


def _recording(launch: Callable[..., None]) -> Callable[..., None]:
    def launch_or_record(*given: Any, **named: Any) -> None:
        if _open:
            _open[-1].launches.append(partial(launch, *given, **named))
        else:
            launch(*given, **named)

    return launch_or_record


def _loading(load: Callable[..., None]) -> Callable[..., None]:
    def load_outside(*given: Any, **named: Any) -> None:
        assert not _open, "a kernel is loaded in a capture"
        load(*given, **named)

    return load_outside


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Within, models capture such graphs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_model, qwen4exp, device_steps):
            patch.setattr(module, "captured", recorded)
        patch.setattr(interpreter.GridExecutor, "__call__", _recording(interpreter.GridExecutor.__call__))
        patch.setattr(EmulatedKernel, "__call__", _recording(EmulatedKernel.__call__))
        patch.setattr(EmulatedKernel, "__init__", _loading(EmulatedKernel.__init__))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        yield
