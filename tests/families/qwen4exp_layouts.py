"""The same random model as an HF folder and as a GGUF file. Names are spelt out once more, so that a slip in ours shows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, qwen4exp_config
from tests.text.gguf_metadata import add_keys

Tensors = Mapping[str, torch.Tensor]

_MIX = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_INNER = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "ple.key_proj": "ple_key", "ple.value_proj": "ple_value", "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query", "ple.norm_conv": "ple_norm_conv", "ple.conv1d": "ple_conv1d",
    **{f"attn_hyper_connection.{theirs}": f"hc_attn_{name}" for theirs, name in _MIX.items()},
    **{f"mlp_hyper_connection.{theirs}": f"hc_ffn_{name}" for theirs, name in _MIX.items()},
}  # fmt: skip


def write_hf(
    folder: Path, shape: Qwen4ExpShape, tensors: Tensors, *, is_nested: bool = False, shards: int = 1, **changes: Any
) -> Path:
    """An HF folder: its config flat or nested beside a vision model's, its tensors in so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = qwen4exp_config(shape, **changes)
    if is_nested:
        text = {key: value for key, value in config.items() if key != "architectures"}
        config = {
            "model_type": "qwen4_exp",
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "text_config": text,
            "vision_config": {"depth": 2, "model_type": "qwen4_exp_vision"},
            "image_token_id": 9,
            "tie_word_embeddings": False,
            "transformers_version": "5.24.0",
        }
        tensors = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(2, 3)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def gguf_metadata(shape: Qwen4ExpShape) -> dict[str, Any]:
    """The architecture's keys, without their prefix."""
    (ngram,) = shape.ngram_layers
    sizes = list(shape.head_sizes(0))
    blocks = shape.layers + shape.drafts
    return {
        "block_count": blocks,
        "nextn_predict_layers": shape.drafts,
        "context_length": 32768,
        "embedding_length": shape.width,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "hyper_connection.count": shape.streams,
        "hyper_connection.low_rank": shape.stream_rank,
        "full_attention_interval": 4,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "rope.dimension_count": shape.rotary_size,
        "rope.freq_base": shape.theta,
        "rope.dimension_sections": [1, 1, 0, 0],
        "attention.indexer.head_count": shape.index_heads,
        "attention.indexer.key_length": shape.index_size,
        "attention.indexer.top_k": shape.budget,
        "attention.compress_ratios": [shape.ratio if i in shape.attention_layers else 0 for i in range(blocks)],
        "ssm.conv_kernel": 4,
        "ssm.state_size": shape.key_size,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * shape.value_size,
        "expert_count": shape.experts,
        "expert_used_count": shape.experts_used,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_feed_forward_length": shape.shared_width,
        "ple.layers": [ngram],
        "ple.ngram_size": shape.ngram_size,
        "ple.heads_per_ngram": shape.ngram_heads,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": shape.end_token,
        "ple.image_token_id": 9,
        "ple.head_vocab_sizes": sizes,
        "ple.head_offsets": [sum(sizes[:head]) for head in range(len(sizes))],
        "embedding_length_per_layer_input": shape.ngram_row,
    }


def write_gguf(
    path: Path,
    shape: Qwen4ExpShape,
    tensors: Tensors,
    *,
    packed: GGMLQuantizationType = GGMLQuantizationType.F32,
    changes: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
) -> Path:
    """A GGUF file as a converter writes it: matrices of 32 columns and more ``packed``, all else float32.

    ``changes`` are of the architecture's keys, ``keys`` stand beside them. With ``part_tensors`` it is in parts of so
    many, the first holding none, and the path returned is that of the first.
    """
    is_split = part_tensors > 0
    writer = GGUFWriter(path, "qwen4exp", split_max_tensors=part_tensors, small_first_shard=is_split)
    add_keys(writer, dict(keys or {}))
    metadata = gguf_metadata(shape) | dict(changes or {})
    (ngram,) = shape.ngram_layers
    multipliers = tensors[f"model.layers.{ngram}.ple.ple_embedding.layer_multipliers"].tolist()
    metadata.setdefault("ple.layer_multipliers", multipliers)
    for key, value in metadata.items():
        _add_value(writer, f"qwen4exp.{key}", value)
    for name, array in _gguf_tensors(shape, tensors).items():
        is_packed = packed is not GGMLQuantizationType.F32 and array.ndim > 1 and array.shape[-1] % 32 == 0
        kind = packed if is_packed else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(array, kind) if is_packed else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*")) if is_split else path


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.UINT64)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    else:
        writer.add_uint32(key, value)


def _gguf_tensors(shape: Qwen4ExpShape, tensors: Tensors) -> dict[str, np.ndarray]:
    """Names and values as a converter leaves them."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if "ple_embedding" in name:
            continue
        values = tensor.float()
        if name.startswith("mtp.") and not name.startswith("mtp.layers."):
            continue
        for ours, array in _converted(shape, name, values).items():
            found[ours] = np.ascontiguousarray(array.numpy())
    (ngram,) = shape.ngram_layers
    table = f"model.layers.{ngram}.ple.ple_embedding.ngram_embedding.shard_"
    shards = [tensors[f"{table}{part}.weight"].float() for part in range(shape.ngram_parts)]
    found["per_layer_token_embd.weight"] = torch.cat(shards).numpy()
    if shape.drafts:
        block = f"blk.{shape.layers}.nextn."
        pair = torch.cat([tensors["mtp.fc_embedding.weight"], tensors["mtp.fc_hidden.weight"]], dim=1)
        found[f"{block}eh_proj.weight"] = pair.float().numpy()
        found[f"{block}enorm.weight"] = 1 + tensors["mtp.pre_fc_norm_embedding.weight"].float().numpy()
        found[f"{block}hnorm.weight"] = 1 + tensors["mtp.pre_fc_norm_hidden.weight"].float().numpy()
        for theirs, short in list(_MIX.items())[:3]:
            value = tensors[f"mtp.hyper_connection_mixer.{theirs}.weight"].float().numpy()
            found[f"{block}hc_head_{short}.weight"] = 1 + value if short == "norm" else value
    return found


def _converted(shape: Qwen4ExpShape, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """One tensor of an HF folder → one or several of the file."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    if name in outer:
        return {outer[name]: values}
    if match := re.fullmatch(r"model\.hyper_connection_mixer\.(\w+)\.weight", name):
        return {f"output_hc_{_MIX[match[1]]}.weight": 1 + values if match[1] == "hc_norm" else values}
    match = re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.(.+)", name)
    assert match is not None, name
    block, inner = (
        f"blk.{int(match[2]) + (shape.layers if match[1] == 'mtp' else 0)}.",
        match[3].removesuffix(".weight"),
    )
    hidden, queries = shape.expert_width, shape.index_heads * shape.index_size
    match inner:
        case "linear_attn.A_log":
            return {f"{block}ssm_a": _tiled(shape, -torch.exp(values), 1)}
        case "linear_attn.dt_bias":
            return {f"{block}ssm_dt.bias": _tiled(shape, values, 1)}
        case "mlp.experts.gate_up_proj":
            halves = {"ffn_gate_exps": values[:, :hidden], "ffn_up_exps": values[:, hidden:]}
            return {f"{block}{half}.weight": part for half, part in halves.items()}
        case "mlp.experts.down_proj":
            return {f"{block}ffn_down_exps.weight": values}
        case "self_attn.indexer.index_qk_proj":
            return {
                f"{block}indexer.q_proj.weight": values[:queries],
                f"{block}indexer.k_proj.weight": values[queries:],
            }
        case "linear_attn.norm":
            return {f"{block}ssm_norm.weight": values}
        case "linear_attn.in_proj_z":
            values = _tiled(shape, values, shape.value_size)
        case "linear_attn.in_proj_a" | "linear_attn.in_proj_b":
            values = _tiled(shape, values, 1)
        case "linear_attn.out_proj":
            values = _tiled(shape, values.t(), shape.value_size).t()
        case "linear_attn.in_proj_qkv" | "linear_attn.conv1d":
            keys = 2 * shape.key_heads * shape.key_size
            values = values.reshape(values.shape[0], -1)
            values = torch.cat([values[:keys], _tiled(shape, values[keys:], shape.value_size)])
        case "ple.conv1d":
            values = values.reshape(values.shape[0], -1)
        case "mlp.shared_expert_gate":
            values = values.reshape(-1)
        case _ if "norm" in inner.rsplit(".", 1)[-1]:
            values = 1 + values
    return {f"{block}{_INNER[inner]}.weight": values}


def _tiled(shape: Qwen4ExpShape, values: torch.Tensor, size: int) -> torch.Tensor:
    """Heads beside their key head → in tiles, ``size`` rows a head."""
    every = shape.value_heads // shape.key_heads
    split = values.reshape(shape.key_heads, every, size, *values.shape[1:])
    return split.transpose(0, 1).reshape(values.shape)
