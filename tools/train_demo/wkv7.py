"""The RWKV-7 scan as a torch operator with a gradient: CUDA kernels on the GPU, plain loops on the CPU.

Per sequence and head, S being the [value, key] state (zero at the start of a sequence):

    sa = S a;  S = S diag(w) + sa b^T + v k^T;  y = S r,  with w = exp(-0.606531 sigmoid(wraw)), a = -kk, b = kk * gate.

The operator works on flat activations [tokens, heads * 64]; `SEQUENCE.steps` says how many tokens a sequence has, so a
graph compiled around the operator serves every sequence length.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import torch
from torch import Tensor

HEAD = 64
CHUNK = 16
DECAY = 0.606531


class SEQUENCE:
    """The sequence length of the current batch and the threads a state row is split over (see the kernels)."""

    steps = 1024
    parts_forward = 2
    parts_backward = 2


_LIBRARY: ctypes.CDLL | None = None
_CPU_LIBRARY: ctypes.CDLL | None = None


def build_library(directory: str) -> str:
    """Compile the kernels with nvcc for the GPU of this machine; return the path of the shared library."""
    source = Path(__file__).with_name("wkv7_train.cu")
    os.makedirs(directory, exist_ok=True)
    target = os.path.join(directory, "libwkv7.so")
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    command = ["nvcc", "-O3", f"-arch={architecture}", "-shared", "-Xcompiler", "-fPIC", "-o", target, str(source)]
    subprocess.run(command, check=True)
    return target


def load_library(path: str) -> None:
    """Load the compiled kernels; needed before the operator meets a CUDA tensor."""
    global _LIBRARY
    _LIBRARY = ctypes.CDLL(path)


def build_cpu_library(directory: str) -> str:
    """Compile the CPU's forward scan for this machine; return the path of the shared library."""
    os.makedirs(directory, exist_ok=True)
    target = os.path.join(directory, "libwkv7_cpu.so")
    flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", target, str(Path(__file__).with_name("wkv7_cpu.cpp"))], check=True)
    return target


def load_cpu_library(path: str) -> None:
    """Load the CPU's forward scan: from now on used for float32 tensors on the CPU instead of the plain loop."""
    global _CPU_LIBRARY
    _CPU_LIBRARY = ctypes.CDLL(path)


def scan(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The recurrence as a plain loop that autograd can follow; all tensors [B, T, H, 64], w the decay factor."""
    state = r.new_zeros(r.shape[0], r.shape[2], HEAD, HEAD)
    out = []
    for t in range(r.shape[1]):
        sa = state @ a[:, t].unsqueeze(-1)
        write = v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        state = state * w[:, t].unsqueeze(-2) + sa * b[:, t].unsqueeze(-2) + write
        out.append((state @ r[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1)


def _call(name: str, tensors: list[Tensor], tokens: int, heads: int, parts: int) -> None:
    assert _LIBRARY is not None, "load_library first"
    assert all(t.is_contiguous() for t in tensors)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = getattr(_LIBRARY, name)(tokens // SEQUENCE.steps, SEQUENCE.steps, heads, parts, *pointers, stream)
    if status != 0:
        raise RuntimeError(f"{name}: error {status}")


def _heads_first(x: Tensor) -> Tensor:
    return x.view(-1, SEQUENCE.steps, x.shape[-1] // HEAD, HEAD)


@torch.library.custom_op("kittiwake_train::wkv7", mutates_args=())
def wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, kept states, sa). Inputs [tokens, heads * 64]; w is the raw decay. The last two serve the gradient."""
    tokens, width = r.shape
    heads = width // HEAD
    assert tokens % SEQUENCE.steps == 0 and SEQUENCE.steps % CHUNK == 0
    r, w, k, v, a, b = (x.contiguous() for x in (r, w, k, v, a, b))
    if r.is_cuda:
        y = torch.empty_like(r)
        states = torch.empty(tokens // CHUNK * heads, HEAD, HEAD, device=r.device, dtype=torch.float32)
        sa = torch.empty(r.shape, device=r.device, dtype=torch.float32)
        _call("wkv7_train_forward", [r, w, k, v, a, b, y, states, sa], tokens, heads, SEQUENCE.parts_forward)
        return y, states, sa
    decay = torch.exp(-DECAY * torch.sigmoid(w))
    if _CPU_LIBRARY is not None and r.dtype == torch.float32:
        y = torch.empty_like(r)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (r, decay, k, v, a, b, y)]
        _CPU_LIBRARY.wkv7_cpu_forward(tokens // SEQUENCE.steps, SEQUENCE.steps, heads, *pointers)
    else:
        y = scan(*(_heads_first(x) for x in (r, decay, k, v, a, b)))
    # The loop's gradient needs neither states nor sa.
    states = r.new_zeros((tokens // CHUNK * heads, HEAD, HEAD), dtype=torch.float32)
    return y.reshape(r.shape).contiguous(), states, torch.zeros(r.shape, dtype=torch.float32)


@wkv7.register_fake
def _(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = r.shape
    states = r.new_empty((tokens // CHUNK * (width // HEAD), HEAD, HEAD), dtype=torch.float32)
    return torch.empty_like(r), states, r.new_empty(r.shape, dtype=torch.float32)


@torch.library.custom_op("kittiwake_train::wkv7_backward", mutates_args=())
def wkv7_backward(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor, states: Tensor, sa: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (r, raw w, k, v, a, b)."""
    tokens, width = r.shape
    if r.is_cuda:
        out = [torch.empty_like(r, memory_format=torch.contiguous_format) for _ in range(6)]
        inputs = [x.contiguous() for x in (r, w, k, v, a, b, dy, states, sa)]
        _call("wkv7_train_backward", inputs + out, tokens, width // HEAD, SEQUENCE.parts_backward)
        return out[0], out[1], out[2], out[3], out[4], out[5]
    gradients = _backward_loop(r, w, k, v, a, b, dy)
    return gradients[0], gradients[1], gradients[2], gradients[3], gradients[4], gradients[5]


def _backward_loop(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The kernel's gradient formulas as a plain loop that keeps every state; [tokens, heads * 64] in and out."""
    sigmoid = torch.sigmoid(w)
    decay = torch.exp(-DECAY * sigmoid)
    rs, ws, ks, vs, as_, bs, dys = (_heads_first(x) for x in (r, decay, k, v, a, b, dy))
    state = r.new_zeros(rs.shape[0], rs.shape[2], HEAD, HEAD)
    states, sas = [state], []
    for t in range(SEQUENCE.steps):
        sa = state @ as_[:, t].unsqueeze(-1)
        write = vs[:, t].unsqueeze(-1) * ks[:, t].unsqueeze(-2)
        state = state * ws[:, t].unsqueeze(-2) + sa * bs[:, t].unsqueeze(-2) + write
        states.append(state)
        sas.append(sa)
    out = [torch.empty_like(rs) for _ in range(6)]
    d_state = torch.zeros_like(state)
    for t in reversed(range(SEQUENCE.steps)):
        dy_t, before = dys[:, t].unsqueeze(-1), states[t]
        d_state = d_state + dy_t * rs[:, t].unsqueeze(-2)
        dsa = d_state @ bs[:, t].unsqueeze(-1)
        out[0][:, t] = (states[t + 1] * dy_t).sum(-2)
        out[1][:, t] = (d_state * before).sum(-2)
        out[2][:, t] = (d_state * vs[:, t].unsqueeze(-1)).sum(-2)
        out[3][:, t] = (d_state @ ks[:, t].unsqueeze(-1)).squeeze(-1)
        out[4][:, t] = (before * dsa).sum(-2)
        out[5][:, t] = (d_state * sas[t]).sum(-2)
        d_state = d_state * ws[:, t].unsqueeze(-2) + dsa * as_[:, t].unsqueeze(-2)
    flat = [x.reshape(r.shape) for x in out]
    flat[1] = flat[1] * decay * -DECAY * sigmoid * (1.0 - sigmoid)
    return tuple(flat)


@wkv7_backward.register_fake
def _(r, w, k, v, a, b, dy, states, sa):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(r) for _ in range(6))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, output[1], output[2])


def _backward(ctx, dy, _dstates, _dsa):  # type: ignore[no-untyped-def]
    *inputs, states, sa = ctx.saved_tensors
    return wkv7_backward(*inputs, dy, states, sa)


wkv7.register_autograd(_backward, setup_context=_setup_context)


def verify(device: str = "cuda", sequences: int = 2, steps: int = 48, heads: int = 2) -> dict[str, float]:
    """Compare operator and gradients with float64 autograd through the plain loop; raise when they disagree.

    Inputs are drawn afresh, rounded to bfloat16 for both sides. Returns the relative errors |x - ref| / |ref|.
    """
    saved = SEQUENCE.steps, SEQUENCE.parts_forward, SEQUENCE.parts_backward
    errors: dict[str, float] = {}
    try:
        SEQUENCE.steps = steps
        for parts in (1, 2, 4):
            SEQUENCE.parts_forward = SEQUENCE.parts_backward = parts
            shape = (sequences, steps, heads, HEAD)
            r, k, v = (torch.randn(shape, device=device) for _ in range(3))
            w = torch.randn(shape, device=device) * 2 - 1
            kk = torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1)
            gate = torch.rand(shape, device=device)
            dy = torch.randn(shape, device=device).bfloat16()
            inputs = [x.bfloat16() for x in (r, w, k, v, -kk, kk * gate)]
            exact = [x.double().requires_grad_() for x in inputs]
            y_exact = scan(exact[0], torch.exp(-DECAY * torch.sigmoid(exact[1])), *exact[2:])
            y_exact.backward(dy.double())
            flat = [x.view(sequences * steps, heads * HEAD).requires_grad_() for x in inputs]
            y, _, _ = wkv7(*flat)
            y.backward(dy.view(y.shape))
            pairs = [("y", y, y_exact)] + [
                (name, got.grad, want.grad) for name, got, want in zip("rwkvab", flat, exact, strict=True)
            ]
            for name, got, want in pairs:
                want = want.reshape(got.shape)
                error = float((got.detach().double() - want.detach()).norm() / want.detach().norm())
                errors[f"{name}/{parts}"] = error
                if not error < 6e-3:
                    raise RuntimeError(f"wkv7 kernel with {parts} parts: {name} is off by {error:.2e}")
    finally:
        SEQUENCE.steps, SEQUENCE.parts_forward, SEQUENCE.parts_backward = saved
    return errors


def choose_parts(tokens: int, heads: int, steps: int) -> tuple[int, int, dict[str, float]]:
    """Time the kernel variants on random data and keep the fastest for this shape; returns them and milliseconds."""
    SEQUENCE.steps = steps
    flat = [torch.randn(tokens, heads * HEAD, device="cuda").bfloat16() for _ in range(5)]
    kk = torch.nn.functional.normalize(flat[4].view(-1, HEAD).float(), dim=-1).view(tokens, -1)
    r, w, k, v = flat[:4]
    a, b = (-kk).bfloat16(), (0.5 * kk).bfloat16()
    times: dict[str, float] = {}

    def best(direction: str) -> int:
        for parts in (1, 2, 4):
            setattr(SEQUENCE, f"parts_{direction}", parts)
            for timed in (False, True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(3 if timed else 1):
                    if direction == "forward":
                        wkv7(r, w, k, v, a, b)
                    else:
                        wkv7_backward(r, w, k, v, a, b, v, states, sa)
                end.record()
                torch.cuda.synchronize()
                times[f"{direction}/{parts}"] = start.elapsed_time(end) / 3
        choice = min((1, 2, 4), key=lambda parts: times[f"{direction}/{parts}"])
        setattr(SEQUENCE, f"parts_{direction}", choice)
        return choice

    forward = best("forward")
    _, states, sa = wkv7(r, w, k, v, a, b)
    return forward, best("backward"), times
