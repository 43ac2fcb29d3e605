"""Forecast errors that were measured: in a run, by replaying a forecaster over a queue trace, or by somebody else.

The error of a job is its admission delay minus the delay that was expected when it was ordered, in seconds.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from fedqueue.config import TraceQueue
from fedqueue.errors import DataError, RunFolderError
from fedqueue.forecasting.probes import default_warm_up, probe_jobs
from fedqueue.history.lines import open_text
from fedqueue.history.read import UNREADABLE
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.predict import make_predictor
from fedqueue.sim.queues import read_trace
from fedqueue_reproduction.bound import Series

Kind = Literal["run", "trace", "errors"]

MOST_SECONDS: Final = 1e12  # an error beyond this is a mistake
ALL: Final = "all"  # the facility of errors that name none

_JOBS: Final = """
SELECT json_extract(c.body, '$.order.facility') AS facility,
       json_extract(c.body, '$.order.expected_delay') AS expected,
       (SELECT json_extract(e.body, '$.admission_delay') FROM events e
         WHERE e.job = c.job AND e.kind = 'JobStarted' ORDER BY e.seq LIMIT 1) AS delay,
       EXISTS (SELECT 1 FROM events e WHERE e.job = c.job AND e.kind IN ('JobFailed', 'SubmitRefused')) AS failed
FROM commands c WHERE c.kind = 'SubmitJob' AND json_extract(c.body, '$.order.purpose') = 'train'
ORDER BY c.seq, c.place
"""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What became of the updates of a run that were aggregated."""

    updates: int
    deferred: float  # share
    max_staleness: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Errors by facility, with what their source says about itself; None: it does not say."""

    name: str
    kind: Kind
    series: dict[str, Series]
    rounds: int
    round_length: float | None = None
    margin: float | None = None
    observed: Observed | None = None
    notes: tuple[str, ...] = ()  # what a reader of the figures should know

    def after(self, warm_up: int) -> Measured:
        """Without the first errors of each facility; a run's first forecasts are what its config says, not learned."""
        series = {
            name: Series(one.errors[warm_up:], None if one.expected is None else one.expected[warm_up:])
            for name, one in self.series.items()
        }
        few = next((name for name, one in series.items() if not len(one.errors)), None)
        if few is not None:
            raise DataError(f"{self.name}: {few} has {len(self.series[few].errors)} errors: there is no error left")
        return dataclasses.replace(self, series=series)


@dataclass(frozen=True, slots=True)
class Probe:
    """One job of a facility's shape in a trace, as if it were ours."""

    at: float  # start of its round, when it was forecast
    expected: float
    delay: float


def of_run(folder: Path) -> Measured:
    """Every job of a run that was forecast and started; one that was requeued counts with its first wait."""
    with LedgerReader(folder / FILE) as ledger:
        meta = ledger.meta
        rows = ledger.rows(_JOBS)
        rounds = ledger.rows("SELECT max(version) AS newest FROM models")[0]["newest"]
        updates = ledger.rows("SELECT deferred, staleness FROM updates WHERE fate = 'aggregated'")
    pairs: dict[str, list[tuple[float, float]]] = {profile["name"]: [] for profile in meta["plan"]["facilities"]}
    for row in rows:
        if row["expected"] is not None and row["delay"] is not None:
            pairs[row["facility"]].append((row["expected"], row["delay"]))
    series = {name: of_pairs(found) for name, found in pairs.items() if found}
    strategy = str(meta["strategy"])
    if not series:
        raise RunFolderError(
            f"{folder}: no job of it was forecast and started (strategy {strategy}): there is no error"
        )
    options = meta["options"]
    notes = []
    waiting = sum(row["delay"] is None and not row["failed"] for row in rows)
    if waiting:
        notes.append(f"{waiting} of {len(rows)} jobs had not started when the run ended; their errors are not here")
    if "margin" not in options:
        notes.append(f"{strategy} has no margin, and the Lemma is about jobs that get their work when they are ordered")
    return Measured(
        name=f"{folder} ({strategy})",
        kind="run",
        series=series,
        rounds=max(1, rounds or 0),
        round_length=float(options.get("round_length") or meta["plan"]["round_length"]),
        margin=float(options.get("margin", 0.0)),
        observed=Observed(
            updates=len(updates),
            deferred=sum(bool(row["deferred"]) for row in updates) / len(updates),
            max_staleness=max(row["staleness"] for row in updates),
        )
        if updates
        else None,
        notes=tuple(notes),
    )


def of_trace(
    path: Path,
    shape: TraceQueue,
    *,
    round_length: float,
    predictor: str = "ewma",
    smoothing: float = 0.5,
    first: float | None = None,
    warm_up: int | None = None,
) -> Measured:
    """The errors that a forecaster would have made for jobs of this shape, one a round; the first `warm_up` probes are
    left out (None: a fifth of them, at least 150)."""
    jobs = read_trace(path, shape).whole
    probes = replay_forecasts(
        jobs.submits, jobs.waits, round_length, predictor=predictor, smoothing=smoothing, first=first
    )
    if warm_up is None:
        warm_up = default_warm_up(len(probes))
    kept = probes[warm_up:]
    if not kept:
        raise DataError(f"{path}: {len(probes)} probes, and {warm_up} of them are warm-up: there is no error left")
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return Measured(
        name=f"{name} ({predictor})",
        kind="trace",
        series={name: of_pairs([(probe.expected, probe.delay) for probe in kept])},
        rounds=len(kept),
        round_length=round_length,
    )


def replay_forecasts(
    submits: Sequence[float],
    waits: Sequence[float],
    round_length: float,
    *,
    predictor: str = "ewma",
    smoothing: float = 0.5,
    first: float | None = None,
) -> list[Probe]:
    """One job at a time, as `probe_jobs` chooses them, so every forecast uses only waits that are over.

    Without a `first` forecast the first wait is the forecaster's first guess, and is no probe.

    >>> replay_forecasts([0.0, 5.0, 12.0, 47.0], [4.0, 1.0, 20.0, 8.0], 10.0)
    [Probe(at=10.0, expected=4.0, delay=20.0), Probe(at=40.0, expected=12.0, delay=8.0)]
    """
    forecaster = make_predictor(predictor, first, smoothing)
    probes: list[Probe] = []
    known = first is not None
    for at, place in probe_jobs(submits, waits, round_length):
        if known:
            probes.append(Probe(at, forecaster.forecast(at).mean, waits[place]))
        forecaster.observe(submits[place] + waits[place], waits[place])
        known = True
    return probes


def of_file(path: Path) -> Measured:
    """A CSV file with a column `error`, or columns `admission_delay` and `expected_delay`, and perhaps `facility`; or
    a plain file with one error a line."""
    found: dict[str, list[tuple[float | None, float]]] = {}
    try:
        with open_text(path) as lines:
            for facility, expected, value in _rows(path, lines):
                found.setdefault(facility, []).append((expected, value))
    except (ValueError, TypeError, csv.Error, *UNREADABLE) as error:
        raise DataError(f"{path}: cannot be read as errors: {error}") from None
    if not found:
        raise DataError(f"{path}: holds no error")
    series = {}
    for name, values in found.items():
        pairs = [(expected, value) for expected, value in values if expected is not None]
        series[name] = of_pairs(pairs) if pairs else Series(np.array([value for _, value in values]))
    return Measured(name=path.name, kind="errors", series=series, rounds=max(map(len, found.values())))


def _rows(path: Path, lines: Iterable[str]) -> Iterable[tuple[str, float | None, float]]:
    """(facility, q-hat, q) of each line, or (facility, None, error)."""
    reader = csv.reader(lines)
    heads = [head.strip() for head in next(reader, [])]
    if len(heads) == 1 and _is_number(heads[0]):
        yield ALL, None, _number(heads[0], 1)
        heads = ["error"]
    pair = "admission_delay" in heads and "expected_delay" in heads
    if not pair and "error" not in heads:
        raise DataError(f"{path}: has no column error, nor admission_delay and expected_delay")
    for row in reader:
        if not row:
            continue
        if len(row) != len(heads):
            raise ValueError(f"line {reader.line_num} has {len(row)} columns, the first line {len(heads)}")
        cells = dict(zip(heads, row, strict=True))
        facility = cells.get("facility", ALL).strip() or ALL
        if pair:
            expected, delay = (_number(cells[name], reader.line_num) for name in ("expected_delay", "admission_delay"))
            if min(expected, delay) < 0:
                raise ValueError(f"line {reader.line_num}: a delay of {min(expected, delay):g} s")
            yield facility, expected, delay
        else:
            yield facility, None, _number(cells["error"], reader.line_num)


def _number(text: str, line: int) -> float:
    if not (_is_number(text) and abs(float(text)) <= MOST_SECONDS):
        raise ValueError(f"line {line}: {text.strip()!r} is no number of seconds")
    return float(text)


def of_pairs(pairs: Sequence[tuple[float, float]]) -> Series:
    """From (expected, real) delays."""
    expected, delays = np.array(pairs, dtype=np.float64).T
    return Series(delays - expected, expected)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
