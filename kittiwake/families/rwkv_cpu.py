"""What every RWKV's model on the CPU has in common: its weights' places, the embedding, the walk through the layers, the head.

A version adds its layers: which weights they hold, and what a layer does to the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateSpec, StateTable
from kittiwake.families.canonical import check_finite
from kittiwake.families.contract import ModelConfig
from kittiwake.families.rwkv_names import Shapes
from kittiwake.layers.linear import LinearGroup, Product, Workspace, padded, threads_in_force
from kittiwake.layers.probe import pick_products
from kittiwake.ops.matmul.cpu import activate_columns
from kittiwake.ops.shift_mix.cpu import PARALLEL_VALUES, embed_rows, norm_rows, shift_mix
from kittiwake.progress import Progress

MakeGroup = Callable[[Sequence[Product]], LinearGroup]
"""Makes a group of products with the picks, the storage and the threads of the model."""
Change = Callable[[np.ndarray], np.ndarray]
"""What a vector as stored becomes for the forward, float32 [C] both."""


def share_of_the_token_before(kept: np.ndarray) -> np.ndarray:
    """Up to RWKV-5 a token shift stores the share of the token itself; the shift works with the rest, 1 - kept."""
    return np.float32(1) - kept


class RwkvCpuLayer:
    """Weights of one layer as its forward wants them; ``prefix`` is what the names of its tensors begin with."""

    def __init__(self, index: int, width: int) -> None:
        self.prefix = f"layers.{index}."
        self.groups: list[LinearGroup] = []
        """Every group of products."""
        self._vectors: dict[str, tuple[np.ndarray, Change | None]] = {}
        self.time_norm = self.vectors(width, "time_norm.weight", "time_norm.bias")
        self.channel_norm = self.vectors(width, "channel_norm.weight", "channel_norm.bias")

    def vectors(self, width: int, *names: str, change: Change | None = None) -> np.ndarray:
        """Float32 [len(names), width], whose rows the tensors of these names are copied to, changed if so wanted."""
        rows = np.zeros((len(names), width), dtype=np.float32)
        self._vectors |= {name: (row, change) for name, row in zip(names, rows, strict=True)}
        return rows

    def take(self, name: str, values: np.ndarray) -> None:
        """Copy a vector [C] to its row; ``name`` is ours, without the prefix."""
        row, change = self._vectors[name]
        row[:] = values if change is None else change(values)

    def group(self, make: MakeGroup, *products: Product) -> LinearGroup:
        """A group of products, which from now on is one of this layer's."""
        self.groups.append(make(products))
        return self.groups[-1]


Layer = TypeVar("Layer", bound=RwkvCpuLayer)


class Rows:
    """The rows of one forward on their way through the layers, and the states of their sequences."""

    def __init__(self, batch: Batch, states: StateTable, workspace: Workspace, width: int) -> None:
        self.count = batch.rows
        self.starts, self.slots = batch.starts, batch.slots
        self.owner = np.repeat(np.arange(len(batch.slots)), np.diff(batch.starts))
        """int64 [N]: the sequence of each row."""
        self.width = width
        self.state = states.part
        """``state(name)`` is [L, S, *shape], read and written in place."""
        self._workspace = workspace
        self.x = self.get("x", width)
        """The residual stream [padded rows, C]; what the block before put out is not added yet."""
        self._normed = self.get("normed", width)

    def get(self, name: str, columns: int) -> np.ndarray:
        """A float32 buffer [padded rows, columns] of this name; its rows hold what they held."""
        return self._workspace.get(name, self.count, columns)

    def product(self, group: LinearGroup, x: np.ndarray, name: str) -> np.ndarray:
        """The products of a group, written to the buffer of this name."""
        return group(x, self.count, self.get(name, group.columns))

    def shift(
        self, y: np.ndarray, norm: np.ndarray, eps: np.float32, state: np.ndarray, mixes: np.ndarray, name: str
    ) -> np.ndarray:
        """Add the block before to the stream; norm, shift and mix it: [padded rows, M C] in the buffer of this name.

        norm [2, C] is weight and bias; state [S, C] holds the rows before and is updated; mixes is [M, C].
        """
        out = self.get(name, mixes.shape[0] * self.width)
        shift_mix(
            self.x, y, norm[0], norm[1], eps, self.starts, self.slots, self.owner, state, mixes, self._normed, out
        )
        return out


class RwkvCpuModel(ABC, Generic[Layer]):
    """An RWKV on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: Shapes,
        state_spec: StateSpec,
        dtype: str,
        threads: int,
        progress: Progress | None,
    ) -> None:
        """``shapes`` are the canonical tensors: matrices are products, but for the embedding, vectors are a layer's."""
        self.config, self.state_spec, self.device = config, state_spec, "cpu"
        self.can_run_ahead = False
        self.dtype, self.threads = dtype, threads
        self._eps = np.float32(config.extra["norm_eps"])
        matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name != "embedding.weight"}
        picks = pick_products({(k, n) for n, k in matrices.values()}, threads, progress)

        def group(products: Sequence[Product]) -> LinearGroup:
            return LinearGroup(products, picks, dtype, threads)

        width = config.width
        self._layers = [self.make_layer(index, group) for index in range(config.layers)]
        self._head = group([Product("head.weight", width, config.vocab_size, 0)])
        self._embedding = np.zeros((0, width), dtype=np.float32)
        self._norms = {name: np.zeros((2, width), dtype=np.float32) for name in ("embedding_norm", "output_norm")}
        self._all_groups = [*(group for layer in self._layers for group in layer.groups), self._head]
        self._groups = {product.name: group for group in self._all_groups for product in group.products}
        self._workspace = Workspace()

    @abstractmethod
    def make_layer(self, index: int, group: MakeGroup) -> Layer:
        """A layer that waits for its tensors; called by the constructor, when ``self.config`` is there."""

    @abstractmethod
    def run_layer(self, index: int, layer: Layer, rows: Rows, y: np.ndarray) -> np.ndarray:
        """One layer: y [padded rows, C] of the layer before is not added to ``rows.x`` yet (0 rows: nothing to add).

        Moves the states on, and returns the channel mix's output [padded rows, C], not yet added either.
        """

    @abstractmethod
    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """See :class:`kittiwake.families.contract.Model`."""

    def output_eps(self) -> np.float32:
        """Epsilon of the norm before the head."""
        return self._eps

    @property
    def weight_bytes(self) -> int:
        """Bytes of product weights a decode step reads."""
        return sum(group.nbytes for group in self._all_groups)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor; NaN and infinite weights are refused by name."""
        check_finite(name, tensor)
        if name in self._groups:
            self._groups[name].load(name, tensor)
        elif name == "embedding.weight":
            self._embedding = stored_rows(tensor, self.dtype)
        elif name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            self._layers[int(layer)].take(rest, tensor.float().numpy())
        else:
            norm, part = name.split(".")
            self._norms[norm][("weight", "bias").index(part)] = tensor.float().numpy()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every kernel a request can meet, or fetch it from the cache, so that no request waits for it."""
        states = StateTable(self.state_spec, 1)
        slot = states.allocate()
        many = PARALLEL_VALUES // self.config.width + 1  # rows from which the row kernels run on threads
        tell: Progress = progress if progress is not None else lambda what, done, total: None
        tell("preparing kernels", 0, 3)
        self.forward(Batch.pack([(slot, [0])]), states)
        tell("preparing kernels", 1, 3)
        self.forward(Batch.pack([(slot, [0] * many)]), states)
        tell("preparing kernels", 2, 3)
        activate_columns(np.zeros((1, 1), np.float32), 1, 0, 1, 0)
        tell("preparing kernels", 3, 3)

    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        """Run packed rows; see :class:`kittiwake.families.contract.Model`."""
        with self._workspace.lock, threads_in_force(self.threads):
            x, y = self._trunk(batch, states, hidden or {})
            states.positions[batch.slots] += np.diff(batch.starts)
            return self._logits(x, y, batch.want_rows)

    def _trunk(
        self, batch: Batch, states: StateTable, wanted: Mapping[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The residual stream and the last block's output, not yet added; both [padded rows, C]."""
        rows = Rows(batch, states, self._workspace, self.config.width)
        norm = self._norms["embedding_norm"]
        embed_rows(self._embedding, batch.token_ids, norm[0], norm[1], self._eps, rows.x)
        y = self._workspace.get("nothing", 0, self.config.width)  # nothing to add before the first layer
        for index, layer in enumerate(self._layers):
            if index in wanted:
                wanted[index][:] = rows.x[: rows.count] + y[: rows.count] if index else rows.x[: rows.count]
            y = self.run_layer(index, layer, rows, y)
        if len(self._layers) in wanted:
            wanted[len(self._layers)][:] = rows.x[: rows.count] + y[: rows.count]
        return rows.x, y

    def _logits(self, x: np.ndarray, y: np.ndarray, want_rows: np.ndarray) -> np.ndarray:
        """Float32 [W, vocab] of the wanted rows: last addition, output norm, head."""
        wanted = len(want_rows)
        out = np.empty((padded(wanted), self.config.vocab_size), dtype=np.float32)
        if wanted == 0:
            return out
        rows = self._workspace.get("wanted", wanted, self.config.width)
        rows[:wanted] = x[want_rows] + y[want_rows]
        norm = self._norms["output_norm"]
        norm_rows(rows, wanted, norm[0], norm[1], self.output_eps())
        return self._head(rows, wanted, out)[:wanted]

    def describe(self) -> dict[str, Any]:
        """Device, dtype, threads, and the pick of every shape of product."""
        picks = {}
        for group in self._all_groups:
            for row in group.describe():
                picks[row["depth"], row["columns"]] = row
        return {
            "device": "cpu",
            "dtype": self.dtype,
            "threads": self.threads,
            "weight_bytes": self.weight_bytes,
            "state_bytes": self.state_spec.slot_bytes,
            "products": list(picks.values()),
        }


def stored_rows(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """The embedding table as the kernels read it: mapped from its file, unless its values must change for ``dtype``.

    A bfloat16 table serves float32 weights as it is: a gathered row is widened exactly.
    """
    if dtype == "bf16" or tensor.dtype == torch.bfloat16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return tensor.to(torch.float32).contiguous().numpy()
