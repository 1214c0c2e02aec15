"""A conversation that goes on: the state after each turn is kept, so that only what is new has to be read.

The model goes on from exactly the tokens it has seen and drawn. Where the template writes the past differently from how
it was said (reasoning is dropped, spaces are trimmed), it goes on from the last state before the difference.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kittiwake.chat import ChatDelta, split_delta, with_stops
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import KeptState, SamplingParams
from kittiwake.engine.states import new_states
from kittiwake.errors import InputFileError, OutputError, RequestError, UsageError
from kittiwake.llm import LLM
from kittiwake.params import changed_params, make_params, param_defaults
from kittiwake.text.chat import TEMPLATES, ChatTemplate, Message, Segment, encode_segments, read_messages, skip_text
from kittiwake.text.reasoning import ReasoningSplitter
from kittiwake.text.tokenizer import Tokenizer

FORMAT = "kittiwake-chat"
VERSION = 1
MAX_SESSION_BYTES = 64 << 20
READ_CHUNK = 512
"""Rows read in one forward; Ctrl-C is heard between two of them."""


@dataclass(frozen=True)
class Mark:
    """A place in the conversation to go on from."""

    text: str
    """The conversation up to it, as the template writes it; an answer may have been said without the space in front."""
    state: KeptState
    """After the tokens of that text, as they were read and said."""


class ChatSession:
    """Messages, how answers are drawn, and the states to go on from."""

    def __init__(
        self,
        llm: LLM,
        template: ChatTemplate | None = None,
        params: SamplingParams | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises UsageError for a model without a chat template where none is given."""
        self.llm = llm
        self.template = template or llm.chat_template()
        self.params = params or SamplingParams()
        self.options = dict(options or {})
        self.messages: list[dict[str, str]] = []
        self.tokens_read = 0
        """Tokens of the last prompt that had to be read."""
        self._tries = 0
        self._marks: list[Mark] = []
        self._seen: tuple[str, list[int]] | None = None  # of a loaded session: read when next wanted

    def send(self, text: str) -> Iterator[ChatDelta]:
        """Say something; the answer as it comes. Closing the iterator ends it, and what was said so far stands.

        An answer without any text leaves no trace, nor does the message it was to. Raises RequestError for an empty one.
        """
        message = {"role": "user", "content": text}
        read_messages([message])
        self._tries = 0
        return self._answer([*self.messages, message])

    def retry(self) -> Iterator[ChatDelta]:
        """Draw the last answer anew, with the next seed. Raises UsageError where there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to draw anew")
        self._tries += 1
        return self._answer(self.messages[:-1])

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self._marks, self._seen = [], None

    def set_system(self, text: str) -> None:
        """Put a system message first, or take it away with an empty text; the rest of the conversation stays."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = ([{"role": "system", "content": text}] if text.strip() else []) + rest

    def set_param(self, name: str, value: Any) -> None:
        """Change one sampling parameter. Raises RequestError for an unknown name or a value it cannot have.

        Temperature 0 turns the filters off, which would contradict it.
        """
        changes = {name: value}
        if name == "temperature" and value == 0 and not isinstance(value, bool):
            changes |= {key: plain for key, plain in param_defaults().items() if key in ("top_k", "top_p", "min_p")}
        self.params = make_params({**changed_params(self.params), **changes})

    def _answer(self, messages: list[dict[str, str]]) -> Iterator[ChatDelta]:
        prompt, prompt_ids, start = self._read(read_messages(messages))
        params = with_stops(replace(self.params, seed=(self.params.seed + self._tries) % 2**63), self.template)
        splitter = ReasoningSplitter(prompt.opening)
        said: list[str] = []
        kept: KeptState | None = None
        stream = self.llm.stream(prompt_ids, params, keep_state=True, start_from=start)
        try:
            for delta in stream:
                kept = delta.state
                step = split_delta(splitter, delta)
                said.append(step.content)
                yield step
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator: frees the slot where the answer is cut short
            said.append(splitter.flush().answer)
            answer = "".join(said).strip()
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]
                if kept is not None and not splitter.has_reasoning:
                    seen = len(prompt_ids) + (len(start.tokens) if start is not None else 0)
                    self._mark_answer(answer, self.llm.tokenizer.decode(kept.tokens[seen:]).lstrip(), kept)

    def _mark_answer(self, answer: str, accepted: str, state: KeptState) -> None:
        """Keep the state after an answer, if later turns will be written after just these words.

        ``accepted`` is what the state has seen of the answer, whose last characters may have been part of a stop string.
        """
        if not answer.startswith(accepted) or accepted != accepted.rstrip():
            return
        messages = read_messages(self.messages, open_answer=False)
        longer = (*messages[:-1], Message("assistant", answer + "\ue000"))
        written = [
            self.template.render(m, open_answer=False, as_said=True, options=self.options).text
            for m in (messages, longer)
        ]
        end = _common_length(*written) - (len(answer) - len(accepted))
        self._marks.append(Mark(written[0][:end], state))

    def _read(self, messages: Sequence[Message]) -> tuple[Any, list[int], KeptState | None]:
        """Read what is new of a conversation, but for its end that no later turn will repeat.

        Returns the rendered prompt, the ids still to be given, and the state to give them to.
        """
        prompt = self.template.render(messages, as_said=True, options=self.options)
        later = (*messages, Message("assistant", "."))
        history = self.template.render(later, open_answer=False, as_said=True, options=self.options).text
        mark = self._last_mark(prompt.text)
        done = len(mark.text) if mark is not None else 0
        stable = _common_length(prompt.text, history) - done
        ids, rest, chars = cut(self.llm.tokenizer, skip_text(prompt.segments, done), stable)
        self.tokens_read = len(ids) + len(rest)
        if ids:
            state = self._eat(ids, mark.state if mark is not None else None)
            mark = Mark(prompt.text[: done + chars], state)
        self._marks = [mark] if mark is not None else []
        return prompt, rest, mark.state if mark is not None else None

    def _last_mark(self, text: str) -> Mark | None:
        """The furthest place of the conversation that ``text`` goes on from."""
        if self._seen is not None and text.startswith(self._seen[0]):
            self._marks.append(Mark(self._seen[0], self._eat(self._seen[1], None)))
        self._seen = None
        found = [mark for mark in self._marks if text.startswith(mark.text)]
        return max(found, key=lambda mark: len(mark.text), default=None)

    def _eat(self, ids: list[int], start: KeptState | None) -> KeptState:
        """The state after some more tokens."""
        self.llm.engine.check(ids, self.params, start)
        model = self.llm.loaded.model
        table = new_states(model, 1)
        slot = table.allocate()
        if start is not None:
            table.restore(slot, start.saved)
        logits = np.empty((0, 0), dtype=np.float32)
        for first in range(0, len(ids), READ_CHUNK):
            logits = model.forward(Batch.pack([(slot, ids[first : first + READ_CHUNK])]), table)
        before = start.tokens if start is not None else ()
        initial = start.initial if start is not None else ""
        return KeptState(table.save(slot), (*before, *ids), np.array(logits[-1], dtype=np.float32), initial)

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the session as JSON, whole or not at all. Raises OutputError for a file that exists or cannot be written."""
        if path.exists() and not overwrite:
            raise OutputError(f"{path} exists already", "give another name")
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from None

    def to_json(self) -> dict[str, Any]:
        """The session as JSON values: messages, what was set, and the tokens that the model has seen."""
        seen = None
        if self._marks and self.messages:
            last = self._marks[-1]
            digest = self.llm.tokenizer.digest()
            seen = {"tokenizer": digest, "text": last.text, "tokens": list(last.state.tokens)}
        return {
            "format": FORMAT,
            "version": VERSION,
            "template": self.template.name,
            "params": changed_params(self.params),
            "options": self.options,
            "messages": self.messages,
            "seen": seen,
        }

    def load(self, path: Path) -> None:
        """Take up a saved session. The model goes on from the tokens it had seen, so that answers are the same bits.

        Raises InputFileError, and changes nothing, for a file that is no session.
        """
        content = _read_session(path)
        try:
            params = make_params(content["params"])
            read_messages(content["messages"], open_answer=False) if content["messages"] else ()
            seen = self._checked_seen(content["seen"])
        except RequestError as error:
            raise InputFileError(f"{path}: {error.message}", error.hint) from None
        self.messages = [dict(message) for message in content["messages"]]
        self.params, self.options = params, dict(content["options"])
        self.template = TEMPLATES.get(content["template"], self.template)
        self._tries, self._marks, self._seen = 0, [], seen

    def _checked_seen(self, seen: Any) -> tuple[str, list[int]] | None:
        """Tokens of a saved session, if they are this tokenizer's and spell their text."""
        tokenizer = self.llm.tokenizer
        if seen is None or seen.get("tokenizer") != tokenizer.digest():
            return None
        text, tokens = seen.get("text"), seen.get("tokens")
        if not isinstance(text, str) or not isinstance(tokens, list) or not tokens:
            return None
        self.llm.engine.check(tokens, self.params)
        spelled = tokenizer.decode(tokens)
        return (text, tokens) if _letters(tokenizer, spelled) == _letters(tokenizer, text) else None


def cut(tokenizer: Tokenizer, segments: Sequence[Segment], chars: int) -> tuple[list[int], list[int], int]:
    """Encode segments and cut the ids at the last token border within the first ``chars`` characters.

    Returns the ids before and after, and how many characters those before stand for. Encoding is not cut, only its
    result: both parts together are the ids of the whole.
    """
    before: list[int] = []
    done = 0
    for index, segment in enumerate(segments):
        if done + len(segment.text) > chars:
            ids = encode_segments(tokenizer, [segment])
            count, inside = (0, 0) if segment.is_control else _border(tokenizer, ids, segment.text, chars - done)
            rest = ids[count:] + encode_segments(tokenizer, segments[index + 1 :])
            return before + ids[:count], rest, done + inside
        before += encode_segments(tokenizer, [segment])
        done += len(segment.text)
    return before, [], done


def _border(tokenizer: Tokenizer, ids: Sequence[int], text: str, chars: int) -> tuple[int, int]:
    """(tokens, characters) of the last border between tokens that is one between characters too, up to ``chars``."""
    pieces = [tokenizer.token_bytes(token) for token in ids]
    if b"".join(pieces) != text.encode():  # a tokenizer that puts a space in front, or folds characters
        return 0, 0
    ends = {len(text[:count].encode()): count for count in range(chars + 1)} if chars > 0 else {}
    best, position = (0, 0), 0
    for count, piece in enumerate(pieces, start=1):
        position += len(piece)
        if position in ends:
            best = (count, ends[position])
    return best


def _letters(tokenizer: Tokenizer, text: str) -> str:
    """The text without control tokens, which have bytes or not as their file says, and without spaces (see Mark)."""
    for first, last in reversed(tokenizer.control_spans(text)):
        text = text[:first] + text[last:]
    return "".join(text.split())


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(map(len, (one, other)))
    )


def _read_session(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise InputFileError(f"there is no session file {path}")
        if path.stat().st_size > MAX_SESSION_BYTES:
            raise InputFileError(f"{path} has more than {MAX_SESSION_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path} is not JSON: {error}") from None
    kinds = {"template": str, "params": dict, "options": dict, "messages": list, "seen": (dict, type(None))}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputFileError(f"{path} is no chat session", f'expected an object with "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise InputFileError(
            f"{path} is a session of version {content.get('version')!r}, this kittiwake reads {VERSION}"
        )
    unknown = sorted(content.keys() - kinds.keys() - {"format", "version"})
    if unknown:
        raise InputFileError(f"{path} has {', '.join(unknown)}, which no session has")
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):  # type: ignore[arg-type]
            raise InputFileError(f"{path}: {key} is {type(content.get(key)).__name__}, or missing")
    return content
