"""RWKV-7 in plain eager PyTorch: what one gets by writing the equations down.

Products, norms and mixes take all tokens of all sequences at once; the recurrence is a loop over tokens. Weights and
activations in the type asked for, the state in float32. Source: BlinkDL/RWKV-LM, RWKV-v7/rwkv_v7_demo.py (equations).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from kittiwake.bench.peers.contract import GROUP_NORM_EPS, NORM_EPS, Peer, PeerTask

DECAY_SCALE = 0.606530659712633  # exp(-0.5)


def open_peer(task: PeerTask) -> Peer:
    """The model, its weights on the device."""
    return EagerTorch(task)


class EagerTorch:
    """The model and the states of its sequences."""

    is_batched = True

    def __init__(self, task: PeerTask) -> None:
        self.version = f"torch {torch.__version__}, eager"
        self._shape, self._device, self._dtype = task.shape, task.device, task.dtype
        weights = {name: task.weight(name) for name in task.weights}
        self._top = {name: tensor for name, tensor in weights.items() if not name.startswith("blocks.")}
        self._blocks: list[dict[str, Tensor]] = [{} for _ in range(task.shape.layers)]
        for name, tensor in weights.items():
            if name.startswith("blocks."):
                _, layer, rest = name.split(".", 2)
                self._blocks[int(layer)][rest] = tensor

    def start(self, batch: int) -> None:
        """Zero states: token shifts [B, C] and matrices [B, H, V, K]."""
        shape = self._shape
        layers, size = range(shape.layers), shape.head_size
        self._att_shift = [self._zeros(batch, shape.width) for _ in layers]
        self._ffn_shift = [self._zeros(batch, shape.width) for _ in layers]
        self._wkv = [self._zeros(batch, shape.heads, size, size, dtype=torch.float32) for _ in layers]

    def _zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(sizes, dtype=dtype or self._dtype, device=self._device)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, vocab] after the last token of each sequence; ids are [B, T]."""
        with torch.no_grad():
            return self._forward(ids)

    def _forward(self, ids: Tensor) -> Tensor:
        x = self._norm(F.embedding(ids, self._top["emb.weight"]), self._blocks[0], "ln0")  # [B, T, C]
        v_first: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            normed = self._norm(x, block, "ln1")
            mixed, v_first = self._time_mix(layer, block, normed, v_first)
            x = x + mixed
            normed = self._norm(x, block, "ln2")
            x = x + self._channel_mix(layer, block, normed)
        return F.linear(self._norm(x[:, -1], self._top, "ln_out"), self._top["head.weight"])

    def _norm(self, x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], NORM_EPS)

    def _time_mix(
        self, layer: int, p: Mapping[str, Tensor], x: Tensor, v_first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        by_head = (batch, tokens, self._shape.heads, self._shape.head_size)
        change = _shifted(x, self._att_shift[layer]) - x
        self._att_shift[layer] = x[:, -1]
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, change, p[f"att.x_{letter}"]) for letter in "rwkvag")

        r = F.linear(x_r, p["att.receptance.weight"])
        key = F.linear(x_k, p["att.key.weight"])
        v = F.linear(x_v, p["att.value.weight"])
        w = p["att.w0"] + torch.tanh(x_w @ p["att.w1"]) @ p["att.w2"]
        decay = torch.exp(-DECAY_SCALE * torch.sigmoid(w.float()))
        rate = torch.sigmoid(p["att.a0"] + x_a @ p["att.a1"] @ p["att.a2"])
        gate = torch.sigmoid(x_g @ p["att.g1"]) @ p["att.g2"]
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(p["att.v0"] + x_v @ p["att.v1"] @ p["att.v2"])
        removal = F.normalize((key * p["att.k_k"]).view(by_head), dim=-1)
        k = (key * (1 + (rate - 1) * p["att.k_a"])).view(by_head)
        r, v_heads = r.view(by_head), v.view(by_head)

        y = self._recurrence(layer, r, decay.view(by_head), k, v_heads, -removal, removal * rate.view(by_head))
        y = F.group_norm(
            y.view(-1, width), self._shape.heads, p["att.ln_x.weight"], p["att.ln_x.bias"], GROUP_NORM_EPS
        ).view(by_head)
        y = y + (r * k * p["att.r_k"]).sum(-1, keepdim=True) * v_heads
        return F.linear(y.view(batch, tokens, width) * gate, p["att.output.weight"]), v_first

    def _recurrence(self, layer: int, r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """S' = S diag(decay) + (S a) b^T + v k^T, y = S' r, token by token; rows are [B, T, H, K] or [B, T, H, V]."""
        state, rows = self._wkv[layer], []
        r, k, v, a, b = (part.float() for part in (r, k, v, a, b))
        for t in range(r.shape[1]):
            answer = state @ a[:, t, :, :, None]  # S a, [B, H, V, 1]
            state = state * decay[:, t, :, None, :] + answer * b[:, t, :, None, :]
            state = state + v[:, t, :, :, None] * k[:, t, :, None, :]
            rows.append((state @ r[:, t, :, :, None]).squeeze(-1))
        self._wkv[layer] = state
        return torch.stack(rows, dim=1).to(self._dtype)

    def _channel_mix(self, layer: int, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        change = _shifted(x, self._ffn_shift[layer]) - x
        self._ffn_shift[layer] = x[:, -1]
        hidden = F.linear(torch.addcmul(x, change, p["ffn.x_k"]), p["ffn.key.weight"])
        return F.linear(torch.relu(hidden).square(), p["ffn.value.weight"])


def _shifted(x: Tensor, before: Tensor) -> Tensor:
    """Each token's predecessor: [B, T, C] from [B, T, C] and what came before it [B, C]."""
    return torch.cat((before[:, None], x[:, :-1]), dim=1)
