"""What predictors in log space share: queue waits spread by factors, so their logarithm is what moves evenly."""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log

from fedqueue.protocol.predict.base import LEVELS, Forecast, Spread, quantiles_of

SHIFT = 1.0  # seconds added before the logarithm: waits of zero are common on idle systems
ERRORS = 300  # of the newest, that shape the quantiles
FEW = 5  # with fewer errors than this the spread is a guess
GUESS = [-0.8, -0.4, 0.0, 0.4, 0.8]
UPWARDS = 1 + 1e-12  # against rounding: a queue that always waits the same is not above its own quantiles


def to_log(seconds: float) -> float:
    return log(seconds + SHIFT)


def from_log(value: float) -> float:
    """Seconds, never negative.

    >>> from_log(to_log(0.0)), from_log(-3.0)
    (0.0, 0.0)
    """
    return exp(value) * UPWARDS - SHIFT if value > 0 else 0.0


class LogErrors:
    """The newest errors of a centre in log space; around a centre they are a distribution of seconds."""

    __slots__ = ("_spread",)

    def __init__(self, size: int) -> None:
        self._spread = Spread(size)

    def add(self, error: float) -> None:
        self._spread.add(error)

    def around(self, centre: float, reach: float) -> Forecast:
        """The errors also lift the mean from geometric to plain. The greatest level is `reach` seconds at least."""
        errors = self._spread.sorted if len(self._spread) >= FEW else GUESS
        above = bisect_right(errors, -centre)  # the others would be less than no wait at all
        mean = (exp(centre) * sum(map(exp, errors[above:])) - SHIFT * (len(errors) - above)) / len(errors)
        spread = [from_log(centre + error) for error in quantiles_of(errors, LEVELS)]
        spread[-1] = max(spread[-1], reach)
        return Forecast(max(0.0, mean), tuple(zip(LEVELS, spread, strict=True)))
