"""Parts of transformers' ``qwen4_exp`` on the CPU, every parameter drawn anew, run in a process of its own.

Importing transformers takes seconds and sets process-wide things; none of that may reach the tests. This file is both
sides: :func:`run` starts it as a script, which answers into a folder.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SKIP_REASON = "transformers has no qwen4_exp here"
SIZES = {
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "hc_count": 3,
    "hc_lowrank": 7,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 9,
    "shared_expert_intermediate_size": 11,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
"""Keys of the config; keys and values of a head differ, and several value heads share a key head."""
TOKENS = 23
GATES = ("sigmoid", "silu")


def is_available() -> bool:
    """Whether transformers knows the model; importing this module does not need it."""
    if importlib.util.find_spec("transformers") is None:
        return False
    return importlib.util.find_spec("transformers.models.qwen4_exp") is not None


def run() -> dict[str, np.ndarray]:
    """For each part its ``<part>.x`` [T, ...], ``<part>.<parameter>`` and ``<part>.y``; see :func:`_answer`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", __file__, folder]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"transformers failed with code {process.returncode}:\n{process.stdout}{process.stderr}")
        with np.load(Path(folder, "answer.npz")) as answer:
            return dict(answer)


def _answer(folder: Path) -> None:
    """Child process: the Gated DeltaNet with either gate, a residual mixer, and a mixture of experts."""
    import torch
    from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs  # type: ignore[import-not-found]
    from transformers.models.qwen4_exp.configuration_qwen4_exp import (  # type: ignore[import-not-found]
        Qwen4ExpTextConfig,
    )

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(11)
    answer: dict[str, np.ndarray] = {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def keep(part: str, module: torch.nn.Module, x: torch.Tensor) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
                parameter.copy_(draw(*parameter.shape) / fan_in**0.5)
                answer[f"{part}.{name}"] = parameter.numpy().copy()
            y = module(x[None])
        answer[f"{part}.x"] = x.numpy()
        if isinstance(y, tuple):
            mixed, _, shares = y
            answer[f"{part}.shares"] = shares[0].numpy()
            y = mixed
        answer[f"{part}.y"] = y[0].numpy()

    def config(gate: str) -> Qwen4ExpTextConfig:
        return Qwen4ExpTextConfig(**SIZES, output_gate_type=gate, experts_implementation="eager")

    width, streams = SIZES["hidden_size"], SIZES["hc_count"]
    for gate in GATES:
        keep(f"delta.{gate}", theirs.Qwen4ExpTextGatedDeltaNet(config(gate), 0), draw(TOKENS, width))
    keep("mixer", theirs.Qwen4ExpTextGatedResidual(config("silu")), draw(TOKENS, streams * width))
    keep("experts", theirs.Qwen4ExpTextSparseMoeBlock(config("silu")), draw(TOKENS, width))
    np.savez(folder / "answer.npz", **answer)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
