"""Choices of an answer → OpenAI's JSON, whole or in chunks. Whatever is ready together shares a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kittiwake.server.answers import (
    Choice,
    Piece,
    PromptAnswers,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    timings,
    usage,
)
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, PromptProgress, PromptScores
from kittiwake.server.service import Head
from kittiwake.server.sse import DONE
from kittiwake.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


@dataclass(frozen=True)
class Wishes:
    """What a client wants to be told beside the text."""

    logprobs: bool = False
    usage: bool = False
    """A last chunk with usage."""
    token_ids: bool = False


class Writer:
    """Collects the answers to one HTTP request: ``n`` choices for each of ``prompts``."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: Head, prompts: Sequence[Sequence[int]], n: int, wishes: Wishes, *, keeps: bool) -> None:
        self.head, self.wishes, self._prompts, self._n = head, wishes, prompts, n
        self.choices = [self.new_choice(index, keeps) for index in range(len(prompts) * n)]
        self._left = len(self.choices)
        self._begin = self._chunk_begin()

    def new_choice(self, index: int, keeps: bool) -> Choice:
        """An empty choice."""
        return Choice(index, keeps=keeps)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.head.served.tokenizer

    @property
    def _answers(self) -> list[PromptAnswers]:
        return [
            PromptAnswers(len(ids), self.choices[number * self._n : (number + 1) * self._n])
            for number, ids in enumerate(self._prompts)
        ]

    def take(self, events: Sequence[AnswerEvent]) -> list[Piece]:
        """Take events; what they bring, one piece a choice. Raises EngineError where an answer has failed."""
        pieces: dict[int, Piece] = {}
        for one in events:
            if one.token_ids or one.text or one.end is not None:
                piece = pieces.setdefault(one.index, Piece(one.index))
                self.choices[one.index].push(one, piece)
        return list(pieces.values())

    def push(self, events: Sequence[AnswerEvent]) -> bytes:
        """Take events; the chunks that they make, which may be none. Raises EngineError as :meth:`take`."""
        written = b"".join(self._progress_chunk(one.index, one.progress) for one in events if one.progress is not None)
        return written + b"".join(self._piece_chunks(piece) for piece in self.take(events))

    def _piece_chunks(self, piece: Piece) -> bytes:
        written = b""
        has_more = (piece.logprobs and self.wishes.logprobs) or (piece.token_ids and self.wishes.token_ids)
        if piece.text or piece.reasoning or has_more:
            written += self._chunk(piece.index, self.delta(piece), self._extras(piece))
        if piece.finish_reason is not None:
            self._left -= 1
            written += self._last_chunk(piece)
        return written

    def _extras(self, piece: Piece) -> bytes:
        logprobs = _encode(self.logprobs(piece.index, piece)) if self.wishes.logprobs else b"null"
        written = b',"logprobs":' + logprobs
        if self.wishes.token_ids:
            written += b',"token_ids":' + _encode(piece.token_ids)
        return written

    def delta(self, piece: Piece) -> bytes:
        """The part of a chunk's choice that holds the text: ``"text":…`` or ``"delta":…``."""
        raise NotImplementedError

    def logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        """The log-probabilities of a piece's tokens."""
        raise NotImplementedError

    def _chunk_begin(self) -> bytes:
        head = self.head
        begin = {
            "id": head.id,
            "object": self.chunk_object,
            "created": head.created_s,
            "model": head.served.name,
            "system_fingerprint": head.served.fingerprint,
        }
        return b"data: " + _encode(begin)[:-1] + b',"choices":['

    def _chunk(self, index: int, delta: bytes, extras: bytes, reason: str | None = None, more: bytes = b"") -> bytes:
        usage_key = b',"usage":null' if self.wishes.usage else b""
        ending = b'"%s"' % reason.encode() if reason else b"null"
        choice = b'{"index":%d,%s%s,"finish_reason":%s}' % (index, delta, extras, ending)
        return self._begin + choice + b"]" + usage_key + more + b"}\n\n"

    def _last_chunk(self, piece: Piece) -> bytes:
        """The chunk with the finish reason; that of the last choice has the timings of them all."""
        more = b',"timings":' + _encode(timings(self._answers)) if self._left == 0 else b""
        return self._chunk(piece.index, self.delta(Piece(piece.index)), b',"logprobs":null', piece.finish_reason, more)

    def _progress_chunk(self, index: int, progress: PromptProgress) -> bytes:
        content = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(progress.elapsed_ms, 3),
        }
        more = b',"prompt_progress":' + _encode(content)
        return self._chunk(index, self.delta(Piece(index)), b',"logprobs":null', None, more)

    def close(self) -> bytes:
        """What a stream ends with."""
        if not self.wishes.usage:
            return DONE
        return self._begin + b'],"usage":' + _encode(usage(self._answers, self._tokenizer)) + b"}\n\n" + DONE

    def whole(self) -> dict[str, Any]:
        """The answer in one."""
        head = self.head
        content: dict[str, Any] = {
            "id": head.id,
            "object": self.whole_object,
            "created": head.created_s,
            "model": head.served.name,
            "system_fingerprint": head.served.fingerprint,
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "usage": usage(self._answers, self._tokenizer),
            "timings": timings(self._answers),
        }
        if self.wishes.token_ids:
            content["prompt_token_ids"] = list(self._prompts[0]) if len(self._prompts) == 1 else list(self._prompts)
        return content

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        piece = Piece(choice.index, choice.text, choice.reasoning, choice.token_ids, choice.logprobs)
        found = {
            "index": choice.index,
            **self.whole_text(choice),
            "logprobs": self.logprobs(choice.index, piece) if self.wishes.logprobs else None,
            "finish_reason": choice.end.reason if choice.end is not None else None,
        }
        return found | ({"token_ids": choice.token_ids} if self.wishes.token_ids else {})

    def whole_text(self, choice: Choice) -> dict[str, Any]:
        """The part of a whole answer's choice that holds the text."""
        raise NotImplementedError


class ChatWriter(Writer):
    """Answers of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head, ids: Sequence[int], n: int, wishes: Wishes, opening: str, *, keeps: bool) -> None:
        self._opening = opening
        self._has_role: set[int] = set()
        super().__init__(head, [ids], n, wishes, keeps=keeps)

    def new_choice(self, index: int, keeps: bool) -> Choice:
        """An empty choice, whose reasoning is told apart."""
        return Choice(index, self._opening, keeps=keeps)

    def _piece_chunks(self, piece: Piece) -> bytes:
        written = super()._piece_chunks(piece)
        if written and piece.index not in self._has_role:
            self._has_role.add(piece.index)
            role = b'"delta":{"role":"assistant","content":""}'
            return self._chunk(piece.index, role, b',"logprobs":null') + written
        return written

    def delta(self, piece: Piece) -> bytes:
        """``"delta":{…}``"""
        parts = []
        if piece.reasoning:
            parts.append(b'"reasoning_content":' + _encode(piece.reasoning))
        if piece.text:
            parts.append(b'"content":' + _encode(piece.text))
        return b'"delta":{' + b",".join(parts) + b"}"

    def logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        """A content list."""
        return chat_logprobs(piece.logprobs)

    def whole_text(self, choice: Choice) -> dict[str, Any]:
        """``message``: reasoning_content is there where there was reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message | ({"reasoning_content": choice.reasoning} if choice.has_reasoning else {})}


class CompletionWriter(Writer):
    """Answers of /v1/completions. With ``echo`` each choice begins with its prompt, ``scores`` with its log-probabilities."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        head: Head,
        prompts: Sequence[Sequence[int]],
        n: int,
        wishes: Wishes,
        *,
        keeps: bool,
        echo: Sequence[str] | None = None,
        scores: Sequence[PromptScores] | None = None,
    ) -> None:
        super().__init__(head, prompts, n, wishes, keeps=keeps)
        self._echo, self._scores = echo, scores
        self._offsets = [TextOffsets() for _ in self.choices]

    def opening(self) -> bytes:
        """The chunks that echo the prompts."""
        if self._echo is None:
            return b""
        written = b""
        for choice in self.choices:
            prompt = choice.index // self._n
            extras = b',"logprobs":' + (_encode(self._prompt_logprobs(choice.index)) if self._scores else b"null")
            written += self._chunk(choice.index, b'"text":' + _encode(self._echo[prompt]), extras)
        return written

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        assert self._scores is not None
        prompt = index // self._n
        token_bytes = [self._tokenizer.token_bytes(token) for token in self._prompts[prompt]]
        return completion_logprobs(self._scores[prompt].tokens, token_bytes, self._offsets[index])

    def echo_only(self) -> bytes:
        """Nothing is to be drawn: end every choice at its prompt; the chunks that say so."""
        return self.push([AnswerEvent(choice.index, end=AnswerEnd("length")) for choice in self.choices])

    def delta(self, piece: Piece) -> bytes:
        """``"text":…``"""
        return b'"text":' + _encode(piece.text)

    def logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        """Four lists."""
        return completion_logprobs(piece.logprobs, [one.token_bytes for one in piece.logprobs], self._offsets[index])

    def whole_text(self, choice: Choice) -> dict[str, Any]:
        """``text``, after the prompt where it is echoed."""
        return {"text": (self._echo[choice.index // self._n] if self._echo is not None else "") + choice.text}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        if not self._scores:
            return super()._whole_choice(choice)
        before = self._prompt_logprobs(choice.index)
        found = super()._whole_choice(choice)
        found["logprobs"] = {key: before[key] + values for key, values in found["logprobs"].items()}
        return found
