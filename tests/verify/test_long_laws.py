"""The law of long texts finds a model whose selection depends on where the text was cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, random_qwen4exp
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.load import Loaded, load_model
from kittiwake.verify.long_laws import AROUND, CHUNKS, SPLITS, long_texts
from tests.families.qwen4exp_layouts import write_hf


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny model with a budget of 8 tokens."""
    shape = Qwen4ExpShape()
    folder = write_hf(tmp_path_factory.mktemp("m"), shape, random_qwen4exp(shape, 1, torch.float32))
    return load_model(folder, EngineConfig(threads=1))


def test_every_cut_of_a_long_text_is_equal(loaded: Loaded) -> None:
    outcomes = list(long_texts(loaded, random.Random(0)))
    assert outcomes == [True] * (len(CHUNKS) + len(AROUND) + SPLITS)


def test_a_model_that_looks_at_the_chunk_is_caught(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = loaded.model.forward

    def spoiled(batch: Batch, states: StateTable, **more: Any) -> np.ndarray:
        logits = forward(batch, states, **more)
        return logits + np.float32(batch.rows == 7)

    monkeypatch.setattr(loaded.model, "forward", spoiled)
    outcomes = list(long_texts(loaded, random.Random(0)))
    assert not all(outcomes)


def test_a_model_without_a_budget_has_no_such_case(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(loaded.model.config.extra, "index_budget", 0)
    assert list(long_texts(loaded, random.Random(0))) == []
