"""What the scheduler itself says about a job's start, calibrated.

A scheduler's estimate assumes that every job runs to its limit and that nobody submits another, so it is no forecast:
mostly too late, at times far too early. What can be learned is by which factor it is off, log(1 + wait) - log(1 +
estimate). Where the scheduler says nothing, our own waits are all there is.
The adapters in `agent.schedulers` read the estimates.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from fedqueue.forecasting import issued
from fedqueue.forecasting.calibration import Calibration, Said
from fedqueue.protocol.messages import ForecastIssued
from fedqueue.protocol.predict import PREDICTORS, Forecast
from fedqueue.protocol.predict.logspace import to_log

MOST_OPEN: Final = 1000  # of our jobs that wait; beyond it the oldest is forgotten
OWN_WAITS: Final = "conformal"  # where the scheduler says nothing
SMOOTHING: Final = 0.2  # of it


class SchedulerEstimates:
    """Told what was estimated when a job of ours was submitted, and when it started.

    >>> forecaster = SchedulerEstimates()
    >>> for n in range(40):  # the scheduler says 100 s, and it takes 10
    ...     forecaster.submitted(n, 200.0 * n, estimate=100.0)
    ...     forecaster.started(n, 200.0 * n + 10.0)
    >>> round(forecaster.forecast(8000.0, estimate=1000.0).quantile(0.5))
    108
    """

    source: Final = "scheduler"

    def __init__(self, first: float | None = None) -> None:
        self._calibration = Calibration()
        self._own = PREDICTORS[OWN_WAITS](first, SMOOTHING)
        self._open: dict[Hashable, tuple[float, Said | None]] = {}  # submission, what the estimate made us say

    def submitted(self, job: Hashable, at: float, estimate: float | None) -> None:
        """`estimate`: seconds until it starts, as the scheduler said then; None: it said nothing."""
        if len(self._open) >= MOST_OPEN:
            del self._open[next(iter(self._open))]
        self._open[job] = at, self._say(estimate)

    def started(self, job: Hashable, at: float) -> None:
        found = self._open.pop(job, None)
        if found is None:
            return
        submitted, said = found
        wait = max(0.0, at - submitted)
        self._own.observe(at, wait)
        if said is not None:
            self._calibration.learn(said, wait)

    def ended(self, job: Hashable) -> None:
        """It was withdrawn before it started."""
        self._open.pop(job, None)

    def still_waiting(self, at: float) -> None:
        """How long those that have not started have waited counts, where our own waits are all there is."""
        ages = [at - submitted for submitted, _ in self._open.values()]
        if ages:
            self._own.still_waiting(at, max(ages))

    def forecast(self, at: float, estimate: float | None) -> Forecast:
        """The wait of a job of ours that is submitted now."""
        said = self._say(estimate)
        return said.forecast if said is not None and self._calibration.known else self._own.forecast(at)

    def issue(self, facility: str, at: float, estimate: float | None) -> ForecastIssued:
        return issued(self.forecast(at, estimate), facility=facility, at=at, source=self.source)

    def _say(self, estimate: float | None) -> Said | None:
        return None if estimate is None else self._calibration.around(to_log(max(0.0, estimate)))
