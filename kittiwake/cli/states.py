"""Options of commands that begin from a state or keep one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kittiwake.cli.options import FILE
from kittiwake.errors import UsageError

if TYPE_CHECKING:
    from kittiwake.engine.request import KeptState
    from kittiwake.llm import LLM

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class StateFiles:
    """Where a request begins, and where its state is kept. Contradictions raise UsageError when it is made."""

    save_state: Path | None = None
    load_state: Path | None = None
    initial_state: Path | None = None
    transpose_state: bool = False

    def __post_init__(self) -> None:
        if self.load_state is not None and self.initial_state is not None:
            raise UsageError(
                "--load-state and --initial-state contradict each other", "a saved state has its own beginning"
            )
        if self.transpose_state and self.initial_state is None:
            raise UsageError("--transpose-state needs --initial-state", "it says how that file's matrices stand")

    def check_target(self) -> None:
        """Raise OutputError before the work where the state could not be saved after it."""
        if self.save_state is not None:
            from kittiwake.checkpoints.files import check_new_file

            check_new_file(self.save_state)

    def start(self, llm: LLM) -> dict[str, Any]:
        """What ``generate`` and ``stream`` are told beside the prompt; nothing where no option was used."""
        options: dict[str, Any] = {}
        if self.load_state is not None:
            options["start_from"] = llm.load_state(self.load_state)
        elif self.initial_state is not None:
            options["start_from"] = llm.load_initial_state(self.initial_state, transpose=self.transpose_state)
        if self.save_state is not None:
            options["keep_state"] = True
        return options

    def save(self, llm: LLM, state: KeptState | None) -> dict[str, Any] | None:
        """Write the state that was kept, if one was asked for; what the JSON document says of it."""
        if self.save_state is None or state is None:
            return None
        llm.save_state(state, self.save_state)
        return {"file": str(self.save_state), "position": state.saved.position}


def state_options(function: F) -> F:
    """--save-state, --load-state, --initial-state and --transpose-state: the fields of :class:`StateFiles`."""
    for option in (
        click.option(
            "--transpose-state", is_flag=True, help="the matrices of --initial-state stand as [K, V], not as [V, K]"
        ),
        click.option(
            "--initial-state",
            type=FILE,
            metavar="FILE",
            help="begin from a tuned state (time_state, .pth or .safetensors)",
        ),
        click.option(
            "--load-state", type=FILE, metavar="FILE", help="go on from a saved state; the prompt may be empty"
        ),
        click.option(
            "--save-state",
            type=FILE,
            metavar="FILE",
            help="save the state after the answer to a new file, to go on from",
        ),
    ):
        function = option(function)
    return function


def take_state_files(options: dict[str, Any]) -> StateFiles:
    """The state options out of a command's options, which then hold the rest."""
    return StateFiles(**{name: options.pop(name) for name in StateFiles.__dataclass_fields__})
