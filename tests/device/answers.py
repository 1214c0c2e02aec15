"""What the model of the CPU gives for a text, with which the card's is compared; brought along where it was computed before.

Compiling the CPU's kernels takes a minute, and every process that tests a card would do so. ``KITTIWAKE_DEVICE_ANSWERS``
names a folder whose files stand for it: what is missing there is computed, and kept. So on a machine without a card:

    KITTIWAKE_DEVICE_ANSWERS=answers python -m tests.device.answers

The weights are drawn by torch, the same on every machine; were they not, no test would find the card's logits near.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SavedState, StateTable, new_states
from kittiwake.families.contract import Model
from tests.device.ledger import LEDGER
from tests.oracles.measure import relative_error

_PAGES = 4


@dataclass(frozen=True)
class Answers:
    """Of a text from an empty state: logits [T, vocab], the state after it, the residual stream [T, C] by layer; and the
    logits of the text's first ``onward`` tokens again, from that state on."""

    logits: np.ndarray
    parts: dict[str, np.ndarray]
    hidden: dict[int, np.ndarray]
    onward: np.ndarray


def answers_of(
    model: Model, ids: Sequence[int], layers: Sequence[int], onward: int, start: SavedState | None = None
) -> Answers:
    """Run a text; ``start`` stands for its own state before the tokens that follow."""
    states = StateTable(model.state_spec, 2, _PAGES) if model.device == "cpu" else new_states(model, 2)
    slot, second = states.allocate(), states.allocate()
    hidden = {layer: np.full((len(ids), model.config.width), np.nan, np.float32) for layer in layers}
    logits = model.forward(Batch.pack([(slot, list(ids))], [list(range(len(ids)))]), states, hidden=hidden)
    assert int(states.positions[slot]) == len(ids)
    saved = states.save(slot)
    states.restore(second, saved if start is None else start)
    again = model.forward(Batch.pack([(second, list(ids[:onward]))], [list(range(onward))]), states)
    return Answers(logits.copy(), dict(saved.parts), hidden, again.copy())


def answers_of_cpu(
    name: str, make: Callable[[], Model], ids: Sequence[int], layers: Sequence[int], onward: int
) -> Answers:
    """The same by the CPU's model, or what it gave when it was asked before."""
    folder = os.environ.get("KITTIWAKE_DEVICE_ANSWERS")
    path = Path(folder or ".", re.sub(r"[^a-z0-9.]+", "_", name.lower()) + ".npz")
    if folder and path.is_file():
        return _read(path)
    found = answers_of(make(), ids, layers, onward)
    if folder:
        _write(path, found)
    return found


def check_answers(found: Answers, expected: Answers, name: str, most: float) -> None:
    """Whether all of it is near the CPU's, by the relative error; what is found stands in the report."""
    errors = {"logits": relative_error(found.logits, expected.logits)}
    errors |= {part: relative_error(found.parts[part], array) for part, array in expected.parts.items()}
    streams = [relative_error(found.hidden[layer], array) for layer, array in expected.hidden.items()]
    errors |= {
        "residual stream": float(np.max(streams)),
        "logits onward": relative_error(found.onward, expected.onward),
    }
    for what, error in errors.items():
        LEDGER.figure(f"{name}: {what} against the CPU", error)
    assert not {what: error for what, error in errors.items() if not error < most}, f"more than {most}"


def _write(path: Path, answers: Answers) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {f"part {name}": array for name, array in answers.parts.items()}
    hidden = {f"hidden {layer}": array for layer, array in answers.hidden.items()}
    own = path.with_suffix(f".{os.getpid()}.npz")
    np.savez_compressed(own, logits=answers.logits, onward=answers.onward, **parts, **hidden)
    own.replace(path)


def _read(path: Path) -> Answers:
    with np.load(path) as kept:
        given = {key: kept[key] for key in kept.files}
    parts = {key.removeprefix("part "): array for key, array in given.items() if key.startswith("part ")}
    hidden = {int(key.removeprefix("hidden ")): array for key, array in given.items() if key.startswith("hidden ")}
    return Answers(given["logits"], parts, hidden, given["onward"])


def main() -> None:
    """Fill the folder."""
    from tests.device import test_device_model, test_device_qwen4exp, test_device_rwkv456

    for module in (test_device_model, test_device_rwkv456, test_device_qwen4exp):
        for name in module.COMPARED:
            module.on_cpu(name)


if __name__ == "__main__":
    main()
