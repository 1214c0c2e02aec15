"""A checkpoint becomes a bundle: the same bits when it is loaded, goldens that replay, and nothing half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kittiwake import __version__
from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.build import GOLDEN_PROMPTS, GOLDEN_TOKENS, build_bundle
from kittiwake.checkpoints.bundle import read_bundle
from kittiwake.config import EngineConfig
from kittiwake.errors import CheckpointError, KittiwakeError, ModelError, OutputError, TokenizerError
from kittiwake.llm import LLM, SamplingParams
from kittiwake.load import Loaded, load_model, load_tensors
from kittiwake.text.tokenizer import load_tokenizer
from tests.text.tiny import make_byte_level
from tests.tiny import SHAPE, run_alone, same_state, tiny_tensors

CONFIG = EngineConfig(threads=1)
IDS = [7, 1, 2, 250, 3, 3]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def checkpoint(folder: Path, stored: torch.dtype = torch.bfloat16, **changes: torch.Tensor) -> Path:
    path = folder / "tiny.pth"
    torch.save({**tiny_tensors(stored), **{name.replace("__", "."): t for name, t in changes.items()}}, path)
    return path


def same_model(found: Loaded, expected: Loaded) -> bool:
    (logits, state), (others, other) = (run_alone(loaded.model, IDS) for loaded in (found, expected))
    return logits.tobytes() == others.tobytes() and same_state(state, other)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_a_bundle_is_the_checkpoint_at_its_precision(tmp_path: Path, stored: str, precision: str) -> None:
    path = checkpoint(tmp_path, DTYPES[stored])
    out = build_bundle(path, tmp_path / "bundle", precision=precision, goldens=0)
    assert out == tmp_path / "bundle"
    loaded = load_model(out, CONFIG)
    assert (loaded.format, loaded.dtype) == ("bundle", "bf16" if precision == "bf16" else "fp32")
    converted = {name: tensor.to(DTYPES[precision]) for name, tensor in tiny_tensors(DTYPES[stored]).items()}
    assert same_model(loaded, load_tensors(converted, CONFIG))
    lossless = stored == precision or precision == "fp32"
    if lossless:
        assert same_model(loaded, load_model(path, CONFIG))


def test_bfloat16_is_the_default(tmp_path: Path) -> None:
    out = build_bundle(checkpoint(tmp_path, torch.float32), tmp_path / "bundle", goldens=0)
    assert read_bundle(out).manifest.precision == "bf16"


def test_the_manifest_tells_where_the_bundle_came_from(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    bundle = read_bundle(build_bundle(path, tmp_path / "bundle", goldens=1))
    manifest = bundle.manifest
    assert (manifest.family, manifest.builder, manifest.tokenizer_kind) == ("rwkv7", __version__, "bytes")
    assert (manifest.source.name, manifest.source.format) == ("tiny.pth", "pth")
    assert manifest.model["layers"] == SHAPE.layers and manifest.model["ranks"]["gate"] == SHAPE.rank_g
    assert len(bundle.goldens or ()) == 1


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    first, second = (build_bundle(path, tmp_path / name, goldens=3) for name in ("one", "two"))
    assert content(first) == content(second)


def test_another_format_of_the_same_tensors_gives_the_same_weights(tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tiny_tensors().items()}, tmp_path / "tiny.safetensors")
    one = content(build_bundle(tmp_path / "tiny.safetensors", tmp_path / "one", goldens=2))
    other = content(build_bundle(checkpoint(tmp_path), tmp_path / "two", goldens=2))
    assert {name for name in one if one[name] != other[name]} == {"manifest.json"}  # it names its source


def test_small_shards_change_no_bit(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    out = build_bundle(path, tmp_path / "bundle", goldens=0, max_shard_bytes=80_000)
    assert len(list(out.glob("weights-*.safetensors"))) > 1
    assert same_model(load_model(out, CONFIG), load_model(path, CONFIG))


# Goldens


@pytest.mark.parametrize("count", [1, len(GOLDEN_PROMPTS), len(GOLDEN_PROMPTS) + 3])
def test_goldens_are_greedy_answers_of_the_bundle(tmp_path: Path, count: int) -> None:
    loaded = load_model(build_bundle(checkpoint(tmp_path), tmp_path / "bundle", goldens=count), CONFIG)
    goldens = loaded.goldens
    assert goldens is not None and len(goldens) == count
    assert [golden.prompt for golden in goldens[: len(GOLDEN_PROMPTS)]] == list(GOLDEN_PROMPTS[:count])
    assert len({golden.prompt for golden in goldens}) == count
    llm = LLM.from_loaded(loaded, CONFIG)
    params = SamplingParams(max_tokens=GOLDEN_TOKENS, temperature=0.0, ignore_eos=True)
    for golden in goldens:
        assert golden.prompt_ids == tuple(loaded.tokenizer.encode(golden.prompt))
        assert golden.completion_ids == llm.generate(golden.prompt_ids, params)[0].token_ids
        assert len(golden.completion_ids) == GOLDEN_TOKENS


def test_goldens_are_those_of_the_rounded_weights(tmp_path: Path) -> None:
    """What is written is what answers, not the checkpoint before it was rounded."""
    path = checkpoint(tmp_path, torch.float32)
    goldens = {}
    for precision in DTYPES:
        loaded = load_model(build_bundle(path, tmp_path / precision, precision=precision, goldens=4), CONFIG)
        goldens[precision] = loaded.goldens
        llm = LLM.from_loaded(loaded, CONFIG)
        params = SamplingParams(max_tokens=GOLDEN_TOKENS, temperature=0.0)
        for golden in loaded.goldens or ():
            assert golden.completion_ids == llm.generate(golden.prompt_ids, params)[0].token_ids
    assert goldens["fp32"] != goldens["bf16"]


def test_without_goldens_there_is_no_file_of_them(tmp_path: Path) -> None:
    out = build_bundle(checkpoint(tmp_path), tmp_path / "bundle", goldens=0)
    assert load_model(out, CONFIG).goldens is None
    assert sorted(content(out)) == ["manifest.json", "weights-00001.safetensors"]


# What comes along


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    torch.save(random_rwkv7(small(1, 16, 16, vocab=320), 1), tmp_path / "model.pth")
    (tmp_path / "tok.json").write_text(make_byte_level().to_str())
    out = build_bundle(
        tmp_path / "model.pth", tmp_path / "bundle", tokenizer=tmp_path / "tok.json", chat_template="{{ text }}", goldens=2
    )  # fmt: skip
    loaded = load_model(out, CONFIG)
    assert loaded.chat_template == "{{ text }}"
    assert loaded.tokenizer.kind == "hf"
    assert loaded.tokenizer.digest() == load_tokenizer(tmp_path / "tok.json").digest()


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    build_bundle(checkpoint(tmp_path), tmp_path / "bundle", goldens=1, progress=lambda *step: told.append(step))
    written = [(done, total) for what, done, total in told if what == "writing weights"]
    assert written == sorted(written) and written[-1][0] == written[-1][1]
    assert any(what == "loading tensors" for what, _, _ in told)  # for the goldens


# Refusals


def test_a_target_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    for name in ("folder", "file", "link"):
        with pytest.raises(OutputError, match=f"{name}.* exists already") as caught:
            build_bundle(path, tmp_path / name)
        assert caught.value.exit_code == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine" and not any((tmp_path / "folder").iterdir())


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        (
            {"blocks__1__att__key__weight": torch.full((32, 32), torch.nan)},
            {},
            KittiwakeError,
            "time_mix.key.weight.* NaN",
        ),
        ({"ln_out__bias": torch.full((32,), torch.inf)}, {}, KittiwakeError, "output_norm.bias"),
        (
            {"head__weight": torch.full((256, 32), 1e6)},
            {"precision": "fp16"},
            CheckpointError,
            "head.weight.* fit float16",
        ),
        ({"more": torch.zeros(2)}, {}, ModelError, "does not have: more"),
        ({"ln_out__bias": torch.zeros(3)}, {}, ModelError, r"ln_out\.bias"),
        ({}, {"tokenizer": "world"}, TokenizerError, "'world'"),
        ({}, {"tokenizer": "missing.json"}, TokenizerError, "missing.json"),
        ({}, {"precision": "int8"}, KittiwakeError, "int8"),
    ],
    ids="nan inf overflow unknown shape tokenizer no-tokenizer precision".split(),
)
def test_what_makes_no_bundle_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, torch.Tensor], options: dict[str, Any], error: type[KittiwakeError], message: str
) -> None:
    path = checkpoint(tmp_path, **changes)
    with pytest.raises(error, match=message):
        build_bundle(path, tmp_path / "bundle", **options)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.pth"]


def test_a_bundle_is_not_built_from_a_bundle(tmp_path: Path) -> None:
    out = build_bundle(checkpoint(tmp_path), tmp_path / "bundle", goldens=0)
    with pytest.raises(CheckpointError, match="is a bundle already"):
        build_bundle(out, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_goldens_that_cannot_be_made_leave_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ModelError("no answer today")

    monkeypatch.setattr("kittiwake.build.LLM.generate", fail)
    path = checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no answer today"):
        build_bundle(path, tmp_path / "bundle")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.pth"]
