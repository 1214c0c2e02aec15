"""CUDA C++ kernels on the host: their source compiled by g++, every thread of a block a fiber (prelude.hpp).

It is the source that runs, not the machine code of a card: transcendental functions and matrix instructions round in
another way. What it shows: arguments of another kind than the source declares, threads that part at a barrier or a
shuffle, shared memory that is read before it is written or that overflows, copies ahead without their wait, addresses
that loads of 16 bytes cannot take.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PRELUDE = Path(__file__).with_name("prelude.hpp")
IS_AVAILABLE = shutil.which("g++") is not None
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32."
_IN_C = {
    "cvt.f32.f16": "{0} = emulated::from_half({1})",
    "cvt.rn.f16.f32": "{0} = emulated::to_half({1})",
    "cvt.rn.bf16.f32": "{0} = emulated::to_bfloat({1})",
    "rcp.approx.ftz.f32": "emulated::reciprocal({all})",
    f"{_MMA}f16.f16.f32": "emulated::multiply<true>({all})",
    f"{_MMA}bf16.bf16.f32": "emulated::multiply<false>({all})",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "emulated::load_matrices({all})",
    "ld.shared.b32": "emulated::load_shared({all})",
    "cp.async.cg.shared.global": "emulated::copy_ahead({all})",
    "{ .reg .pred p; setp.gt.s32 p, %2, 0; @p cp.async": "emulated::copy_ahead({0}, {1}, 16, {2} > 0)",
    "{ .reg .pred p; setp.ne.s32 p, %3, 0; @p cp.async": "emulated::copy_ahead({all})",
    "{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.f32": "emulated::store_if({all})",
    "cp.async.commit_group": "emulated::commit()",
    "cp.async.wait_group %0": "emulated::wait_group({0})",
    "cp.async.wait_group 0": "emulated::wait_group(0)",
}
"""What an instruction begins with → the same in C++, of its operands in order."""
_DYNAMIC = r"extern __shared__ __align__\(16\) (\w+) (\w+)\[\];"
_POINTERS = {"float": torch.float32, "int": torch.int32, "long long": torch.int64}
_ELEMENTS = {"0": torch.float32, "1": torch.float16, "2": torch.bfloat16}


def _closed(text: str, at: int) -> int:
    """The place behind the bracket that closes the one at ``at``."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"nothing closes the bracket of {text[at : at + 60]!r}")


def _without_assembly(text: str) -> str:
    """The source with every assembly instruction in C++."""
    out, at = [], 0
    for found in re.finditer(r"\basm(\s+volatile)?\s*\(", text):
        if found.start() < at:
            continue
        end = _closed(text, found.end() - 1)
        inside = text[found.end() : end - 1]
        template = "".join(re.findall(r'"([^"]*)"', re.split(r"::|:\s*\"", inside, maxsplit=1)[0])).strip()
        operands, place = [], 0
        for operand in re.finditer(r'"[=+]?[rflhn]"\s*\(', inside):
            if operand.start() >= place:
                place = _closed(inside, operand.end() - 1)
                operands.append(f"({inside[operand.end() : place - 1]})")
        ways = [way for begin, way in _IN_C.items() if template.startswith(begin)]
        if len(ways) != 1:
            raise ValueError(f"{len(ways)} ways are known to say {template!r} in C++")
        out += [text[at : found.start()], ways[0].format(*operands, all=", ".join(operands))]
        at = end
    return "".join([*out, text[at:]])


@dataclass(frozen=True)
class _Function:
    """A kernel of a translated source."""

    name: str
    types: tuple[str, ...]
    """Of its parameters."""
    most_threads: str
    """What it is compiled for: an expression."""

    @property
    def thunk(self) -> str:
        """C++ that calls it with the arguments of a launch."""
        given = ", ".join(f"*({kind}*)given[{place}]" for place, kind in enumerate(self.types))
        return f"""
static void call_{self.name}() {{ {self.name}({given}); }}
extern "C" const char* launch_{self.name}(
    void** arguments, const unsigned* grid, int threads, int shared_bytes, int eager, int reversed) {{
  if (threads > {self.most_threads}) return "more threads than the kernel is compiled for";
  given = arguments;
  return emulated::launch(call_{self.name}, grid, threads, shared_bytes, eager, reversed);
}}
"""


def _functions(text: str) -> list[_Function]:
    """Every kernel of a source."""
    out = []
    for found in re.finditer(r'extern "C" __global__ void\s+__launch_bounds__\(', text):
        end = _closed(text, found.end() - 1)
        head = re.compile(r"\s*(\w+)\(").match(text, end)
        assert head is not None, text[end : end + 60]
        given = text[head.end() : _closed(text, head.end() - 1) - 1].replace("__restrict__", " ")
        types = tuple(" ".join(one.replace("*", " * ").split()[:-1]) for one in given.split(","))
        out.append(_Function(head[1], types, text[found.end() : end - 1].split(",")[0]))
    return out


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr[:3000]}")
    return done.stdout


@lru_cache(maxsize=256)
def _built(source: str, defines: tuple[str, ...]) -> dict[str, tuple[_Function, Any]]:
    """Every kernel of a source by name, with a function of the host that launches it."""
    folder = Path(tempfile.mkdtemp(prefix="kittiwake-emulated-"))
    try:
        file, library = folder / "kernel.cpp", folder / "kernel.so"
        file.write_text(source, encoding="utf-8")
        text = _without_assembly(_run("g++", "-E", "-P", *(f"-D{define}" for define in defines), str(file)))
        functions = _functions(text)
        text = re.sub(_DYNAMIC, r"\1* \2 = (\1*)emulated::dynamic;", text) + "\nstatic void** given;"
        file.write_text(text + "".join(function.thunk for function in functions), encoding="utf-8")
        options = (
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-mfma",
            "-w",
            "-shared",
            "-fPIC",
            "-include",
            str(PRELUDE),
        )
        _run("g++", *options, str(file), "-o", str(library))
        loaded = ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)
    launches = {function.name: getattr(loaded, f"launch_{function.name}") for function in functions}
    for launch in launches.values():
        launch.restype = ctypes.c_char_p
    return {function.name: (function, launches[function.name]) for function in functions}


class EmulatedKernel:
    """In place of :class:`kittiwake.ops.nvrtc.CudaKernel`, for tensors in host memory.

    Every launch runs in several ways, which must have the same bits: threads in order and in the other order, copies
    ahead as late and as early as they may be.
    """

    def __init__(self, source: str, name: str, defines: Sequence[str], *, shared_bytes: int = 0) -> None:
        self._function, self._launch = _built(source, tuple(defines))[name]
        self._shared_bytes = shared_bytes
        code = next(define.partition("=")[2] for define in defines if define.startswith("DT="))
        self._kinds = _POINTERS | {"elem": _ELEMENTS[code], "out_t": _ELEMENTS[code]}
        if "OUT32=1" in defines:
            self._kinds["out_t"] = torch.float32

    def __call__(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], *, overlap: bool = False
    ) -> None:
        """Launch; raises AssertionError for what a card would not take, or would take and do something else."""
        name, types = self._function.name, self._function.types
        assert all(0 < size <= limit for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=True)), (name, grid)
        assert len(arguments) == len(types), f"{name} takes {len(types)} arguments, got {len(arguments)}"
        for kind, argument in zip(types, arguments, strict=True):
            self._check(kind, argument)
        written = {
            id(argument): argument
            for kind, argument in zip(types, arguments, strict=True)
            if kind.endswith("*") and not kind.startswith("const")
        }
        before = {key: tensor.clone() for key, tensor in written.items()}
        found: dict[int, torch.Tensor] = {}
        for is_eager, is_reversed in ((0, 0), (1, 1)):
            for key, tensor in written.items():
                tensor.copy_(before[key])
            self._run(grid, threads, arguments, is_eager, is_reversed)
            for key, tensor in written.items():
                bits = tensor.contiguous().view(torch.uint8).clone()
                assert key not in found or torch.equal(found[key], bits), f"{name}: a race"
                found[key] = bits

    def _check(self, kind: str, argument: Any) -> None:
        if not kind.endswith("*"):
            wanted: type = {"int": int, "float": float}[kind]
            assert isinstance(argument, wanted), f"{self._function.name}: {argument!r} for {kind}"
            return
        dtype = self._kinds[kind.removeprefix("const ").removesuffix("*").strip()]
        assert isinstance(argument, torch.Tensor), f"{self._function.name}: {argument!r} for {kind}"
        assert argument.dtype == dtype, f"{self._function.name}: {argument.dtype} for {kind}"

    def _run(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], is_eager: int, is_reversed: int
    ) -> None:
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(ctypes.c_void_p(argument.data_ptr()))
            else:
                values.append(ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument))
        given = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        failure = self._launch(given, (ctypes.c_uint * 3)(*grid), threads, self._shared_bytes, is_eager, is_reversed)
        assert failure is None, f"{self._function.name}: {failure.decode()}"
