"""The tokenizer of GPT-NeoX 20B, which the RWKV-4 models of the Pile and Raven use: 50,277 ids, shipped with kittiwake.

A ``tokenizer.json`` like any other, but for its name: bundles need no copy of it.
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

from kittiwake.errors import TokenizerError
from kittiwake.text.bpe import HFTokenizer

GPT_NEOX_SHA256 = "56ac4821e129d2c520fdaba60abd920fa852ada51b45c0dd52bbb6bd8c985ade"
"""Of the file as published by EleutherAI and in BlinkDL/ChatRWKV, ``20B_tokenizer.json``."""
_FILE = Path(__file__).parent / "gpt_neox_20b.json.xz"


def gpt_neox_file() -> bytes:
    """The ``tokenizer.json``. Raises TokenizerError when the installed file is not the one kittiwake ships."""
    try:
        raw = lzma.decompress(_FILE.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise TokenizerError(f"{_FILE} cannot be read: {error}", "install kittiwake again") from None
    if hashlib.sha256(raw).hexdigest() != GPT_NEOX_SHA256:
        raise TokenizerError(f"{_FILE} is not the tokenizer of GPT-NeoX 20B", "install kittiwake again")
    return raw


class GptNeoxTokenizer(HFTokenizer):
    """Texts are normalised (NFC) before they are encoded; id 0 is end of text."""

    kind = "gpt-neox"

    def __init__(self) -> None:
        super().__init__(gpt_neox_file(), "the tokenizer of GPT-NeoX 20B")

    def files(self) -> dict[str, bytes]:
        """Nothing: the kind alone rebuilds this tokenizer, whose file is fixed by its digest."""
        return {}
