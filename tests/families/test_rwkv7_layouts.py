"""One model through every layout: the same canonical tensors, the same bits."""

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

from kittiwake.bench.shapes import Rwkv7Shape, random_rwkv7, small
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import CheckpointError, ModelError, TokenizerError, UsageError
from kittiwake.families.registry import recognise
from kittiwake.families.rwkv7_names import GGUF
from kittiwake.load import Loaded, load_model
from tests.families.layouts import dequantised, fla_tensors, save_fla, save_gguf, save_hf, save_old_fla
from tests.oracles import rwkv7_float64
from tests.oracles.measure import random_ids, relative_error

SHAPE = small(2, 64, rank_w=32, rank_a=24, rank_v=8, rank_g=12)
SMALL_HEADS = small(2, 64, 16)
Tensors = dict[str, torch.Tensor]
Write = Callable[[Path, Rwkv7Shape, Tensors], Path]


def _pth(path: Path, shape: Rwkv7Shape, tensors: Tensors) -> Path:
    torch.save(tensors, path.with_suffix(".pth"))
    return path.with_suffix(".pth")


def _safetensors(path: Path, shape: Rwkv7Shape, tensors: Tensors) -> Path:
    save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


LAYOUTS: dict[str, Write] = {
    "pth": _pth,
    "safetensors": _safetensors,
    "fla": save_fla,
    "old fla": save_old_fla,
    "hf": save_hf,
    "gguf": lambda path, shape, tensors: save_gguf(path.with_suffix(".gguf"), shape, tensors),
}


def load(path: Path, **options: Any) -> Loaded:
    return load_model(path, EngineConfig(threads=1, **options), tokenizer="bytes")


def run(loaded: Loaded, ids: list[int]) -> np.ndarray:
    """Logits of every position, from an empty state."""
    states = StateTable(loaded.model.state_spec, 1)
    batch = Batch.pack([(states.allocate(), ids)], [list(range(len(ids)))])
    return loaded.model.forward(batch, states).copy()


def digest(loaded: Loaded, shape: Rwkv7Shape) -> str:
    logits = run(loaded, random_ids(shape, 20))
    assert np.isfinite(logits).all()
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_layout_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_rwkv7(SHAPE, seed=3, dtype=dtype)
    found = {}
    for name, write in LAYOUTS.items():
        loaded = load(write(tmp_path / name.replace(" ", "-"), SHAPE, tensors))
        assert loaded.dtype == ("bf16" if dtype == torch.bfloat16 else "fp32"), name
        assert loaded.model.config.extra["group_norm_eps"] == 64e-5, name
        found[name] = digest(loaded, SHAPE)
    assert len(set(found.values())) == 1, found
    wide = load(tmp_path / "gguf.gguf", dtype="fp32")
    assert digest(wide, SHAPE) == found["gguf"]  # float32 or bfloat16 storage: the same values, the same bits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_agrees_with_the_equations(layout: str, tmp_path: Path) -> None:
    tensors, ids = random_rwkv7(SHAPE, seed=4), random_ids(SHAPE, 12)
    expected, _ = rwkv7_float64.run(tensors, ids)
    assert relative_error(run(load(LAYOUTS[layout](tmp_path / "m", SHAPE, tensors)), ids), expected) < 1e-5


def test_packed_weights_equal_the_same_weights_unpacked_bit_for_bit(tmp_path: Path) -> None:
    tensors, ids = random_rwkv7(SHAPE, seed=5), random_ids(SHAPE, 20)
    packed = load(save_gguf(tmp_path / "m.gguf", SHAPE, tensors, "Q8_0"))
    plain = load(_pth(tmp_path / "m", SHAPE, dequantised(tensors)))
    assert packed.dtype == plain.dtype == "fp32"
    assert digest(packed, SHAPE) == digest(plain, SHAPE)
    whole, _ = rwkv7_float64.run(tensors, ids)
    assert 1e-4 < relative_error(run(packed, ids), whole) < 0.05


def test_a_bfloat16_gguf_with_a_float32_matrix_that_is_not_bfloat16_is_kept_whole(tmp_path: Path) -> None:
    tensors = random_rwkv7(SHAPE, seed=6)
    tensors["blocks.0.att.w1"] = tensors["blocks.0.att.w1"].float() * 1.0001
    loaded = load(save_gguf(tmp_path / "m.gguf", SHAPE, tensors))
    assert loaded.dtype == "fp32"
    assert digest(loaded, SHAPE) == digest(load(_pth(tmp_path / "m", SHAPE, tensors)), SHAPE)


# Against others' converters

FIXTURE = Path(__file__).parents[1] / "fixtures" / "rwkv7_hf.npz"


@pytest.mark.parametrize("head_size", [64, 16])
def test_a_folder_of_another_converter_gives_its_models_logits(head_size: int, tmp_path: Path) -> None:
    shape = small(2, 64, head_size, rank_w=32, rank_a=24, rank_v=8, rank_g=12)
    tensors = random_rwkv7(shape, seed=11, dtype=torch.float32)
    recorded = np.load(FIXTURE)
    ours = {name: " ".join(map(str, tensor.shape)) for name, tensor in fla_tensors(tensors).items()}
    theirs = dict(line.split(" ", 1) for line in str(recorded[f"tensors_{head_size}"]).splitlines())
    assert ours == theirs
    loaded = load(save_fla(tmp_path / "m", shape, tensors))
    assert relative_error(run(loaded, recorded["ids"].tolist()), recorded[f"logits_{head_size}"]) < 2e-6


def test_gguf_names_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES

    known = {TENSOR_NAMES[tensor].format(bid=1) for tensor in MODEL_TENSORS[MODEL_ARCH.RWKV7]}
    used = {place.name.rsplit(".", 1)[0] for place in GGUF.places(2).values() if not place.name.startswith("blk.0.")}
    assert used <= known
    assert known - used == set()


# Epsilons


@pytest.mark.parametrize(
    ("layout", "eps"), [("pth", 64e-5), ("gguf", 64e-5), ("fla", 16e-5), ("hf", 16e-5)], ids=lambda value: str(value)
)
def test_the_group_norm_epsilon_is_the_layouts_own(layout: str, eps: float, tmp_path: Path) -> None:
    tensors, ids = random_rwkv7(SMALL_HEADS, seed=7), random_ids(SMALL_HEADS, 12)
    loaded = load(LAYOUTS[layout](tmp_path / "m", SMALL_HEADS, tensors))
    assert loaded.model.config.extra["group_norm_eps"] == pytest.approx(eps, rel=1e-12)
    expected, _ = rwkv7_float64.run(tensors, ids, ln_x_eps=eps)
    other, _ = rwkv7_float64.run(tensors, ids, ln_x_eps=80e-5 - eps)
    assert relative_error(run(loaded, ids), expected) < 1e-5
    assert relative_error(run(loaded, ids), other) > 1e-3


@pytest.mark.parametrize("layout", ["pth", "fla", "gguf"])
def test_the_option_overrides_it(layout: str, tmp_path: Path) -> None:
    tensors, ids = random_rwkv7(SMALL_HEADS, seed=7), random_ids(SMALL_HEADS, 12)
    loaded = load(LAYOUTS[layout](tmp_path / "m", SMALL_HEADS, tensors), group_norm_eps=1e-3)
    assert loaded.model.config.extra["group_norm_eps"] == 1e-3
    assert loaded.model.config.origins["group_norm_eps"] == "option group_norm_eps"
    expected, _ = rwkv7_float64.run(tensors, ids, ln_x_eps=1e-3)
    assert relative_error(run(loaded, ids), expected) < 1e-5


@pytest.mark.parametrize("eps", [0.0, -1e-5, 1.0, float("nan"), float("inf"), True, "1e-5"])
def test_an_epsilon_that_cannot_be_is_refused(eps: Any) -> None:
    with pytest.raises(UsageError, match="group_norm_eps must be a number above 0 and below 1"):
        EngineConfig(group_norm_eps=eps)


def test_epsilons_of_the_file_are_used_and_their_origin_told(tmp_path: Path) -> None:
    tensors, ids = random_rwkv7(SHAPE, seed=8), random_ids(SHAPE, 10)
    made = {
        "fla": save_fla(tmp_path / "fla", SHAPE, tensors, norm_eps=1e-3),
        "hf": save_hf(tmp_path / "hf", SHAPE, tensors, norm_eps=1e-3, group_norm_epsilon=0.064),
        "gguf": save_gguf(
            tmp_path / "m.gguf", SHAPE, tensors, attention__layer_norm_epsilon=1e-3, attention__group_norm_epsilon=0.064
        ),
    }
    found = {name: load(path) for name, path in made.items()}
    assert {one.model.config.extra["norm_eps"] for one in found.values()} == {1e-3}
    assert len({digest(one, SHAPE) for one in found.values()}) == 1
    plain, _ = rwkv7_float64.run(tensors, ids)
    assert relative_error(run(found["fla"], ids), plain) > 1e-4
    origins = {name: one.model.config.origins["group_norm_eps"] for name, one in found.items()}
    assert origins == {
        "fla": "head size 64 × config.json: norm_eps",
        "hf": "config.json: group_norm_epsilon",
        "gguf": "metadata: rwkv7.attention.group_norm_epsilon",
    }


# Refusals

FLA_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 128}, "hidden_size is 128; supported: 64, as the tensors have it"),
    ({"num_hidden_layers": 3}, "num_hidden_layers is 3; supported: 2"),
    ({"head_dim": 32}, "head_dim is 32; supported: 64"),
    ({"head_dim": None, "num_heads": 2}, "num_heads is 2; supported: 1"),
    ({"v_low_rank_dim": 16}, "v_low_rank_dim is 16; supported: 8"),
    ({"a_low_rank_dim": True}, "a_low_rank_dim is True"),
    ({"value_dim": [64, 128]}, r"value_dim is \[64, 128\]"),
    ({"intermediate_size": 224}, "intermediate_size is 224; supported: 256"),
    ({"intermediate_size": None, "hidden_ratio": 3.5}, "hidden_ratio is 3.5; supported: one that gives .* 256"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported: 'sqrelu'"),
    ({"norm_first": False}, "norm_first is False; supported: True"),
    ({"norm_bias": 1}, "norm_bias is 1; supported: True"),
    ({"attn": {"layers": [1]}}, "attn is .*; supported: None"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True; supported: False"),
    ({"embedding_layer_norm_fused": True}, "embedding_layer_norm_fused is True; supported: False"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"norm_eps": 0}, "norm_eps is 0; supported: a number above 0"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06; supported: 1e-05, as norm_eps says"),
    ({"architectures": ["RWKV7ForSequenceClassification"]}, "architectures is .*ForSequenceClassification"),
    ({"model_type": "rwkv6"}, "model_type is 'rwkv6'"),
    ({"rotary": 10000.0}, r"unknown key rotary = 10000\.0"),
]


@pytest.mark.parametrize(("changes", "message"), FLA_REFUSED, ids=[next(reversed(c)) for c, _ in FLA_REFUSED])
def test_a_config_value_that_is_not_implemented_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_fla(tmp_path / "m", SHAPE, random_rwkv7(SHAPE, seed=1), **changes)
    with pytest.raises(ModelError, match=rf"config\.json of .*{message}"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": None},
        {"v_low_rank_dim": None, "value_dim": None, "head_dim": None, "num_heads": None},
        {"value_dim": 64, "bos_token_id": 0, "fuse_norm": False, "attn_mode": "fused_recurrent"},
    ],
)
def test_values_that_agree_or_say_nothing_are_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_rwkv7(SHAPE, seed=1)
    assert load(save_fla(tmp_path / "m", SHAPE, tensors, **changes)).model.config.origins["layout"] == "fla"


def test_a_lone_fla_file_has_the_defaults_of_its_layout(tmp_path: Path) -> None:
    save_file(fla_tensors(random_rwkv7(SMALL_HEADS, seed=1)), tmp_path / "m.safetensors")
    config = load(tmp_path / "m.safetensors").model.config
    assert config.extra["group_norm_eps"] == pytest.approx(16e-5, rel=1e-12)
    assert config.origins["norm_eps"] == "default: the file says nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wkv__head_size": 48}, "wkv.head_size is 48, expected a divisor of the width 64"),
        ({"leave_out": "wkv.head_size"}, "wkv.head_size is None"),
        ({"block_count": 3}, "rwkv7.block_count is 3; supported: 2"),
        ({"attention__gate_lora_rank": 8}, "rwkv7.attention.gate_lora_rank is 8; supported: 12"),
        ({"token_shift_count": 1}, "rwkv7.token_shift_count is 1; supported: 2"),
        ({"rescale_every_n_layers": 6}, "rwkv7.rescale_every_n_layers is 6; supported: 0"),
        ({"attention__layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0"),
        ({"expert_count": 4}, "unknown key rwkv7.expert_count = 4"),
    ],
)
def test_gguf_metadata_that_is_not_implemented_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", SHAPE, random_rwkv7(SHAPE, seed=1), **options)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_another_packing_is_refused_by_tensor_and_type(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", SHAPE, random_rwkv7(SHAPE, seed=1), "MXFP4")
    message = r"token_embd\.weight in .* is of the type MXFP4; kittiwake reads F32, F16, BF16, Q8_0"
    with pytest.raises(ModelError, match=message):
        load(path)
    with open_checkpoint(path) as source, pytest.raises(CheckpointError, match="of the type MXFP4"):
        source.read("token_embd.weight")


@pytest.mark.parametrize("layout", ["fla", "hf"])
def test_tensors_missing_or_left_over_are_named_as_the_file_has_them(layout: str, tmp_path: Path) -> None:
    tensors = random_rwkv7(SHAPE, seed=1)
    extra = tensors | {"blocks.1.ffn.x_r": tensors["blocks.1.ffn.x_k"].clone()}
    with pytest.raises(ModelError, match=r"holds tensors RWKV-7 does not have: \S+ffn\.x_r"):
        load(LAYOUTS[layout](tmp_path / "extra", SHAPE, extra))
    del tensors["blocks.1.att.k_a"]
    with pytest.raises(ModelError, match=r"lacks tensors of RWKV-7: \S+k_a"):
        load(LAYOUTS[layout](tmp_path / "less", SHAPE, tensors))


def test_low_rank_pairs_stored_the_other_way_are_refused(tmp_path: Path) -> None:
    tensors = random_rwkv7(SHAPE, seed=1)
    tensors["blocks.1.att.a1"] = tensors["blocks.1.att.a1"].t().contiguous()
    for layout in ("pth", "fla", "gguf"):
        with pytest.raises(ModelError, match=r"has shape \(\d+, \d+\), expected \(\d+, \d+\)"):
            load(LAYOUTS[layout](tmp_path / layout, SHAPE, tensors))


# Tokenizers


def _world_shape() -> Rwkv7Shape:
    return small(1, 16, 16, rank_w=2, rank_a=2, rank_v=2, rank_g=2, vocab=65536)


def test_tokenizers_of_folders_and_gguf_files(tmp_path: Path) -> None:
    import pyrwkv_tokenizer

    from kittiwake.load import find_tokenizer

    shape = _world_shape()
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "tokenization_rwkv.py").write_text("raise SystemExit('code of the folder was run')")
    assert find_tokenizer(folder, shape.vocab, None).origin == "the size of the vocabulary"
    (folder / "tokenizer.json").write_text("{}")
    found = find_tokenizer(folder, shape.vocab, None)
    assert (found.tokenizer.kind, found.origin.split(":")[0]) == (
        "world",
        "the size of the vocabulary; tokenizer.json is not used",
    )
    with pytest.raises(TokenizerError):
        find_tokenizer(folder, 300, None)
    vocabulary = (Path(pyrwkv_tokenizer.__file__).parent / "rwkv_vocab_v20230424.txt").read_bytes()
    (folder / "rwkv_vocab_v20230424.txt").write_bytes(vocabulary)
    assert find_tokenizer(folder, shape.vocab, None).origin == "rwkv_vocab_v20230424.txt"
    (folder / "rwkv_vocab_v20230424.txt").write_bytes(vocabulary.replace(b"'a'", b"'b'", 1))
    with pytest.raises(TokenizerError, match="is not the RWKV World vocabulary"):
        find_tokenizer(folder, shape.vocab, None)


def test_a_gguf_file_names_its_tokenizer(tmp_path: Path) -> None:
    tensors = random_rwkv7(SHAPE, seed=1)
    config = EngineConfig(threads=1)
    with pytest.raises(TokenizerError, match="'world' has ids up to 65535, but the model has 256 rows"):
        load_model(save_gguf(tmp_path / "a.gguf", SHAPE, tensors), config)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is 'llama'"):
        load_model(save_gguf(tmp_path / "b.gguf", SHAPE, tensors, tokenizer="llama"), config)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is None"):
        load_model(save_gguf(tmp_path / "d.gguf", SHAPE, tensors, tokenizer="gpt2"), config)
    none = load_model(save_gguf(tmp_path / "c.gguf", SHAPE, tensors, tokenizer="none"), config)
    assert none.tokenizer.kind == "bytes"


# Neighbours


def test_other_models_are_told_apart(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "rwkv6qwen2")
    writer.add_tensor("blk.0.time_mix_r_k.weight", np.zeros(4, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with pytest.raises(ModelError, match="its architecture is 'rwkv6qwen2'"):
        recognise(open_checkpoint(path))


def test_a_config_tells_what_names_do_not(tmp_path: Path) -> None:
    save_file({"backbone.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match=r"its config\.json says 'mamba'; its tensors begin with backbone\.weight"):
        recognise(open_checkpoint(tmp_path))


def test_a_bundle_keeps_the_epsilons(tmp_path: Path) -> None:
    from kittiwake.build import build_bundle

    source = save_fla(tmp_path / "m", SMALL_HEADS, random_rwkv7(SMALL_HEADS, seed=9))
    plain = build_bundle(source, tmp_path / "plain", tokenizer="bytes", goldens=1)
    other = build_bundle(source, tmp_path / "other", tokenizer="bytes", goldens=0, group_norm_eps=1e-3)
    manifest = json.loads((other / "manifest.json").read_text())
    assert manifest["model"]["group_norm_eps"] == 1e-3
    found = {path: load(path) for path in (source, plain, other)}
    assert digest(found[source], SMALL_HEADS) == digest(found[plain], SMALL_HEADS)
    assert digest(found[plain], SMALL_HEADS) != digest(found[other], SMALL_HEADS)
    overridden = load(plain, group_norm_eps=1e-3)
    assert digest(overridden, SMALL_HEADS) == digest(found[other], SMALL_HEADS)
