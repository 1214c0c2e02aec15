"""The ops of gated-delta hybrids, with numpy's products between them, against transformers' modules."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.experts.cpu import add_gated, mix_experts, route, silu_times
from kittiwake.ops.gated_delta.cpu import gated_delta
from kittiwake.ops.gated_delta.heads import key_head_of
from kittiwake.ops.hyper_mix.cpu import combine_streams, mix_low, mix_streams, norm_streams
from kittiwake.ops.short_conv.cpu import short_conv
from tests.oracles import transformers_hybrid
from tests.oracles.measure import relative_error
from tests.oracles.transformers_hybrid import GATES, SIZES, TOKENS

Arrays = dict[str, np.ndarray]
pytestmark = pytest.mark.skipif(not transformers_hybrid.is_available(), reason=transformers_hybrid.SKIP_REASON)
EPS = np.float32(SIZES["rms_norm_eps"])
SLOTS, STATE_SLOTS = np.array([1]), 3


@pytest.fixture(scope="module")
def theirs() -> Arrays:
    return transformers_hybrid.run()


def part(theirs: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in theirs.items() if name.startswith(prefix)}


@pytest.mark.parametrize("cut", [TOKENS, 1, 5])
@pytest.mark.parametrize("gate", GATES)
def test_gated_delta_net(theirs: Arrays, gate: str, cut: int) -> None:
    """A prompt in pieces of ``cut`` tokens; theirs saw it whole, in its own chunks."""
    w = part(theirs, f"delta.{gate}.")
    heads, key_heads = SIZES["linear_num_value_heads"], SIZES["linear_num_key_heads"]
    keys, values = SIZES["linear_key_head_dim"], SIZES["linear_value_head_dim"]
    names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
    projections = w["x"] @ np.concatenate([w[f"{name}.weight"] for name in names]).T
    channels = len(w["in_proj_qkv.weight"])
    a_column = channels + heads * values
    taps = np.ascontiguousarray(w["conv1d.weight"][:, 0].T)
    carried = np.zeros((STATE_SLOTS, len(taps) - 1, channels), np.float32)
    state = np.zeros((STATE_SLOTS, heads, keys, values), np.float32)
    qkv, out = np.empty((TOKENS, channels), np.float32), np.empty((TOKENS, heads * values), np.float32)
    for first in range(0, TOKENS, cut):
        rows = slice(first, min(first + cut, TOKENS))
        starts = np.array([0, rows.stop - first])
        short_conv(projections[rows], 0, taps, 1, starts, SLOTS, carried, qkv[rows])
        gated_delta(
            qkv[rows], key_heads, key_head_of(heads, key_heads, "grouped"), projections[rows], a_column,
            a_column + heads, channels, np.exp(w["A_log"]), w["dt_bias"], w["norm.weight"], EPS, gate == "silu", starts,
            SLOTS, state, out[rows],
        )  # fmt: skip
    assert relative_error(out @ w["out_proj.weight"].T, w["y"]) < 5e-6


def test_residual_mixer(theirs: Arrays) -> None:
    w, streams, width = part(theirs, "mixer."), SIZES["hc_count"], SIZES["hidden_size"]
    rank = SIZES["hc_lowrank"]
    normed = np.empty_like(w["x"])
    norm_streams(w["x"], TOKENS, streams, 1 + w["hc_norm.weight"], EPS, normed)
    low = normed @ np.concatenate([w["input_mix_weight_down.weight"], w["block_inject_weight.weight"]]).T
    mix_low(low, TOKENS, rank, streams)
    mixed = np.empty((TOKENS, width), np.float32)
    mix_streams(normed, low[:, :rank] @ w["input_mix_weight_up.weight"].T, TOKENS, streams, mixed)
    assert relative_error(mixed, w["y"]) < 2e-6
    x, y = w["x"].copy(), np.random.default_rng(1).standard_normal((TOKENS, width)).astype(np.float32)
    combine_streams(x, y, low, rank, TOKENS, streams)
    expected = w["x"] + (y[:, None] * w["shares"][:, :, None]).reshape(TOKENS, -1)
    assert relative_error(x, expected) < 2e-6


def test_mixture_of_experts(theirs: Arrays) -> None:
    w, experts, top_k = part(theirs, "experts."), SIZES["num_experts"], SIZES["num_experts_per_tok"]
    ff, shared_ff, width = (
        SIZES["moe_intermediate_size"],
        SIZES["shared_expert_intermediate_size"],
        SIZES["hidden_size"],
    )
    names = ("gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")
    products = w["x"] @ np.concatenate([w[f"{name}.weight"] for name in names]).T
    chosen, shares = np.empty((TOKENS, top_k), np.int64), np.empty((TOKENS, top_k), np.float32)
    route(products, 0, TOKENS, experts, True, chosen, shares)
    # every half in one tile
    gate_up = np.ascontiguousarray(w["experts.gate_up_proj"].reshape(experts, 2, ff, width).swapaxes(2, 3))
    down = np.ascontiguousarray(w["experts.down_proj"].swapaxes(1, 2))[:, None]
    h, d = (np.empty((TOKENS * top_k, columns), np.float32) for columns in (ff, width))
    y, shared = np.empty((TOKENS, width), np.float32), np.empty((TOKENS, shared_ff), np.float32)
    mix_experts(w["x"], TOKENS, chosen, shares, gate_up, down, h, d, y)
    silu_times(products, experts, TOKENS, shared_ff, shared)
    add_gated(y, shared @ w["shared_expert.down_proj.weight"].T, products, experts + 2 * shared_ff, TOKENS)
    assert relative_error(y, w["y"]) < 2e-6
