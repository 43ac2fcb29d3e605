"""Baselines that treat models in a way of their own: each learns, and its numbers are those one gets by hand."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedqueue.aggregate import Contribution, Moments, StateDict, Variates, take_step
from fedqueue.cli import main
from fedqueue.config import Config, FaultSettings, parse
from fedqueue.coordinator.store import object_path
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.codec import read
from fedqueue.protocol.messages import Aggregate, ModelReady, Record, ServerStep
from fedqueue.sim.runner import simulate
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import make_task
from tests.conftest import check_refusal, commands_of, config_of, facility, trace_of
from tests.coordinators import VALUES, ended, serving, update
from tests.waiting import wait_for

LEARN: dict[str, dict[str, Any]] = {
    "fedprox": {"steps": 40, "proximal": 0.1},
    "fedadam": {"steps": 40},
    "fadas": {"steps": 40, "buffer": 2},
    "scaffold": {"steps": 40},
}


def digits(strategy: str, options: dict[str, Any], **task: Any) -> Config:
    return parse(
        {
            "run": {"strategy": strategy, "seed": 3, "rounds": 12, "learning_rate": 0.003, "targets": [0.85]},
            "task": {"name": "digits", "dirichlet_alpha": 0.3, **task},
            "trust": {"say": "unbounded"},  # as published
            "strategy": {strategy: options},
            "facility": [facility("east"), facility("west", steps_per_second=20.0), facility("north")],
        }
    )


@pytest.mark.parametrize("strategy", LEARN)
def test_each_learns_to_tell_digits_apart(strategy: str) -> None:
    assert simulate(digits(strategy, LEARN[strategy]))["score"]["final"] > 0.85


def test_the_server_of_fedadam_takes_the_steps_that_one_gets_by_hand() -> None:
    """Two rounds: d is 1, then 3; m is 0.5, then 1.75; v is 0.75 + 0.25, then 0.75 + 9/4 = 3."""
    step = ServerStep(rate=2.0, beta1=0.5, beta2=0.75, epsilon=1.0)
    zero, one, four = ({"w": torch.full((1,), value)} for value in (0.0, 1.0, 4.0))
    first, moments = take_step(zero, [Contribution(weight=1.0, trained=one, base=zero)], "add_deltas", step, ())
    assert first["w"].item() == pytest.approx(2 * 0.5 / (1 + 1))
    shares = [Contribution(weight=0.5, trained=four, base=one), Contribution(weight=0.5, trained=four, base=one)]
    second, moments = take_step(first, shares, "add_deltas", step, moments)
    assert second["w"].item() == pytest.approx(0.5 + 2 * 1.75 / (3**0.5 + 1))
    assert [moment["w"].item() for moment in moments] == pytest.approx([1.75, 3.0])


def test_the_largest_second_moment_divides_if_it_is_kept() -> None:
    """d is 2, then 0: v falls from 2.125 to 1.0625, and v-hat does not."""
    step = ServerStep(rate=1.0, beta1=0.0, beta2=0.5, epsilon=0.5, largest=True)
    zero, two = {"w": torch.zeros(1)}, {"w": torch.full((1,), 2.0)}
    model, moments = take_step(zero, [Contribution(weight=1.0, trained=two, base=zero)], "add_deltas", step, ())
    assert model["w"].item() == pytest.approx(2 / (2.125**0.5 + 0.5))
    _, moments = take_step(model, [Contribution(weight=1.0, trained=two, base=two)], "add_deltas", step, moments)
    assert [moment["w"].item() for moment in moments] == [0.0, 1.0625, 2.125]


def test_fadas_takes_shorter_steps_with_updates_that_are_too_stale() -> None:
    sites = [facility("east"), facility("west", steps_per_second=1.0)]
    options = {"buffer": 1, "threshold": 1, "rate": 0.6, "steps": 20}
    trace = trace_of(config_of("fadas", facilities=sites, options=options, rounds=30))
    stale = {s.key: made.step.rate for made in commands_of(trace, Aggregate) for s in made.weights}
    fates = {(r.facts["job"], 0, 0): r.facts["staleness"] for r in commands_of(trace, Record) if "staleness" in r.facts}
    assert max(fates.values()) > 2
    for key, staleness in fates.items():
        assert stale[key] == pytest.approx(0.6 / staleness if staleness > 1 else 0.6)


def test_control_variates_are_those_one_gets_by_hand() -> None:
    """Two facilities from w = 0, a length of steps times rate of 2: to -4 and 0, so their mean steps are 2 and 0."""
    variates = Variates({"w": torch.zeros(1)}, {"w": "parameter"})

    def train(facility: int, start: float, end: float) -> None:
        base, trained = {"w": torch.full((1,), start)}, {"w": torch.full((1,), end)}
        variates.trained(("job", facility), facility, base, trained, length=2.0)

    def now() -> list[float]:
        own = (variates.facilities[facility] for facility in (0, 1))
        return [tensors["w"].item() for tensors in (variates.server, *own)]

    train(0, 0.0, -4.0)
    train(1, 0.0, 0.0)
    assert variates.drift(0)["w"].item() == 0.0
    variates.move([(("job", 0), 0.5), (("job", 1), 0.5)])
    assert now() == [1.0, 2.0, 0.0]
    assert [variates.drift(facility)["w"].item() for facility in (0, 1, 2)] == [1.0, -1.0, -1.0]
    train(0, -2.0, -4.0)  # of the next round one is alone: it took 1 a step, which is 0 more than all do
    variates.move([(("job", 0), 0.5)])
    assert now() == [1.0, 2.0, 0.0]
    train(1, -3.0, 5.0)  # it took -4 a step: 5 less than all do
    variates.move([(("job", 1), 0.5)])
    assert now() == [-1.5, 2.0, -5.0]


def test_a_drift_corrects_every_step_of_plain_gradient_descent() -> None:
    """For plain gradient descent that is the same as a correction of the gradient."""
    task = make_task(TaskSettings(name="digits", optimizer="sgd", partition="iid"), facilities=1, seed=1)
    start = task.initial_model()
    drift = {name: torch.full_like(tensor, 0.01) for name, tensor in start.items()}
    facts: dict[str, Any] = {"facility": 0, "model": start, "learning_rate": 0.1, "key": 5}
    plain, drifted = task.train(**facts, steps=1), task.train(**facts, steps=1, drift=drift)
    for name, tensor in plain.model.items():
        torch.testing.assert_close(drifted.model[name], tensor + 0.1 * 0.01)


def test_the_servers_variate_is_the_mean_of_the_facilities_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Variates] = []

    def made(*given: Any) -> Variates:
        kept.append(Variates(*given))
        return kept[-1]

    monkeypatch.setattr("fedqueue.aggregate.Variates", made)
    faults = [{"kind": kind, "probability": 0.15} for kind in ("fail", "preempt", "corrupt")]
    outage = {"kind": "outage", "at": 30.0, "seconds": 40.0, "facility": "west"}
    config = digits("scaffold", {"steps": 20, "stay": 60.0})
    faulty = dataclasses.replace(config, fault=[read(FaultSettings, f, "fault") for f in (*faults, outage)])
    assert simulate(faulty)["rounds"] == 12
    (variates,) = kept
    for name, server in variates.server.items():
        mean = sum((own[name] for own in variates.facilities.values()), torch.zeros_like(server)) / 3
        torch.testing.assert_close(server, mean, rtol=1e-4, atol=1e-4)
    assert any(server.abs().max() > 0 for server in variates.server.values())


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_real_run_refuses_control_variates_before_it_begins(command: str, in_tmp: Path, capsys: Any) -> None:
    assert main(["init", "mine.toml"]) == 0
    capsys.readouterr()
    change = ["--set", "run.strategy=scaffold"]
    check_refusal([command, "mine.toml", *change], "scaffold has control variates, which real jobs do not", capsys)


def test_moments_survive_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    """Three models with a kill after each: the last is to the bit what one gets in memory."""
    step = ServerStep(rate=0.5, beta1=0.9, beta2=0.99, epsilon=0.001)
    model: StateDict = {"weight": torch.zeros(VALUES)}
    moments: Moments = ()
    with serving(tmp_path, ("north",), strategy="fedadam", options={"steps": 10, "rate": 0.5}) as served:
        for version, value in enumerate((0.5, -2.0, 1.0), 1):
            north = served.facility("north")
            wait_for(lambda: bool(north.poll()["orders"]), "an order", served.said)  # noqa: B023
            order = north.running()
            assert north.hand_in(order, update(tmp_path, value))["status"] == "accepted"
            north.poll(ended(order.sequence))
            contribution = Contribution(weight=1.0, trained={"weight": torch.full((VALUES,), value)}, base=model)
            model, moments = take_step(model, [contribution], "add_deltas", step, moments)
            wait_for(lambda: served.status()["model"] == version, f"model {version}", served.said)  # noqa: B023
            served.stop(signal.SIGKILL)
            served.start()
            served.agents.clear()
        with LedgerReader(served.folder / FILE) as reader:
            events = [event for event, _ in reader.steps() if isinstance(event, ModelReady)]
        found_model = load_file(object_path(served.folder, events[-1].digest))
        assert torch.equal(found_model["weight"], model["weight"])
        for digest, moment in zip(events[-1].moments, moments, strict=True):
            assert torch.equal(load_file(object_path(served.folder, digest))["weight"], moment["weight"])
        assert served.replays() > 0


def test_fedprox_brings_its_proximal_term_to_the_task_and_other_strategies_may_have_one() -> None:
    assert digits("fedprox", {"proximal": 0.25}, proximal=3.0).task.proximal == 0.25
    assert digits("fedavg", {}, proximal=3.0).task.proximal == 3.0


def test_without_its_term_fedprox_is_fedavg() -> None:
    plain, prox = simulate(digits("fedavg", {})), simulate(digits("fedprox", {"proximal": 0.0}))
    assert plain["score"] == prox["score"]
    assert simulate(digits("fedprox", {"proximal": 1.0}))["score"] != plain["score"]
