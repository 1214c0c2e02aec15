"""States of RWKV-5 to RWKV-7, and tuned initial ones: files with one ``blocks.N.att.time_state`` a layer, and nothing else.

State tuning trains the matrices that a sequence begins from; token shifts begin at zero as ever. The files in use hold a
head's matrix as [V, K], ours are [K, V].
"""

from __future__ import annotations

import numpy as np

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.states import StatePart, StateSpec
from kittiwake.errors import ModelError
from kittiwake.families.canonical import FLOATS


def read_time_state(source: TensorSource, layers: int, heads: int, size: int, *, transpose: bool = False) -> np.ndarray:
    """Float32 [L, H, K, V] of a file's ``time_state`` tensors, each [H, V, K]; with ``transpose`` they are [H, K, V].

    The shapes do not tell the two apart, so nothing is guessed. Raises ModelError naming a tensor that is missing, is
    no part of a tuned state, has another shape or type, or holds values that are not finite.
    """
    infos = {info.name: info for info in source.infos()}
    names = [f"blocks.{layer}.att.time_state" for layer in range(layers)]
    unknown, missing = sorted(infos.keys() - set(names)), [name for name in names if name not in infos]
    if unknown:
        raise ModelError(
            f"{source.path} holds {unknown[0]}, which is no part of a tuned state of this model's {layers} layers",
            f"expected exactly {names[0]} to {names[-1]}",
        )
    if missing:
        raise ModelError(f"{source.path} lacks {missing[0]}", f"this model has {layers} layers")
    state = np.empty((layers, heads, size, size), dtype=np.float32)
    for layer, name in enumerate(names):
        info = infos[name]
        if info.shape != (heads, size, size) or info.dtype not in FLOATS:
            raise ModelError(
                f"{name} in {source.path} is {info.dtype} {info.shape}, expected {(heads, size, size)} in float32, "
                "bfloat16 or float16"
            )
        stored = source.read(name).float().numpy()
        if not np.isfinite(stored).all():
            raise ModelError(f"{name} in {source.path} holds values that are not finite", "the file is damaged")
        state[layer] = stored if transpose else stored.transpose(0, 2, 1)
    return state


def matrix_state_spec(layers: int, width: int, heads: int) -> StateSpec:
    """What one sequence of an RWKV-5 to RWKV-7 carries: the normed rows before, and a matrix [K, V] a head."""
    size = width // heads
    parts = (StatePart("att_shift", (width,)), StatePart("wkv", (heads, size, size)), StatePart("ffn_shift", (width,)))
    return StateSpec(layers, parts)


def initial_matrix_state(
    source: TensorSource, layers: int, width: int, heads: int, *, transpose: bool = False
) -> dict[str, np.ndarray]:
    """The parts of :func:`matrix_state_spec` that a tuned initial state sets, see :func:`read_time_state`."""
    wkv = read_time_state(source, layers, heads, width // heads, transpose=transpose)
    shift = np.zeros((layers, width), dtype=np.float32)
    return {"att_shift": shift, "wkv": wkv, "ffn_shift": shift.copy()}
