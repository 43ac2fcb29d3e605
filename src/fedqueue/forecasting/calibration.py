"""The distribution around a centre that somebody else makes: its newest errors in log space, at adapted levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fedqueue.protocol.predict.base import LEVELS, Forecast, Spread, quantile_of
from fedqueue.protocol.predict.conformal import FEW, WINDOW, Levels
from fedqueue.protocol.predict.logspace import from_log, to_log

GUESS: Final = [-2.0, -1.0, 0.0, 1.0, 2.0]  # errors, until there are enough


@dataclass(frozen=True, slots=True)
class Said:
    """A forecast that was made around a centre."""

    centre: float  # log(1 + seconds)
    forecast: Forecast


class Calibration:
    """The median is the figure to plan with, so it stands as the mean too: that of errors in log space is ruled by the
    longest of them.

    >>> calibration = Calibration()
    >>> for _ in range(40): calibration.learn(calibration.around(to_log(100.0)), 10.0)
    >>> round(calibration.around(to_log(1000.0)).forecast.mean)
    108
    """

    def __init__(self) -> None:
        self._levels = Levels()
        self._errors = Spread(WINDOW)

    @property
    def known(self) -> bool:
        return len(self._errors) >= FEW

    def around(self, centre: float) -> Said:
        errors = self._errors.sorted if self.known else GUESS
        values = [from_log(centre + quantile_of(errors, p)) for p in self._levels.rising()]
        median = values[LEVELS.index(0.5)]
        return Said(centre, Forecast(median, tuple(zip(LEVELS, values, strict=True))))

    def learn(self, said: Said, delay: float) -> None:
        """What became of a job of which this was said."""
        if self.known:
            self._levels.adapt([value for _, value in said.forecast.quantiles], delay)
        self._errors.add(to_log(delay) - said.centre)
