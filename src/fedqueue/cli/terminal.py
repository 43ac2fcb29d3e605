"""What people see: a bar and colours on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedqueue.protocol.messages import Command, Event, ModelReady, ModelScored

if TYPE_CHECKING:
    from fedqueue.config import Config
    from fedqueue.engine import Listener

PLAIN_WIDTH = 200  # columns when nobody says how wide the output is
REFRESH_SECONDS = 0.1
PLAIN_SECONDS = 5.0  # between two lines of progress where there is no terminal


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, best: int | None = None) -> None:
    """A table on standard output: first column left, figures right, row `best` stands out. Without a terminal it has
    no lines around it."""
    out = console()
    plain = not out.is_terminal
    made = Table(
        box=None if plain else box.SIMPLE_HEAD,
        header_style="" if plain else "bold",
        padding=(0, 2, 0, 0) if plain else (0, 1),
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for i, row in enumerate(rows):
        made.add_row(*row, style="bold green" if i == best else None)
    if title or plain:
        out.print(title, style=None if plain else "bold")
    out.print(made)


def show_notes(notes: Sequence[tuple[str, str]]) -> None:
    """A line for each: what it is about, and what is to be said; long ones are folded under themselves."""
    out = console()
    if not out.is_terminal:
        print()
    wide = max((len(about) for about, _ in notes), default=0)
    for about, said in notes:
        if not out.is_terminal:
            print(f"{about:<{wide}}  {said}")
            continue
        folded = Table.grid(padding=(0, 2, 0, 0))
        folded.add_column(min_width=wide, no_wrap=True)
        folded.add_column(overflow="fold")
        folded.add_row(Text(about), Text(said))
        out.print(folded)


def span(seconds: float) -> str:
    """How long, in the unit that a person would take.

    >>> span(34.2), span(600.0), span(20000.0), span(400000.0)
    ('34 s', '10 min', '5.6 h', '4.6 days')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


class _Watch:
    """A listener that follows one run."""

    def __init__(self, config: Config) -> None:
        self.total = config.run.seconds or (config.run.rounds or 1) * 1.0
        self._by_time = config.run.seconds is not None
        self._rounds = config.run.rounds
        self.done = 0.0
        self.at = 0.0
        self.version = 0
        self.score: float | None = None

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self.at = event.at
        if isinstance(event, ModelReady):
            self.version = event.version
        elif isinstance(event, ModelScored):
            self.score = event.metrics.get("score")
        by_rounds = self.version / self._rounds if self._rounds else 0.0
        self.done = max(self.at, by_rounds * self.total) if self._by_time else float(self.version)

    def line(self) -> str:
        score = "" if self.score is None else f"  score {100 * self.score:.1f} %"
        return f"{self.at:8.1f} s  model {self.version}{score}"


@contextmanager
def following(label: str, config: Config, *, quiet: bool = False) -> Iterator[Listener]:
    """Show how a run gets on; gives the listener that the run has to call."""
    watch = _Watch(config)
    screen = console(stderr=True)
    if quiet:
        yield watch
    elif screen.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=screen, transient=True) as progress:
            task = progress.add_task(label, total=watch.total, line="")
            yield _throttled(
                watch, REFRESH_SECONDS, lambda: progress.update(task, completed=watch.done, line=watch.line())
            )
    else:
        yield _throttled(watch, PLAIN_SECONDS, lambda: print(f"{label}  {watch.line()}", file=sys.stderr, flush=True))


@contextmanager
def counting(*, quiet: bool, lines: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show how much is done; gives what has to be told of it: what, how many are done, and of how many. `lines`: where
    there is no terminal, a line each."""
    screen = console(stderr=True)
    if screen.is_terminal and not quiet:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True) as progress:
            task = progress.add_task("")
            yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
    elif lines and not quiet:
        yield lambda what, done, total: screen.print(f"{done} of {total}: {what}", markup=False)
    else:
        yield lambda what, done, total: None


def _throttled(watch: _Watch, every: float, say: Callable[[], None]) -> Listener:
    last = time.monotonic()

    def listener(event: Event, commands: Sequence[Command]) -> None:
        nonlocal last
        watch(event, commands)
        if time.monotonic() - last >= every:
            last = time.monotonic()
            say()

    return listener
