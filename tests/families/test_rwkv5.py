"""RWKV-5.0, 5.1 and 5.2: how its versions are told, and checkpoints that are refused; see test_rwkv56.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, random_rwkv5
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.registry import recognise
from kittiwake.families.rwkv5 import Rwkv5Family
from kittiwake.load import TensorDict
from tests.families import agreement
from tests.families.agreement import Tensors, assert_agrees, load, run, same_run
from tests.oracles import rwkv6_float64
from tests.oracles.measure import random_ids, relative_error

VERSIONS = ("5.0", "5.1", "5.2")
STORED = random_rwkv5(Rwkv5Shape(2, 32, "5.2", 16, 256), seed=4)
changed, renamed = partial(agreement.changed, STORED), partial(agreement.renamed, STORED)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(blocks__1__att__extra=torch.zeros(3)), r"tensors RWKV-5.2 does not have: blocks\.1\.att\.extra"),
        (changed(blocks__0__att__time_state=torch.zeros(2, 16, 16)), r"does not have: blocks\.0\.att\.time_state"),
        (changed(blocks__0__att__time_mix_v=None), r"lacks tensors of RWKV-5.2: blocks\.0\.att\.time_mix_v"),
        (changed(blocks__0__att__gate__weight=None), r"lacks tensors of RWKV-5.2: blocks\.0\.att\.gate\.weight"),
        (changed(blocks__1__att__gate__weight=None), r"lacks tensors of RWKV-5.2: blocks\.1\.att\.gate\.weight"),
        (changed(blocks__0__ffn__receptance__weight=None), r"lacks tensors of RWKV-5.2: blocks\.0\.ffn\.receptance"),
        (changed(blocks__0__att__time_faaaa=None), r"lacks tensors of RWKV-5.2: blocks\.0\.att\.time_faaaa"),
        (changed(blocks__0__att__time_first=torch.zeros(2, 16)), r"does not have: blocks\.0\.att\.time_faaaa"),
        (changed(blocks__0__att__time_decay=torch.zeros(3)), r"time_decay has shape \(3,\), expected one value a head"),
        (changed(blocks__0__att__time_decay=torch.zeros(2, 15)), r"time_decay has shape \(2, 15\), expected one value"),
        (changed(blocks__1__att__time_decay=torch.zeros(2)), r"time_decay .* has shape \(2,\), expected \(2, 16\)"),
        (changed(blocks__1__att__time_faaaa=torch.zeros(16, 2)), r"has shape \(16, 2\), expected \(2, 16\)"),
        (changed(blocks__0__att__time_decay=torch.zeros(2)), r"time_faaaa .* has shape \(2, 16\), expected \(2, 1\)"),
        (changed(head__weight=torch.zeros(255, 32)), r"head\.weight .* has shape \(255, 32\), expected \(256, 32\)"),
        (changed(ln_out__weight=torch.zeros(32, dtype=torch.int8)), r"ln_out\.weight .* is torch\.int8"),
        (renamed("blocks.1.", "blocks.2."), "layers up to 2, but layer 1 is missing"),
        (renamed("att.time_mix_r", "att.time_mix_q"), r"does not have: blocks\.0\.att\.time_mix_q"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_not_whole_are_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(tensors)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_the_version_is_told_by_the_tensors(version: str, heads: int) -> None:
    source = TensorDict(random_rwkv5(Rwkv5Shape(1, 11 * heads, version, 11, 256), seed=1))
    family = recognise(source)
    assert (family.name, family.read_config(source).extra["version"]) == ("rwkv5", version)


@pytest.mark.parametrize("version", ["5.0", "5.1"])
def test_one_value_a_head_may_be_a_column(version: str) -> None:
    shape = Rwkv5Shape(2, 32, version, 16, 256)
    tensors, ids = random_rwkv5(shape, seed=1), random_ids(shape, 12)
    columns = {name: tensor[:, None] if tensor.shape == (2,) else tensor for name, tensor in tensors.items()}
    assert columns["blocks.0.att.time_decay"].shape == (2, 1)
    assert same_run(run(load(columns), ids), run(load(tensors), ids))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_bonus_is_a_logarithm_where_its_name_says_so(version: str, is_plain: bool) -> None:
    shape = Rwkv5Shape(2, 32, version, 16, 256)
    tensors, ids = random_rwkv5(shape, seed=1, plain_bonus=is_plain), random_ids(shape, 20)
    found = run(load(tensors), ids)
    assert_agrees(found, *rwkv6_float64.run(tensors, ids), 3e-6)
    here, there = ("time_faaaa", "time_first") if is_plain else ("time_first", "time_faaaa")
    other = {name.replace(here, there): tensor for name, tensor in tensors.items()}
    assert relative_error(run(load(other), ids)[0], found[0]) > 1e-3


MANIFEST = {
    "layers": 2, "width": 32, "vocab_size": 256, "heads": 2, "ffn": 96, "norm_eps": 1e-5, "group_norm_eps": 64e-5,
    "version": "5.2", "is_bonus_log": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": 1}, "rwkv5 needs"),
        ({"heads": None}, "rwkv5 needs"),
        ({"layers": 0}, "model.layers must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width 32 is not a multiple of heads 3"),
        ({"group_norm_eps": "64e-5"}, "model.group_norm_eps is '64e-5'"),
        ({"version": "5.3"}, "model.version is '5.3'; supported: 5.0, 5.1, 5.2"),
        ({"version": ["5.2"]}, "model.version is .*; supported"),
        ({"is_bonus_log": 1}, "model.is_bonus_log is 1; supported: true, false"),
    ],
)
def test_manifests_are_read_strictly(change: dict[str, object], message: str) -> None:
    model = {key: value for key, value in {**MANIFEST, **change}.items() if value is not None}
    with pytest.raises(BundleError, match=message):
        Rwkv5Family().config_from_manifest(model)
