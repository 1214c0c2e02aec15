"""States with names: kept, forked and deleted by whoever serves them, in memory or in a folder that outlives the process."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kittiwake.checkpoints.files import quoted, writing
from kittiwake.engine.request import KeptState
from kittiwake.engine.state_file import StateOwner, check_parts, load_state, save_state
from kittiwake.errors import StateBudgetError, StateExistsError, StateFileError, StateMissingError, StateNameError

SUFFIX = ".state"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedState:
    """A state and what is known of it."""

    name: str
    kept: KeptState
    created_s: float
    """Seconds since 1970."""
    parent: str = ""
    """The state that it was forked from, or that a request went on from."""

    @property
    def tokens(self) -> int:
        """How many tokens it has seen."""
        return self.kept.saved.position

    @property
    def nbytes(self) -> int:
        """Bytes in memory, pages that it shares with other states among them."""
        return self.own_nbytes + sum(page.nbytes for page in self.kept.saved.pages)

    @property
    def own_nbytes(self) -> int:
        """Bytes in memory outside the pages that other states may share."""
        logits = self.kept.logits.nbytes if self.kept.logits is not None else 0
        return self.kept.saved.own_nbytes + logits + 4 * len(self.kept.tokens)


class NamedStates:
    """States by name under a budget of bytes, of which a fork costs none until its origin is deleted, and a page that
    several states share is counted once. Thread-safe.

    With a ``folder`` each is a state file there too, ``NAME.state``, and all are read when this is made; files of other
    models are left alone.
    """

    def __init__(self, owner: StateOwner, *, budget_bytes: int, folder: Path | None = None) -> None:
        """Raises OutputError for a folder that cannot be made."""
        self._owner, self.budget_bytes, self._folder = owner, budget_bytes, folder
        self._states: dict[str, NamedState] = {}
        self._lock = threading.Lock()
        if folder is not None:
            with writing(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._read(folder)

    def _read(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            name = path.name.removesuffix(SUFFIX)
            try:
                check_name(name)
                state = NamedState(name, load_state(path, self._owner), path.stat().st_mtime)
                self._check_budget(state)
                self._states[name] = state
            except (StateFileError, StateNameError, StateBudgetError) as err:
                logger.warning("the state file %s is not used: %s", path, err)

    @property
    def nbytes(self) -> int:
        """Bytes of all states; one with several names counts once, and so does a page in several states."""
        return _total_bytes(self._states.values())

    def list(self) -> list[NamedState]:
        """All of them, by name."""
        with self._lock:
            return [self._states[name] for name in sorted(self._states)]

    def get(self, name: str) -> NamedState:
        """Raises StateMissingError."""
        with self._lock:
            return self._get(name)

    def _get(self, name: str) -> NamedState:
        check_name(name)
        if name not in self._states:
            raise StateMissingError(f"there is no state {name!r}")
        return self._states[name]

    def save(self, name: str, kept: KeptState, *, replace: bool = False, parent: str = "") -> NamedState:
        """Name a state of this model. Raises StateNameError, StateExistsError, StateBudgetError, StateFileError for a
        state of another model, and OutputError where its file cannot be written."""
        check_name(name)
        check_parts(kept, self._owner, "the state")
        with self._lock:
            return self._save(NamedState(name, kept, time.time(), parent), replace=replace)

    def _save(self, state: NamedState, *, replace: bool = False) -> NamedState:
        if state.name in self._states and not replace:
            raise StateExistsError(
                f"there is a state {state.name!r} already", "delete it first, or choose another name"
            )
        self._check_budget(state)
        if self._folder is not None:
            save_state(self._folder / (state.name + SUFFIX), state.kept, self._owner, replace=True)
        self._states[state.name] = state
        return state

    def _check_budget(self, state: NamedState) -> None:
        total = _total_bytes([*(other for other in self._states.values() if other.name != state.name), state])
        if total > self.budget_bytes:
            raise StateBudgetError(
                f"the state {state.name!r} has {state.nbytes:,} bytes and would bring all named states to {total:,}, "
                f"above their budget of {self.budget_bytes:,}",
                "delete some",
            )

    def fork(self, name: str, new_name: str) -> NamedState:
        """Give a state a second name, under which it goes its own way. Raises as :meth:`get` and :meth:`save`."""
        with self._lock:
            check_name(new_name)
            state = self._get(name)
            return self._save(replace(state, name=new_name, created_s=time.time(), parent=name))

    def upload(self, name: str, path: Path, *, overwrite: bool = False) -> NamedState:
        """Name the state of a state file. Raises StateFileError for a file that is none, or of another model."""
        check_name(name)
        return self.save(name, load_state(path, self._owner), replace=overwrite)

    def delete(self, name: str) -> None:
        """Raises StateMissingError, OutputError where its file cannot be removed."""
        with self._lock:
            self._get(name)
            if self._folder is not None:
                path = self._folder / (name + SUFFIX)
                with writing(path), suppress(FileNotFoundError):
                    path.unlink()
            del self._states[name]


def _total_bytes(states: Iterable[NamedState]) -> int:
    """Bytes in memory of all these together."""
    values = {id(state.kept): state for state in states}.values()
    pages = {page for state in values for page in state.kept.saved.pages}
    return sum(state.own_nbytes for state in values) + sum(page.nbytes for page in pages)


def check_name(name: str) -> None:
    """Raise StateNameError for what cannot be the name of a state."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise StateNameError(
            f"{quoted(name)} cannot be the name of a state",
            "1 to 64 ASCII letters, digits, dots, dashes and underlines, a letter or digit first",
        )
