"""transformers' ``Qwen4ExpForCausalLM`` as a reference on the CPU, run in a process of its own.

This file is both sides: :func:`run` starts it as a script, which answers into a folder.
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

import numpy as np

SKIP_REASON = "transformers with qwen4_exp is not installed"


def is_available() -> bool:
    """Whether a transformers that knows the model is installed; it is not imported."""
    found = importlib.util.find_spec("transformers")
    return found is not None and Path(str(found.origin)).with_name("models").joinpath("qwen4_exp").is_dir()


def run(model: Path, ids: Sequence[int]) -> np.ndarray:
    """Float32 logits [T, vocabulary] of the folder's model on these ids."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(json.dumps({"model": str(model), "ids": list(ids)}), encoding="utf-8")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", __file__, folder]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"transformers failed with code {process.returncode}:\n{process.stdout}{process.stderr}")
        logits: np.ndarray = np.load(Path(folder, "answer.npy"))
        return logits


def _answer(folder: Path) -> None:
    """Child process: load the model and answer the request found in ``folder``."""
    import torch
    from transformers import Qwen4ExpForCausalLM  # type: ignore[import-not-found]

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    model, told = Qwen4ExpForCausalLM.from_pretrained(request["model"], output_loading_info=True, dtype=torch.float32)
    if any(told.values()):
        raise RuntimeError(f"names differ: {told}")
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([request["ids"]]), use_cache=False).logits[0]
    np.save(folder / "answer.npy", logits.numpy())


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
