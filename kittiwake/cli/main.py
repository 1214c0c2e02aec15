"""``kittiwake``: the commands, and the one place where errors become exit codes.

Exit codes: 0 done · 1 a check failed or the work could not be done · 2 wrong usage · 3 a bad input file ·
70 a fault in kittiwake itself · 130 interrupted · 141 the reader of a pipe went away · 143 ended by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from kittiwake import __version__
from kittiwake.cli.batch import batch
from kittiwake.cli.bench import bench
from kittiwake.cli.build import build
from kittiwake.cli.chat import chat
from kittiwake.cli.doctor import doctor
from kittiwake.cli.eval_bits import bits
from kittiwake.cli.eval_compare import compare
from kittiwake.cli.eval_lambada import lambada
from kittiwake.cli.export import export
from kittiwake.cli.inspect import inspect
from kittiwake.cli.output import note, print_error
from kittiwake.cli.run import run
from kittiwake.cli.serve import serve
from kittiwake.cli.verify import verify
from kittiwake.device import waiting_environment
from kittiwake.errors import KittiwakeError

EXIT_FAILED = 1
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143

SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}


@click.group(context_settings=SETTINGS)
@click.version_option(__version__, prog_name="kittiwake")
def cli() -> None:
    """Run, check and measure RWKV-like models. Where MODEL is left out, the packaged model is used.

    Answers and JSON go to stdout, everything else to stderr. Exit codes: 0 done, 1 a check failed, 2 wrong usage,
    3 a bad input file, 130 interrupted; where the work could not be done, stdout stays empty or as far as it got.
    """


@click.group("eval")
def evaluate() -> None:
    """Measure the quality of a model's answers."""


evaluate.add_command(lambada)
evaluate.add_command(bits)
evaluate.add_command(compare)
for command in (run, chat, serve, batch, export, verify, bench, inspect, doctor, build, evaluate):
    cli.add_command(command)


def prepare_environment() -> None:
    """Settings that torch and numba read once, at import: they must stand before either comes in."""
    os.environ.update(waiting_environment())
    if sys.stdout is None or sys.stderr is None:  # closed by the caller: what would be written there is dropped
        nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  open until the process ends
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal of another encoding shows "?" instead of ending the answer
            reconfigure(errors="replace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; the one place of the package that turns errors into text."""
    prepare_environment()
    try:
        with _ending_in_order():
            code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _close_stdout()
    return code


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM unwinds what is open, so that no temporary file is left; ``serve`` has its own way with it."""

    def end(*_: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Not cli.main(): it has its own way with interrupts and broken pipes.
        with cli.make_context("kittiwake", list(sys.argv[1:] if arguments is None else arguments)) as context:
            cli.invoke(context)
        return 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except KittiwakeError as error:
        print_error(error.message, error.hint)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        note(error.format_message())
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "kittiwake"
        print_error(error.format_message(), f"{path} --help")
        return error.exit_code
    except click.ClickException as error:
        print_error(error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except MemoryError:
        print_error("out of memory", "a smaller model, fewer sequences at once or --dtype bf16 needs less")
        return EXIT_FAILED
    except OSError as error:
        print_error(_os_error_text(error))
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        print_error("this is a fault in kittiwake, not in what you did", "report it with the lines above")
        return EXIT_FAULT


def _os_error_text(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _close_stdout() -> int:
    """The reader is gone (``kittiwake run | head``): end without a word, and keep Python from flushing at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return EXIT_BROKEN_PIPE
