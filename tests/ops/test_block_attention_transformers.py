"""Block attention against the qwen4_exp attention of transformers: prompts, and decoding across the budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kittiwake.ops.block_attention import (
    AttentionColumns,
    AttentionMemory,
    AttentionNorms,
    AttentionShape,
    cpu,
    reference,
)
from tests.oracles.measure import relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers knows no qwen4_exp")

WIDTH = 24
PAGE_TOKENS = 16


def attention_of(shape: AttentionShape, seed: int) -> tuple[Any, Any]:
    """(attention, rotary embedding) of transformers, every parameter random, norms too."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        hidden_size=WIDTH,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        indexer_n_heads=shape.index_heads,
        indexer_kv_heads=1,
        indexer_head_dim=shape.index_dim,
        indexer_budget=shape.budget,
        indexer_compress_ratio=shape.ratio,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "mrope_section": [1, 1, 0],
        },
    )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    attention = theirs.Qwen4ExpTextAttention(config, 0).eval()
    with torch.no_grad():
        for weight in attention.parameters():
            weight.copy_(torch.randn_like(weight) * (0.4 if weight.ndim == 1 else WIDTH**-0.5))
    return attention, theirs.Qwen4ExpTextRotaryEmbedding(config)


def theirs_on(attention: Any, rotary: Any, x: Any) -> np.ndarray:
    """What transformers says of a whole sequence, before its output product: [T, heads * head_dim]."""
    tokens = x.shape[0]
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
    caught: list[Any] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        attention(x[None], rotary(x[None], torch.arange(tokens)[None, None].expand(3, 1, -1)), mask)
    handle.remove()
    found: np.ndarray = caught[0][0].numpy()
    return found


def ours_on(attention: Any, rotary: Any, x: Any, shape: AttentionShape, sizes: list[int]) -> np.ndarray:
    """The same from our kernel, in pieces of these sizes, then the rest row by row."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.indexer.index_qk_proj)
    with torch.no_grad():
        parts = [project(x).numpy() for project in projections]
    proj = np.ascontiguousarray(np.concatenate(parts, axis=1))
    begins = np.cumsum([0, *(part.shape[1] for part in parts[:3])]).tolist()
    columns = AttentionColumns(*begins, begins[3] + shape.index_heads * shape.index_dim)
    indexer = attention.indexer
    weights = (attention.q_norm, attention.k_norm, indexer.q_layernorm, indexer.k_layernorm)
    norms = AttentionNorms(*(1 + norm.weight.detach().numpy() for norm in weights), np.float32(1e-6))  # type: ignore[call-arg]
    pages = -(-x.shape[0] // PAGE_TOKENS)
    keys = (pages, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    memory = AttentionMemory(
        np.full(keys, np.nan, dtype=np.float32),
        np.full(keys, np.nan, dtype=np.float32),
        np.full((pages, PAGE_TOKENS // shape.ratio, shape.index_dim), np.nan, dtype=np.float32),
        np.full((2, shape.ratio, shape.index_dim), np.nan, dtype=np.float32),
        np.arange(2 * pages, dtype=np.int32).reshape(2, pages)[::-1] % pages,
    )
    memory = AttentionMemory(memory.keys, memory.values, memory.blocks, memory.open_rows, memory.pages.copy())
    out = np.empty((x.shape[0], shape.heads * shape.head_dim), dtype=np.float32)
    done = 0
    for size in [*sizes, *[1] * (x.shape[0] - sum(sizes))]:
        starts, before = np.array([0, size]), np.array([done])
        at = reference.row_positions(starts, before)
        rope = cpu.rotary(at, rotary.inv_freq.numpy(), 1.0, shape.ratio)
        piece = slice(done, done + size)
        cpu.block_attention(
            proj[piece].copy(), columns, shape, norms, rope, starts, np.array([1]), before, memory, out[piece]
        )
        done += size
    return out


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 2, 16, 4, 3, 8, ratio=4, budget=8),
        AttentionShape(6, 1, 16, 4, 9, 4, ratio=4, budget=16),
        AttentionShape(2, 2, 8, 4, 4, 12, ratio=2, budget=4),
        AttentionShape(4, 2, 16, 4, 4, 8, ratio=4, budget=4096),
    ],
    ids=lambda shape: f"{shape.heads}/{shape.kv_heads} heads, {shape.budget} of blocks of {shape.ratio}",
)
@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_transformers(shape: AttentionShape, seed: int) -> None:
    attention, rotary = attention_of(shape, seed)
    torch.manual_seed(100 + seed)
    x = torch.randn(75, WIDTH)
    expected = theirs_on(attention, rotary, x)
    found = ours_on(attention, rotary, x, shape, [5, 40])
    errors = [relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    # of blocks that score 0 in all index heads transformers leaves open which it takes; here there are heads enough
    assert max(errors) < 1e-6


def test_rotations_agree_with_transformers_far_out() -> None:
    _, rotary = attention_of(AttentionShape(1, 1, 64, 32, 1, 32, ratio=4, budget=8), 0)
    at = np.array([0, 1, 2047, 131071, 262143, 1 << 20])
    ours = cpu.rotary(at, rotary.inv_freq.numpy(), 1.0, 4)
    cos, sin = rotary(torch.zeros(1), torch.from_numpy(at)[None, None].expand(3, 1, -1))
    assert np.abs(ours.cos - cos[0, :, :16].numpy()).max() < 2e-7
    assert np.abs(ours.sin - sin[0, :, :16].numpy()).max() < 2e-7
    assert np.array_equal(ours.block_cos, cpu.rotary(at // 4 * 4, rotary.inv_freq.numpy(), 1.0, 4).cos)
