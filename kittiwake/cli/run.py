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
    chunk_option,
    engine_config,
    engine_options,
    field_help,
    json_option,
    model_argument,
    seed_option,
    tokenizer_option,
)
from kittiwake.cli.output import ProgressBars, emit_json, note, rounded
from kittiwake.cli.states import StateFiles, state_options, take_state_files
from kittiwake.config import EngineConfig
from kittiwake.engine.request import (
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    SAMPLING_ORDERS,
    Completion,
    SamplingParams,
    TokenLogprob,
)
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
@click.option(
    "--min-p", type=float, default=SamplingParams.min_p, help="drop what is less than p times as likely as the best"
)
@click.option(
    "--presence-penalty",
    type=float,
    default=SamplingParams.presence_penalty,
    help="taken once from the logit of every token drawn before",
)
@click.option(
    "--frequency-penalty",
    type=float,
    default=SamplingParams.frequency_penalty,
    help="taken from it once for each time it was drawn",
)
@click.option(
    "--repetition-penalty",
    type=float,
    default=SamplingParams.repetition_penalty,
    help="divides positive, multiplies negative logits of tokens in prompt or answer; 1: off",
)
@click.option(
    "--logit-bias", multiple=True, metavar="ID=VALUE", help="add to a token's logit, -100 bans it; may be given again"
)
@click.option(
    "--sampling-order",
    type=click.Choice(SAMPLING_ORDERS),
    default=SamplingParams.sampling_order,
    help="rwkv: filter on the probabilities before the temperature, as RWKV's own tools do",
)
@click.option("--n", type=click.IntRange(1, MAX_SAMPLES), default=SamplingParams.n, help="answer so many times")
@click.option(
    "--logprobs",
    type=click.IntRange(0, MAX_TOP_LOGPROBS),
    metavar="N",
    help="with --json: each token's log-probability, and those of the N likeliest in its place",
)
@click.option("--chunk", type=click.IntRange(0), default=EngineConfig.prefill_chunk, help=field_help()["prefill_chunk"])
@click.option("--receipt", is_flag=True, help="with --json: what the answer's bits depend on (docs/receipt.md)")
@state_options
@tokenizer_option
@chunk_option
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
    receipt: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer one prompt: the model writes on from where it ends.

    The answer depends on the model, the prompt and the sampling options alone: run it twice and it is the same.
    """
    states = take_state_files(sampling)
    params = sampling_params(**sampling)
    if echo and as_json:
        raise UsageError("--echo and --json contradict each other", "the JSON document holds the answer only")
    if receipt and not as_json:
        raise UsageError("--receipt needs --json", "the receipt is part of the JSON document")
    if params.logprobs and not as_json:
        raise UsageError("--logprobs needs --json", "log-probabilities are part of the JSON document")
    if params.n > 1 and states.save_state is not None:
        raise UsageError(f"--save-state saves one state, --n {params.n} ends in several")
    states.check_target()
    text = read_prompt(prompt, prompt_file, may_be_empty=states.load_state is not None)
    config = engine_config(
        device=device, dtype=dtype, threads=threads, slots=min(params.n, EngineConfig.slots), prefill_chunk=chunk
    )
    from kittiwake.llm import LLM

    with ProgressBars() as progress:
        llm = LLM(model, tokenizer=tokenizer, config=config, progress=progress)
    with llm:
        if as_json:
            document = answer_document(llm, text, params, states)
            emit_json({**document, "receipt": llm.receipt(progress)} if receipt else document)
        elif params.n > 1:
            print_answers(llm, text, params, states, echo=echo)
        else:
            if echo:
                click.echo(click.style(text, bold=True), nl=False)  # bold on a terminal only
            note(summary(stream_answer(llm, text, params, states), llm.loaded.load_ms))


def sampling_params(
    *,
    stop_token_id: tuple[int, ...],
    temperature: float,
    top_p: float | None,
    logit_bias: tuple[str, ...] = (),
    logprobs: int | None = None,
    **rest: Any,
) -> SamplingParams:
    """The options as SamplingParams. A top-p that was not given gives way to greedy decoding."""
    if top_p is None:
        top_p = 1.0 if temperature == 0 else TOP_P
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=stop_token_id,
        logit_bias=read_biases(logit_bias),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        **rest,
    )


def read_biases(texts: tuple[str, ...]) -> dict[int, float]:
    """ "42=-1.5" → {42: -1.5}. Raises UsageError for what is not of that form, and for a token named twice."""
    biases: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            pair = int(token), float(value)
        except ValueError:
            raise UsageError(f"--logit-bias takes ID=VALUE such as 42=-1.5, got {text!r}") from None
        if pair[0] in biases:
            raise UsageError(f"--logit-bias names token {pair[0]} twice")
        biases[pair[0]] = pair[1]
    return biases


def read_prompt(prompt: str | None, prompt_file: Path | None, *, may_be_empty: bool = False) -> str:
    """The prompt from whichever place was named; from a file or stdin one newline at the end is dropped.

    Raises UsageError for two, and for none or an empty one unless it ``may_be_empty``; InputFileError for a file that
    cannot be read.
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
        if may_be_empty:
            return ""
        raise UsageError("there is no prompt", "give --prompt TEXT, --prompt-file FILE, or pipe text in")
    else:
        text = _decode(sys.stdin.buffer.read(), "stdin")
    if not text and not may_be_empty:
        raise UsageError("the prompt is empty", "a prompt needs at least one character")
    return text


def _decode(raw: bytes, source: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{source} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from error
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def answer_document(llm: LLM, prompt: str, params: SamplingParams, states: StateFiles) -> dict[str, Any]:
    """The whole answer as the JSON contract has it; times in ms.

    ``logprobs``, ``state`` and, for several samples, ``choices`` are there only when asked for; the rest is sample 0.
    """
    completion = llm.generate(prompt, params, **states.start(llm))[0]
    saved = states.save(llm, completion.state)
    document = {
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
    if completion.logprobs is not None:
        document["logprobs"] = [logprob_document(one) for one in completion.logprobs]
    if params.n > 1:
        document["choices"] = [choice_document(index, one) for index, one in enumerate(completion.choices)]
    if saved is not None:
        document["state"] = saved
    return document


def choice_document(index: int, completion: Completion) -> dict[str, Any]:
    """One of several samples."""
    document = {
        "index": index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        document["logprobs"] = [logprob_document(one) for one in completion.logprobs]
    return document


def logprob_document(one: TokenLogprob) -> dict[str, Any]:
    """A drawn token and the likeliest in its place; ``bytes`` because a token may be part of a character."""
    return {**_one_logprob(one), "top": [_one_logprob(other) for other in one.top]}


def _one_logprob(one: TokenLogprob) -> dict[str, Any]:
    return {"token_id": one.token_id, "text": one.text, "bytes": list(one.token_bytes), "logprob": one.logprob}


def print_answers(llm: LLM, prompt: str, params: SamplingParams, states: StateFiles, *, echo: bool) -> None:
    """Write several answers to stdout when all are there, each under a line with its number."""
    choices = llm.generate(prompt, params, **states.start(llm))[0].choices
    for index, completion in enumerate(choices, 1):
        click.echo(click.style(f"--- {index} of {len(choices)} ---", dim=True))
        click.echo((click.style(prompt, bold=True) if echo else "") + completion.text)


def stream_answer(llm: LLM, prompt: str, params: SamplingParams, states: StateFiles) -> StreamFigures:
    """Write the answer to stdout as it comes, a newline after it, save its state if asked, and return what it took."""
    options = states.start(llm)
    started = time.perf_counter()
    first = last = started
    tokens = 0
    reason = "abort"
    deltas = llm.stream(prompt, params, **options)
    state = None
    try:
        for delta in deltas:
            last = time.perf_counter()
            if tokens == 0:
                first = last
            tokens += len(delta.token_ids)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            reason = delta.finish_reason or reason
            state = delta.state or state
    finally:
        if isinstance(deltas, Generator):  # frees the request's slot when Ctrl-C or a closed pipe ends the loop
            deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    states.save(llm, state)
    return StreamFigures(1000 * (first - started), tokens, 1000 * (last - first), reason)


def summary(figures: StreamFigures, load_ms: float) -> str:
    """One line about a finished stream."""
    parts = [f"{figures.tokens} tokens"]
    if figures.decode_tok_s:
        parts.append(f"{figures.decode_tok_s:.0f} tokens/s")
    parts += [f"first token after {figures.first_token_ms:.0f} ms", f"loaded in {load_ms / 1000:.2f} s"]
    return f"[{' · '.join(parts)} · ended by {figures.finish_reason}]"
