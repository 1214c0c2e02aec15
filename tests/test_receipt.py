from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.device import Card, FoundCard
from kittiwake.errors import CheckpointError
from kittiwake.llm import LLM
from kittiwake.ops.jit import kernels_digest
from kittiwake.receipt import make_receipt, receipt_digest
from tests.models import tiny_llm


def test_a_receipt_says_what_the_bits_depend_on() -> None:
    receipt = tiny_llm().receipt()
    assert json.loads(json.dumps(receipt)) == receipt
    assert set(receipt) == {"format", "model", "device", "products", "kernels", "versions", "settings", "digest"}
    assert {"kittiwake", "torch", "numpy", "numba"} <= set(receipt["versions"])
    assert receipt["device"]["threads"] == 1
    assert receipt["products"]
    assert receipt["digest"] == receipt_digest(receipt) == tiny_llm().receipt()["digest"]


def test_what_a_stopwatch_chose_is_not_in_the_digest() -> None:
    receipt = tiny_llm().receipt()
    digest = receipt["digest"]
    receipt["products"].reverse()
    for row in receipt["products"]:
        row["wide_from"] += 16
    assert receipt_digest(receipt) == digest
    receipt["products"][0]["k_block"] += 1
    assert receipt_digest(receipt) != digest
    assert receipt_digest(tiny_llm().receipt() | {"settings": {"MKL_CBWR": "AVX2"}}) != digest


def test_other_weights_are_another_receipt_and_changed_files_none(tmp_path: Path) -> None:
    digests = set()
    for seed in (1, 2):
        torch.save(random_rwkv7(small(layers=2), seed=seed), tmp_path / f"{seed}.pth")
        with LLM(tmp_path / f"{seed}.pth", threads=1) as llm:
            digests.add(llm.receipt()["digest"])
    assert len(digests) == 2
    with LLM(tmp_path / "1.pth", threads=1) as llm:
        torch.save({"x": torch.zeros(3)}, tmp_path / "1.pth")
        with pytest.raises(CheckpointError, match="changed"):
            llm.receipt()


def test_a_card_is_told_by_name_and_its_picks_are_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_llm().loaded
    card = Card("NVIDIA H200", "9.0", 132, 1 << 37, 1 << 26, "580.1", "13.0", "13.0")
    monkeypatch.setattr("kittiwake.receipt.find_card", lambda: FoundCard(card))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(
        loaded.model, "describe", lambda: {"device": "cuda", "picks": [{"shape": "1x1"}]}, raising=False
    )
    monkeypatch.setattr(loaded.model, "can_run_ahead", True)
    receipt = make_receipt(loaded)
    assert receipt["device"] == {"kind": "cuda", "processor": "NVIDIA H200", "capability": "9.0", "threads": 0}
    assert receipt["versions"]["triton"] == "3.6.0" and receipt["products"] == []
    monkeypatch.setattr("kittiwake.receipt.find_card", lambda: FoundCard(replace(card, capability="10.0")))
    assert make_receipt(loaded)["digest"] != receipt["digest"]


def test_where_the_host_draws_for_a_card_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_llm().loaded
    card = Card("NVIDIA H200", "9.0", 132, 1 << 37, 1 << 26, "580.1", "13.0", "13.0")
    monkeypatch.setattr("kittiwake.receipt.find_card", lambda: FoundCard(card))
    monkeypatch.setattr("kittiwake.receipt.processor_name", lambda: "a processor")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(loaded.model, "describe", lambda: {"device": "cuda", "picks": []}, raising=False)
    receipts = []
    for runs_ahead in (True, False):
        monkeypatch.setattr(loaded.model, "can_run_ahead", runs_ahead)
        receipts.append(make_receipt(loaded))
    assert receipts[1]["device"]["processor"] == "NVIDIA H200 with a processor"
    assert receipts[1]["kernels"] == f"{receipts[0]['kernels']} {kernels_digest()}"
    assert receipts[1]["digest"] != receipts[0]["digest"]
