"""Tokenizers shared by the tests of this folder; making them is slow enough to do once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings

from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.world import WorldTokenizer
from tests.text.tiny import make_byte_fallback, make_byte_level, make_unigram

# Machines that run tests are shared: a slow example is no fault.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def world() -> WorldTokenizer:
    return WorldTokenizer()


@pytest.fixture(scope="session")
def byte_level_json() -> dict[str, Any]:
    """The parsed file; copy it before changing it."""
    spec: dict[str, Any] = json.loads(make_byte_level().to_str())
    return spec


@pytest.fixture(scope="session")
def byte_level(byte_level_json: dict[str, Any]) -> HFTokenizer:
    return HFTokenizer(json.dumps(byte_level_json).encode())


@pytest.fixture(scope="session")
def byte_fallback() -> HFTokenizer:
    return HFTokenizer(make_byte_fallback().to_str().encode())


@pytest.fixture(scope="session")
def unigram() -> HFTokenizer:
    return HFTokenizer(make_unigram().to_str().encode())
