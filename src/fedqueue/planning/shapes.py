"""The size of a facility's jobs: larger ones train faster, cost more, and wait as jobs of that size did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

from fedqueue.planning.candidates import ONCE, Candidate
from fedqueue.planning.places import Place, alike, jobs_alike
from fedqueue.planning.search import Scenario, Searcher, Trial

FACTORS: Final = (0.5, 1.0, 2.0, 4.0)  # of the config's nodes
MANY: Final = 200  # jobs that the history must have of another size
PAYS: Final = 1.2
"""A size that takes twice the node-hours must bring so many times the work."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A size that a facility's jobs could have, and what just in time makes of it there, alone."""

    nodes: int
    procs: tuple[int, int] | None  # that the history's jobs were taken by
    jobs: int  # of the history that are like it
    wait_median: float
    work: float  # effective steps a day
    node_hours: float  # a day

    @property
    def score(self) -> float:
        """Of two sizes the one with the higher score pays."""
        if self.work <= 0 or self.node_hours <= 0:
            return float("-inf")
        return log2(self.work) - log2(PAYS) * log2(self.node_hours)


def sizes_of(place: Place, scaling: float) -> list[Place]:
    """The place with every size that its history has enough jobs of; as it is, if it has no history."""
    if place.log is None:
        return [place]
    found = [place]
    for factor in FACTORS:
        nodes = place.settings.nodes * factor
        if factor == 1.0 or nodes < 1 or nodes != int(nodes):
            continue
        if place.procs is not None and jobs_alike(place.log, alike(int(nodes) * place.per_node)) >= MANY:
            found.append(place.with_nodes(int(nodes), scaling))
    return found


def choose(
    places: Sequence[Place], lengths: Sequence[float], scaling: float, searcher: Searcher
) -> tuple[tuple[Place, ...], dict[str, list[Shape]]]:
    """Each facility with the size that pays, by itself under just in time, and what the others would have given."""
    options = {place.name: sizes_of(place, scaling) for place in places}
    few = lengths[:: max(1, len(lengths) // 4)]
    tries = [Candidate("jit", length, (("pipeline", "independent"), *ONCE)) for length in few]
    scenarios = {
        f"{name}/{place.settings.nodes}": Scenario((place,), tries)
        for name, several in options.items()
        for place in several
        if len(several) > 1
    }
    trials = searcher.short(scenarios, "job sizes") if scenarios else {}
    chosen, tables = [], {}
    for place in places:
        several = options[place.name]
        if len(several) == 1:
            chosen.append(place)
            continue
        shapes = {p.settings.nodes: _shape(p, trials[f"{p.name}/{p.settings.nodes}"][0]) for p in several}
        best = max(several, key=lambda p: shapes[p.settings.nodes].score)
        chosen.append(best)
        tables[place.name] = [shapes[nodes] for nodes in sorted(shapes)]
    return tuple(chosen), tables


def _shape(place: Place, best: Trial) -> Shape:
    assert place.log is not None
    return Shape(
        nodes=place.settings.nodes,
        procs=place.procs,
        jobs=jobs_alike(place.log, place.procs),
        wait_median=place.jobs.like(best.candidate.wall_seconds(place)).quantile(0.5) * place.factor,
        work=best.mean("work"),
        node_hours=best.mean("node_hours"),
    )
