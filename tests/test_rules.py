"""Budget, admission and weights: the arithmetic of the protocol."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedqueue.protocol.aggregation import Buffer, Update, discount, normalised, polynomial_discount
from fedqueue.protocol.budget import bind, binding, further_work, linger_until, scaled_rate, steps_within, train_budget
from fedqueue.protocol.contract import Receipt, Standing

TIMES = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("mean", "speed", "steps"), [(1.5, 67 / 6.5, 67), (2.5, 155 / 5.5, 155), (3.5, 147 / 4.5, 147), (4.5, 15 / 3.5, 15)]
)
def test_speeds_of_the_controlled_setting_give_the_published_steps(mean: float, speed: float, steps: int) -> None:
    assert steps_within(train_budget(10.0, mean, 2.0, 0.5), speed, 10) == steps


def test_floors_hold_when_nothing_fits() -> None:
    assert train_budget(10.0, 50.0, 2.0, 0.5) == 0.5
    assert steps_within(0.5, 1.0, 10) == 10


def test_inverse_scaling_equalises_rate_times_steps() -> None:
    assert scaled_rate(0.1, 40, 10, "inverse") * 40 == pytest.approx(scaled_rate(0.1, 10, 10, "inverse") * 10)
    assert scaled_rate(0.1, 40, 10, "none") == 0.1
    assert scaled_rate(0.1, 5, 10, "inverse") == 0.1  # never faster than the base rate


@given(
    start=TIMES,
    gap=st.floats(-1e4, 1e4),
    length=st.floats(0.5, 1e4),
    speed=st.floats(0.01, 1e4),
    overhead=st.floats(0, 1e3),
    min_steps=st.integers(1, 100),
)
def test_job_bound_at_its_start_is_back_by_the_cutoff_it_aims_at(
    start: float, gap: float, length: float, speed: float, overhead: float, min_steps: int
) -> None:
    standing = Standing(
        version=3,
        next_cutoff=max(0.0, start + gap),
        round_length=length,
        steps_per_second=speed,
        overhead=overhead,
        min_steps=min_steps,
        learning_rate=0.1,
    )
    work = bind(standing, start)
    assert work.cutoff is not None
    assert work.steps >= min_steps
    slack = 1e-9 * max(1.0, work.cutoff)  # floating point at large times
    assert start + work.steps / speed + overhead <= work.cutoff + slack
    earlier = work.cutoff - length
    too_soon = earlier < standing.next_cutoff - slack or start + min_steps / speed + overhead > earlier - 2e-6 - slack
    assert too_soon, "it could have been of use one cutoff earlier"


def update(base: int) -> Update:
    receipt = Receipt(
        job_id=f"a/{base}", attempt=0, base_version=base, steps_done=1, train_seconds=1.0, admission_delay=0.0
    )
    return Update(receipt, "a", 0.0, True, False)


def test_buffer_gives_each_update_once_and_expires_the_too_stale() -> None:
    buffer = Buffer()
    for base in (5, 3, 4):
        buffer.add(update(base))
    admitted, expired = buffer.take(5, max_staleness=1)
    assert [u.receipt.base_version for u in admitted] == [5, 4]
    assert [u.receipt.base_version for u in expired] == [3]
    assert buffer.take(5) == ([], [])


@given(st.lists(st.floats(0, 1e12), max_size=20))
def test_normalised_weights_sum_to_one_or_are_all_zero(raw: list[float]) -> None:
    weights = normalised(raw)
    assert all(w >= 0 and math.isfinite(w) for w in weights)
    assert sum(weights) == pytest.approx(1.0) or not any(weights)


@pytest.mark.parametrize("decay", ["harmonic", "exponential", "none"])
def test_discount_is_one_when_fresh_and_never_grows(decay: str) -> None:
    values = [discount(tau, decay, 0.5) for tau in range(6)]  # type: ignore[arg-type]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert polynomial_discount(0, 1.0) == 1.0
    assert polynomial_discount(1, 1.0) == 0.5


def test_a_job_that_stayed_takes_work_though_starting_up_takes_longer_than_a_round() -> None:
    """Seen in a real run: with a start-up of 10 s and rounds of 10 s, it waited for a better moment for ever."""
    work = Standing(
        version=2,
        next_cutoff=40.0,
        round_length=10.0,
        steps_per_second=100.0,
        overhead=10.2,
        min_steps=10,
        learning_rate=0.1,
        patience=1.0,
        stay_overhead=0.5,
    )
    assert further_work(work, 0, 1, now=31.5, ends_at=300.0) == "take"
    assert binding(work, 31.5, 300.0, stayed=True).cutoff == 40.0
    assert linger_until(work, 31.5, stays=True) is None  # of no use either to one that has just started
