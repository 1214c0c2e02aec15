"""Stop strings, matched on text across token borders and held back until decided.

The automaton is that of Aho and Corasick, "Efficient string matching" (1975): one walk over the text finds every stop
string, and the depth of the current node is exactly the number of last characters that may still become one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

from kittiwake.errors import RequestError

# The automaton takes a few hundred bytes a character; more than this is no stop string but an attack on memory.
MAX_STOP_CHARS = 65_536


class StopResult(NamedTuple):
    """``text`` may be shown now; ``hit`` is the stop string that ended the text, or None."""

    text: str
    hit: str | None


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    First means: completed first, reading character by character. Of several that end with the same character the
    longest wins, so the output is cut before the earliest of them. The outcome is the same wherever the pieces are cut,
    and generation stops at the first character that decides it: with stops "abcd" and "bc", "abc" ends the text at "a".
    The stop string itself is never part of the output.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        """Raises RequestError for an empty stop string, one that is not a string, or too many characters in all."""
        self.stops = _checked_stops(stops)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in self.stops:
            self._add(stop)
        self._fallback = self._link()
        self._node = 0
        self._tail: deque[str] = deque()
        self._accepted_chars = 0
        self._hit: str | None = None

    def another(self) -> StopMatcher:
        """A matcher for another text. It shares the automaton, which takes time and memory to make."""
        twin = copy(self)
        twin._node, twin._tail, twin._accepted_chars, twin._hit = 0, deque(), 0, None
        return twin

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; returns what is decided to be output and the stop string found, if any.

        After a hit everything further is cut: each call returns ``("", hit)``.
        """
        if self._hit is not None or not self.stops:
            return self._emit("" if self._hit else text)
        decided: list[str] = []
        for char in text:
            self._tail.append(char)
            self._node = self._step(self._node, char)
            self._hit = self._found[self._node]
            keep = self._depth[self._node] if self._hit is None else len(self._hit)
            while len(self._tail) > keep:
                decided.append(self._tail.popleft())
            if self._hit is not None:
                self._tail.clear()
                break
        return self._emit("".join(decided))

    def flush(self) -> str:
        """The text has ended: returns what was held back, since it can no longer become a stop string."""
        rest = self._emit("".join(self._tail)).text
        self._tail.clear()
        self._node = 0
        return rest

    @property
    def held(self) -> int:
        """How many characters are held back, undecided."""
        return len(self._tail)

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._hit

    @property
    def accepted_chars(self) -> int:
        """How many characters of the whole text are decided to be output.

        A token is accepted in full once the text up to and including it is no longer than this.
        """
        return self._accepted_chars

    def _emit(self, text: str) -> StopResult:
        self._accepted_chars += len(text)
        return StopResult(text, self._hit)

    def _step(self, node: int, char: str) -> int:
        """The node of the longest suffix of the text read so far that begins a stop string."""
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = child
        self._found[node] = stop

    def _link(self) -> list[int]:
        """Fallback of each node: the node of its longest proper suffix. A node also finds what its fallback finds."""
        fallback = self._fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            if self._found[node] is None:
                self._found[node] = self._found[fallback[node]]
            for char, child in self._next[node].items():
                fallback[child] = self._step(fallback[node], char)
                queue.append(child)
        return fallback


def _checked_stops(stops: Iterable[str]) -> tuple[str, ...]:
    if isinstance(stops, str):
        # Iterating over it would make each of its characters a stop string.
        raise RequestError(f"stop strings must be a list of strings, found the string {stops[:80]!r}")
    checked = tuple(stops)
    for stop in checked:
        if not isinstance(stop, str):
            raise RequestError(f"a stop string must be a string, found {stop!r}")
        if not stop:
            raise RequestError("a stop string must not be empty", "leave it out to stop at nothing")
    total = sum(map(len, checked))
    if total > MAX_STOP_CHARS:
        raise RequestError(f"the stop strings have {total} characters in all, at most {MAX_STOP_CHARS} are taken")
    return checked
