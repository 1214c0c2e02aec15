"""transformers' reading of the vocabulary inside a GGUF file as a reference, run in a process of its own.

This file is both sides: :func:`encode` starts it as a script, which answers on its stdout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SKIP_REASON = "transformers that reads vocabularies of GGUF files is not installed"


def is_available() -> bool:
    """Whether a transformers that reads them is installed; it is not imported."""
    found = importlib.util.find_spec("transformers")
    place = "integrations/gguf/gguf_tokenizer_mapping.py"
    return found is not None and Path(str(found.origin)).parent.joinpath(place).is_file()


def encode(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, special tokens being read as such. transformers does not normalise: give it texts in NFC."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", __file__, str(path)]
    process = subprocess.run(command, env=environment, input=json.dumps(texts), capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"transformers failed with code {process.returncode}:\n{process.stdout}{process.stderr}")
    found: list[list[int]] = json.loads(process.stdout)
    return found


def _answer(path: str) -> None:
    """Child process: the texts of stdin in ids, to stdout."""
    from transformers.integrations.gguf import (  # type: ignore[import-not-found]
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, tokens, _ = get_gguf_tokenizer(path)
    backend, _ = convert_gguf_tokenizer(architecture, tokens)
    print(json.dumps([backend.encode(text, add_special_tokens=False).ids for text in json.load(sys.stdin)]))


if __name__ == "__main__":
    _answer(sys.argv[1])
