"""FedAvg: everybody trains from the same model; when the last is back, the models are averaged. It blocks.

w += sum over all k of p * (w_k - w)

Whoever is out of reach is not waited for. Nor is, in real runs, whose job is overdue: nobody may stall the others by
saying for ever that it waits, runs or hands in. What comes of it while the round is open counts all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fedqueue.protocol.aggregation import Update, normalised
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.strategies.base import Why
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions, FixedSteps
from fedqueue.protocol.strategies.roster import Facility

LONGER = 4.0
"""A job may wait so many times as long as any did there before."""
BEGINNINGS = 3.0
"""It may begin anew, with all that it is given, so many times in all: its scheduler may have taken it back."""


class FedAvg(FixedSteps):
    name = "fedavg"
    Options = FixedStepOptions
    sums_several = True

    def __init__(self, plan: Plan, options: FixedStepOptions) -> None:
        super().__init__(plan, options)
        self._awaited: dict[str, tuple[float, float]] = {}  # since when, and how long each of its stages may take
        self._overdue: set[str] = set()  # in this round
        self._back: list[Update] = []

    def begin(self) -> None:
        self._start_round()

    def model_ready(self) -> None:
        self._start_round()

    def arrived(self, facility: Facility, update: Update) -> None:
        if facility.name not in {*self._awaited, *self._overdue} or update.staleness(self.made):
            # The others went on while it was out of reach.
            self.settle(update, "expired", reason="its round closed without it", staleness=update.staleness(self.made))
            return
        self._awaited.pop(facility.name, None)
        self._overdue.discard(facility.name)
        self._back.append(update)
        self._close_if_complete()

    def idle(self, facility: Facility, why: Why) -> None:
        if facility.name in self._awaited:
            self.dispatch(facility)
        else:
            self._start_if_nobody_works()

    def lost(self, facility: Facility) -> None:
        if self._awaited.pop(facility.name, None) is not None:
            self._close_if_complete()
            self._start_if_nobody_works()

    def timer(self, key: str) -> None:
        """overdue/ROUND/FACILITY"""
        round, _, name = key.removeprefix("overdue/").partition("/")
        if name not in self._awaited or int(round) != self.made:
            return
        facility = self.facilities[name]
        until, why = self._waited_for_until(facility)
        if self.now < until:
            self.set_timer(key, until)
        else:
            self.record("overdue", facility=name, reason=why)
            self._overdue.add(name)
            self.lost(facility)

    def _waited_for_until(self, facility: Facility) -> tuple[float, str]:
        """Second on the run clock, and what is said of its job when that is over. Times are those of events, which the
        facility cannot choose but by being late."""
        since, patience = self._awaited[facility.name]
        if not facility.jobs:
            return since + patience, "no job can be ordered of it"
        *_, job = facility.jobs.values()
        wall = min(job.wall_seconds, job.order.wall_seconds + patience)
        if job.phase == "running":
            until, why = (job.held_since or job.since) + wall + patience, "has run for longer than its wall time"
        elif job.phase == "ended":
            until, why = job.since + patience, "has ended, and its update has not come"
        else:
            until, why = job.since + patience, "has not started, and no job waited for so long there before"
        return min(until, since + BEGINNINGS * (patience + wall)), f"{job.order.job_id} {why}"

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        self._back = [update for update in self._back if update not in updates]
        if updates:
            self._start_if_nobody_works()

    def _start_if_nobody_works(self) -> None:
        """Nobody was there when the round should have begun, or who was is lost: with those who are there."""
        if not self._awaited and not self._back and self.made == self.ready:
            self._start_round()

    def _start_round(self) -> None:
        self._overdue.clear()
        for facility in self.free():
            overdue = self.plan.overdue_seconds
            self._awaited[facility.name] = self.now, max(overdue or inf, LONGER * facility.state.longest_wait)
            self.dispatch(facility)
            if overdue is not None:
                self.set_timer(f"overdue/{self.made}/{facility.name}", self._waited_for_until(facility)[0])

    def _close_if_complete(self) -> None:
        if self._awaited or not self._back:
            return
        if self.too_few(update.facility for update in self._back):
            back, self._back = self._back, []
            for update in back:
                self.settle(update, "expired", reason="too few facilities were back for the sum of masked updates")
            self._start_if_nobody_works()
            return
        weights = normalised([self.facilities[u.facility].profile.data_weight for u in self._back])
        self.combine(list(zip(self._back, weights, strict=True)))
        self._back = []

    def combine(self, weighed: Sequence[tuple[Update, float]]) -> None:
        """Ask for the next model from what is back; its variations differ here."""
        self.aggregate(weighed)
