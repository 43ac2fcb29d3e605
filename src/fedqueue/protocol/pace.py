"""How long a round should be, from facts on record: short while that helps, longer late in training.

The shortest round that is worth its model: a facility of the usual speed does three times its least steps in it (slower
ones meet every second or third cutoff), and handing in and getting the next model takes no more than two fifths of it.
Late in training, when scores stand still and updates no longer agree,
what is left is mostly noise: longer rounds average more of it before they are mixed, and move fewer models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import log
from statistics import fmean, median, median_low
from typing import Final

from fedqueue.protocol.budget import ROUNDING
from fedqueue.protocol.predict import Forecast

LADDER: Final = tuple(2.0**k for k in range(-2, 5))
"""The round lengths to choose from, over the one that is set."""

LEAST_ROUND: Final = 4.0  # round length over the greatest overhead, at the least

TURNAROUNDS: Final = 2.5  # round length over what making and moving a model and an update takes, at the least
APART: Final = 4.0  # what the slower of two may make of a round, over what the faster needs
STEPS: Final = 3.0  # that a facility of the median speed does in it at the least, over the least steps
SCORES: Final = 8  # models that tell whether scores stand still
PROGRESS: Final = 0.05  # of the error, from the older to the newer half of them: less is none
DISAGREEMENT: Final = 0.3  # updates that agree less are mostly noise, or pull apart
GROWTH: Final = 1.25
LONGEST: Final = 2.0  # over the shortest


def shortest_round(least_seconds: Sequence[float], turnarounds: Sequence[float]) -> float:
    """Seconds. `least_seconds`: what each facility's least steps take; `turnarounds`: from handing in to more work.

    >>> shortest_round([1.0, 0.5, 2.5], [0.2, 0.1, 0.3]), shortest_round([1.0, 0.5, 2.5], [2.0, 2.0, 0.1])
    (3.0, 5.0)
    """
    return max(STEPS * _middle(least_seconds), TURNAROUNDS * _middle(turnarounds))


def _middle(values: Sequence[float]) -> float:
    """The median. Of two it is the mean, which one of them could make as long as it likes: a few times the other's."""
    return min(median(values), APART * median_low(values))


def busy_share(forecast: Forecast, round_length: float) -> float:
    """E[T / max(T, q)]: of a facility's time, the share that it trains, if every wait of more than a round costs the
    rounds that it lasts. q is spread evenly between the quantiles, and stays at the outermost beyond them.

    >>> round(busy_share(Forecast(2.0, ((0.25, 0.0), (0.75, 10.0), (0.9, 40.0))), 10.0), 4)
    0.8443
    """
    points = forecast.quantiles
    share = points[0][0] * _meets(points[0][1], points[0][1], round_length)
    for (p0, q0), (p1, q1) in pairwise(points):
        share += (p1 - p0) * _meets(q0, q1, round_length)
    return share + (1 - points[-1][0]) * _meets(points[-1][1], points[-1][1], round_length)


def _meets(low: float, high: float, length: float) -> float:
    """Mean of T / max(T, q) for q between two values."""
    if high <= length:
        return 1.0
    if high - low <= ROUNDING * high:
        return length / high
    start = max(low, length)
    return (start - low + length * log(high / start)) / (high - low)


def choose_round_length(base: float, forecasts: Sequence[Forecast], overhead: float, busy: float) -> float:
    """The shortest of LADDER * base at which facilities are busy for the share `busy` of the time on average, and that
    is at least four times the overhead; the longest, if none is.

    >>> calm, busy_queue = Forecast(2.0, ((0.5, 2.0),)), Forecast(100.0, ((0.5, 100.0),))
    >>> choose_round_length(10.0, [calm], 0.5, 0.9), choose_round_length(10.0, [calm, busy_queue], 0.5, 0.9)
    (2.5, 80.0)
    """
    for length in (base * factor for factor in LADDER):
        share = sum(busy_share(forecast, length) for forecast in forecasts)
        if share + ROUNDING >= busy * len(forecasts) and length >= LEAST_ROUND * overhead:
            return length
    return base * LADDER[-1]


class Pace:
    """Told scores and how far updates agree; says how many times the shortest round the next one should be.

    >>> pace = Pace()
    >>> for score in (0.2, 0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.93): pace.scored(score)
    >>> for agreement in (0.6, 0.3, 0.2, 0.2): pace.agreed(agreement)
    >>> pace.next()
    1.0
    >>> for score in [0.93] * SCORES: pace.scored(score)
    >>> pace.next(), pace.next()
    (1.25, 1.5625)
    """

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=SCORES)
        self._agreement = 0.5
        self._times = 1.0

    def scored(self, score: float | None) -> None:
        """Between 0 and 1; others say nothing."""
        if score is not None and 0 <= score <= 1:
            self._errors.append(1 - score)

    def agreed(self, agreement: float | None) -> None:
        if agreement is not None:
            self._agreement = (self._agreement + agreement) / 2

    def next(self) -> float:
        """Asked once a round."""
        late = self._stands_still() and self._agreement < DISAGREEMENT
        self._times = min(LONGEST, self._times * GROWTH) if late else max(1.0, self._times / GROWTH)
        return self._times

    def _stands_still(self) -> bool:
        if len(self._errors) < SCORES:
            return False
        errors = list(self._errors)
        before, now = fmean(errors[: SCORES // 2]), fmean(errors[SCORES // 2 :])
        return before - now < PROGRESS * before
