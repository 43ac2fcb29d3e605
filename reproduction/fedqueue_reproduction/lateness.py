"""Hold what docs/jit.md says about late parts against runs whose jobs bind late: their ledgers have all of it.

    python -m fedqueue_reproduction.lateness RUN... [--json FILE]

A part takes E steps at time t for a cutoff, with a speed c and an overhead that were learned before. It is late if and
only if its excess, (overhead - learned) + (seconds of training - E/c), is more than the slack that the fit left free.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from fedqueue.errors import ConfigError
from fedqueue.files import write_json
from fedqueue.history.ledgers import ledger_of
from fedqueue.ledger import LedgerReader
from fedqueue.machine import provenance
from fedqueue.protocol.contract import Assignment, Standing, UpdateKey, facility_of
from fedqueue.protocol.messages import JobStarted, PostWork, UpdateArrived, WorkTaken, parse
from fedqueue.runs import rounded

ENOUGH = 20  # parts that a share should rest on


@dataclass(frozen=True, slots=True)
class Part:
    """One update whose job took its work from standing work."""

    excess_overhead: float  # seconds, over what was learned
    excess_training: float  # seconds, over its steps at the learned speed
    slack: float  # seconds before the cutoff that were planned for nothing
    late: bool
    staleness: int | None  # None: not in a model when the run ended
    bound: int  # on the staleness, if it is not late and not behind
    behind: bool  # the cutoff after its base was made had passed when it took its work: the next model was not there
    first: bool  # of its facility: nothing was learned yet

    @property
    def excess(self) -> float:
        return self.excess_overhead + self.excess_training


def parts_of(path: Path) -> list[Part]:
    """Those of one ledger whose update arrived, in the order of arrival."""
    posted: dict[str, list[tuple[float, Standing]]] = {}
    taken: dict[UpdateKey, tuple[float, Assignment]] = {}
    next_cutoff: dict[tuple[str, int], float] = {}  # when a version was posted first
    seen: set[str] = set()
    found: list[Part] = []
    with LedgerReader(path) as ledger:
        stale = {
            (row["job"], row["attempt"], row["part"]): row["staleness"]
            for row in ledger.rows("SELECT job, attempt, part, staleness FROM updates WHERE fate = 'aggregated'")
        }
        for event, commands in ledger.steps():
            if isinstance(event, JobStarted | WorkTaken) and event.bound is not None:
                part = event.part if isinstance(event, WorkTaken) else 0
                taken[event.job_id, event.attempt, part] = event.at - event.ago, event.bound
            if isinstance(event, UpdateArrived) and event.receipt.key in taken:
                at, work = taken.pop(event.receipt.key)
                standing = _bound_from(posted.get(facility_of(event.receipt.job_id), []), at, work)
                if standing is not None:
                    facility = facility_of(event.receipt.job_id)
                    behind = at >= next_cutoff[facility, work.base_version]
                    known = stale.get(event.receipt.key)
                    found.append(_part(event, at, work, standing, known, behind, facility not in seen))
                    seen.add(facility)
            for kind, body in commands:
                if kind == "PostWork":
                    command = parse(kind, json.loads(body))
                    assert isinstance(command, PostWork)
                    posted.setdefault(command.facility, []).append((event.at, command.standing))
                    next_cutoff.setdefault((command.facility, command.standing.version), command.standing.next_cutoff)
    return found


def _bound_from(posted: Sequence[tuple[float, Standing]], at: float, work: Assignment) -> Standing | None:
    """The newest that was posted by then with this version."""
    fitting = (standing for when, standing in reversed(posted) if when <= at and standing.version == work.base_version)
    return next(fitting, None)


def _part(
    event: UpdateArrived,
    at: float,
    work: Assignment,
    standing: Standing,
    staleness: int | None,
    behind: bool,
    first: bool,
) -> Part:
    assert work.cutoff is not None
    receipt = event.receipt
    learned = standing.overhead
    if receipt.part and standing.stay_overhead is not None:
        learned = standing.stay_overhead
    own = receipt.train_seconds * (1 - receipt.ahead / receipt.steps_done)  # the others were done before it took work
    planned = work.steps / standing.steps_per_second
    least = standing.min_steps / standing.steps_per_second + learned
    return Part(
        excess_overhead=event.at - at - own - learned,
        excess_training=own - planned,
        slack=work.cutoff - at - planned - learned,
        late=event.at > work.cutoff,
        staleness=staleness,
        bound=0 if least + standing.patience < standing.round_length else ceil(least / standing.round_length),
        behind=behind,
        first=first,
    )


def summary(parts: Sequence[Part]) -> dict[str, Any]:
    """What is told of some parts. `markov` bounds the share of late ones: the mean of excess over slack."""
    learned = [part for part in parts if not part.first]
    settled = [part for part in parts if part.staleness is not None]
    on_time = [part for part in settled if not part.late and not part.behind]
    return {
        "parts": len(parts),
        "late": _share(part.late for part in parts),
        "late_once_learned": _share(part.late for part in learned),
        "markov": _share(min(1.0, max(0.0, part.excess) / part.slack) if part.slack > 0 else 1.0 for part in parts),
        "without_slack": _share(part.slack <= 0 for part in parts),
        "slack": _quantiles(part.slack for part in parts),
        "excess": _quantiles(part.excess for part in learned),
        "excess_overhead": _quantiles(part.excess_overhead for part in learned),
        "excess_training": _quantiles(part.excess_training for part in learned),
        "behind": _share(part.behind for part in parts),
        "staleness": max((part.staleness or 0 for part in settled), default=0),
        "above_bound": _share((part.staleness or 0) > part.bound for part in settled),
        "above_bound_if_neither_late_nor_behind": _share((part.staleness or 0) > part.bound for part in on_time),
    }


def _share(which: Iterable[float]) -> float:
    found = list(which)
    return fmean(found) if found else 0.0


def _quantiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: ordered[min(len(ordered) - 1, int(p * len(ordered)))] for name, p in _SHARES.items()}


_SHARES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fedqueue_reproduction.lateness", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders or ledgers; taken together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, with command and machine")
    parser.add_argument("--note", default="", help="a sentence for that file: what the runs are")
    args = parser.parse_args(arguments)
    parts = []
    for run in args.runs:
        path = ledger_of(run) if run.exists() else None
        if path is None:
            raise SystemExit(str(ConfigError(f"{run}: is no run folder and no ledger; name some")))
        parts += parts_of(path)
    if len(parts) < ENOUGH:
        raise SystemExit(
            f"{len(parts)} parts of jobs that bound their work; {ENOUGH} are needed: name more runs of jit"
        )
    found = rounded(summary(parts))
    if args.json is not None:
        command = [
            "python",
            "-m",
            "fedqueue_reproduction.lateness",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
        write_json(args.json, {**provenance(command), "note": args.note, **found})
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
