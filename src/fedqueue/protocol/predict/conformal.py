"""Adaptive conformal calibration of any predictor: quantiles that are missed as often as they say, whatever it is.

The predictor's median is the centre, and its newest errors in log space lie around it. Which of them stands for a level
is adapted: after a delay above the quantile one further up, after any other one further down, in the proportion that
keeps it where it is when the quantile is right. Over a long time the share of delays above a quantile is then as it
says, even if the queue changes (Gibbs and Candes 2021).
"""

from __future__ import annotations

from math import inf

from fedqueue.protocol.predict.base import LEVELS, Forecast, Predictor, Spread, quantile_of
from fedqueue.protocol.predict.logspace import from_log, to_log

WINDOW = 300
STEP = 0.02  # how far a level moves
FEW = 20  # with fewer errors than this the predictor's own quantiles hold


class Conformal:
    """The mean is that of the predictor. No quantile is above the longest of the newest 300 delays, unless that was one
    of the last: in a queue that grows delays are ever longer, and a limit there would be passed again and again.

    >>> from fedqueue.protocol.predict.base import Ewma
    >>> predictor = Conformal(Ewma(first=5.0, smoothing=0.5))
    >>> for n in range(400): predictor.observe(0.0, float(n % 10))
    >>> 7.0 <= predictor.forecast(0.0).quantile(0.9) <= 9.0
    True
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._levels = Levels()
        self._errors = Spread(WINDOW)
        self._seen = Spread(WINDOW)
        self._since_record = 0  # delays after one that was longer than all
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        self._waited = 0.0
        inner = self._predictor.forecast(at)
        if len(self._errors) >= FEW:
            self._levels.adapt(self._quantiles(inner), delay)
        self._errors.add(to_log(delay) - to_log(inner.quantile(0.5)))
        self._since_record = 0 if len(self._seen) and delay > self._seen.sorted[-1] else self._since_record + 1
        self._seen.add(delay)
        self._predictor.observe(at, delay)

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        calm = self._calibrated(self._predictor.forecast(at))
        if self._waited == 0.0:
            return calm
        self._predictor.still_waiting(at, self._waited)
        lifted = self._calibrated(self._predictor.forecast(at))
        self._predictor.still_waiting(at, 0.0)
        return calm.lifted(lifted, self._waited)

    def _calibrated(self, inner: Forecast) -> Forecast:
        if len(self._errors) < FEW:
            return inner
        return Forecast(inner.mean, tuple(zip(LEVELS, self._quantiles(inner), strict=True)))

    def _quantiles(self, inner: Forecast) -> list[float]:
        centre, errors, longest = to_log(inner.quantile(0.5)), self._errors.sorted, self._seen.sorted[-1]
        longest = inf if self._since_record < FEW else max(longest, self._waited)
        return [min(longest, from_log(centre + quantile_of(errors, p))) for p in self._levels.rising()]


class Levels:
    """For each of LEVELS the one that stands for it now; rising."""

    __slots__ = ("_now", "_step")

    def __init__(self, step: float = STEP) -> None:
        self._now = list(LEVELS)
        self._step = step

    def rising(self) -> list[float]:
        return self._now

    def adapt(self, quantiles: list[float], delay: float) -> None:
        """After a delay for which these were the quantiles."""
        moved = (
            now + self._step * (level - (delay <= quantile))
            for now, level, quantile in zip(self._now, LEVELS, quantiles, strict=True)
        )
        # Beyond 0 and 1 there is nothing but a way back. Sorted here, so that a level learns from its own quantile.
        self._now = sorted(min(1.0, max(0.0, level)) for level in moved)
