"""kittiwake: an inference engine for RWKV-like models that keep a state.

``LLM``, ``AsyncLLM``, ``SamplingParams`` and ``KittiwakeError`` are the public names. They are looked up when first
used, so that ``import kittiwake`` costs nothing: torch, numpy and numba come in with ``LLM``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kittiwake.async_llm import AsyncLLM
    from kittiwake.engine.request import SamplingParams
    from kittiwake.errors import KittiwakeError
    from kittiwake.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "KittiwakeError", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "kittiwake.llm",
    "AsyncLLM": "kittiwake.async_llm",
    "SamplingParams": "kittiwake.engine.request",
    "KittiwakeError": "kittiwake.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
