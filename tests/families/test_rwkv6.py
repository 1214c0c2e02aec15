"""RWKV-6: checkpoints and manifests that are refused; see test_rwkv56.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kittiwake.bench.rwkv56_shapes import Rwkv6Shape, random_rwkv6
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.registry import recognise
from kittiwake.families.rwkv6 import Rwkv6Family
from kittiwake.load import TensorDict
from tests.families import agreement
from tests.families.agreement import Tensors, load

STORED = random_rwkv6(Rwkv6Shape(2, 32, 3, 5, 16, 256), seed=4)
changed, renamed = partial(agreement.changed, STORED), partial(agreement.renamed, STORED)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(blocks__1__att__extra=torch.zeros(3)), r"tensors RWKV-6 does not have: blocks\.1\.att\.extra"),
        (changed(blocks__0__att__time_state=torch.zeros(2, 16, 16)), r"does not have: blocks\.0\.att\.time_state"),
        (changed(blocks__0__att__time_maa_x=None), r"lacks tensors of RWKV-6: blocks\.0\.att\.time_maa_x"),
        (changed(blocks__1__att__gate__weight=None), r"lacks tensors of RWKV-6: blocks\.1\.att\.gate\.weight"),
        (changed(blocks__0__ffn__receptance__weight=None), r"lacks tensors of RWKV-6: blocks\.0\.ffn\.receptance"),
        (changed(blocks__0__att__time_faaaa=None), r"lacks blocks\.0\.att\.time_faaaa"),
        (changed(blocks__0__att__time_maa_w1=torch.zeros(32, 16)), "time_maa_w1 has 16 columns, expected 5 times"),
        (changed(blocks__0__att__time_maa_w1=torch.zeros(32)), r"time_maa_w1 has shape \(32,\), expected 2 sizes"),
        (changed(blocks__1__att__time_maa_w2=torch.zeros(5, 32, 3)), r"has shape \(5, 32, 3\), expected \(5, 3, 32\)"),
        (changed(blocks__0__att__time_decay_w2=torch.zeros(32, 5)), r"has shape \(32, 5\), expected \(5, 32\)"),
        (changed(blocks__0__att__time_faaaa=torch.zeros(2, 15)), r"has shape \(2, 15\), whose product is not the width"),
        (changed(blocks__1__att__time_faaaa=torch.zeros(16, 2)), r"has shape \(16, 2\), expected \(2, 16\)"),
        (changed(blocks__1__att__time_decay=torch.zeros(2, 16)), r"has shape \(2, 16\), expected \(32,\)"),
        (changed(head__weight=torch.zeros(255, 32)), r"head\.weight .* has shape \(255, 32\), expected \(256, 32\)"),
        (changed(ln_out__weight=torch.zeros(32, dtype=torch.int8)), r"ln_out\.weight .* is torch\.int8"),
        (renamed("blocks.1.", "blocks.2."), "layers up to 2, but layer 1 is missing"),
        (renamed("att.time_maa_r", "att.time_maa_q"), r"does not have: blocks\.0\.att\.time_maa_q"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_not_whole_are_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(tensors)


def test_it_is_told_from_its_neighbours() -> None:
    assert recognise(TensorDict(STORED)).name == "rwkv6"


MANIFEST = {
    "layers": 2, "width": 32, "vocab_size": 256, "heads": 2, "ffn": 96, "norm_eps": 1e-5, "group_norm_eps": 64e-5,
    "ranks": {"mix": 3, "decay": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": 1}, "rwkv6 needs"),
        ({"heads": None}, "rwkv6 needs"),
        ({"layers": 0}, "model.layers must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width 32 is not a multiple of heads 3"),
        ({"group_norm_eps": "64e-5"}, "model.group_norm_eps is '64e-5'"),
        ({"ranks": {"mix": 3}}, "model.ranks must name"),
        ({"ranks": {"mix": 3, "decay": True}}, "model.decay must be a whole number of at least 1"),
    ],
)
def test_manifests_are_read_strictly(change: dict[str, object], message: str) -> None:
    model = {key: value for key, value in {**MANIFEST, **change}.items() if value is not None}
    with pytest.raises(BundleError, match=message):
        Rwkv6Family().config_from_manifest(model)
