from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.bench.peers import flash_linear_attention, hf_model, transformers_model
from kittiwake.bench.peers.contract import PeerError, PeerTask
from kittiwake.bench.random import RandomSource, RandomWeights
from kittiwake.bench.shapes import small
from kittiwake.bench.subject import Subject
from kittiwake.config import EngineConfig
from kittiwake.load import load_source, load_tensors

SHAPE = small(2, 128, 64)
TASK = PeerTask(RandomWeights(SHAPE, 1), SHAPE, "cpu", torch.float32)


def _tensors() -> dict[str, torch.Tensor]:
    places = hf_model._places(TASK)
    return {name: hf_model.task_tensor(TASK, name, place) for name, place in places.items()}


def test_tensors_under_their_names_are_the_same_model() -> None:
    config = EngineConfig(device="cpu", dtype="fp32", threads=1)
    ours = Subject(load_source(RandomSource(RandomWeights(SHAPE, 1), "x"), config).model, 1)
    theirs = Subject(load_tensors(_tensors(), config).model, 1)
    left, right = (subject.forward(subject.pack([[1, 2, 3, 4]])) for subject in (ours, theirs))
    assert np.array_equal(left, right)


class Skeleton(torch.nn.Module):
    """A module that holds tensors of given names and shapes, and computes nothing."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.held: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {name: torch.empty(shape) for name, shape in self.shapes.items()}

    def load_state_dict(self, tensors: dict[str, torch.Tensor], strict: bool, assign: bool) -> None:  # type: ignore[override]
        assert strict
        assert assign
        self.held = tensors


def test_a_module_made_without_values_is_given_them() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors().items()}
    shapes["model.layers.0.attn.x_r"] = (SHAPE.width,)
    made: list[Skeleton] = []

    def make() -> Skeleton:
        made.append(Skeleton(shapes))
        assert torch.empty(1).is_meta
        return made[0]

    peer = hf_model.build(TASK, make, "skeleton 1.0")
    assert peer.version == "skeleton 1.0"
    assert {name: tuple(tensor.shape) for name, tensor in made[0].held.items()} == shapes
    assert all(tensor.is_contiguous() for tensor in made[0].held.values())


@pytest.mark.parametrize(("name", "shape", "word"), [("extra", (1,), "extra"), ("lm_head.weight", (3, 3), "lm_head")])
def test_a_tensor_that_does_not_fit_is_named(name: str, shape: tuple[int, ...], word: str) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in _tensors().items()} | {name: shape}
    with pytest.raises(PeerError, match=word):
        hf_model.build(TASK, lambda: Skeleton(shapes), "skeleton 1.0")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize("module", [flash_linear_attention, transformers_model])
@pytest.mark.usefixtures("nothing_installed")
def test_what_is_not_installed_is_told(module: object) -> None:
    with pytest.raises(PeerError, match="is not installed"):
        module.open_peer(TASK)  # type: ignore[attr-defined]
