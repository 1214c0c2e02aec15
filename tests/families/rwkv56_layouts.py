"""The same RWKV-5 or 6 written as each layout has it. Names are spelt out here once more, so that a slip in ours shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, Rwkv6Shape
from tests.families.layouts import gguf_renamed, gguf_writer, written

Tensors = Mapping[str, torch.Tensor]

_GGUF_INNER = {
    "ln1": "attn_norm", "ln2": "attn_norm_2", "att.ln_x": "time_mix_ln", "att.receptance": "time_mix_receptance",
    "att.key": "time_mix_key", "att.value": "time_mix_value", "att.gate": "time_mix_gate",
    "att.output": "time_mix_output", "ffn.key": "channel_mix_key", "ffn.receptance": "channel_mix_receptance",
    "ffn.value": "channel_mix_value",
}  # fmt: skip
_HF_V5_MIXES = {
    "time_mix_k": "time_mix_key",
    "time_mix_v": "time_mix_value",
    "time_mix_r": "time_mix_receptance",
    "time_mix_g": "time_mix_gate",
}


def hf_config(shape: Rwkv5Shape | Rwkv6Shape, **changes: Any) -> dict[str, Any]:
    """A config.json as the folders have it; their num_attention_heads is often the head size."""
    number = 5 if isinstance(shape, Rwkv5Shape) else 6
    config = {
        "architectures": [f"Rwkv{number}ForCausalLM"],
        "auto_map": {"AutoConfig": f"configuration_rwkv{number}.Rwkv{number}Config"},
        "attention_hidden_size": shape.width,
        "bos_token_id": 0,
        "context_length": 4096,
        "eos_token_id": 0,
        "head_size": shape.head_size,
        "hidden_size": shape.width,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-5,
        "model_type": f"rwkv{number}",
        "num_attention_heads": 64,
        "num_hidden_layers": shape.layers,
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "transformers_version": "4.33.1",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    return config | changes


def hf_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The folders' names; tensors are stored as BlinkDL's."""
    found = {}
    for name, tensor in tensors.items():
        if name == "head.weight":
            found[name] = tensor
            continue
        name = name.replace("emb.weight", "embeddings.weight").replace("blocks.0.ln0.", "blocks.0.pre_ln.")
        name = name.replace(".att.", ".attention.").replace(".ffn.", ".feed_forward.")
        for short, long in _HF_V5_MIXES.items():
            if name.endswith(f".{short}"):
                name = name.replace(f".{short}", f".{long}")
        found[f"rwkv.{name}"] = tensor
    return found


def save_hf(folder: Path, shape: Rwkv5Shape | Rwkv6Shape, tensors: Tensors, **changes: Any) -> Path:
    """A folder, with ``changes`` to its config.json."""
    folder.mkdir()
    save_file(hf_tensors(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(shape, **changes)))
    return folder


def gguf_arrays(tensors: Tensors, layers: int, *, is_fused: bool, rescale: int) -> dict[str, torch.Tensor]:
    """GGUF's names and orientation of an RWKV-6; ``rescale`` as a converter does it, 0: not at all."""
    found = gguf_renamed(tensors, layers, _GGUF_INNER)
    for layer in range(layers):
        old, new = f"blocks.{layer}.", f"blk.{layer}."
        if rescale:
            for name in ("time_mix_output", "channel_mix_value"):
                found[f"{new}{name}.weight"] = found[f"{new}{name}.weight"] / 2 ** (layer // rescale)
        mixes = {letter: tensors[f"{old}att.time_maa_{letter}"].squeeze() for letter in "wkvrg"}
        if is_fused:
            found[f"{new}time_mix_lerp_fused.weight"] = torch.stack([mix[None, None] for mix in mixes.values()])
        else:
            found |= {f"{new}time_mix_lerp_{letter}.weight": mix for letter, mix in mixes.items()}
        found[f"{new}time_mix_lerp_x.weight"] = tensors[f"{old}att.time_maa_x"].squeeze()
        found[f"{new}time_mix_w1.weight"] = tensors[f"{old}att.time_maa_w1"].t()
        found[f"{new}time_mix_w2.weight"] = tensors[f"{old}att.time_maa_w2"].permute(0, 2, 1)
        found[f"{new}time_mix_decay.weight"] = tensors[f"{old}att.time_decay"].squeeze()
        found[f"{new}time_mix_decay_w1.weight"] = tensors[f"{old}att.time_decay_w1"].t()
        found[f"{new}time_mix_decay_w2.weight"] = tensors[f"{old}att.time_decay_w2"].t()
        found[f"{new}time_mix_first.weight"] = tensors[f"{old}att.time_faaaa"]
        for letter in "kr":
            found[f"{new}channel_mix_lerp_{letter}.weight"] = tensors[f"{old}ffn.time_maa_{letter}"].squeeze()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def save_gguf(
    path: Path,
    shape: Rwkv6Shape,
    tensors: Tensors,
    *,
    is_fused: bool = True,
    rescale: int = 0,
    leave_out: str = "",
    **metadata: Any,
) -> Path:
    """A GGUF file: products in their own type, all else float32, as converters do.

    ``metadata`` adds or changes ``rwkv6.`` keys (dots as double underlines); ``leave_out`` names one to drop.
    """
    keys = {
        "context_length": 1 << 20,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "attention.layer_norm_epsilon": 1e-5,
        "rescale_every_n_layers": rescale,
        "wkv.head_size": shape.head_size,
        "time_mix_extra_dim": shape.rank_mix,
        "time_decay_extra_dim": shape.rank_decay,
        "feed_forward_length": shape.ffn_width,
        "attention.head_count": 0,
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    keys.pop(leave_out, None)
    writer = gguf_writer(path, "rwkv6", shape.vocab, keys)
    for name, tensor in gguf_arrays(tensors, shape.layers, is_fused=is_fused, rescale=rescale).items():
        is_product = tensor.dim() == 2 and "time_mix_first" not in name and "_w1" not in name and "_w2" not in name
        if is_product and tensor.dtype == torch.bfloat16:
            writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
        elif is_product and tensor.dtype == torch.float16:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, tensor.float().numpy())
    return written(writer, path)
