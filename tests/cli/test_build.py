from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kittiwake.checkpoints.bundle import DEFAULT_SHARD_BYTES
from kittiwake.errors import OutputError

from .conftest import Call


@pytest.fixture
def built(fake_module: Callable[..., ModuleType]) -> list[Any]:
    """A fake builder; what it was asked for is in the list."""
    asked: list[Any] = []

    def build_bundle(checkpoint: Path, out: Path, **options: Any) -> Path:
        asked.append((checkpoint, out, options))
        return out

    fake_module("kittiwake.build", build_bundle=build_bundle)
    return asked


def test_options_reach_the_builder(
    call: Call, built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ messages }}\n")
    line = (
        "build in.pth -o out --precision fp16 --tokenizer world --chat-template t.jinja --goldens 3 --max-shard-mb 15"
    )
    result = call(*line.split())
    assert (result.code, result.stdout, result.stderr) == (0, "", "wrote out\n")
    checkpoint, out, options = built[0]
    assert callable(options.pop("progress"))
    assert (checkpoint, out) == (Path("in.pth"), Path("out"))
    assert options == {
        "precision": "fp16",
        "tokenizer": "world",
        "chat_template": "{{ messages }}\n",
        "goldens": 3,
        "max_shard_bytes": 15_000_000,
        "group_norm_eps": None,
        "rescale_every": None,
    }


def test_defaults(call: Call, built: list[Any]) -> None:
    call("build", "in.pth", "-o", "out")
    options = built[0][2]
    assert (options["precision"], options["max_shard_bytes"]) == ("bf16", DEFAULT_SHARD_BYTES)


def test_another_epsilon_reaches_the_builder_once(call: Call, built: list[Any]) -> None:
    call("build", "in.pth", "-o", "out", "--group-norm-eps", "1e-4")
    call("build", "in.pth", "-o", "out")
    assert [options["group_norm_eps"] for _, _, options in built] == [1e-4, None]
    assert call("build", "in.pth", "-o", "out", "--group-norm-eps", "2").code == 2


def test_rescaling_reaches_the_builder_once(call: Call, built: list[Any]) -> None:
    call("build", "in.pth", "-o", "out", "--rescale-every", "6")
    call("build", "in.pth", "-o", "out")
    assert [options["rescale_every"] for _, _, options in built] == [6, None]
    assert call("build", "in.pth", "-o", "out", "--rescale-every", "-1").code == 2


@pytest.mark.parametrize("wrong", ["in.pth", "in.pth -o out --precision int8", "in.pth -o out --goldens -1", "-o out"])
def test_wrong_usage(call: Call, built: list[Any], wrong: str) -> None:
    assert call("build", *wrong.split()).code == 2
    assert built == []


def test_a_chat_template_that_cannot_be_read_is_a_bad_input_file(call: Call, built: list[Any], tmp_path: Path) -> None:
    assert call("build", "in.pth", "-o", "out", "--chat-template", tmp_path / "gone.jinja").code == 3
    assert built == []


def test_an_existing_output_is_a_usage_error(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OutputError("out exists")

    fake_module("kittiwake.build", build_bundle=fail)
    assert call("build", "in.pth", "-o", "out").code == 2
