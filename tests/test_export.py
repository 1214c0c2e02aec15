from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.cli.main import main
from kittiwake.config import EngineConfig
from kittiwake.errors import OutputError, RequestError
from kittiwake.export import export_rows
from kittiwake.llm import LLM
from kittiwake.load import load_tensors

IDS = np.random.default_rng(0).integers(0, 256, 600).tolist()  # several pieces


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_loaded(load_tensors(random_rwkv7(small(2, 64, 16), seed=2), EngineConfig(threads=1)))


def read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    with safe_open(str(path), framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("layout", ["npz", "safetensors"])
def test_files_hold_what_the_api_gives(llm: LLM, tmp_path: Path, layout: str) -> None:
    for what in ("logits", "hidden"):
        out = tmp_path / f"{what}.{layout}"
        report = export_rows(llm, IDS, out, what=what, layout=layout)
        found = read(out)
        expected = llm.logits(IDS) if what == "logits" else llm.hidden_states(IDS)
        assert found["token_ids"].tolist() == IDS
        assert found[what].dtype == np.float32
        assert found[what].tobytes() == expected.tobytes()
        assert tuple(report["shape"]) == found[what].shape == expected.shape
    assert found["layers"].tolist() == [0, 1, 2]


def test_only_some_layers_and_the_last_rows(llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "some.npz"
    export_rows(llm, IDS, out, what="hidden", layout="npz", layers=[2, 0], last=300)
    found = read(out)
    assert found["layers"].tolist() == [2, 0]
    assert found["hidden"].tobytes() == llm.hidden_states(IDS, layers=[2, 0])[-300:].tobytes()
    export_rows(llm, IDS, tmp_path / "one.safetensors", what="logits", layout="safetensors", last=1)
    assert read(tmp_path / "one.safetensors")["logits"].tobytes() == llm.logits(IDS, rows=[-1]).tobytes()


@pytest.mark.parametrize("layout", ["npz", "safetensors"])
def test_nothing_is_left_behind_when_it_fails(
    llm: LLM, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / f"x.{layout}"
    for wrong in ({"what": "hidden", "layers": [3]}, {"what": "logits", "last": 601}):
        with pytest.raises(RequestError):
            export_rows(llm, IDS, out, layout=layout, **wrong)  # type: ignore[arg-type]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_rows(llm, IDS, out, what="logits", layout=layout, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    out.write_bytes(b"precious")
    with pytest.raises(OutputError, match="already exists"):
        export_rows(llm, IDS, out, what="logits", layout=layout)
    assert out.read_bytes() == b"precious"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "tiny.pth", tmp_path / "rows.safetensors"
    torch.save(random_rwkv7(small(2, 64, 16), seed=2), model)
    line = f"export {model} --prompt Once --out {out} --what hidden --layer 2 --json".split()
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [4, 1, 64]
    assert read(out)["hidden"].shape == (4, 1, 64)
    for wrong in (
        line,  # the file is there now
        ["export", str(model), "--prompt", "x", "--out", str(tmp_path / "rows.bin")],
        ["export", str(model), "--prompt", "x", "--out", str(tmp_path / "r.npz"), "--layer", "1"],
        ["export", str(model), "--prompt", "x", "--out", str(tmp_path / "r.npz"), "--what", "hidden", "--layer", "9"],
    ):
        assert main(wrong) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.safetensors", "tiny.pth"]
