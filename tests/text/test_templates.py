from __future__ import annotations

import json
from pathlib import Path

import pytest

from kittiwake.errors import TokenizerError, UsageError
from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.text.chat import TEMPLATES, read_messages
from kittiwake.text.templates import CONFIG_FILE, TEMPLATE_FILE, choose_template, template_for_bundle
from kittiwake.text.world import WorldTokenizer

HI = read_messages([{"role": "user", "content": "hi"}])


def _config(folder: Path, **content: object) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(content))


def test_the_vocabulary_decides_last(tmp_path: Path, world: WorldTokenizer) -> None:
    assert choose_template(None, world, model=tmp_path / "m.pth", bundled=None) is TEMPLATES["g1"]
    assert choose_template(None, BytesTokenizer(), model=tmp_path, bundled=None) is None


def test_what_is_asked_for_comes_first(tmp_path: Path, world: WorldTokenizer) -> None:
    assert choose_template("g1-think", world, model=tmp_path, bundled="b") is TEMPLATES["g1-think"]
    assert choose_template(TEMPLATES["qa"], world, model=tmp_path, bundled="b") is TEMPLATES["qa"]
    path = tmp_path / "my.jinja"
    path.write_text("mine")
    found = choose_template(str(path), world, model=tmp_path, bundled="b")
    assert found is not None
    assert (found.name, found.render(HI).text) == (str(path), "mine")
    with pytest.raises(UsageError, match=r"no chat template 'nope\.jinja'"):
        choose_template("nope.jinja", world, model=tmp_path, bundled=None)


def test_then_the_bundles_own_then_the_folders(tmp_path: Path, byte_level: HFTokenizer) -> None:
    _config(tmp_path, chat_template="{{ bos_token }}config", bos_token={"content": "<|im_start|>"})
    bundled = choose_template(None, byte_level, model=tmp_path, bundled="bundled")
    beside = choose_template(None, byte_level, model=tmp_path, bundled=None)
    lone = choose_template(None, byte_level, model=tmp_path / "m.safetensors", bundled=None)
    assert bundled is not None
    assert beside is not None
    assert lone is not None
    assert bundled.render(HI).text == "bundled"
    assert beside.render(HI).text == lone.render(HI).text == "<|im_start|>config"
    (tmp_path / TEMPLATE_FILE).write_text("{{ bos_token }}file")
    file = choose_template(None, byte_level, model=tmp_path, bundled=None)
    assert file is not None
    assert file.render(HI).text == "<|im_start|>file"


def test_neighbours_of_a_lone_file_are_not_its_own(tmp_path: Path) -> None:
    _config(tmp_path, chat_template="another's")
    assert choose_template(None, BytesTokenizer(), model=tmp_path / "m.pth", bundled=None) is None


def test_of_several_the_default_is_meant(tmp_path: Path, byte_level: HFTokenizer) -> None:
    _config(tmp_path, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    found = choose_template(None, byte_level, model=tmp_path, bundled=None)
    assert found is not None
    assert found.render(HI).text == "d"


def test_a_template_in_a_bundle_stands_alone(tmp_path: Path, byte_level: HFTokenizer) -> None:
    template = "{{ bos_token }}hi{{ eos_token }}"
    _config(tmp_path, chat_template=template, bos_token='<"s>', eos_token="<|im_end|>")
    text = template_for_bundle(tmp_path, byte_level)
    assert text is not None
    found = choose_template(None, byte_level, model=tmp_path, bundled=text)
    assert found is not None
    assert found.render(HI).text == '<"s>hi<|im_end|>'
    assert found.stop_ids == tuple(byte_level.encode("<|im_end|>", allow_special=True))
    assert template_for_bundle(tmp_path / "none", byte_level) is not None
    assert template_for_bundle(tmp_path / "none" / "m.pth", byte_level) is None


@pytest.mark.parametrize(
    "content",
    [b"{", b"[1]", b"\xff\xfe", b'{"chat_template": 3}', b'{"chat_template": [{"name": "x"}]}', b"[" * 100_000],
)
def test_damaged_configs_are_named(tmp_path: Path, byte_level: HFTokenizer, content: bytes) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(TokenizerError, match=CONFIG_FILE):
        choose_template(tmp_path / CONFIG_FILE, byte_level, model=tmp_path, bundled=None)
