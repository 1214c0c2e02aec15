"""The same RWKV-7 written as each layout has it. Names are spelt out here once more, so that a slip in ours shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from kittiwake.bench.shapes import Rwkv7Shape

Tensors = Mapping[str, torch.Tensor]

_FLA_OUTER = {
    "emb.weight": "model.embeddings.weight",
    "head.weight": "lm_head.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
}
_FLA_INNER = {
    "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm",
    "att.receptance": "attn.r_proj", "att.key": "attn.k_proj", "att.value": "attn.v_proj", "att.output": "attn.o_proj",
    "att.x_": "attn.x_", "att.k_": "attn.k_", "att.r_k": "attn.r_k", "ffn.": "ffn.",
}  # fmt: skip
_GGUF_INNER = {
    "ln1": "attn_norm", "ln2": "attn_norm_2", "att.ln_x": "time_mix_ln",
    "att.receptance": "time_mix_receptance", "att.key": "time_mix_key", "att.value": "time_mix_value",
    "att.output": "time_mix_output", "ffn.key": "channel_mix_key", "ffn.value": "channel_mix_value",
}  # fmt: skip


def fla_config(shape: Rwkv7Shape, **changes: Any) -> dict[str, Any]:
    """A config.json as fla's converter writes it."""
    config = {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "hidden_size": shape.width,
        "hidden_ratio": 4.0,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_size,
        "num_heads": 32,
        "decay_low_rank_dim": shape.rank_w,
        "gate_low_rank_dim": shape.rank_g,
        "a_low_rank_dim": shape.rank_a,
        "v_low_rank_dim": shape.rank_v,
        "value_dim": [shape.width] * shape.layers,
        "hidden_act": "sqrelu",
        "max_position_embeddings": 2048,
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.006,
        "fuse_norm": True,
        "fuse_cross_entropy": True,
        "use_l2warp": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.48.0",
        "vocab_size": shape.vocab,
    }
    return config | changes


def fla_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """fla's names and orientation."""
    found = {}
    for name, tensor in tensors.items():
        if name in _FLA_OUTER:
            found[_FLA_OUTER[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        is_low_rank = rest.startswith("att.") and len(rest) == 6 and rest[4] in "wavg" and rest[5] in "012"
        if is_low_rank:
            if rest[4] == "v" and layer == "0":
                continue
            inner = f"attn.{rest[4]}_lora.lora." + {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[rest[5]]
            tensor = tensor.flatten() if rest[5] == "0" else tensor.t()
        else:
            ours = max((key for key in _FLA_INNER if rest.startswith(key)), key=len)
            inner = _FLA_INNER[ours] + rest.removeprefix(ours)
            if inner in ("attn.k_k", "attn.k_a", "ffn.x_k"):
                tensor = tensor.flatten()
        found[f"model.layers.{layer}.{inner}"] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def save_fla(folder: Path, shape: Rwkv7Shape, tensors: Tensors, **changes: Any) -> Path:
    """fla's folder, with ``changes`` to its config.json."""
    folder.mkdir()
    save_file(fla_tensors(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fla_config(shape, **changes)))
    return folder


def save_old_fla(folder: Path, shape: Rwkv7Shape, tensors: Tensors) -> Path:
    """fla's first version: the six token shifts in one tensor."""
    folder.mkdir()
    found = fla_tensors(tensors)
    for layer in range(shape.layers):
        rows = [found.pop(f"model.layers.{layer}.attn.x_{letter}").flatten() for letter in "rwkvag"]
        found[f"model.layers.{layer}.attn.x_x"] = torch.stack(rows)
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fla_config(shape)))
    return folder


def save_hf(folder: Path, shape: Rwkv7Shape, tensors: Tensors, **changes: Any) -> Path:
    """The official folder: BlinkDL's names under a prefix, and a value residual of zeros in layer 0."""
    folder.mkdir()
    found = {name if name == "head.weight" else f"rwkv7.{name}": tensor for name, tensor in tensors.items()}
    for number, like in (("0", "att.v0"), ("1", "att.v1"), ("2", "att.v2")):
        found[f"rwkv7.blocks.0.att.v{number}"] = torch.zeros_like(tensors[f"blocks.1.{like}"])
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    config = fla_config(shape, num_heads=shape.heads, wkv_state_dtype="float32", wkv_implementation="eager")
    for key in ("attn", "attn_mode", "hidden_ratio", "value_dim", "fuse_norm", "fuse_cross_entropy", "norm_first"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def gguf_renamed(tensors: Tensors, layers: int, inner: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """What only has another name in GGUF; ``inner`` names modules of a layer: BlinkDL's → llama.cpp's."""
    outer = {"emb": "token_embd", "head": "output", "blocks.0.ln0": "token_embd_norm", "ln_out": "output_norm"}
    names = outer | {f"blocks.{i}.{old}": f"blk.{i}.{new}" for i in range(layers) for old, new in inner.items()}
    return {
        f"{new}.{part}": tensors[f"{old}.{part}"]
        for old, new in names.items()
        for part in ("weight", "bias")
        if f"{old}.{part}" in tensors
    }


def gguf_writer(
    path: Path, architecture: str, vocab: int, keys: Mapping[str, Any], tokenizer: str = "rwkv"
) -> GGUFWriter:
    """A file with a tokenizer's list of tokens and these keys of the architecture."""
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list([f"token {i}" for i in range(vocab)])
    for key, value in keys.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    return writer


def written(writer: GGUFWriter, path: Path) -> Path:
    """The whole file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_arrays(tensors: Tensors, layers: int) -> dict[str, torch.Tensor]:
    """GGUF's names and orientation, the dummies of layer 0 included."""
    found = gguf_renamed(tensors, layers, _GGUF_INNER)
    for layer in range(layers):
        old, new = f"blocks.{layer}.", f"blk.{layer}."
        rows = [tensors[f"{old}att.x_{letter}"].reshape(1, 1, -1) for letter in "rwkvag"]
        found[f"{new}time_mix_lerp_fused.weight"] = torch.stack(rows)
        found[f"{new}channel_mix_lerp_k.weight"] = tensors[f"{old}ffn.x_k"].flatten()
        for name in ("k_k", "k_a", "r_k"):
            found[f"{new}time_mix_{name}.weight"] = tensors[f"{old}att.{name}"].flatten()
        for letter in "wavg":
            source = "a" if letter == "v" and layer == 0 else letter
            for number in "12":
                found[f"{new}time_mix_{letter}{number}.weight"] = tensors[f"{old}att.{source}{number}"].t()
            if letter != "g":
                found[f"{new}time_mix_{letter}0.weight"] = tensors[f"{old}att.{source}0"].flatten()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """Whether a quantiser packs it: big matrices, not the token shifts and low-rank pairs."""
    small = ("lerp", "_w1.", "_w2.", "_a1.", "_a2.", "_v1.", "_v2.", "_g1.", "_g2.")
    return tensor.dim() == 2 and tensor.shape[-1] % 32 == 0 and not any(part in name for part in small)


def save_gguf(
    path: Path, shape: Rwkv7Shape, tensors: Tensors, kind: str = "", *, leave_out: str = "", **metadata: Any
) -> Path:
    """A GGUF file. ``kind`` "": matrices in their own type, all else float32, as converters do; "Q8_0": packed matrices.

    ``metadata`` adds or changes ``rwkv7.`` keys (dots as double underlines); ``leave_out`` names one to drop.
    """
    tokenizer = metadata.pop("tokenizer", "rwkv")
    keys = {
        "context_length": 1 << 20,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": shape.head_size,
        "attention.decay_lora_rank": shape.rank_w,
        "attention.iclr_lora_rank": shape.rank_a,
        "attention.value_residual_mix_lora_rank": shape.rank_v,
        "attention.gate_lora_rank": shape.rank_g,
        "feed_forward_length": shape.ffn_width,
        "attention.head_count": 0,
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    keys.pop(leave_out, None)
    writer = gguf_writer(path, "rwkv7", shape.vocab, keys, tokenizer)
    for name, tensor in gguf_arrays(tensors, shape.layers).items():
        _add(writer, name, tensor, kind)
    return written(writer, path)


def _add(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    if kind and is_quantised(name, tensor):
        packed = quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType[kind])
    elif tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and not name.endswith(("_w1.weight", "_w2.weight")):
        raw = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    elif tensor.dim() == 2 and tensor.dtype == torch.float16:
        writer.add_tensor(name, tensor.numpy())
    else:
        writer.add_tensor(name, tensor.float().numpy())


def dequantised(tensors: Tensors, kind: str = "Q8_0") -> dict[str, torch.Tensor]:
    """BlinkDL's tensors as float32, those a quantiser packs packed and unpacked once."""
    from gguf.quants import dequantize

    found = {}
    for name, tensor in tensors.items():
        plain = tensor.float()
        low_rank = ".att." in name and name[-1] in "12" and name[-2] in "wavg"
        if plain.dim() == 2 and not low_rank and not name.endswith("r_k"):
            packed = quantize(plain.numpy(), GGMLQuantizationType[kind])
            plain = torch.from_numpy(np.ascontiguousarray(dequantize(packed, GGMLQuantizationType[kind])))
        found[name] = plain
    return found
