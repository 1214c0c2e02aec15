"""The prefix cache: states of beginnings that were read once, so that nobody has to read them again.

A state is kept whole at one place of a text and serves every text that begins with exactly those tokens; it cannot be
rewound to an earlier place. What is found changes no bit of any answer, only how soon it begins.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kittiwake.device import available_memory
from kittiwake.engine.request import KeptState
from kittiwake.engine.saved_pages import PageHolders
from kittiwake.engine.states import SavedState
from kittiwake.engine.token_tree import Node, TokenTree

MOST_AUTO_BYTES = 32 << 30
ENTRY_BYTES = 1024
"""What an entry costs beside its arrays."""


@dataclass(frozen=True)
class Prefix:
    """The state after the first ``count`` tokens of a text, and the logits that follow them. A value, not to be changed."""

    count: int
    saved: SavedState
    logits: np.ndarray
    """float32 [vocab]"""


@dataclass(frozen=True)
class Origin:
    """What the tokens of a text follow: nothing, or a state that was given. Texts of different origins share nothing."""

    start: KeptState | None = None

    @property
    def key(self) -> str:
        """Told by the values of the state, not by the tokens it says it has seen: an uploaded state may say anything."""
        if self.start is None:
            return ""
        return f"{self.start.saved.digest}@{self.start.saved.position}"


@dataclass(frozen=True)
class Found:
    """What the cache knows of a text."""

    prefix: Prefix | None
    source: str
    """"memory" or "disk", "none" where there is no prefix."""
    common: int
    """How many tokens it shares with the likest text that is kept, whether or not a state was kept there."""


@dataclass(frozen=True)
class DiskStats:
    """The disk tier in numbers; counts since it was opened."""

    entries: int
    bytes: int
    """Of all files in the folder, those of other models too."""
    budget_bytes: int
    queued: int
    """States that wait to be written."""
    is_paused: bool
    """Whether nothing is written for a while, because the disk was full or failed."""
    written: int
    dropped: int
    """Not written, because the writer was behind or paused."""
    evicted: int
    hits: int
    foreign: int
    """Files of other models, builds or formats, left alone."""
    corrupt: int
    """Damaged files, removed."""
    failed: int
    """Writes that failed."""


class Disk(Protocol):
    """Where states are kept beyond memory."""

    def find(self, key: str, tokens: np.ndarray) -> tuple[int, int]:
        """(tokens of the longest prefix that is kept, tokens shared with any)."""

    def load(self, key: str, tokens: np.ndarray) -> Prefix | None:
        """The longest prefix of ``tokens``, every byte checked; None where there is none that is sound."""

    def put(self, origin: Origin, tokens: np.ndarray, prefix: Prefix) -> None:
        """Have a state written some time. Never waits."""

    def stats(self) -> DiskStats:
        """The tier in numbers."""

    def close(self) -> None:
        """Write what is still queued and end."""


@dataclass(frozen=True)
class CacheStats:
    """The cache in numbers; counts since it was made."""

    entries: int
    bytes: int
    """Of all entries; pages that several of them share count once."""
    budget_bytes: int
    hits: dict[str, int]
    """Requests by where their prefix came from: "memory", "disk", "shared"."""
    misses: dict[str, int]
    """Requests by why nothing was found (:class:`CacheUse`)."""
    tokens_saved: int
    inserted: int
    evicted: int
    disk: DiskStats | None = None


@dataclass(eq=False)
class _Entry:
    key: str
    node: Node[_Entry] = field(init=False)
    prefix: Prefix
    own_bytes: int
    """What goes with it whoever else holds its pages."""
    used: int = 0
    """Rises with every use of any entry."""
    is_listed: bool = False
    """Whether it stands among those that a longer one may make up for."""


class _Covered:
    """Entries that a longer one makes up for, longest unused first, found without a look at all the others.

    An entry is listed when it may have become one. Whether it still is, and when it was used last, is seen when its turn
    comes: texts part and are used far more often than entries go.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Entry]] = []
        self._numbers = itertools.count()

    def note(self, node: Node[_Entry] | None) -> None:
        """Something changed below this node, or at it."""
        if node is not None and node.value is not None and not node.value.is_listed and node.is_covered:
            self._list(node.value)

    def _list(self, entry: _Entry) -> None:
        entry.is_listed = True
        heapq.heappush(self._heap, (entry.used, next(self._numbers), entry))

    def first(self, newest: _Entry) -> _Entry | None:
        """The one unused for longest, other than the newest."""
        found, aside = None, None
        while self._heap and found is None:
            used, _, entry = heapq.heappop(self._heap)
            entry.is_listed = False
            if entry is newest:
                aside = entry
            elif entry.node.value is entry and entry.node.is_covered:
                if entry.used == used:
                    found = entry
                self._list(entry)
        if aside is not None:
            self._list(aside)
        return found


class PrefixCache:
    """States in memory under a budget, with a disk tier behind it where there is one. Not thread-safe."""

    def __init__(self, budget_bytes: int, *, min_tokens: int = 1, disk: Disk | None = None) -> None:
        self.budget_bytes, self.min_tokens, self.disk = budget_bytes, min_tokens, disk
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.tokens_saved = 0
        self._trees: dict[str, TokenTree[_Entry]] = {}
        self._by_use: OrderedDict[_Entry, None] = OrderedDict()  # longest unused first
        self._uses, self._covered = itertools.count(), _Covered()
        self._holders = PageHolders()
        self._bytes = self._inserted = self._evicted = 0

    def find(self, key: str, tokens: np.ndarray) -> Found:
        """The longest prefix of int32 [T] that is kept, in memory or, where that is clearly longer, on disk."""
        node, common = self._trees[key].find(tokens) if key in self._trees else (None, 0)
        count = node.depth if node is not None else 0
        if self.disk is not None:
            on_disk, shared = self.disk.find(key, tokens)
            common = max(common, shared)
            if on_disk >= count + self.min_tokens:
                prefix = self.disk.load(key, tokens)
                if prefix is not None and prefix.count > count:
                    self._insert(key, tokens[: prefix.count], prefix)
                    return Found(prefix, "disk", common)
        if node is None or node.value is None:
            return Found(None, "none", common)
        self._use(node.value)
        return Found(node.value.prefix, "memory", common)

    def _use(self, entry: _Entry) -> None:
        entry.used = next(self._uses)
        self._by_use[entry] = None
        self._by_use.move_to_end(entry)

    def keep(self, origin: Origin, tokens: np.ndarray, prefix: Prefix) -> None:
        """Keep the state after exactly these tokens, int32 [prefix.count]. Its arrays are not copied."""
        prefix.logits.flags.writeable = False
        self._insert(origin.key, tokens, prefix)
        if self.disk is not None:
            self.disk.put(origin, tokens, prefix)

    def _insert(self, key: str, tokens: np.ndarray, prefix: Prefix) -> None:
        tree = self._trees.get(key)
        if tree is not None:
            node, _ = tree.find(tokens)
            if node is not None and node.depth == len(tokens) and node.value is not None:
                self._use(node.value)
                return
        beside = prefix.logits.nbytes + tokens.nbytes + ENTRY_BYTES
        if prefix.saved.nbytes + beside > self.budget_bytes:
            return
        entry = _Entry(key, prefix, prefix.saved.own_nbytes + beside)
        entry.node = self._trees.setdefault(key, TokenTree()).insert(tokens, entry)
        self._use(entry)
        self._covered.note(entry.node)
        self._covered.note(entry.node.parent)
        self._bytes += entry.own_bytes + self._holders.add(prefix.saved.pages)
        self._inserted += 1
        # only now: it shows where texts part, and such places are worth more
        while self._bytes > self.budget_bytes:
            self._evict(self._victim(entry))

    def _victim(self, newest: _Entry) -> _Entry:
        """The entry unused for longest among those that a longer one makes up for, else among all; not the newest."""
        return self._covered.first(newest) or next(iter(self._by_use))

    def _evict(self, entry: _Entry) -> None:
        self._drop(entry)
        self._evicted += 1

    def _drop(self, entry: _Entry) -> None:
        tree, above = self._trees[entry.key], entry.node.parent
        while above is not None and above.value is None:
            above = above.parent
        tree.remove(entry.node)
        self._covered.note(above)
        if not tree:
            del self._trees[entry.key]
        del self._by_use[entry]
        self._bytes -= entry.own_bytes + self._holders.remove(entry.prefix.saved.pages)

    def clear(self) -> None:
        """Forget what is in memory."""
        for entry in list(self._by_use):
            self._drop(entry)
        self._covered = _Covered()

    def stats(self) -> CacheStats:
        """The cache in numbers."""
        return CacheStats(
            entries=len(self._by_use),
            bytes=self._bytes,
            budget_bytes=self.budget_bytes,
            hits=dict(self.hits),
            misses=dict(self.misses),
            tokens_saved=self.tokens_saved,
            inserted=self._inserted,
            evicted=self._evicted,
            disk=self.disk.stats() if self.disk is not None else None,
        )

    def close(self) -> None:
        """Forget what is in memory; let the disk tier write what it has still to write."""
        self.clear()
        if self.disk is not None:
            self.disk.close()


def least_tokens(device: str) -> int:
    """Fewest tokens that a state must save, where nobody says.

    A card reads some hundred tokens while one state comes to the host's memory, and its steps wait for that.
    """
    return 32 if device == "cpu" else 512


def ram_budget(wanted: int, claimed: int = 0) -> int:
    """Bytes for the cache: as wanted, or for -1 half of the memory that is free now and not yet ``claimed`` for other
    uses, at most 32 GiB."""
    return wanted if wanted >= 0 else min(max(0, available_memory() - claimed) // 2, MOST_AUTO_BYTES)
