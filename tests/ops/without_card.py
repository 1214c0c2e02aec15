"""Kernels of the CUDA path without a card: compiled for several kinds of card, or run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.ops import nvrtc
from kittiwake.ops.head_kernels import TILINGS

ROOT = Path(__file__).parents[2]
QUICK = "tests.ops.quick_interpreter"
CARDS = (80, 90, 100, 120)
DTYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
HEADS = [(1, torch.float32), (7, torch.float16), (10, torch.bfloat16)]
HEADS += [(size, dtype) for size in (32, 64) for dtype in DTYPES]
TILINGS_BY_CARD = [*((90, place) for place in range(len(TILINGS))), (80, 3), (100, 0), (120, 1)]
MOST_SHARED = 99 * 1024
"""Bytes of shared memory that a block of the smallest of these cards may have."""
cards = pytest.mark.parametrize("capability", CARDS)
cards_and_dtypes = pytest.mark.parametrize(
    ("capability", "dtype"),
    [(card, dtype) for card in CARDS for dtype in DTYPES if card == 90 or dtype == torch.bfloat16],
    ids=str,
)
"""Every dtype on one kind of card, one dtype on every kind."""
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="cuda-bindings with NVRTC is not installed (the extra 'cuda')"
)


def run_interpreted(tests: Path, *more: str) -> None:
    """Run a file of tests in Triton's interpreter, in a process of its own: Triton reads the variable when it is imported."""
    # the interpreter computes in numpy, which warns where a card gives infinity
    options = ["-q", *"-W ignore::RuntimeWarning -p no:cacheprovider -p pytest_timeout -p".split(), QUICK, *more]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(tests), *options],
        # plugins that nothing here asks for take as long to import as torch does
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def built(kernel: Any, capability: int, types: Mapping[str, str], fixed: Mapping[str, Any], **options: Any) -> Any:
    """A kernel compiled for a card as a launch of it would be, whatever is not fixed being a number or an address."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind != "constexpr" and (name == "C" or name.endswith("stride")))
    }
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
