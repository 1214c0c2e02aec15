"""What the prefix cache keeps under its budget, and what it lets go first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.device import available_memory
from kittiwake.engine.prefix import ENTRY_BYTES, MOST_AUTO_BYTES, Origin, Prefix, PrefixCache, ram_budget
from kittiwake.engine.request import KeptState
from kittiwake.engine.states import SavedState
from kittiwake.engine.token_tree import as_tokens

NOTHING = Origin()


def prefix(count: int, value: float = 0.0) -> Prefix:
    saved = SavedState(count, {"sum": np.full((1, 100), value, dtype=np.float32)})
    return Prefix(count, saved, np.zeros(25, dtype=np.float32))


def cost(tokens: int) -> int:
    return 400 + 100 + 4 * tokens + ENTRY_BYTES


def keep(cache: PrefixCache, text: str, value: float = 0.0, origin: Origin = NOTHING) -> None:
    cache.keep(origin, as_tokens(list(text.encode())), prefix(len(text), value))


def held(cache: PrefixCache, *texts: str, origin: Origin = NOTHING) -> list[bool]:
    """Which of these texts are kept to their end. Looking is using."""
    found = [cache.find(origin.key, as_tokens(list(text.encode()))).prefix for text in texts]
    return [one is not None and one.count == len(text) for one, text in zip(found, texts, strict=True)]


def test_the_longest_beginning_is_found_and_how_far_texts_are_alike() -> None:
    cache = PrefixCache(1 << 20)
    for text in ("abc", "abcdef", "abcxyz", "q"):
        keep(cache, text, float(len(text)))
    found = cache.find("", as_tokens(list(b"abcdeXX")))
    assert found.prefix is not None and found.source == "memory"
    assert (found.prefix.count, found.common) == (3, 5)
    assert found.prefix.saved.parts["sum"][0, 0] == 3.0
    nothing = cache.find("", as_tokens(list(b"ab")))
    assert (nothing.prefix, nothing.source, nothing.common) == (None, "none", 2)


def test_the_budget_holds_to_the_byte() -> None:
    cache = PrefixCache(3 * cost(4))
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        keep(cache, text)
        assert cache.stats().bytes <= cache.budget_bytes
    assert held(cache, "aaaa", "bbbb", "cccc", "dddd") == [False, True, True, True]
    assert cache.stats().evicted == 1 and cache.stats().bytes == 3 * cost(4)
    small = PrefixCache(cost(4) - 1)
    keep(small, "aaaa")
    assert small.stats().entries == 0


def test_what_was_used_last_goes_last() -> None:
    cache = PrefixCache(3 * cost(4))
    for text in ("aaaa", "bbbb", "cccc"):
        keep(cache, text)
    held(cache, "aaaa")
    keep(cache, "bbbb")  # keeping again is using too, and nothing is kept twice
    keep(cache, "dddd")
    assert held(cache, "aaaa", "bbbb", "cccc", "dddd") == [True, True, False, True]


def test_what_a_longer_text_makes_up_for_goes_first_but_not_where_texts_part() -> None:
    cache = PrefixCache(cost(4) + cost(7) + cost(8) + cost(9))
    keep(cache, "stem")  # two go on from it: a branch
    keep(cache, "old one")
    for text in ("stem a", "stem a b", "stem crow"):
        keep(cache, text)
    # "stem a" is unused for less long than "stem" and "old one", but "stem a b" makes up for it
    assert held(cache, "stem", "old one", "stem a", "stem a b", "stem crow") == [True, True, False, True, True]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.text(alphabet="ab", min_size=1, max_size=6)), max_size=60), st.integers(2, 9)
)
def test_who_goes_is_found_without_a_look_at_all(uses: list[tuple[bool, str]], room: int) -> None:
    def by_looking_at_all(cache: PrefixCache, newest: Any) -> Any:
        covered = (entry for entry in cache._by_use if entry.node.is_covered and entry is not newest)
        return next(covered, next(iter(cache._by_use)))

    cache = PrefixCache(room * cost(4))
    choose = cache._victim

    def checked(newest: Any) -> Any:
        expected = by_looking_at_all(cache, newest)
        assert choose(newest) is expected
        return expected

    cache._victim = checked  # type: ignore[method-assign]
    for is_new, text in uses:
        if is_new:
            keep(cache, text)
        else:
            cache.find("", as_tokens(list(text.encode())))
    assert len(cache._covered._heap) <= len(cache._by_use) + 1


def test_origins_share_nothing() -> None:
    cache = PrefixCache(1 << 20)
    start = KeptState(SavedState(3, {"sum": np.ones((1, 100), dtype=np.float32)}), (1, 2, 3), None)
    other = KeptState(SavedState(3, {"sum": np.full((1, 100), 2, dtype=np.float32)}), (1, 2, 3), None)
    keep(cache, "abc", 1.0)
    keep(cache, "abc", 2.0, Origin(start))
    values = [
        found.prefix.saved.parts["sum"][0, 0] if (found := cache.find(key, as_tokens(list(b"abc")))).prefix else None
        for key in ("", Origin(start).key, Origin(other).key)
    ]
    assert values == [1.0, 2.0, None]


def test_a_state_that_says_it_has_seen_other_tokens_is_told_apart_by_its_values() -> None:
    saved = SavedState(2, {"sum": np.ones((1, 4), dtype=np.float32)})
    lying = SavedState(2, {"sum": np.zeros((1, 4), dtype=np.float32)})
    assert Origin(KeptState(saved, (1, 2), None)).key != Origin(KeptState(lying, (1, 2), None)).key
    assert Origin(KeptState(saved, (1, 2), None)).key == Origin(KeptState(saved, (7, 8), None)).key


def test_clearing_leaves_nothing() -> None:
    cache = PrefixCache(1 << 20)
    for text in ("a", "ab", "abc"):
        keep(cache, text)
    cache.clear()
    assert cache.stats().entries == cache.stats().bytes == 0
    assert cache.find("", as_tokens(list(b"abc"))).common == 0


def test_kept_logits_cannot_be_written_to() -> None:
    cache = PrefixCache(1 << 20)
    keep(cache, "abc")
    found = cache.find("", as_tokens(list(b"abc"))).prefix
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found.logits[0] = 1.0


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   1000 kB\n", "max", "5", 1000 << 10),
        ("MemAvailable: 1000 kB\n", str(500 << 10), str(100 << 10), 400 << 10),
        ("MemAvailable: 1000 kB\n", str(500 << 10), str(900 << 10), 0),
        ("nothing\n", "max", "5", 0),
    ],
)
def test_memory_free_is_what_the_machine_and_the_control_group_leave(
    tmp_path: Path, meminfo: str, limit: str, used: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    assert available_memory(tmp_path / "meminfo", tmp_path) == expected


def test_the_budget_is_half_of_what_is_free_unless_it_is_given() -> None:
    assert ram_budget(12345) == 12345 and ram_budget(0) == 0
    assert 0 < ram_budget(-1) <= MOST_AUTO_BYTES
