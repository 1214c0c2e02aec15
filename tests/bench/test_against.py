from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from kittiwake.bench import against
from kittiwake.bench.against import compare
from kittiwake.bench.cases import measure_cases, parse_cases
from kittiwake.bench.peers.contract import Peer, PeerError, PeerTask
from kittiwake.bench.peers.flags import read_flags
from kittiwake.bench.peers.registry import PEERS, parse_peers
from kittiwake.bench.random import RandomSource, RandomWeights
from kittiwake.bench.shapes import small
from kittiwake.bench.subject import Subject
from kittiwake.bench.timing import Effort, Figures
from kittiwake.config import EngineConfig
from kittiwake.errors import UsageError
from kittiwake.load import load_source

WEIGHTS = RandomWeights(small(3, 128, 64), 3)
CASES = parse_cases("1x1,1x6,3x4")
ONCE = Effort(least=2, most=2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    config = EngineConfig(device="cpu", dtype="fp32", threads=2)
    return Subject(load_source(RandomSource(WEIGHTS, "random"), config).model, 3)


def _compare(subject: Subject, *names: str, dtype: torch.dtype = torch.float32) -> list[Figures]:
    figures = measure_cases(subject, CASES, 0, ONCE)
    return compare(subject, figures, names, PeerTask(WEIGHTS, WEIGHTS.shape, "cpu", dtype), 0, effort=ONCE)


def test_eager_torch_gives_our_logits(subject: Subject) -> None:
    for row in _compare(subject, "torch"):
        (peer,) = row.peers
        assert not peer.reason
        assert peer.difference < 1e-5
        assert (peer.samples, peer.is_batched) == (2, True)
        assert peer.speed == peer.median_ms / peer.ours_ms


def test_eager_torch_in_bfloat16_stays_near(subject: Subject) -> None:
    for row in _compare(subject, "torch", dtype=torch.bfloat16):
        assert not row.peers[0].reason
        assert 1e-5 < row.peers[0].difference < 0.3


@pytest.mark.skipif(importlib.util.find_spec("rwkv") is None, reason="the rwkv package is not installed")
def test_the_rwkv_package_gives_our_logits_and_its_settings_stay_its_own(
    subject: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    flags, environment = read_flags(), dict(os.environ)
    for row in _compare(subject, "rwkv"):
        (peer,) = row.peers
        assert not peer.reason
        assert peer.difference < 1e-5
        assert not peer.is_batched
        assert peer.version.startswith("rwkv 0.8")
    assert read_flags() == flags
    assert dict(os.environ) == environment
    assert capfd.readouterr().out == ""


class Wrong:
    """Gives logits of its own; in its second case it breaks down."""

    version = "wrong 1.0"
    is_batched = True

    def start(self, batch: int) -> None:
        if batch > 1:
            raise MemoryError("out of memory")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(ids.shape[0], WEIGHTS.shape.vocab)


def test_a_peer_that_fails_or_computes_something_else_is_named_with_the_reason(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(task: PeerTask) -> Peer:
        raise PeerError("the package is not installed")

    def broken(task: PeerTask) -> Peer:
        raise ImportError("libsomething.so:\n not found")

    monkeypatch.setattr(
        against, "PEERS", {**PEERS, "fla": missing, "transformers": broken, "rwkv": lambda task: Wrong()}
    )
    rows = _compare(subject, "fla", "transformers", "rwkv", "torch")
    reasons = [[peer.reason for peer in row.peers] for row in rows]
    assert reasons[0][0] == "the package is not installed"
    assert reasons[0][1] == "ImportError: libsomething.so: not found"
    assert "differ from ours" in reasons[0][2]
    assert reasons[2][2] == "MemoryError: out of memory"
    assert [row[3] for row in reasons] == ["", "", ""]
    assert rows[2].document()["peers"][2] == {
        "name": "rwkv",
        "version": "wrong 1.0",
        "reason": "MemoryError: out of memory",
    }


def test_progress_names_the_peer_and_the_case(subject: Subject) -> None:
    told: list[tuple[str, int, int]] = []
    figures = measure_cases(subject, CASES[:2], 0, ONCE)
    task = PeerTask(WEIGHTS, WEIGHTS.shape, "cpu", torch.float32)
    compare(subject, figures, ["fla", "torch"], task, 0, effort=ONCE, progress=lambda *one: told.append(one))
    head = "comparing with peers"
    assert told == [
        (f"{head}: loading fla", 0, 4),
        (f"{head}: loading torch", 2, 4),
        (f"{head}: torch at 1x1", 2, 4),
        (f"{head}: torch at 1x6", 3, 4),
        (head, 4, 4),
    ]


def test_names_of_peers() -> None:
    assert parse_peers("torch, fla") == ["torch", "fla"]
    for text in ("", "torch,", "vllm", "torch,torch"):
        with pytest.raises(UsageError, match="peer"):
            parse_peers(text)
