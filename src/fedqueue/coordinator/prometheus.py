"""Figures of runs for Prometheus, by its official client. Labels are runs that are served, their facilities, and words
of fixed lists: nothing that somebody sends becomes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from fedqueue.coordinator.access import Access
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.status import status
from fedqueue.protocol.service import FacilityStatus, RunStatus
from fedqueue.protocol.state import PHASES

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric

Family = TypeVar("Family", bound="GaugeMetricFamily | CounterMetricFamily")
Rows = Iterable[tuple[Sequence[str], float | None]]
"""Values by their labels; None: nobody knows it now."""

STATES: Final = ("waiting", "running", "paused", "hindered", "over")

OfFacility = Mapping[str, tuple[str, Callable[[FacilityStatus], float | None]]]
"""By name: what it is, and how it is read."""

OF_FACILITIES: Final[OfFacility] = {
    "facility_heard_seconds_ago": ("Since its agent was heard of", lambda facility: facility.heard_seconds_ago),
    "expected_delay_seconds": ("The forecast of its next wait", lambda facility: facility.expected_delay),
    "steps_per_second": ("As fast as it trains", lambda facility: facility.steps_per_second),
}
COUNTED_OF_FACILITIES: Final[OfFacility] = {
    "node_seconds": ("That its nodes were held", lambda facility: facility.node_seconds),
    "idle_node_seconds": ("Of those, without work", lambda facility: facility.idle_node_seconds),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run, at one moment."""

    name: str
    status: RunStatus
    state: str  # one of STATES
    jobs: Mapping[str, int]
    updates: Mapping[str, int]
    phases: Mapping[str, Counter[str]]  # of open jobs, by facility
    away: frozenset[str]
    version: int


def measured(coordinator: Coordinator, access: Access) -> Measured:
    """In the coordinator's thread."""
    run, found = coordinator.state, coordinator.tally.summary(strategy="", seed=0, wall_seconds=0.0)
    return Measured(
        name=coordinator.folder.name,
        status=status(coordinator, access),
        state=_state(coordinator),
        jobs=found["jobs"],
        updates=found["updates"],
        phases={name: Counter(job.phase for job in here.jobs.values()) for name, here in run.facilities.items()},
        away=frozenset(name for name, here in run.facilities.items() if here.away),
        version=run.newest,
    )


def _state(coordinator: Coordinator) -> str:
    run = coordinator.state
    if run.stopped is not None:
        return "over"
    if not run.started:
        return "waiting"
    return "hindered" if run.hindrance else "paused" if run.paused else "running"


def exposition(runs: Sequence[Measured]) -> bytes:
    """In the text format. A `ModuleNotFoundError` where the client is not installed."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(runs))
    return generate_latest(registry)


class _Collector:
    def __init__(self, runs: Sequence[Measured]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, about: str, rows: Rows, *labels: str) -> Metric:
            return _filled(GaugeMetricFamily(f"fedqueue_{name}", about, labels=["run", *labels]), rows)

        def counter(name: str, about: str, rows: Rows, *labels: str) -> Metric:
            return _filled(CounterMetricFamily(f"fedqueue_{name}", about, labels=["run", *labels]), rows)

        runs = self._runs
        sites = [(run, facility) for run in runs for facility in run.status.facilities]
        yield gauge(
            "run_state",
            "1: the run is in this state",
            (((run.name, state), float(state == run.state)) for run in runs for state in STATES),
            "state",
        )
        yield gauge("run_clock_seconds", "On the run clock", (((run.name,), run.status.run_seconds) for run in runs))
        yield gauge("model_version", "The newest model", (((run.name,), float(run.version)) for run in runs))
        yield gauge("score", "Of the newest model that was scored", (((run.name,), run.status.score) for run in runs))
        yield counter(
            "jobs",
            "Jobs so far",
            (((run.name, what), float(n)) for run in runs for what, n in run.jobs.items()),
            "outcome",
        )
        yield counter(
            "updates",
            "Updates so far, by their fate",
            (((run.name, what), float(n)) for run in runs for what, n in run.updates.items()),
            "fate",
        )
        yield gauge(
            "open_jobs",
            "Jobs that are out",
            (((r.name, f.name, phase), float(r.phases[f.name][phase])) for r, f in sites for phase in PHASES),
            "facility",
            "phase",
        )
        yield gauge(
            "facility_away",
            "1: the coordinator does not hear of it",
            (((run.name, f.name), float(f.name in run.away)) for run, f in sites),
            "facility",
        )
        for name, (about, value) in OF_FACILITIES.items():
            yield gauge(name, about, (((run.name, f.name), value(f)) for run, f in sites), "facility")
        for name, (about, value) in COUNTED_OF_FACILITIES.items():
            yield counter(name, about, (((run.name, f.name), value(f)) for run, f in sites), "facility")


def _filled(family: Family, rows: Rows) -> Family:
    for labels, value in rows:
        if value is not None:
            family.add_metric(labels, value)
    return family
