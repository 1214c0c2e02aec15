"""The model on the CPU: float32 arithmetic and states, weights in float32 or bfloat16, n-gram tables on disk.

Every layer reads its streams through a mix, once before the delta rule or the attention and once before the experts;
what a block gives goes back to every stream by a share of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import CheckpointError, DeviceError, ModelError
from kittiwake.families.canonical import check_finite
from kittiwake.families.contract import ModelConfig, SequencesError
from kittiwake.families.qwen4exp.blocks import (
    Attention,
    Block,
    Delta,
    Experts,
    MakeGroup,
    NgramBlock,
    Rotation,
    Rows,
    StreamMix,
    Taker,
)
from kittiwake.families.qwen4exp.geometry import Geometry, Ngram
from kittiwake.families.qwen4exp.names import is_draft, table_names
from kittiwake.families.qwen4exp.ngram import NgramHash, move_histories
from kittiwake.families.qwen4exp.ngram_reader import NgramReader, Ticket, begin_all
from kittiwake.families.qwen4exp.room import product_shapes, workspace_bytes, workspace_words
from kittiwake.families.qwen4exp.state import state_spec
from kittiwake.families.rwkv_cpu import stored_rows
from kittiwake.layers.linear import LinearGroup, Product, Workspace, padded, threads_in_force
from kittiwake.layers.probe import pick_products
from kittiwake.ops.block_attention import RotaryRows
from kittiwake.ops.hyper_mix.cpu import combine_and_norm, combine_streams, norm_streams, open_streams
from kittiwake.ops.matmul.cpu import activate_columns
from kittiwake.ops.shift_mix.cpu import PARALLEL_VALUES
from kittiwake.progress import Progress

_NOTHING = np.zeros((0, 1), dtype=np.float32)
_PLANNED_ROWS = (1, 512, 4096)
"""Rows of a forward, of a text from its beginning, whose room :meth:`Qwen4ExpModel.describe` tells."""


class Layer:
    """One layer's blocks."""

    def __init__(self, index: int, g: Geometry, make: MakeGroup, dtype: str) -> None:
        prefix = f"layers.{index}."
        self.ngram: NgramBlock | None = None
        for rank, ngram in enumerate(g.ngrams):
            if ngram.layer == index:
                self.ngram = NgramBlock(f"{prefix}ngram.", rank, g, make)
        self.token_mix = StreamMix(f"{prefix}token_mix.", g, make)
        self.mixer: Delta | Attention
        if index in g.attention_layers:
            self.mixer = Attention(f"{prefix}attention.", g.attention_layers.index(index), g, make)
        else:
            self.mixer = Delta(f"{prefix}delta.", g.delta_layers.index(index), g, make)
        self.channel_mix = StreamMix(f"{prefix}channel_mix.", g, make)
        self.experts = Experts(prefix, g, make, dtype)

    @property
    def blocks(self) -> list[Block]:
        """Every block of the layer."""
        first: list[Block] = [] if self.ngram is None else [self.ngram]
        return [*first, self.token_mix, self.mixer, self.channel_mix, self.experts]


class Qwen4ExpModel:
    """See :class:`kittiwake.families.contract.Model`."""

    device = "cpu"
    can_run_ahead = False

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        threads: int,
        tables: Mapping[str, RowTable],
        progress: Progress | None,
    ) -> None:
        """``tables`` has the table of every n-gram layer, by the name of its first part."""
        self.config, self.dtype, self.threads = config, dtype, threads
        self._g = g = Geometry.of(config)
        self.state_spec = state_spec(g)
        picks = pick_products(product_shapes(g), threads, progress)

        def group(products: Sequence[Product]) -> LinearGroup:
            return LinearGroup(products, picks, dtype, threads)

        self._layers = [Layer(index, g, group, dtype) for index in range(g.layers)]
        self._output_mix = StreamMix("output_mix.", g, group, has_inject=False)
        self._head = group([Product("head.weight", g.width, g.vocab_size, 0)])
        self._blocks = [*(block for layer in self._layers for block in layer.blocks), self._output_mix]
        self._groups = [*(one for block in self._blocks for one in block.groups), self._head]
        self._embedding = np.zeros((0, g.width), dtype=np.float32)
        self._takers = self._all_takers()
        self._readers = [open_reader(g, ngram, tables) for ngram in g.ngrams]
        self._rotation = Rotation(g) if g.has_attention else None
        self._workspace = Workspace()

    def _all_takers(self) -> dict[str, Taker]:
        def take_embedding(tensor: torch.Tensor) -> None:
            self._embedding = stored_rows(tensor, self.dtype)

        takers: dict[str, Taker] = {"embedding.weight": take_embedding}
        takers["head.weight"] = lambda tensor: self._head.load("head.weight", tensor)
        for block in self._blocks:
            takers |= block.takers
        return takers

    @property
    def weight_bytes(self) -> int:
        """Bytes of product weights that a decode step of one row reads: of the experts, those of one token."""
        experts = sum(layer.experts.routed.active_nbytes for layer in self._layers)
        return sum(group.nbytes for group in self._groups) + experts

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor; NaN and infinite weights are refused by name. Those of drafts are let go."""
        if is_draft(name):
            return
        check_finite(name, tensor)
        self._takers[name](tensor)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every kernel a request can meet, or fetch it from the cache, so that no request waits for it."""
        g = self._g
        many = PARALLEL_VALUES // g.width + 1  # rows from which the row kernels run on threads
        states = StateTable(self.state_spec, 1, self.state_spec.pages_for(many + 1))
        slot = states.allocate()
        tell: Progress = progress if progress is not None else lambda what, done, total: None
        for done, count in enumerate((1, many)):
            tell("preparing kernels", done, 3)
            self.forward(Batch.pack([(slot, [0] * count)]), states)
        tell("preparing kernels", 2, 3)
        activate_columns(np.zeros((1, 1), np.float32), 1, 0, 1, 0)
        tell("preparing kernels", 3, 3)

    def close(self) -> None:
        """Let go of the tables on disk."""
        for reader in self._readers:
            reader.close()

    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        """Run packed rows; see :class:`kittiwake.families.contract.Model`. ``hidden`` gets the mean of the streams.

        Raises PagesError or DeviceError, with no state changed, where there is no room; SequencesError, the states of
        the others moved on as ever, where the table's rows of some sequences could not be read.
        """
        with self._workspace.lock, threads_in_force(self.threads):
            rows, out = self._make_room(batch, states)
            reads = self._begin_reads(batch, rows)
            try:
                states.reserve(batch.slots, np.diff(batch.starts))
                failures = self._trunk(batch, rows, reads, hidden or {})
            finally:
                for reader, ticket in reads:
                    reader.drop(ticket)
            states.positions[batch.slots] += np.diff(batch.starts)
            logits = self._logits(rows, batch.want_rows, out)
        if failures:
            raise SequencesError(failures, logits)
        return logits

    def _make_room(self, batch: Batch, states: StateTable) -> tuple[Rows, np.ndarray]:
        """Get all that this forward works in, and room for its logits. Raises DeviceError where the system refuses it."""
        n, wanted = batch.rows, len(batch.want_rows)
        keys = int((states.positions[batch.slots] + np.diff(batch.starts)).max())
        try:
            for name, words in workspace_words(self._g, n, keys, wanted, self.threads, self.dtype).items():
                self._workspace.reserve(name, words)
            for reader in self._readers:
                reader.make_room(batch)
            out = np.empty((padded(wanted), self._g.vocab_size), dtype=np.float32)
            return Rows(self._g, batch, states, self._workspace), out
        except MemoryError:
            raise DeviceError(
                f"the system refuses {self.plan_bytes(n, keys):,} bytes to work in for {n:,} rows",
                "take fewer rows at once: a lower max_chunk or max_rows",
            ) from None

    def plan_bytes(self, rows: int, keys: int) -> int:
        """Bytes that a forward of ``rows`` rows works in whose last one sees ``keys`` tokens, logits left out."""
        row_bytes = [reader.table.row_bytes for reader in self._readers]
        return workspace_bytes(self._g, rows, keys, self.threads, self.dtype, row_bytes)

    @property
    def readers(self) -> Sequence[NgramReader]:
        """What reads the n-gram tables, in the order of their layers."""
        return self._readers

    @property
    def workspace_bytes(self) -> int:
        """Bytes held to work in: what the largest forward so far took."""
        return self._workspace.nbytes + sum(reader.workspace_bytes for reader in self._readers)

    def _trunk(
        self,
        batch: Batch,
        rows: Rows,
        reads: Sequence[tuple[NgramReader, Ticket]],
        wanted: Mapping[int, np.ndarray],
    ) -> dict[int, CheckpointError]:
        """Run all layers over ``rows.x``; returns the sequences, by slot, whose n-grams could not be read."""
        failures: dict[int, CheckpointError] = {}
        pending, left = (_NOTHING, _NOTHING), iter(reads)
        if self._readers:
            move_histories(rows.states.part("ngram_ids")[0], batch)
        open_streams(self._embedding, batch.token_ids, self._g.streams, rows.x)
        rotation = None if self._rotation is None else self._rotation(rows)
        for index, layer in enumerate(self._layers):
            if index in wanted or layer.ngram is not None:
                pending = self._settle(rows, pending)
            if index in wanted:
                self._copy_streams(rows, wanted[index])
            if layer.ngram is not None:
                reader, ticket = next(left)
                layer.ngram(rows, reader.take(ticket))
                failures |= ticket.failures
            pending = self._run_layer(layer, rows, pending, rotation)
        self._settle(rows, pending)
        if len(self._layers) in wanted:
            self._copy_streams(rows, wanted[len(self._layers)])
        return failures

    def _begin_reads(self, batch: Batch, rows: Rows) -> list[tuple[NgramReader, Ticket]]:
        """Ask for the table's rows of every token, for each n-gram layer. Raises DeviceError, with nothing asked for."""
        history = rows.states.part("ngram_ids")[0][batch.slots] if self._readers else _NOTHING
        return begin_all(self._readers, batch, history)

    def _run_layer(
        self, layer: Layer, rows: Rows, pending: tuple[np.ndarray, np.ndarray], rotation: RotaryRows | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """One layer; ``pending`` is the output of the block before and the logits of its shares, not yet added.

        Returns the same of the experts.
        """
        mixed, inject = self._mix(layer.token_mix, rows, pending)
        if isinstance(layer.mixer, Delta):
            y = layer.mixer(rows, mixed)
        else:
            assert rotation is not None
            y = layer.mixer(rows, mixed, rotation)
        mixed, inject = self._mix(layer.channel_mix, rows, (y, inject))
        return layer.experts(rows, mixed), inject

    def _mix(self, mix: StreamMix, rows: Rows, pending: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Add what is pending to the streams, and mix them: the next block's input, and logits of its shares."""
        g, normed = self._g, rows.get("normed", self._g.stream_width)
        combine_and_norm(
            rows.x, *pending, g.stream_rank, rows.count, g.streams, mix.norm, rows.eps, normed
        )  # fmt: skip
        return mix(rows, normed)

    def _settle(self, rows: Rows, pending: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Add what is pending to the streams; nothing is then."""
        if pending[0].shape[0]:
            combine_streams(rows.x, *pending, self._g.stream_rank, rows.count, self._g.streams)
        return _NOTHING, _NOTHING

    def _copy_streams(self, rows: Rows, into: np.ndarray) -> None:
        """The mean of the streams, [N, C]."""
        g = self._g
        rows.x[: rows.count].reshape(rows.count, g.streams, g.width).mean(axis=1, out=into)

    def _logits(self, rows: Rows, want_rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Float32 [W, vocab] of the wanted rows: their streams mixed, and the head."""
        g, wanted = self._g, len(want_rows)
        if wanted == 0:
            return out
        chosen, normed = (self._workspace.get(name, wanted, g.stream_width) for name in ("wanted", "wanted_normed"))
        np.take(rows.x, want_rows, axis=0, out=chosen[:wanted], mode="clip")  # the default mode makes a copy first
        norm_streams(chosen, wanted, g.streams, self._output_mix.norm, rows.eps, normed)
        rows.count = wanted
        mixed, _ = self._output_mix(rows, normed)
        return self._head(mixed, wanted, out, self._workspace)[:wanted]

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """There are no tuned initial states of this family. Raises ModelError."""
        raise no_tuned_states(self.config, source)

    def describe(self) -> dict[str, Any]:
        """Device, dtype, threads, the pick of every shape of product, and what serves the tables."""
        picks = {(row["depth"], row["columns"]): row for group in self._groups for row in group.describe()}
        return {
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "weight_bytes": self.weight_bytes,
            "state_bytes": self.state_spec.slot_bytes,
            "state_bytes_per_token": self.state_spec.page_bytes // self.state_spec.page_tokens,
            "workspace_bytes": self.workspace_bytes,
            "workspace_plan_bytes": {str(rows): self.plan_bytes(rows, rows) for rows in _PLANNED_ROWS},
            "products": list(picks.values()),
            "ngram_tables": [reader.describe() for reader in self._readers],
        }


def no_tuned_states(config: ModelConfig, source: TensorSource) -> ModelError:
    """What a tuned initial state is refused with."""
    return ModelError(
        f"{source.path} cannot begin a text: a {config.family} has no tuned initial states",
        "states of its own are saved and restored as ever",
    )


def open_reader(g: Geometry, ngram: Ngram, tables: Mapping[str, RowTable]) -> NgramReader:
    """What reads the rows of one n-gram layer. Raises ModelError for a table of another size."""
    name = table_names(ngram)[0]
    table = tables[name]
    if (table.rows, table.row_values) != (ngram.rows, g.ngram_row):
        raise ModelError(
            f"{name} has {table.rows:,} rows of {table.row_values}, expected {ngram.rows:,} of {g.ngram_row}"
        )
    return NgramReader(table, NgramHash(ngram.multipliers, ngram.head_sizes, ngram.offsets, g.ngram_end))
