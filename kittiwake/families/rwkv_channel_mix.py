"""The channel mix that RWKV-4, 5 and 6 share: a squared relu between two products, gated by a receptance.

    k = relu(Wk xk)^2        r = sigmoid(Wr xr)        y = r * (Wv k)

Source: RWKV-LM, RWKV-v4/src/model.py (``RWKV_ChannelMix``), the same up to RWKV-v6. RWKV-7 has no receptance.
"""

from __future__ import annotations

import numpy as np

from kittiwake.families.rwkv_cpu import Change, MakeGroup, Rows, RwkvCpuLayer
from kittiwake.families.rwkv_names import Shapes
from kittiwake.layers.linear import Product


def channel_mix_shapes(width: int, ffn: int, mixes: tuple[str, str]) -> Shapes:
    """Our name, without a layer's prefix → shape. ``mixes`` are the names of the token shifts of key and receptance."""
    return {f"channel_mix.{mix}": (width,) for mix in mixes} | {
        "channel_mix.key.weight": (ffn, width),
        "channel_mix.receptance.weight": (width, width),
        "channel_mix.value.weight": (width, ffn),
    }


class GatedChannelMix:
    """Weights of one layer's channel mix, which are part of the layer's."""

    def __init__(
        self,
        layer: RwkvCpuLayer,
        width: int,
        ffn: int,
        mixes: tuple[str, str],
        group: MakeGroup,
        change: Change | None = None,
    ) -> None:
        """``mixes`` as above; ``change`` makes the share of the token before of what is stored for them."""
        prefix = f"{layer.prefix}channel_mix."
        self._ffn = ffn
        self._norm = layer.channel_norm
        self._inputs = layer.group(
            group,
            Product(f"{prefix}key.weight", width, ffn, 0, "relu2"),
            Product(f"{prefix}receptance.weight", width, width, width, "sigmoid"),
        )
        self._value = layer.group(group, Product(f"{prefix}value.weight", ffn, width, 0))
        self._mixes = layer.vectors(width, *(f"channel_mix.{mix}" for mix in mixes), change=change)

    def __call__(self, rows: Rows, y: np.ndarray, eps: np.float32, shift: np.ndarray) -> np.ndarray:
        """y [padded rows, C] of the time mix, not yet added to the stream → the channel mix's, not yet added either.

        shift [S, C] holds the rows before and is updated.
        """
        mixed = rows.shift(y, self._norm, eps, shift, self._mixes, "mixed_ffn")
        hidden = rows.product(self._inputs, mixed, "hidden")
        y = rows.product(self._value, hidden, "y")
        y *= hidden[:, self._ffn :]
        return y
