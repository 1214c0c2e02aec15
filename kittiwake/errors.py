"""Errors as data: each has a message, a hint, an exit code for the command line and a status for HTTP.

The core raises these; only the edges (command line, server) print them.
"""

from __future__ import annotations


class KittiwakeError(Exception):
    """Base of every error kittiwake raises on purpose.

    ``message`` names the value found and what was expected; ``hint`` says what to do about it (may be empty).
    """

    exit_code: int = 1
    http_status: int = 500

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(KittiwakeError):
    """An option, argument or API value that is wrong or contradicts another."""

    exit_code = 2
    http_status = 400


class RequestError(UsageError):
    """A request the engine cannot serve: empty prompt, token id out of range, contradictory sampling values."""


class QueueFullError(KittiwakeError):
    """Too many requests wait already, of everyone or of this client; ``retry_after_s`` is when one may get in."""

    http_status = 429

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class DeadlineError(KittiwakeError):
    """A request that had not ended when its time was up."""

    http_status = 504


class OutputError(UsageError):
    """An output path that exists, cannot be written, or whose disk is full."""


class InputFileError(KittiwakeError):
    """A file that was read is not what it should be."""

    exit_code = 3
    http_status = 422


class CheckpointError(InputFileError):
    """A checkpoint file that is truncated, corrupt, unsafe or of an unknown format."""


class ModelError(InputFileError):
    """A readable checkpoint whose tensors or config no family of kittiwake can run."""


class BundleError(InputFileError):
    """A bundle whose manifest, files or digests do not hold."""


class TokenizerError(InputFileError):
    """A tokenizer file that cannot be used, or that does not fit the model's vocabulary."""


class StateError(KittiwakeError):
    """A saved state that does not belong to this model, dtype or format; or no slot is free."""

    http_status = 409


class PagesError(StateError):
    """What grows with a sequence's length has no room left in its budget."""

    http_status = 507


class StateFileError(StateError, InputFileError):
    """A file of a saved state that is damaged, of a newer format, or of another model than the one at hand."""

    http_status = 422


class StateNameError(StateError, UsageError):
    """A name that no state can have."""

    http_status = 400


class StateMissingError(StateError):
    """There is no state of this name."""

    http_status = 404


class StateExistsError(StateError):
    """There is a state of this name already."""


class StateBudgetError(StateError):
    """A state for which the budget of named states has no room."""

    http_status = 507


class DeviceError(KittiwakeError):
    """The device asked for is missing or lacks what the model needs."""

    http_status = 503
