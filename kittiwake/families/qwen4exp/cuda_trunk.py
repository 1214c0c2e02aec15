"""The layers on a card, from n-gram layer to n-gram layer, and the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kittiwake.families.qwen4exp.blocks import Taker, frequencies
from kittiwake.families.qwen4exp.cuda_blocks import (
    CudaAttention,
    CudaBlock,
    CudaDelta,
    CudaExperts,
    CudaNgram,
    CudaStreamMix,
    Launch,
)
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.layers.cuda_experts import CudaExpertGroup
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.ops.block_attention.triton import turn_rows
from kittiwake.ops.hyper_mix.triton import combine_and_norm, combine_streams, norm_wanted, open_streams

Pending = tuple[torch.Tensor, torch.Tensor] | None
"""The output of the block before [N, C] and the logits of its shares [N, S], not yet added to the streams."""
Copies = Callable[[int, Launch], None]
"""Takes a copy of the streams that enter a layer."""


class _Layer:
    """One layer's blocks."""

    def __init__(self, index: int, g: Geometry, element: torch.dtype, place: torch.device) -> None:
        prefix, where = f"layers.{index}.", (g, element, place)
        ranks = [rank for rank, ngram in enumerate(g.ngrams) if ngram.layer == index]
        self.ngram = CudaNgram(f"{prefix}ngram.", ranks[0], *where) if ranks else None
        self.token_mix = CudaStreamMix(f"{prefix}token_mix.", *where)
        self.mixer: CudaDelta | CudaAttention
        if index in g.attention_layers:
            self.mixer = CudaAttention(f"{prefix}attention.", g.attention_layers.index(index), *where)
        else:
            self.mixer = CudaDelta(f"{prefix}delta.", g.delta_layers.index(index), *where)
        self.channel_mix = CudaStreamMix(f"{prefix}channel_mix.", *where)
        self.experts = CudaExperts(prefix, *where)

    @property
    def blocks(self) -> list[CudaBlock]:
        """Every block of the layer."""
        first: list[CudaBlock] = [] if self.ngram is None else [self.ngram]
        return [*first, self.token_mix, self.mixer, self.channel_mix, self.experts]


class CudaTrunk:
    """Embedding, layers, last mix of the streams and head: their weights, and what they launch."""

    def __init__(self, g: Geometry, element: torch.dtype, place: torch.device) -> None:
        self._g = g
        self.embedding = torch.zeros((g.vocab_size, g.width), dtype=element, device=place)
        self._layers = [_Layer(index, g, element, place) for index in range(g.layers)]
        self._output_mix = CudaStreamMix("output_mix.", g, element, place, has_inject=False)
        self.head = CudaGroup([CudaProduct("head.weight", g.width, g.vocab_size)], element, place)
        blocks = [*(block for layer in self._layers for block in layer.blocks), self._output_mix]
        self.groups = [*(group for block in blocks for group in block.groups), self.head]
        self.experts: list[CudaExpertGroup] = [layer.experts.routed for layer in self._layers]
        self.takers = self._all_takers(blocks)
        """Name of a tensor → what takes it in."""
        self._frequencies = frequencies(g).to(place)
        self._borders = [0, *(ngram.layer for ngram in g.ngrams), g.layers]
        """The layers of each segment lie from one of these to the next."""

    def _all_takers(self, blocks: list[CudaBlock]) -> dict[str, Taker]:
        def take_embedding(tensor: torch.Tensor) -> None:
            self.embedding.copy_(tensor)

        takers: dict[str, Taker] = {"embedding.weight": take_embedding}
        takers["head.weight"] = partial(self.head.load, "head.weight")
        for block in blocks:
            takers |= block.takers
        return takers

    @property
    def segments(self) -> int:
        """Into how many parts a forward is cut: before every n-gram layer."""
        return len(self._borders) - 1

    def run_segment(self, segment: int, launch: Launch, copies: Copies | None) -> None:
        """The layers from one n-gram layer to the next; nothing is pending at either end."""
        g, rows, overlap = self._g, launch.rows, launch.overlap
        x = launch.get("x", g.stream_width)
        if segment == 0:
            # it waits for the whole step before: kernels behind it read states before the one in front of them has ended
            open_streams(
                rows.token_ids, rows.owners, rows.slots, launch.states.drawn, self.embedding, g.streams, x,
                overlap=False,
            )  # fmt: skip
            if launch.attention is not None:
                turns = launch.attention[0].turns
                turn_rows(rows.positions, self._frequencies, g.index_ratio, turns, overlap=overlap)
        pending: Pending = None
        for index in range(self._borders[segment], self._borders[segment + 1]):
            if copies is not None:
                pending = self._settle(launch, pending)
                copies(index, launch)
            layer = self._layers[index]
            if layer.ngram is not None:
                assert launch.embedded is not None
                layer.ngram(launch, launch.embedded)
            pending = self._run_layer(layer, launch, pending)
        self._settle(launch, pending)
        if copies is not None and segment == self.segments - 1:
            copies(g.layers, launch)

    def _run_layer(self, layer: _Layer, launch: Launch, pending: Pending) -> Pending:
        """One layer on what the block before left; returns the same of the experts."""
        mixed, inject = self._mix(layer.token_mix, launch, pending)
        pending = layer.mixer(launch, mixed), inject
        mixed, inject = self._mix(layer.channel_mix, launch, pending)
        return layer.experts(launch, mixed), inject

    def _mix(self, mix: CudaStreamMix, launch: Launch, pending: Pending) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what is pending to the streams, and mix them: the next block's input, and logits of its shares."""
        g = self._g
        x, normed = launch.get("x", g.stream_width), launch.get("normed", g.stream_width)
        y, inject = pending if pending is not None else (None, None)
        combine_and_norm(x, y, inject, g.streams, mix.norm, g.norm_eps, normed, overlap=launch.overlap)
        return mix(launch, normed)

    def _settle(self, launch: Launch, pending: Pending) -> Pending:
        """Add what is pending to the streams; nothing is then."""
        if pending is not None:
            x = launch.get("x", self._g.stream_width)
            combine_streams(x, *pending, self._g.streams, overlap=launch.overlap)
        return None

    def logits(self, launch: Launch, want: torch.Tensor, out: torch.Tensor) -> None:
        """Float32 [W, vocab] of the wanted rows: their streams mixed, and the head."""
        g, overlap = self._g, launch.overlap
        x, normed = launch.get("x", g.stream_width), launch.rooms.get("normed", len(want), g.stream_width)
        norm_wanted(x, want, g.streams, self._output_mix.norm, g.norm_eps, normed, overlap=overlap)
        mixed, _ = self._output_mix(launch, normed)
        self.head(mixed, out, overlap=overlap)
