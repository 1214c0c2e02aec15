"""Options that several commands share. Their defaults and help texts come from the classes they fill."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from kittiwake import config as config_module
from kittiwake.config import DEVICES, DTYPES, EngineConfig
from kittiwake.device import usable_cores
from kittiwake.stdout import stdout_on_stderr

F = TypeVar("F", bound=Callable[..., Any])


class _NamedPath(click.Path):
    """A path that was really named: an empty argument, as an unset variable gives, is not the folder one stands in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


FILE = _NamedPath(path_type=Path)


@lru_cache
def field_help(config: str = "EngineConfig") -> dict[str, str]:
    """Help text of each field of a class of config.py: the string that stands below it in the source."""
    tree = ast.parse(inspect.getsource(config_module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == config)
    texts = {}
    for field, doc in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            texts[field.target.id] = str(ast.literal_eval(doc.value))
    return texts


def model_argument(*, required: bool = False) -> Callable[[F], F]:
    """MODEL: a bundle folder, a checkpoint file or folder; left out, the packaged model."""
    return click.argument("model", required=required, type=FILE, metavar="MODEL" if required else "[MODEL]")


_CONSTANTS = "kittiwake.constants"


def constant_options(function: F) -> F:
    """--group-norm-eps and --rescale-every, of every command that loads."""
    return _kept_option("rescale_every", click.IntRange(0))(_kept_option("group_norm_eps", float)(function))


def chunk_option(function: F) -> F:
    """--max-chunk, of commands that read prompts through an engine."""
    return _kept_option("max_chunk", click.IntRange(1))(function)


def _kept_option(name: str, kind: Any) -> Callable[[F], F]:
    """A rare option: its value is kept beside the context, where :func:`engine_config` takes it from, and not handed to
    the command."""

    def keep(context: click.Context, option: click.Parameter, value: float | None) -> None:
        context.meta.setdefault(_CONSTANTS, {})[name] = value

    default, flag = getattr(EngineConfig(), name), f"--{name.replace('_', '-')}"
    return click.option(flag, type=kind, default=default, expose_value=False, callback=keep, help=field_help()[name])


def engine_options(function: F) -> F:
    """--device, --dtype, --threads, and those of :func:`constant_options`."""
    function = constant_options(function)
    default, text = EngineConfig(), field_help()
    for option in (
        click.option("--threads", type=click.IntRange(0), default=default.threads, help=text["threads"]),
        click.option("--dtype", type=click.Choice(DTYPES), default=default.dtype, help=text["dtype"]),
        click.option("--device", type=click.Choice(DEVICES), default=default.device, help=text["device"]),
    ):
        function = option(function)
    return function


def tokenizer_option(function: F) -> F:
    """--tokenizer: overrides the one that belongs to the model."""
    return click.option(
        "--tokenizer",
        metavar="KIND|FILE",
        help='instead of the one that belongs to the model: "world", "gpt-neox", "bytes" or a tokenizer.json',
    )(function)


def json_option(function: F) -> F:
    """--json: one document on stdout, nothing else there, whoever writes."""

    @wraps(function)
    def command(*args: Any, as_json: bool, **options: Any) -> Any:
        with stdout_on_stderr() if as_json else nullcontext():
            return function(*args, as_json=as_json, **options)

    return click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout, all else on stderr")(
        cast(F, command)
    )


def seed_option(help_text: str) -> Callable[[F], F]:
    """--seed with what it seeds."""
    return click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help=help_text)


def engine_config(*, device: str = "auto", dtype: str = "auto", threads: int = 0, **more: Any) -> EngineConfig:
    """The options as an EngineConfig, and numba's pool made large enough for them (it is read once, at import)."""
    if threads > usable_cores():
        os.environ.setdefault("NUMBA_NUM_THREADS", str(threads))
    context = click.get_current_context(silent=True)
    constants = {} if context is None else context.meta.get(_CONSTANTS, {})
    return EngineConfig(device=device, dtype=dtype, threads=threads, **constants, **more)
