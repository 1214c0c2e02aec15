"""The same RWKV-4 written as each layout has it. Names are spelt out here once more, so that a slip in ours shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kittiwake.bench.rwkv4_shapes import Rwkv4Shape

Tensors = Mapping[str, torch.Tensor]

_OUTER = {
    "emb.weight": "embeddings.weight",
    "ln_out.weight": "ln_out.weight",
    "ln_out.bias": "ln_out.bias",
    "blocks.0.ln0.weight": "blocks.0.pre_ln.weight",
    "blocks.0.ln0.bias": "blocks.0.pre_ln.bias",
}
_SPELT_OUT = {"time_mix_k": "time_mix_key", "time_mix_v": "time_mix_value", "time_mix_r": "time_mix_receptance"}


def hf_config(shape: Rwkv4Shape, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    config = {
        "architectures": ["RwkvForCausalLM"],
        "attention_hidden_size": shape.attention_width,
        "bos_token_id": 0,
        "context_length": 1024,
        "dtype": "float32",
        "eos_token_id": 0,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "layer_norm_epsilon": 1e-05,
        "model_type": "rwkv",
        "num_hidden_layers": shape.layers,
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    return config | changes


def hf_tensors(tensors: Tensors, body: str = "rwkv") -> dict[str, torch.Tensor]:
    """transformers' names, or with ``body`` "backbone" those of its copies."""
    time, channel = ("attention", "feed_forward") if body == "rwkv" else ("att", "ffn")
    found = {}
    for name, tensor in tensors.items():
        if name == "head.weight":
            theirs = name
        elif name in _OUTER:
            theirs = f"{body}.{_OUTER[name]}"
        else:
            _, layer, rest = name.split(".", 2)
            first, _, last = rest.partition(".")
            part = {"att": time, "ffn": channel}.get(first, first)
            theirs = f"{body}.blocks.{layer}.{part}.{_SPELT_OUT.get(last, last)}"
        if body == "backbone":
            theirs = theirs.replace("ln_out", "norm_f")
        found[theirs] = tensor.clone()
    return found


def save_hf(
    folder: Path, shape: Rwkv4Shape, tensors: Tensors, *, body: str = "rwkv", as_bin: bool = False, **changes: Any
) -> Path:
    """A folder with config.json and model.safetensors, or pytorch_model.bin; changes to None in ``leave_out`` go."""
    folder.mkdir(parents=True)
    leave_out = changes.pop("leave_out", ())
    config = {key: value for key, value in hf_config(shape, **changes).items() if key not in leave_out}
    (folder / "config.json").write_text(json.dumps(config))
    stored = hf_tensors(tensors, body)
    if as_bin:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
