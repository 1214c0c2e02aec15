"""Functions that Triton kernels share. A kernel's bits depend on which of the two sigmoids it takes."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def sigmoid(x):
    """By the exponential of CUDA's library and a rounded division, as the kernels in CUDA C++: to the same bits."""
    return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))


@triton.jit
def quick_sigmoid(x):
    """By the card's own exponential and division, a few units in the last place off, in half the instructions."""
    return 1.0 / (1.0 + tl.exp(-x))
