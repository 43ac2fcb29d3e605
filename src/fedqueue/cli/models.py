"""List the models that a run's folder has, or fetch one of them: the best, the newest, or any by its number.

While the run goes on and after it. A model is checked against its sha256 when it is fetched.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedqueue.cli import terminal
from fedqueue.errors import ConfigError

HELP = "list or fetch the models of a real run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("which", nargs="?", metavar="best|newest|NUMBER", help="the one to fetch; without: list them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="copy it there")
    parser.add_argument("--replace", action="store_true", help="even if there is such a file")
    parser.add_argument("--json", action="store_true", help="print the list as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    if args.which is None:
        if args.out is not None:
            raise ConfigError("--out: say which model: best, newest or its number")
        return _list(args.folder, as_json=args.json)
    from fedqueue import tensorfile
    from fedqueue.models import find

    model = find(args.folder, args.which)
    score = "" if model.score is None else f", score {terminal.percent(model.score)} %"
    if args.out is None:
        tensorfile.verify(model.file, tensorfile.Content(model.digest))
        print(model.file)
        return 0
    if args.out.exists() and not args.replace:
        raise ConfigError(f"--out: {args.out} exists already; nothing was changed; name another file, or --replace it")
    tensorfile.copy(model.file, args.out, model.digest)
    print(f"wrote {args.out}: model {model.version}{score}")
    return 0


def _list(folder: Path, *, as_json: bool) -> int:
    from fedqueue.models import read_models

    models = read_models(folder)
    best, newest = models.best, models.newest
    there = [model for model in models.made if model.file.exists()]
    if as_json:
        rows = [
            {
                "version": model.version,
                "ready_at": model.ready_at,
                "score": model.score,
                "best": model == best,
                "newest": model == newest,
                "sha256": model.digest,
                "file": str(model.file),
            }
            for model in there
        ]
        print(json.dumps(rows))
        return 0
    shown = [
        (
            str(model.version),
            terminal.seconds(model.ready_at),
            terminal.percent(model.score),
            ", ".join(word for word, other in (("best", best), ("newest", newest)) if model == other),
            model.digest[:12],  # the whole path is more than 80 columns; `fedqueue models RUN NUMBER` has it
        )
        for model in there
    ]
    terminal.show_table("", ("model", "made at (s)", "score (%)", "", "sha256 begins with"), shown)
    return 0
