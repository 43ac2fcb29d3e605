"""What a strategy is told before a run: facilities, limits, how failures are treated, how far facilities are trusted.

Kept in the ledger.
"""

from __future__ import annotations

from dataclasses import field
from typing import Final, Literal

from fedqueue.protocol.codec import at_least, later, message, more_than, one_of


@message
class FacilityProfile:
    """One facility as a strategy sees it."""

    name: str
    data_weight: float  # p
    steps_per_second: float | None = None  # c; None: measured by the first, short job
    first_delay: float | None = None  # q-hat before anything was seen; None: the first delay seen
    true_mean_delay: float | None = None  # known in simulations only; the `static` predictor uses it
    overhead: float = 0.0  # seconds of a job that are not training, until learned
    startup_allowance: float | None = None  # further seconds to ask for until then; None: simulated, nothing is unknown
    max_jobs: int = 2  # jobs it may have at the scheduler at once
    nodes: int = 1
    most_wall_seconds: float | None = later(default=None)  # that a job may ask for; None: nobody said
    known_waits: tuple[tuple[float, float], ...] = later(default=())  # (wall time asked for, wait) of the past, seconds


@message
class FailurePolicy:
    """When to try again, and when to leave a facility alone for a while."""

    max_attempts: int = 3  # failures in a row before a facility is suspended
    retry_seconds: float = 1.0  # before a refused submission is tried again; doubles with each refusal in a row
    suspend_seconds: float = 60.0  # first suspension; doubles with each further one
    max_requeues: int = 10  # of one job by its scheduler before it counts as a failure
    max_suspensions: int = 5  # after so many in a row it stays out until someone makes it join again

    def __post_init__(self) -> None:
        for name, least in (("max_attempts", 1), ("max_requeues", 0), ("max_suspensions", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, found {getattr(self, name)}")
        for name in ("retry_seconds", "suspend_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, found {getattr(self, name)}")


@message
class Trust:
    """How far facilities are trusted with the model."""

    say: Literal["bounded", "unbounded"] = "bounded"
    clip: float = 5.0  # what is clipped is so many times larger than updates usually are; 0: nothing is

    rule: Literal["mean", "median", "trimmed", "krum"] = "mean"  # by which updates are combined
    hostile: float = 0.25  # share of the facilities that may mean harm, for "trimmed" and "krum"
    masked: bool = later(default=False)  # updates come masked: the coordinator can read their sum alone
    least_members: int = later(default=3)  # facilities whose masked updates are summed, at the least
    mask_seconds: float = later(default=600.0)  # how long a group waits for what its members give

    def __post_init__(self) -> None:
        one_of(self, "rule", ("mean", "median", "trimmed", "krum"))
        if not 0 <= self.hostile < 0.5:
            raise ValueError(f"hostile must be from 0 to below 0.5, found {self.hostile}: no rule outvotes a majority")
        if self.masked and self.rule != "mean":
            raise ValueError(f'rule must be "mean" where masked is true, which can only be summed; found {self.rule!r}')
        at_least(self, 2, "least_members")
        more_than(self, 0, "mask_seconds")
        at_least(self, 0, "clip")
        if 0 < self.clip < 1:
            raise ValueError(f"clip must be 1 or more, or 0 for none, found {self.clip}")


AS_PUBLISHED: Final = Trust(say="unbounded", clip=0.0)
"""Every update counts in full, as the papers have it; so did every run before there were bounds."""


@message
class Plan:
    """A run as a strategy sees it. It ends after `rounds` new models or `seconds`, whichever comes first."""

    facilities: tuple[FacilityProfile, ...]
    round_length: float  # T, seconds
    rounds: int | None = None
    seconds: float | None = None
    learning_rate: float = 0.001  # eta_base
    stop_at_score: float | None = None
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    trust: Trust = field(default_factory=Trust)
    overdue_seconds: float | None = later(default=None)
    """Where everybody is waited for: so long for a job to start, to end after its wall time, or to hand in, at the
    least. None: for ever, as where facilities are simulated and do not lie."""
