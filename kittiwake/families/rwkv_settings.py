"""Settings beside the tensors: one set of keys and values, ticked off as they are looked at, shared by every RWKV.

A key that states a size must agree with the tensors, a key that changes the maths must have a value the code
implements, keys that change nothing are listed. Any other key is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kittiwake.config import is_epsilon
from kittiwake.errors import ModelError

NORM_EPS = 1e-5
"""The layer norms' epsilon where a file does not tell one: torch's default, which BlinkDL's models were trained with."""
GROUP_NORM_EPS = 64e-5
"""That of RWKV-5 to RWKV-7's group norm in BlinkDL's models, whatever the head size: 5 and 6 were trained on outputs
divided by 8, with 1e-5; for RWKV-7 see rwkv_v7_numpy.py. llama.cpp has it as a constant too."""

HARMLESS_CONFIG = frozenset(
    # how another program computes, saves or was told to load the model
    "use_cache auto_map _name_or_path name_or_path transformers_version torch_dtype dtype _attn_implementation "
    "_attn_implementation_autoset attn_implementation output_attentions output_hidden_states return_dict torchscript "
    "is_decoder is_encoder_decoder chunk_size_feed_forward problem_type id2label label2id task_specific_params "
    "tokenizer_class "
    # training
    "initializer_range gradient_checkpointing max_position_embeddings context_length "
    # texts: a tokenizer tells its own ends
    "bos_token_id eos_token_id pad_token_id".split()
)
"""Keys of a ``config.json`` that change nothing in what any RWKV computes."""
HARMLESS_GGUF = frozenset({"context_length", "attention.head_count", "attention.head_count_kv", "rope.dimension_count"})


@dataclass(frozen=True)
class Epsilons:
    """The two epsilons and, for each, where it comes from."""

    norm: float
    group_norm: float
    norm_origin: str
    group_norm_origin: str


class Settings:
    """One set of keys and values, ticked off as they are looked at."""

    def __init__(self, found: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.found, self.where, self.prefix = found, where, prefix
        self.seen: set[str] = set()

    def fail(self, key: str, supported: str) -> ModelError:
        """The error for a value that is not implemented or does not agree."""
        return ModelError(f"{self.where}: {self.prefix}{key} is {shown(self.found[key])}; supported: {supported}")

    def expect_one_of(self, key: str, supported: tuple[Any, ...]) -> None:
        """A value that is absent means what the code does."""
        self.seen.add(key)
        if key in self.found and not any(is_same(self.found[key], value) for value in supported):
            raise self.fail(key, " or ".join(map(repr, supported)))

    def expect(self, key: str, value: Any) -> None:
        """A stated size must be the tensors'; null states nothing."""
        self.seen.add(key)
        if self.found.get(key) is not None and not is_same(self.found[key], value):
            raise self.fail(key, f"{shown(value)}, as the tensors have it")

    def check_architectures(self, name: str) -> None:
        """Another head than a language model's on the same tensors is another model; upper and lower case are one."""
        self.seen.add("architectures")
        names = self.found.get("architectures")
        if names is None:
            return
        if not isinstance(names, list) or not all(isinstance(n, str) and n.lower() == name.lower() for n in names):
            raise self.fail("architectures", f"{[name]}")

    def take_epsilon(
        self, keys: tuple[str, ...], default: float, place: str, default_origin: str = "default: the file says nothing"
    ) -> tuple[float, str]:
        """(value, origin) of the first key that is there; two that differ are refused."""
        self.seen |= set(keys)
        stated = [key for key in keys if self.found.get(key) is not None]
        for key in stated:
            if not is_epsilon(self.found[key]):
                raise self.fail(key, "a number above 0 and below 1")
            if self.found[key] != self.found[stated[0]]:
                raise self.fail(key, f"{self.found[stated[0]]}, as {self.prefix}{stated[0]} says")
        if not stated:
            return default, default_origin
        return float(self.found[stated[0]]), f"{place}: {self.prefix}{stated[0]}"

    def refuse_others(self) -> None:
        """Whatever was not looked at may change the maths."""
        if unknown := sorted(self.found.keys() - self.seen):
            key = unknown[0]
            raise ModelError(
                f"{self.where} has the unknown key {self.prefix}{key[:100]} = {shown(self.found[key])}",
                "if it does not change what the model computes, remove it",
            )


def is_same(left: Any, right: Any) -> bool:
    """Equal, and True is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def shown(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."
