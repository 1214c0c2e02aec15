"""What the engine and the loader know of a model family, and all they know.

Shape letters are fixed in ``kittiwake/ops/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateSpec, StateTable
from kittiwake.errors import KittiwakeError, UsageError
from kittiwake.progress import Progress


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, read from its tensors. ``extra`` holds what only its family understands (JSON values)."""

    family: str
    layers: int
    width: int
    vocab_size: int
    extra: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict, compare=False)
    """Where things came from, for people: ``layout``, and one entry for each constant in ``extra``. Never stored."""

    def with_constants(self, group_norm_eps: float | None = None, rescale_every: int | None = None) -> ModelConfig:
        """The same with other constants, each None changing nothing (what they mean: ``EngineConfig``).

        Raises UsageError for a constant that the family does not have.
        """
        extra, origins = dict(self.extra), dict(self.origins)
        for key, value, what in (
            ("group_norm_eps", group_norm_eps, "has no group norm"),
            ("rescale_every", rescale_every, "never rescales"),
        ):
            if value is not None:
                if key not in extra:
                    raise UsageError(f"{self.family} {what}, so {key} cannot be {value}", "leave it out")
                extra[key], origins[key] = value, f"option {key}"
        return replace(self, extra=extra, origins=origins)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that the checkpoint's settings say end a text, where they say so; a tokenizer tells its own as well."""
        return tuple(self.extra.get("end_ids", ()))

    @property
    def selection_budget(self) -> int:
        """Tokens of a text beyond which its attention chooses what it reads; 0 where it never does."""
        return int(self.extra.get("index_budget", 0))

    @property
    def selection_block(self) -> int:
        """Tokens of the blocks that it chooses."""
        return int(self.extra.get("index_ratio", 1))

    @property
    def ngram_tokens(self) -> int:
        """Tokens of the longest n-gram that it looks up; 0 where it looks none up."""
        return int(self.extra.get("ngram_size", 0))

    @property
    def ngram_end(self) -> int:
        """The token beyond which no n-gram reaches back."""
        return int(self.extra.get("ngram_end", 0))


class SequencesError(KittiwakeError):
    """A forward that ran, but not for every sequence: ``errors`` says by slot what went wrong, the states of those
    sequences are of no use, and ``logits`` [W, vocab] are those of all wanted rows."""

    def __init__(self, errors: Mapping[int, KittiwakeError], logits: np.ndarray) -> None:
        first = next(iter(errors.values()))
        super().__init__(first.message, first.hint)
        self.errors, self.logits = dict(errors), logits
        self.exit_code, self.http_status = first.exit_code, first.http_status


class Model(Protocol):
    """A loaded model: weights on a device, the state it needs, and one forward."""

    config: ModelConfig
    state_spec: StateSpec
    device: str
    """"cpu" or "cuda": where weights and states live."""
    can_run_ahead: bool
    """Whether a step can be launched that eats tokens which only the device knows yet: what a card with it offers stands
    in engine/device_steps.py. A model that needs the tokens themselves on the host cannot."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights one decode step reads (the embedding table counts one row, so: the products)."""

    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        """Run packed rows; update the states of ``batch.slots``; return float32 logits [W, vocab] of ``batch.want_rows``.

        ``hidden`` asks for copies of the residual stream and changes no bit of anything else: each of its arrays,
        float32 [N, C], is filled with what enters the layer that is its key, or for key L with what leaves the last.
        """

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """The parts of a state [L, *shape] that a tuned initial state sets, others zero; ``transpose`` turns its matrices.

        Raises ModelError for a source that is no tuned state of this model, naming what is wrong.
        """

    def describe(self) -> dict[str, Any]:
        """What was picked at load, and what was proved about it: JSON values for ``doctor``, ``inspect`` and receipts."""


class Family(Protocol):
    """One kind of model: tells its own checkpoints, names its tensors, and builds a :class:`Model`."""

    name: str
    devices: tuple[str, ...]
    """Where its models can run."""

    def recognises(self, source: TensorSource) -> bool:
        """Whether the names in this source are this family's (cheap; reads no tensor data)."""

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Sizes from tensor shapes; raises ModelError naming a tensor that is unknown, missing or of the wrong shape."""

    def table_names(self, source: TensorSource, config: ModelConfig) -> Set[str]:
        """Names in this source of tables that are not loaded but read row by row while the model runs."""

    def open_tables(self, source: TensorSource, config: ModelConfig) -> Mapping[str, RowTable]:
        """Those tables, by our name of their first part.

        Raises CheckpointError for one that cannot be read so.
        """

    def table_parts(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of those tables as tensors, for a bundle: under our names, one at a time, mapped where they can be."""

    def check_canonical(self, source: TensorSource, config: ModelConfig) -> None:
        """Raise BundleError unless a bundle's source holds exactly the canonical tensors of this config."""

    def canonical(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor but those of tables, under kittiwake's name, product weights as [N, K] (N outputs), one at a time,
        in stored dtype."""

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The same config from a bundle's manifest (``model`` section); raises BundleError naming a bad or unknown key."""

    def footprint(self, config: ModelConfig) -> dict[str, int]:
        """Bytes in memory: of the weights kept as "fp32" and as "bf16", and of one sequence's "state"."""

    def workspace_bytes(self, config: ModelConfig, rows: int, threads: int) -> int:
        """Bytes that a forward of ``rows`` rows on the CPU gets before it begins, logits left out; 0 where it has no plan."""

    def build(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        device: str,
        dtype: str,
        threads: int,
        tables: Mapping[str, RowTable] | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Consume canonical tensors and return a model ready to run on ``device``, one of ``devices``.

        ``tables`` are those of :meth:`open_tables`; the model closes them.

        ``dtype`` is how weights are kept: "fp32", "bf16", or on CUDA "fp16".
        """
