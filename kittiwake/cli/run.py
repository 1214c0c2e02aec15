"""``kittiwake run``: one prompt, one answer, streamed as it is drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import (
    FILE,
    engine_config,
    engine_options,
    field_help,
    json_option,
    model_argument,
    seed_option,
    tokenizer_option,
)
from kittiwake.cli.output import ProgressBars, emit_json, note, rounded
from kittiwake.config import EngineConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import InputFileError, UsageError

if TYPE_CHECKING:
    from kittiwake.llm import LLM

# Small base models ramble at 1.0 and repeat themselves at 0: these suit the packaged one.
TEMPERATURE = 0.8
TOP_P = 0.9


@dataclass(frozen=True)
class StreamFigures:
    """What a stream took, by the wall clock: ms until its first token, tokens drawn, ms from the first to the last."""

    first_token_ms: float
    tokens: int
    rest_ms: float
    finish_reason: str

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first one; 0 where there is only one."""
        return (self.tokens - 1) / self.rest_ms * 1000 if self.tokens > 1 and self.rest_ms > 0 else 0.0


@click.command()
@model_argument()
@click.option("--prompt", "-p", help="the text to go on from; left out, it is read from stdin")
@click.option("--prompt-file", type=FILE, help="a UTF-8 file to go on from; one newline at its end is dropped")
@click.option("--echo", is_flag=True, help="print the prompt before the answer")
@click.option("--max-tokens", "-n", type=click.IntRange(1), default=SamplingParams.max_tokens, help="end after so many")
@click.option("--temperature", "-t", type=float, default=TEMPERATURE, help="0 takes the likeliest token each time")
@click.option("--top-k", type=click.IntRange(0), default=SamplingParams.top_k, help="draw from the k likeliest; 0: all")
@click.option(
    "--top-p",
    type=float,
    default=None,
    help=f"draw from the likeliest whose probabilities sum to p  [default: {TOP_P}; 1 at temperature 0]",
)
@seed_option("the same seed draws the same answer")
@click.option("--stop", multiple=True, metavar="TEXT", help="end before this text; may be given again")
@click.option("--stop-token-id", multiple=True, type=click.IntRange(0), help="end at this token; may be given again")
@click.option("--ignore-eos", is_flag=True, help="go on past the model's end of text")
@click.option(
    "--min-tokens", type=click.IntRange(0), default=SamplingParams.min_tokens, help="do not end before so many"
)
@click.option("--chunk", type=click.IntRange(0), default=EngineConfig.prefill_chunk, help=field_help()["prefill_chunk"])
@tokenizer_option
@engine_options
@json_option
def run(
    model: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    echo: bool,
    tokenizer: str | None,
    chunk: int,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer one prompt: the model writes on from where it ends.

    The answer depends on the model, the prompt and the sampling options alone: run it twice and it is the same.
    """
    params = sampling_params(**sampling)
    if echo and as_json:
        raise UsageError("--echo and --json contradict each other", "the JSON document holds the answer only")
    text = read_prompt(prompt, prompt_file)
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=1, prefill_chunk=chunk)
    from kittiwake.llm import LLM

    with ProgressBars() as progress:
        llm = LLM(model, tokenizer=tokenizer, config=config, progress=progress)
    with llm:
        if as_json:
            emit_json(answer_document(llm, text, params))
        else:
            if echo:
                click.echo(click.style(text, bold=True), nl=False)  # bold on a terminal only
            note(summary(stream_answer(llm, text, params), llm.loaded.load_ms))


def sampling_params(
    *, stop_token_id: tuple[int, ...], temperature: float, top_p: float | None, **rest: Any
) -> SamplingParams:
    """The options as SamplingParams. A top-p that was not given gives way to greedy decoding."""
    if top_p is None:
        top_p = 1.0 if temperature == 0 else TOP_P
    return SamplingParams(temperature=temperature, top_p=top_p, stop_token_ids=stop_token_id, **rest)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from whichever place was named; from a file or stdin one newline at the end is dropped.

    Raises UsageError for none, two or an empty one, InputFileError for a file that cannot be read.
    """
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file contradict each other", "give one of them")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        try:
            text = _decode(prompt_file.read_bytes(), str(prompt_file))
        except OSError as error:
            raise InputFileError(f"{prompt_file}: {error.strerror}") from error
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError("there is no prompt", "give --prompt TEXT, --prompt-file FILE, or pipe text in")
    else:
        text = _decode(sys.stdin.buffer.read(), "stdin")
    if not text:
        raise UsageError("the prompt is empty", "a prompt needs at least one character")
    return text


def _decode(raw: bytes, source: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{source} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from error
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def answer_document(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """The whole answer as the JSON contract has it; times in ms."""
    completion = llm.generate(prompt, params)[0]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "timings": rounded(
            {
                "load_ms": llm.loaded.load_ms,
                "prefill_ms": completion.timings.prefill_ms,
                "decode_ms": completion.timings.decode_ms,
            }
        ),
    }


def stream_answer(llm: LLM, prompt: str, params: SamplingParams) -> StreamFigures:
    """Write the answer to stdout as it comes, a newline after it, and return what it took."""
    started = time.perf_counter()
    first = last = started
    tokens = 0
    reason = "abort"
    deltas = llm.stream(prompt, params)
    try:
        for delta in deltas:
            last = time.perf_counter()
            if tokens == 0:
                first = last
            tokens += len(delta.token_ids)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            reason = delta.finish_reason or reason
    finally:
        if isinstance(deltas, Generator):  # frees the request's slot when Ctrl-C or a closed pipe ends the loop
            deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    return StreamFigures(1000 * (first - started), tokens, 1000 * (last - first), reason)


def summary(figures: StreamFigures, load_ms: float) -> str:
    """One line about a finished stream."""
    parts = [f"{figures.tokens} tokens"]
    if figures.decode_tok_s:
        parts.append(f"{figures.decode_tok_s:.0f} tokens/s")
    parts += [f"first token after {figures.first_token_ms:.0f} ms", f"loaded in {load_ms / 1000:.2f} s"]
    return f"[{' · '.join(parts)} · ended by {figures.finish_reason}]"
