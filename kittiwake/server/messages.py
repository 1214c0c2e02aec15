"""What HTTP workers and the engine say to each other: msgpack, checked when it is read.

A worker numbers its calls; the engine answers each with exactly one of Accepted, Value or Refused, and an accepted
submission with news until every sample has ended. What a worker sends is an envelope, read in two steps, so that a call
that cannot be read is refused by its number. What the engine sends is a list of notices, one list a step.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from kittiwake.engine.request import TokenLogprob
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, Failure, ModelInfo, PromptProgress, Submission


class Envelope(msgspec.Struct, array_like=True):
    """What a worker sends: its number for the call, and the call as :data:`Call`."""

    call: int
    body: msgspec.Raw


class Hello(msgspec.Struct, tag="hello"):
    """A worker is there. The engine answers with Welcome when it has loaded."""


class Submit(msgspec.Struct, tag="submit"):
    """A request for an answer: Accepted, then News."""

    submission: Submission


class Cancel(msgspec.Struct, tag="cancel"):
    """Nobody waits for this call any more; it gets no answer of its own."""


class Score(msgspec.Struct, tag="score"):
    """Value: PromptScores."""

    submission: Submission
    top: int


class Stats(msgspec.Struct, tag="stats"):
    """Value: EngineStats. The engine brings its gauges up to date before it answers."""


class ListStates(msgspec.Struct, tag="list_states"):
    """Value: a list of NamedState."""


class GetState(msgspec.Struct, tag="get_state"):
    """Value: NamedState."""

    name: str


class MakeState(msgspec.Struct, tag="make_state"):
    """Value: NamedState."""

    name: str
    submission: Submission


class ForkState(msgspec.Struct, tag="fork_state"):
    """Value: NamedState."""

    name: str
    new_name: str


class DeleteState(msgspec.Struct, tag="delete_state"):
    """Value: nothing."""

    name: str


class ImportState(msgspec.Struct, tag="import_state"):
    """Value: NamedState."""

    name: str
    path: str
    transpose: bool


class ExportState(msgspec.Struct, tag="export_state"):
    """Value: nothing."""

    name: str
    path: str


Verb = Score | Stats | ListStates | GetState | MakeState | ForkState | DeleteState | ImportState | ExportState
"""Calls that are answered with one Value."""
Call = Hello | Submit | Cancel | Verb


class Welcome(msgspec.Struct, tag="welcome"):
    """The engine takes calls: the model it runs, and which start of the engine this is."""

    info: ModelInfo


class Accepted(msgspec.Struct, tag="accepted"):
    """A submission stands in the queue."""

    call: int


class Value(msgspec.Struct, tag="value"):
    """The answer to a verb, of the type that the verb tells."""

    call: int
    value: msgspec.Raw


class Refused(msgspec.Struct, tag="refused"):
    """A call that could not be done."""

    call: int
    failure: Failure


class EventOut(msgspec.Struct, omit_defaults=True):
    """An :class:`AnswerEvent` as it is written; fields at their defaults are left out."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    progress: PromptProgress | None = None
    end: AnswerEnd | None = None


class News(msgspec.Struct, tag="news"):
    """What a step added to a submission."""

    call: int
    events: list[AnswerEvent] | list[EventOut]


class Lost(msgspec.Struct, tag="lost"):
    """The worker took nothing for so long that all its calls were dropped."""


Notice = Welcome | Accepted | Value | Refused | News | Lost

_Read = TypeVar("_Read")
_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_calls = msgspec.msgpack.Decoder(Call)


class _NewsIn(msgspec.Struct, tag="news"):
    call: int
    events: list[AnswerEvent]


_notices = msgspec.msgpack.Decoder(list[Welcome | Accepted | Value | Refused | _NewsIn | Lost])


def encode_call(call: int, body: Call) -> bytes:
    """An envelope."""
    return _encoder.encode(Envelope(call, msgspec.Raw(_encoder.encode(body))))


def decode_envelope(data: bytes) -> Envelope:
    """Read an envelope; its body is not looked at. Raises msgspec.DecodeError."""
    return _envelopes.decode(data)


def decode_call(body: msgspec.Raw) -> Call:
    """Read the body of an envelope. Raises msgspec.DecodeError."""
    return _calls.decode(body)


def encode_value(value: Any) -> msgspec.Raw:
    """A value for :class:`Value`."""
    return msgspec.Raw(_encoder.encode(value))


def decode_value(value: msgspec.Raw, kind: type[_Read]) -> _Read:
    """Read a value. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(value, type=kind)


def encode_notices(notices: list[Notice]) -> bytes:
    """What a step has to say to one worker."""
    return _encoder.encode(notices)


def decode_notices(data: bytes) -> list[Any]:
    """Read it. Raises msgspec.DecodeError."""
    return _notices.decode(data)
