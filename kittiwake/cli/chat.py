"""``kittiwake chat``: a conversation in the terminal, or piped through it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import (
    FILE,
    chunk_option,
    engine_config,
    engine_options,
    model_argument,
    seed_option,
    tokenizer_option,
)
from kittiwake.cli.output import ProgressBars, note, print_error
from kittiwake.errors import KittiwakeError, UsageError

if TYPE_CHECKING:
    from kittiwake.chat import ChatDelta
    from kittiwake.llm import LLM
    from kittiwake.session import ChatSession
    from kittiwake.text.chat import ChatTemplate

MAX_TOKENS = 1024
# What suits models that were taught to chat, and (the second) those that write on.
TEMPERATURE, TOP_P = (1.0, 0.8), (0.3, 0.9)
FENCE = '"""'

HELP = """\
/reset            forget the conversation, but not the system message
/retry            draw the last answer anew, with the next seed
/system TEXT      tell the model how to behave; without TEXT, take it back
/set              show how answers are drawn;  /set temperature 0.7  changes it
/save FILE        write the conversation to a file;  /load FILE  takes it up
/help, /quit      this list; leave (so does Ctrl-D)

A line that ends with \\ goes on in the next one; so does everything between two \"\"\".
Ctrl-C stops an answer. A message that begins with / is written with two: //etc/hosts"""

NO_TEMPLATE = """\
This model has no chat template: as far as its files tell, it was never taught to converse. It is a writer rather than
a partner, and will go on from what you say as it would from the beginning of a story. (--template names another way.)"""


@click.command()
@model_argument()
@click.option("--system", help="how the model is told to behave")
@click.option(
    "--template",
    metavar="NAME|FILE",
    help="instead of the model's own: g1, g1-think, g1-fast, raven, qa, plain, or a Jinja file",
)
@click.option("--max-tokens", "-n", type=click.IntRange(1), default=MAX_TOKENS, help="most tokens of an answer")
@click.option(
    "--temperature", "-t", type=float, help=f"0 takes the likeliest token  [default: {TEMPERATURE[0]}; plain: 0.8]"
)
@click.option("--top-p", type=float, help=f"draw from the likeliest that sum to p  [default: {TOP_P[0]}; plain: 0.9]")
@click.option("--top-k", type=click.IntRange(0), default=0, help="draw from the k likeliest; 0: all")
@seed_option("the same seed draws the same answers")
@click.option("--load", "load", type=FILE, help="take up a saved conversation")
@tokenizer_option
@chunk_option
@engine_options
def chat(
    model: Path | None,
    system: str | None,
    template: str | None,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int,
    seed: int,
    load: Path | None,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
) -> None:
    """Talk with a model. /help in the conversation lists what can be done.

    Each turn goes on from the state of the last one, so only what is new is read. With piped input each line is a
    message, and stdout has the answers only.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=1)
    from kittiwake.engine.request import SamplingParams
    from kittiwake.llm import LLM
    from kittiwake.session import ChatSession

    with ProgressBars() as progress:
        llm = LLM(model, tokenizer=tokenizer, config=config, progress=progress)
    with llm:
        found, is_plain = find_template(llm, template)
        temperature = TEMPERATURE[is_plain] if temperature is None else temperature
        if top_p is None:
            top_p = TOP_P[is_plain] if temperature else 1.0
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        session = ChatSession(llm, found, params)
        if load is not None:
            session.load(load)
        if system is not None:
            session.set_system(system)
        talk = Talk(session, sys.stdin.isatty() and sys.stdout.isatty())
        if talk.is_terminal:
            talk.greet(llm.loaded.path)
        if template is None and is_plain:
            note(NO_TEMPLATE)
        talk.run()


def find_template(llm: LLM, chosen: str | None) -> tuple[ChatTemplate, bool]:
    """The template, and whether it is the plain one, which stands in where the model has none."""
    from kittiwake.text.chat import TEMPLATES

    try:
        found = llm.chat_template(chosen)
    except UsageError:
        if chosen is not None:
            raise
        found = TEMPLATES["plain"]
    return found, found is TEMPLATES["plain"]


class Talk:
    """The loop: a line in, an answer out."""

    def __init__(self, session: ChatSession, is_terminal: bool) -> None:
        self.session = session
        self.is_terminal = is_terminal
        self._file: Path | None = None
        self._commands = {
            "reset": self._reset,
            "retry": self._retry,
            "system": self._system,
            "set": self._set,
            "save": self._save,
            "load": self._load,
            "help": self._help,
        }

    def greet(self, model: Path) -> None:
        """Say who is there and how to leave."""
        note(f"kittiwake chat · {model.name} · template {self.session.template.name} · /help for help, Ctrl-D leaves")
        import_readline()

    def run(self) -> None:
        """Until the input ends or /quit. At a terminal an error is told and the talk goes on; piped, it ends it."""
        for text in self._inputs():
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if not self._command(text):
                        return
                elif text.strip():
                    self._show(self.session.send(text.removeprefix("/") if text.startswith("//") else text))
            except KittiwakeError as error:
                if not self.is_terminal:
                    raise
                print_error(error.message, error.hint)

    def _inputs(self) -> Iterator[str]:
        """Messages and commands, put together from lines."""
        while True:
            try:
                yield self._message()
            except EOFError:
                if self.is_terminal:
                    click.echo()
                return
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                click.echo()
                note("(/quit or Ctrl-D leaves)")

    def _message(self) -> str:
        line = self._line("> ")
        if line.lstrip().startswith(FENCE):
            return self._fenced(line.lstrip().removeprefix(FENCE))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines)

    def _fenced(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(FENCE):
            try:
                lines.append(self._line(". "))
            except EOFError:
                raise UsageError(f"the input ends inside a {FENCE} block", f"close it with {FENCE}") from None
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self.is_terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def _show(self, answer: Iterator[ChatDelta]) -> None:
        """Write an answer as it comes; Ctrl-C at a terminal ends it, and nothing else."""
        started = time.perf_counter()
        writer = AnswerWriter(self.is_terminal)
        try:
            for delta in answer:
                writer.write(delta)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            writer.reason = "Ctrl-C"
        finally:
            answer.close()  # type: ignore[attr-defined]  # a generator: what was said so far is kept
            writer.end()
        if self.is_terminal:
            note(click.style(writer.figures(started, self.session.tokens_read), dim=True))

    def _command(self, text: str) -> bool:
        """Run a command; False for the one that leaves."""
        name, _, rest = text[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        if name not in self._commands:
            raise UsageError(f"there is no command /{name}", "/help lists them; a message may begin with //")
        self._commands[name](rest.strip())
        return True

    def _help(self, _: str) -> None:
        note(HELP)

    def _reset(self, _: str) -> None:
        self.session.reset()
        self._tell("the conversation is forgotten")

    def _retry(self, _: str) -> None:
        self._show(self.session.retry())

    def _system(self, text: str) -> None:
        self.session.set_system(text)
        self._tell("the model is told so from now on" if text else "no system message any more")

    def _set(self, text: str) -> None:
        from kittiwake.params import param_defaults

        name, _, value = text.partition(" ")
        if not name:
            note("\n".join(f"{key} {json.dumps(getattr(self.session.params, key))}" for key in param_defaults()))
            return
        if not value:
            raise UsageError(f"/set {name} needs a value", "for example /set temperature 0.7")
        self.session.set_param(name.replace("-", "_"), _value(value.strip()))
        self._tell(f"{name} is {value.strip()}")

    def _save(self, text: str) -> None:
        path = _path(text, "/save")
        self.session.save(path, overwrite=path == self._file)
        self._file = path
        self._tell(f"saved to {path}")

    def _load(self, text: str) -> None:
        path = _path(text, "/load")
        self.session.load(path)
        self._file = path
        self._tell(f"{len(self.session.messages)} messages taken up")

    def _tell(self, text: str) -> None:
        if self.is_terminal:
            note(f"({text})")


class AnswerWriter:
    """Writes the pieces of an answer: what was said to stdout, what was thought dim before it, or not at all in a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._is_thinking = False
        self._last = ""
        self.tokens = 0
        self.first_s = self.last_s = 0.0
        self.reason: str | None = None

    def write(self, delta: ChatDelta) -> None:
        """One piece."""
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.tokens += len(delta.token_ids)
        self.reason = delta.finish_reason or self.reason
        if delta.reasoning and self._is_terminal:
            self._is_thinking = True
            self._put(click.style(delta.reasoning, dim=True))
        if delta.content:
            if self._is_thinking:
                self._put("\n\n")
                self._is_thinking = False
            self._put(delta.content)
            self._last = delta.content
        sys.stdout.flush()

    def end(self) -> None:
        """The line that ends an answer."""
        if not self._last.endswith("\n"):
            self._put("\n")
        sys.stdout.flush()

    def _put(self, text: str) -> None:
        click.echo(text, nl=False)

    def figures(self, started_s: float, tokens_read: int) -> str:
        """Tokens, tokens a second after the first one, and how long it took to come."""
        parts = [f"{self.tokens} tokens"]
        if self.tokens > 1 and self.last_s > self.first_s:
            parts.append(f"{(self.tokens - 1) / (self.last_s - self.first_s):.0f} tokens/s")
        if self.first_s:
            parts.append(f"first after {1000 * (self.first_s - started_s):.0f} ms, {tokens_read} read")
        if self.reason not in ("stop", None):
            parts.append(f"ended by {self.reason}")
        return f"[{' · '.join(parts)}]"


def import_readline() -> None:
    """Line editing and history for input(), where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass


def _value(text: str) -> Any:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _path(text: str, command: str) -> Path:
    if not text:
        raise UsageError(f"{command} needs the name of a file", f"for example {command} talk.json")
    return Path(text).expanduser()
