"""Shapes of the qwen4exp family, and random checkpoints of any shape for tests and benchmarks, as an HF folder has them.

They are built to show mistakes: no norm is at rest, decays cover their trained range, experts and blocks are chosen by
scores that differ, and every term of the equations moves the logits by far more than rounding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kittiwake.bench.draw import Draw, Recipe, made
from kittiwake.families.qwen4exp.hashing import derive_head_sizes, derive_multipliers, padded_rows

Tensors = dict[str, torch.Tensor]
Recipes = dict[str, Recipe]
_RATE_LOG = (-4.0, 2.0)
_NORM = (-0.4, 0.4)
_SHARDS_DIVISOR = 128


@dataclass(frozen=True)
class Qwen4ExpShape:
    """Sizes of a model; what is left out is small enough for a test."""

    layers: int = 4
    width: int = 32
    vocab: int = 256
    attention_layers: tuple[int, ...] = (3,)
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    rotary_size: int = 4
    theta: float = 10_000.0
    index_heads: int = 4
    index_size: int = 8
    budget: int = 8
    ratio: int = 4
    key_heads: int = 2
    value_heads: int = 6
    key_size: int = 8
    value_size: int = 12
    gate: str = "sigmoid"
    streams: int = 4
    stream_rank: int = 12
    experts: int = 8
    experts_used: int = 3
    expert_width: int = 12
    shared_width: int = 20
    ngram_layers: tuple[int, ...] = (1,)
    """Indexes, the first being 0."""
    ngram_size: int = 3
    ngram_heads: int = 2
    ngram_row: int = 8
    ngram_base: int = 50
    ngram_parts: int = 2
    end_token: int = 7
    drafts: int = 0

    @property
    def conv_width(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_size + self.value_width

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_size

    @property
    def ngram_width(self) -> int:
        """Values of the table's rows of one token."""
        return (self.ngram_size - 1) * self.ngram_heads * self.ngram_row

    def head_sizes(self, rank: int) -> tuple[int, ...]:
        """Rows of each head of an n-gram layer."""
        return derive_head_sizes(self.ngram_base, (self.ngram_size - 1) * self.ngram_heads, rank)

    def table_rows(self, rank: int) -> int:
        """Rows of the table of an n-gram layer."""
        return padded_rows(sum(self.head_sizes(rank)), _SHARDS_DIVISOR)


QWEN4EXP_SHAPES: dict[str, Qwen4ExpShape] = {
    "qwen4exp-small": Qwen4ExpShape(
        layers=8, width=512, vocab=65536, attention_layers=(3, 7), heads=8, kv_heads=2, head_size=64, rotary_size=16,
        theta=1e7, index_heads=4, index_size=32, budget=256, ratio=4, key_heads=4, value_heads=12, key_size=32,
        value_size=32, stream_rank=64, experts=32, experts_used=4, expert_width=128, shared_width=128, ngram_heads=8,
        ngram_row=32, ngram_base=20_000, ngram_parts=4, end_token=0,
    ),
    "qwen4exp-4of48": Qwen4ExpShape(
        layers=4, width=2560, vocab=65536, attention_layers=(3,), heads=24, kv_heads=2, head_size=256, rotary_size=64,
        theta=1e7, index_heads=4, index_size=128, budget=2048, ratio=4, key_heads=16, value_heads=48, key_size=128,
        value_size=128, stream_rank=320, experts=32, experts_used=10, expert_width=640, shared_width=640, ngram_heads=8,
        ngram_row=160, ngram_base=20_000, ngram_parts=4, end_token=0,
    ),
}  # fmt: skip
QWEN4EXP_SHAPES["qwen4exp-8of48"] = replace(
    QWEN4EXP_SHAPES["qwen4exp-4of48"], layers=8, attention_layers=(3, 7), experts=512
)
"""One that a laptop runs; layers of the released geometry, with a small vocabulary and a small table: four with a sixteenth
of its experts, and eight with all of them, for a card of 80 GB or more."""


def qwen4exp_config(shape: Qwen4ExpShape, **changes: Any) -> dict[str, Any]:
    """The text model's part of a config.json, with these keys changed, or taken out where None."""
    config: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "architectures": ["Qwen4ExpForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "layer_types": [
            "full_attention" if layer in shape.attention_layers else "linear_attention" for layer in range(shape.layers)
        ],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.theta,
            "partial_rotary_factor": shape.rotary_size / shape.head_size,
        },
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.key_size,
        "linear_value_head_dim": shape.value_size,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "output_gate_type": shape.gate,
        "indexer_n_heads": shape.index_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": shape.index_size,
        "indexer_budget": shape.budget,
        "indexer_compress_ratio": shape.ratio,
        "hc_count": shape.streams,
        "hc_lowrank": shape.stream_rank,
        "ple_layer_ids": [layer + 1 for layer in shape.ngram_layers],
        "ple_embed_dim": shape.ngram_width,
        "ple_conv_kernel_size": 4,
        "ngram_size": shape.ngram_size,
        "heads_per_ngram": shape.ngram_heads,
        "ngram_vocab_size_base": shape.ngram_base,
        "make_ngram_vocab_size_divisible_by": _SHARDS_DIVISOR,
        "split_ngram_parts": shape.ngram_parts,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "eos_token_id": shape.end_token,
        "bos_token_id": shape.end_token,
        "mtp_num_hidden_layers": shape.drafts,
        "use_cache": True,
        "dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def random_qwen4exp(
    shape: Qwen4ExpShape, seed: int, dtype: torch.dtype = torch.bfloat16, prefix: str = "model."
) -> Tensors:
    """A random checkpoint in the names and shapes of an HF folder; the same (shape, seed) gives the same values."""
    return made(qwen4exp_recipes(shape, seed, dtype, prefix=prefix))


def qwen4exp_recipes(
    shape: Qwen4ExpShape, seed: int, dtype: torch.dtype, device: str = "cpu", *, prefix: str = "model."
) -> Recipes:
    """The same, each tensor drawn on ``device`` when it is wanted; tables, which are read from a disk, on the host."""
    draw = Draw(seed, dtype, device)
    tensors: Recipes = {}
    _add(tensors, draw, f"{prefix}embed_tokens.weight", (shape.vocab, shape.width), 1.0, 1)
    for layer in range(shape.layers):
        block = f"{prefix}layers.{layer}."
        if layer in shape.ngram_layers:
            _add_ngram(tensors, draw, f"{block}ple.", shape, shape.ngram_layers.index(layer))
            _add_table(tensors, Draw(seed, dtype), f"{block}ple.", shape, shape.ngram_layers.index(layer))
        if layer in shape.attention_layers:
            _add_attention(tensors, draw, f"{block}self_attn.", shape)
        else:
            _add_delta(tensors, draw, f"{block}linear_attn.", shape)
        _add_around(tensors, draw, block, shape)
    _add_mix(tensors, draw, f"{prefix}hyper_connection_mixer.", shape, has_inject=False)
    _add(tensors, draw, "lm_head.weight", (shape.vocab, shape.width), 2.5, shape.width)
    if shape.drafts:
        _add_draft(tensors, draw, shape)
    return tensors


def one_table(shape: Qwen4ExpShape, recipes: Recipes, prefix: str = "model.") -> Recipes:
    """The same with every n-gram table in one tensor."""
    whole = {name: recipe for name, recipe in recipes.items() if "ngram_embedding" not in name}
    for rank, layer in enumerate(shape.ngram_layers):
        start = f"{prefix}layers.{layer}.ple.ple_embedding.ngram_embedding."
        parts = [recipes[f"{start}shard_{part}.weight"] for part in range(shape.ngram_parts)]
        size = (shape.table_rows(rank), shape.ngram_row)
        whole[f"{start}weight"] = Recipe(size, parts[0].dtype, partial(_joined, parts))
    return whole


def _joined(parts: Sequence[Recipe]) -> torch.Tensor:
    return torch.cat([part.make() for part in parts])


def _add(tensors: Recipes, draw: Draw, name: str, shape: tuple[int, ...], gain: float, fan_in: int) -> None:
    bound = gain * (3.0 / fan_in) ** 0.5
    tensors[name] = draw.uniform(name, shape, -bound, bound)


def _add_norm(tensors: Recipes, draw: Draw, name: str, size: int, *, around: float = 0.0) -> None:
    tensors[f"{name}.weight"] = draw.uniform(f"{name}.weight", (size,), around + _NORM[0], around + _NORM[1])


def _add_mix(tensors: Recipes, draw: Draw, start: str, shape: Qwen4ExpShape, *, has_inject: bool = True) -> None:
    wide = shape.streams * shape.width
    _add_norm(tensors, draw, f"{start}hc_norm", wide)
    _add(tensors, draw, f"{start}input_mix_weight_down.weight", (shape.stream_rank, wide), 4.0, wide)
    _add(tensors, draw, f"{start}input_mix_weight_up.weight", (wide, shape.stream_rank), 2.0, shape.stream_rank)
    if has_inject:
        _add(tensors, draw, f"{start}block_inject_weight.weight", (shape.streams, wide), 3.0, wide)


def _add_around(tensors: Recipes, draw: Draw, block: str, shape: Qwen4ExpShape) -> None:
    c, hidden, shared = shape.width, shape.expert_width, shape.shared_width
    for mix in ("attn", "mlp"):
        _add_mix(tensors, draw, f"{block}{mix}_hyper_connection.", shape)
    _add(tensors, draw, f"{block}mlp.gate.weight", (shape.experts, c), 1.5, c)
    _add(tensors, draw, f"{block}mlp.experts.gate_up_proj", (shape.experts, 2 * hidden, c), 1.5, c)
    _add(tensors, draw, f"{block}mlp.experts.down_proj", (shape.experts, c, hidden), 1.5, hidden)
    for name in ("gate", "up"):
        _add(tensors, draw, f"{block}mlp.shared_expert.{name}_proj.weight", (shared, c), 1.5, c)
    _add(tensors, draw, f"{block}mlp.shared_expert.down_proj.weight", (c, shared), 1.5, shared)
    _add(tensors, draw, f"{block}mlp.shared_expert_gate.weight", (1, c), 1.5, c)


def _add_delta(tensors: Recipes, draw: Draw, start: str, shape: Qwen4ExpShape) -> None:
    c, heads = shape.width, shape.value_heads
    for name, columns in (("qkv", shape.conv_width), ("z", shape.value_width), ("b", heads), ("a", heads)):
        _add(tensors, draw, f"{start}in_proj_{name}.weight", (columns, c), 1.5, c)
    _add(tensors, draw, f"{start}conv1d.weight", (shape.conv_width, 1, 4), 1.2, 4)
    tensors[f"{start}A_log"] = draw.scattered(f"{start}A_log", heads, *_RATE_LOG)
    tensors[f"{start}dt_bias"] = draw.uniform(f"{start}dt_bias", (heads,), -3.0, 1.0)
    _add_norm(tensors, draw, f"{start}norm", shape.value_size, around=1.0)
    _add(tensors, draw, f"{start}out_proj.weight", (c, shape.value_width), 1.5, shape.value_width)


def _add_attention(tensors: Recipes, draw: Draw, start: str, shape: Qwen4ExpShape) -> None:
    c, size = shape.width, shape.head_size
    sizes = {"q": 2 * shape.heads * size, "k": shape.kv_heads * size, "v": shape.kv_heads * size}
    for name, columns in sizes.items():
        _add(tensors, draw, f"{start}{name}_proj.weight", (columns, c), 1.5, c)
    _add(tensors, draw, f"{start}o_proj.weight", (c, shape.heads * size), 1.5, shape.heads * size)
    for name in ("q_norm", "k_norm"):
        _add_norm(tensors, draw, start + name, size, around=0.5)
    rows = (shape.index_heads + 1) * shape.index_size
    _add(tensors, draw, f"{start}indexer.index_qk_proj.weight", (rows, c), 1.5, c)
    for name in ("q_layernorm", "k_layernorm"):
        _add_norm(tensors, draw, f"{start}indexer.{name}", shape.index_size)


def _add_ngram(tensors: Recipes, draw: Draw, start: str, shape: Qwen4ExpShape, rank: int) -> None:
    wide, width = shape.streams * shape.width, shape.ngram_width
    _add(tensors, draw, f"{start}key_proj.weight", (wide, width), 1.5, width)
    _add(tensors, draw, f"{start}value_proj.weight", (shape.width, width), 1.5, width)
    _add(tensors, draw, f"{start}conv1d.weight", (wide, 1, 4), 1.2, 4)
    for name in ("norm_key", "norm_query", "norm_conv"):
        _add_norm(tensors, draw, start + name, wide)
    sizes = shape.head_sizes(rank)
    numbers = {
        "layer_multipliers": derive_multipliers(shape.vocab, shape.ngram_size, rank, 1234),
        "ngram_heads_vocab_sizes": sizes,
        "ngram_heads_offsets": [sum(sizes[:head]) for head in range(len(sizes))],
    }
    for name, values in numbers.items():
        numbers_of = partial(torch.tensor, tuple(values), dtype=torch.int64)
        tensors[f"{start}ple_embedding.{name}"] = Recipe((len(values),), torch.int64, numbers_of)


def _add_table(tensors: Recipes, draw: Draw, start: str, shape: Qwen4ExpShape, rank: int) -> None:
    rows = shape.table_rows(rank)
    for part in range(shape.ngram_parts):
        name = f"{start}ple_embedding.ngram_embedding.shard_{part}.weight"
        count = rows * (part + 1) // shape.ngram_parts - rows * part // shape.ngram_parts
        _add(tensors, draw, name, (count, shape.ngram_row), 1.0, 1)


def _add_draft(tensors: Recipes, draw: Draw, shape: Qwen4ExpShape) -> None:
    c = shape.width
    for name in ("fc_embedding", "fc_hidden"):
        _add(tensors, draw, f"mtp.{name}.weight", (c, c), 1.0, c)
    _add_norm(tensors, draw, "mtp.pre_fc_norm_embedding", c)
    _add_norm(tensors, draw, "mtp.pre_fc_norm_hidden", shape.streams * c)
    _add_mix(tensors, draw, "mtp.hyper_connection_mixer.", shape, has_inject=False)
    for layer in range(shape.drafts):
        block = f"mtp.layers.{layer}."
        _add_attention(tensors, draw, f"{block}self_attn.", shape)
        _add_around(tensors, draw, block, shape)
