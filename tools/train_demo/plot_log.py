"""Draw the loss curves of a training log.

python plot_log.py run/train_log.jsonl loss_curve.png
"""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
    """Read the JSON lines, draw training loss and held-out bits per byte against tokens seen."""
    log_path, picture = sys.argv[1:3]
    with open(log_path, encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for steps in sorted({e["sequence"] for e in entries if "sequence" in e}):
        part = [e for e in entries if e.get("sequence") == steps]
        left.plot(
            [e["tokens"] / 1e9 for e in part],
            [e["train_nats"] for e in part],
            linewidth=0.8,
            label=f"training, sequences of {steps:,}",
        )
    left.set(xlabel="tokens seen (billions)", ylabel="training loss (nats a token)", ylim=(2.8, 4.0))
    rate = left.twinx()
    rated = [e for e in entries if "lr" in e]
    rate.plot([e["tokens"] / 1e9 for e in rated], [e["lr"] for e in rated], color="grey", linestyle=":", linewidth=1)
    rate.set(ylabel="learning rate of the matrices (dotted)", ylim=(0, None))
    left.legend(loc="upper right")
    held = [e for e in entries if "heldout_bits_per_byte" in e]
    values = [e["heldout_bits_per_byte"] for e in held]
    right.plot([e["tokens"] / 1e9 for e in held], values, marker=".")
    right.set(xlabel="tokens seen (billions)", ylabel="held-out bits per byte (windows of 4,096)")
    right.annotate(
        f"{values[-1]:.3f}", (held[-1]["tokens"] / 1e9, values[-1]), textcoords="offset points", xytext=(-30, 8)
    )
    right.grid(alpha=0.3)
    left.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
