"""Small tables of tensors that every format must give back, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kittiwake.checkpoints.bundle import Golden, write_bundle
from kittiwake.checkpoints.manifest import SourceRecord

Tensors = dict[str, torch.Tensor]


def make_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Five tensors of distinct shapes, one scalar and one empty among them."""
    noise = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "emb.weight": (7, 4),
        "blocks.0.att.x_r": (1, 1, 4),
        "blocks.0.ln1.bias": (4,),
        "scale": (),
        "nothing": (0, 4),
    }
    return {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in shapes.items()}


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same dtype, shape and bits."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    left, right = found.contiguous().reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(left, right)


def save_sharded(folder: Path, tensors: Tensors) -> None:
    """Two shards with an index, as Hugging Face folders have them."""
    folder.mkdir(exist_ok=True)
    names, half = list(tensors), len(tensors) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SOURCE = SourceRecord("toy.pth", "pth", "0" * 64)
GOLDENS = [Golden("Ein Vöglein", (1, 2, 3), (4,))]


def build(out: Path, **changes: Any) -> Path:
    """Write a small bundle, with ``changes`` to the arguments, and return its folder."""
    arguments: dict[str, Any] = {
        "family": "rwkv7",
        "model": {"layers": 1, "width": 4},
        "precision": "fp32",
        "tensors": list(make_tensors().items()),
        "tokenizer": ("world", {"vocab.txt": b"1 'a' 1\n"}),
        "source": SOURCE,
        "builder": "0.1.0",
        "chat_template": "User: {{ text }}",
        "goldens": GOLDENS,
    }
    write_bundle(out, **(arguments | changes))
    return out


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a bundle's manifest after ``change``."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
