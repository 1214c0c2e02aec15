"""transformers' ``RwkvForCausalLM`` as a reference for RWKV-4 on the CPU, run in a process of its own.

Importing transformers takes seconds and sets process-wide things; none of that may reach the tests. This file is both
sides: :func:`run` starts it as a script, which answers into a folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SKIP_REASON = "transformers is not installed"
PARTS = ("ffn_shift", "att_shift", "num", "den", "top")
"""What transformers keeps, in its order."""


def is_available() -> bool:
    """Whether transformers is installed; importing this module does not need it."""
    return importlib.util.find_spec("transformers") is not None


def run(model: Path, pieces: Sequence[Sequence[int]], *, save_to: Path | None = None) -> dict[str, Any]:
    """The folder's model on these pieces, one call each: ``logits`` [T, vocabulary], and the state after it, [L, C] a part.

    With ``save_to`` transformers also writes the model there, under its own names.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = {"model": str(model), "pieces": [list(piece) for piece in pieces]}
        if save_to is not None:
            request["save_to"] = str(save_to)
        Path(folder, "request.json").write_text(json.dumps(request), encoding="utf-8")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", __file__, folder]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"transformers failed with code {process.returncode}:\n{process.stdout}{process.stderr}")
        with np.load(Path(folder, "answer.npz")) as answer:
            return dict(answer)


def _answer(folder: Path) -> None:
    """Child process: load the model and answer the request found in ``folder``."""
    import torch
    from transformers import RwkvForCausalLM  # type: ignore[import-not-found]

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    model, told = RwkvForCausalLM.from_pretrained(request["model"], output_loading_info=True, dtype=torch.float32)
    if told["missing_keys"] or told["unexpected_keys"]:
        raise RuntimeError(f"names differ: {told}")
    if "save_to" in request:
        model.save_pretrained(request["save_to"])
    model.eval()
    rows, state = [], None
    with torch.no_grad():
        for piece in request["pieces"]:
            output = model(torch.tensor([piece]), state=state, use_cache=True)
            rows.append(output.logits[0])
            state = output.state
    parts: dict[str, Any] = {name: part[0].T.numpy() for name, part in zip(PARTS, state, strict=True)}
    np.savez(folder / "answer.npz", logits=torch.cat(rows).numpy(), **parts)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
