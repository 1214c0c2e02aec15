"""What a request need not read itself: a beginning from the cache, or one that another request is reading right now.

A *mark* is a count of tokens of a request at which its slot stops and the state is taken: for the cache, for requests
that wait there, or both. Marks cut a prompt into more chunks, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kittiwake.engine.prefix import Origin, Prefix, PrefixCache
from kittiwake.engine.request import CacheUse
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.engine.token_tree import as_tokens, common_length

if TYPE_CHECKING:
    from kittiwake.engine.scheduler import Request

GRID_TOKENS = 1024
"""States are taken at least that far apart where nothing else asks for one."""
MOST_GRID_MARKS = 8
CLOSE_TOKENS = 128
"""A place of the grid so near to another mark is left out."""


class Reuse:
    """Finds prefixes for requests that get a slot, takes states at their marks, and lets requests wait for others."""

    def __init__(self, states: StateTable, cache: PrefixCache | None = None, *, answers: bool = True) -> None:
        self._states, self.cache = states, cache
        self._answers = answers
        """Whether states after answers are kept too."""

    def open(self, requests: list[Request]) -> None:
        """Requests of one prompt were added: say why they find nothing in the cache, or get ready to look for it."""
        if self.cache is None or not requests:
            return
        if not requests[0].options.cache.use:
            for request in requests:
                request.cache_use = CacheUse(miss="disabled")
            return
        origin, prompt = Origin(requests[0].start_from), as_tokens(requests[0].tokens)
        for request in requests:
            request.cache_use = CacheUse(miss="short")
            request.origin, request.prompt = origin, prompt

    def parks(self, request: Request, running: Iterable[Request]) -> bool:
        """A slot is free for this request. Find what it goes on from and plan its marks; True where it should rather wait
        for a request that is reading its beginning."""
        if self.cache is None or request.origin is None or request.prompt is None:
            return False
        if request.prompt_tokens < self.cache.min_tokens:
            return False
        common = 0
        if request.resume is None:
            found = self.cache.find(request.origin.key, request.prompt)
            request.resume, common = found.prefix, found.common
            if found.prefix is not None:
                request.cache_use = CacheUse(found.prefix.count, found.source, "")
            else:
                request.cache_use = CacheUse(miss="changed" if common >= self.cache.min_tokens else "unknown")
        count = request.resume.count if request.resume is not None else 0
        leader, shared = self._leader(request, running)
        if leader is not None and shared >= count + self.cache.min_tokens:
            leader.parked.append(request)
            request.waits_for, request.resume = shared, None
            _add_mark(leader, shared)
            return True
        request.last_mark = count
        for mark in self._marks(request, count, common):
            _add_mark(request, mark)
        return False

    def _leader(self, request: Request, running: Iterable[Request]) -> tuple[Request | None, int]:
        """The running request that will have read the longest part of this one's prompt, and how long that is."""
        best, longest = None, 0
        assert request.origin is not None and request.prompt is not None
        for other in running:
            if other.prompt is None or other.origin is None or other.fed >= other.prompt_tokens:
                continue
            if other.options.priority < request.options.priority or other.origin.key != request.origin.key:
                continue
            shared = common_length(other.prompt, request.prompt)
            if shared > max(longest, other.fed):
                best, longest = other, shared
        return best, longest

    def _marks(self, request: Request, count: int, common: int) -> list[int]:
        """Where to take states of a prompt whose first ``count`` tokens are not read again."""
        assert self.cache is not None
        length, least = request.prompt_tokens, self.cache.min_tokens
        wanted = {border for border in request.options.cache.borders if count < border < length}
        if count < common < length:  # where texts are known to part
            wanted.add(common)
        marks = sorted(wanted | {length})
        spacing = GRID_TOKENS
        while length // spacing > MOST_GRID_MARKS:
            spacing *= 2
        base = request.base  # the grid lies on absolute positions, so that texts alike have marks alike
        grid = range(spacing - base % spacing, length, spacing)
        marks += [at for at in grid if at > count and min(abs(at - mark) for mark in marks) > CLOSE_TOKENS]
        last, kept = count, []
        for mark in sorted(marks):
            if mark - last >= least or (mark == length and mark > count):
                kept.append(mark)
                last = mark
        return kept

    def save_at_mark(self, request: Request) -> None:
        """Copy the state of a slot that has come to a mark, before anything else is run in it."""
        if request.marks and request.marks[0] == request.fed:
            request.taken = (request.marks.pop(0), self._states.save(request.slot))

    def publish(self, request: Request, row: np.ndarray) -> list[Request]:
        """Keep the state that was copied; ``row`` are the logits there. Returns the requests that waited for it."""
        assert request.taken is not None
        (count, saved), request.taken = request.taken, None
        prefix = Prefix(count, saved, np.array(row, dtype=np.float32))
        if self.cache is not None and request.origin is not None and request.prompt is not None:
            self.cache.keep(request.origin, request.prompt[:count], prefix)
            request.last_mark = count
        waiting = [*request.parked, *(request.followers if count == request.prompt_tokens else ())]
        ready = [one for one in waiting if one.waits_for == count and one.is_held]
        for one in ready:
            one.resume, one.last_mark = prefix, prefix.count
            # samples share one prompt: what was read of it was read for all of them
            one.cache_use = request.cache_use if one in request.followers else CacheUse(prefix.count, "shared", "")
        request.parked = [one for one in request.parked if one not in ready]
        request.followers = [one for one in request.followers if one not in ready]
        return ready

    def wants_answer(self, request: Request) -> bool:
        """Whether the state after the answer is worth keeping, however long the answer turns out to be."""
        return self._answers and self.cache is not None and request.origin is not None and request.options.cache.answer

    def is_worth_keeping(self, request: Request, count: int) -> bool:
        """Whether a state after ``count`` of the request's tokens saves enough over the last one taken."""
        return self.cache is not None and count - request.last_mark >= self.cache.min_tokens

    def keep_answer(self, request: Request, saved: SavedState, row: np.ndarray) -> None:
        """Keep the state after prompt and answer; ``row`` are the logits that follow."""
        if self.wants_answer(request) and self.is_worth_keeping(request, request.fed):
            assert self.cache is not None and request.origin is not None
            prefix = Prefix(request.fed, saved, np.array(row, dtype=np.float32))
            self.cache.keep(request.origin, as_tokens(request.tokens), prefix)

    def count(self, request: Request) -> None:
        """Enter a request that got its slot into the cache's figures."""
        if self.cache is None:
            return
        use = request.cache_use
        self.cache.tokens_saved += use.cached_tokens
        if use.miss:
            self.cache.misses[use.miss] += 1
        else:
            self.cache.hits[use.source] += 1


def _add_mark(request: Request, mark: int) -> None:
    if mark not in request.marks:
        request.marks.append(mark)
        request.marks.sort()
