"""Documents are checked like code: links lead somewhere, commands parse, examples run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from kittiwake.cli.main import cli
from tests.cli.conftest import FakeLLM

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "lab").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _links() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            if "://" not in target:
                yield str(path.relative_to(ROOT)), target


def _commands() -> Iterator[str]:
    for path in DOCUMENTS:
        for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
            if language == "console":
                yield from re.findall(r"^\$ kittiwake (.+)$", body, re.MULTILINE)


@pytest.mark.parametrize(("document", "target"), sorted(set(_links())))
def test_links_lead_to_files(document: str, target: str) -> None:
    assert ((ROOT / document).parent / target).exists()


@pytest.mark.parametrize("line", sorted(set(_commands())))
def test_commands_in_the_documents_parse(line: str) -> None:
    arguments = shlex.split(line, comments=True)
    command: click.Command = cli
    context = click.Context(cli, info_name="kittiwake", **cli.context_settings)
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
        context = command.make_context(name, list(arguments), parent=context)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_run(document: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import kittiwake

    module = ModuleType("kittiwake.llm")
    vars(module)["LLM"] = FakeLLM(reply="and the wind")
    monkeypatch.setitem(sys.modules, "kittiwake.llm", module)
    monkeypatch.setattr(kittiwake, "LLM", module.LLM, raising=False)
    for language, body in FENCE.findall(document.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(body, str(document), "exec"), {})
            assert "and the wind" in capsys.readouterr().out
