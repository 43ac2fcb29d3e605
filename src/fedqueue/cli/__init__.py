"""The `fedqueue` command. Each verb has its own file; this one knows them all.

Results go to standard output, progress and errors to standard error. An error a person can act on is one line and
a non-zero exit; its code says whose turn it is (see errors.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from fedqueue import __version__
from fedqueue.cli import extras, operate
from fedqueue.errors import ConfigError, FedQueueError, ProtocolError, StorageError
from fedqueue.plugins import plugins

_OURS: Final = (
    *("demo", "init", "simulate", "compare", "plan", "history", "forecast"),
    *("run", "page", "report", "models", "replay", "retrace", "journal", "doctor", "sbom"),
    *("serve", "submit", "list", "logs", "user", "audit", "enroll", "agent"),
)
"""Each is the name of its file here."""

_EPILOG = """\
first steps:
  fedqueue demo                        six strategies side by side, then a real run
  fedqueue init my.toml                a config to start from, every key explained
  fedqueue simulate my.toml            one run in virtual time, with real training
  fedqueue compare my.toml --strategies fedqueue,jit,fedavg --seeds 5
  fedqueue run my.toml                 the same for real, on this machine
  fedqueue serve my.toml               the same for real, over several facilities (docs/operating.md)
  fedqueue serve FOLDER                a federation: sites join once, runs come and go (docs/federation.md)
"""


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal, and leaves indented ones as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else textwrap.fill(p, width) for p in paragraphs)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"fedqueue: error: {message}; `{self.prog} --help` explains", file=sys.stderr)
        raise SystemExit(2)


def make_parser(argv: Sequence[str], more: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """`more`: commands by name, beside ours and those of installed packages. Where `argv` names one, the others are
    not loaded: what all of them import takes longer than many a command."""
    parser = _Parser(
        prog="fedqueue",
        description="Federated learning across supercomputers, where every participant waits in a batch queue.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"fedqueue {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _commands(argv[0] if argv else None, more or {}).items():
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=_Help,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def _commands(named: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """The one that is named, or else all. Ours come first: nothing can take the place of one."""
    verbs = {verb.__name__: verb for verb in operate.VERBS}
    if named is not None:
        if named in verbs:
            return {named: verbs[named]}
        if named in _OURS:
            return {named: import_module(f"fedqueue.cli.{named}")}
        if named in more:
            return {named: more[named]}
        if found := plugins("commands", named):
            return found
    ours: dict[str, Any] = {name: import_module(f"fedqueue.cli.{name}") for name in _OURS}
    return {**plugins("commands"), **more, **ours, **verbs}


def main(argv: Sequence[str] | None = None, more: Mapping[str, Any] | None = None) -> int:
    """Run one command; returns its exit code. `more`: see `make_parser`."""
    for name in ("stdout", "stderr"):  # closed by whoever started us
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser(argv, more).parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # asked to end: the same as Ctrl-C
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except FedQueueError as error:
        print(f"fedqueue: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, sqlite3.Error) as error:
        print(f"fedqueue: error: {error}", file=sys.stderr)
        return StorageError.exit_code
    except KeyboardInterrupt:
        print("fedqueue: stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        extra = extras.extra_of(error.name)
        if extra is None:
            return _ours(error)
        print(f"fedqueue: error: this needs {error.name}: {extras.install(extra)}", file=sys.stderr)
        return ConfigError.exit_code
    except Exception as error:
        return _ours(error)


def _ours(error: Exception) -> int:
    if os.environ.get("FEDQUEUE_TRACEBACK"):
        raise error
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"fedqueue: error: ours: {what}; please report it, with FEDQUEUE_TRACEBACK=1 set", file=sys.stderr)
    return ProtocolError.exit_code


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
