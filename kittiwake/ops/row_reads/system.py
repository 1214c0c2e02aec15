"""Calls of the C library and atomic operations for Numba kernels."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kittiwake.ops.jit import kernel

# Found by their names when a kernel is linked, so that a compiled kernel can be kept on disk.
_read = types.ExternalFunction("read", types.intp(types.int32, types.voidptr, types.uintp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.voidptr, types.uintp))
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
_errno_place = types.ExternalFunction("__error" if sys.platform == "darwin" else "__errno_location", types.voidptr())
_MONOTONIC = int(time.CLOCK_MONOTONIC)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An int64 address as a pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, values: Any, index: Any, amount: Any) -> Any:
    """values[index] += amount for all threads in one order; what it was before. ``values`` is a contiguous int64 vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", builder.gep(vector.data, [args[1]]), args[2], "seq_cst")

    return types.int64(values, types.int64, types.int64), codegen


@intrinsic
def atomic_swap(typingctx: Any, values: Any, index: Any, value: Any) -> Any:
    """values[index] = value for all threads in one order; what it was before. ``values`` is a contiguous int64 vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("xchg", builder.gep(vector.data, [args[1]]), args[2], "seq_cst")

    return types.int64(values, types.int64, types.int64), codegen


@kernel()
def error_number():  # type: ignore[no-untyped-def]
    """errno of the calling thread."""
    return carray(_errno_place(), 1, np.int32)[0]


@kernel()
def read_into(descriptor, address, size):  # type: ignore[no-untyped-def]
    """read(2): bytes read, 0 at the end, -1 for an error."""
    return _read(np.int32(descriptor), pointer(address), np.uint64(size))


@kernel()
def read_at(descriptor, address, size, offset):  # type: ignore[no-untyped-def]
    """pread(2): bytes read, 0 at the end, -1 for an error."""
    return _pread(np.int32(descriptor), pointer(address), np.uint64(size), np.int64(offset))


@kernel()
def write_from(descriptor, address, size):  # type: ignore[no-untyped-def]
    """write(2): bytes written, -1 for an error."""
    return _write(np.int32(descriptor), pointer(address), np.uint64(size))


@kernel()
def monotonic_ns():  # type: ignore[no-untyped-def]
    """The system's monotonic clock in nanoseconds, the one of ``time.clock_gettime_ns(time.CLOCK_MONOTONIC)``."""
    spec = np.zeros(2, np.int64)
    _clock_gettime(np.int32(_MONOTONIC), pointer(spec.ctypes.data))
    return spec[0] * 1_000_000_000 + spec[1]
