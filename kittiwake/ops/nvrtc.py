"""CUDA C++ kernels: compiled by NVRTC when a model loads, kept on disk, launched on torch's current stream.

``cuda-bindings`` brings NVRTC and the driver's calls; nothing here needs a CUDA toolkit or its headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kittiwake.device import cache_dir
from kittiwake.errors import DeviceError

_FLAGS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
"""Contraction is off: a fused multiply-add stands where the source says ``fmaf``, so fused kernels round as unfused ones.
Functions without a word of where they run, such as lambdas, are the card's."""

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What sources know a type of activations by: DT."""
_current = threading.local()


def read_sources(*names: str) -> str:
    """The CUDA C++ of files in ``kittiwake/ops``, one behind the other."""
    return "".join(files("kittiwake.ops").joinpath(name).read_text(encoding="utf-8") for name in names)


def compile_source(source: str, defines: Sequence[str], arch: str) -> bytes:
    """Machine code (cubin) for ``arch``, such as "sm_90". Raises DeviceError with the compiler's words."""
    nvrtc = _bindings().nvrtc
    options = [*_FLAGS, f"--gpu-architecture={arch}", *(f"-D{define}" for define in defines)]
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    encoded = [option.encode() for option in options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(result) != 0:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise DeviceError(f"NVRTC cannot compile a kernel for {arch}", log.decode(errors="replace").strip("\0 \n"))
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _compiled(source: str, defines: tuple[str, ...], arch: str) -> bytes:
    """The same from the cache folder, compiled and put there when it is not in it."""
    version = _check(_bindings().nvrtc.nvrtcVersion())
    key = hashlib.sha256("\0".join((source, *defines, arch, *_FLAGS, str(version))).encode()).hexdigest()[:32]
    path = cache_dir() / "cuda" / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = compile_source(source, defines, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(name).replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    return code


@dataclass(frozen=True)
class _Loaded:
    """A function on one device."""

    context: Any
    code: bytes
    """The driver may read it until the module is gone."""
    module: Any
    function: Any
    can_overlap: bool


class CudaKernel:
    """One function of a compiled source, for whichever CUDA device is current; loaded for the present one at once."""

    def __init__(self, source: str, name: str, defines: Sequence[str], *, shared_bytes: int = 0) -> None:
        self._source, self._name, self._defines = source, name, tuple(defines)
        self._shared_bytes = shared_bytes
        self._driver = _bindings().driver
        self._by_device: dict[int, _Loaded] = {}
        self._load(torch.cuda.current_device())

    def _load(self, device: int) -> _Loaded:
        """The function on the current device, from now on ready."""
        driver = self._driver
        major, minor = torch.cuda.get_device_capability(device)
        code = _compiled(self._source, self._defines, f"sm_{major}{minor}")
        torch.zeros(1, device="cuda")  # makes the context that the module is loaded into, current in this thread
        context = _check(driver.cuCtxGetCurrent())
        module = _check(driver.cuModuleLoadData(code))
        function = _check(driver.cuModuleGetFunction(module, self._name.encode()))
        if self._shared_bytes:  # beside what the kernel has of its own, even less than 48 KiB may need to be asked for
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, self._shared_bytes))
        loaded = self._by_device[device] = _Loaded(context, code, module, function, major >= 9)
        return loaded

    def __call__(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], *, overlap: bool = False
    ) -> None:
        """Launch on torch's current stream. Tensors are passed by address, int and float as 32 bits.

        ``overlap`` lets the kernel begin before the one in front of it has ended (it must wait inside for what it reads).
        """
        driver, device = self._driver, torch.cuda.current_device()
        loaded = self._by_device.get(device) or self._load(device)
        if getattr(_current, "device", None) != device:
            _check(driver.cuCtxSetCurrent(loaded.context))  # a thread that torch has not used yet has none
            _current.device = device
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        if overlap and loaded.can_overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values: list[Any] = []
        kinds: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
                kinds.append(ctypes.c_void_p)
            else:
                values.append(argument)
                kinds.append(ctypes.c_int if isinstance(argument, int) else ctypes.c_float)
        _check(driver.cuLaunchKernelEx(config, loaded.function, (tuple(values), tuple(kinds)), 0))


def can_overlap(device: torch.device) -> bool:
    """Whether a launch on this device may begin before the one in front of it has ended, see :meth:`CudaKernel.__call__`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def shared_memory_limit() -> int:
    """Most bytes of shared memory that a block may ask for on the current CUDA device."""
    driver = _bindings().driver
    torch.cuda.current_stream()  # makes sure that the driver is awake
    device = _check(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(_check(driver.cuDeviceGetAttribute(kind, device)))


def padded_head(head_size: int) -> int:
    """DP: channels of a head rounded up to whole warps."""
    return -(-head_size // 32) * 32


def is_available() -> bool:
    """Whether ``cuda-bindings`` can be imported and finds an NVRTC."""
    try:
        _check(_bindings().nvrtc.nvrtcVersion())
    except (DeviceError, RuntimeError):
        return False
    return True


@lru_cache(maxsize=1)
def _bindings() -> Any:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as err:
        raise DeviceError(
            f"the CUDA path needs cuda-bindings, which cannot be imported: {err}", "pip install 'kittiwake[cuda]'"
        ) from None

    class Bindings:
        pass

    found = Bindings()
    found.driver, found.nvrtc = driver, nvrtc  # type: ignore[attr-defined]
    return found


def _check(results: tuple[Any, ...]) -> Any:
    """The value of a call of the bindings, which gives (error, values…). Raises DeviceError for an error."""
    if int(results[0]) != 0:
        raise DeviceError(
            f"a CUDA call failed: {results[0].name}", "see `kittiwake doctor` for the card and its driver"
        )
    values = results[1:]
    return values[0] if len(values) == 1 else values
