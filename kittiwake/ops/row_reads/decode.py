"""One packed row → float32, exactly as the formats define it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kittiwake.ops.jit import kernel
from kittiwake.ops.row_reads.layout import CODES

_F32, _F16, _BF16, _Q8_0 = (CODES[kind] for kind in ("F32", "F16", "BF16", "Q8_0"))
_TWO_TO_112 = np.float32(2.0**112)
# Source: ggml, ggml-common.h, kvalues_iq4nl.
_IQ4_NL = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@kernel()
def half_to_float(bits):  # type: ignore[no-untyped-def]
    """A float16's 16 bits (uint32) as float32: exponent and mantissa moved, then 2**112 makes up for the exponents' bias."""
    value = float_from_bits(np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))) * _TWO_TO_112
    if bits & np.uint32(0x7C00) == np.uint32(0x7C00):
        value = float_from_bits(np.uint32(np.uint32(0x7F800000) | ((bits & np.uint32(0x3FF)) << np.uint32(13))))
    return -value if bits & np.uint32(0x8000) else value


@kernel()
def _two_bytes(packed, at):  # type: ignore[no-untyped-def]
    return np.uint32(packed[at]) | np.uint32(np.uint32(packed[at + 1]) << np.uint32(8))


@kernel()
def _decode_blocks(packed, values, is_nibbles):  # type: ignore[no-untyped-def]
    """Q8_0 and IQ4_NL: blocks of 32 numbers with one float16 scale in front."""
    at = 0
    for first in range(0, values.shape[0], 32):
        scale = half_to_float(_two_bytes(packed, at))
        at += 2
        if is_nibbles:
            for i in range(16):
                values[first + i] = scale * np.float32(_IQ4_NL[packed[at + i] & np.uint8(15)])
                values[first + 16 + i] = scale * np.float32(_IQ4_NL[packed[at + i] >> np.uint8(4)])
            at += 16
        else:
            for i in range(32):
                values[first + i] = scale * np.float32(np.int8(packed[at + i]))
            at += 32


@kernel()
def decode_row(packed, kind, values):  # type: ignore[no-untyped-def]
    """packed uint8 [row bytes] → values float32 [row values] (written); whether all of them are finite."""
    count = values.shape[0]
    if kind == _F32:
        for i in range(count):
            high = np.uint32(_two_bytes(packed, 4 * i + 2) << np.uint32(16))
            values[i] = float_from_bits(np.uint32(_two_bytes(packed, 4 * i) | high))
    elif kind == _F16:
        for i in range(count):
            values[i] = half_to_float(_two_bytes(packed, 2 * i))
    elif kind == _BF16:
        for i in range(count):
            values[i] = float_from_bits(np.uint32(_two_bytes(packed, 2 * i) << np.uint32(16)))
    else:
        _decode_blocks(packed, values, kind != _Q8_0)
    is_finite = True
    for i in range(count):
        is_finite = is_finite and np.isfinite(values[i])
    return is_finite
