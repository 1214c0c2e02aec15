"""Tiny random models for tests that need one that really runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.llm import LLM
from kittiwake.load import Loaded, load_tensors
from kittiwake.text.tokenizer import Tokenizer


@lru_cache
def tiny_model() -> Loaded:
    """An RWKV-7 of two layers whose tokens are bytes."""
    return load_tensors(random_rwkv7(small(layers=2), seed=3), EngineConfig(threads=1))


def tiny_llm(**options: Any) -> LLM:
    """An LLM over it; ``options`` of EngineConfig."""
    return LLM.from_loaded(tiny_model(), EngineConfig(threads=1, **options))


def tiny_llm_with(tokenizer: Tokenizer, vocab: int) -> LLM:
    """One of ``vocab`` rows with a tokenizer of its own."""
    config = EngineConfig(threads=1, slots=4)
    tensors = random_rwkv7(small(layers=2, vocab=vocab), seed=4)
    return LLM.from_loaded(load_tensors(tensors, config, tokenizer=tokenizer), config)
