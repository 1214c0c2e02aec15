"""The ``rwkv`` package (BlinkDL/ChatRWKV). It runs one sequence at a time, so B sequences are B calls.

It reads its settings from the environment when it is imported, sets torch flags, prints, and loads from a file only.
Its own kernels (RWKV_CUDA_ON) need a CUDA compiler; without one it runs its TorchScript loop, and the version says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kittiwake.bench.peers.contract import Peer, PeerError, PeerTask

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MODULE = "rwkv.model"


def environment(device: str) -> dict[str, str]:
    """What the package is to read when it is imported."""
    has_kernels = device != "cpu" and shutil.which("nvcc") is not None
    return {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "1" if has_kernels else "0"}


def open_peer(task: PeerTask) -> Peer:
    """Import the package and load the weights through a file that is removed again. Raises PeerError."""
    if importlib.util.find_spec("rwkv") is None:
        raise PeerError("the package rwkv is not installed")
    if task.device != "cpu" and task.shape.head_size != 64:
        raise PeerError(f"its kernels take heads of 64 only, these are {task.shape.head_size}")
    module = importlib.import_module(_MODULE)
    if not hasattr(module, "RWKV_x070"):
        raise PeerError(f"{_MODULE} was imported before, without RWKV_V7_ON=1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        tensors = {name: task.weights[name].to(task.dtype).cpu() for name in task.weights}
        torch.save(tensors, path.with_suffix(".pth"))
        del tensors
        model = module.RWKV_x070(str(path), f"{task.device} {_DTYPES[task.dtype]}")
    return RwkvPackage(model, environment(task.device)["RWKV_CUDA_ON"] == "1")


class RwkvPackage:
    """The package's model, with one state for each sequence."""

    is_batched = False

    def __init__(self, model: Any, has_kernels: bool) -> None:
        self.version = f"rwkv {version('rwkv')}, {'its CUDA kernels' if has_kernels else 'TorchScript'}"
        self._model = model
        self._states: list[Any] = []

    def start(self, batch: int) -> None:
        """As many zero states."""
        self._states = [self._model.generate_zero_state() for _ in range(batch)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab], sequence by sequence; ids are [B, T]."""
        rows = []
        for index, row in enumerate(ids.tolist()):
            logits, self._states[index] = self._model.forward(row, self._states[index])
            rows.append(logits)
        return torch.stack(rows)
