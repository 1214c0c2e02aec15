"""Which chat template a model has: the one asked for, its bundle's, its checkpoint's, or that of its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kittiwake.errors import TokenizerError, UsageError
from kittiwake.text.chat import TEMPLATES, ChatTemplate
from kittiwake.text.tokenizer import Tokenizer

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20
# It lists every added token; the largest published ones have some MB.
MAX_CONFIG_BYTES = 32 << 20
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def choose_template(
    chosen: str | Path | ChatTemplate | None, tokenizer: Tokenizer, *, model: Path, bundled: str | None
) -> ChatTemplate | None:
    """The chat template, or None where the model has none.

    ``chosen`` is a name of TEMPLATES, a Jinja file, a ``tokenizer_config.json``, or a template. Left out, it is the
    ``bundled`` one (of a bundle or GGUF file), else the one beside the checkpoint ``model`` (``chat_template.jinja``, then
    ``tokenizer_config.json``), else g1 for the World vocabulary. Raises UsageError for a name or file that is not
    there, TokenizerError for a template that cannot be used.
    """
    if isinstance(chosen, str) and chosen in TEMPLATES:
        return TEMPLATES[chosen]
    if isinstance(chosen, str | Path):
        if not Path(chosen).is_file():
            raise UsageError(f"there is no chat template {str(chosen)!r}", f"a file, or one of {', '.join(TEMPLATES)}")
        found = _read_template(Path(chosen))
        return None if found is None else _jinja(*found, tokenizer)
    if chosen is not None:
        return chosen
    if bundled is not None:
        file = model / TEMPLATE_FILE
        name = str(file) if file.is_file() else f"in {model}"
        return _jinja(bundled, name, {}, tokenizer)
    beside = _beside(model, tokenizer)
    if beside is not None:
        return _jinja(*beside, tokenizer)
    return TEMPLATES["g1"] if tokenizer.kind == "world" else None


def template_for_bundle(model: Path, tokenizer: Tokenizer) -> str | None:
    """The template beside a checkpoint as a text that stands alone: the special tokens it may name are set in it."""
    beside = _beside(model, tokenizer)
    if beside is None:
        return None
    text, _, tokens = beside
    return standing_alone(text, tokens)


def standing_alone(text: str, tokens: Mapping[str, str]) -> str:
    """A template with the special tokens that it may name set in it."""
    # A template's first line end after a block is dropped, and nothing else of what follows it.
    sets = (f"{{%- set {name} = {json.dumps(token, ensure_ascii=False)} %}}\n" for name, token in tokens.items())
    return "".join(sets) + text


def _beside(model: Path, tokenizer: Tokenizer) -> tuple[str, str, dict[str, str]] | None:
    """(text, name, special tokens) of the template in a checkpoint's folder. A lone file's neighbours are its own only
    where its tokenizer was taken from there too."""
    if not model.is_dir() and tokenizer.kind != "hf":
        return None
    folder = model if model.is_dir() else model.parent
    for path in (folder / TEMPLATE_FILE, folder / CONFIG_FILE):
        if path.is_file() and (found := _read_template(path, optional=True)) is not None:
            return found
    return None


def _read_template(path: Path, optional: bool = False) -> tuple[str, str, dict[str, str]] | None:
    """The template in a file; None for a config without one, where that is allowed (``optional``)."""
    if path.suffix != ".json":
        beside = path.parent / CONFIG_FILE
        tokens = _special_tokens(_config(beside)) if beside.is_file() else {}
        return _read(path, MAX_TEMPLATE_BYTES), str(path), tokens
    config = _config(path)
    text: Any = config.get("chat_template")
    if isinstance(text, list):  # several by name: the one meant for chatting is called default
        named = {str(item.get("name")): item.get("template") for item in text if isinstance(item, dict)}
        text = named.get("default")
    if text is None and optional:
        return None
    if not isinstance(text, str):
        raise TokenizerError(f"{path} has no chat_template that is a text, or a list with one named default")
    return text, str(path), _special_tokens(config)


def _jinja(text: str, name: str, tokens: dict[str, str], tokenizer: Tokenizer) -> ChatTemplate:
    # Imported when wanted: templates that are data have no use for Jinja.
    from kittiwake.text.jinja_template import JinjaTemplate

    return JinjaTemplate(text, name, tokenizer, tokens)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens a template may name, each a text or an object with ``content``."""
    found = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} holds a {type(config).__name__}, expected an object")
    return config


def _read(path: Path, most_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise TokenizerError(f"{path} has more than {most_bytes} bytes")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: byte {error.start}") from None
