"""Residual streams kept small for float16, whose largest value RWKV-4 to 6 pass in late layers.

The stream is halved after every so many layers. What is added to it later, the outputs of the products
``time_mix.output`` and ``channel_mix.value``, comes from weights that were divided by as much. Both are powers of two, and
norms do not see the scale of what they norm: with their epsilons divided by its square the answers are the same. Float32
and bfloat16 hold the stream as it is, so on the CPU there is nothing to do but to undo what a file did.
"""

from __future__ import annotations

RESCALED = ("time_mix.output.weight", "channel_mix.value.weight")
"""Our names, after ``layers.N.``, of the weights whose outputs are added to the stream."""


def scale_of_stream(layer: int, every: int) -> float:
    """By how much the stream, and the weights that add to it, are multiplied in a layer; ``every`` 0: never."""
    return 0.5 ** (layer // every) if every else 1.0
