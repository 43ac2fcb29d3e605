"""What a strategy is told before a run: facilities, limits, how failures are treated. Kept in the ledger."""

from __future__ import annotations

from dataclasses import field

from fedqueue.protocol.codec import later, message
from fedqueue.protocol.trust import Trust


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
