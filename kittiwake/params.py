"""Sampling parameters by name, as JSON files and terminals have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from kittiwake.engine.request import SamplingParams
from kittiwake.errors import RequestError


def param_defaults() -> dict[str, Any]:
    """Sampling parameters and their defaults."""
    found = {}
    for field in fields(SamplingParams):
        factory = field.default_factory
        found[field.name] = factory() if factory is not MISSING else field.default
    return found


def changed_params(params: SamplingParams) -> dict[str, Any]:
    """Those that are not at their defaults, as JSON values."""
    values = {name: getattr(params, name) for name, plain in param_defaults().items() if getattr(params, name) != plain}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from JSON values. Raises RequestError naming an unknown one, or a value it cannot have."""
    known = param_defaults()
    unknown = [name for name in values if name not in known]
    if unknown:
        raise RequestError(
            f"there is no sampling parameter {', '.join(map(repr, unknown))}", f"known: {', '.join(known)}"
        )
    given = dict(values)
    bias = given.get("logit_bias")
    if isinstance(bias, Mapping):  # JSON has only texts as keys
        given["logit_bias"] = {_token_key(key): value for key, value in bias.items()}
    return SamplingParams(**given)


def _token_key(key: object) -> Any:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12 else key
