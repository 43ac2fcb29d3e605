"""Every predictor answers with a distribution that makes sense, and only from what it was told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedqueue.protocol.predict import PREDICTORS, Ewma, Forecast, LogEwma, Predictor, RollingMedian
from fedqueue.protocol.predict.base import Spread

DELAYS = st.lists(st.floats(0, 1e7), max_size=120)
NAMES = sorted(PREDICTORS)


def told(name: str, delays: list[float], first: float | None = 2.0) -> Predictor:
    predictor = PREDICTORS[name](first, 0.5)
    for i, delay in enumerate(delays):
        predictor.observe(float(i), delay)
    return predictor


def check(forecast: Forecast) -> None:
    values = [q for _, q in forecast.quantiles]
    assert values == sorted(values)
    assert all(math.isfinite(q) and q >= 0 for q in [*values, forecast.mean])
    assert forecast.quantile(0.0) <= forecast.quantile(0.33) <= forecast.quantile(1.0)


@pytest.mark.parametrize("name", NAMES)
@given(delays=DELAYS, first=st.none() | st.floats(0, 1e6), waited=st.floats(0, 1e7))
def test_forecasts_are_finite_ordered_and_not_negative(
    name: str, delays: list[float], first: float | None, waited: float
) -> None:
    predictor = told(name, delays, first)
    check(predictor.forecast(0.0))
    predictor.still_waiting(0.0, waited)
    check(predictor.forecast(0.0))


@pytest.mark.parametrize("name", NAMES)
@given(delays=DELAYS, later=DELAYS)
def test_what_comes_later_does_not_change_a_forecast(name: str, delays: list[float], later: list[float]) -> None:
    short, long = told(name, delays), told(name, delays)
    before = long.forecast(0.0)
    for delay in later:
        long.observe(0.0, delay)
    assert short.forecast(0.0) == before


@pytest.mark.parametrize("name", ["ewma", "log-ewma", "rolling-median"])
def test_long_wait_under_way_lifts_the_forecast_until_it_ends(name: str) -> None:
    predictor, twin = told(name, [2.0] * 10), told(name, [2.0] * 10)
    calm = predictor.forecast(0.0)
    predictor.still_waiting(0.0, 1000.0)
    assert predictor.forecast(0.0).mean > calm.mean or predictor.forecast(0.0).quantile(0.95) > calm.quantile(0.95)
    predictor.observe(0.0, 3.0)
    twin.observe(0.0, 3.0)
    assert predictor.forecast(0.0) == twin.forecast(0.0)


def test_ewma_follows_the_published_rule_exactly() -> None:
    ewma, expected = Ewma(2.0, 0.3), 2.0
    for delay in (1.0, 7.0, 0.0, 3.3):
        ewma.observe(0.0, delay)
        expected = (1 - 0.3) * expected + 0.3 * delay
    assert ewma.forecast(0.0).mean == expected


@pytest.mark.parametrize(
    ("name", "tolerance"), [("ewma", 0.07), ("log-ewma", 0.07), ("rolling-median", 0.07), ("static", 0.07)]
)
def test_quantiles_cover_what_they_say_on_lognormal_waits(name: str, tolerance: float) -> None:

    waits = (5.0 * np.exp(0.9 * np.random.default_rng(7).standard_normal(3000))).tolist()
    predictor, under = told(name, []), {0.5: 0, 0.9: 0}
    for i, wait in enumerate(waits):
        forecast = predictor.forecast(float(i))
        for level in under:
            under[level] += i >= 100 and wait <= forecast.quantile(level)
        predictor.observe(float(i), wait)
    for level, count in under.items():
        assert count / 2900 == pytest.approx(level, abs=0.07)


def test_median_is_not_moved_by_one_spike_and_log_average_less_than_the_plain_one() -> None:
    waits = [2.0, 2.5, 1.5, 2.0, 2.2, 10_000.0]
    means = {}
    for kind in (Ewma(2.0, 0.5), LogEwma(2.0, 0.5), RollingMedian(2.0)):
        for wait in waits:
            kind.observe(0.0, wait)
        means[type(kind).__name__] = kind.forecast(0.0).quantile(0.5)
    assert means["RollingMedian"] < 3
    assert means["RollingMedian"] < means["LogEwma"] < means["Ewma"]


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_spread_keeps_the_newest_in_order(values: list[float]) -> None:
    spread = Spread(16)
    for value in values:
        spread.add(value)
    assert spread.sorted == sorted(values[-16:])
