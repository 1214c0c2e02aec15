from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kittiwake.cli.options import field_help
from kittiwake.cli.serve import serve
from kittiwake.config import SERVING, EngineConfig, ServerConfig

from .conftest import Call


class FakeSupervisor:
    """Remembers what it was made for, and ends at once."""

    made: list[tuple[Any, EngineConfig, ServerConfig, dict[str, Any]]]

    def __init__(self, model: Any, engine: EngineConfig, server: ServerConfig, **more: Any) -> None:
        self.made.append((model, engine, server, more))

    def run(self) -> int:
        return 0


@pytest.fixture
def made(fake_module: Callable[..., ModuleType]) -> list[tuple[Any, EngineConfig, ServerConfig, dict[str, Any]]]:
    FakeSupervisor.made = []
    fake_module("kittiwake.server.supervisor", Supervisor=FakeSupervisor)
    return FakeSupervisor.made


def test_defaults_are_those_of_the_configurations(call: Call, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KITTIWAKE_API_KEY", raising=False)
    assert call("serve").code == 0
    model, engine, server, more = made[0]
    assert (model, engine, server) == (None, SERVING, ServerConfig())
    assert more == {"tokenizer": None, "template": None, "ready_file": None}


def test_options_fill_them(call: Call, made: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nsecond-key\n\n third-key \n")
    keys.chmod(0o600)
    result = call(
        "serve", "some.pth", "--host", "0.0.0.0", "--port", "0", "--api-key", "first-key", "--api-key-file", keys,
        "--http-workers", "4", "--slots", "7", "--prefill-chunk", "64", "--max-queue", "9", "--cache-bytes", "1000",
        "--cache-disk", tmp_path, "--cors-origin", "https://a.example", "--cors-origin", "https://b.example",
        "--log-format", "json", "--log-prompts", "--drain-s", "2.5", "--restart-engine", "--ready-file", tmp_path / "r",
        "--served-model-name", "mine", "--template", "g1", "--threads", "1",
    )  # fmt: skip
    assert (result.code, result.stderr) == (0, "")
    model, engine, server, more = made[0]
    assert model == "some.pth"
    assert (engine.slots, engine.prefill_chunk, engine.max_waiting) == (7, 64, 9)
    assert (engine.cache_ram_bytes, engine.cache_disk, engine.threads) == (1000, str(tmp_path), 1)
    assert server.api_keys == ("first-key", "second-key", "third-key")
    assert (server.host, server.port, server.http_workers, server.served_model_name) == ("0.0.0.0", 0, 4, "mine")
    assert server.cors_origins == ("https://a.example", "https://b.example")
    assert (server.log_format, server.log_prompts, server.drain_s, server.restart_engine) == ("json", True, 2.5, True)
    assert more == {"tokenizer": None, "template": "g1", "ready_file": tmp_path / "r"}


def test_every_field_has_an_option() -> None:
    options = {parameter.name for parameter in serve.params}
    assert {one.name for one in fields(ServerConfig)} - {"api_keys"} <= options
    assert field_help("ServerConfig").keys() == {one.name for one in fields(ServerConfig)}


@pytest.mark.parametrize(
    "content", [b"key-number-one\r\n\r\nkey-number-two\r\n", b"\xef\xbb\xbfkey-number-one\nkey-number-two"]
)
def test_key_files_of_any_editor_are_read(call: Call, made: list[Any], tmp_path: Path, content: bytes) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    keys.chmod(0o600)
    assert call("serve", "--api-key-file", keys).code == 0
    assert made[0][2].api_keys == ("key-number-one", "key-number-two")


def test_an_empty_key_does_not_let_everyone_in(call: Call, made: list[Any]) -> None:
    result = call("serve", "--api-key", "")
    assert result.code == 2 and "at least 8 printable" in result.stderr
    assert made == []


def test_keys_that_others_can_read_are_warned_about(call: Call, made: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine\n")
    keys.chmod(0o644)
    assert "can be read by others" in call("serve", "--api-key-file", keys).stderr


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot be read"), ("# none\n", "holds no key"), ("short", "8 print")]
)
def test_key_files_that_are_none(call: Call, made: list[Any], tmp_path: Path, content: str | None, told: str) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
        keys.chmod(0o600)
    result = call("serve", "--api-key-file", keys)
    assert result.code in (2, 3)
    assert told in result.stderr
    assert made == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--cors-origin", "example.org"], "a CORS origin is as https://example.org"),
        (["--cors-origin", "https://example.org/"], "a CORS origin is as https://example.org"),
        (["--drain-s", "-1"], "drain_s must be a number of seconds"),
        (["--drain-s", "nan"], "drain_s must be a number of seconds"),
        (["--max-body-bytes", "1"], "max_body_bytes must be a whole number from 1024"),
        (["--http-workers", "0"], "0 is not in the range"),
        (["--http-workers", "1000"], "http_workers must be a whole number from 1 to 256"),
        (["--host", ""], "host is empty"),
        (["--log-format", "xml"], "xml"),
    ],
)
def test_values_that_cannot_be(call: Call, made: list[Any], arguments: list[str], told: str) -> None:
    result = call("serve", *arguments)
    assert result.code == 2
    assert told in result.stderr
    assert made == []


def test_an_open_address_needs_a_key(call: Call) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        result = call("serve", "--host", host)
        assert result.code == 2
        assert "no API key is set" in result.stderr and "--allow-anonymous" in result.stderr


@pytest.mark.parametrize("host", ["no.such.host.invalid", "127.no.such.host.invalid", "x" * 100])
@pytest.mark.parametrize("key", [(), ("--api-key", "some-key-of-mine")])
def test_a_host_that_does_not_exist(call: Call, host: str, key: tuple[str, ...]) -> None:
    result = call("serve", "--host", host, *key)
    assert result.code == 2
    assert f"{host!r} cannot be resolved" in result.stderr


def test_the_unit_for_systemd_starts_what_there_is() -> None:
    unit = (Path(__file__).parents[2] / "examples" / "kittiwake.service").read_text(encoding="utf-8")
    line = re.search(r"^ExecStart=((?:.*\\\n)*.*)", unit, re.MULTILINE)
    assert line is not None
    words = shlex.split(line[1].replace("\\\n", " "))
    assert words[:2] == ["/opt/kittiwake/bin/kittiwake", "serve"]
    context = serve.make_context("serve", words[2:])
    assert context.params["cache_disk"] == "/var/cache/kittiwake/states"


def test_what_is_not_installed_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("kittiwake.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    result = call("serve")
    assert result.code == 2
    assert "pip install 'kittiwake[serve]'" in result.stderr
