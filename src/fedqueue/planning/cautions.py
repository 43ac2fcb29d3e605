"""What is uncertain about a plan, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from fedqueue.planning.measure import DAY
from fedqueue.planning.places import Place, jobs_alike
from fedqueue.planning.search import Setting, Trial, Tried
from fedqueue.planning.text import amount, duration

if TYPE_CHECKING:
    from fedqueue.planning.advice import Rival

FEW: Final = 200  # jobs of a shape
TWICE: Final = 1.2  # updates of a facility a round, from which its jobs must have overlapped
LESS: Final = 3.0  # times longer that shorter jobs waited than longer ones, from which it is strange
DRIFT: Final = 1.5  # times longer in one half of the history than in the other


def cautions(
    setting: Setting,
    places: Sequence[Place],
    best: Trial,
    rivals: Sequence[Rival],
    tried: Sequence[Tried],
    lengths: Sequence[float],
    asked: Sequence[Place],
    scaling: float,
) -> tuple[str, ...]:
    found = []
    for place, before in zip(places, asked, strict=True):
        found.extend(_of_history(place, setting, best))
        if place.settings.nodes != before.settings.nodes:
            found.append(
                f"{place.name}: the speed of {place.settings.nodes} nodes is guessed from that of "
                f"{before.settings.nodes} as nodes^{scaling:g} (--scaling); measure it"
            )
    length = best.candidate.length
    twice = [
        name
        for name, share in best.shares().items()
        if best.candidate.timed and share.updates * length > TWICE * share.days * DAY
    ]
    if twice:
        found.append(
            f"two jobs of {' and of '.join(twice)} often run at the same time, from the same model; "
            "--what-if max_jobs=1 says what that is worth"
        )
    if length == lengths[0]:
        found.append(f"the best round length is the shortest tried, {duration(length)} (--shortest)")
    elif length == lengths[-1]:
        found.append(f"the best round length is the longest tried, {duration(length)} (--longest)")
    for rival in rivals:
        gap = rival.against_best
        near = rival.trial is not best and gap.mean is not None and gap.mean + (gap.half_width or 0.0) >= 0
        if near:
            found.append(
                f"{rival.trial.candidate.strategy} is as good within the spread over {gap.count} starting points"
            )
    most = max(tried, key=lambda one: one.steps)
    if setting.worth.returns < 1 and most.candidate.length != length:
        found.append(
            f"if every local step counted the same (--returns 1), {most.candidate.strategy} with "
            f"{duration(most.candidate.length)} would do most: {amount(most.steps)} steps a day, "
            f"{amount(best.mean('steps'))} as recommended"
        )
    return tuple(found)


def _of_history(place: Place, setting: Setting, best: Trial) -> list[str]:
    name = place.name
    if place.log is None:
        kind = place.settings.queue.kind if place.settings.queue is not None else "none"
        return [f"{name}: has no history; its waits are those of the config's queue ({kind})"]
    found = []
    like = place.log.of_shape(place.procs)
    span = float(place.log.submit[-1] - place.log.submit[0])
    if jobs_alike(place.log, place.procs) < FEW:
        found.append(f"{name}: its history has only {len(like)} jobs of this size")
    if span < setting.days * DAY:
        found.append(
            f"{name}: its history covers {span / DAY:.0f} days, the plan {setting.days:g}; it is begun anew at its end"
        )
    stays = place.stays
    if stays is not None and any(
        p.wall_seconds < stays.chosen.wall_seconds and p.wait_mean > LESS * stays.chosen.wait_mean for p in stays.points
    ):
        found.append(
            f"{name}: jobs that asked for {duration(stays.chosen.wall_seconds)} waited less than shorter ones: perhaps "
            "they had a queue of their own; see that yours may use it"
        )
    waits = place.jobs.like(best.candidate.wall_seconds(place))
    middle = place.log.submit[0] + span / 2
    early = np.array([w for s, w in zip(waits.submits, waits.waits, strict=True) if s < middle])
    late = np.array([w for s, w in zip(waits.submits, waits.waits, strict=True) if s >= middle])
    if len(early) and len(late):
        means = float(early.mean()), float(late.mean())
        if max(means) > DRIFT * min(means):
            found.append(
                f"{name}: jobs like ours waited {duration(means[0])} on average in the first half of the history and "
                f"{duration(means[1])} in the second"
            )
    return found
