"""One RWKV-4 through every layout: the same bits; settings read strictly; the tokenizer that belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kittiwake.bench.rwkv4_shapes import Rwkv4Shape, random_rwkv4
from kittiwake.build import build_bundle
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.states import StateTable
from kittiwake.errors import ModelError, TokenizerError, UsageError
from kittiwake.families.rwkv4_names import BACKBONE, HF
from kittiwake.llm import LLM
from kittiwake.load import Loaded, load_model
from kittiwake.text.gpt_neox import gpt_neox_file
from tests.families.rwkv4_layouts import hf_tensors, save_hf
from tests.oracles import rwkv4_float64
from tests.oracles.measure import random_ids, relative_error

SHAPE = Rwkv4Shape(3, 32, 256)
Tensors = dict[str, torch.Tensor]
Write = Callable[[Path, Rwkv4Shape, Tensors], Path]


def _pth(path: Path, shape: Rwkv4Shape, tensors: Tensors) -> Path:
    torch.save(tensors, path.with_suffix(".pth"))
    return path.with_suffix(".pth")


LAYOUTS: dict[str, Write] = {
    "pth": _pth,
    "hf": save_hf,
    "hf bin": lambda path, shape, tensors: save_hf(path, shape, tensors, as_bin=True),
    "backbone": lambda path, shape, tensors: save_hf(path, shape, tensors, body="backbone"),
    "backbone bin": lambda path, shape, tensors: save_hf(path, shape, tensors, body="backbone", as_bin=True),
}


def load(path: Path, **options: Any) -> Loaded:
    return load_model(path, EngineConfig(threads=1, **options))


def run(loaded: Loaded, ids: list[int]) -> np.ndarray:
    """Logits of every position, from an empty state."""
    states = StateTable(loaded.model.state_spec, 1)
    batch = Batch.pack([(states.allocate(), ids)], [list(range(len(ids)))])
    return loaded.model.forward(batch, states).copy()


def digest(loaded: Loaded) -> str:
    return hashlib.sha256(run(loaded, random_ids(SHAPE, 20)).tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_layout_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=3, dtype=dtype)
    found = {}
    for name, write in LAYOUTS.items():
        loaded = load(write(tmp_path / name.replace(" ", "-"), SHAPE, tensors))
        assert loaded.dtype == ("bf16" if dtype == torch.bfloat16 else "fp32"), name
        assert loaded.model.config.extra["ffn"] == 128 and loaded.tokenizer.kind == "bytes"
        found[name] = digest(loaded)
    assert len(set(found.values())) == 1, found


def test_names_are_those_that_transformers_writes() -> None:
    recorded = np.load(Path(__file__).parents[1] / "fixtures" / "rwkv4_hf.npz")
    theirs = {line.split(" ")[0] for line in str(recorded["tensors"]).splitlines()}
    assert {place.name for place in HF.places(5).values()} == theirs
    tensors = random_rwkv4(Rwkv4Shape(5, 8, 9), seed=0)
    assert set(hf_tensors(tensors)) == theirs
    assert {place.name for place in BACKBONE.places(5).values()} == set(hf_tensors(tensors, "backbone"))


# Settings


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": None, "attention_hidden_size": None},
        {"leave_out": ("intermediate_size", "attention_hidden_size", "rescale_every", "eos_token_id")},
        {"rescale_every": 0},
        {"rescale_every": None},
        {"eos_token_id": [0, 5, 5], "bos_token_id": None, "pad_token_id": 1},
        {"torch_dtype": "float16", "_name_or_path": "x", "is_decoder": False},
    ],
)
def test_values_that_agree_or_change_nothing_are_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=1)
    assert digest(load(save_hf(tmp_path / "m", SHAPE, tensors, **changes))) == digest(
        load(_pth(tmp_path / "m", SHAPE, tensors))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64; supported: 32, as the tensors have it"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; supported: 3"),
        ({"attention_hidden_size": 48}, "attention_hidden_size is 48; supported: 32"),
        ({"intermediate_size": 96}, "intermediate_size is 96; supported: 128"),
        ({"vocab_size": 50277}, "vocab_size is 50277; supported: 256"),
        ({"model_type": "rwkv5"}, "model_type is 'rwkv5'; supported: 'rwkv'"),
        ({"architectures": ["RwkvModel"]}, r"architectures is \['RwkvModel'\]; supported: \['RwkvForCausalLM'\]"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0; supported: a number above 0"),
        ({"layer_norm_epsilon": True}, "layer_norm_epsilon is True"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06; supported: 1e-05, as layer_norm_epsilon says"),
        ({"rescale_every": -6}, "rescale_every is -6; supported: a whole number of at least 0, or null"),
        ({"rescale_every": 6.0}, "rescale_every is 6.0"),
        ({"eos_token_id": -1}, "eos_token_id is -1; supported: a token id from 0 to 255"),
        ({"eos_token_id": [0, 256]}, r"eos_token_id is \[0, 256\]"),
        ({"eos_token_id": [[0]]}, r"eos_token_id is \[\[0\]\]"),
        ({"bos_token_id": "0"}, "bos_token_id is '0'"),
        ({"pad_token_id": True}, "pad_token_id is True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; supported: False or True"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is"),
        ({"rope_theta": 1e4}, r"unknown key rope_theta = 10000\.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_value_that_is_not_implemented_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json of .*{message}"):
        load(save_hf(tmp_path / "m", SHAPE, random_rwkv4(SHAPE, seed=1), **changes))


def test_the_epsilon_of_the_file_is_used(tmp_path: Path) -> None:
    tensors, ids = random_rwkv4(SHAPE, seed=8), random_ids(SHAPE, 10)
    loaded = load(save_hf(tmp_path / "m", SHAPE, tensors, layer_norm_epsilon=1e-2))
    assert loaded.model.config.origins["norm_eps"] == "config.json: layer_norm_epsilon"
    assert relative_error(run(loaded, ids), rwkv4_float64.run(tensors, ids, eps=1e-2)[0]) < 5e-6
    assert relative_error(run(loaded, ids), rwkv4_float64.run(tensors, ids)[0]) > 1e-4


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=2)
    tied = {**tensors, "head.weight": tensors["emb.weight"]}
    expected = digest(load(_pth(tmp_path / "m", SHAPE, tied)))
    less = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
    folders = {
        "left out": save_hf(tmp_path / "left_out", SHAPE, less, tie_word_embeddings=True),
        "twice": save_hf(tmp_path / "twice", SHAPE, tied, tie_word_embeddings=True),
        "told apart": save_hf(tmp_path / "apart", SHAPE, tied),
    }
    assert {digest(load(folder)) for folder in folders.values()} == {expected}
    with pytest.raises(ModelError, match=r"lacks tensors of RWKV-4: head\.weight"):
        load(save_hf(tmp_path / "untied", SHAPE, less))
    with pytest.raises(ModelError, match=r"says tie_word_embeddings, but head\.weight is not the embedding"):
        load(save_hf(tmp_path / "two_heads", SHAPE, tensors, tie_word_embeddings=True))


@pytest.mark.parametrize("body", ["rwkv", "backbone"])
def test_tensors_missing_or_left_over_are_named_as_the_file_has_them(body: str, tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=1)
    extra = tensors | {"blocks.1.ffn.time_mix_v": tensors["blocks.1.ffn.time_mix_k"].clone()}
    with pytest.raises(ModelError, match=rf"tensors RWKV-4 does not have: {body}\.blocks\.1\.\w+\.time_mix_value"):
        load(save_hf(tmp_path / "extra", SHAPE, extra, body=body))
    del tensors["blocks.1.att.time_mix_r"]
    with pytest.raises(ModelError, match=rf"lacks tensors of RWKV-4: {body}\.blocks\.1\.\w+\.time_mix_receptance"):
        load(save_hf(tmp_path / "less", SHAPE, tensors, body=body))


# Ends of a text


def test_ends_of_a_text_are_those_of_the_config_a_zero_among_them(tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=1)
    ends = {
        "one": (save_hf(tmp_path / "one", SHAPE, tensors, eos_token_id=0), (0,)),
        "several": (save_hf(tmp_path / "several", SHAPE, tensors, eos_token_id=[0, 10]), (0, 10)),
        "none": (save_hf(tmp_path / "none", SHAPE, tensors, eos_token_id=None), ()),
    }
    for folder, expected in ends.values():
        assert load(folder).tokenizer.eos_ids == expected
    assert load(_pth(tmp_path / "m", SHAPE, tensors)).tokenizer.eos_ids == ()
    bundle = build_bundle(ends["several"][0], tmp_path / "bundle", goldens=1)
    assert load(bundle).tokenizer.eos_ids == (0, 10)


def test_an_answer_ends_with_any_of_them(tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=1)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    endless = LLM(_pth(tmp_path / "m", SHAPE, tensors), threads=1).generate(["abc"], params)[0]
    assert endless.finish_reason == "length"
    third = endless.token_ids[2]
    first = endless.token_ids.index(third)
    folder = save_hf(tmp_path / "m", SHAPE, tensors, eos_token_id=[0, third])
    ended = LLM(folder, threads=1).generate(["abc"], params)[0]
    assert ended.finish_reason == "stop" and ended.token_ids == endless.token_ids[: first + 1]


# Rescaling


def test_rescaling_is_exact_unless_asked_for_and_kept_by_a_bundle(tmp_path: Path) -> None:
    tensors, ids = random_rwkv4(SHAPE, seed=6), random_ids(SHAPE, 12)
    folder = save_hf(tmp_path / "m", SHAPE, tensors, rescale_every=1)
    plain = load(folder)
    assert "config.json: 1" in plain.model.config.origins["rescale_every"]
    assert relative_error(run(plain, ids), rwkv4_float64.run(tensors, ids)[0]) < 5e-6
    rescaled = load(folder, rescale_every=1)
    assert rescaled.model.config.origins["rescale_every"] == "option rescale_every"
    assert relative_error(run(rescaled, ids), rwkv4_float64.run(tensors, ids, rescale_every=1)[0]) < 5e-6
    assert digest(rescaled) != digest(plain) and rescaled.digest() != plain.digest()
    bundles = {
        every: build_bundle(folder, tmp_path / f"b{every}", goldens=1, rescale_every=every) for every in (None, 1)
    }
    assert json.loads((bundles[1] / "manifest.json").read_text())["model"]["rescale_every"] == 1
    assert digest(load(bundles[None])) == digest(plain)
    assert digest(load(bundles[1])) == digest(load(bundles[None], rescale_every=1)) == digest(rescaled)
    assert digest(load(bundles[1], rescale_every=0)) == digest(plain)


def test_a_family_that_never_rescales_refuses_the_option() -> None:
    with pytest.raises(UsageError, match="rwkv7 never rescales, so rescale_every cannot be 6"):
        load_model(None, EngineConfig(threads=1, rescale_every=6))


# Tokenizers


def test_the_vocabulary_tells_the_tokenizer(tmp_path: Path) -> None:
    kinds = {50277: "gpt-neox", 65536: "world", 256: "bytes"}
    for vocab, kind in kinds.items():
        shape = Rwkv4Shape(1, 8, vocab)
        path = _pth(tmp_path / str(vocab), shape, random_rwkv4(shape, seed=0))
        assert load(path).tokenizer.kind == kind
        folder = save_hf(tmp_path / kind, shape, random_rwkv4(shape, seed=0))
        assert load(folder).tokenizer.kind == kind
        for other in set(kinds.values()) - {kind}:
            with pytest.raises(TokenizerError, match=rf"the tokenizer '{other}' .*{vocab}"):
                load_model(path, EngineConfig(threads=1), tokenizer=other)


def test_a_folders_own_tokenizer_is_used(tmp_path: Path) -> None:
    shape = Rwkv4Shape(1, 8, 50277)
    folder = save_hf(tmp_path / "m", shape, random_rwkv4(shape, seed=0))
    changed = gpt_neox_file().replace(b'"<|padding|>"', b'"<|filler|>"')
    (folder / "tokenizer.json").write_bytes(changed)
    loaded = load(folder)
    assert loaded.tokenizer.kind == "hf" and "<|filler|>" in loaded.tokenizer.control_texts
    assert loaded.tokenizer.encode("\nThe following is a") == [187, 510, 1563, 310, 247]


def test_a_lone_safetensors_file_is_read_too(tmp_path: Path) -> None:
    tensors = random_rwkv4(SHAPE, seed=3)
    save_file(hf_tensors(tensors), tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    assert loaded.model.config.origins["norm_eps"] == "default: the file says nothing"
    assert digest(loaded) == digest(load(_pth(tmp_path / "m", SHAPE, tensors)))
