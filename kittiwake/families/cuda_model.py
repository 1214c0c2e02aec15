"""What recurrent families share on CUDA: embedding, head, workspace, launches and captured graphs.

A family gives its layers (:meth:`CudaModel._trunk`); the rest is here. See families/contract.py for the contract.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.device import captured, on_its_card
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable, sent
from kittiwake.engine.states import StateSpec, StateTable
from kittiwake.errors import ModelError
from kittiwake.families.canonical import check_finite
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_rows import (
    DECODE_BUCKETS,
    Piece,
    RowBuffer,
    Rows,
    Shape,
    bucket,
    cut,
    largest_bucket,
    nobody,
    padded_shape,
    shape_of,
)
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct, exact_products, padded_row
from kittiwake.layers.cuda_probe import pick_products
from kittiwake.ops.nvrtc import can_overlap
from kittiwake.ops.shift_mix.triton import Added, embed_rows, norm_rows
from kittiwake.progress import Progress

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_ROWS = 8192
"""Most rows of one launch, which the workspace is made for; longer batches are cut, which changes no bit."""
MOST_WANTED = 512
"""Rows of logits made in one launch."""
Addend = torch.Tensor | Added
"""What a block adds to the residual stream."""
Copies = Callable[[int, torch.Tensor, Addend | None], None]
"""Takes what enters a layer: its number, the residual stream, and what is yet to be added to it."""


def check_weights(name: str, tensor: torch.Tensor, element: torch.dtype) -> None:
    """Raise ModelError for weights that are not finite, or that the element type cannot hold."""
    check_finite(name, tensor)
    if element == torch.float16 and max(abs(float(end)) for end in torch.aminmax(tensor)) > 65504:
        raise ModelError(f"{name} holds values beyond 65504, which fp16 cannot hold", "load it with dtype bf16 or fp32")


class CudaModel(ABC):
    """A recurrent model on one CUDA device: float32 residual stream and states, products in ``dtype``."""

    def __init__(
        self,
        config: ModelConfig,
        state_spec: StateSpec,
        dtype: str,
        *,
        place: torch.device | None = None,
    ) -> None:
        """``place`` is the card in use; the CPU, where kernels are interpreted or emulated, serves to check launches
        without one: there are no graphs there, and no picks but the default."""
        self.config, self.state_spec = config, state_spec
        width, vocab, eps = config.width, config.vocab_size, float(config.extra["norm_eps"])
        self.device = "cuda"
        self.can_run_ahead = True
        self.dtype = dtype
        self.element = DTYPES[dtype]
        self.width, self.vocab, self.eps = width, vocab, eps
        self.output_eps = eps
        """Epsilon of the norm before the head."""
        self.place = place or torch.device("cuda", torch.cuda.current_device())
        self._is_on_card = self.place.type == "cuda"
        memory = torch.cuda.get_device_properties(self.place).total_memory if self._is_on_card else 0
        self.most_rows = largest_bucket(min(MOST_ROWS, max(DECODE_BUCKETS[-1], int(memory / 2**30 * 128))))
        self.overlap = can_overlap(self.place)
        self.embedding = torch.zeros((vocab, width), dtype=self.element, device=self.place)
        self.norms = {name: self.vector(2, width) for name in ("embedding_norm", "output_norm")}
        self.head = CudaGroup([CudaProduct("head.weight", width, vocab)], self.element, self.place)
        self._lock = threading.RLock()
        self._rooms: dict[str, torch.Tensor] = {}
        self._rows: RowBuffer | None = None

    # -- what a family gives

    @property
    @abstractmethod
    def groups(self) -> Iterable[CudaGroup]:
        """Every group of products but the head."""

    @abstractmethod
    def trunk(
        self, x: torch.Tensor, rows: Rows, states: CudaStateTable, hidden: Copies | None
    ) -> tuple[torch.Tensor, Addend]:
        """All layers on the embedded rows; the residual stream and what the last block adds to it."""

    # -- rooms

    def vector(self, *shape: int) -> torch.Tensor:
        """Float32 zeros on the device."""
        return torch.zeros(shape, dtype=torch.float32, device=self.place)

    def room(
        self,
        name: str,
        rows: int,
        *columns: int,
        dtype: torch.dtype | None = None,
        lead: int = 0,
        most: int | None = None,
    ) -> torch.Tensor:
        """Room for ``rows`` rows, [rows, *columns] or [lead, rows, *columns]: always at the same address, never cleared."""
        if name not in self._rooms:
            size = self.most_rows if most is None else most
            shape = (size, *columns) if not lead else (lead, size, *columns)
            self._rooms[name] = torch.empty(shape, dtype=dtype or self.element, device=self.place)
        whole = self._rooms[name]
        return whole[:, :rows] if lead else whole[:rows]

    def outputs(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Room for the outputs of a group [rows, columns], which other products read: padded as they load them."""
        return self.room(name, rows, padded_row(columns))[:, :columns]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the rooms made so far."""
        return sum(room.nbytes for room in self._rooms.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of product weights a decode step reads."""
        return sum(group.nbytes for group in (*self.groups, self.head))

    # -- loading

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor; weights that are not finite or do not fit the dtype are refused by name."""
        check_weights(name, tensor, self.element)
        if name == "embedding.weight":
            self.embedding.copy_(tensor)
        elif name == "head.weight":
            self.head.load(name, tensor)
        elif name.partition(".")[0] in self.norms:
            norm, part = name.split(".")
            self.norms[norm][("weight", "bias").index(part)].copy_(tensor)
        else:
            self.load_layer(name, tensor)

    @abstractmethod
    def load_layer(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor of a layer."""

    @on_its_card
    def warm_up(self, progress: Progress | None = None) -> None:
        """Prove, and where nothing is known of this card measure, what runs which product."""
        with self._lock:
            if self._is_on_card:
                heads = {self.head.key: torch.float32}
                pick_products([*self.groups, self.head], heads, progress, most_rows=self.most_rows)
                with exact_products(self.place):
                    self.prove()

    def prove(self) -> None:  # noqa: B027  most families have no such kernel
        """Compare kernels of a family that make products themselves with launches apart, on the card; once, at load."""

    @abstractmethod
    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """A tuned initial state; see :class:`kittiwake.families.contract.Model`."""

    # -- running

    @on_its_card
    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        """Run packed rows; see :class:`kittiwake.families.contract.Model`."""
        out = np.empty((len(batch.want_rows), self.vocab), dtype=np.float32)
        with self._lock:
            for piece in cut(batch, self.most_rows):
                if hidden or len(piece.want) > MOST_WANTED:
                    copies = _Hidden(hidden, piece) if hidden else None
                    x, y = self._eager(piece, padded_shape(piece, self.most_rows), states, copies)
                    self._each_logits(x, y, piece, out)
                elif len(piece.want):
                    out[piece.places] = self._run(piece, states)[: len(piece.want)].cpu().numpy()
                else:
                    self._run(piece, states)
            states.positions[batch.slots] += np.diff(batch.starts)
        return out

    @on_its_card
    def forward_on_device(self, batch: Batch, states: StateTable) -> torch.Tensor:
        """The same, enqueued: float32 logits [W, vocab] on the device, which the next call may overwrite."""
        with self._lock:
            found = self._decoded(batch, states)
            return self._in_pieces(batch, states) if found is None else found[0][: batch.rows]

    def draw_rows(self, slots: int) -> int:
        """See :class:`kittiwake.engine.device_steps.DrawableModel`."""
        return min(bucket(slots, DECODE_BUCKETS) or DECODE_BUCKETS[-1], MOST_WANTED)

    @on_its_card
    def forward_to_draw(self, batch: Batch, states: CudaStateTable) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`kittiwake.engine.device_steps.DrawableModel`."""
        with self._lock:
            found = self._decoded(batch, states)
            return (self._in_pieces(batch, states), None) if found is None else found

    def _decoded(self, batch: Batch, states: StateTable) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A batch of one row a sequence, all wanted, enqueued by its graph: logits and slots, padded to a bucket.

        None: the batch is another one.
        """
        if not (self._is_on_card and batch.rows == len(batch.slots) == len(batch.want_rows)):
            return None
        size = bucket(batch.rows, DECODE_BUCKETS)
        if size is None:
            return None
        shape = Shape(True, size, size, size)
        graph, logits, rows = self._graph(shape, states)
        buffer = self._buffer()
        buffer.fill_decoding(batch, shape)
        graph.replay()
        buffer.mark()
        states.positions[batch.slots] += 1
        return logits, rows.slots

    def _in_pieces(self, batch: Batch, states: StateTable) -> torch.Tensor:
        """Any batch, enqueued launch by launch; see :meth:`forward_on_device`."""
        pieces = cut(batch, self.most_rows)
        if any(len(piece.want) > MOST_WANTED for piece in pieces):  # more than there is room for at once
            return torch.from_numpy(self.forward(batch, states)).to(self.place)
        states.positions[batch.slots] += np.diff(batch.starts)
        if len(pieces) == 1:
            return self._run(pieces[0], states)[: len(pieces[0].want)]
        out = torch.empty((len(batch.want_rows), self.vocab), dtype=torch.float32, device=self.place)
        for piece in pieces:
            logits = self._run(piece, states)
            if len(piece.want):
                out[sent(piece.places, self.place)] = logits[: len(piece.want)]
        return out

    def _run(self, piece: Piece, states: StateTable) -> torch.Tensor:
        """One launch, by a graph where its shape has one. Logits [≥ W, vocab], wanted rows first and in order."""
        shape, may_keep = shape_of(piece, self.most_rows)
        if not (may_keep and self._is_on_card):
            x, y = self._eager(piece, shape, states, None)
            logits = self._logits(x, y, self._buffer().views(shape))
        else:
            graph, logits, _ = self._graph(shape, states)
            self._buffer().fill(piece, shape)
            graph.replay()
        if piece.is_decode and len(piece.want) != len(piece.token_ids) and len(piece.want):
            return logits[sent(piece.want, self.place)]
        return logits

    def _eager(
        self, piece: Piece, shape: Shape, states: StateTable, hidden: _Hidden | None
    ) -> tuple[torch.Tensor, Addend]:
        buffer = self._buffer()
        buffer.fill(piece, shape)
        return self._layers(buffer.views(shape), states, hidden)

    def _layers(self, rows: Rows, states: StateTable, hidden: _Hidden | None) -> tuple[torch.Tensor, Addend]:
        assert isinstance(states, CudaStateTable)
        x = self.room("x0", rows.shape.rows, self.width, dtype=torch.float32)
        norm = self.norms["embedding_norm"]
        given = (rows.token_ids, rows.owners, rows.slots, states.drawn)
        # it waits for the whole step before: kernels behind it read states before the one in front of them has ended
        embed_rows(*given, self.embedding, norm, self.eps, x, overlap=False)
        with exact_products(self.place):
            return self.trunk(x, rows, states, hidden)

    def _logits(self, x: torch.Tensor, y: Addend, rows: Rows) -> torch.Tensor:
        out = self.room("logits", rows.shape.wanted, self.vocab, dtype=torch.float32, most=MOST_WANTED)
        if rows.shape.wanted:
            self._head(x, y, rows.want, out)
        return out

    def _head(self, x: torch.Tensor, y: Addend, want: torch.Tensor, out: torch.Tensor) -> None:
        normed = self.room("normed", len(want), self.width, most=MOST_WANTED)
        norm_rows(x, y, want, self.norms["output_norm"], self.output_eps, normed, overlap=self.overlap)
        with exact_products(self.place):
            self.head(normed, out, overlap=self.overlap)

    def _each_logits(self, x: torch.Tensor, y: Addend, piece: Piece, out: np.ndarray) -> None:
        """Logits of any number of wanted rows, MOST_WANTED at a time, into host memory."""
        for first in range(0, len(piece.want), MOST_WANTED):
            some = piece.want[first : first + MOST_WANTED]
            want = sent(some.astype(np.int32), self.place)
            logits = torch.empty((len(some), self.vocab), dtype=torch.float32, device=self.place)
            self._head(x, y, want, logits)
            out[piece.places[first : first + MOST_WANTED]] = logits.cpu().numpy()

    def _buffer(self) -> RowBuffer:
        if self._rows is None:
            self._rows = RowBuffer(self.most_rows, self.place)
        return self._rows

    # -- graphs

    def _graph(self, shape: Shape, states: StateTable) -> tuple[Any, torch.Tensor, Rows]:
        """The captured launch of a shape on these states, its logits and rows; captured now where it is the first."""
        assert isinstance(states, CudaStateTable)
        if shape not in states.graphs:
            states.graphs[shape] = self._capture(shape, states)
        found: tuple[Any, torch.Tensor, Rows] = states.graphs[shape]
        return found

    def _capture(self, shape: Shape, states: StateTable) -> tuple[Any, torch.Tensor, Rows]:
        buffer = self._buffer()
        buffer.fill(nobody(shape), shape)
        rows = buffer.views(shape)

        def launch() -> torch.Tensor:
            x, y = self._layers(rows, states, None)
            return self._logits(x, y, rows)

        logits = launch()  # compiles what is not compiled yet, and lets the libraries make their handles
        torch.cuda.synchronize()
        assert isinstance(states, CudaStateTable)
        if states.pool is None:
            states.pool = torch.cuda.graph_pool_handle()
        return captured(launch, states.pool), logits, rows

    @on_its_card
    def capture_decoding(self, states: StateTable) -> None:
        """Capture every decode bucket that these states can need, so that no request waits for it."""
        sizes = [size for size in DECODE_BUCKETS if size < states.slots]
        sizes.append(next((size for size in DECODE_BUCKETS if size >= states.slots), DECODE_BUCKETS[-1]))
        with self._lock:
            for size in reversed(sizes):
                self._graph(Shape(True, size, size, size), states)

    def describe(self) -> dict[str, Any]:
        """The card, the picks with their reasons, and where memory goes."""
        picks = {group.key: group.describe() for group in (*self.groups, self.head)}
        return {
            "device": "cuda",
            "card": torch.cuda.get_device_name(self.place),
            "dtype": self.dtype,
            "weight_bytes": self.weight_bytes + self.embedding.nbytes,
            "state_bytes": self.state_spec.slot_bytes,
            "workspace_bytes": self.workspace_bytes,
            "picks": list(picks.values()),
        }


class _Hidden:
    """Copies of the residual stream that were asked for, row by row of the batch a piece was cut from."""

    def __init__(self, arrays: Mapping[int, np.ndarray], piece: Piece) -> None:
        self._arrays, self._rows = arrays, piece.rows

    def __call__(self, layer: int, x: torch.Tensor, y: Addend | None) -> None:
        """What enters a layer, not yet added up."""
        if layer in self._arrays:
            whole = x if y is None else (y if isinstance(y, Added) else Added(y)).to(x)
            self._arrays[layer][self._rows] = whole[: len(self._rows)].cpu().numpy()
