"""Whose job comes next at a site where several runs want places.

Each run has a level: what it has used, divided by its weight. The lowest comes first, so that over time each gets as
much as its weight says. Who was idle, or has only come, begins no lower than whoever got a place last: nobody waits
until a newcomer has caught up with the past, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase

from fedqueue.protocol.codec import at_least, message, more_than


@message
class ShareSettings:
    """[[share]] of federation.toml and agent.toml: the first that fits a run counts, a site's before the server's."""

    weight: float = 1.0  # of two runs that want places, one with twice the weight gets twice as much
    runs: list[str] = field(default_factory=lambda: ["*"])  # by patterns of their names
    users: list[str] = field(default_factory=lambda: ["*"])  # and of who submitted them; "operator": on the server
    jobs_at_once: int | None = None  # of one such run, at a site's scheduler; for agent.toml

    def __post_init__(self) -> None:
        more_than(self, 0, "weight")
        at_least(self, 1, "jobs_at_once")

    def fits(self, run: str, user: str) -> bool:
        return any(fnmatchcase(run, one) for one in self.runs) and any(fnmatchcase(user, one) for one in self.users)


def share_of(shares: Iterable[ShareSettings], run: str, user: str) -> ShareSettings | None:
    return next((share for share in shares if share.fits(run, user)), None)


def next_in_line(levels: Mapping[str, float], free: int) -> list[str]:
    """Of runs that each want a place, those that get one; `free`: so many there are."""
    return sorted(levels, key=lambda run: (levels[run], run))[: max(0, free)]


def after_rest(level: float, highest: float) -> float:
    """The level of a run that wants places again, or for the first time; `highest`: at which anybody got one."""
    return max(level, highest)
