"""What saving and restoring a state that grows costs: copied whole, and with its full pages shared.

    python lab/saved_pages.py [--shape qwen4exp-small] [--tokens 4096,32768] [--turns 30] [--rounds 9]

The second save of a sequence that went on by a turn of 64 tokens, a restore, and what the states after each turn of a
chat hold together. No model runs: the table is filled with random values.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from kittiwake.bench.machine import machine_line
from kittiwake.bench.qwen4exp_shapes import QWEN4EXP_SHAPES, qwen4exp_config
from kittiwake.engine.saved_pages import PageHolders
from kittiwake.engine.states import SavedState, StateSpec, StateTable
from kittiwake.families.qwen4exp.config import read_geometry
from kittiwake.families.qwen4exp.state import state_spec

TURN_TOKENS = 64


def main() -> None:
    """Print the figures of each length."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", default="qwen4exp-small", choices=QWEN4EXP_SHAPES)
    options.add_argument("--tokens", default="4096,32768", help="lengths of the text before the chat")
    options.add_argument("--turns", type=int, default=30)
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    shape = QWEN4EXP_SHAPES[given.shape]
    tables = dict.fromkeys(shape.ngram_layers, shape.ngram_parts)
    geometry, _ = read_geometry(qwen4exp_config(shape), Path(given.shape), tables, False)
    spec = state_spec(geometry)
    say(machine_line("cpu"))
    say(f"{spec.slot_bytes:,} bytes a slot, {spec.page_bytes // spec.page_tokens:,} a token more")
    for tokens in map(int, given.tokens.split(",")):
        measure(spec, tokens, given.turns, given.rounds)


def say(line: str) -> None:
    """One line of output."""
    sys.stdout.write(line + "\n")


def measure(spec: StateSpec, tokens: int, turns: int, rounds: int) -> None:
    """The figures of a text of this length."""
    table = StateTable(spec, 2, pages=2 * spec.pages_for(tokens + (turns + rounds) * TURN_TOKENS))
    rng = np.random.default_rng(0)
    slot, away = table.allocate(), table.allocate()
    eat(table, slot, tokens, rng)
    first = following = table.save(slot)
    times: dict[str, list[float]] = {"first": [], "next": [], "whole": [], "restore": [], "restore whole": []}
    for turn in range(rounds):
        first = following = saved = None  # nobody holds a page, so all are copied
        took, first = timed(lambda: table.save(slot))
        times["first"].append(took)
        eat(table, slot, TURN_TOKENS, rng)
        took, following = timed(lambda: table.save(slot))
        times["next"].append(took)
        took, whole = timed(lambda: table.save(slot, whole=True))
        times["whole"].append(took)
        new = PageHolders()
        new.add(first.pages)
        copied = following.own_nbytes + new.add(following.pages)
        del new
        for name in ("restore", "restore whole") if turn % 2 else ("restore whole", "restore"):
            saved = following if name == "restore" else whole
            times[name].append(timed(lambda: table.restore(away, saved))[0])  # noqa: B023
        assert all(np.array_equal(following.parts[name], whole.parts[name]) for name in whole.parts)
    say(f"{tokens:,} tokens: {whole.nbytes:,} bytes whole, {copied:,} copied by the next save; ms " + shown(times))
    chat, together = [first], PageHolders()
    for _ in range(turns):
        eat(table, slot, TURN_TOKENS, rng)
        chat.append(table.save(slot))
    held = sum(saved.own_nbytes + together.add(saved.pages) for saved in chat)
    say(f"  {turns} turns: {held:,} bytes held, {sum(saved.nbytes for saved in chat):,} in whole copies")


def eat(table: StateTable, slot: int, count: int, rng: np.random.Generator) -> None:
    """Random rows and fixed parts, as a forward of so many tokens would write."""
    table.reserve(np.array([slot]), np.array([count]))
    begin, page_tokens = int(table.positions[slot]), table.spec.page_tokens
    for part in table.spec.parts:
        array = table.part(part.name)
        if part not in table.spec.growing:
            array[:, slot] = rng.integers(0, 9, array[:, slot].shape)
            continue
        for row in range(begin // part.every, (begin + count) // part.every):
            page, within = divmod(row, page_tokens // part.every)
            array[:, table.pages[slot, page], within] = rng.integers(0, 1 << 20)
    table.positions[slot] += count


def timed(work: Callable[[], SavedState | None]) -> tuple[float, SavedState | None]:
    """Milliseconds, and what came of it."""
    begin = time.perf_counter()
    found = work()
    return 1000 * (time.perf_counter() - begin), found


def shown(times: dict[str, list[float]]) -> str:
    """Medians and least values by name."""
    return ", ".join(f"{name} {statistics.median(of):.2f} (least {min(of):.2f})" for name, of in times.items())


if __name__ == "__main__":
    main()
