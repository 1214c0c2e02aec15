"""Chat templates in Jinja, as Hugging Face checkpoints carry them, in a sandbox with a budget.

A template is code from a file: it sees the messages and a few helpers and nothing else, and every loop turn, every
character written and every operation that could make something huge out of something small is paid from a budget.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kittiwake.errors import RequestError, TokenizerError
from kittiwake.text.chat import Message, Rendered, Segment
from kittiwake.text.reasoning import CLOSING, OPENING, split_reasoning
from kittiwake.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1 << 20
MAX_STEPS = 100_000
"""Loop turns and macro calls of one rendering, beside 200 for each message."""
MAX_SECONDS = 20.0
"""Longest time of one rendering; real templates take milliseconds."""
MAX_VALUE = 1 << 21
"""Characters or items of one value, beside four times those of the messages."""
MAX_MADE = 1 << 25
"""Characters and items of all values made and written in one rendering, beside 64 times those of the messages."""

_STR_METHODS = frozenset(
    "capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle isupper "
    "join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper".split()
)
# Left out: those that pad, format or wrap to a width, draw at random, or escape for web pages.
_FILTERS = (
    "abs capitalize count d default dictsort first float int items last length list lower map max min reject "
    "rejectattr reverse round safe select selectattr sort string title trim unique upper"
).split()
_BIG_WIDTH = re.compile(r"\d{4,}|\*")
_PRIVATE = range(0xF0000, 0xFFFFE)


class JinjaTemplate:
    """A ``chat_template``. ``tokens`` are the special tokens it may name (``bos_token``, …).

    Raises TokenizerError, naming ``name``, for a template that is no Jinja or uses what is not offered.
    """

    stops: tuple[str, ...] = ()

    def __init__(self, text: str, name: str, tokenizer: Tokenizer, tokens: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.source = text
        self.special_tokens = dict(tokens or {})
        self._tokenizer = tokenizer
        self._tokens = _default_end(tokenizer) | self.special_tokens
        self._lock = threading.Lock()
        self._environment = _Sandbox()
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TokenizerError(
                f"the chat template {name} has {len(text)} characters, at most {MAX_TEMPLATE_CHARS} are read"
            )
        try:
            parsed = self._environment.parse(text)
            self._variables = meta.find_undeclared_variables(parsed)
            self._end_token = _constant(parsed, "eos_token") or self._tokens.get("eos_token")
            self._template = self._environment.from_string(_with_budget(parsed))
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template {name}, line {error.lineno}: {error.message}") from None
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise TokenizerError(f"the chat template {name} cannot be compiled: {error}") from None
        self._refuse_options = {"messages", "add_generation_prompt", *self._environment.globals, *self._tokens}

    def takes(self, option: str) -> bool:
        """Whether the template reads a variable of this name, so that setting it may make a difference."""
        return option in self._variables and option not in self._refuse_options

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The id of ``eos_token``, where it is known and a control token."""
        end = self._end_token
        if not end or end not in self._tokenizer.control_texts:
            return ()
        return tuple(self._tokenizer.encode(end, allow_special=True))

    def render(
        self,
        messages: Sequence[Message],
        *,
        open_answer: bool = True,
        as_said: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """See :class:`kittiwake.text.chat.ChatTemplate`; ``options`` are the template's own variables.

        Characters that begin or end a control token are replaced in the messages while the template works, by private
        ones that stand nowhere else. What then spells a control token was written by the template.
        """
        variables = self._checked_options(options or {})
        guard = _Guard(self._tokenizer.control_texts, [message.content for message in messages])
        given = [_as_template_sees(message, guard, as_said) for message in messages]
        with_opening = self._render(given, open_answer, variables)
        opening = ""
        if open_answer:
            before = self._render(given, False, variables)
            # A template that begins the answer whether asked or not shows only its end.
            is_apart = with_opening.startswith(before) and with_opening != before
            opening = _opening(with_opening.removeprefix(before) if is_apart else with_opening)
        return Rendered(tuple(self._segments(with_opening, guard)), guard.lift(opening))

    def _checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for key in options:
            if not isinstance(key, str) or not key.isidentifier() or key in self._refuse_options:
                raise RequestError(f"{key!r} cannot be an option of the chat template {self.name}")
        return dict(options)

    def _render(self, messages: list[dict[str, str]], open_answer: bool, options: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, **self._tokens, **options}
        size = sum(len(message["content"]) for message in messages)
        try:
            with self._lock:
                self._environment.budget = _Budget(len(messages), size)
                return self._template.render(messages=messages, add_generation_prompt=open_answer, **variables)
        except _RefusedError as error:
            raise RequestError(f"the chat template {self.name} refuses these messages: {error}") from None
        except _BudgetError as error:
            raise TokenizerError(f"the chat template {self.name} does too much: {error}") from None
        except RecursionError:
            raise TokenizerError(f"the chat template {self.name} calls itself too deeply") from None
        except MemoryError:
            raise TokenizerError(f"the chat template {self.name} needs more memory than there is") from None
        except Exception as error:  # whatever its code runs into is the template's fault
            raise TokenizerError(f"the chat template {self.name} fails: {type(error).__name__}: {error}") from None

    def _segments(self, guarded: str, guard: _Guard) -> Iterator[Segment]:
        """Cut at the control tokens the template wrote; everything between them is text."""
        done = 0
        for first, last in self._tokenizer.control_spans(guarded):
            if first > done:
                yield Segment(guard.lift(guarded[done:first]))
            yield Segment(guarded[first:last], is_control=True)
            done = last
        if done < len(guarded):
            yield Segment(guard.lift(guarded[done:]))


class _Guard:
    """Private stand-ins for the characters that control tokens begin and end with."""

    def __init__(self, controls: Sequence[str], contents: Sequence[str]) -> None:
        risky = {text[0] for text in controls} | {text[-1] for text in controls if not text[-1].isalnum()}
        used = set().union(*contents) if contents else set()
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        self._put = {ord(char): next(free) for char in sorted(risky)}
        self._lift = {ord(stand_in): chr(char) for char, stand_in in self._put.items()}

    def put(self, text: str) -> str:
        return text.translate(self._put)

    def lift(self, text: str) -> str:
        return text.translate(self._lift)


def _as_template_sees(message: Message, guard: _Guard, as_said: bool) -> dict[str, str]:
    content = message.content
    if message.role == "assistant":
        content = content.strip() if as_said else split_reasoning(content).answer.strip()
    return {"role": message.role, "content": guard.put(content)}


def _default_end(tokenizer: Tokenizer) -> dict[str, str]:
    """``eos_token`` of a tokenizer whose files do not name it: its first end of text."""
    controls = {text: tokenizer.encode(text, allow_special=True) for text in tokenizer.control_texts}
    ends = [text for text, ids in controls.items() if set(ids) & set(tokenizer.eos_ids)]
    return {"eos_token": ends[0]} if ends else {}


def _constant(template: nodes.Template, name: str) -> str | None:
    """The text that a template sets a variable to, as those in bundles do."""
    for node in template.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and node.target.name == name and isinstance(node.node, nodes.Const):
            return str(node.node.value)
    return None


def _opening(text: str) -> str:
    """The reasoning block, or the start of one, that the end of a prompt opens."""
    start = text.rfind(OPENING)
    if start < 0:
        return ""
    inner, closing, rest = text[start:].partition(CLOSING)
    return "" if rest.strip() else inner + closing


class _BudgetError(Exception):
    """A template that would take too long or too much memory."""


class _RefusedError(Exception):
    """raise_exception(): the template does not take these messages."""


class _Budget:
    """What one rendering may still use. Values are paid for as they are made, so that no memory is left unpaid."""

    def __init__(self, messages: int, chars: int) -> None:
        self._steps = MAX_STEPS + 200 * messages
        self._largest = MAX_VALUE + 4 * chars
        self._made = MAX_MADE + 64 * chars
        self._deadline_s = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """One loop turn or macro call."""
        self._steps -= 1
        if self._steps < 0:
            raise _BudgetError(f"more than {MAX_STEPS} loop turns")
        if time.monotonic() > self._deadline_s:
            raise _BudgetError(f"more than {MAX_SECONDS:g} seconds of work")

    def make(self, size: int) -> None:
        """Pay for a value of this size."""
        self.check(size)
        self._made -= size
        if self._made < 0:
            raise _BudgetError("it makes too much text")

    def check(self, size: int) -> None:
        """Whether a value may be as large as that."""
        if size > self._largest:
            raise _BudgetError(f"a value of {size} characters or items")

    def make_replaced(self, text: str, old: Any, new: Any) -> None:
        """Pay for text.replace(old, new)."""
        self.make(len(text) + text.count(str(old)) * len(str(new)))

    def weigh(self, value: Any) -> int:
        """Characters and items of a value and of all that it holds; refused as soon as they are too many."""
        total, rest = 0, [value]
        while rest and total <= self._largest:
            one = rest.pop()
            if isinstance(one, str):
                total += len(one)
            elif isinstance(one, dict):
                total += len(one)
                rest += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                total += len(one)
                rest += one
            elif isinstance(one, int):
                total += one.bit_length()
        self.check(total)
        return total


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that ``transformers`` offers templates, less what makes work without end or differs each time."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation])
        self.budget = _Budget(0, 0)
        offered: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _FILTERS}
        offered |= {"tojson": _tojson, "indent": self._indent, "join": self._join, "replace": self._replace}
        self.filters = {name: self._paid(function) for name, function in offered.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    # What _with_budget() puts into a template.

    def step(self) -> None:
        """One loop turn or macro call."""
        self.budget.step()

    def wrote(self, count: int) -> None:
        """So many characters of the template's own text."""
        self.budget.make(count)

    def shown(self, value: Any) -> Any:
        """A value that is about to be written."""
        self.budget.make(self.budget.weigh(value))
        return value

    def glued(self, *values: Any) -> str:
        """The ``~`` operator."""
        self.budget.make(sum(self.budget.weigh(value) for value in values))
        return "".join(map(str, values))

    def sliced(self, value: Any) -> Any:
        """A part of a text or list."""
        self._pay(value)
        return value

    # What Jinja asks of a sandbox.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        return None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sized = (str, list, tuple)
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            self.budget.make(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, sized) and isinstance(other, int):
                    self.budget.make(len(one) * max(0, other))
                elif isinstance(one, int):
                    self.budget.make(one.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.make(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            fields = left.count("%")
            if _BIG_WIDTH.search(left):
                raise _BudgetError("a % format with a width of more than three digits")
            self.budget.make(len(left) + fields * (1000 + self.budget.weigh(right)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            self.budget.make_replaced(owner, *args[:2])
        elif isinstance(owner, str) and name == "join" and args:
            return self._join(args[0], owner)
        value = super().call(context, obj, *args, **kwargs)
        if isinstance(owner, str):
            self._pay(value)
        return value

    def _pay(self, value: Any) -> None:
        """Pay for a value that was just made; an item takes as much as eight characters."""
        if isinstance(value, str):
            self.budget.make(len(value))
        elif isinstance(value, list | tuple):
            self.budget.make(8 * len(value))

    def _paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that looks at what it is given before it works, and pays for what comes of it."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if isinstance(value, str | list | tuple | dict):
                    self.budget.weigh(value)
            result = function(*args, **kwargs)
            self._pay(result)
            return result

        return run

    def _join(self, values: Any, d: str = "", attribute: str | None = None) -> str:
        found = list(values)
        if attribute is not None:
            found = [self.getattr(value, attribute) for value in found]
        self.budget.make(self.budget.weigh(found) + len(str(d)) * len(found))
        return str(d).join(map(str, found))

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        self.budget.make_replaced(str(text), old, new)
        return str(text).replace(str(old), str(new), -1 if count is None else count)

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        lead = " " * min(width, 64) if isinstance(width, int) else str(width)
        lines = str(text).split("\n")
        self.budget.make(len(str(text)) + len(lines) * len(lead))
        kept = [lead + line if (line or blank) and (index or first) else line for index, line in enumerate(lines)]
        return "\n".join(kept)


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``, with which training marks answers: what is inside is written as it is."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_budget(template: nodes.Template) -> nodes.Template:
    """Make every loop, macro and output of a parsed template pay."""
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        for block in template.find_all(kind):
            vars(block)["body"].insert(0, nodes.ExprStmt(_call("step")))
    _replace_operators(template)
    for output in template.find_all(nodes.Output):
        data = sum(len(part.data) for part in output.nodes if isinstance(part, nodes.TemplateData))
        output.nodes = [part if isinstance(part, nodes.TemplateData) else _call("shown", part) for part in output.nodes]
        if data:
            # A value of no characters that is paid for before the text beside it is written.
            paid = nodes.CondExpr(_call("wrote", nodes.Const(data)), nodes.Const(""), nodes.Const(""))
            output.nodes.insert(0, paid)
    if template.environment is not None:
        template.set_environment(template.environment)
    return template


def _replace_operators(node: nodes.Node) -> None:
    """``a ~ b`` and ``a[b:c]``, which no sandbox is asked about, become calls."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace_operators(value)
            setattr(node, field, _as_call(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_operators(item)
                    value[index] = _as_call(item)


def _as_call(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _call("glued", *node.nodes)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _call("sliced", node)
    return node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 64):
        raise _BudgetError(f"tojson with an indent of {indent!r}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message)[:500])


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise SecurityError("strftime_now with a pattern of more than 100 characters")
    return datetime.datetime.now().strftime(pattern)
