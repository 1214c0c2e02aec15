"""The `rwkv` package (BlinkDL/ChatRWKV) as a reference for RWKV-4 to RWKV-7 on the CPU, run in processes of its own.

The package chooses the model version from the environment when it is imported, sets process-wide torch flags and
prints; none of that may reach the tests. This file is both sides: `run` and `time_package` write a request into a
temporary folder and hand it to this file as a script, which answers there. Runs of one version share a process, since
it takes seconds to import torch; what is timed has a process to itself.

Known differences from the equations: RWKV-7's exp(-0.5) is rounded to 0.606531 (5.6e-7), and the group norm's epsilon is
64e-5 whatever the head size. RWKV-5.0 and 5.1 run a prompt through powers of their decays and a [T, T] matrix a head.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]

SKIP_REASON = "the `rwkv` package is not installed (it comes with the dev extra)"
ENVIRONMENT = {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
_MATRIX_STATE = ("att_shift", "wkv", "ffn_shift")
STATE_PARTS = {
    "rwkv4": ("att_shift", "num", "den", "top", "ffn_shift"),
    "rwkv5": _MATRIX_STATE,
    "rwkv6": _MATRIX_STATE,
    "rwkv7": _MATRIX_STATE,
}
"""By family: what the package keeps of each layer, in its order."""


@dataclass(frozen=True)
class PackageRun:
    """Logits [T, vocabulary] at every position; state: the parts of STATE_PARTS, [L, C] each.

    ``wkv`` is [L, H, K, V] in RWKV-5 and 6, and [L, H, V, K] in RWKV-7.
    """

    logits: Array
    state: dict[str, Array]


@dataclass(frozen=True)
class PackageTiming:
    """Median seconds of one prompt in one call and of one decoding step, with every sample behind them."""

    prompt_s: float
    decode_s: float
    prompt_samples_s: tuple[float, ...]
    decode_samples_s: tuple[float, ...]


def is_available() -> bool:
    """Whether the package is installed; importing this module does not need it."""
    return importlib.util.find_spec("rwkv") is not None


def save_pth(tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]], path: Path) -> None:
    """Write a checkpoint as the package reads it: contiguous torch tensors by name."""
    torch.save({name: torch.as_tensor(tensor).contiguous() for name, tensor in tensors.items()}, path)


def run(
    tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]] | Path,
    ids: Sequence[int],
    state: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    family: str = "rwkv7",
    cuts: Sequence[int] = (),
    strategy: str = "cpu fp32",
    threads: int = 1,
) -> PackageRun:
    """Return the package's logits at every position and its final state.

    `tensors` is a checkpoint in BlinkDL's names, or the path of a .pth. The ids go in one call, or cut before the
    positions in `cuts`; a piece of one token takes the package's one-token path, so range(1, T) runs it stepwise.
    """
    bounds = [0, *cuts, len(ids)]
    pieces = [list(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    if not all(pieces):
        raise ValueError(f"cuts {list(cuts)} leave an empty piece of {len(ids)} ids")
    request: dict[str, Any] = {"pieces": pieces, "family": family, "strategy": strategy, "threads": threads}
    parts = STATE_PARTS[family]
    with tempfile.TemporaryDirectory() as folder:
        if state is not None:
            given: dict[str, Any] = {part: np.asarray(state[part], dtype=np.float32) for part in parts}
            np.savez(Path(folder, "state.npz"), **given)
        _ask(Path(folder), tensors, request)
        with np.load(Path(folder, "answer.npz")) as answer:
            return PackageRun(answer["logits"], {part: answer[part] for part in parts})


def time_package(
    tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]] | Path,
    *,
    family: str = "rwkv7",
    prompt_tokens: int,
    decode_tokens: int,
    repeats: int = 5,
    threads: int = 1,
    strategy: str = "cpu fp32",
) -> PackageTiming:
    """Time a prompt in one call (the last logits only) and `decode_tokens` steps after it, each `repeats` times.

    Loading and two rounds of warming up (the package compiles with TorchScript) are not counted.
    """
    request = {
        "family": family,
        "prompt_tokens": prompt_tokens,
        "decode_tokens": decode_tokens,
        "repeats": repeats,
        "strategy": strategy,
        "threads": threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        _ask(Path(folder), tensors, request)
        answer = json.loads(Path(folder, "answer.json").read_text(encoding="utf-8"))
    prompt, decode = answer["prompt_samples_s"], answer["decode_samples_s"]
    return PackageTiming(statistics.median(prompt), statistics.median(decode), tuple(prompt), tuple(decode))


def _ask(folder: Path, tensors: Mapping[str, torch.Tensor | npt.NDArray[Any]] | Path, request: dict[str, Any]) -> None:
    """Have a process of the package answer `request` into `folder`; its output is shown if it fails."""
    if isinstance(tensors, Path):
        model = tensors.resolve()
    else:
        model = folder / "model.pth"
        save_pth(tensors, model)
    request = {**request, "model": str(model.with_suffix(""))}  # the package appends .pth
    Path(folder, "request.json").write_text(json.dumps(request), encoding="utf-8")
    is_v7, is_timed = request["family"] == "rwkv7", "pieces" not in request
    process = (_start if is_timed else _running)(is_v7, is_timed)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        reply = process.stdout.readline()
    finally:
        if is_timed:
            _end(process)
    if not reply:
        _running.cache_clear()
        raise RuntimeError(f"the rwkv package ended with code {process.wait()}")
    if failure := json.loads(reply):
        raise RuntimeError(f"the rwkv package failed:\n{failure}")


def _start(is_v7: bool, is_timed: bool) -> subprocess.Popen[str]:
    """A process that answers the requests in the folders it is told, one a line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_")} | ENVIRONMENT
    environment["RWKV_V7_ON"] = "1" if is_v7 else "0"
    environment["RWKV_JIT_ON"] = "1" if is_timed else "0"  # compiling pays only when timed
    command = [sys.executable, "-P", __file__]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@cache
def _running(is_v7: bool, is_timed: bool) -> subprocess.Popen[str]:
    """The same, kept until this process ends."""
    process = _start(is_v7, is_timed)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def _serve() -> None:
    """Child process: answer until there are no more folders; what the package prints is part of the reply if it fails."""
    replies = sys.stdout
    for line in sys.stdin:
        printed, failure = io.StringIO(), ""
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                _answer(Path(line.removesuffix("\n")))
            except Exception:
                failure = printed.getvalue() + traceback.format_exc()
        print(json.dumps(failure), file=replies, flush=True)


def _answer(folder: Path) -> None:
    """Load the model and answer the request found in `folder`."""
    request = json.loads(Path(folder, "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    from rwkv.model import RWKV  # type: ignore[import-untyped]

    model = RWKV(request["model"], request["strategy"])
    if "pieces" in request:
        _answer_run(folder, model, request)
    else:
        _answer_timing(folder, model, request)


def _answer_run(folder: Path, model: Any, request: dict[str, Any]) -> None:
    """Run the pieces one after another and save logits and state. The package keeps a list, layer by layer."""
    names = STATE_PARTS[request["family"]]
    state = model.generate_zero_state() if request["family"] == "rwkv7" else None
    if Path(folder, "state.npz").exists():
        with np.load(Path(folder, "state.npz")) as given:
            arrays = [given[name] for name in names]
        state = [torch.from_numpy(np.ascontiguousarray(part)) for layer in zip(*arrays, strict=True) for part in layer]
    rows = []
    for piece in request["pieces"]:
        logits, state = model.forward(piece, state, True)
        rows.append(logits.float().reshape(len(piece), -1).numpy())
    parts: dict[str, Any] = {
        name: torch.stack(state[index :: len(names)]).float().numpy() for index, name in enumerate(names)
    }
    np.savez(Path(folder, "answer.npz"), logits=np.concatenate(rows), **parts)


def _answer_timing(folder: Path, model: Any, request: dict[str, Any]) -> None:
    """Time prompts and steps on ids that need no tokenizer."""
    vocab = getattr(model.args, "vocab_size", None) or model.w["emb.weight"].shape[0]  # by version
    prompt = [(7919 * position + 1) % vocab for position in range(request["prompt_tokens"])]
    steps = [(104729 * position + 2) % vocab for position in range(request["decode_tokens"])]
    prompt_samples: list[float] = []
    decode_samples: list[float] = []
    for _ in range(2 + request["repeats"]):
        start = time.perf_counter()
        _, state = model.forward(prompt, None)
        prompt_samples.append(time.perf_counter() - start)
        for token in steps:
            start = time.perf_counter()
            _, state = model.forward([token], state)
            decode_samples.append(time.perf_counter() - start)
    answer = {"prompt_samples_s": prompt_samples[2:], "decode_samples_s": decode_samples[2 * len(steps) :]}
    Path(folder, "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _serve()
