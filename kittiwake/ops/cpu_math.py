"""Float32 building blocks for Numba kernels, the same bits wherever they are inlined.

Numba's fast-math stays off everywhere: without it LLVM may not reorder, contract or approximate, so a value depends on
its inputs alone, not on vector width, thread count or the kernel around it. Where a fused multiply-add is wanted it is
asked for by name. ``exp`` is our own because the C library's is scalar and differs between machines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kittiwake.ops.jit import kernel

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # nine bits: n * _LN2_HIGH is exact for |n| < 2**15
_LN2_LOW = np.float32(-2.12194440e-4)  # ln 2 - _LN2_HIGH
_EXP_MAX = np.float32(89.0)  # beyond it e**x overflows float32
_EXP_MIN = np.float32(-104.0)  # below it e**x rounds to 0
# Taylor coefficients 1/n!; on |r| <= ln(2)/2 the first one left out is below 2**-27
_C2 = np.float32(1 / 2)
_C3 = np.float32(1 / 6)
_C4 = np.float32(1 / 24)
_C5 = np.float32(1 / 120)
_C6 = np.float32(1 / 720)
_C7 = np.float32(1 / 5040)
# 1/(2n+1), the series of artanh; on |s| <= 1/3 the first one left out adds less than 2**-29 of the sum
_A3 = np.float32(1 / 3)
_A5 = np.float32(1 / 5)
_A7 = np.float32(1 / 7)
_A9 = np.float32(1 / 9)
_A11 = np.float32(1 / 11)
_A13 = np.float32(1 / 13)
_A15 = np.float32(1 / 15)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ZERO = np.float32(0.0)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """float32 a * b + c, rounded once."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return signature, codegen


@intrinsic
def _rint(typingctx: Any, x: Any) -> Any:
    """float32 x to the nearest whole float32, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_F32]), args)

    return types.float32(types.float32), codegen


@intrinsic
def bits_from_float(typingctx: Any, x: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def _to_int32(typingctx: Any, x: Any) -> Any:
    """float32 to int32, towards zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def _power_of_two(typingctx: Any, n: Any) -> Any:
    """2**n as float32 for int32 n from -126 to 127."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], ir.Constant(_I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(_I32, 23)), _F32)

    return types.float32(types.int32), codegen


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """A stored weight as float32, exactly: a float32 as it is, a uint16 as the bits of a bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        wide = builder.zext(args[0], _I32)
        return builder.bitcast(builder.shl(wide, ir.Constant(_I32, 16)), _F32)

    if value not in (types.float32, types.uint16):
        return None
    return types.float32(value), codegen


@intrinsic
def prefetch(typingctx: Any, values: Any, index: Any) -> Any:
    """Ask for the cache line of values[index] (a contiguous vector) ahead of its use; changes no value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.bitcast(builder.gep(vector.data, [args[1]]), _BYTES)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        # read, keep in every cache level, data
        builder.call(hint, [pointer, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(values, types.int64), codegen


@kernel()
def _exp_parts(x: np.float32) -> tuple[np.float32, np.int32]:
    """(q, n) with e**x = 2**n * (1 + q), |x| within the float32 range of exp."""
    n = _rint(x * _LOG2E)
    r = fma(-n, _LN2_LOW, fma(-n, _LN2_HIGH, x))
    p = fma(_C7, r, _C6)
    p = fma(p, r, _C5)
    p = fma(p, r, _C4)
    p = fma(p, r, _C3)
    p = fma(p, r, _C2)
    return fma(p * r, r, r), _to_int32(n)


@kernel()
def exp32(x: np.float32) -> np.float32:
    """e**x in float32, at most 1.5 units in the last place off; 0 and infinity at the ends, denormals right."""
    x = min(max(x, _EXP_MIN), _EXP_MAX)
    q, n = _exp_parts(x)
    half = np.int32(n >> 1)  # two steps: 2**n alone may leave the range that e**x stays in
    return (_ONE + q) * _power_of_two(half) * _power_of_two(np.int32(n - half))


@kernel()
def sigmoid32(x: np.float32) -> np.float32:
    """1 / (1 + e**-x) in float32."""
    return _ONE / (_ONE + exp32(-x))


@kernel()
def silu32(x: np.float32) -> np.float32:
    """x / (1 + e**-x) in float32."""
    return x * sigmoid32(x)


@kernel()
def softplus32(x: np.float32) -> np.float32:
    """ln(1 + e**x) in float32; small results keep their relative precision."""
    y = exp32(-abs(x))
    s = y / (y + _TWO)  # ln(1 + y) = 2 artanh s
    z = s * s
    p = fma(_A15, z, _A13)
    p = fma(p, z, _A11)
    p = fma(p, z, _A9)
    p = fma(p, z, _A7)
    p = fma(p, z, _A5)
    p = fma(p, z, _A3)
    return fma(_TWO * s, fma(p, z, _ONE), max(x, _ZERO))


@kernel()
def tanh32(x: np.float32) -> np.float32:
    """tanh in float32 through expm1, so that small x keep their relative precision."""
    y = min(max(_TWO * x, np.float32(-40.0)), np.float32(40.0))
    q, n = _exp_parts(y)
    scale = _power_of_two(n)
    expm1 = fma(scale, q, scale - _ONE)
    return expm1 / (expm1 + _TWO)


@kernel()
def row_sum(x: np.ndarray) -> np.float32:
    """Sum of a float32 vector by one fixed tree: eight interleaved chains, then pairs."""
    n = x.shape[0]
    a = _ZERO
    b = _ZERO
    c = _ZERO
    d = _ZERO
    e = _ZERO
    f = _ZERO
    g = _ZERO
    h = _ZERO
    full = n - n % 8
    for i in range(0, full, 8):
        a += x[i]
        b += x[i + 1]
        c += x[i + 2]
        d += x[i + 3]
        e += x[i + 4]
        f += x[i + 5]
        g += x[i + 6]
        h += x[i + 7]
    for i in range(full, n):
        a += x[i]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@kernel()
def row_square_sum(x: np.ndarray, mean: np.float32) -> np.float32:
    """Sum of (x - mean)**2 by the tree of :func:`row_sum`."""
    n = x.shape[0]
    a = _ZERO
    b = _ZERO
    c = _ZERO
    d = _ZERO
    e = _ZERO
    f = _ZERO
    g = _ZERO
    h = _ZERO
    full = n - n % 8
    for i in range(0, full, 8):
        a = fma(x[i] - mean, x[i] - mean, a)
        b = fma(x[i + 1] - mean, x[i + 1] - mean, b)
        c = fma(x[i + 2] - mean, x[i + 2] - mean, c)
        d = fma(x[i + 3] - mean, x[i + 3] - mean, d)
        e = fma(x[i + 4] - mean, x[i + 4] - mean, e)
        f = fma(x[i + 5] - mean, x[i + 5] - mean, f)
        g = fma(x[i + 6] - mean, x[i + 6] - mean, g)
        h = fma(x[i + 7] - mean, x[i + 7] - mean, h)
    for i in range(full, n):
        a = fma(x[i] - mean, x[i] - mean, a)
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@kernel()
def norm_row(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """Layer norm of one float32 row (population variance): out = (x - mean) / sqrt(var + eps) * weight + bias."""
    n = x.shape[0]
    mean = row_sum(x) / np.float32(n)
    scale = _ONE / np.sqrt(row_square_sum(x, mean) / np.float32(n) + eps)
    for i in range(n):
        out[i] = fma((x[i] - mean) * scale, weight[i], bias[i])


@kernel()
def rms_row(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """RMS norm of one float32 row: out = x / sqrt(mean(x**2) + eps) * weight; out may be x."""
    n = x.shape[0]
    scale = _ONE / np.sqrt(row_square_sum(x, _ZERO) / np.float32(n) + eps)
    for i in range(n):
        out[i] = x[i] * scale * weight[i]
