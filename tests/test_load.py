"""From a path to a loaded model: which tokenizer, which storage, what is refused, and how much memory it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kittiwake import load
from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.build import build_bundle
from kittiwake.config import EngineConfig
from kittiwake.errors import BundleError, CheckpointError, DeviceError, ModelError, TokenizerError, UsageError
from kittiwake.families.rwkv7 import Rwkv7Family
from kittiwake.load import Loaded, TensorDict, load_model, load_tensors, packaged_model
from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.world import WorldTokenizer
from tests.text.tiny import make_byte_level
from tests.tiny import run_alone, same_state, tiny_model, tiny_tensors

CONFIG = EngineConfig(threads=2)
IDS = [1, 2, 250, 3, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as .pth, .safetensors and bundle."""
    path = tmp_path_factory.mktemp("models")
    torch.save(tiny_tensors(), path / "tiny.pth")
    torch.save(tiny_tensors(), path / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file({name: tensor.contiguous() for name, tensor in tiny_tensors().items()}, path / "tiny.safetensors")
    build_bundle(path / "tiny.pth", path / "bundle", goldens=0)
    return path


def same_model(found: Loaded, expected: Loaded) -> bool:
    (logits, state), (others, other) = (run_alone(loaded.model, IDS) for loaded in (found, expected))
    return logits.tobytes() == others.tobytes() and same_state(state, other)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tiny.pth", "pth"), ("legacy.pth", "pth"), ("tiny.safetensors", "safetensors"), ("bundle", "bundle")],
)
def test_every_format_gives_the_same_model(folder: Path, name: str, kind: str) -> None:
    loaded = load_model(folder / name, CONFIG)
    assert (loaded.path, loaded.format, loaded.threads, loaded.dtype) == (folder / name, kind, 2, "bf16")
    assert loaded.tokenizer.kind == "bytes"
    assert loaded.load_ms > 0
    assert same_model(loaded, tiny_model())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_storage_asked_for_is_the_one_that_is_kept(folder: Path, dtype: str) -> None:
    for name in ("tiny.pth", "bundle"):
        loaded = load_model(folder / name, EngineConfig(threads=1, dtype=dtype))
        assert loaded.dtype == dtype == loaded.model.describe()["dtype"]
        assert loaded.threads == 1 == loaded.model.describe()["threads"]


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_goes_by_the_products_and_not_by_the_vectors(stored: torch.dtype) -> None:
    tensors = {name: t.to(stored) if max(t.shape) != t.numel() else t.float() for name, t in tiny_tensors().items()}
    assert load_tensors(tensors, CONFIG).dtype == ("bf16" if stored is torch.bfloat16 else "fp32")


def test_one_wider_product_widens_all() -> None:
    """Where bfloat16 would round it; one that merely is stored wider changes nothing."""
    name = "blocks.1.ffn.value.weight"
    wide = tiny_tensors()[name].float()
    assert load_tensors({**tiny_tensors(), name: wide * 1.001}, CONFIG).dtype == "fp32"
    assert load_tensors({**tiny_tensors(), name: wide}, CONFIG).dtype == "bf16"


# Tokenizers


def test_a_world_vocabulary_tells_its_tokenizer(tmp_path: Path) -> None:
    shape = small(1, 16, 16, vocab=65_536)
    torch.save(random_rwkv7(shape, 1), tmp_path / "world.pth")
    loaded = load_model(tmp_path / "world.pth", CONFIG)
    assert isinstance(loaded.tokenizer, WorldTokenizer)
    with pytest.raises(TokenizerError, match="'bytes' has 256 ids, but the model has 65536 rows"):
        load_model(tmp_path / "world.pth", CONFIG, tokenizer="bytes")


def _with_json(folder: Path, vocab: int) -> None:
    """A checkpoint of this vocabulary with a tokenizer.json of some 305 ids beside it."""
    torch.save(random_rwkv7(small(1, 16, 16, vocab=vocab), 1), folder / "model.pth")
    (folder / "tokenizer.json").write_text(make_byte_level().to_str())


def test_a_tokenizer_beside_a_checkpoint_is_taken_where_the_vocabulary_tells_nothing(tmp_path: Path) -> None:
    _with_json(tmp_path, 320)
    for path in (tmp_path / "model.pth", tmp_path):
        assert isinstance(load_model(path, CONFIG).tokenizer, HFTokenizer)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="320 rows does not tell its tokenizer"):
        load_model(tmp_path / "model.pth", CONFIG)


def test_a_lone_files_neighbour_is_not_asked_where_the_vocabulary_tells(tmp_path: Path) -> None:
    _with_json(tmp_path, 256)
    assert load_model(tmp_path / "model.pth", CONFIG).tokenizer.kind == "bytes"
    with pytest.raises(TokenizerError, match="has ids up to"):  # in a folder the two belong together
        load_model(tmp_path, CONFIG)


@pytest.mark.parametrize("name", ["tiny.pth", "bundle"])
def test_a_tokenizer_that_does_not_fit_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(TokenizerError, match=r"'world' has ids up to 65\d\d\d, but the model has 256 rows"):
        load_model(folder / name, CONFIG, tokenizer="world")
    with pytest.raises(TokenizerError, match="no tokenizer file"):
        load_model(folder / name, CONFIG, tokenizer=folder / "missing.json")


def test_tensors_in_memory_take_a_tokenizer_too() -> None:
    with pytest.raises(TokenizerError, match="'world'"):
        load_tensors(tiny_tensors(), CONFIG, tokenizer=WorldTokenizer())
    loaded = load_tensors(tiny_tensors(), CONFIG, name="random tiny")
    assert (str(loaded.path), loaded.format, loaded.goldens) == ("random tiny", "random", None)


# Refusals


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, CheckpointError, "model"),
        (lambda path: path.write_bytes(b""), CheckpointError, "model"),
        (lambda path: torch.save({"conv.weight": torch.zeros(3)}, path), ModelError, "begin with conv.weight"),
        (lambda path: torch.save({**tiny_tensors(), "more": torch.zeros(1)}, path), ModelError, "does not have: more"),
    ],
    ids=["missing", "empty", "foreign", "unknown tensor"],
)
def test_what_is_no_model_is_refused(make, error, message, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "model.pth")
    with pytest.raises(error, match=message):
        load_model(tmp_path / "model.pth", CONFIG)


def test_more_threads_than_the_process_has_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="threads 500 is more than the"):
        load_model(folder / "tiny.pth", EngineConfig(threads=500))


def _edit(bundle: Path, **model: object) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["model"] |= model
    (bundle / "manifest.json").write_text(json.dumps({**manifest, **manifest.pop("top", {})}))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"rope": 1}, "rwkv7 needs"),
        ({"layers": 3}, "missing layers.2"),
        ({"layers": 1}, "unknown layers.1"),
        ({"ffn": 64}, r"has shape \(128, 32\), expected \(64, 32\)"),
        ({"heads": 1}, None),
    ],
)
def test_a_bundle_whose_manifest_and_tensors_differ_is_refused(
    folder: Path, tmp_path: Path, model: dict[str, object], message: str | None
) -> None:
    bundle = shutil.copytree(folder / "bundle", tmp_path / "bundle")
    _edit(bundle, **model)
    if message is None:  # another cut of the same channels: nothing in the file tells, the digest of the manifest does
        assert not same_model(load_model(bundle, CONFIG), tiny_model())
        return
    with pytest.raises(BundleError, match=message):
        load_model(bundle, CONFIG)


def test_a_bundle_of_an_unknown_family_is_refused(folder: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(folder / "bundle", tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps({**manifest, "family": "rwkv12"}))
    with pytest.raises(BundleError, match=r"family is 'rwkv12'; known: rwkv4, .*rwkv7"):
        load_model(bundle, CONFIG)


def test_the_packaged_model_is_looked_for_inside_the_package() -> None:
    assert packaged_model().parts[-3:] == ("kittiwake", "demo", "model")


def test_tensors_in_memory_are_a_source_like_any_other() -> None:
    with TensorDict({"a": torch.zeros(2, 3)}, "x") as source:
        assert [(info.name, info.shape, info.nbytes) for info in source.infos()] == [("a", (2, 3), 24)]
        assert source.read("a").shape == (2, 3) and source.config is None
        with TensorDict({"a": torch.ones(2, 3)}, "x") as other:
            assert len(source.digest()) == 64 and source.digest() != other.digest()


# Memory

GROWTH = """
import ctypes, json, sys, threading
from pathlib import Path
from kittiwake.config import EngineConfig
from kittiwake.load import load_model

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

path, config = Path(sys.argv[1]), EngineConfig(threads=2, dtype=sys.argv[2])
load_model(path, config)  # kernels are compiled and products probed once a machine
ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator kept would hide what comes now
start = private()
peak, done = [start], threading.Event()

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], private())

thread = threading.Thread(target=watch)
thread.start()
loaded = load_model(path, config)
done.set()
thread.join()
print(json.dumps({"peak": peak[0] - start, "end": private() - start, "weights": loaded.model.weight_bytes}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A checkpoint of some 100 MB in bfloat16: its path, bytes of its tensors, bytes of the largest."""
    tensors = random_rwkv7(small(3, 1024, rank_w=64, rank_a=64, rank_v=32, rank_g=128, vocab=256), seed=1)
    path = tmp_path_factory.mktemp("large") / "large.pth"
    torch.save(tensors, path)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return path, sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_loading_takes_private_memory_for_the_model_and_one_tensor(large: tuple[Path, int, int], dtype: str) -> None:
    path, total, tensor = large
    command = [sys.executable, "-c", GROWTH, str(path), dtype]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    widened = 2 if dtype == "fp32" else 1
    assert 0.9 * widened * total < found["weights"] <= widened * total
    assert found["end"] > 0.9 * found["weights"]  # the measure works
    # the largest tensor in float32: as it is taken, or as a wide product reads it, where the probe found that faster
    assert found["peak"] <= 1.3 * widened * total + 2 * tensor


# Where a model runs


class CpuOnly:
    """A family, as far as the choice of a device asks."""

    name = "rwkv9"
    devices = ("cpu",)


class Anywhere(CpuOnly):
    """One that has kernels for cards."""

    devices = ("cpu", "cuda")


@pytest.mark.parametrize(
    ("wanted", "family", "reason", "expected"),
    [
        ("cpu", Anywhere, "", "cpu"),
        ("auto", Anywhere, "", "cuda"),
        ("cuda", Anywhere, "", "cuda"),
        ("auto", CpuOnly, "", "cpu"),
        ("auto", Anywhere, "torch is built for the CPU only", "cpu"),
    ],
)
def test_a_card_is_taken_where_there_is_one_that_serves(
    wanted: str, family: Any, reason: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "why_no_cuda", lambda: reason)
    assert load.choose_device(wanted, family()) == expected


@pytest.mark.parametrize(
    ("family", "reason", "said"),
    [
        (CpuOnly, "", "device cuda cannot be used: rwkv9 runs on cpu so far"),
        (Anywhere, "torch is built for the CPU only", "device cuda cannot be used: torch is built for the CPU only"),
    ],
)
def test_a_card_that_is_asked_for_and_cannot_serve_is_refused_with_the_reason(
    family: Any, reason: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "why_no_cuda", lambda: reason)
    with pytest.raises(DeviceError, match=said):
        load.choose_device("cuda", family())


def test_float16_on_the_cpu_is_refused(folder: Path) -> None:
    config = EngineConfig(threads=1, device="cpu", dtype="fp16")
    with pytest.raises(UsageError, match="dtype fp16 needs a CUDA card; the CPU keeps weights as fp32 or bf16"):
        load_model(folder / "tiny.pth", config)


def test_weights_stored_as_float16_stay_so_on_a_card_and_are_widened_on_the_cpu() -> None:
    source, other = TensorDict(tiny_tensors(torch.float16)), TensorDict(tiny_tensors())
    family = Rwkv7Family()
    sizes = family.read_config(source)
    assert load._dtype("auto", family, sizes, source, "cuda") == "fp16"
    assert load._dtype("auto", family, sizes, source, "cpu") == "fp32"
    assert load._dtype("auto", family, sizes, other, "cuda") == "bf16"


def test_a_model_that_a_card_has_no_room_for_is_refused_with_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(load.recognise(TensorDict(tiny_tensors())).__class__, "build", build)
    for name in ("tiny.pth", "bundle"):
        with pytest.raises(
            DeviceError, match=r"no room for .*kept as bf16: CUDA out of memory. Tried to allocate 2.00 GiB"
        ):
            load_model(folder / name, CONFIG)
    with pytest.raises(DeviceError, match="no room for memory kept as bf16"):
        load_tensors(tiny_tensors(), CONFIG)
