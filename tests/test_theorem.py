"""Theorem 1: the formulas by hand, the constants on problems whose answers are known, the bounds against runs."""

from __future__ import annotations

import sys
from fractions import Fraction
from itertools import pairwise
from math import inf, isinf, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedqueue.config import Config, load, parse
from fedqueue.errors import ConfigError, TaskError
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import share_out, workload_of
from fedqueue.training.workload import Workload, digits
from fedqueue_reproduction.theorem import Constants, conditions, explicit_bound, rounds_needed, stated_bound
from fedqueue_reproduction.theorem_measure import Objectives
from fedqueue_reproduction.theorem_results import RunFacts
from fedqueue_reproduction.theorem_run import Depth, departures, watch
from fedqueue_reproduction.theorem_tasks import two_targets

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
TWO = EXPERIMENTS / "theorem-two.toml"

SMALL = Constants(
    smoothness=2.0,
    noise=0.5,
    dissimilarity=3.0,
    gap=4.0,
    staleness=2,
    least_steps=5,
    most_steps=20,
    rate=0.001,
    least_stride=0.005,
    most_stride=0.01,
)


# The formulas -------------------------------------------------------------------------------------------


def test_stated_bound_is_the_papers_right_side() -> None:
    # C0 * 4 / (0.001 * 5 * 100) + C1 * 0.001 * 20 * (2^2 * 2^2 + 3^2 + 0.5), with C0 = 2 and C1 = 3
    assert stated_bound(SMALL, 100, 2.0, 3.0) == pytest.approx(2 * 8.0 + 3 * 0.02 * 25.5)
    assert stated_bound(SMALL, 10**12) == pytest.approx(0.02 * 25.5), "more rounds leave the second term"


def test_explicit_bound_is_that_of_the_page() -> None:
    L, h, H, eta, tau = Fraction(2), Fraction(1, 200), Fraction(1, 100), Fraction(1, 1000), 2
    G2, sigma2, D, X = Fraction(9), Fraction(1, 2), Fraction(4), Fraction(1, 5)
    inner = (
        X * G2
        + Fraction(128, 15) * (L * H) ** 2 * G2
        + L * eta * sigma2
        + (Fraction(94, 45) + Fraction(64, 15) * tau**2) * L**2 * H * eta * sigma2
    )
    assert explicit_bound(SMALL, 100, 0.2) == pytest.approx(float(Fraction(30, 11) * (D / (h * 100) + H / h * inner)))


def test_conditions_are_those_of_the_theorem_of_its_proof_and_of_the_explicit_bound() -> None:
    stated, whole, falls, stride, stale = conditions(SMALL, 100)
    assert [stated.left, stated.right] == pytest.approx([0.001, 1 / (8 * 2 * 20)])
    assert whole.right == pytest.approx(1 / (5 * 2 * sqrt(8 * 2 * 100)))
    assert falls.right == pytest.approx(1 / (16 * 5 * 2**2 * 2 * 100))
    assert [stride.left, stride.right] == pytest.approx([0.02, 0.125])
    assert [stale.left, stale.right] == pytest.approx([0.04, 0.25])
    assert [one.holds for one in (stated, whole, falls, stride, stale)] == [True, True, False, True, True]


@pytest.mark.parametrize("place", range(5))
def test_rate_that_meets_a_condition_is_the_greatest_one(place: int) -> None:
    rate = conditions(SMALL, 100)[place].rate
    assert rate is not None
    assert conditions(SMALL.at_rate(0.999 * rate), 100)[place].holds
    assert not conditions(SMALL.at_rate(1.001 * rate), 100)[place].holds


def test_without_staleness_only_the_smoothness_limits_the_rate() -> None:
    fresh = Constants(**{**vars(SMALL), "staleness": 0})
    assert [isinf(one.rate or 0.0) for one in conditions(fresh, 100)] == [False, True, True, False, True]


def test_rounds_needed_are_those_after_which_the_best_rate_reaches_the_level() -> None:
    needed = rounds_needed(SMALL, 1.0)
    rates = np.geomspace(1e-9, conditions(SMALL, 1)[0].right, 5000)
    best = min(stated_bound(SMALL.at_rate(float(rate)), round(needed)) for rate in rates)
    assert best == pytest.approx(1.0, rel=0.01)
    assert rounds_needed(SMALL, 1.0, imbalance=0.0) < inf
    assert rounds_needed(SMALL, 1.0, imbalance=0.2) == inf, "30/11 * 2 * 0.2 * 9 is above it whatever the rate"


# The constants ------------------------------------------------------------------------------------------

SCALES = (7.0, 2.0, 0.5)
"""Second derivatives of the quadratic below: its L is the first."""


class _Point(nn.Module):
    """The same point, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([0.3, -0.2, 0.9]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.place.expand(len(inputs), 3)


def quadratic(samples: int = 24, apart: float = 1.0) -> Workload:
    """F_k(w) = mean over its samples x of sum_j SCALES_j (w_j - x_j)^2 / 2."""
    points = apart * torch.randn(samples, 3, generator=torch.Generator().manual_seed(5))
    pair = (torch.zeros(samples, 1), points)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (torch.tensor(SCALES) * (outputs - targets) ** 2).sum(dim=1).mean() / 2

    return Workload(make_model=_Point, train=pair, test=pair, loss=loss)


def root() -> Workload:
    """A loss with an edge: below 0 it is not a number, and a step that is too long ends there."""
    pair = (torch.zeros(2, 1), torch.zeros(2))
    one = two_targets(1.0)
    return Workload(make_model=one.make_model, train=pair, test=pair, loss=lambda outputs, _: outputs.sqrt().mean())


def settings(**changes: Any) -> TaskSettings:
    here = Path(__file__).parent.parent
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    plain = {"name": "tests.test_theorem:quadratic", "partition": "iid", "batch_size": 1, "optimizer": "sgd"}
    return TaskSettings(**{**plain, **changes})


def samples_of(task: TaskSettings, facilities: int, seed: int) -> list[np.ndarray[Any, Any]]:
    workload = workload_of(task)
    return [workload.train[1][part].double().numpy() for part in share_out(workload, task, facilities, seed)]


def test_losses_gradients_and_dissimilarity_of_a_quadratic_are_as_worked_out() -> None:
    task, weights = settings(), (0.5, 0.3, 0.2)
    objectives = Objectives(task, weights, seed=1)
    model = _Point().state_dict()
    place, scales = model["place"].double().numpy(), np.array(SCALES)
    means = [part.mean(axis=0) for part in samples_of(task, 3, 1)]
    each = objectives.all_at(model)
    for (_, gradient), mean in zip(each, means, strict=True):
        assert gradient.numpy() == pytest.approx(scales * (place - mean), rel=1e-5)
    loss, gradient = objectives.mean(each)
    middle = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
    assert gradient.numpy() == pytest.approx(scales * (place - middle), rel=1e-5)
    parts = samples_of(task, 3, 1)
    wanted = sum(
        w * (scales * (place - part) ** 2).sum(axis=1).mean() / 2 for w, part in zip(weights, parts, strict=True)
    )
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_curvature_of_a_quadratic_is_its_greatest_second_derivative() -> None:
    objectives = Objectives(settings(), (0.5, 0.5), seed=1)
    model = _Point().state_dict()
    each = objectives.all_at(model)
    for facility, (_, gradient) in enumerate(each):
        assert objectives.curvature(facility, model, gradient) == pytest.approx(SCALES[0], rel=2e-3)
    assert objectives.mean_curvature(model, objectives.mean(each)[1]) == pytest.approx(SCALES[0], rel=2e-3)


@pytest.mark.parametrize(("size", "share"), [(1, 1.0), (4, (1 - 4 / 12) * 12 / 11 / 4), (12, 0.0)])
def test_noise_of_a_step_is_the_variance_of_a_batch_drawn_without_replacement(size: int, share: float) -> None:
    task = settings(batch_size=size)
    objectives = Objectives(task, (0.5, 0.5), seed=1)
    model = _Point().state_dict()
    for facility, part in enumerate(samples_of(task, 2, 1)):
        spread = ((np.array(SCALES) * (part - part.mean(axis=0))) ** 2).sum(axis=1).mean()
        _, gradient = objectives.at(facility, model)
        found = objectives.noise(facility, model, gradient, draws=3000, key=0)
        assert found == pytest.approx(spread * share, rel=0.06, abs=1e-9)


def test_curvature_of_regression_is_known_at_zero_and_bounded_everywhere() -> None:
    task = settings(name="fedqueue_reproduction.theorem_tasks:linear_digits", batch_size=64)
    objectives = Objectives(task, (0.5, 0.5), seed=1)
    module = workload_of(task).make_model()
    luck = torch.Generator().manual_seed(3)
    away = {name: torch.randn(value.shape, generator=luck) * 0.3 for name, value in module.state_dict().items()}
    inputs = digits().train[0].double()
    for facility, part in enumerate(share_out(workload_of(task), task, 2, 1)):
        with_one = torch.cat([inputs[part], torch.ones(len(part), 1, dtype=torch.float64)], dim=1)
        greatest = float(torch.linalg.eigvalsh(with_one.T @ with_one / len(part))[-1])
        _, gradient = objectives.at(facility, module.state_dict())
        # All ten classes are as likely: the second derivative is (I - 1/10) / 10 times the mean of x x^T.
        assert objectives.curvature(facility, module.state_dict(), gradient) == pytest.approx(greatest / 10, rel=0.01)
        _, gradient = objectives.at(facility, away)
        assert greatest / 100 < objectives.curvature(facility, away, gradient) <= greatest / 2


def test_dropout_is_noise_and_no_part_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = digits()
    dropping = Workload(
        make_model=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10)), train=plain.train, test=plain.test
    )
    monkeypatch.setattr("fedqueue_reproduction.theorem_measure.workload_of", lambda _: dropping)
    objectives = Objectives(settings(name="dropping", batch_size=4000), (1.0,), seed=1)
    model = dropping.make_model().state_dict()
    (loss, gradient), (again, _) = objectives.at(0, model), objectives.at(0, model)
    assert loss == again
    assert objectives.noise(0, model, gradient, draws=4, key=0) > 1e-4, "every batch is the whole data"
    assert objectives.draws
    assert not objectives.kinked


# Runs ---------------------------------------------------------------------------------------------------


def by_hand(rounds: int, rate: float) -> list[float]:
    """|grad F|^2 at the start of each round: what docs/theorem.md says of the two facilities, without first order."""
    models = [0.0]
    for round_ in range(rounds):
        now = models[-1]
        if round_ % 2 == 0:
            models.append(now - rate * (now - 1))
        else:  # the late one started from the model before
            models.append(now - 0.6 * rate * (now - 1) - 0.4 * rate * (models[-2] + 1))
    return [model**2 for model in models]


def test_two_facilities_move_as_worked_out_by_hand() -> None:
    facts = watch(load(TWO, ["run.rounds=300", "run.learning_rate=0.02"]), Depth(models=2, least_loss=0.5))
    found = facts.constants
    assert (found.staleness, found.least_steps, found.most_steps) == (1, 1, 1)
    assert [found.least_stride, found.most_stride] == pytest.approx([0.02, 0.02])
    assert found.smoothness == pytest.approx(1.0, rel=2e-3)
    assert [found.dissimilarity, found.noise, found.gap] == pytest.approx([1.0, 0.0, 0.0])
    assert facts.least_discount == pytest.approx(2 / 3)
    assert facts.empty_rounds == 0
    assert sorted(facts.mean_shares) == [pytest.approx(0.2), pytest.approx(0.8)]
    assert facts.imbalance[-1] == pytest.approx((1.0**2 + 0.2**2) / 2)
    wanted = by_hand(300, 0.02)
    for rounds, measured in zip(facts.at, facts.measured, strict=True):
        assert measured == pytest.approx(fmean(wanted[:rounds]), rel=1e-3, abs=1e-9)
    assert facts.last_gradient == pytest.approx(wanted[300], rel=1e-3)


def test_no_constants_save_the_stated_bound_from_two_facilities() -> None:
    """All conditions of the theorem hold, and what its constants must be at least grows with the rounds."""
    least = []
    for rounds in (400, 1600, 6400, 25600):
        rate = 1 / (8 * sqrt(rounds))
        found = Constants(
            smoothness=1.0,
            noise=0.0,
            dissimilarity=1.0,
            gap=0.0,
            staleness=1,
            least_steps=1,
            most_steps=1,
            rate=rate,
            least_stride=rate,
            most_stride=rate,
        )
        assert conditions(found, rounds)[0].holds
        least.append(fmean(by_hand(rounds, rate)[:rounds]) / stated_bound(found, rounds))
        assert explicit_bound(found, rounds, 0.52) > fmean(by_hand(rounds, rate)[:rounds])
    assert all(later > 1.9 * sooner for sooner, later in pairwise(least)), "about as the square root"
    assert least[-1] > 200


def small_run(seed: int, **changes: Any) -> Config:
    """Three facilities on the quadratic, with queues that make some updates late."""
    queues = (("one", 2.0, 1.5), ("two", 1.0, 4.5), ("three", 3.0, 6.0))
    return parse(
        {
            "run": {
                "strategy": "fedqueue",
                "seed": seed,
                "rounds": 60,
                "round_length": 10.0,
                "learning_rate": 0.0008,
                **changes,
            },
            "task": {
                "name": "tests.test_theorem:quadratic",
                "partition": "iid",
                "batch_size": 1,
                "optimizer": "sgd",
            },
            "strategy": {"fedqueue": {"margin": 1.0, "min_steps": 3}},
            "facility": [
                {
                    "name": name,
                    "steps_per_second": speed,
                    "first_delay": 2.0,
                    "queue": {"kind": "lognormal", "mean": mean, "rho": 0.9},
                }
                for name, speed, mean in queues
            ],
        }
    )


def test_run_gives_the_constants_of_the_quadratic_and_the_explicit_bound_holds() -> None:
    each: list[RunFacts] = []
    for seed in range(1, 5):
        config = small_run(seed)
        facts = watch(config, Depth(models=3, draws=200))
        found = facts.constants
        assert found.smoothness == pytest.approx(SCALES[0], rel=5e-3)
        parts = samples_of(config.task, 3, seed)
        spread = max(((np.array(SCALES) * (part - part.mean(axis=0))) ** 2).sum(axis=1).mean() for part in parts)
        assert found.noise == pytest.approx(spread, rel=0.25), "the greatest of a few estimates"
        means = [part.mean(axis=0) for part in parts]
        apart = max(np.linalg.norm(np.array(SCALES) * (mean - sum(means) / 3)) for mean in means)
        assert found.dissimilarity == pytest.approx(apart, rel=1e-4)
        assert found.staleness >= 1
        assert found.least_steps == 3
        assert found.least_stride == pytest.approx(0.0008 * 3)
        assert all(one.holds for one in conditions(found, facts.rounds) if one.of == "explicit")
        each.append(facts)
    for place, rounds in enumerate(each[0].at):
        assert all(facts.at[place] == rounds for facts in each)
        bound = fmean(explicit_bound(one.constants, one.used[place], one.imbalance[place]) for one in each)
        assert fmean(one.measured_used[place] for one in each) < bound


def test_rounds_without_an_update_are_counted_and_not_averaged_over() -> None:
    facts = watch(
        load(TWO, ["run.rounds=9", "facility.*.queue.delay=11.0", "facility.*.first_delay=11.0"]),
        Depth(models=2, least_loss=0.5),
    )
    assert facts.empty_rounds > 0
    assert facts.used[-1] == facts.rounds - facts.empty_rounds
    assert facts.at[0] > 1, "nothing is there to be averaged before the first update"


def test_departures_from_the_theorem_are_named() -> None:
    timing = EXPERIMENTS / "timing.toml"
    assert departures(load(TWO)) == []
    said = " ".join(departures(load(timing, ["task.name=digits", "strategy.fedqueue.lr_scaling=none"])))
    for word in ("adam", "ReLU", "epochs", "E_min / E_k"):
        assert word in said
    assert "momentum" in " ".join(departures(load(TWO, ["task.momentum=0.5"])))


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (["run.strategy=fedavg"], ConfigError, "is 'fedavg', and the theorem is about 'fedqueue'"),
        (["task.name=timing"], ConfigError, "trains nothing"),
        (["strategy.fedqueue.absent=0.5"], ConfigError, "absent 0"),
        (["strategy.fedqueue.stay=auto"], ConfigError, "stay must be off"),
        (["run.rounds=1", "facility.*.queue.delay=30.0"], TaskError, "no round had an update"),
        (
            ["run.rounds=9", "task.name=tests.test_theorem:root", "run.learning_rate=9.0"],
            TaskError,
            "try a rate below 9",
        ),
    ],
)
def test_what_the_theorem_is_not_about_is_refused(changes: list[str], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        watch(load(TWO, changes), Depth(models=2))


def test_loss_below_the_least_there_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="below --least-loss 1"):
        watch(load(TWO, ["run.rounds=5"]), Depth(models=2, least_loss=1.0))
