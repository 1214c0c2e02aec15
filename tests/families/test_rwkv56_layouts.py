"""One RWKV-5 or 6 through every layout: the same canonical tensors, the same bits; settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, Rwkv6Shape, random_rwkv5, random_rwkv6
from kittiwake.build import build_bundle
from kittiwake.config import EngineConfig
from kittiwake.errors import ModelError
from kittiwake.families.rwkv6_names import GGUF, Sizes, places_of
from kittiwake.load import Loaded, TensorDict, load_model
from tests.families.agreement import run, same_run
from tests.families.rwkv56_layouts import gguf_arrays, save_gguf, save_hf
from tests.oracles import rwkv6_float64
from tests.oracles.measure import random_ids, relative_error

SIX = Rwkv6Shape(3, 64, 6, 10, 16, 256)
FIVES = {version: Rwkv5Shape(3, 64, version, 16, 256) for version in ("5.0", "5.1", "5.2")}
IDS = random_ids(SIX, 20)
Tensors = dict[str, torch.Tensor]
Write = Callable[[Path, Any, Tensors], Path]


def _pth(path: Path, shape: object, tensors: Tensors) -> Path:
    torch.save(tensors, path.with_suffix(".pth"))
    return path.with_suffix(".pth")


def _safetensors(path: Path, shape: object, tensors: Tensors) -> Path:
    save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


LAYOUTS: dict[str, Write] = {"pth": _pth, "safetensors": _safetensors, "hf": save_hf}
GGUFS: dict[str, Write] = {
    "gguf": lambda path, shape, tensors: save_gguf(path.with_suffix(".gguf"), shape, tensors),
    "old gguf": lambda path, shape, tensors: save_gguf(path.with_suffix(".gguf"), shape, tensors, is_fused=False),
    "rescaled gguf": lambda path, shape, tensors: save_gguf(path.with_suffix(".gguf"), shape, tensors, rescale=1),
}


def load(path: Path, **options: Any) -> Loaded:
    return load_model(path, EngineConfig(threads=1, **options), tokenizer="bytes")


def check_same(written: dict[str, Path], dtype: torch.dtype, number: int) -> None:
    """All these files give the same bits, kept in bfloat16 if that is what they were written in."""
    runs = {}
    for name, path in written.items():
        loaded = load(path)
        assert loaded.model.config.family == f"rwkv{number}"
        assert loaded.dtype == ("bf16" if dtype == torch.bfloat16 else "fp32"), name
        assert loaded.model.config.extra["group_norm_eps"] == 64e-5, name
        runs[name] = run(loaded.model, IDS)
    assert all(same_run(found, runs["pth"]) for found in runs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_layout_of_an_rwkv6_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_rwkv6(SIX, seed=3, dtype=dtype)
    if dtype == torch.float16:  # so that halving loses nothing
        tensors = {name: (tensor.float() * 256).round() / 256 for name, tensor in tensors.items()}
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    written = {
        name: write(tmp_path / name.replace(" ", "-"), SIX, tensors) for name, write in (LAYOUTS | GGUFS).items()
    }
    check_same(written, dtype, 6)


@pytest.mark.parametrize("version", FIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_layout_of_an_rwkv5_gives_the_same_bits(version: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_rwkv5(FIVES[version], seed=3, dtype=dtype)
    check_same({name: write(tmp_path / name, FIVES[version], tensors) for name, write in LAYOUTS.items()}, dtype, 5)


@pytest.mark.parametrize("layout", [*LAYOUTS, *GGUFS])
def test_every_layout_agrees_with_the_equations(layout: str, tmp_path: Path) -> None:
    tensors = random_rwkv6(SIX, seed=4)
    expected, _ = rwkv6_float64.run(tensors, IDS)
    found, _ = run(load((LAYOUTS | GGUFS)[layout](tmp_path / "m", SIX, tensors)).model, IDS)
    assert relative_error(found, expected) < 1e-5


def test_weights_a_converter_halved_are_those_it_was_given(tmp_path: Path) -> None:
    halved = gguf_arrays(random_rwkv6(SIX, seed=4), SIX.layers, is_fused=True, rescale=1)
    whole = gguf_arrays(random_rwkv6(SIX, seed=4), SIX.layers, is_fused=True, rescale=0)
    name = "blk.2.time_mix_output.weight"
    assert torch.equal(halved[name] * 4, whole[name]) and not torch.equal(halved[name], whole[name])


def test_gguf_names_are_those_of_the_gguf_package() -> None:
    from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES

    known = {TENSOR_NAMES[tensor].format(bid=1) for tensor in MODEL_TENSORS[MODEL_ARCH.RWKV6]}
    used = set()
    for is_fused in (True, False):
        source = TensorDict(gguf_arrays(random_rwkv6(SIX, seed=1), SIX.layers, is_fused=is_fused, rescale=0))
        places = places_of(GGUF, Sizes(3, 64, 4, 224, 256, 6, 10), source)
        used |= {place.name.rsplit(".", 1)[0] for place in places.values() if not place.name.startswith("blk.0.")}
    assert {name for name in used if not name.startswith("blk.2.")} == known


@pytest.mark.parametrize("kind", ["5.0", "5.2", "6"])
@pytest.mark.parametrize("layout", ["pth", "hf"])
def test_a_bundle_has_the_same_bits(kind: str, layout: str, tmp_path: Path) -> None:
    shape: Any = SIX if kind == "6" else FIVES[kind]
    tensors = (random_rwkv6 if kind == "6" else random_rwkv5)(shape, seed=5)
    source = LAYOUTS[layout](tmp_path / "m", shape, tensors)
    bundle = build_bundle(source, tmp_path / "bundle", tokenizer="bytes", goldens=1)
    assert json.loads((bundle / "manifest.json").read_text())["family"] == f"rwkv{kind[0]}"
    assert same_run(run(load(bundle).model, IDS), run(load(source).model, IDS))
    other = build_bundle(source, tmp_path / "other", tokenizer="bytes", goldens=0, group_norm_eps=1e-3)
    assert same_run(run(load(other).model, IDS), run(load(source, group_norm_eps=1e-3).model, IDS))


# Settings


@pytest.mark.parametrize("number", [5, 6])
def test_epsilons_of_the_file_are_used_and_their_origin_told(number: int, tmp_path: Path) -> None:
    shape: Any = SIX if number == 6 else FIVES["5.2"]
    tensors = (random_rwkv6 if number == 6 else random_rwkv5)(shape, seed=5)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "divided": {"head_size_divisor": 4},
        "stated": {"head_size_divisor": 4, "group_norm_epsilon": 3e-4, "layer_norm_epsilon": 1e-3},
    }
    extras, origins = {}, {}
    for name, changes in cases.items():
        config = load(save_hf(tmp_path / name, shape, tensors, **changes)).model.config
        extras[name] = (config.extra["norm_eps"], config.extra["group_norm_eps"])
        origins[name] = config.origins["group_norm_eps"]
    assert extras == {"plain": (1e-5, 64e-5), "divided": (1e-5, pytest.approx(16e-5)), "stated": (1e-3, 3e-4)}
    assert origins == {
        "plain": "constant of hf files",
        "divided": "config.json: 1e-05 × head_size_divisor²",
        "stated": "config.json: group_norm_epsilon",
    }


HF_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 128}, "hidden_size is 128; supported: 64, as the tensors have it"),
    ({"attention_hidden_size": 128}, "attention_hidden_size is 128"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2; supported: 3"),
    ({"head_size": 64}, "head_size is 64; supported: 16"),
    ({"head_size": None, "num_attention_heads": 8}, "num_attention_heads is 8; supported: 4"),
    ({"intermediate_size": 256}, "intermediate_size is 256; supported: 224"),
    ({"vocab_size": 300}, "vocab_size is 300"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True; supported: False"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0; supported: a number above 0"),
    ({"head_size_divisor": 0}, "head_size_divisor is 0; supported: a number above 0"),
    ({"head_size_divisor": "8"}, "head_size_divisor is '8'"),
    ({"architectures": ["Rwkv7ForCausalLM"]}, "architectures is .*Rwkv7ForCausalLM"),
    ({"model_type": "rwkv7"}, "model_type is 'rwkv7'"),
    ({"model_version": "4_0"}, "model_version is '4_0'"),
    ({"rescale_every": "6"}, "rescale_every is '6'; supported: a whole number of layers, or 0"),
    ({"rotary": 10000.0}, r"unknown key rotary = 10000\.0"),
]


@pytest.mark.parametrize("number", [5, 6])
@pytest.mark.parametrize(("changes", "message"), HF_REFUSED, ids=[next(reversed(c)) for c, _ in HF_REFUSED])
def test_a_config_value_that_is_not_implemented_is_named(
    changes: dict[str, Any], message: str, number: int, tmp_path: Path
) -> None:
    shape: Any = SIX if number == 6 else FIVES["5.2"]
    tensors = (random_rwkv6 if number == 6 else random_rwkv5)(shape, seed=1)
    with pytest.raises(ModelError, match=rf"config\.json of .*{message}"):
        load(save_hf(tmp_path / "m", shape, tensors, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 224, "num_attention_heads": 4, "rescale_every": 0},
        {"head_size": None, "num_attention_heads": 4, "head_size_divisor": 8, "model_version": "6_0"},
    ],
)
def test_values_that_agree_or_say_nothing_are_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_rwkv6(SIX, seed=1)
    plain = run(load(_pth(tmp_path / "p", SIX, tensors)).model, IDS)
    assert same_run(run(load(save_hf(tmp_path / "m", SIX, tensors, **changes)).model, IDS), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wkv__head_size": 48}, "rwkv6.wkv.head_size is 48; supported: 16"),
        ({"block_count": 4}, "rwkv6.block_count is 4; supported: 3"),
        ({"time_mix_extra_dim": 32}, "rwkv6.time_mix_extra_dim is 32; supported: 6"),
        ({"time_decay_extra_dim": 64}, "rwkv6.time_decay_extra_dim is 64; supported: 10"),
        ({"token_shift_count": 1}, "rwkv6.token_shift_count is 1; supported: 2"),
        ({"rescale_every_n_layers": 1.5}, "rwkv6.rescale_every_n_layers is 1.5; supported: a whole number"),
        ({"attention__layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0"),
        ({"expert_count": 4}, "unknown key rwkv6.expert_count = 4"),
    ],
)
def test_gguf_metadata_that_is_not_implemented_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load(save_gguf(tmp_path / "m.gguf", SIX, random_rwkv6(SIX, seed=1), **options))


def test_tensors_missing_or_left_over_are_named_as_the_file_has_them(tmp_path: Path) -> None:
    tensors = random_rwkv6(SIX, seed=1)
    extra = tensors | {"blocks.1.att.time_maa_q": torch.zeros(1, 1, 64)}
    with pytest.raises(ModelError, match=r"holds tensors RWKV-6 does not have: rwkv\.blocks\.1\.attention\.time_maa_q"):
        load(save_hf(tmp_path / "extra", SIX, extra))
    del tensors["blocks.1.ffn.receptance.weight"]
    with pytest.raises(ModelError, match=r"lacks tensors of RWKV-6: rwkv\.blocks\.1\.feed_forward\.receptance\.weight"):
        load(save_hf(tmp_path / "less", SIX, tensors))
