"""What peers share that give RWKV-7 the interface of the library ``transformers``: their tensors have the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kittiwake.bench.peers.contract import NORM_EPS, PeerError, PeerTask
from kittiwake.families.rwkv7_names import BLINKDL, FLA


class HfModel:
    """A model that is called with ids and a cache, and gives logits and the cache."""

    is_batched = True

    def __init__(self, model: Any, version: str) -> None:
        self.version = version
        self._model = model
        self._cache: Any = None

    def start(self, batch: int) -> None:
        """The model makes a new cache at the next call, of the size it is called with."""
        self._cache = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab] after the last token of each sequence; ids are [B, T]."""
        with torch.inference_mode():
            answer = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = answer.past_key_values
        logits: torch.Tensor = answer.logits[:, -1]
        return logits


def config_values(task: PeerTask) -> dict[str, Any]:
    """The keys of a config.json that the sizes decide."""
    shape = task.shape
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn_width,
        "decay_low_rank_dim": shape.rank_w,
        "a_low_rank_dim": shape.rank_a,
        "v_low_rank_dim": shape.rank_v,
        "gate_low_rank_dim": shape.rank_g,
        "norm_eps": NORM_EPS,
        "tie_word_embeddings": False,
    }


def build(task: PeerTask, make: Callable[[], Any], version: str) -> HfModel:
    """Make the model without values, then give it the weights. Raises PeerError for a tensor that does not fit.

    Drawing first values that are then thrown away takes minutes for a large model.
    """
    with torch.device("meta"):
        model = make()
    wanted: Mapping[str, torch.Tensor] = model.state_dict()
    tensors = {name: task_tensor(task, name, place) for name, place in _places(task).items()}
    if lacking := sorted(wanted.keys() ^ tensors.keys()):
        raise PeerError(f"{version} has other tensors than flash-linear-attention's names: {', '.join(lacking[:3])}")
    for name, tensor in tensors.items():
        if tensor.numel() != wanted[name].numel():
            raise PeerError(f"{version}: {name} has shape {list(wanted[name].shape)}, not {list(tensor.shape)}")
        tensors[name] = tensor.reshape(wanted[name].shape).contiguous()
    model.load_state_dict(tensors, strict=True, assign=True)
    if held := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise PeerError(f"{version} computes {held[0]} when it is made, which it was not")
    return HfModel(model.eval(), version)


def _places(task: PeerTask) -> dict[str, tuple[str, bool]]:
    """Their name → (BlinkDL's name, whether the matrix lies the other way round)."""
    ours, theirs = BLINKDL.places(task.shape.layers), FLA.places(task.shape.layers)
    return {
        theirs[name].name: (place.name, place.is_transposed != theirs[name].is_transposed)
        for name, place in ours.items()
    }


def task_tensor(task: PeerTask, name: str, place: tuple[str, bool]) -> torch.Tensor:
    """One of the task's tensors as the peer keeps it."""
    source, is_turned = place
    if source not in task.weights:
        raise PeerError(f"there is no {source} for its {name}")
    tensor = task.weight(source)
    return tensor.t() if is_turned else tensor
