"""A learning curve: how much a model scores after how many local steps, from a file or from an earlier run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fedqueue.errors import DataError
from fedqueue.ledger import FILE, LedgerReader


@dataclass(frozen=True, slots=True)
class LearningCurve:
    name: str
    points: tuple[tuple[float, float], ...]  # (local steps of all facilities so far, score), steps rising
    steps_per_update: float | None = None  # mean, in the run that it is from

    def steps_to(self, target: float) -> float:
        """Local steps until this score: on the straight line between the last point below it and the first that is
        not. A model without training counts as 0.

        >>> LearningCurve("c", ((100.0, 0.5), (300.0, 1.0))).steps_to(0.75)
        200.0
        """
        best = max(score for _, score in self.points)
        if best < target:
            raise DataError(f"{self.name}: never reaches {target:g}, its best score is {best:g}; choose a lower target")
        for (steps, score), (further, higher) in pairwise(((0.0, 0.0), *self.points)):
            if score < target <= higher:
                return steps + (further - steps) * (target - score) / (higher - score)
        return self.points[0][0]


def read_curve(path: Path) -> LearningCurve:
    """A CSV file with the columns steps and score, or a run folder."""
    return _of_run(path) if path.is_dir() else _of_file(path)


def _of_file(path: Path) -> LearningCurve:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in ("steps", "score") if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: column {missing[0]} is missing; a learning curve needs steps and score")
            points = [(float(row["steps"]), float(row["score"])) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a learning curve: {error}") from None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: line {reader.line_num}: not a number: {error}") from None
    return LearningCurve(str(path), _checked(points, path))


def _of_run(path: Path) -> LearningCurve:
    """The scores of a run's models, each with the local steps that were done when it was scored."""
    with LedgerReader(path / FILE) as ledger:
        scores = [(row["scored_at"], row["score"]) for row in ledger.rows("SELECT * FROM scores ORDER BY scored_at")]
        ended = ledger.rows("SELECT ended_at, steps_done FROM jobs WHERE ended_at IS NOT NULL ORDER BY ended_at")
        jobs = [(row["ended_at"], row["steps_done"]) for row in ended]
    if not scores:
        raise DataError(f"{path}: no model of this run was scored; name a run that trained")
    points, steps, done = [], 0.0, 0
    for at, score in scores:
        while done < len(jobs) and jobs[done][0] <= at:
            steps += jobs[done][1]
            done += 1
        points.append((steps, score))
    return LearningCurve(str(path), _checked(points, path), sum(s for _, s in jobs) / len(jobs) if jobs else None)


def _checked(points: Sequence[tuple[float, float]], path: Path) -> tuple[tuple[float, float], ...]:
    if not points:
        raise DataError(f"{path}: has no point; a learning curve needs lines of steps and score")
    for (steps, _), (further, _) in pairwise(points):
        if further < steps:
            raise DataError(f"{path}: steps must rise, found {further:g} after {steps:g}")
    if points[0][0] < 0:
        raise DataError(f"{path}: steps must be 0 or more, found {points[0][0]:g}")
    return tuple(points)
