"""transformers' n-gram layer (``Qwen4ExpTextPLELayer``) as a reference, run in a process of its own.

Importing transformers takes seconds and sets process-wide things; none of that may reach the tests. This file is both
sides: :func:`run` starts it as a script, which answers into a file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SKIP_REASON = "transformers is not installed, or has no qwen4_exp"


def is_available() -> bool:
    """Whether transformers has the layer; importing this module does not need it."""
    return importlib.util.find_spec("transformers") is not None and _has_layer()


def _has_layer() -> bool:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "models" / "qwen4_exp").is_dir()


def run(config: dict[str, object], layer_rank: int, token_ids: list[int]) -> dict[str, np.ndarray]:
    """The layer with random weights on random rows: its weights by name, ``hidden`` in, ``out``, ``rows`` it looked up."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.npz")
        asked.write_text(json.dumps({"config": config, "layer_rank": layer_rank, "token_ids": token_ids}))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        subprocess.run([sys.executable, __file__, str(asked), str(answer)], check=True, env=environment)
        with np.load(answer) as found:
            return dict(found)


def _answer(asked: Path, answer: Path) -> None:
    import torch
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

    request = json.loads(asked.read_text())
    config = Qwen4ExpTextConfig(**request["config"])
    torch.manual_seed(0)
    layer = Qwen4ExpTextPLELayer(config, 0, request["layer_rank"]).eval()
    looked_up: list[torch.Tensor] = []
    layer.ple_embedding.ngram_embedding.register_forward_pre_hook(lambda _, inputs: looked_up.append(inputs[0]))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        ids = torch.tensor([request["token_ids"]])
        hidden = torch.randn(1, ids.shape[1], config.hc_count * config.hidden_size)
        out = layer(hidden, ids, None)
    arrays = {name: value.numpy() for name, value in layer.state_dict().items()}
    np.savez(answer, hidden=hidden[0].numpy(), out=out[0].numpy(), rows=looked_up[0][0].numpy(), **arrays)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), Path(sys.argv[2]))
