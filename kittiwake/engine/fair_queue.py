"""Who is next: waiting requests of several clients and priorities."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kittiwake.engine.scheduler import Request

AGE_S = 5.0
"""Waiting that long is worth one level of priority, or one slot held less: nobody waits for ever."""
WEIGHT_LEVELS = 5
"""So many levels of priority double what the rows of a prompt are worth to its client."""
MOST_IDLE = 1024


def level(request: Request, since_s: float, now_s: float) -> float:
    """The priority of a request that has got nothing since then."""
    return request.options.priority + max(0.0, now_s - max(since_s, request.added_s)) / AGE_S


class Shares:
    """What each client has of the engine: slots now, and rows of prompts so far (start-time fair queueing).

    A client that comes, or comes back, starts level with the one that is being served: neither does it catch up on what
    it did not ask for, nor do others catch up on it.
    """

    def __init__(self) -> None:
        self.slots: Counter[str] = Counter()
        self._rows: dict[str, float] = {}
        self._level = 0.0
        """Rows of the client served last, before it was."""
        self._slot_s: dict[str, float] = {}

    def rows(self, client: str) -> float:
        """Rows of prompts run for it, counted from the level at which it came or would come now."""
        rows = self._rows.get(client, 0.0)
        return rows if client in self.slots else max(rows, self._level)

    def last_slot_s(self, client: str) -> float:
        """When it got a slot last; 0 where that is long ago."""
        return self._slot_s.get(client, 0.0)

    def take_slot(self, client: str, now_s: float) -> None:
        """A request of this client got a slot."""
        self._rows[client] = max(self._rows.get(client, 0.0), self._level)
        self._slot_s[client] = now_s
        self.slots[client] += 1

    def give_slot(self, client: str) -> None:
        """It gave it back."""
        self.slots[client] -= 1
        if self.slots[client] == 0:
            del self.slots[client]
            self._forget_idle()

    def charge(self, client: str, rows: int, priority: int) -> None:
        """Rows of a prompt are run for it; those of a higher priority cost it less."""
        before = self.rows(client)
        self._level = max(self._level, before)
        self._rows[client] = before + rows / 2.0 ** (priority / WEIGHT_LEVELS)

    def _forget_idle(self) -> None:
        if not self.slots:
            self._rows.clear()
            self._slot_s.clear()
            self._level = 0.0
        elif len(self._rows) > MOST_IDLE + len(self.slots):
            self._rows = {client: self._rows[client] for client in self.slots}
            self._slot_s = {client: self._slot_s[client] for client in self.slots}


class FairQueue:
    """First come, first served within a client and priority; between them see :meth:`pop`."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[int, deque[Request]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for queues in self._queues.values():
            for queue in queues.values():
                yield from queue

    def push(self, request: Request, *, first: bool = False) -> None:
        """Queue a request behind, or before, those of its client and priority."""
        queues = self._queues.setdefault(request.options.client, {})
        queue = queues.setdefault(request.options.priority, deque())
        if first:
            queue.appendleft(request)
        else:
            queue.append(request)
        self._length += 1

    def pop(self, now_s: float, shares: Shares) -> Request:
        """The next request.

        Of each client it is the one of the highest priority, which rises while a request waits. Between clients, it is
        the one that holds the fewest slots, where a level of priority counts as one slot, and so does each time
        :data:`AGE_S` that the client has waited for one; then the one with the fewest rows, then the first to come.
        """

        def rank(request: Request) -> tuple[float, float, int]:
            client = request.options.client
            held = shares.slots[client] - level(request, shares.last_slot_s(client), now_s)
            return held, shares.rows(client), request.id

        request = min((self._first(queues, now_s) for queues in self._queues.values()), key=rank)
        self.remove(request)
        return request

    @staticmethod
    def _first(queues: dict[int, deque[Request]], now_s: float) -> Request:
        """The next request of one client."""
        return min((queue[0] for queue in queues.values()), key=lambda one: (-level(one, 0.0, now_s), one.id))

    def remove(self, request: Request) -> None:
        """Take a request out."""
        client, priority = request.options.client, request.options.priority
        queue = self._queues[client][priority]
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        if not queue:
            del self._queues[client][priority]
        if not self._queues[client]:
            del self._queues[client]
        self._length -= 1
