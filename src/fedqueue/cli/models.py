"""List the models that a run's folder has, or fetch one of them: the best, the newest, or any by its number.

While the run goes on and after it. A model is checked against its sha256 when it is fetched.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedqueue.cli import operate, terminal
from fedqueue.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from fedqueue.agent.access_file import Elsewhere
    from fedqueue.protocol.service import KeptModel

Row = dict[str, Any]
KEYS: Final = ("version", "ready_at", "score", "best", "newest", "sha256")
"""Of a row; on the coordinator's machine also `file`."""

HELP = "list or fetch the models of a real run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help=operate.RUN)
    parser.add_argument("which", nargs="?", metavar="best|newest|NUMBER", help="the one to fetch; without: list them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="copy it there")
    parser.add_argument("--replace", action="store_true", help="even if there is such a file")
    parser.add_argument("--json", action="store_true", help="print the list as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    from fedqueue.agent.access_file import elsewhere

    if args.which is None and args.out is not None:
        raise ConfigError("--out: say which model: best, newest or its number")
    if args.out is not None and args.out.exists() and not args.replace:
        raise ConfigError(f"--out: {args.out} exists already; nothing was changed; name another file, or --replace it")
    operate.must_be_run(args.folder)
    there = elsewhere(args.folder)
    if there is not None:
        return _fetch(there, args) if args.which is not None else _show(_listed(there), as_json=args.json)
    if args.which is None:
        return _show(_kept(args.folder), as_json=args.json)
    from fedqueue import tensorfile
    from fedqueue.models import find

    model = find(args.folder, args.which)
    if args.out is None:
        tensorfile.verify(model.file, tensorfile.Content(model.digest))
        print(model.file)
        return 0
    tensorfile.export(model.file, args.out, model.digest)
    return _wrote(args.out, model.version, model.score)


def _wrote(out: Path, version: int, score: float | None) -> int:
    print(f"wrote {out}: model {version}" + ("" if score is None else f", score {terminal.percent(score)} %"))
    return 0


def _fetch(there: Elsewhere, args: argparse.Namespace) -> int:
    from fedqueue import tensorfile

    if args.out is None:
        raise ConfigError("--out: say where the model is to be written")
    found = operate.ask_elsewhere(there, lambda client: client.kept_models(there.run)).models
    tests: dict[str, Callable[[KeptModel], bool]] = {"best": lambda m: m.best, "newest": lambda m: m.newest}
    is_meant = tests.get(args.which, lambda m: str(m.version) == args.which)
    model = next(filter(is_meant, found), None)
    if model is None:
        kept = ", ".join(str(one.version) for one in found) or "none"
        raise RunFolderError(f"{args.folder}: has no model {args.which}; kept are {kept}")
    operate.ask_elsewhere(there, lambda client: client.kept_model(there.run, model, args.out))
    tensorfile.export(args.out, args.out, model.sha256)
    return _wrote(args.out, model.version, model.score)


def _listed(there: Elsewhere) -> list[Row]:
    found = operate.ask_elsewhere(there, lambda client: client.kept_models(there.run))
    return [{name: getattr(model, name) for name in KEYS} for model in found.models]


def _kept(folder: Path) -> list[Row]:
    from fedqueue.models import read_models

    models = read_models(folder)
    return [
        {
            "version": model.version,
            "ready_at": model.ready_at,
            "score": model.score,
            "best": model == models.best,
            "newest": model == models.newest,
            "sha256": model.digest,
            "file": str(model.file),
        }
        for model in models.there
    ]


def _show(rows: list[Row], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(rows))
        return 0
    shown = [
        (
            str(row["version"]),
            terminal.seconds(row["ready_at"]),
            terminal.percent(row["score"]),
            ", ".join(word for word in ("best", "newest") if row[word]),
            row["sha256"][:12],  # the whole path is more than 80 columns; `fedqueue models RUN NUMBER` has it
        )
        for row in rows
    ]
    terminal.show_table("", ("model", "made at (s)", "score (%)", "", "sha256 begins with"), shown)
    return 0
