"""One run of an experiment as a record: its figures, its curve, and on request every arrival and forecast error.

Records are what results files hold. They are plain values, with floats of six significant digits: enough for any
table, and the same on every machine that counts the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from fedqueue.config import Config
from fedqueue.engine import Listener
from fedqueue.metrics import Tally, target_key
from fedqueue.protocol.contract import JobId, Order, facility_of
from fedqueue.protocol.messages import AssignWork, Command, Event, ModelScored, Record, SubmitJob, UpdateArrived
from fedqueue.protocol.plan import AS_PUBLISHED
from fedqueue.protocol.predict.base import quantile_of
from fedqueue.protocol.state import RunState
from fedqueue.runs import rounded
from fedqueue.sim.runner import Learned, learning_of, simulate

Point = tuple[float, float, int, int]
"""Of a curve: seconds, score, local steps so far, model transfers so far."""

_DECIDE: Final = ("run", "facility", "task", "strategy", "failures", "fault", "simulator")
"""The sections of a config that decide what a simulated run does."""

_AS_BEFORE: Final[dict[str, Any]] = {
    "stay": "off",
    "stay_lead": 0.5,
    "absent": 0.0,
    "between": "auto",
    "wall_power": 0.0,
    "by_requested": False,
    "known_waits": [],
}
"""Keys that came later, with the values under which a run is what it was before there were any."""


def run_record(
    config: Config,
    learned: Learned | None = None,
    *,
    keep: Collection[str] = (),
    listeners: Sequence[Listener] = (),
) -> dict[str, Any]:
    """Run it, without a folder; `keep` names what the record also holds (`experiment.Kept`)."""
    recorder = Recorder(config)
    if learned is None and "answers" in keep:
        learned = learning_of(config)
    first = learned[0].score(0) if learned is not None and "answers" in keep else None
    summary = simulate(config, listeners=[recorder, *listeners], learned=learned)
    del summary["strategy"], summary["seed"], summary["score"]["not_finite"]
    record: dict[str, Any] = rounded({**summary, **recorder.figures()})
    details = recorder.details()
    if "answers" in keep and learned is not None:
        details["answers"] = rounded(learned[0].examine())
        details["first_loss"] = None if first is None else first["loss"]
    wanted = {*keep, *(["first_loss"] if "answers" in keep else [])}
    kept: dict[str, Any] = rounded({name: details[name] for name in details if name in wanted})
    return record | kept


def fingerprint(config: Config) -> str:
    """Of all that decides what a run does: equal fingerprints, equal runs. Where it lies, what it is called, on what
    device it runs and what other strategies would do are left out, and so are keys that are not set."""
    tree = dataclasses.asdict(config)
    tree = {name: tree[name] for name in _DECIDE}
    tree["strategy"] = dataclasses.asdict(config.options())
    del tree["run"]["name"], tree["task"]["device"]
    if config.model.moments == "shared":
        tree["moments"] = "shared"
    if config.trust != AS_PUBLISHED:
        tree["trust"] = dataclasses.asdict(config.trust)
    text = json.dumps(_set_ones(tree), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Recorder:
    """A listener that follows one run."""

    def __init__(self, config: Config) -> None:
        self._round_length = getattr(config.options(), "round_length", None) or config.run.round_length
        self._targets = config.run.targets
        # Of its own: what a run has cost until a model is scored is asked in the middle of it.
        self._state = RunState([facility.name for facility in config.facility])
        self._tally = Tally.of(config, self._state, targets=())
        self._orders: dict[JobId, tuple[float, Order]] = {}  # when it was submitted
        self._curve: list[Point] = []
        self._node_seconds_to: dict[str, float] = {}  # by target
        self._arrivals: list[float] = []
        self._errors: dict[str, list[float]] = {facility.name: [] for facility in config.facility}
        self._facilities = {facility.name: FacilityRecord() for facility in config.facility}
        self._losses: list[tuple[float, float]] = []  # of the models that were scored, where that is their score
        self._staleness: Counter[int] = Counter()
        self._deferred: list[float] = []  # weights

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self._state(event, commands)
        for command in commands:
            if type(command) is SubmitJob:
                self._orders[command.order.job_id] = event.at, command.order
                self._facilities[command.order.facility].submitted += 1
            elif type(command) is AssignWork:
                self._facilities[facility_of(command.job_id)].steps.append(command.assignment.steps)
            elif type(command) is Record and command.facts.get("fate") == "aggregated":
                theirs = self._facilities[facility_of(str(command.facts["job"]))]
                theirs.admitted += not command.facts["deferred"]
                theirs.deferred += bool(command.facts["deferred"])
                self._staleness[int(command.facts["staleness"] or 0)] += 1
                if command.facts["deferred"]:
                    self._deferred.append(float(command.facts["weight"] or 0.0))
        if type(event) is ModelScored and (score := event.metrics["score"]) is not None:
            spent = self._tally.summary(strategy="", seed=0, wall_seconds=0.0)
            self._curve.append((event.at, score, spent["local_steps"], spent["model_transfers"]))
            if event.metrics.get("loss") == -score:
                self._losses.append((event.at, -score))
            for name, theirs in self._facilities.items():
                if (loss := event.metrics.get(f"loss/{name}")) is not None:
                    theirs.losses.append((event.at, loss))
            for target in self._targets:
                if score >= target:
                    self._node_seconds_to.setdefault(target_key(target), spent["node_seconds"])
        elif type(event) is UpdateArrived and event.receipt.job_id in self._orders:
            submitted_at, order = self._orders.pop(event.receipt.job_id)
            self._arrivals.append((event.at - submitted_at) / self._round_length)
            self._facilities[order.facility].delays.append(self._arrivals[-1])
            if order.expected_delay is not None:
                self._errors[order.facility].append(event.receipt.admission_delay - order.expected_delay)

    def figures(self) -> dict[str, Any]:
        """What a summary does not have."""
        reached = {target_key(t): next((p for p in self._curve if p[1] >= t), None) for t in self._targets}
        return {
            "interpolated": {target_key(target): interpolate(self._curve, target) for target in self._targets},
            "movement_to": {name: None if point is None else point[3] for name, point in reached.items()},
            "node_seconds_to": {name: self._node_seconds_to.get(name) for name in reached},
            "deferred_weight": fmean(self._deferred) if self._deferred else None,
            "arrival": {f"p{100 * share:.0f}": self._arrival(share) for share in (0.5, 0.9)},
            "curve": self._curve,
            **({"loss": self._loss()} if self._losses else {}),
        }

    def _loss(self) -> dict[str, float]:
        return {"final": self._losses[-1][1], "least": min(loss for _, loss in self._losses)}

    def _arrival(self, share: float) -> float | None:
        """Within so many round lengths after submission this share of the updates has arrived."""
        return quantile_of(sorted(self._arrivals), share) if self._arrivals else None

    def details(self) -> dict[str, Any]:
        """Everything that `keep` may ask for: arrivals in round lengths after submission, forecast errors (q - q-hat)
        in seconds, how many aggregated updates had which staleness, and what was seen of each facility."""
        return {
            "arrivals": [round(value, 3) for value in self._arrivals],
            "errors": {name: [round(value, 3) for value in values] for name, values in self._errors.items()},
            "staleness": {str(staleness): self._staleness[staleness] for staleness in sorted(self._staleness)},
            "facilities": {name: rounded(asdict(theirs)) for name, theirs in self._facilities.items()},
        }


@dataclass
class FacilityRecord:
    """What was seen of one facility."""

    submitted: int = 0
    """Jobs."""
    admitted: int = 0
    """Updates that counted when they were aimed to."""
    deferred: int = 0
    """Updates that counted later."""
    delays: list[float] = field(default_factory=list)
    """From submission to arrival, in round lengths."""
    steps: list[int] = field(default_factory=list)
    """That its jobs were given."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Second, and the loss of the model made then on this facility's own test questions."""


def interpolate(curve: Sequence[Point], target: float) -> float | None:
    """Seconds at which the straight line between the last model below the target and the first at or above it meets
    the target. The model before the first counts as 0 at second 0. None: no model reached it.

    >>> interpolate([(10.0, 0.8, 0, 0), (20.0, 1.0, 0, 0)], 0.9)
    15.0
    """
    before = (0.0, 0.0)
    for at, score, *_ in curve:
        if score >= target:
            return before[0] + (at - before[0]) * (target - before[1]) / (score - before[1])
        before = (at, score)
    return None


def _set_ones(value: Any) -> Any:
    """Without keys that are not set, and those that came later and have their values of before: a new key changes
    nothing."""
    if isinstance(value, dict):
        told = {key: item for key, item in value.items() if item is not None and item != _AS_BEFORE.get(key, ...)}
        return {key: _set_ones(item) for key, item in told.items()}
    if isinstance(value, list | tuple):
        return [_set_ones(item) for item in value]
    return value
