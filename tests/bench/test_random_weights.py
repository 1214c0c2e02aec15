from __future__ import annotations

import pytest
import torch

from kittiwake.bench.random import RandomSource, RandomWeights, load_random, random_weights
from kittiwake.bench.shapes import SHAPES, random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.errors import UsageError
from kittiwake.load import load_source, load_tensors


def test_weights_drawn_one_by_one_are_those_drawn_together() -> None:
    together, alone = random_rwkv7(small(), 5), RandomWeights(small(), 5)
    assert list(together) == list(alone)
    for name, recipe in alone.recipes.items():
        tensor = alone[name]
        assert torch.equal(tensor, together[name])
        assert (tuple(tensor.shape), tensor.dtype) == (recipe.shape, recipe.dtype)


def test_a_source_tells_its_tensors_without_drawing_them() -> None:
    source = RandomSource(RandomWeights(SHAPES["13.3b"]), "random 13.3b")
    assert sum(info.nbytes for info in source.infos()) == 2 * SHAPES["13.3b"].parameters
    digests = {
        RandomSource(RandomWeights(SHAPES[name], seed), "x").digest() for name in ("0.1b", "7.2b") for seed in (0, 1)
    }
    assert len(digests) == 4


def test_a_random_source_is_the_model_of_its_tensors() -> None:
    config = EngineConfig(device="cpu", threads=1)
    lazy = load_source(RandomSource(RandomWeights(small(), 2), "lazy"), config)
    whole = load_tensors(random_rwkv7(small(), 2), config)
    assert lazy.dtype == whole.dtype == "bf16"
    assert lazy.model.config == whole.model.config


def test_weights_are_drawn_where_the_model_will_run() -> None:
    assert random_weights("0.1b", EngineConfig(device="cpu")).device == "cpu"


@pytest.mark.parametrize("call", [random_weights, load_random])
def test_an_unknown_shape_is_named_with_the_known_ones(call: object) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=r"'9b'.*0\.1b, 0\.4b"):
        call("9b", EngineConfig())
