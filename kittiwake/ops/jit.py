"""One way to compile a CPU kernel: Numba, no fast-math, outside the interpreter lock, cached on disk.

Numba's own cache looks at the file a function stands in, not at the functions it calls. Ours lives in a folder named
after the text of every op and the versions in use, so that a changed helper can never meet an old kernel.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import njit

from kittiwake.device import cache_dir, waiting_environment

Function = Callable[..., Any]
_NO_KERNELS = ("__init__.py", "cases.py", "packed.py", "reference.py")
_OF_CARDS = (
    "cuda.py",
    "head_kernels.py",
    "nvrtc.py",
    "triton.py",
    "triton_kernels.py",
    "triton_launch.py",
    "triton_math.py",
    "triton_select.py",
    "triton_sizes.py",
)


@lru_cache
def kernels_digest() -> str:
    """Sixteen hex digits over the source of every kernel and the versions of Numba, llvmlite and numpy."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {np.__version__}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name not in (*_NO_KERNELS, *_OF_CARDS):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def card_kernels_digest() -> str:
    """Sixteen hex digits over the source of every kernel that runs on a card."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.name in _OF_CARDS or path.suffix == ".cu":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def start_threads() -> None:
    """Start Numba's threads, waiting for work in a short spin, unless the environment says how they shall wait.

    Between two kernels of a step lie some 20 µs: a thread that sleeps at once costs twice that to wake, one that spins
    for milliseconds (the default) takes the core from torch's threads. The variable is read when the threads start, so
    it is set for that moment only; torch has a pool of its own, whose variable only the command line can set in time.
    """
    wanted = waiting_environment()
    os.environ.update(wanted)
    try:
        numba.get_num_threads()  # starts them
    finally:
        for name in wanted:
            del os.environ[name]


def kernel(*, parallel: bool = False) -> Callable[[Function], Function]:
    """Decorator that compiles a function when it is first called with a set of types.

    ``error_model="numpy"``: a float division by zero gives infinity and no branch, so that loops vectorise.
    """

    def compile_later(function: Function) -> Function:
        dispatcher: Any = njit(error_model="numpy", nogil=True, parallel=parallel)(function)
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(cache_dir() / "kernels" / kernels_digest())
        try:
            dispatcher.enable_caching()
        except RuntimeError:  # nowhere to write: compile anew in every process
            pass
        finally:
            numba.config.CACHE_DIR = before
        return dispatcher

    return compile_later
