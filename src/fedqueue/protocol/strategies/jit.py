"""Just in time: a job takes its work when it starts, and the next job queues while this one runs.

    keep work posted at every facility: the newest model, the coming cutoffs, the overhead learned so far
    a job that starts at t binds itself:  E = floor(c * (cutoff - overhead - t)) from the newest model
    while it runs, the next job is submitted, so that waiting overlaps training
    at every cutoff:  w += (1 / S) * sum p * phi(tau) * Delta over what has arrived

The wait adds no staleness, nothing is guessed about it, and almost nothing misses its cutoff. Options let the forecast
of the wait set the wall time to ask for, and the round length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from fedqueue.protocol.aggregation import Update
from fedqueue.protocol.budget import longest_stay
from fedqueue.protocol.codec import one_of, share
from fedqueue.protocol.contract import Assignment, JobId, Standing, facility_of
from fedqueue.protocol.messages import PostWork
from fedqueue.protocol.pace import Pace, choose_round_length, shortest_round
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.state import JobState
from fedqueue.protocol.strategies.base import Why
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.strategies.rounds import RoundOptions, RoundStrategy
from fedqueue.protocol.strategies.staying import AT_ONCE

PATIENCE: Final = 1.25  # of a job that stays, for its next model, over the time that this should take
FEW_STEPS: Final = 3  # fewer are not worth going on for
LIKELY: Final = (0.05, 0.95)  # the quantiles of the wait between which a job is likely to start


@dataclass(frozen=True, kw_only=True)
class JitOptions(RoundOptions):
    stay: float | Literal["off", "auto"] = "auto"
    absent: float = 0.7
    pipeline: Literal["timed", "independent", "chain", "off"] = "timed"
    """How the next job is submitted while one runs. timed: so that it should start when this one ends, by the
    forecast (`lead`; of jobs that stay, `stay_lead`). independent: at once. chain: at once, eligible when this one ends
    (the scheduler's dependency). off: when this one's update is in, or this one is over, if it stays."""
    lead: float = 0.5  # timed: the share of delays that the head start covers
    patience: float = 0.1  # share of a round: a job that starts so close to a cutoff waits for the model made there
    wall: Literal["longest", "forecast"] = "longest"
    """Wall time to ask for: the longest stay there can be, or the longest over the starts that are likely."""
    rounds: Literal["fixed", "forecast", "auto"] = "auto"
    """forecast: at every cutoff the shortest round length that keeps facilities busy. auto: by what facilities can do,
    what a model costs to make and move, scores and agreement; round_length counts until all that is known."""
    busy: float = 0.9  # rounds by forecast: the share of their time, on average
    between: Literal["wait", "train", "auto"] = "auto"
    """What a job that stays does until its next model is there. train: it goes on from its own weights, and what it
    learns is added to that model. auto: train, if there is time for a few steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "pipeline", ("timed", "independent", "chain", "off"))
        one_of(self, "wall", ("longest", "forecast"))
        one_of(self, "rounds", ("fixed", "forecast", "auto"))
        one_of(self, "between", ("wait", "train", "auto"))
        share(self, "lead", "patience", "busy")


class Jit(RoundStrategy):
    name = "jit"
    Options = JitOptions
    options: JitOptions
    observes_starts = True
    binds_late = True
    shares_moments = True

    def __init__(self, plan: Plan, options: JitOptions) -> None:
        super().__init__(plan, options)
        self._pace = Pace()
        self._making_seconds = 0.0  # that the newest model took

    def begin(self) -> None:
        if self.options.rounds == "auto":
            self.round_length = self.next_round_length()
        super().begin()

    @property
    def asks_for_agreement(self) -> bool:
        return self.options.rounds == "auto"

    def scored(self, score: float | None) -> None:
        self._pace.scored(score)

    def agreed(self, agreement: float | None) -> None:
        self._pace.agreed(agreement)
        self._making_seconds = max(0.0, self.now - self.last_cutoff)

    def start_round(self) -> None:
        for facility in self.facilities.values():
            self._post(facility)
        for facility in self.free():
            self._submit(facility)

    def idle(self, facility: Facility, why: Why) -> None:
        self._post(facility)
        self._submit(facility)

    def started(self, facility: Facility, job: JobState) -> None:
        if job.stays:
            self._post(facility)  # the jobs before it take no more work
        if self.options.pipeline != "timed":
            self._follow(facility, job)
        elif not job.stays and job.cutoff is not None:
            head_start = self.forecast(facility).quantile(self.options.lead)
            self.set_timer(f"submit/{job.order.job_id}", max(self.now, job.cutoff - head_start))

    def arrived(self, facility: Facility, update: Update) -> None:
        super().arrived(facility, update)
        if self.options.stay != "off" and facility.posted is None:  # it is measured now, and its job waits there
            self._post(facility)
        if self.options.pipeline != "timed" and facility.status == "active":
            for job in list(facility.jobs.values()):  # one that began before this one ended
                self._follow(facility, job)

    def order_ahead(self, facility: Facility) -> None:
        self._submit(facility)

    @property
    def stay_lead(self) -> float:
        if self.options.pipeline == "timed":
            return super().stay_lead
        return AT_ONCE if self.options.pipeline == "independent" else 0.0  # a chained one waits from the end on

    def _follow(self, facility: Facility, job: JobState) -> None:
        """Submit the job after this one, if it runs and is the only one out."""
        running_alone = job.started_at is not None and len(facility.jobs) == 1 and facility.profile.max_jobs > 1
        if self.holding or not running_alone or facility.steps_per_second is None:
            return
        if facility.posted is None:  # its first job has been measured, and its update is on the way
            self._post(facility)
        if self.options.pipeline == "chain":
            self._submit(facility, after=job.order.job_id)
        elif self.options.pipeline != "off":
            self._submit(facility)

    def timer(self, key: str) -> None:
        kind, _, job = key.partition("/")
        if kind != "submit":
            return super().timer(key)
        facility = self.facilities[facility_of(job)]
        if job in facility.jobs and facility.status == "active":
            self._follow(facility, facility.jobs[job])
        return None

    def resumed(self) -> None:
        # Agents turned the posted cutoffs into their own clocks before the run clock stood still.
        for facility in self.facilities.values():
            facility.posted = None
            self._post(facility)

    def next_round_length(self) -> float:
        active = [f for f in self.facilities.values() if f.status == "active"]
        if self.options.rounds == "fixed" or not active:
            return self.round_length
        if self.options.rounds == "auto":
            return self._auto_length(active)
        self.tell_waits()
        return choose_round_length(
            self.options.round_length or self.plan.round_length,
            [self.forecast(f) for f in active],
            max(f.overhead for f in active),
            self.options.busy,
        )

    def _auto_length(self, active: Sequence[Facility]) -> float:
        times, speeds = self._pace.next(), [f.steps_per_second for f in active]
        least = [self.options.min_steps / speed for speed in speeds if speed is not None]
        if len(least) < len(active) or not all(f.knows_turns for f in active):
            return self.options.round_length or self.plan.round_length
        return times * shortest_round(least, [f.up + self._making_seconds + f.down for f in active])

    def _post(self, facility: Facility) -> None:
        wanted = facility.status in ("active", "suspended") or facility.jobs
        if facility.steps_per_second is None or not wanted:
            return
        standing = self._standing(facility, facility.steps_per_second)
        if standing != facility.posted:
            facility.posted = standing
            self.want(PostWork(facility=facility.name, standing=standing))

    def _standing(self, facility: Facility, steps_per_second: float) -> Standing:
        return Standing(
            version=self.ready,
            next_cutoff=self.next_cutoff,
            round_length=self.round_length,
            steps_per_second=steps_per_second,
            overhead=facility.overhead,
            min_steps=self.options.min_steps,
            learning_rate=self.plan.learning_rate,
            lr_scaling=self.options.lr_scaling,
            patience=self._patience(facility),
            least_steps=self._least_steps() if self.options.lr_scaling == "inverse" else None,
            stay_overhead=None if self.options.stay == "off" else facility.up,
            from_job=self._from_job(facility),
            ahead=self._trains_ahead(facility, steps_per_second),
        )

    def _trains_ahead(self, facility: Facility, steps_per_second: float) -> bool:
        if self.options.stay == "off" or self.options.between != "auto":
            return self.options.stay != "off" and self.options.between == "train"
        if not facility.knows_turns:  # it was measured in a few steps, and a whole round is still before it
            return True
        waits = facility.up + self._making_seconds + facility.down
        return waits * steps_per_second >= FEW_STEPS

    def _from_job(self, facility: Facility) -> int:
        """Jobs before this one end when they have handed in: all of them, where no more work is wanted."""
        if self.options.stay == "off":
            return 0
        if facility.status == "drained":
            return facility.state.ordered
        return max((j.sequence for j in facility.jobs.values() if j.phase == "running"), default=0)

    def _patience(self, facility: Facility) -> float:
        """Seconds. A job that was ordered when rounds were shorter must not wait its wall time away."""
        seconds = self.options.patience * self.round_length
        if self.options.stay != "off":  # the next model takes so long to make and to come, and there are many rounds
            to_come = PATIENCE * (self._making_seconds + facility.down)
            seconds = max(seconds, min(to_come, self.round_length / 2))
        if self.options.rounds == "fixed":
            return seconds
        return min([seconds, *(job.wall_seconds / 4 for job in facility.jobs.values())])

    def _at_most(self, facility: Facility, steps_per_second: float, after: JobId | None) -> float:
        """Seconds from the start of a job to the cutoff it aims at."""
        standing = self._standing(facility, steps_per_second)
        if self.options.wall == "longest" or after is not None:  # it is not known when a chained job becomes eligible
            return longest_stay(standing, self.now, inf)
        forecast = self.forecast(facility)
        earliest, latest = (self.now + forecast.quantile(p) for p in LIKELY)
        # One that starts at another moment may have to wait for a model, and then has its least steps to do.
        least = 2 * standing.patience + standing.min_steps / steps_per_second
        return min(max(least, longest_stay(standing, earliest, latest)), longest_stay(standing, self.now, inf))

    def _least_steps(self) -> int | None:
        return min((f.newest_steps for f in self.facilities.values() if f.newest_steps), default=None)

    def _submit(self, facility: Facility, after: JobId | None = None) -> None:
        if facility.steps_per_second is None:  # its first job is a short one, to measure it
            work = Assignment(
                base_version=self.ready, steps=self.options.min_steps, learning_rate=self.plan.learning_rate
            )
            self.submit(facility, work, round=self.round)
            return
        self.submit(
            facility,
            None,
            round=self.round,
            at_most=self._at_most(facility, facility.steps_per_second, after),
            after=after,
            expected_delay=self.forecast(facility).mean,
        )
