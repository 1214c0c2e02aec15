"""Our model and its peers at the same cases, in turns: A B, B A.

Each side runs under its own process-wide settings, put in force and taken back outside the clock. A peer first has to
give our logits, within what its type can hold: a program that computes something else is no comparison. Stdout is not a
peer's: what it prints, or a compiler that it starts, goes to stderr.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kittiwake.bench.cases import Case, case_work, fill_states, random_ids
from kittiwake.bench.peers.contract import Peer, PeerError, PeerTask
from kittiwake.bench.peers.flags import OwnFlags
from kittiwake.bench.peers.registry import PEERS, flags_of
from kittiwake.bench.subject import Subject
from kittiwake.bench.timing import Effort, Figures, PeerFigures, Timed, interleaved_ms, median_ms, timed
from kittiwake.progress import Progress
from kittiwake.stdout import stdout_on_stderr

PEER_EFFORT = Effort(least=4, most=100, budget_s=2.0)
_MOST_DIFFERENCE = {torch.float32: 0.02, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Relative RMS of logits between two right programs on random weights stays well below; of a wrong one it is above 1."""
_STREAMS = 4


@dataclass(frozen=True)
class _Side:
    """A peer ready to run, and its settings."""

    name: str
    peer: Peer
    flags: OwnFlags
    task: PeerTask


def compare(
    subject: Subject,
    figures: Sequence[Figures],
    names: Sequence[str],
    task: PeerTask,
    seed: int,
    *,
    effort: Effort = PEER_EFFORT,
    progress: Progress | None = None,
) -> list[Figures]:
    """The figures with every peer beside them: its own, or the reason why it has none. One peer is loaded at a time."""
    rows = list(figures)

    def tell(turn: int, index: int, piece: str) -> None:
        if progress is not None:
            progress(f"comparing with peers{piece}", turn * len(rows) + index, len(names) * len(rows))

    with stdout_on_stderr():
        for turn, name in enumerate(names):
            found = _run_peer(name, subject, rows, task, seed, effort, partial(tell, turn))
            rows = [replace(row, peers=(*row.peers, peer)) for row, peer in zip(rows, found, strict=True)]
            _release(task.device)
    tell(len(names), 0, "")
    return rows


def _run_peer(
    name: str,
    subject: Subject,
    figures: Sequence[Figures],
    task: PeerTask,
    seed: int,
    effort: Effort,
    tell: Callable[[int, str], None],
) -> list[PeerFigures]:
    flags = flags_of(name, task.device)
    tell(0, f": loading {name}")
    try:
        with flags():
            peer = PEERS[name](task)
    except Exception as err:  # whatever a peer's own code raises is the reason it has no figure
        return [PeerFigures(name, reason=_reason(err))] * len(figures)
    side = _Side(name, peer, flags, task)
    found = []
    for index, one in enumerate(figures):
        tell(index, f": {name} at {one.case}")
        try:
            found.append(_run_case(side, subject, Case(one.batch, one.tokens), seed, effort))
        except Exception as err:
            found.append(PeerFigures(name, version=peer.version, reason=_reason(err)))
            _release(task.device)
    return found


def _run_case(side: _Side, subject: Subject, case: Case, seed: int, effort: Effort) -> PeerFigures:
    """Compare the logits, then time both sides in turns."""
    difference = _difference(side, subject, case, seed)
    limit = _MOST_DIFFERENCE[side.task.dtype]
    if not difference <= limit:
        raise PeerError(f"its logits differ from ours by {difference:.3g} (relative RMS), more than {limit}")
    fill_states(subject, seed)
    ours, theirs = timed(case_work(subject, case, seed)), _peer_timed(side, case, seed)
    for _ in range(2):
        ours()
        theirs()
    ours_ms, theirs_ms = interleaved_ms([ours, theirs], effort)
    return PeerFigures(
        side.name,
        side.peer.version,
        median_ms(theirs_ms),
        median_ms(ours_ms),
        len(theirs_ms),
        side.peer.is_batched,
        difference,
    )


def _difference(side: _Side, subject: Subject, case: Case, seed: int) -> float:
    """Relative RMS difference of logits, over two calls of the case from empty states: the second reads a state."""
    vocab = subject.model.config.vocab_size
    rows = random_ids(vocab, case.batch, case.tokens, seed)
    subject.clear()
    ours = [torch.from_numpy(subject.forward(subject.pack(rows)).copy()) for _ in range(2)]
    with side.flags():
        side.peer.start(case.batch)
        ids = torch.tensor(rows, device=side.task.device)
        theirs = [side.peer.forward(ids).float().cpu() for _ in range(2)]
    left, right = torch.stack(ours).double(), torch.stack(theirs).double()
    return float((left - right).norm() / left.norm())


def _peer_timed(side: _Side, case: Case, seed: int) -> Timed:
    """One call of the peer under its settings, from where its states stand; the clock runs inside them."""
    streams = [
        torch.tensor(random_ids(side.task.shape.vocab, case.batch, case.tokens, seed + stream), device=side.task.device)
        for stream in range(_STREAMS)
    ]
    calls = 0

    def call() -> None:
        side.peer.forward(streams[calls % _STREAMS])
        if side.task.device != "cpu":
            torch.cuda.synchronize()

    clocked = timed(call)

    def run() -> float:
        nonlocal calls
        with side.flags():
            took_ms = clocked()
        calls += 1
        return took_ms

    return run


def _reason(err: Exception) -> str:
    """What went wrong, in a line; the kind of error where it is not ours."""
    text = " ".join(str(err).split())[:300]
    return text if isinstance(err, PeerError) else f"{type(err).__name__}: {text}"


def _release(device: str) -> None:
    """Give memory of a peer that is gone back to the device."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
