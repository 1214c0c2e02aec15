"""Sizes and constants of one model, and the rules of structure they must meet. No size is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from kittiwake.errors import ModelError
from kittiwake.families.contract import ModelConfig

FAMILY = "qwen4exp"
GATES = ("sigmoid", "silu")
MAX_COUNT = 1 << 31
MAX_HASH = 1 << 63


@dataclass(frozen=True)
class Ngram:
    """The hash and the table of one n-gram layer."""

    layer: int
    """Index of the layer that it comes before."""
    multipliers: tuple[int, ...]
    """One for each token of the longest n-gram, newest first."""
    head_sizes: tuple[int, ...]
    """Rows of the table that each head's hash falls into, heads of the shortest n-grams first."""
    rows: int
    """Rows of the table, spare ones at its end included."""
    parts: int
    """Tensors that the table is stored in, one after another."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each head."""
        return tuple(sum(self.head_sizes[:head]) for head in range(len(self.head_sizes)))

    @property
    def used_rows(self) -> int:
        """Rows that a hash can give."""
        return sum(self.head_sizes)


@dataclass(frozen=True)
class Geometry:
    """Sizes and constants; the names of the fields are the keys of a bundle's manifest."""

    layers: int
    width: int
    vocab_size: int
    attention_layers: tuple[int, ...]
    """Indexes of the layers that attend; the others are Gated DeltaNet."""
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    rope_theta: float
    index_heads: int
    index_size: int
    index_budget: int
    """Most tokens of complete blocks that a query attends to."""
    index_ratio: int
    """Tokens of a block."""
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_taps: int
    gate: str
    """How the output of the delta rule is gated: one of GATES."""
    streams: int
    stream_rank: int
    experts: int
    experts_used: int
    expert_width: int
    shared_width: int
    renormalises: bool
    """Whether the shares of the chosen experts are made to sum to 1."""
    norm_eps: float
    ngram_size: int
    """Tokens of the longest n-gram; 0 where there is no n-gram layer."""
    ngram_heads: int
    """Heads of each size of n-gram."""
    ngram_row: int
    """Values of a row of the table."""
    ngram_taps: int
    ngram_end: int
    """The token beyond which no n-gram reaches back."""
    ngrams: tuple[Ngram, ...]
    draft_layers: int
    """Layers of the multi-token predictor: its tensors are named and kept, and not run."""

    def __post_init__(self) -> None:
        """Raise ModelError for sizes that break a rule of structure, naming the rule and the values."""
        for name in _COUNTS:
            _check_count(name, getattr(self, name), 1)
        if self.has_attention:
            for name in _INDEX_COUNTS:
                _check_count(name, getattr(self, name), 1)
        self._check_attention()
        if self.value_heads % self.key_heads:
            raise ModelError(f"{self.value_heads} value heads are no multiple of {self.key_heads} key heads")
        if self.gate not in GATES:
            raise ModelError(f"the output gate is {self.gate!r}; supported: {' or '.join(GATES)}")
        if self.streams < 2:
            raise ModelError(f"the model has {self.streams} residual stream; supported: at least 2")
        if self.experts_used > self.experts:
            raise ModelError(f"{self.experts_used} experts a token are more than the {self.experts} there are")
        _check_count("draft_layers", self.draft_layers, 0)
        self._check_ngrams()

    def _check_attention(self) -> None:
        layers = self.attention_layers
        if list(layers) != sorted(set(layers)) or any(not 0 <= layer < self.layers for layer in layers):
            raise ModelError(f"attention_layers is {layers}, expected ascending indexes below {self.layers}")
        if not self.has_attention:
            return
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads are no multiple of {self.kv_heads} key and value heads")
        if self.rotary_size % 2 or not 0 < self.rotary_size <= min(self.head_size, self.index_size):
            raise ModelError(
                f"{self.rotary_size} dimensions are rotated, expected an even number of at most the head's "
                f"{self.head_size} and the index head's {self.index_size}"
            )
        if self.index_budget % self.index_ratio:
            raise ModelError(
                f"the budget of {self.index_budget} tokens is no multiple of the block's {self.index_ratio}"
            )

    def _check_ngrams(self) -> None:
        if not self.ngrams:
            return
        for name in ("ngram_heads", "ngram_row", "ngram_taps"):
            _check_count(name, getattr(self, name), 1)
        _check_count("ngram_size", self.ngram_size, 2)
        if not 0 <= self.ngram_end < self.vocab_size:
            raise ModelError(f"the n-grams end at token {self.ngram_end}, the vocabulary has {self.vocab_size}")
        layers = [ngram.layer for ngram in self.ngrams]
        if layers != sorted(set(layers)) or any(not 0 <= layer < self.layers for layer in layers):
            raise ModelError(f"n-gram layers are {layers}, expected ascending indexes below {self.layers}")
        if both := sorted(set(layers) & set(self.attention_layers)):
            raise ModelError(f"layer {both[0]} has n-grams and attends; n-grams are read before DeltaNet layers only")
        for ngram in self.ngrams:
            self._check_ngram(ngram)

    def _check_ngram(self, ngram: Ngram) -> None:
        where = f"n-gram layer {ngram.layer}"
        if len(ngram.multipliers) != self.ngram_size or len(ngram.head_sizes) != self.ngram_heads_all:
            raise ModelError(
                f"{where} has {len(ngram.multipliers)} multipliers and {len(ngram.head_sizes)} heads, "
                f"expected {self.ngram_size} and {self.ngram_heads_all}"
            )
        # so that a token times a multiplier is the same number with and without a sign
        if not all(number > 0 and number * self.vocab_size <= MAX_HASH for number in ngram.multipliers):
            raise ModelError(f"{where} has the multipliers {ngram.multipliers}, whose products do not fit 63 bits")
        for size in (*ngram.head_sizes, ngram.rows, ngram.parts):
            _check_count(f"a size of {where}", size, 1)
        if ngram.rows < ngram.used_rows:
            raise ModelError(f"{where} hashes to {ngram.used_rows:,} rows, its table has {ngram.rows:,}")

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends."""
        return bool(self.attention_layers)

    @cached_property
    def delta_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that do not attend."""
        return tuple(sorted(set(range(self.layers)) - set(self.attention_layers)))

    @property
    def stream_width(self) -> int:
        """Channels of all streams."""
        return self.streams * self.width

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_size

    @property
    def ngram_heads_all(self) -> int:
        """Rows of the table that a token reads."""
        return (self.ngram_size - 1) * self.ngram_heads

    @property
    def ngram_width(self) -> int:
        """Values of those rows."""
        return self.ngram_heads_all * self.ngram_row

    @classmethod
    def of(cls, config: ModelConfig) -> Geometry:
        """The geometry that a config holds. Raises ModelError for a value that breaks a rule."""
        return cls.from_values(
            {**config.extra, "layers": config.layers, "width": config.width, "vocab_size": config.vocab_size}
        )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Geometry:
        """From JSON values, one for every field. Raises ModelError naming a value of the wrong kind."""
        found = {name: _checked(name, kind, values[name]) for name, kind in _KINDS.items()}
        rows = _checked_ngrams(values["ngrams"])
        return cls(
            attention_layers=_whole_numbers("attention_layers", values["attention_layers"]), ngrams=rows, **found
        )

    def extra(self) -> dict[str, Any]:
        """What a config holds beside layers, width and vocabulary: JSON values."""
        values = asdict(self)
        values["ngrams"] = [
            {**ngram, "multipliers": list(ngram["multipliers"]), "head_sizes": list(ngram["head_sizes"])}
            for ngram in values["ngrams"]
        ]
        values["attention_layers"] = list(self.attention_layers)
        return {name: value for name, value in values.items() if name not in ("layers", "width", "vocab_size")}


_KINDS: dict[str, type] = {
    field.name: {"int": int, "float": float, "str": str, "bool": bool}[str(field.type)]
    for field in fields(Geometry)
    if field.name not in ("attention_layers", "ngrams")
}
_COUNTS = (
    "layers", "width", "vocab_size", "heads", "kv_heads", "head_size", "key_heads", "value_heads", "key_size",
    "value_size", "conv_taps", "stream_rank", "experts", "experts_used", "expert_width", "shared_width",
)  # fmt: skip
_INDEX_COUNTS = ("index_heads", "index_size", "index_budget", "index_ratio", "rotary_size")


def _check_count(name: str, value: int, low: int) -> None:
    if not low <= value < MAX_COUNT:
        raise ModelError(f"{name} is {value:,}, expected {low} or more, and below {MAX_COUNT:,}")


def _checked(name: str, kind: type, value: Any) -> Any:
    """A value of this kind; a whole number serves where a float is wanted."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number and 0 < value < float("inf"):
        return float(value)
    if type(value) is not kind or kind is float:
        raise ModelError(f"{name} is {value!r}, expected {'a number above 0' if kind is float else kind.__name__}")
    return value


def _whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(one) is int and 0 <= one < MAX_HASH for one in value):
        raise ModelError(f"{name} is {value!r}, expected a list of whole numbers")
    return tuple(value)


def _checked_ngrams(value: Any) -> tuple[Ngram, ...]:
    names = {field.name for field in fields(Ngram)}
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"ngrams is {value!r}, expected a list")
    found = []
    for one in value:
        if not isinstance(one, dict) or set(one) != names:
            raise ModelError(f"an entry of ngrams is {one!r}, expected the keys {sorted(names)}")
        multipliers, sizes = (_whole_numbers(name, one[name]) for name in ("multipliers", "head_sizes"))
        layer, rows, parts = (_checked(name, int, one[name]) for name in ("layer", "rows", "parts"))
        found.append(Ngram(layer, multipliers, sizes, rows, parts))
    return tuple(found)
