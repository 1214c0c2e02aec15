from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import ModelError, UsageError
from kittiwake.evals import references
from kittiwake.evals.references import Reference, open_reference, read_weights
from kittiwake.load import load_model
from kittiwake.text.tokenizer import load_tokenizer

from .fake_runs import ANSWERER

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Counting:
    """After token t the likeliest is t + 1, then 299, then 298, … A state is how many ids were seen."""

    version = "1"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def last(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        self.asked.append(list(ids))
        rows, seen = self.rows(ids, state)
        return rows[-1], seen

    def rows(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        seen = state or 0
        places = torch.arange(seen + 1, seen + len(ids) + 1)
        rows = places[:, None] * torch.arange(300) / 3000
        rows[torch.arange(len(ids)), torch.tensor(ids) + 1] = 99.0
        return rows, seen + len(ids)


class Bytes:
    """Tokens are bytes; 9 ends a text, and 270 ids are known."""

    kind = "fake"
    vocab_size = 270
    eos_ids: tuple[int, ...] = (9,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != 9)

    def is_valid(self, token_id: int) -> bool:
        return token_id != 100


def _reference() -> tuple[Reference, Counting]:
    network = Counting()
    return Reference(network, Bytes(), 300, ANSWERER), network  # type: ignore[arg-type]


def test_eight_tokens_are_drawn_and_the_last_is_not_run() -> None:
    reference, network = _reference()
    with reference:
        found = reference.generate(["ABC", [1]], GREEDY)
    assert (found[0].text, found[0].token_ids, found[0].prompt_tokens) == ("DEFGHIJK", tuple(b"DEFGHIJK"), 3)
    assert (found[0].finish_reason, found[1].finish_reason) == ("length", "stop")
    assert found[1].token_ids == (2, 3, 4, 5, 6, 7, 8, 9)
    assert network.asked[:8] == [list(b"ABC"), *([token] for token in b"DEFGHIJ")]


def test_an_end_of_text_ends_and_is_no_text() -> None:
    reference, network = _reference()
    found = reference.generate([[7]], GREEDY)[0]
    assert (found.text, found.token_ids, found.finish_reason) == ("\x08", (8, 9), "stop")
    assert network.asked == [[7], [8]]


def test_ids_that_the_tokenizer_cannot_spell_are_not_drawn() -> None:
    reference, _ = _reference()
    assert reference.generate([[99]], SamplingParams(max_tokens=1, temperature=0.0))[0].token_ids == (269,)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0, stop="x")])
def test_only_greedy_decoding_is_offered(params: SamplingParams) -> None:
    with pytest.raises(UsageError, match="greedily"):
        _reference()[0].generate(["A"], params)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        _reference()[0].generate([""], GREEDY)


def test_scores_are_the_same_whole_and_in_pieces() -> None:
    reference, network = _reference()
    ids = [5, 6, 200, 3, 4, 250]
    whole = reference.score(ids)
    rows = network.rows(ids, None)[0].double()
    wanted = [torch.log_softmax(rows[place], -1)[token].item() for place, token in enumerate(ids[1:])]
    assert whole == pytest.approx(wanted, rel=1e-12)
    assert whole.dtype == np.float64
    pieces = list(reference.score_stream([ids[:1], [], ids[1:3], ids[3:]]))
    assert [len(piece) for piece in pieces] == [0, 2, 3]
    assert np.concatenate(pieces) == pytest.approx(whole, rel=1e-12)


def test_options_that_would_not_reach_a_reference_are_refused() -> None:
    with pytest.raises(UsageError, match="one of transformers, rwkv"):
        open_reference("llama", None, EngineConfig())
    with pytest.raises(UsageError, match="group-norm-eps"):
        open_reference("transformers", None, EngineConfig(group_norm_eps=1e-5))
    with pytest.raises(UsageError, match="rescale-every"):
        open_reference("rwkv", None, EngineConfig(rescale_every=6))


def _rwkv4(layers: int = 8, width: int = 32, ffn: int = 96, vocab: int = 256) -> dict[str, torch.Tensor]:
    """A random RWKV-4 in BlinkDL's names: decays over the trained range, some large keys."""
    draw = torch.Generator().manual_seed(4)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(rows, columns, generator=draw) / columns**0.5

    def shares() -> torch.Tensor:
        return torch.rand(1, 1, width, generator=draw)

    tensors = {"emb.weight": matrix(vocab, width, 3.0), "head.weight": matrix(vocab, width, 4.0)}
    norms = ["blocks.0.ln0", "ln_out", *(f"blocks.{i}.ln{n}" for i in range(layers) for n in (1, 2))]
    for norm in norms:
        tensors[f"{norm}.weight"] = 1 + 0.1 * torch.randn(width, generator=draw)
        tensors[f"{norm}.bias"] = 0.1 * torch.randn(width, generator=draw)
    for i in range(layers):
        att, ffn_name = f"blocks.{i}.att", f"blocks.{i}.ffn"
        tensors[f"{att}.time_decay"] = torch.linspace(-5, 3, width)
        tensors[f"{att}.time_first"] = torch.randn(width, generator=draw)
        tensors |= {f"{att}.time_mix_{letter}": shares() for letter in "kvr"}
        tensors |= {f"{ffn_name}.time_mix_{letter}": shares() for letter in "kr"}
        tensors |= {f"{att}.{name}.weight": matrix(width, width) for name in ("value", "receptance", "output")}
        tensors[f"{att}.key.weight"] = matrix(width, width, 4.0)
        tensors[f"{ffn_name}.key.weight"] = matrix(ffn, width)
        tensors[f"{ffn_name}.value.weight"] = matrix(width, ffn)
        tensors[f"{ffn_name}.receptance.weight"] = matrix(width, width)
    return tensors


def _save_as_transformers(tensors: dict[str, torch.Tensor], folder: Path, prefix: str, rescale_every: int) -> None:
    """The layout of transformers, written out by hand."""
    names = {"att": "attention", "ffn": "feed_forward", "ln0": "pre_ln"}
    mixes = {"time_mix_k": "time_mix_key", "time_mix_v": "time_mix_value", "time_mix_r": "time_mix_receptance"}
    if prefix == "backbone":
        names = {"ln0": "pre_ln"}
    stored = {}
    for name, tensor in tensors.items():
        parts = [names.get(part, mixes.get(part, part)) for part in name.split(".")]
        if parts[0] == "emb":
            parts[0] = "embeddings"
        if parts[0] == "ln_out" and prefix == "backbone":
            parts[0] = "norm_f"
        stored[".".join(parts if parts[0] == "head" else [prefix, *parts])] = tensor.contiguous()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = {"model_type": "rwkv", "rescale_every": rescale_every, "intermediate_size": None, "eos_token_id": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))


def test_every_layout_gives_the_same_tensors(tmp_path: Path) -> None:
    tensors = _rwkv4(layers=2)
    torch.save(tensors, tmp_path / "model.pth")
    found = [read_weights(tmp_path / "model.pth")]
    for prefix in ("rwkv", "backbone"):
        _save_as_transformers(tensors, tmp_path / prefix, prefix, 6)
        found.append(read_weights(tmp_path / prefix))
    assert [one.is_plain_pth for one in found] == [True, False, False]
    for one in found:
        assert (one.version, one.layers, one.vocab_size, one.tokenizer.kind) == (4, 2, 256, "bytes")
        assert one.tensors.keys() == tensors.keys()
        assert all(torch.equal(one.tensors[name], tensor) for name, tensor in tensors.items())
    assert found[1].config["rescale_every"] == 6


def test_a_bundle_of_rwkv7_is_turned_back(tmp_path: Path) -> None:
    from kittiwake.build import build_bundle

    tensors = random_rwkv7(small(2, 64, 16), seed=1)
    torch.save(tensors, tmp_path / "model.pth")
    build_bundle(tmp_path / "model.pth", tmp_path / "bundle")
    found = read_weights(tmp_path / "bundle")
    plain = read_weights(tmp_path / "model.pth")
    unused = {name for name in tensors if name.startswith("blocks.0.att.v") and name[-1] in "012"}
    assert found.tensors.keys() == tensors.keys() - unused
    for name, tensor in found.tensors.items():
        wanted = plain.tensors[name].squeeze()
        assert torch.equal(tensor.float(), wanted.float()), name
    assert found.version == plain.version == 7


def test_names_that_no_reference_knows_are_refused(tmp_path: Path) -> None:
    torch.save({"some.weight": torch.zeros(3, 3)}, tmp_path / "model.pth")
    with pytest.raises(ModelError):
        read_weights(tmp_path / "model.pth")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    for name in ("RWKV_V7_ON", "RWKV_JIT_ON", "RWKV_CUDA_ON"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(references.importlib, "import_module", missing)
    torch.save(_rwkv4(layers=1), tmp_path / "model.pth")
    for name in references.REFERENCES:
        with pytest.raises(UsageError, match=f"the reference {name} cannot be used") as caught:
            open_reference(name, tmp_path / "model.pth", EngineConfig(threads=1))
        assert caught.value.hint == f"install it: pip install {name}"


def test_transformers_has_rwkv4_only(tmp_path: Path) -> None:
    torch.save(random_rwkv7(small(1, 64, 16), seed=1), tmp_path / "model.pth")
    with pytest.raises(ModelError, match="RWKV-7") as caught:
        open_reference("transformers", tmp_path / "model.pth", EngineConfig(threads=1))
    assert caught.value.hint == "use --reference rwkv"


@pytest.mark.parametrize(
    ("device", "processor", "threads"), [("cuda", "NVIDIA Fake 1000", 0), ("cpu", "a processor", 1)]
)
def test_a_reference_tells_what_it_runs_on_as_kittiwake_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, processor: str, threads: int
) -> None:
    """Else no ratio of times is told where both sides ran on one card."""
    network = Counting()
    monkeypatch.setattr(references, "TransformersRwkv", lambda *_: network)
    monkeypatch.setattr(references, "find_card", lambda: SimpleNamespace(card=SimpleNamespace(name="NVIDIA Fake 1000")))
    monkeypatch.setattr(references, "processor_name", lambda: "a processor")
    torch.save(_rwkv4(layers=1), tmp_path / "model.pth")
    before = torch.get_num_threads()
    with open_reference("transformers", tmp_path / "model.pth", EngineConfig(device=device, threads=1)) as opened:
        assert (opened.answerer.processor, opened.answerer.threads) == (processor, threads)
        assert torch.get_num_threads() == (threads or before)
    assert torch.get_num_threads() == before


def test_what_a_library_raises_is_an_error_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise AssertionError("no such strategy")

    monkeypatch.setattr(references, "RwkvPackage", fail)
    torch.save(_rwkv4(layers=1), tmp_path / "model.pth")
    with pytest.raises(ModelError, match="AssertionError: no such strategy"):
        open_reference("rwkv", tmp_path / "model.pth", EngineConfig(threads=1))


# The libraries set process-wide flags and read the environment when they are imported: they get a process of their own.
_CHILD = """
import json, sys
from pathlib import Path
from kittiwake.config import EngineConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.evals.references import open_reference

found = []
for name, path in json.loads(sys.argv[1]):
    with open_reference(name, Path(path), EngineConfig(threads=1)) as llm:
        completion = llm.generate(["Once upon a"], SamplingParams(max_tokens=8, temperature=0.0))[0]
        scores = llm.score(list(b"Once upon a time there was")).tolist()
        found.append([completion.token_ids, scores, llm.answerer.implementation, llm.answerer.family])
print(json.dumps(found))
"""


def _in_child(*wanted: tuple[str, Path]) -> Any:
    names = json.dumps([(name, str(path)) for name, path in wanted])
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_CHILD}", names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("rwkv") is None or find_spec("transformers") is None, reason="rwkv and transformers are not installed"
)
def test_two_libraries_agree_on_an_rwkv4(tmp_path: Path) -> None:
    tensors = _rwkv4()
    torch.save(tensors, tmp_path / "model.pth")
    _save_as_transformers(tensors, tmp_path / "folder", "backbone", rescale_every=0)
    _save_as_transformers(tensors, tmp_path / "halved", "rwkv", rescale_every=2)
    found = _in_child(
        ("rwkv", tmp_path / "model.pth"),
        ("rwkv", tmp_path / "folder"),
        ("transformers", tmp_path / "folder"),
        ("transformers", tmp_path / "model.pth"),
        ("transformers", tmp_path / "halved"),
    )
    tokens, scores, *_ = found[0]
    assert [one[2:] for one in found] == [["rwkv", "rwkv4"]] * 2 + [["transformers", "rwkv4"]] * 3
    assert len(tokens) == 8
    for other in found[1:]:
        assert other[0] == tokens
    assert found[1][1] == scores
    assert found[2][1] == pytest.approx(scores, abs=1e-4)
    # halving the residual enlarges the norms' epsilon: close, and not the same
    assert found[3][1] == pytest.approx(scores, abs=0.05)
    assert found[4][1] == pytest.approx(scores, abs=0.05)
    assert max(abs(np.subtract(found[4][1], scores))) > 1e-6


@pytest.mark.slow
@pytest.mark.skipif(find_spec("rwkv") is None, reason="rwkv is not installed")
def test_the_rwkv_package_agrees_with_kittiwake_on_an_rwkv7(tmp_path: Path) -> None:
    from kittiwake.llm import LLM

    path = tmp_path / "model.pth"
    torch.save(random_rwkv7(small(2, 64, 16), seed=3), path)
    [[tokens, scores, *_]] = _in_child(("rwkv", path))
    loaded = load_model(path, EngineConfig(threads=1, dtype="fp32"))
    llm = LLM.from_loaded(loaded)
    ids = list(b"Once upon a time there was")
    assert llm.score(ids) == pytest.approx(scores, abs=1e-3)
    assert llm.generate("Once upon a", GREEDY)[0].token_ids == tuple(tokens)
    assert load_tokenizer("bytes").digest() == loaded.tokenizer.digest()
