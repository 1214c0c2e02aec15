"""RWKV-7 ("x070") for training: parameters under BlinkDL's names, a flat-token forward pass, export to `.pth`.

Activations are [tokens, width] with whole sequences one after the other; `keep` [tokens, 1] is 0 at the first token of
a sequence and 1 elsewhere, so the token shift does not reach across. Weights are float32, matrix products bfloat16 (or
float32 on the CPU). Maths and shapes: the RWKV-7 paper (arXiv 2503.14456); start values: its published recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wkv7 import HEAD, wkv7

GROUP_NORM_EPS = 64e-5


@dataclass(frozen=True)
class Config:
    """Sizes of the model; `rank_*` are those of the low-rank pairs."""

    layers: int = 8
    width: int = 256
    vocabulary: int = 6144
    rank_w: int = 16
    rank_a: int = 16
    rank_v: int = 16
    rank_g: int = 32
    ffn: int = 4

    @property
    def heads(self) -> int:
        """Number of heads of 64."""
        return self.width // HEAD


def block_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Names (below `blocks.N.`) and shapes of one block, in the order the forward pass takes them."""
    width = c.width
    vector = (1, 1, width)
    shapes: dict[str, tuple[int, ...]] = {
        "ln1.weight": (width,),
        "ln1.bias": (width,),
        "ln2.weight": (width,),
        "ln2.bias": (width,),
    }
    shapes |= {f"att.{n}": vector for n in "x_r x_w x_k x_v x_a x_g w0 a0 v0 k_k k_a".split()}
    for name, rank in (("w", c.rank_w), ("a", c.rank_a), ("v", c.rank_v), ("g", c.rank_g)):
        shapes |= {f"att.{name}1": (width, rank), f"att.{name}2": (rank, width)}
    shapes["att.r_k"] = (c.heads, HEAD)
    shapes |= {f"att.{n}.weight": (width, width) for n in "receptance key value output".split()}
    shapes |= {"att.ln_x.weight": (width,), "att.ln_x.bias": (width,), "ffn.x_k": vector}
    shapes |= {"ffn.key.weight": (c.ffn * width, width), "ffn.value.weight": (width, c.ffn * width)}
    return shapes


def _orthogonal(shape: tuple[int, int], scale: float) -> Tensor:
    gain = math.sqrt(shape[0] / shape[1]) if shape[0] > shape[1] else 1.0
    return nn.init.orthogonal_(torch.empty(shape), gain=gain * scale)


def initial_block(c: Config, layer: int) -> dict[str, Tensor]:
    """Start values of block `layer`: ramps for token shift and decay, zero output projections, small low-rank pairs."""
    width = c.width
    depth = layer / max(c.layers - 1, 1)  # 0 .. 1
    height = 1.0 - layer / c.layers  # 1 .. almost 0
    channel = torch.arange(width, dtype=torch.float32)
    ramp = channel / width
    linear = channel / (width - 1) - 0.5
    in_head = (channel % HEAD) / ((HEAD - 1) / 2) - 1.0
    zigzag = in_head * in_head.abs()
    decay = -6.0 + 6.0 * (channel / (width - 1)) ** (1.0 + depth**0.3)
    bound = width**-0.5
    values = {
        "ln1.weight": torch.ones(width),
        "ln1.bias": torch.zeros(width),
        "ln2.weight": torch.ones(width),
        "ln2.bias": torch.zeros(width),
        "att.w0": decay + 0.5 + 2.5 * zigzag,
        "att.a0": -0.19 + 0.3 * zigzag + 0.4 * linear,
        "att.v0": 0.73 - 0.4 * linear,
        "att.k_k": 0.71 - 0.1 * linear,
        "att.k_a": torch.full((width,), 1.02),
        "att.r_k": torch.full((c.heads, HEAD), -0.04),
        "att.receptance.weight": torch.empty(width, width).uniform_(-0.5 * bound, 0.5 * bound),
        "att.key.weight": torch.empty(width, width).uniform_(-0.05 * bound, 0.05 * bound),
        "att.value.weight": torch.empty(width, width).uniform_(-0.5 * bound, 0.5 * bound),
        "att.output.weight": torch.zeros(width, width),
        "att.ln_x.weight": torch.full((width,), ((1 + layer) / c.layers) ** 0.7),
        "att.ln_x.bias": torch.zeros(width),
        "ffn.x_k": 1.0 - ramp ** (height**4),
        "ffn.key.weight": torch.empty(c.ffn * width, width).uniform_(-0.5 * bound, 0.5 * bound),
        "ffn.value.weight": torch.zeros(width, c.ffn * width),
    }
    for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
        values[f"att.x_{name}"] = 1.0 - ramp ** (power * height)
    for name, rank in (("w", c.rank_w), ("a", c.rank_a), ("v", c.rank_v), ("g", c.rank_g)):
        values[f"att.{name}1"] = torch.zeros(width, rank)
        values[f"att.{name}2"] = _orthogonal((rank, width), 0.1)
    shapes = block_shapes(c)
    return {name: values[name].reshape(shapes[name]).contiguous() for name in shapes}


def _shift(x: Tensor, keep: Tensor) -> Tensor:
    """Row n gets row n - 1, or zeros at the start of a sequence."""
    return F.pad(x[:-1], (0, 0, 1, 0)) * keep


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, 1e-5).to(dtype)


def _dropout(x: Tensor, rate: Tensor | None) -> Tensor:
    if rate is None:
        return x
    return (x * ((torch.rand(x.shape, device=x.device) >= rate) / (1.0 - rate))).to(x.dtype)


def block(
    x: Tensor, v_first: Tensor, keep: Tensor, residual_value: Tensor, rate: Tensor | None, parameters: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """One block. x, v_first: [tokens, width]; residual_value: 0 in block 0, else 1; rate: dropout on both branches.

    Returns the new x and the value (block 0's is the other blocks' `v_first`).
    """
    (
        ln1_w, ln1_b, ln2_w, ln2_b, x_r, x_w, x_k, x_v, x_a, x_g, w0, a0, v0, k_k, k_a,
        w1, w2, a1, a2, v1, v2, g1, g2, r_k, receptance, key, value, output, ln_x_w, ln_x_b,
        ffn_x_k, ffn_key, ffn_value,
    ) = parameters  # fmt: skip
    dtype = x.dtype
    tokens, width = x.shape
    heads = width // HEAD
    x_r, x_w, x_k, x_v, x_a, x_g, w0, a0, v0, k_k, k_a, ffn_x_k = (
        p.view(width) for p in (x_r, x_w, x_k, x_v, x_a, x_g, w0, a0, v0, k_k, k_a, ffn_x_k)
    )

    xn = _layer_norm(x, ln1_w, ln1_b, dtype)
    dx = _shift(xn, keep) - xn
    r = F.linear((xn + dx * x_r).to(dtype), receptance.to(dtype))
    k = F.linear((xn + dx * x_k).to(dtype), key.to(dtype))
    v = F.linear((xn + dx * x_v).to(dtype), value.to(dtype))
    # First halves of the low-rank pairs. (x + (prev - x) m) @ W = x @ (W (1 - m)) + prev @ (W m), and the shift
    # commutes with the product, so one product of xn serves all four pairs.
    mixes = [(x_w, w1), (x_a, a1), (x_v, v1), (x_g, g1)]
    now = torch.cat([matrix * (1.0 - mix).unsqueeze(1) for mix, matrix in mixes], 1)
    before = torch.cat([matrix * mix.unsqueeze(1) for mix, matrix in mixes], 1)
    both = xn @ torch.cat([now, before], 1).to(dtype)
    low = (both[:, : now.shape[1]] + _shift(both[:, now.shape[1] :], keep)).float()
    low_w, low_a, low_v, low_g = low.split([w1.shape[1], a1.shape[1], v1.shape[1], g1.shape[1]], 1)

    w_raw = (w0 + torch.tanh(low_w).to(dtype) @ w2.to(dtype)).to(dtype)
    gate_a = torch.sigmoid(a0 + low_a.to(dtype) @ a2.to(dtype))
    gate_v = torch.sigmoid(v0 + low_v.to(dtype) @ v2.to(dtype)) * residual_value
    g = torch.sigmoid(low_g).to(dtype) @ g2.to(dtype)
    v = (v + (v_first - v) * gate_v).to(dtype)
    kk = F.normalize((k * k_k).float().view(tokens, heads, HEAD), dim=-1, eps=1e-12).view(tokens, width)
    k = (k * (1.0 + (gate_a - 1.0) * k_a)).to(dtype)

    y, _, _ = wkv7(r, w_raw, k, v, (-kk).to(dtype), (kk * gate_a).to(dtype))
    y = y.float().view(tokens, heads, HEAD)
    centred = y - y.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + GROUP_NORM_EPS)
    y = y.view(tokens, width) * ln_x_w + ln_x_b
    bonus = (r.float() * k.float() * r_k.view(width)).view(tokens, heads, HEAD).sum(-1, keepdim=True)
    y = y + (bonus * v.float().view(tokens, heads, HEAD)).view(tokens, width)
    x = x + _dropout(F.linear((y * g).to(dtype), output.to(dtype)), rate)

    xn = _layer_norm(x, ln2_w, ln2_b, dtype)
    hidden = F.linear((xn + (_shift(xn, keep) - xn) * ffn_x_k).to(dtype), ffn_key.to(dtype))
    x = x + _dropout(F.linear(torch.relu(hidden).square(), ffn_value.to(dtype)), rate)
    return x, v


def head_loss(x: Tensor, weight: Tensor, bias: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood in nats of `targets` [tokens]."""
    logits = F.linear(_layer_norm(x, weight, bias, x.dtype), head.to(x.dtype))
    return F.cross_entropy(logits.float(), targets)


class Model(nn.Module):
    """The parameters, under names with '.' written '/', and the forward pass."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.bfloat16) -> None:
        """Draw start values; `dtype` is that of activations and matrix products."""
        super().__init__()
        self.config, self.dtype = config, dtype
        c = config
        start: dict[str, Tensor] = {"emb.weight": torch.empty(c.vocabulary, c.width).normal_(0.0, 0.02)}
        start |= {"blocks.0.ln0.weight": torch.ones(c.width), "blocks.0.ln0.bias": torch.zeros(c.width)}
        for layer in range(c.layers):
            start |= {f"blocks.{layer}.{name}": value for name, value in initial_block(c, layer).items()}
        start |= {"ln_out.weight": torch.ones(c.width), "ln_out.bias": torch.zeros(c.width)}
        start["head.weight"] = _orthogonal((c.vocabulary, c.width), 0.5)
        self.names = [
            name for name in start if not name.startswith(("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"))
        ]
        for name in self.names:
            self.register_parameter(name.replace(".", "/"), nn.Parameter(start[name]))
        # Block 0 has no value residual: stand-ins keep all blocks alike; they are neither trained nor saved.
        self.stand_in = [nn.Parameter(start[f"blocks.0.att.{n}"]) for n in ("v0", "v1", "v2")]
        self.order = list(block_shapes(c))
        self.run_block = block
        self.run_head_loss = head_loss

    def tensor(self, name: str) -> nn.Parameter:
        """The parameter of that BlinkDL name."""
        return self._parameters[name.replace(".", "/")]  # type: ignore[return-value]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        self.stand_in = [nn.Parameter(fn(p.data)) for p in self.stand_in]
        return super()._apply(fn, recurse)

    def block_parameters(self, layer: int) -> list[Tensor]:
        """Parameters of one block in the order `block` takes them."""
        stand_in = dict(zip(("att.v0", "att.v1", "att.v2"), self.stand_in, strict=True)) if layer == 0 else {}
        return [stand_in[n] if n in stand_in else self.tensor(f"blocks.{layer}.{n}") for n in self.order]

    def hidden(self, tokens: Tensor, keep: Tensor, rate: Tensor | None = None, compiled: bool = False) -> Tensor:
        """Residual stream [tokens, width] after the last block; tokens: [tokens]."""
        run = self.run_block if compiled else block
        x = F.embedding(tokens, self.tensor("emb.weight"))
        x = _layer_norm(x, self.tensor("blocks.0.ln0.weight"), self.tensor("blocks.0.ln0.bias"), self.dtype)
        v_first = torch.zeros_like(x, requires_grad=torch.is_grad_enabled())
        on = torch.ones(self.config.layers, device=x.device)
        on[0] = 0.0
        for layer in range(self.config.layers):
            x, v = run(x, v_first, keep, on[layer], rate, self.block_parameters(layer))
            if layer == 0:
                v_first = v
        return x

    def loss(
        self, tokens: Tensor, targets: Tensor, keep: Tensor, rate: Tensor | None = None, compiled: bool = False
    ) -> Tensor:
        """Mean loss in nats a token."""
        run = self.run_head_loss if compiled else head_loss
        x = self.hidden(tokens, keep, rate, compiled)
        return run(x, self.tensor("ln_out.weight"), self.tensor("ln_out.bias"), self.tensor("head.weight"), targets)

    def logits(self, x: Tensor) -> Tensor:
        """Logits in float32 of rows of `hidden`."""
        x = _layer_norm(x, self.tensor("ln_out.weight"), self.tensor("ln_out.bias"), self.dtype)
        return F.linear(x, self.tensor("head.weight").to(self.dtype)).float()

    def export(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Weights on the CPU under BlinkDL's names."""
        return {name: self.tensor(name).detach().to("cpu", dtype).contiguous().clone() for name in self.names}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over weights with exactly the names and shapes of `export`."""
        assert set(weights) == set(self.names), set(weights) ^ set(self.names)
        with torch.no_grad():
            for name in self.names:
                self.tensor(name).copy_(weights[name].float())


def keep_mask(tokens: int, steps: int, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """The `keep` mask for sequences of `steps` tokens."""
    keep = torch.ones(tokens, 1, device=device, dtype=dtype)
    keep[::steps] = 0
    return keep
