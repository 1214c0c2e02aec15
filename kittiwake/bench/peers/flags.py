"""Process-wide settings that change what a product or a kernel computes: each side has its own.

A peer sets what it likes when it is imported, built or run. That stays with it: outside its own calls every setting is
as it was before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_PREFIXES = ("RWKV_", "FLA_", "TRITON_", "TORCH_", "NVIDIA_TF32_")


def read_flags() -> dict[str, Any]:
    """Every setting now, by name."""
    matmul = torch.backends.cuda.matmul
    return {
        "fp16_reductions": _reductions("fp16"),
        "bf16_reductions": _reductions("bf16"),
        "fp16_accumulation": matmul.allow_fp16_accumulation,
        "matmul_tf32": matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "blas_library": torch.backends.cuda.preferred_blas_library(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "is_grad_enabled": torch.is_grad_enabled(),
        "autocast_mode": torch._C._jit_set_autocast_mode(True),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
    }


def _reductions(kind: str) -> tuple[bool, bool]:
    """Whether partial sums may be rounded to 16 bits, and whether a product may be split along K."""
    matmul, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
    return getattr(matmul, name), getattr(matmul, f"{name}_split_k")


def write_flags(flags: Mapping[str, Any]) -> None:
    """Bring back every setting that :func:`read_flags` told."""
    matmul = torch.backends.cuda.matmul
    for kind in ("fp16", "bf16"):
        setattr(matmul, f"allow_{kind}_reduced_precision_reduction", flags[f"{kind}_reductions"])
    matmul.allow_fp16_accumulation = flags["fp16_accumulation"]
    matmul.allow_tf32 = flags["matmul_tf32"]
    torch.backends.cudnn.allow_tf32 = flags["cudnn_tf32"]
    torch.backends.cudnn.benchmark = flags["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = flags["cudnn_deterministic"]
    torch.backends.cuda.preferred_blas_library(flags["blas_library"])
    torch.set_default_dtype(flags["dtype"])
    if torch.get_default_device() != flags["device"]:
        torch.set_default_device(flags["device"])
    if torch.get_num_threads() != flags["threads"]:
        torch.set_num_threads(flags["threads"])
    torch.set_grad_enabled(flags["is_grad_enabled"])
    torch._C._jit_set_autocast_mode(flags["autocast_mode"])
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        if name not in flags["environment"]:
            del os.environ[name]
    os.environ.update(flags["environment"])


class OwnFlags:
    """The settings of one side. ``with flags():`` puts them in force, keeps what the body changes, and restores ours."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._flags: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The peer's settings inside, the caller's again outside, whatever happens. Its warnings are its own affair."""
        outside = _read_whole()
        try:
            if self._flags is None:
                os.environ.update(self._environment)
            else:
                write_flags(self._flags)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
            self._flags = _read_whole()
        finally:
            write_flags(outside)


def _read_whole() -> dict[str, Any]:
    """The settings; the one that can only be read by setting it is put back."""
    flags = read_flags()
    torch._C._jit_set_autocast_mode(flags["autocast_mode"])
    return flags
