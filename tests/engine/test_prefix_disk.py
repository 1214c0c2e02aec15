"""The disk tier: a file is there whole or not at all, whatever stops the writer, and only what is sound is used."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kittiwake.engine import prefix_disk
from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import Origin, Prefix, PrefixCache
from kittiwake.engine.prefix_disk import DiskTier, Files
from kittiwake.engine.request import CacheHints, KeptState, RequestOptions, SamplingParams
from kittiwake.engine.state_file import StateOwner
from kittiwake.engine.states import SavedState, StatePart, StateSpec
from kittiwake.engine.token_tree import as_tokens
from kittiwake.errors import OutputError
from tests.engine.drive import Outcome, ask, make_engine, prompt_of
from tests.tiny import tiny_model

SPEC = StateSpec(2, (StatePart("sum", (5,)), StatePart("shift", (3,))))
OWNER = StateOwner("toy", "ab" * 32, "fp32", SPEC, 256)
BUILD = "cd" * 32
NOTHING = Origin()


def prefix_of(tokens: np.ndarray) -> Prefix:
    """A state that depends on the tokens, so that no two are alike."""
    rng = np.random.default_rng(tokens.tolist())
    parts = {part.name: rng.normal(size=(2, *part.shape)).astype(np.float32) for part in SPEC.parts}
    return Prefix(len(tokens), SavedState(len(tokens), parts), rng.normal(size=256).astype(np.float32))


def text(length: int, seed: int = 0) -> np.ndarray:
    return as_tokens(prompt_of(length, seed))


def same(found: Prefix | None, tokens: np.ndarray) -> bool:
    """Whether the state found is the one of these tokens, to the bit."""
    expected = prefix_of(tokens)
    return (
        found is not None
        and found.count == found.saved.position == len(tokens)
        and found.logits.tobytes() == expected.logits.tobytes()
        and all(found.saved.parts[name].tobytes() == part.tobytes() for name, part in expected.saved.parts.items())
    )


class Tiers:
    """Opens tiers and closes all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[DiskTier] = []

    def __call__(
        self,
        *,
        budget: int = 1 << 20,
        owner: StateOwner = OWNER,
        build: str = BUILD,
        files: Files | None = None,
    ) -> DiskTier:
        tier = DiskTier(self.folder, budget, owner, build, files=files)
        self.opened.append(tier)
        return tier

    def names(self) -> list[str]:
        """Everything in the folder."""
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path / "cache")
    yield made
    for tier in made.opened:
        tier.close()


def put(tier: DiskTier, *texts: np.ndarray, origin: Origin = NOTHING) -> None:
    for tokens in texts:
        tier.put(origin, tokens, prefix_of(tokens))
        assert tier.flush(10)


def file_bytes(tiers: Tiers, tokens: np.ndarray) -> int:
    tier = tiers()
    put(tier, tokens)
    nbytes = tier.stats().bytes
    tier.close()
    shutil.rmtree(tiers.folder)
    return nbytes


def test_what_was_written_is_there_after_a_restart_to_the_bit(tiers: Tiers) -> None:
    texts = [text(5), text(9, 1), np.concatenate([text(5), text(4, 2)])]
    first = tiers()
    put(first, *texts)
    first.close()
    tier = tiers()
    for tokens in texts:
        assert same(tier.load("", tokens), tokens)
        longer = np.concatenate([tokens, text(3, 9)])
        assert tier.find("", longer)[0] == len(tokens) and same(tier.load("", longer), tokens)
    assert tier.find("", texts[0][:3]) == (0, 3) and tier.load("", texts[0][:3]) is None
    stats = tier.stats()
    assert (stats.entries, stats.hits, stats.corrupt, stats.foreign) == (3, 6, 0, 0)
    assert stats.bytes == sum(path.stat().st_size for path in tiers.folder.iterdir())


def test_files_are_for_their_owner_alone(tiers: Tiers) -> None:
    put(tiers(), text(5))
    (path,) = tiers.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and tiers.folder.stat().st_mode & 0o777 == 0o700


def test_the_same_text_is_written_once(tiers: Tiers) -> None:
    tier = tiers()
    put(tier, text(5), text(5))
    assert tier.stats().written == 1 and len(tiers.names()) == 1


def test_texts_that_follow_a_state_are_kept_apart_and_found_again(tiers: Tiers) -> None:
    before = text(6, 7)
    start = KeptState(prefix_of(before).saved, tuple(before.tolist()), prefix_of(before).logits)
    tokens = text(4)
    whole = np.concatenate([before, tokens])
    follow = Prefix(4, replace(prefix_of(whole).saved, position=10), prefix_of(whole).logits)
    tier = tiers()
    tier.put(Origin(start), tokens, follow)
    tier.close()
    tier = tiers()
    assert tier.find("", tokens) == (0, 0) and tier.find("", whole) == (0, 0)
    found = tier.load(Origin(start).key, tokens)
    assert found is not None and found.count == 4 and found.saved.position == 10
    assert found.logits.tobytes() == follow.logits.tobytes()


# Stopped in a write


class StoppedError(BaseException):
    """The machine stops here: nothing after it happens, not even tidying up."""


class StopsAt(Files):
    """Stops at the n-th step of a write, before or after it, or (for a write of bytes) in the middle."""

    def __init__(self, step: int, when: str) -> None:
        self.left, self.when, self.is_stopped = step, when, False

    def _step(self, work: Callable[[], None], half: Callable[[], None] | None = None) -> None:
        if self.is_stopped:
            raise StoppedError
        self.left -= 1
        if self.left:
            work()
            return
        self.is_stopped = True
        if self.when == "after":
            work()
        elif self.when == "middle" and half is not None:
            half()
        raise StoppedError

    def create(self, path: Path) -> int:
        handles: list[int] = []
        try:
            self._step(lambda: handles.append(Files.create(self, path)))
        except StoppedError:
            for handle in handles:  # as the end of the process does
                os.close(handle)
            raise
        return handles[0]

    def write(self, handle: int, data: bytes | memoryview) -> None:
        half = memoryview(data)[: len(data) // 2]
        self._step(lambda: Files.write(self, handle, data), lambda: Files.write(self, handle, half))

    def sync(self, handle: int) -> None:
        self._step(lambda: Files.sync(self, handle))

    def rename(self, source: Path, target: Path) -> None:
        self._step(lambda: Files.rename(self, source, target))

    def remove(self, path: Path) -> None:
        self._step(lambda: Files.remove(self, path))


STEPS = 9  # create, header, 4 arrays, sync of the file, rename, sync of the folder


@pytest.mark.parametrize("when", ["before", "middle", "after"])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_stopped_at_any_step_leaves_a_folder_that_reads(tiers: Tiers, step: int, when: str) -> None:
    old, new = text(5), text(9, 1)
    put(tiers(), old)
    stopping = StopsAt(step, when)
    tier = tiers(files=stopping)
    tier.put(NOTHING, new, prefix_of(new))
    vars(tier)["_writer"].join(10)
    assert stopping.is_stopped, "there is no such step"
    again = tiers()
    assert same(again.load("", old), old)
    found = again.load("", new)
    assert found is None or same(found, new)
    is_named = step > STEPS - 1 or (step == STEPS - 1 and when == "after")
    assert (found is not None) == is_named
    assert again.stats().corrupt == 0
    assert not [name for name in tiers.names() if "partial" in name]
    put(again, new)
    assert same(tiers().load("", new), new)


def test_there_are_no_more_steps_than_those(tiers: Tiers) -> None:
    counting = StopsAt(10**6, "before")
    put(tiers(files=counting), text(9, 1))
    assert 10**6 - counting.left == STEPS


CHILD = """
import sys, time
from pathlib import Path
from tests.engine.test_prefix_disk import BUILD, NOTHING, OWNER, DiskTier, prefix_of, text
tier = DiskTier(Path(sys.argv[1]), 1 << 30, OWNER, BUILD)
print("ready", flush=True)
for seed in range(10**6):
    tier.put(NOTHING, text(40, seed), prefix_of(text(40, seed)))
    while tier.stats().queued > 3:
        time.sleep(0.0005)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_a_folder_that_reads(tiers: Tiers) -> None:
    total = 0
    for delay_s in (0.02, 0.05, 0.11):
        command = [sys.executable, "-c", CHILD, str(tiers.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(delay_s)
            child.send_signal(signal.SIGKILL)
        tier = tiers(budget=1 << 30)
        stats = tier.stats()
        assert stats.corrupt == 0 and not [name for name in tiers.names() if "partial" in name]
        found = [seed for seed in range(stats.entries) if same(tier.load("", text(40, seed)), text(40, seed))]
        assert len(found) == stats.entries >= total  # those written before, and the first ones of this run
        total = stats.entries
    assert total > 0


def test_a_file_that_another_process_is_writing_is_left_alone(tiers: Tiers) -> None:
    tiers()
    partial = tiers.folder / f".x{prefix_disk.SUFFIX}.abc.partial"
    handle = Files().create(partial)
    tiers()
    assert partial.exists()
    os.close(handle)
    tiers()
    assert not partial.exists()


# Damaged and foreign files


def damaged(raw: bytes) -> Iterator[tuple[str, bytes]]:
    header = int.from_bytes(raw[:8], "little")
    places = {
        "length": 0, "length, high": 6, "brace": 8, "metadata": 40, "header": 8 + header // 2, "padding": 7 + header,
        "first array": 9 + header, "middle": 8 + header + (len(raw) - header) // 2, "tokens": len(raw) - 1,
    }  # fmt: skip
    for name, at in places.items():
        yield name, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    yield "empty", b""
    yield "cut in the header", raw[: header // 2]
    yield "cut in the data", raw[:-100]
    yield "one byte short", raw[:-1]
    yield "one byte more", raw + b"\0"
    yield "zeros", bytes(len(raw))
    yield "zeros at the end", raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2)


@pytest.mark.parametrize("is_running", [False, True], ids=["before the start", "while it is served"])
def test_a_damaged_file_is_never_used_but_removed_and_counted(
    tiers: Tiers, is_running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = text(5), np.concatenate([text(5), text(5, 1)])
    put(tiers(), long)
    (path,) = tiers.folder.iterdir()
    raw = path.read_bytes()
    for what, wrong in damaged(raw):
        shutil.rmtree(tiers.folder)
        put(tiers(), short, long)
        if is_running:
            tier = tiers()
        path.write_bytes(wrong)
        if not is_running:
            tier = tiers()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert same(tier.load("", long), short), what  # the next best, whatever was wrong
        stats = tier.stats()
        assert (stats.corrupt, stats.foreign, stats.entries) == (1, 0, 1), what
        assert not path.exists(), what
        put(tier, long)
        assert same(tier.load("", long), long), what


def test_files_of_other_models_builds_and_formats_are_left_alone(tiers: Tiers) -> None:
    tokens = text(9)
    others = [
        {"owner": replace(OWNER, model="ef" * 32)},
        {"owner": replace(OWNER, family="other")},
        {"owner": replace(OWNER, dtype="bf16")},
        {"build": "01" * 32},
    ]
    for other in others:
        put(tiers(**other), tokens)  # type: ignore[arg-type]
    tier = tiers()
    assert tier.load("", tokens) is None and tier.stats().entries == 0
    assert tier.stats().foreign == 4 and tier.stats().corrupt == 0 and len(tiers.names()) == 4
    put(tier, tokens)
    for other in [*others, {}]:
        assert same(tiers(**other).load("", tokens), tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_running", [False, True], ids=["before the start", "while it is served"])
def test_a_file_that_cannot_be_read_is_left_alone(
    tiers: Tiers, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tiers(), text(9))
    (path,) = tiers.folder.iterdir()
    works = Path.open

    def refuse(self: Path, *more: Any, **named: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return works(self, *more, **named)

    tier = tiers() if is_running else None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        tier = tier or tiers()
        assert tier.load("", text(9)) is None
        stats = tier.stats()
        assert (stats.foreign, stats.corrupt, stats.entries, stats.bytes) == (1, 0, 0, path.stat().st_size)
        put(tier, text(9, 1))
    assert same(tiers().load("", text(9)), text(9)) and len(tiers.names()) == 2


def test_a_damaged_file_in_a_folder_that_is_read_only_stops_nothing(tiers: Tiers) -> None:
    class ReadOnly(Files):
        def remove(self, path: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

    put(tiers(), text(5), np.concatenate([text(5), text(5, 1)]))
    long, short = sorted(tiers.folder.iterdir(), key=lambda path: -path.stat().st_size)
    long.write_bytes(long.read_bytes()[:-1] + b"?")
    (tiers.folder / f"{'0' * 40}.prefix").write_bytes(b"nonsense")
    tier = tiers(files=ReadOnly())
    assert same(tier.load("", np.concatenate([text(5), text(5, 1)])), text(5))
    stats = tier.stats()
    assert (stats.corrupt, stats.entries) == (2, 1)
    assert stats.bytes == sum(path.stat().st_size for path in tiers.folder.iterdir()) and short.exists()


def test_a_newer_format_is_left_alone(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kittiwake.engine.state_file.FORMAT", 9)
        put(tiers(), text(9))
    tier = tiers()
    assert (tier.stats().foreign, tier.stats().entries, len(tiers.names())) == (1, 0, 1)


def test_a_name_that_is_given_to_another_text_is_not_believed(tiers: Tiers) -> None:
    tier = tiers()
    put(tier, text(9), text(9, 1))
    one, other = sorted(tiers.folder.iterdir())
    shutil.copy(one, other)
    assert [tier.load("", tokens) is None for tokens in (text(9), text(9, 1))].count(True) == 1


def test_a_file_with_an_absurd_position_does_not_stop_the_start(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "key", "ab@" + "9" * 5000)
    monkeypatch.setattr(prefix_disk, "_base", lambda key: 0)
    put(tiers(), text(5))
    monkeypatch.undo()
    assert tiers().find("", text(5)) == (0, 0)


def test_other_files_in_the_folder_are_no_business_of_ours(tiers: Tiers) -> None:
    tiers.folder.mkdir()
    (tiers.folder / "notes.txt").write_text("mine")
    (tiers.folder / "a.prefix").mkdir()
    (tiers.folder / "b.prefix").symlink_to(tiers.folder / "notes.txt")
    put(tiers(budget=1), text(5))
    assert tiers.names() == ["a.prefix", "b.prefix", "notes.txt"]


# The budget and the disk


def test_the_budget_holds_and_what_was_used_last_stays(tiers: Tiers) -> None:
    nbytes = file_bytes(tiers, text(9))
    tier = tiers(budget=3 * nbytes)
    put(tier, text(9, 0), text(9, 1), text(9, 2))
    time.sleep(0.02)  # times of files are some milliseconds coarse
    assert same(tier.load("", text(9, 0)), text(9, 0))
    time.sleep(0.02)
    put(tier, text(9, 3))
    assert [tier.find("", text(9, seed))[0] for seed in range(4)] == [9, 0, 9, 9]
    assert tier.stats().bytes == 3 * nbytes and tier.stats().evicted == 1
    tier.close()
    smaller = tiers(budget=2 * nbytes)
    put(smaller, text(9, 4))
    assert smaller.stats().bytes <= 2 * nbytes
    assert [smaller.find("", text(9, seed))[0] for seed in range(5)] == [0, 0, 0, 9, 9]


def test_files_of_others_count_towards_the_budget(tiers: Tiers) -> None:
    nbytes = file_bytes(tiers, text(9))
    put(tiers(owner=replace(OWNER, model="ef" * 32)), text(9))
    tier = tiers(budget=2 * nbytes)
    put(tier, text(9), text(9, 1))
    assert len(tiers.names()) == 2 and tier.stats().entries == 2


def test_two_processes_may_share_a_folder(tiers: Tiers) -> None:
    nbytes = file_bytes(tiers, text(9))
    one, other = tiers(budget=4 * nbytes), tiers(budget=4 * nbytes)
    put(one, text(9, 0), text(9, 1))
    put(other, text(9, 1), text(9, 2))  # the first is there already: it is found, not written again
    assert (one.stats().written, other.stats().written) == (2, 1)
    assert same(other.load("", text(9, 0)), text(9, 0)) and same(other.load("", text(9, 1)), text(9, 1))
    for path in tiers.folder.iterdir():
        path.unlink()
    for tier in (one, other):
        assert tier.load("", text(9, 1)) is None
        assert tier.stats().corrupt == 0
        put(tier, text(9, 5))
    assert len(tiers.names()) == 1


def test_a_state_larger_than_the_budget_is_not_written(tiers: Tiers) -> None:
    tier = tiers(budget=100)
    put(tier, text(9))
    assert tiers.names() == [] and tier.stats().dropped == 1


def test_a_long_conversation_does_not_drive_others_out(tiers: Tiers) -> None:
    talk = text(400)
    nbytes = file_bytes(tiers, talk)
    tier = tiers(budget=5 * nbytes)
    put(tier, text(50, 1), text(50, 2))
    put(tier, *(talk[:length] for length in range(10, 401, 10)))
    assert tier.find("", text(50, 1))[0] == tier.find("", text(50, 2))[0] == 50
    assert tier.find("", talk)[0] == 400


class Full(Files):
    """A disk that has no room, for a while."""

    def __init__(self, code: int = errno.ENOSPC) -> None:
        self.code: int | None = code

    def write(self, handle: int, data: bytes | memoryview) -> None:
        if self.code is not None:
            super().write(handle, data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code))
        super().write(handle, data)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_full_disk_pauses_writing_and_nothing_else(
    tiers: Tiers, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tiers(), text(9))
    disk = Full(code)
    tier = tiers(files=disk)
    with caplog.at_level(logging.WARNING):
        put(tier, text(9, 1), text(9, 2), text(9, 3))
    stats = tier.stats()
    assert stats.is_paused and (stats.failed, stats.dropped, stats.queued) == (1, 2, 0)
    assert len(caplog.records) == 1 and str(tiers.folder) in caplog.text
    assert len(tiers.names()) == 1  # nothing half-written stays
    assert same(tier.load("", text(9)), text(9))
    disk.code = None
    monkeypatch.setattr(prefix_disk, "PAUSE_S", 0.0)
    vars(tier)["_paused_until_s"] = 0.0
    put(tier, text(9, 1))
    assert not tier.stats().is_paused and same(tier.load("", text(9, 1)), text(9, 1))


class Slow(Files):
    """A disk that waits until it is let go on."""

    def __init__(self) -> None:
        self.may_go_on = False

    def sync(self, handle: int) -> None:
        while not self.may_go_on:
            time.sleep(0.001)


def test_a_slow_disk_drops_states_and_never_makes_anyone_wait(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_disk, "STAGED_BYTES", 5 * (prefix_of(text(9)).saved.nbytes + 4 * 256))
    disk = Slow()
    tier = tiers(files=disk)
    begin = time.perf_counter()
    for seed in range(50):
        tier.put(NOTHING, text(9, seed), prefix_of(text(9, seed)))
    assert time.perf_counter() - begin < 1.0
    stats = tier.stats()
    assert 1 <= stats.queued <= 6 and stats.dropped == 50 - stats.queued
    disk.may_go_on = True
    assert tier.flush(10) and tier.stats().written == stats.queued


def test_a_state_that_lies_about_its_tokens_stops_no_writer(tiers: Tiers) -> None:
    tier = tiers()
    wrong = replace(prefix_of(text(9)), saved=replace(prefix_of(text(9)).saved, position=4))
    tier.put(NOTHING, text(9), wrong)
    put(tier, text(5))
    assert (tier.stats().failed, tier.stats().written) == (1, 1)


def test_a_fault_that_nobody_expected_stops_no_writer(tiers: Tiers) -> None:
    class Faulty(Files):
        def sync(self, handle: int) -> None:
            if not faults:
                super().sync(handle)
            else:
                raise faults.pop()

    faults: list[Exception] = [MemoryError(), ValueError("deep inside")]
    tier = tiers(files=Faulty())
    put(tier, text(9), text(9, 1), text(9, 2))
    assert (tier.stats().failed, tier.stats().written, tier.stats().queued) == (2, 1, 0)
    assert same(tier.load("", text(9, 2)), text(9, 2))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be used"):
        DiskTier(tmp_path / "file" / "cache", 1 << 20, OWNER, BUILD)


def test_closing_writes_what_is_queued(tiers: Tiers) -> None:
    tier = tiers()
    for seed in range(20):
        tier.put(NOTHING, text(9, seed), prefix_of(text(9, seed)))
    tier.close()
    tier.close()
    assert tier.stats().written == 20
    tier.put(NOTHING, text(9, 99), prefix_of(text(9, 99)))
    assert tier.stats().queued == 0


# With the engine

PARAMS = SamplingParams(max_tokens=12, seed=5, repetition_penalty=1.2, logprobs=True, top_logprobs=2)


def engine_on(folder: Path, *, budget: int = 1 << 26, files: Files | None = None) -> Engine:
    loaded = tiny_model()
    model = loaded.model
    owner = StateOwner(model.config.family, loaded.digest(), "fp32", model.state_spec, model.config.vocab_size)
    disk = DiskTier(folder, 1 << 26, owner, BUILD, files=files)
    return make_engine(cache=PrefixCache(budget, min_tokens=4, disk=disk))


def told(outcome: Outcome) -> object:
    return [outcome.text, outcome.tokens, [one for delta in outcome.deltas for one in delta.logprobs], outcome.reason]


def test_answers_are_the_same_bits_after_a_restart(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    expected = [told(ask(make_engine(), ids, PARAMS)) for ids in (prompt, [*prompt, 1, 2])]
    first = engine_on(tmp_path)
    assert told(ask(first, prompt, PARAMS)) == expected[0]
    first.close()
    second = engine_on(tmp_path)
    found = [ask(second, ids, PARAMS) for ids in (prompt, [*prompt, 1, 2])]
    assert [told(one) for one in found] == expected
    uses = [one.deltas[-1].cache for one in found]
    assert [(use.cached_tokens, use.source) for use in uses if use] == [(40, "disk"), (40, "memory")]
    second.close()


def test_a_short_hit_in_memory_does_not_hide_a_long_one_on_disk(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    first = engine_on(tmp_path)
    ask(first, prompt, PARAMS)
    first.close()
    second = engine_on(tmp_path)
    ask(second, prompt[:10], SamplingParams(max_tokens=1))
    use = ask(second, prompt, PARAMS).deltas[-1].cache
    assert use is not None and (use.cached_tokens, use.source) == (40, "disk")
    second.close()


def test_serving_goes_on_while_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_on(tmp_path, files=Full())
    with caplog.at_level(logging.CRITICAL):
        for seed in range(4):
            prompt = prompt_of(30, seed)
            expected = told(ask(make_engine(), prompt, PARAMS))
            assert told(ask(engine, prompt, PARAMS)) == told(ask(engine, prompt, PARAMS)) == expected
    stats = engine.stats().cache
    assert stats is not None and stats.disk is not None and stats.disk.is_paused
    assert engine.free_slots == 4
    engine.close()


def test_a_request_that_opts_out_leaves_nothing_on_disk(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    ask(engine, prompt_of(40), PARAMS, options=RequestOptions(cache=CacheHints(use=False)))
    engine.close()
    assert list(tmp_path.iterdir()) == []
