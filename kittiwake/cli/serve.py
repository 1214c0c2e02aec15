"""``kittiwake serve``: the model behind an HTTP API that OpenAI's clients speak."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from kittiwake.cli.options import (
    FILE,
    chunk_option,
    engine_config,
    engine_options,
    field_help,
    model_argument,
    tokenizer_option,
)
from kittiwake.cli.output import note
from kittiwake.config import LOG_FORMATS, SERVING, ServerConfig
from kittiwake.errors import InputFileError, UsageError

_DEFAULTS, _HELP, _ENGINE_HELP = ServerConfig(), field_help("ServerConfig"), field_help()
_F = TypeVar("_F", bound=Callable[..., Any])
_MISSING = UsageError("the parts that serve are not installed", "pip install 'kittiwake[serve]'")


def _server_option(*names: str, field: str, **more: Any) -> Callable[[_F], _F]:
    """An option that fills a field of ServerConfig: its default and help come from there."""
    default = getattr(_DEFAULTS, field)
    is_told = default not in ("", ())
    return click.option(*names, field, default=default, show_default=is_told, help=_HELP[field], **more)


def _engine_option(*names: str, field: str, **more: Any) -> Callable[[_F], _F]:
    """The same for a field of EngineConfig, with the default of a server."""
    return click.option(*names, field, default=getattr(SERVING, field), help=_ENGINE_HELP[field], **more)


@click.command()
@model_argument()
@_server_option("--host", field="host")
@_server_option("--port", field="port", type=click.IntRange(0, 65535))
@click.option(
    "--api-key", "api_key", envvar="KITTIWAKE_API_KEY", show_envvar=True, help="key that clients have to show"
)
@click.option("--api-key-file", type=FILE, help="file of such keys, one a line")
@_server_option("--allow-anonymous", field="allow_anonymous", is_flag=True)
@_server_option("--served-model-name", field="served_model_name")
@_server_option("--http-workers", field="http_workers", type=click.IntRange(1))
@click.option("--template", metavar="NAME|FILE", help="chat template, instead of the model's own")
@_engine_option("--slots", field="slots", type=click.IntRange(1))
@_engine_option("--prefill-chunk", field="prefill_chunk", type=click.IntRange(0))
@_engine_option("--max-queue", field="max_waiting", type=click.IntRange(0))
@_engine_option("--max-queue-per-client", field="max_waiting_per_client", type=click.IntRange(0))
@_server_option("--request-timeout-s", field="request_timeout_s", type=float)
@_engine_option("--growing-bytes", field="growing_bytes", type=click.IntRange(-1))
@_engine_option("--cache-bytes", field="cache_ram_bytes", type=click.IntRange(-1))
@_engine_option("--cache-disk", field="cache_disk", metavar="DIR")
@_engine_option("--cache-disk-bytes", field="cache_disk_bytes", type=click.IntRange(1))
@_server_option("--states-dir", field="states_dir", metavar="DIR")
@_server_option("--states-bytes", field="states_bytes", type=click.IntRange(0))
@_server_option("--max-body-bytes", field="max_body_bytes", type=int)
@_server_option("--max-header-bytes", field="max_header_bytes", type=int)
@_server_option("--max-connections", field="max_connections", type=int)
@_server_option("--header-timeout-s", field="header_timeout_s", type=float)
@_server_option("--keep-alive-s", field="keep_alive_s", type=float)
@_server_option("--write-timeout-s", field="write_timeout_s", type=float)
@_server_option("--max-buffered-bytes", field="max_buffered_bytes", type=int)
@_server_option("--default-max-tokens", field="default_max_tokens", type=int)
@_server_option("--max-answer-tokens", field="max_answer_tokens", type=int)
@_server_option("--max-prompts", field="max_prompts", type=int)
@_server_option("--max-state-bytes", field="max_state_bytes", type=int)
@_server_option("--comment-s", field="comment_s", type=float)
@_server_option("--cors-origin", field="cors_origins", multiple=True, metavar="ORIGIN")
@_server_option("--log-format", field="log_format", type=click.Choice(LOG_FORMATS))
@_server_option("--log-prompts", field="log_prompts", is_flag=True)
@_server_option("--drain-s", field="drain_s", type=float)
@_server_option("--stall-timeout-s", field="stall_timeout_s", type=float)
@_server_option("--restart-engine", field="restart_engine", is_flag=True)
@click.option("--ready-file", type=FILE, help="file to write (JSON: url, host, port, pid) once requests are taken")
@tokenizer_option
@chunk_option
@engine_options
@click.pass_context
def serve(
    context: click.Context,
    /,
    model: Path | None,
    api_key: str | None,
    api_key_file: Path | None,
    template: str | None,
    ready_file: Path | None,
    tokenizer: str | None,
    **options: Any,
) -> None:
    """Serve MODEL over HTTP, with the API that OpenAI's clients speak (docs/serving.md).

    Ends in good order on Ctrl-C or SIGTERM: new requests are refused, running answers get --drain-s seconds; a second
    signal ends it at once. Exit codes: 0 stopped in good order, 1 a process of the server died, 130 a second signal.
    """
    of_server = {one.name for one in fields(ServerConfig)} & options.keys()
    keys = tuple([] if api_key is None else [api_key]) + _read_keys(api_key_file)
    config = ServerConfig(api_keys=keys, **{name: options.pop(name) for name in of_server})
    engine = engine_config(**options)
    try:
        from kittiwake.server.supervisor import Supervisor
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("kittiwake"):
            raise
        raise _MISSING from error
    supervisor = Supervisor(
        None if model is None else str(model),
        engine,
        config,
        tokenizer=tokenizer,
        template=template,
        ready_file=ready_file,
    )
    context.exit(supervisor.run())


def _read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file; empty lines and those that begin with # are none."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(f"the key file {path} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        note(f"warning: {path} can be read by others than its owner; chmod 600 {path}")
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InputFileError(f"the key file {path} holds no key", "one a line")
    return keys
