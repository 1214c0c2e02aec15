"""The model on one CUDA device: weights in float32, float16 or bfloat16, states in float32, n-gram tables on disk.

A forward is cut before every n-gram layer: up to there the device works while the table's rows are read; then they are
sent, and the rest follows. Decode steps replay captured graphs, one for each of these segments; prompts are launched
kernel by kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.device import captured, device_memory_for, on_its_card
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateTable
from kittiwake.errors import CheckpointError, DeviceError
from kittiwake.families.contract import ModelConfig, SequencesError
from kittiwake.families.cuda_model import DTYPES, check_weights
from kittiwake.families.cuda_rows import DECODE_BUCKETS, Piece, SentRows, Shape, bucket, padded_shape
from kittiwake.families.qwen4exp.cuda_blocks import Launch
from kittiwake.families.qwen4exp.cuda_rooms import MOST_ROWS, Rooms, most_rows_for, room_bytes
from kittiwake.families.qwen4exp.cuda_rows import CudaRows, MetaBuffer, graph_shape, pieces_of
from kittiwake.families.qwen4exp.cuda_trunk import CudaTrunk
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.model import no_tuned_states, open_reader
from kittiwake.families.qwen4exp.names import is_draft
from kittiwake.families.qwen4exp.ngram import move_histories
from kittiwake.families.qwen4exp.ngram_reader import NgramReader, Ticket, begin_all
from kittiwake.families.qwen4exp.sizes import attention_shape
from kittiwake.families.qwen4exp.state import state_spec
from kittiwake.layers.cuda_experts import CudaExpertGroup, prove_experts
from kittiwake.layers.cuda_linear import exact_products, padded_row
from kittiwake.layers.cuda_probe import pick_products
from kittiwake.ops.block_attention.triton import AttentionRows, make_rooms
from kittiwake.ops.block_attention.triton import workspace_bytes as attention_bytes
from kittiwake.ops.hyper_mix.triton import mean_streams
from kittiwake.ops.nvrtc import can_overlap
from kittiwake.progress import Progress

MOST_WANTED = 512
"""Rows of logits made in one launch."""
PINNED_ROWS = 64
"""Up to so many rows of logits come back by way of pinned memory."""
_SENDS = 2
WARMING = (1, 3, *(16 << more for more in range(9)))
"""Tokens of the forwards that compile kernels: how pairs of experts are brought together depends on how many there are."""
_ROOMS, _LOGITS = "attention rooms", "logits"


@dataclass
class _Reads:
    """The table's rows that one forward has asked for, and those that have come."""

    tickets: list[tuple[NgramReader, Ticket]]
    came: list[np.ndarray]
    """By n-gram layer, float32 [≥ N, E]."""
    failures: dict[int, CheckpointError]

    def rows(self, rank: int) -> np.ndarray:
        """Wait for the rows of an n-gram layer; those of the layers before have come."""
        if rank == len(self.came):
            reader, ticket = self.tickets[rank]
            self.came.append(reader.take(ticket))
            self.failures |= ticket.failures
        return self.came[rank]

    def drop(self) -> None:
        """Give up what was not waited for."""
        for reader, ticket in self.tickets[len(self.came) :]:
            reader.drop(ticket)


class Qwen4ExpCuda:
    """See :class:`kittiwake.families.contract.Model`."""

    device = "cuda"
    can_run_ahead = False
    """The hash needs every token on the host."""

    def __init__(
        self, config: ModelConfig, dtype: str, tables: Mapping[str, RowTable], *, place: torch.device | None = None
    ) -> None:
        """``tables`` has the table of every n-gram layer, by the name of its first part.

        ``place`` is the card in use; the CPU, where Triton interprets, serves to check kernels without one: there are
        no graphs there, and no picks but the default.
        """
        self.config, self.dtype, self.element = config, dtype, DTYPES[dtype]
        self.place = place or torch.device("cuda", torch.cuda.current_device())
        self._g = g = Geometry.of(config)
        self.state_spec = state_spec(g)
        on_card = self.place.type == "cuda"
        memory = torch.cuda.get_device_properties(self.place).total_memory if on_card else 0
        self.most_rows = most_rows_for(memory)
        self.overlap = can_overlap(self.place)
        self._has_graphs = on_card
        self._trunk = CudaTrunk(g, self.element, self.place)
        self._lock = threading.RLock()
        self._make_rooms()
        self._readers = [open_reader(g, ngram, tables) for ngram in g.ngrams]

    def _make_rooms(self) -> None:
        """Everything that a forward works in whose size does not follow from the states."""
        g, rows = self._g, self.most_rows
        self._rooms = Rooms(g, rows, self.element, self.place)
        self._expert_rooms = self._trunk.experts[0].make_rooms(rows)
        self._meta = MetaBuffer(rows, self.place)
        self._turns = torch.empty((rows, 4, g.rotary_size // 2), dtype=torch.float32, device=self.place)
        self._embedded = (
            SentRows((rows, padded_row(g.ngram_width)), self.element, self.place, _SENDS) if g.ngrams else None
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of product weights that a decode step of one row reads: of the experts, those of one token."""
        experts = sum(group.active_nbytes for group in self._trunk.experts)
        return sum(group.nbytes for group in self._trunk.groups) + experts

    @property
    def all_weight_bytes(self) -> int:
        """Bytes of all product weights, every expert's among them."""
        return sum(group.nbytes for group in self._trunk.groups) + sum(group.nbytes for group in self._trunk.experts)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the card that forwards work in, what goes with a table of states left out."""
        return workspace_bytes(self._g, self.most_rows, self.element)

    # -- loading

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor; weights that are not finite or do not fit the dtype are refused by name. Those of
        drafts are let go."""
        if is_draft(name):
            return
        check_weights(name, tensor, self.element)
        self._trunk.takers[name](tensor)

    @on_its_card
    def warm_up(self, progress: Progress | None = None) -> None:
        """Prove what runs which product on this card, and compile the kernels of prompts and steps."""
        tell: Progress = progress if progress is not None else lambda what, done, total: None
        with self._lock:
            if self.place.type == "cuda":
                heads = {self._trunk.head.key: torch.float32}
                pick_products(self._trunk.groups, heads, progress, most_rows=self.most_rows)
                prove_experts(self._trunk.experts, progress)
            counts = [count for count in WARMING if count <= self.most_rows]
            states = CudaStateTable(self.state_spec, 1, self.place, self.state_spec.pages_for(sum(counts)))
            slot = states.allocate()
            for done, count in enumerate(counts):
                tell("preparing kernels", done, len(counts))
                self.forward(Batch.pack([(slot, [0] * count)]), states)
            tell("preparing kernels", len(counts), len(counts))

    @property
    def readers(self) -> Sequence[NgramReader]:
        """What reads the n-gram tables, in the order of their layers."""
        return self._readers

    def close(self) -> None:
        """Let go of the tables on disk."""
        for reader in self._readers:
            reader.close()

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """There are no tuned initial states of this family. Raises ModelError."""
        raise no_tuned_states(self.config, source)

    # -- running

    @on_its_card
    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        """Run packed rows; see :class:`kittiwake.families.contract.Model`. ``hidden`` gets the mean of the streams.

        Raises PagesError or DeviceError, with no state changed, where there is no room; SequencesError, the states of
        the others moved on as ever, where the table's rows of some sequences could not be read.
        """
        assert isinstance(states, CudaStateTable)
        with self._lock:
            pieces = pieces_of(batch, self.most_rows)
            self._make_rooms_beside(states)
            out = self._make_room_on_host(batch)
            graphs = [None if hidden else self._graphs_for(piece, states) for piece in pieces]
            reads = self._begin_reads(batch, states)
            try:
                states.reserve(batch.slots, np.diff(batch.starts))
                if self._readers:
                    move_histories(states.part("ngram_ids")[0], batch)
                for piece, own in zip(pieces, graphs, strict=True):
                    self._run(piece, own, states, reads, out, hidden or {})
                    states.positions[piece.slots] += np.diff(piece.starts)
            finally:
                reads.drop()
            if self.place.type == "cuda" and len(out):
                torch.cuda.current_stream(self.place).synchronize()
        if reads.failures:
            raise SequencesError(reads.failures, out.numpy())
        return out.numpy()

    def _make_rooms_beside(self, states: CudaStateTable) -> None:
        """What forwards on these states need, whose size follows from the table's. Raises DeviceError."""
        g = self._g
        with device_memory_for("the room to work in beside these states", "take fewer slots, or less for what grows"):
            if g.has_attention and _ROOMS not in states.attached:
                most = states.pages.shape[1] * self.state_spec.page_tokens
                states.attached[_ROOMS] = make_rooms(attention_shape(g), self.most_rows, most, self.element, self.place)
            if _LOGITS not in states.attached:
                rows = min(bucket(states.slots, DECODE_BUCKETS) or MOST_WANTED, MOST_WANTED)
                shape = (rows, g.vocab_size)
                states.attached[_LOGITS] = torch.empty(shape, dtype=torch.float32, device=self.place)

    def _make_room_on_host(self, batch: Batch) -> torch.Tensor:
        """Get what reading the tables takes, and float32 [W, vocab] for the logits. Raises DeviceError."""
        wanted, vocab = len(batch.want_rows), self._g.vocab_size
        try:
            for reader in self._readers:
                reader.make_room(batch)
            is_pinned = self.place.type == "cuda" and 0 < wanted <= PINNED_ROWS
            return torch.empty((wanted, vocab), dtype=torch.float32, pin_memory=is_pinned)
        except (MemoryError, RuntimeError):  # torch says so in either way
            raise DeviceError(
                f"the system refuses the memory for {batch.rows:,} rows of n-grams, or {4 * wanted * vocab:,} bytes "
                f"for the logits of {wanted:,} rows",
                "take fewer rows at once: a lower max_chunk or max_rows",
            ) from None

    def _begin_reads(self, batch: Batch, states: CudaStateTable) -> _Reads:
        """Ask for the table's rows of every token, for each n-gram layer. Raises DeviceError, with nothing asked for."""
        if not self._readers:
            return _Reads([], [], {})
        return _Reads(begin_all(self._readers, batch, states.part("ngram_ids")[0][batch.slots]), [], {})

    def _run(
        self,
        piece: Piece,
        graphs: tuple[Shape, list[Any]] | None,
        states: CudaStateTable,
        reads: _Reads,
        out: torch.Tensor,
        hidden: Mapping[int, np.ndarray],
    ) -> None:
        """One launch of every segment, by graphs where there are some, and the logits."""
        seen, logits = states.positions[piece.slots], states.attached[_LOGITS]
        if graphs is not None:
            shape, captured = graphs
            self._meta.fill(piece, seen, shape)
            for segment, graph in enumerate(captured):
                self._bring_rows(segment, piece, reads)
                graph.replay()
            self._fetch(logits, piece, 0, len(piece.want), out)
            return
        rows = self._meta.fill(piece, seen, padded_shape(piece, self.most_rows))
        launch = self._launch(rows, states, int((seen + np.diff(piece.starts)).max()))
        copies = partial(self._copy_streams, hidden, piece) if hidden else None
        with exact_products(self.place):
            for segment in range(self._trunk.segments):
                self._bring_rows(segment, piece, reads)
                self._trunk.run_segment(segment, launch, copies)
            for first in range(0, len(piece.want), len(logits)):
                count = min(len(logits), len(piece.want) - first)
                self._trunk.logits(launch, launch.rows.want[first : first + count], logits[:count])
                self._fetch(logits, piece, first, count, out)

    @staticmethod
    def _fetch(logits: torch.Tensor, piece: Piece, first: int, count: int, out: torch.Tensor) -> None:
        """Copy rows of logits to the host, where they are once the stream has come so far."""
        places = piece.places[first : first + count]
        if count and places[-1] - places[0] == count - 1:  # ascending
            out[int(places[0]) : int(places[-1]) + 1].copy_(logits[:count], non_blocking=out.is_pinned())
        elif count:
            out[torch.from_numpy(places)] = logits[:count].cpu()

    def _bring_rows(self, segment: int, piece: Piece, reads: _Reads) -> None:
        """Wait for the table's rows that a segment begins with, and send them; the first begins with none."""
        if segment == 0:
            return
        assert self._embedded is not None
        rows, count = reads.rows(segment - 1), len(piece.rows)
        # rows of a piece lie side by side, unless decode steps were taken out from between them
        is_run = count == 0 or piece.rows[-1] - piece.rows[0] == count - 1
        some = rows[piece.rows[0] : piece.rows[-1] + 1] if is_run and count else rows[piece.rows]
        self._embedded.next()[:count, : some.shape[1]].copy_(torch.from_numpy(some))
        self._embedded.send(count)

    def _launch(self, rows: CudaRows, states: CudaStateTable, most_keys: int | None) -> Launch:
        count, attention = rows.shape.rows, None
        embedded = None if self._embedded is None else self._embedded.sent(count)[:, : self._g.ngram_width]
        if self._g.has_attention:
            turns = self._turns[:count]
            attention = (
                AttentionRows(rows.owners, rows.starts, rows.slots, rows.seen, rows.positions, turns),
                states.attached[_ROOMS],
            )
        return Launch(
            self._g, rows, states, self._rooms, self._expert_rooms, embedded, attention, most_keys, self.overlap
        )  # fmt: skip

    def _copy_streams(self, arrays: Mapping[int, np.ndarray], piece: Piece, layer: int, launch: Launch) -> None:
        """The mean of the streams, to the rows of the batch that these are."""
        if layer in arrays:
            g = self._g
            means = launch.get("floats", g.width)
            mean_streams(launch.get("x", g.stream_width), g.streams, means)
            arrays[layer][piece.rows] = means[: len(piece.rows)].cpu().numpy()

    # -- graphs

    def _graphs_for(self, piece: Piece, states: CudaStateTable) -> tuple[Shape, list[Any]] | None:
        """The captured launches that serve a piece and their shape; None where it is launched kernel by kernel."""
        most = min(self.most_rows, len(states.attached[_LOGITS]))
        shape = graph_shape(piece, most) if self._has_graphs else None
        return None if shape is None else (shape, self._graphs(shape, states))

    def _graphs(self, shape: Shape, states: CudaStateTable) -> list[Any]:
        """The captured launches of a shape on these states, one for each segment, captured now where they are the first."""
        if shape not in states.graphs:
            what = f"the graphs of {shape.rows} decoding sequences"
            with device_memory_for(what, "take fewer slots"), exact_products(self.place):
                states.graphs[shape] = self._capture(shape, states)
        found: list[Any] = states.graphs[shape]
        return found

    def _works(self, shape: Shape, states: CudaStateTable) -> list[Callable[[], None]]:
        """What a step of this shape launches, segment by segment; the last one makes the logits of its wanted rows."""
        launch = self._launch(self._meta.views(shape), states, None)
        logits = states.attached[_LOGITS][: shape.wanted]
        works = [partial(self._trunk.run_segment, segment, launch, None) for segment in range(self._trunk.segments)]

        def run_last() -> None:
            works[-1]()
            self._trunk.logits(launch, launch.rows.want, logits)

        return [*works[:-1], run_last]

    def _capture(self, shape: Shape, states: CudaStateTable) -> list[Any]:
        self._meta.fill_nobody(shape)
        works = self._works(shape, states)
        for work in works:  # compiles what is not compiled yet, and lets the libraries make their handles
            work()
        torch.cuda.synchronize(self.place)
        if states.pool is None:
            states.pool = torch.cuda.graph_pool_handle()
        return [captured(work, states.pool) for work in works]

    @on_its_card
    def capture_decoding(self, states: StateTable) -> None:
        """Capture every decode bucket that these states can need, so that no request waits for it."""
        assert isinstance(states, CudaStateTable)
        if not self._has_graphs:
            return
        sizes = [size for size in DECODE_BUCKETS if size < states.slots]
        sizes.append(bucket(states.slots, DECODE_BUCKETS) or DECODE_BUCKETS[-1])
        with self._lock:
            self._make_rooms_beside(states)
            for size in reversed(sizes):
                self._graphs(Shape(True, size, size, size), states)

    def describe(self) -> dict[str, Any]:
        """The card, the picks with their reasons, where memory goes, and what serves the tables."""
        picks = {group.key: group.describe() for group in self._trunk.groups}
        experts = {str(group.shape): group.describe() for group in self._trunk.experts}
        return {
            "device": self.device,
            "card": torch.cuda.get_device_name(self.place) if self.place.type == "cuda" else "none: interpreted",
            "dtype": self.dtype,
            "weight_bytes": self._trunk.embedding.nbytes + self.all_weight_bytes,
            "state_bytes": self.state_spec.slot_bytes,
            "state_bytes_per_token": self.state_spec.page_bytes // self.state_spec.page_tokens,
            "workspace_bytes": self.workspace_bytes,
            "most_rows": self.most_rows,
            "picks": list(picks.values()),
            "experts": list(experts.values()),
            "ngram_tables": [reader.describe() for reader in self._readers],
        }


def workspace_bytes(g: Geometry, rows: int, element: torch.dtype) -> int:
    """Bytes of the card that forwards of up to ``rows`` rows work in, what goes with a table of states left out."""
    experts = CudaExpertGroup(
        "", g.experts, g.width, g.expert_width, g.experts_used, g.renormalises, element, torch.device("meta")
    )
    turns, sent = 4 * 4 * (g.rotary_size // 2), element.itemsize * padded_row(g.ngram_width)
    return room_bytes(g, rows, element.itemsize) + experts.workspace_bytes(rows) + rows * (turns + sent)


def all_workspace_bytes(g: Geometry, most_tokens: int, element: torch.dtype) -> int:
    """The same for the most rows of a launch, with what goes with a table that holds sequences of so many tokens."""
    shape = attention_shape(g)
    attention = attention_bytes(shape, MOST_ROWS, most_tokens, element) if g.has_attention else 0
    return workspace_bytes(g, MOST_ROWS, element) + attention
