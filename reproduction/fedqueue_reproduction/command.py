"""Run the experiments of the paper, and show what it says beside what comes out.

Each experiment is a file in experiments/ and stands for one table or figure. All its runs go to
experiments/results/NAME.json: what is there already is kept with --resume, and refused otherwise. An interrupted
command keeps what it has done. --quick is a small version of an experiment, for a look; its results go to
NAME.quick.json. --page writes docs/reproduction.md from all results.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedqueue.cli import extras, terminal
from fedqueue.errors import ConfigError, RunFolderError
from fedqueue.machine import invoked, provenance
from fedqueue_reproduction import experiment as files
from fedqueue_reproduction import results
from fedqueue_reproduction.execute import Meter, Run, check_device, execute, runs_of
from fedqueue_reproduction.experiment import Experiment
from fedqueue_reproduction.listing import show_list, show_results
from fedqueue_reproduction.results import Results
from fedqueue_reproduction.tuning import winner_for

HELP = "the experiments of the paper, with its figures beside ours"

SAVE_SHARE: Final = 0.02
"""Of the time, at most, goes into writing results: a run of minutes is kept at once, one of many thousands soon."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="of experiments, or their files; none: list them all")
    parser.add_argument("--list", action="store_true", help="list all experiments")
    parser.add_argument("--quick", action="store_true", help="a small version, of minutes on two cores")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many, instead of what the experiment says")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models are trained (cpu)")
    parser.add_argument("--jobs", type=int, metavar="P", help="processes at once (cores; on a GPU 1)")
    parser.add_argument("--resume", action="store_true", help="keep the results that are there; run what is missing")
    parser.add_argument("--force", action="store_true", help="replace the results that are there")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where results go (results/ beside the experiment)")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no run after so many minutes")
    parser.add_argument("--page", action="store_true", help="write reproduction.md, with its figures, from all results")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="where it goes (docs/ beside experiments/)")


@dataclass(frozen=True)
class Study:
    """One experiment of this command."""

    experiment: Experiment
    path: Path  # of its results
    results: Results
    wanted: list[Run]
    missing: list[Run]
    dropped: int  # records that no longer fit the experiment


def run(args: argparse.Namespace) -> int:
    if args.page and args.quick:
        raise ConfigError("--page is made from full results: leave --quick out")
    if args.docs and not args.page:
        raise ConfigError("--docs says where --page goes: give both")
    if args.page and not args.names:
        _write_page(args)
        return 0
    if args.list or not args.names:
        show_list(args.results)
        return 0
    if (
        (args.seeds is not None and args.seeds < 1)
        or (args.jobs is not None and args.jobs < 1)
        or (args.minutes is not None and args.minutes <= 0)
    ):
        raise ConfigError("reproduce needs --seeds 1 or more, --jobs 1 or more and --minutes more than 0")
    if args.resume and args.force:
        raise ConfigError("--resume keeps results and --force replaces them: give one of the two")
    gpu = check_device(args.device)
    paths = [files.find(name) for name in args.names]
    twice = next((path.stem for path in paths if [one.stem for one in paths].count(path.stem) > 1), None)
    if twice:
        raise ConfigError(f"{twice}: is named twice")
    studies = [_study(files.load(path), args) for path in paths]
    _run_missing(studies, args, gpu)
    for study in studies:
        _show(study, quick=args.quick)
    if args.page:
        _write_page(args)
    return 0


def _write_page(args: argparse.Namespace) -> None:
    extras.need("plots")
    from fedqueue_reproduction import page  # draws: nobody else here needs matplotlib

    folder = files.folder()
    written = page.write(folder, args.results or folder / results.FOLDER, args.docs or folder.parent / "docs")
    print(f"page: {written[0]}, with {len(written) - 1} figures")


def _study(experiment: Experiment, args: argparse.Namespace) -> Study:
    seeds = experiment.seeds_of(args.seeds, quick=args.quick)
    winner = winner_for(experiment, seeds, args.results)
    wanted = runs_of(experiment, seeds, quick=args.quick, winner=winner)
    path = results.path_of(experiment.path, quick=args.quick, folder=args.results)
    if path.exists() and not (args.resume or args.force or args.quick):
        raise RunFolderError(f"{path}: exists already; --resume adds what is missing, --force replaces it")
    known, dropped = Results(experiment.name, args.quick), 0
    if path.exists() and args.resume:
        known = results.read(path)
        most = max([*seeds, *(record["seed"] for record in known.runs.values())])
        # Further seeds than are asked for now are kept too, as long as they are those of this experiment.
        fitting = wanted
        if most not in seeds and most >= experiment.seeds.first:
            every = range(experiment.seeds.first, most + 1)
            fitting = runs_of(experiment, every, quick=args.quick, winner=winner)
        fits = {(run.row, run.setting, run.seed): run for run in fitting}
        dropped = known.keep_only(lambda record: _fits(record, fits.get(results.key_of(record))))
    missing = [run for run in wanted if (run.row, run.setting, run.seed) not in known.runs]
    return Study(experiment, path, known, wanted, missing, dropped)


def _fits(record: dict[str, Any], run: Run | None) -> bool:
    return run is not None and record["config"] == run.config and run.keep <= set(record)


def _run_missing(studies: Sequence[Study], args: argparse.Namespace, gpu: str | None) -> None:
    by_name = {study.experiment.name: study for study in studies}
    runs = sorted((run for study in studies for run in study.missing), key=lambda run: run.seed)
    for study in studies:
        if study.dropped:
            _say(f"{study.path}: {study.dropped} runs no longer fit the experiment and are run again")
    if not runs:
        return
    if any(run.trains for run in runs):
        extras.need("train")
    made_by, changed = provenance(invoked()), set[str]()
    made_by["machine"] |= {"gpu": gpu} if gpu else {}
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    meter = Meter()
    done = execute(
        runs,
        device=args.device,
        processes=min(args.jobs or (_cores() if args.device == "cpu" else 1), len(runs)),
        go_on=lambda: end is None or time.monotonic() < end,
        meter=meter,
    )
    saved_at, saving_took = time.monotonic(), 0.0
    try:
        with closing(done), _progress(runs, meter) as tell:
            for run, record in done:
                by_name[run.experiment].results.add(record, made_by)
                changed.add(run.experiment)
                tell(run)
                if (now := time.monotonic()) - saved_at >= saving_took / SAVE_SHARE:
                    _save(by_name, changed)
                    saved_at = time.monotonic()
                    saving_took = saved_at - now
    except BaseException:
        _save(by_name, changed)
        for study in studies:
            if study.results.runs:
                _say(f"{study.path}: {_count(study)} runs are kept; --resume goes on")
        raise
    _save(by_name, changed)


def _save(by_name: dict[str, Study], changed: set[str]) -> None:
    for name in changed:
        results.write(by_name[name].path, by_name[name].results)
    changed.clear()


def _count(study: Study) -> str:
    there = sum((run.row, run.setting, run.seed) in study.results.runs for run in study.wanted)
    return f"{there:,} of {len(study.wanted):,}"


def _show(study: Study, *, quick: bool) -> None:
    show_results(study.experiment, study.results.sorted(), quick=quick)
    missing = [run for run in study.wanted if (run.row, run.setting, run.seed) not in study.results.runs]
    print(f"{study.experiment.name}: {_count(study)} runs in {study.path}")
    if missing:
        print(f"{study.experiment.name}: {len(missing):,} runs are missing; the same command with --resume goes on")


@contextmanager
def _progress(runs: Sequence[Run], meter: Meter) -> Iterator[Callable[[Run], None]]:
    """Show how the runs get on; what it gives is to be told of every run that is done."""
    screen = terminal.console(stderr=True)
    total = sum(run.seconds for run in runs)
    if not screen.is_terminal:
        yield _Lines(len(runs), total, meter)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[runs]} of " + f"{len(runs):,} runs"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, speed_estimate_period=600.0) as progress:
        task = progress.add_task(runs[0].experiment, total=total, runs=0)
        over = threading.Event()

        def follow() -> None:
            while not over.wait(0.5):
                progress.update(task, completed=meter.seconds)

        numbers = count(1)

        def tell(run: Run) -> None:
            progress.update(task, description=run.experiment, runs=f"{next(numbers):,}")

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield tell
        finally:
            over.set()
            follower.join()


class _Lines:
    """Progress where there is no terminal: a line now and then."""

    def __init__(self, count: int, seconds: float, meter: Meter) -> None:
        self._count, self._seconds, self._meter = count, seconds, meter
        self._done = 0
        self._began = self._said = time.monotonic()

    def __call__(self, run: Run) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said >= terminal.PLAIN_SECONDS or self._done == self._count:
            self._said = now
            left = (now - self._began) * (self._seconds / max(self._meter.seconds, 1e-9) - 1)
            about = f"; about {_duration(left)} left" if self._done < self._count else ""
            _say(f"run {self._done:,} of {self._count:,}: {run}{about}")


def _duration(seconds: float) -> str:
    """
    >>> _duration(50), _duration(500), _duration(9000)
    ('50 s', '8 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
