"""The time mix of RWKV-7 from the reference's parts, for the fused kernels of the CPU and of cards."""

from __future__ import annotations

import numpy as np

from kittiwake.ops.wkv7 import reference
from kittiwake.ops.wkv7.cases import TimeMixCase

EPS = np.float32(64e-5)


def composed(case: TimeMixCase, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """out [N, C], v_first and state after it; the inputs stay as they are."""
    names = ("w0", "a0", "v0", "k_k", "k_a", "r_k", "norm_weight", "norm_bias")
    vectors = dict(zip(names, inputs["vectors"], strict=True))
    if case.is_first_layer:
        vectors["v0"] = None
    r, k, v = np.split(inputs["rkv"], 3, axis=1)
    w_low, a_low, gate, *v_low = np.split(inputs["low"], 3 if case.is_first_layer else 4, axis=1)
    state, v_first = inputs["state"].copy(), inputs["v_first"].copy()
    out = reference.time_mix(
        r, k, v, w_low, a_low, gate, v_low[0] if v_low else None, v_first,
        reference.HeadParams(**vectors, norm_eps=float(EPS), heads=case.heads),
        case.packed.starts, case.packed.slots, state,
    )  # fmt: skip
    return {"out": out, "v_first": v_first, "state": state}
