"""States with names: a budget, forks that cost nothing, files that outlive the process."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kittiwake.engine.named_states import NamedStates, check_name
from kittiwake.engine.request import KeptState, SamplingParams
from kittiwake.engine.state_file import StateOwner, save_state
from kittiwake.errors import (
    KittiwakeError,
    StateBudgetError,
    StateExistsError,
    StateFileError,
    StateMissingError,
    StateNameError,
)
from tests.engine.drive import ask, make_engine, prompt_of
from tests.tiny import same_state, tiny_model

PARAMS = SamplingParams(max_tokens=6, seed=1)


def owner() -> StateOwner:
    loaded = tiny_model()
    config = loaded.model.config
    return StateOwner(config.family, loaded.digest(), "fp32", loaded.model.state_spec, config.vocab_size)


def kept(length: int = 9, seed: int = 0) -> KeptState:
    return ask(make_engine(), prompt_of(length, seed), PARAMS, keep_state=True).state


def make(folder: Path | None = None, *, budget: int = 1 << 24) -> NamedStates:
    return NamedStates(owner(), budget_bytes=budget, folder=folder)


def same(one: KeptState, other: KeptState) -> bool:
    assert one.logits is not None and other.logits is not None
    return (
        one.tokens == other.tokens
        and same_state(one.saved, other.saved)
        and one.logits.tobytes() == other.logits.tobytes()
    )


def test_a_request_goes_on_from_a_named_state_as_from_the_state_itself() -> None:
    states, state = make(), kept()
    saved = states.save("talk", state, parent="origin")
    assert (saved.name, saved.tokens, saved.parent) == ("talk", len(state.tokens), "origin")
    assert saved.nbytes == state.saved.nbytes + 4 * 256 + 4 * len(state.tokens)
    found = ask(make_engine(), [5], PARAMS, start_from=states.get("talk").kept)
    assert found.tokens == ask(make_engine(), [*state.tokens, 5], PARAMS).tokens


def test_forks_go_their_own_ways() -> None:
    states, state = make(), kept()
    states.save("a", state)
    fork = states.fork("a", "b")
    assert fork.parent == "a" and fork.kept is state
    states.save("b", kept(12, 1), replace=True)
    assert states.get("a").kept is state and states.get("b").tokens == 18
    states.delete("a")
    assert [one.name for one in states.list()] == ["b"]


def test_names_that_are_taken_or_missing_are_told() -> None:
    states, state = make(), kept()
    states.save("a", state)
    with pytest.raises(StateExistsError, match="a state 'a' already") as exists:
        states.save("a", kept(3))
    assert exists.value.http_status == 409 and states.get("a").kept is state
    for call in (lambda: states.get("x"), lambda: states.delete("x"), lambda: states.fork("x", "y")):
        with pytest.raises(StateMissingError, match="no state 'x'") as missing:
            call()
        assert missing.value.http_status == 404
    with pytest.raises(StateExistsError):
        states.fork("a", "a")


@pytest.mark.parametrize("name", ["", ".", "..", "-a", ".hidden", "a/b", "../a", "a b", "ä", "a" * 65, "a\n", "a\0"])
def test_names_that_could_be_anything_but_a_file_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    states = make(tmp_path / "states")
    with pytest.raises(StateNameError, match="cannot be the name") as refused:
        states.save(name, kept())
    assert refused.value.http_status == 400
    assert list((tmp_path / "states").iterdir()) == []
    with pytest.raises(StateNameError):
        states.get(name)


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "0", "a" * 64, "a.."])
def test_plain_names_are_taken(name: str) -> None:
    check_name(name)


def test_the_budget_counts_a_state_once_however_many_names_it_has() -> None:
    state = kept()
    nbytes = make().save("x", state).nbytes
    states = make(budget=2 * nbytes)
    states.save("a", state)
    for index in range(10):
        states.fork("a", f"fork{index}")
    assert states.nbytes == nbytes
    states.save("b", kept(9, 1))
    with pytest.raises(StateBudgetError, match="above their budget") as full:
        states.save("c", kept(9, 2))
    assert full.value.http_status == 507
    states.save("b", kept(9, 2), replace=True)  # what it takes the place of does not count
    states.delete("b")
    states.save("c", kept(9, 2))
    for name in [one.name for one in states.list()]:
        states.delete(name)
    assert states.nbytes == 0


def test_a_state_of_another_model_gets_no_name() -> None:
    state = kept()
    parts = {name: part[:, :1] if name == "wkv" else part for name, part in state.saved.parts.items()}
    states = make()
    with pytest.raises(StateFileError, match="part wkv"):
        states.save("a", replace(state, saved=replace(state.saved, parts=parts)))
    with pytest.raises(StateFileError, match="position"):
        states.save("a", replace(state, tokens=state.tokens[:-1]))
    assert states.list() == []


def test_a_folder_keeps_them_for_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "states"
    states, state = make(folder), kept()
    states.save("a", state)
    states.save("b", kept(12, 1))
    states.fork("a", "c")
    states.delete("b")
    save_state(folder / "other.state", state, replace(owner(), model="ef" * 32))
    (folder / "torn.state").write_bytes((folder / "a.state").read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        again = make(folder)
    assert [one.name for one in again.list()] == ["a", "c"]
    assert same(again.get("a").kept, state) and again.get("a").created_s > 0
    assert "other.state" in caplog.text and "torn.state" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == ["a.state", "c.state", "other.state", "torn.state"]


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KittiwakeError, match="cannot be written"):
        make(tmp_path / "file" / "states")


def test_state_files_can_be_uploaded(tmp_path: Path) -> None:
    state = kept()
    save_state(tmp_path / "upload", state, owner())
    states = make()
    assert same(states.upload("a", tmp_path / "upload").kept, state)
    with pytest.raises(StateExistsError):
        states.upload("a", tmp_path / "upload")
    states.upload("a", tmp_path / "upload", overwrite=True)
    raw = bytearray((tmp_path / "upload").read_bytes())
    raw[-3] ^= 1
    (tmp_path / "damaged").write_bytes(raw)
    with pytest.raises(StateFileError, match="sha-256"):
        states.upload("b", tmp_path / "damaged")
    assert [one.name for one in states.list()] == ["a"]


def test_a_tuned_initial_state_can_have_a_name() -> None:
    state = kept()
    saved = replace(state.saved, position=0, parts={n: np.ones_like(p) for n, p in state.saved.parts.items()})
    states = make()
    states.save("tuned", KeptState(saved, (), None, saved.digest))
    start = states.get("tuned").kept
    assert ask(make_engine(), [1, 2], PARAMS, start_from=start).tokens != ask(make_engine(), [1, 2], PARAMS).tokens
