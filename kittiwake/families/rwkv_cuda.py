"""What RWKV-4, 5 and 6 share on CUDA: the walk through the layers, the gated channel mix, and float16's narrow range.

The residual stream is float32, which holds what float16 cannot, so it is never halved as other programs do. What could
pass float16's largest number is what one block adds to it: with float16 weights those of the two products that add to
the stream are divided by a power of two that grows with the layer, as published rescaled weights are, and what comes
out is multiplied by it in float32 when it is added. Both are exact, save for weights that become subnormal.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import torch

from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateSpec
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_model import Addend, Copies, CudaModel
from kittiwake.families.cuda_rows import Rows
from kittiwake.families.rwkv_cpu import Change
from kittiwake.families.rwkv_rescale import RESCALED, scale_of_stream
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.ops.shift_mix.triton import Added, commit_shifts, shift_mix

HALVED_EVERY = 6
"""Layers after which the weights that add to the stream are halved once more, with float16."""


class GatedCudaLayer:
    """Weights of one layer: its norms and its channel mix, to which a version adds its time mix."""

    def __init__(
        self,
        index: int,
        model: CudaModel,
        ffn: int,
        channel_mixes: tuple[str, str],
        change: Change | None = None,
    ) -> None:
        """``channel_mixes`` name the token shifts of key and receptance; ``change`` makes of them the share of the past."""
        self.prefix = f"layers.{index}."
        self.groups: list[CudaGroup] = []
        self.scale = 1 / scale_of_stream(index, HALVED_EVERY) if model.element == torch.float16 else 1.0
        """What the outputs of the products that add to the stream are multiplied by, their weights divided by it."""
        self._model = model
        self._vectors: dict[str, tuple[torch.Tensor, Change | None]] = {}
        width = model.width
        self.time_norm = self.vectors(width, "time_norm.weight", "time_norm.bias")
        self.channel_norm = self.vectors(width, "channel_norm.weight", "channel_norm.bias")
        self.channel_mixes = self.vectors(width, *(f"channel_mix.{mix}" for mix in channel_mixes), change=change)
        self.ffn_inputs = self.group(
            CudaProduct(f"{self.prefix}channel_mix.key.weight", width, ffn, 0, activation="relu2"),
            CudaProduct(f"{self.prefix}channel_mix.receptance.weight", width, width, 1, activation="sigmoid"),
        )
        self.ffn_value = self.group(CudaProduct(f"{self.prefix}channel_mix.value.weight", ffn, width))

    def group(self, *products: CudaProduct, behind: str = "") -> CudaGroup:
        """A group of products, which from now on is one of this layer's; ``behind`` as in :class:`CudaGroup`."""
        self.groups.append(CudaGroup(products, self._model.element, self._model.place, behind=behind))
        return self.groups[-1]

    def vectors(self, width: int, *names: str, change: Change | None = None) -> torch.Tensor:
        """Float32 [len(names), width], whose rows the tensors of these names are copied to, changed if so wanted."""
        rows = self._model.vector(len(names), width)
        for name, row in zip(names, rows, strict=True):
            self.place(name, row, change)
        return rows

    def place(self, name: str, row: torch.Tensor, change: Change | None = None) -> None:
        """Where the vector of a name goes, changed if so wanted."""
        self._vectors[name] = (row, change)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a vector [C] to its row; ``name`` is ours, without the prefix."""
        row, change = self._vectors[name]
        if change is None:
            row.copy_(tensor)
        else:
            row.copy_(torch.from_numpy(np.ascontiguousarray(change(tensor.float().cpu().numpy()))))


Layer = TypeVar("Layer", bound=GatedCudaLayer)


class GatedCuda(CudaModel, Generic[Layer]):
    """An RWKV whose channel mix is gated, on one CUDA device."""

    def __init__(
        self,
        config: ModelConfig,
        state_spec: StateSpec,
        dtype: str,
        *,
        place: torch.device | None = None,
    ) -> None:
        super().__init__(config, state_spec, dtype, place=place)
        self._layer_list = [self.make_layer(index) for index in range(config.layers)]
        self._by_name = {product.name: group for group in self.groups for product in group.products}
        self._ffn = int(config.extra["ffn"])

    @abstractmethod
    def make_layer(self, index: int) -> Layer:
        """A layer that waits for its tensors; called by the constructor."""

    @abstractmethod
    def time_mix(
        self, layer: Layer, index: int, shift: LayerShift, rows: Rows, states: CudaStateTable, out: torch.Tensor
    ) -> None:
        """From ``shift``, which gives the mixed rows, to the input of the layer's output product, written to ``out``."""

    @abstractmethod
    def output(self, layer: Layer) -> CudaGroup:
        """The product that closes the time mix."""

    def eps_at(self, index: int) -> float:
        """Epsilon of a layer's two norms."""
        return self.eps

    @property
    def inner(self) -> int:
        """Columns of the output product's input."""
        return self.width

    @property
    def groups(self) -> Iterator[CudaGroup]:
        """Every group but the head."""
        for layer in self._layer_list:
            yield from layer.groups

    def load_layer(self, name: str, tensor: torch.Tensor) -> None:
        """See :class:`CudaModel`."""
        _, index, rest = name.split(".", 2)
        layer = self._layer_list[int(index)]
        if name in self._by_name:
            self._by_name[name].load(name, tensor / layer.scale if rest in RESCALED and layer.scale != 1 else tensor)
        else:
            layer.take(rest, tensor)

    def trunk(
        self, x: torch.Tensor, rows: Rows, states: CudaStateTable, hidden: Copies | None
    ) -> tuple[torch.Tensor, Addend]:
        """All layers; see :class:`CudaModel`."""
        count, width, layers = rows.shape.rows, self.width, len(self._layer_list)
        out = self.room("out", count, self.inner)
        att, y = self.room("att", count, width), self.room("y", count, width)
        inner = self.outputs("hidden", count, self._ffn + width)
        mixed = self.room("mixed_ffn", count, width, lead=2)
        sequences = rows.shape.sequences
        # a bucket of sequences is less than twice as many as there are
        last = states.room("last", (2 * layers * 2 * max(states.slots, 1) * width,))
        last = last[: 2 * layers * sequences * width].view(2, layers, sequences, width)
        att_shifts, ffn_shifts = states.part("att_shift"), states.part("ffn_shift")
        stream = Stream(x, self.room("x1", count, width, dtype=torch.float32))
        for index, layer in enumerate(self._layer_list):
            if hidden is not None:
                hidden(index, stream.x, stream.added)
            eps = self.eps_at(index)
            shift = LayerShift(stream, rows, layer.time_norm, eps, att_shifts[index], last[0, index], self.overlap)
            self.time_mix(layer, index, shift, rows, states, out)
            self.output(layer)(out, att, overlap=self.overlap)
            stream.added = Added(att, None, layer.scale)
            shift = LayerShift(stream, rows, layer.channel_norm, eps, ffn_shifts[index], last[1, index], self.overlap)
            shift(layer.channel_mixes, mixed)
            layer.ffn_inputs(mixed, inner, overlap=self.overlap)
            layer.ffn_value(inner[:, : self._ffn], y, overlap=self.overlap)
            stream.added = Added(y, inner[:, self._ffn :], layer.scale)
        assert stream.added is not None
        if hidden is not None:
            hidden(layers, stream.x, stream.added)
        commit_shifts(last, att_shifts, ffn_shifts, rows.slots, overlap=self.overlap)
        return stream.x, stream.added


class Stream:
    """The residual stream, float32 [N, C], at one of two places in turn, and what is yet to be added to it."""

    def __init__(self, x: torch.Tensor, other: torch.Tensor) -> None:
        self.x, self.other = x, other
        self.added: Added | None = None


class LayerShift:
    """One add, norm and token shift of a layer: called once, with the mixes and where the mixed rows go."""

    def __init__(
        self,
        stream: Stream,
        rows: Rows,
        norm: torch.Tensor,
        eps: float,
        state: torch.Tensor,
        last: torch.Tensor,
        overlap: bool,
    ) -> None:
        self._stream, self._rows = stream, rows
        self._norm, self._eps = norm, eps
        self._state, self._last = state, last
        self._overlap = overlap

    def __call__(self, mixes: torch.Tensor, mixed: torch.Tensor, *, kept: torch.Tensor | None = None) -> None:
        """mixes [M, C] → mixed [M, N, C]; ``kept`` as in :func:`kittiwake.ops.shift_mix.triton.shift_kernel`."""
        stream, rows = self._stream, self._rows
        shift_mix(
            stream.x,
            stream.added,
            stream.other,
            self._norm,
            self._eps,
            mixes,
            self._state,
            rows.owners,
            rows.starts,
            rows.slots,
            mixed,
            self._last,
            overlap=self._overlap,
            kept=kept,
        )
        stream.x, stream.other = stream.other, stream.x
