from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kittiwake.engine import state_file
from kittiwake.engine.request import KeptState
from kittiwake.engine.state_file import StateOwner, load_state, save_state
from kittiwake.engine.states import SavedState, StatePart, StateSpec
from kittiwake.errors import OutputError, StateError, StateFileError

VOCAB = 50
SPEC = StateSpec(2, (StatePart("wkv", (2, 3, 4)), StatePart("count", (1,), "int64"), StatePart("shift", (6,))))
OWNER = StateOwner("rwkv7", "ab" * 32, "fp32", SPEC, VOCAB)
PLAIN = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def kept(tokens: tuple[int, ...] = (3, 1, 4, 1, 5), seed: int = 0, *, logits: bool = True) -> KeptState:
    draw = np.random.default_rng(seed)
    parts = {
        part.name: draw.standard_normal((2, *part.shape)).astype(part.dtype)
        if part.dtype == "float32"
        else draw.integers(-9, 9, (2, *part.shape))
        for part in SPEC.parts
    }
    row = draw.standard_normal(VOCAB).astype(np.float32) if logits else None
    return KeptState(SavedState(len(tokens), parts), tokens, row, "cd" * 32)


def same(a: KeptState, b: KeptState) -> bool:
    def bits(array: np.ndarray | None) -> object:
        return None if array is None else (array.shape, array.dtype, array.tobytes())

    return (
        (a.tokens, a.initial, a.saved.position) == (b.tokens, b.initial, b.saved.position)
        and bits(a.logits) == bits(b.logits)
        and {n: bits(x) for n, x in a.saved.parts.items()} == {n: bits(x) for n, x in b.saved.parts.items()}
    )


@PLAIN
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), max_size=40).map(tuple),
    seed=st.integers(0, 99),
    special=st.sampled_from([0.0, -0.0, np.inf, np.nan, 1e-45, 3.4e38]),
)
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, tokens: tuple[int, ...], seed: int, special: float) -> None:
    path = tmp_path / "a.state"
    before = kept(tokens, seed)
    before.saved.parts["wkv"][1, 1, 2, 3] = special
    save_state(path, before, OWNER, replace=True)
    assert same(load_state(path, OWNER), before)


def test_a_state_that_has_seen_nothing_has_no_logits(tmp_path: Path) -> None:
    before = kept((), logits=False)
    save_state(tmp_path / "a.state", before, OWNER)
    assert same(load_state(tmp_path / "a.state", OWNER), before)


def test_the_same_state_gives_the_same_bytes_and_any_safetensors_reader_opens_them(tmp_path: Path) -> None:
    from safetensors import safe_open

    for name in ("a", "b"):
        save_state(tmp_path / name, kept(), OWNER)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(str(tmp_path / "a"), framework="np") as file:
        assert file.metadata()["position"] == "5"
        assert file.get_tensor("tokens").tolist() == [3, 1, 4, 1, 5]
        assert np.array_equal(file.get_tensor("state.wkv"), kept().saved.parts["wkv"])


def test_a_file_is_never_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    save_state(path, kept(), OWNER)
    with pytest.raises(OutputError, match="already exists"):
        save_state(path, kept(seed=1), OWNER)
    assert same(load_state(path, OWNER), kept())
    save_state(path, kept(seed=1), OWNER, replace=True)
    assert same(load_state(path, OWNER), kept(seed=1))
    assert [file.name for file in tmp_path.iterdir()] == ["a.state"]


def test_a_full_disk_leaves_nothing_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.state"
    save_state(path, kept(), OWNER)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kittiwake.checkpoints.files._sync_file", full)
    for target in (path, tmp_path / "new.state"):
        with pytest.raises(OutputError, match="full"):
            save_state(target, kept(seed=1), OWNER, replace=True)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["a.state"]
    assert same(load_state(path, OWNER), kept())


@pytest.mark.parametrize("at", ["open", "sync"])
def test_a_disk_that_became_read_only_is_told_and_not_that_nothing_could_be_removed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fail)
    if at == "open":
        monkeypatch.setattr(Path, "open", fail)
    else:
        monkeypatch.setattr("kittiwake.checkpoints.files._sync_file", fail)
    with pytest.raises(OutputError, match=r"a\.state cannot be written: Read-only file system"):
        save_state(tmp_path / "a.state", kept(), OWNER, replace=True)
    assert not (tmp_path / "a.state").exists()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(OWNER, family="rwkv6"), "family 'rwkv7', here 'rwkv6'"),
        (replace(OWNER, model="ef" * 32), f"model '{'ab' * 32}', here '{'ef' * 32}'"),
        (replace(OWNER, dtype="bf16"), "dtype 'fp32', here 'bf16'"),
        (replace(OWNER, vocab_size=51), "logits are float32 (50,), expected float32 (51,)"),
        (
            replace(OWNER, spec=StateSpec(3, SPEC.parts)),
            "part wkv is float32 (2, 2, 3, 4), expected float32 (3, 2, 3, 4)",
        ),
        (replace(OWNER, spec=StateSpec(2, SPEC.parts[:1])), "has the parts ['count', 'shift', 'wkv']"),
    ],
)
def test_the_state_of_another_model_is_refused_by_what_differs(tmp_path: Path, other: StateOwner, said: str) -> None:
    save_state(tmp_path / "a.state", kept(), OWNER)
    with pytest.raises(StateError) as caught:
        load_state(tmp_path / "a.state", other)
    assert said in caught.value.message
    assert caught.value.exit_code == 3


@PLAIN
@given(data=st.data())
def test_one_changed_byte_anywhere_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    good = _good(tmp_path)
    place = data.draw(st.integers(0, len(good) - 1))
    raw = bytearray(good)
    raw[place] ^= data.draw(st.integers(1, 255))
    _refused(tmp_path, bytes(raw))


@PLAIN
@given(data=st.data())
def test_a_file_cut_short_or_with_more_at_its_end_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    good = _good(tmp_path)
    _refused(tmp_path, good[: data.draw(st.integers(0, len(good) - 1))])
    _refused(tmp_path, good + data.draw(st.binary(min_size=1, max_size=20)))


def _good(folder: Path) -> bytes:
    if not (folder / "good").exists():
        save_state(folder / "good", kept(), OWNER)
    return (folder / "good").read_bytes()


def _refused(folder: Path, raw: bytes, match: str | None = None) -> None:
    (folder / "bad").write_bytes(raw)
    with pytest.raises(StateFileError, match=match):
        load_state(folder / "bad", OWNER)


def _rewritten(folder: Path, *, seal: bool = True, **changes: Any) -> bytes:
    """The good file with other metadata, its digest made to fit."""
    save_state(folder / "plain", kept(), OWNER, replace=True)
    content, arrays = state_file._read(folder / "plain")
    tensors = {name: state_file._Tensor.of(array) for name, array in arrays.items()}
    content |= changes
    for key in [key for key, value in changes.items() if value is None]:
        del content[key]
    if seal:
        content["sha256"] = state_file._digest(content, tensors)
    header = state_file._header(content, tensors)
    return len(header).to_bytes(8, "little") + header + b"".join(state_file._bytes(a) for a in arrays.values())


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    raw = _rewritten(tmp_path, format="2", builder="9.9", more="x")
    _refused(tmp_path, raw, "state format 2, written by kittiwake '9.9'; this version reads 1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position": "6"}, "at position '6' after 5 tokens"),
        ({"position": "05"}, "at position '05' after 5 tokens"),
        ({"tokens_sha256": "0" * 64}, "hash of its tokens"),
        ({"format": "-1"}, "format is '-1'"),
        ({"format": "1.0"}, "format is '1.0'"),
        ({"kind": "other"}, "not a saved state"),
        ({"initial": None}, "lacks or should not have"),
        ({"more": "x"}, "lacks or should not have"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    _refused(tmp_path, _rewritten(tmp_path, **changes), said)
    assert _rewritten(tmp_path) == _good(tmp_path)


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    beyond = kept((1, VOCAB))
    with pytest.raises(StateError, match="outside the vocabulary"):
        save_state(tmp_path / "a", beyond, OWNER)
    larger = replace(OWNER, vocab_size=VOCAB + 1)
    logits = np.zeros(VOCAB + 1, dtype=np.float32)
    save_state(tmp_path / "b", replace(beyond, logits=logits), larger)
    with pytest.raises(StateFileError, match="logits are float32"):
        load_state(tmp_path / "b", OWNER)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    _refused(tmp_path, len(header).to_bytes(8, "little") + header + bytes(4), "not a saved state")
    huge = json.dumps({"__metadata__": {"a": "b" * (2 << 20)}}).encode()
    _refused(tmp_path, len(huge).to_bytes(8, "little") + huge)
    _refused(tmp_path, b"")
    _refused(tmp_path, (1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(StateFileError, match="does not exist"):
        load_state(tmp_path / "gone", OWNER)
    with pytest.raises(StateFileError, match="not a regular file"):
        load_state(tmp_path, OWNER)
