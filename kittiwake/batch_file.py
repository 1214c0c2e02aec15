"""A file of requests → a file of answers, that may be killed at any time and goes on where it was.

Requests are checked, all of them, before any is answered. An answer is one line, appended when it is finished and on
the disk before the next step is taken; a line half-written by a process that was killed is cut off when the work is
taken up again. An answer depends on its request and the model alone, so the lines are those of an uninterrupted run,
only their order may differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kittiwake.chat import Messages, prepare, split_completion
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.engine.request import Completion, Delta, SamplingParams, TokenLogprob
from kittiwake.errors import InputFileError, KittiwakeError, OutputError, RequestError, UsageError
from kittiwake.llm import LLM, join_completion
from kittiwake.params import make_params, param_defaults
from kittiwake.progress import Progress
from kittiwake.text.chat import read_messages

MAX_LINE_BYTES = 64 << 20
MAX_ID_CHARS = 512
SHOWN_ERRORS = 20
_ID_KEYS = ("custom_id", "id")


@dataclass(frozen=True)
class Item:
    """A request as it stands in the file: where, what it is called, and a digest of what it asks."""

    line: int
    id_key: str
    id: str
    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class Request:
    """What a line asks: a prompt (text or ids) or messages, never both."""

    prompt: str | list[int] | None
    messages: Messages | None
    params: SamplingParams


class BatchFile:
    """The requests of a file, read whole and checked; only where they stand is kept in memory.

    ``template`` overrides the model's chat template for all of them.
    """

    def __init__(self, path: Path, template: str | None = None) -> None:
        """Raises UsageError listing the lines that cannot be used, InputFileError for a file that cannot be read."""
        self.path = path
        self.template = template
        self.items: list[Item] = []
        lines: dict[str, int] = {}
        errors: list[str] = []
        for number, offset, raw in self._lines():
            try:
                content = _parse(raw)
                id_key, name = _read_id(content)
                if name in lines:
                    raise RequestError(f"the id {name!r} stands in line {lines[name]} already")
                lines[name] = number
                read_request(content)
            except KittiwakeError as error:
                errors.append(f"line {number}: {error}")
                continue
            digest = request_digest(content, template)
            self.items.append(Item(number, id_key, name, offset, len(raw), digest))
        _refuse(path, errors)
        if not self.items:
            raise UsageError(f"{path} holds no requests", 'one JSON object a line: {"id": "a", "prompt": "Once"}')

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number, offset, bytes) of every line that is not blank."""
        try:
            with self.path.open("rb") as file:
                offset, number = 0, 0
                while raw := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(raw) > MAX_LINE_BYTES:
                        raise InputFileError(f"{self.path}, line {number} has more than {MAX_LINE_BYTES} bytes")
                    if raw.strip():
                        yield number, offset, raw
                    offset += len(raw)
        except OSError as error:
            raise InputFileError(f"{self.path} cannot be read: {error.strerror}") from None

    def request(self, item: Item) -> Request:
        """Read a request again. Raises InputFileError when the file changed meanwhile."""
        try:
            with self.path.open("rb") as file:
                file.seek(item.offset)
                content = _parse(file.read(item.size))
        except OSError as error:
            raise InputFileError(f"{self.path} cannot be read: {error.strerror}") from None
        except KittiwakeError:
            content = {}
        if request_digest(content, self.template) != item.digest:
            raise InputFileError(f"{self.path} changed while it was being answered", "start again with another output")
        return read_request(content)

    def check(self, llm: LLM, items: Iterable[Item]) -> None:
        """Encode every request and ask the engine whether it would take it. Raises UsageError listing those it would not."""
        errors = []
        for item in items:
            try:
                ids, params, _ = self.encode(llm, item)
                llm.engine.check(ids, params)
            except RequestError as error:
                errors.append(f"line {item.line}: {error}")
        _refuse(self.path, errors)

    def encode(self, llm: LLM, item: Item) -> tuple[list[int], SamplingParams, str | None]:
        """(ids, parameters, how a chat's answer is begun, None for a prompt)."""
        request = self.request(item)
        if request.messages is None:
            prompt = request.prompt
            return llm.encode(prompt) if isinstance(prompt, str) else list(prompt or ()), request.params, None
        ready = prepare(llm.chat_template(self.template), llm.tokenizer, request.messages, request.params)
        return ready.ids, ready.params, ready.opening


def _refuse(path: Path, errors: list[str]) -> None:
    if errors:
        shown = [*errors[:SHOWN_ERRORS], *([f"and {len(errors) - SHOWN_ERRORS} more"] if errors[SHOWN_ERRORS:] else [])]
        head = f"{path}: {len(errors)} line{'s' if len(errors) > 1 else ''} cannot be used, so nothing was begun"
        raise UsageError("\n".join([head, *(f"  {text}" for text in shown)]))


def _parse(raw: bytes) -> dict[str, Any]:
    content = load_json_strict(raw, what="it", max_bytes=MAX_LINE_BYTES, error=InputFileError)
    if not isinstance(content, dict):
        raise RequestError(f"a {type(content).__name__} stands where an object is expected")
    return content


def _read_id(content: Mapping[str, Any]) -> tuple[str, str]:
    keys = [key for key in _ID_KEYS if key in content]
    if len(keys) != 1:
        raise RequestError("it needs exactly one of id and custom_id")
    name = content[keys[0]]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        raise RequestError(f"{keys[0]} must be a text of 1 to {MAX_ID_CHARS} characters, got {str(name)[:80]!r}")
    return keys[0], name


def read_request(content: Mapping[str, Any]) -> Request:
    """What a line asks. Raises RequestError naming a field that is unknown, missing or has a value it cannot have."""
    known = {*_ID_KEYS, "prompt", "messages", *param_defaults()}
    unknown = [key for key in content if key not in known]
    if unknown:
        raise RequestError(f"there is no field {', '.join(map(repr, unknown))}", f"fields: {', '.join(sorted(known))}")
    if ("prompt" in content) == ("messages" in content):
        raise RequestError("it needs exactly one of prompt and messages")
    prompt, messages = content.get("prompt"), content.get("messages")
    if "messages" in content:
        read_messages(messages)
    elif not isinstance(prompt, str | list) or not prompt:
        raise RequestError(f"prompt must be a text or a list of token ids, and not empty, got {str(prompt)[:80]!r}")
    params = make_params({key: value for key, value in content.items() if key in param_defaults()})
    if params.n != 1:
        raise RequestError(f"n is {params.n}, but a line has one answer", "write a line for each, with its own seed")
    return Request(prompt, messages, params)


def request_digest(content: Mapping[str, Any], template: str | None) -> str:
    """Sixteen hex digits that tell what is asked, whatever it is called."""
    asked = {key: value for key, value in content.items() if key not in _ID_KEYS}
    return hashlib.sha256(json.dumps([asked, template], sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class AnswerFile:
    """The file of answers: one process at a time, lines whole or not there.

    Opening it cuts off what a killed process left half-written, and finds out what is ``done`` already. A file that was
    not there before goes again where an error ends the work before its first answer. Raises OutputError when the file
    cannot be written, is in use, or holds anything but answers to ``items``.
    """

    path: Path
    items: Mapping[str, Item]
    done: set[str] = field(default_factory=set)
    errors: int = 0
    """How many of the answers are errors."""
    models: set[str] = field(default_factory=set)
    """What the answers that were there say of their model."""

    def __post_init__(self) -> None:
        try:
            self._file, self._is_new = self._open()
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._size = self._take_up()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._is_new and self._size == 0:  # nothing was begun: as if it had not been asked for
            with suppress(OSError):
                self.path.unlink()
        os.close(self._file)

    def _open(self) -> tuple[int, bool]:
        """The file, and whether it was not there before."""
        with suppress(FileExistsError):
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), False

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{self.path} is being written by another process", "wait for it, or stop it") from None

    def _take_up(self) -> int:
        """Read the lines that are there; returns how many bytes are whole lines, after cutting off the rest."""
        size, number = 0, 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for raw in file:
                number += 1
                if not raw.endswith(b"\n"):
                    self._check_is_ours(raw, number)
                    break
                self._take_line(raw, number)
                size += len(raw)
        self._write_out(size, b"")
        self._sync_folder()
        return size

    def _check_is_ours(self, raw: bytes, number: int) -> None:
        """A last line without an end is cut off only if it begins as our lines do (or holds the zeros that a machine
        leaves which lost its power): it may be the user's own."""
        begun = raw.rstrip(b"\0")
        starts = [f'{{"{key}": "'.encode() for key in _ID_KEYS]
        if not any(begun.startswith(start) or start.startswith(begun) for start in starts):
            raise OutputError(f"{self.path}, line {number} is no answer, nor the beginning of one", "give another file")

    def _take_line(self, raw: bytes, number: int) -> None:
        hint = "give another output file"
        try:
            content = _parse(raw)
            _, name = _read_id(content)
        except KittiwakeError as error:
            raise OutputError(f"{self.path}, line {number} is no answer: {error.message}", hint) from None
        item = self.items.get(name)
        if item is None:
            raise OutputError(f"{self.path}, line {number} answers {name!r}, which is not asked", hint)
        if name in self.done:
            raise OutputError(f"{self.path}, line {number} answers {name!r} again", hint)
        if content.get("request") != item.digest:
            raise OutputError(f"{self.path}, line {number} answers another request called {name!r}", hint)
        self.done.add(name)
        self.models.add(str(content.get("model")))
        self.errors += "error" in content

    def append(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Add answers; they are on the disk when this returns. Raises OutputError, the file as it was before."""
        lines = []
        for answer in answers:
            lines.append(json.dumps(answer, allow_nan=False) + "\n")
            self.errors += "error" in answer
        if lines:
            data = "".join(lines).encode()
            self._write_out(self._size, data)
            self._size += len(data)

    def _write_out(self, size: int, data: bytes) -> None:
        """Make the file its first ``size`` bytes and ``data``, on the disk."""
        try:
            os.ftruncate(self._file, size)
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], size + written)
            os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise OutputError(f"{self.path} cannot be written: {error.strerror}", "what is in it stays") from None

    def _sync_folder(self) -> None:
        with suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def answer_all(
    llm: LLM, batch: BatchFile, answers: AnswerFile, concurrency: int, progress: Progress | None = None
) -> int:
    """Answer what is not done yet, ``concurrency`` requests at a time, in the order of the file; returns tokens drawn.

    Answers are appended in the order in which they are finished, those of one step in the order of the file. A request
    that fails has an ``error`` in its line. Raises UsageError, before anything is answered, for requests that the model
    cannot take, and OutputError when the answers that are there came from another model.
    """
    model = model_mark(llm, progress)
    if answers.models - {model}:
        raise OutputError(
            f"{answers.path} has answers of another model ({', '.join(sorted(answers.models - {model}))}; this is {model})",
            "give another output file",
        )
    todo = [item for item in batch.items if item.id not in answers.done]
    batch.check(llm, todo)
    engine, waiting = llm.engine, iter(todo)
    running: dict[int, tuple[Item, int, SamplingParams, str | None, list[Delta]]] = {}
    tokens = 0
    try:
        while True:
            while len(running) < concurrency and (item := next(waiting, None)) is not None:
                ids, params, opening = batch.encode(llm, item)
                running[engine.add(ids, params)] = (item, len(ids), params, opening, [])
            if not running:
                return tokens
            engine.step()
            finished = []
            for number, (item, count, params, opening, deltas) in list(running.items()):
                deltas += engine.collect(number)
                if deltas and deltas[-1].finish_reason is not None:
                    del running[number]
                    tokens += sum(len(delta.token_ids) for delta in deltas)
                    finished.append(_answer(item, model, count, params, opening, deltas))
                    answers.done.add(item.id)
            answers.append(finished)
            if progress is not None:
                progress("answering", len(answers.done), len(batch.items))
    finally:
        for number in running:
            engine.forget(number)


def model_mark(llm: LLM, progress: Progress | None = None) -> str:
    """What tells in an answer which model gave it: the beginning of the model's digest, and how its weights were kept."""
    return f"{llm.loaded.digest(progress)[:16]}-{llm.loaded.dtype}"


def _answer(
    item: Item, model: str, prompt_tokens: int, params: SamplingParams, opening: str | None, deltas: list[Delta]
) -> dict[str, Any]:
    """The line of a request that has ended."""
    head = {item.id_key: item.id}
    tail = {"request": item.digest, "model": model}
    error = deltas[-1].error
    if error is not None:
        return {**head, "error": error.message, **tail}
    completion = join_completion(prompt_tokens, deltas, params)
    said: dict[str, Any] = {"text": completion.text}
    if opening is not None:
        chat = split_completion(completion, opening)
        said = {"content": chat.content, "reasoning": chat.reasoning}
    return {**head, **said, **_figures(completion), **tail}


def _figures(completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "token_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [
            {**_logprob(one), "top": [_logprob(other) for other in one.top]} for one in completion.logprobs
        ]
    return found


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return {"token_id": one.token_id, "logprob": one.logprob}
