"""FedCompass: facilities are grouped so that those of a group arrive together, whatever their speed.

speed = seconds a step, waiting included; a moving average
a free facility joins the group whose expected arrival lets it do the most steps in [min, max];
if none does, it opens a group of its own
a group closes when all are back, or at its latest arrival (expected wait * latest_time_factor):
    w += sum (alpha / N) * s(tau) * Delta,  s(tau) = (1 + tau)^-a
who comes later waits in the general buffer for the next group that closes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor

from fedqueue.protocol.aggregation import Buffer, Update, polynomial_discount
from fedqueue.protocol.codec import at_least, more_than, share
from fedqueue.protocol.contract import Assignment
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.strategies.base import Strategy, Why
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.strategies.staying import StayOptions

QUICKEST = 1e-6
"""Seconds a step: by a coarse clock, work may come back in the instant in which it was sent."""


@dataclass(frozen=True, kw_only=True)
class FedCompassOptions(StayOptions):
    min_steps: int = 20
    max_steps: int = 200
    alpha: float = 0.5
    exponent: float = 0.5  # a
    speed_momentum: float = 0.6  # weight of the newest job in the speed
    latest_time_factor: float = 1.1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "min_steps", "latest_time_factor")
        at_least(self, self.min_steps, "max_steps")
        more_than(self, 0, "alpha")
        at_least(self, 0, "exponent")
        share(self, "speed_momentum")


@dataclass(slots=True)
class _Group:
    """Facilities that should arrive together."""

    number: int
    expected_at: float
    latest_at: float
    awaited: set[str] = field(default_factory=set)
    back: list[Update] = field(default_factory=list)


class FedCompass(Strategy):
    name = "fedcompass"
    Options = FedCompassOptions
    options: FedCompassOptions

    def __init__(self, plan: Plan, options: FedCompassOptions) -> None:
        super().__init__(plan, options)
        self._speed: dict[str, float] = {}  # seconds a step
        self._sent_at: dict[str, float] = {}
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._next_group = 0
        self._general = Buffer()

    def idle(self, facility: Facility, why: Why) -> None:
        # In a group it waits for the others; otherwise it is sent off again with the newest model. If its group waits
        # for it, its job failed, or stayed and ended before it took this work.
        self._leave_group(facility)
        if facility.name not in self._group_of and self.made == self.ready:
            self._send(facility)

    def model_ready(self) -> None:
        for facility in self.free():
            self.idle(facility, "arrival")

    def arrived(self, facility: Facility, update: Update) -> None:
        seen = max(QUICKEST, (self.now - self._sent_at[facility.name]) / max(1, update.receipt.steps_done))
        newest = self.options.speed_momentum
        known = self._speed.get(facility.name, seen)
        self._speed[facility.name] = (1 - newest) * known + newest * seen
        group = self._group_of.get(facility.name)
        if group is None or facility.name not in group.awaited:
            # Its group closed without it, it was its first job, or two of its jobs met that stay.
            self._general.add(update)
        else:
            group.awaited.remove(facility.name)
            group.back.append(update)
            self._close_if_complete(group)

    def timer(self, key: str) -> None:
        group = self._groups.get(int(key.removeprefix("group/")))
        if group is not None:
            self._close(group)

    def lost(self, facility: Facility) -> None:
        self._leave_group(facility)

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        self._general.drop(updates)
        group = self._group_of.get(facility.name)
        if group is not None and facility.name not in group.awaited:
            group.back = [update for update in group.back if update not in updates]
            if facility.name not in self._members(group):
                del self._group_of[facility.name]

    def missed(self, facility: Facility, cutoff: float) -> bool:
        return facility.name not in self._group_of

    def _send(self, facility: Facility) -> None:
        steps, cutoff = self.options.min_steps, None  # the first job measures its speed
        if facility.name in self._speed:
            group, steps = self._join(facility.name)
            cutoff = group.latest_at
        self._sent_at[facility.name] = self.now
        work = Assignment(base_version=self.ready, steps=steps, learning_rate=self.plan.learning_rate, cutoff=cutoff)
        self.submit(facility, work, round=self.ready)

    def _join(self, name: str) -> tuple[_Group, int]:
        """The group that gives this facility the most steps, or a new one."""
        speed, least, most = self._speed[name], self.options.min_steps, self.options.max_steps
        fits = [(floor((g.expected_at - self.now) / speed), g) for g in self._groups.values()]
        steps, group = max(((n, g) for n, g in fits if least <= n <= most), key=lambda fit: fit[0], default=(0, None))
        if group is None:
            steps = self._steps_for_new_group(speed)
            wait = steps * speed
            group = _Group(self._next_group, self.now + wait, self.now + wait * self.options.latest_time_factor)
            self._groups[group.number] = group
            self._next_group += 1
            self.set_timer(f"group/{group.number}", group.latest_at)
        group.awaited.add(name)
        self._group_of[name] = group
        return group, steps

    def _steps_for_new_group(self, speed: float) -> int:
        """As many as bring it back when the fastest of an open group could be back from its next full turn."""
        least, most = self.options.min_steps, self.options.max_steps
        reach = [
            floor((g.expected_at + min(self._speed[m] for m in self._members(g)) * most - self.now) / speed)
            for g in self._groups.values()
        ]
        fitting = [n for n in reach if n <= most]
        return max(least, min(most, max(fitting, default=most)))

    def _members(self, group: _Group) -> list[str]:
        return [*group.awaited, *(u.facility for u in group.back)]

    def _leave_group(self, facility: Facility) -> None:
        group = self._group_of.get(facility.name)
        if group is not None and facility.name in group.awaited:
            group.awaited.remove(facility.name)
            del self._group_of[facility.name]
            self._close_if_complete(group)

    def _close_if_complete(self, group: _Group) -> None:
        if not group.awaited:
            self._close(group)

    def _close(self, group: _Group) -> None:
        del self._groups[group.number]
        for member in self._members(group):
            del self._group_of[member]
        late, _ = self._general.take(self.made)
        updates = [*late, *group.back]
        if updates:
            worth = [polynomial_discount(u.staleness(self.made), self.options.exponent) for u in updates]
            scale = self.options.alpha / len(self.facilities)
            scale /= max(1.0, scale * sum(worth))  # late ones may pile up; all together they count as one model
            full = self.options.alpha / len(self.facilities)
            self.aggregate([(u, scale * s) for u, s in zip(updates, worth, strict=True)], full=full)
