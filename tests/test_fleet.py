"""Jobs trained side by side in slots, and runs that share a device: the same as alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedqueue.aggregate import roles_of
from fedqueue.config import Config, parse
from fedqueue.errors import FedQueueError, TaskError
from fedqueue.moments import no_moments
from fedqueue.protocol.aggregation import buffer_roles, split_moments
from fedqueue.protocol.messages import WorkTaken
from fedqueue.sim.runner import Learned, simulate
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import batches, make_task, seed_of_job, share_out, workload_of
from fedqueue.training.workload import Workload, load_workload
from fedqueue_reproduction.fleet import run_many
from fedqueue_reproduction.lanes import Lanes, RecordedTask, rows_of, why_not_in_lanes
from fedqueue_reproduction.recorded import SlotJob
from fedqueue_reproduction.slots import Slots, why_not_in_slots
from fedqueue_reproduction.stacked import Stack, cross_entropy, keyed_drop, why_not
from tests.conftest import STRATEGY_NAMES, facility, trace_of


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 5, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 7),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(7, 3),
    )


def images(count: int) -> tuple[Tensor, Tensor]:
    """With an even background, as digits have it: pooled windows then hold the same value four times."""
    inputs = torch.full((count, 2, 8, 8), -0.4)
    inputs[:, :, 2:6, 1:7] = torch.randn(count, 2, 4, 6)
    return inputs, torch.randint(0, 3, (count,))


class Normalised(nn.Module):
    """A network that cannot be stacked: it is no Sequential, and it keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(nn.functional.relu(self.norm(self.first(x))).mean((2, 3)))
        return outputs


def normalised(**fields: Any) -> Workload:
    def mirrored(inputs: Tensor, draws: Tensor) -> Tensor:
        return torch.where((draws & 1).bool().view(-1, 1, 1, 1), inputs.flip(3), inputs)

    chosen = {"make_model": Normalised, "augment": mirrored, "recordable": True, **fields}
    return Workload(train=images(90), test=images(60), **chosen)


def config_of(strategy: str, seed: int, options: dict[str, Any] | None = None, **changes: Any) -> Config:
    fixed = {"steps": 30} if strategy in ("fedavg", "fedasync", "fedbuff") else {}
    tree: dict[str, Any] = {
        "run": {"strategy": strategy, "seed": seed, "seconds": 45.0, "learning_rate": 0.01},
        "task": {"name": "digits", **changes.pop("task", {})},
        "strategy": {strategy: options or fixed},
        "facility": [facility("east"), facility("west", steps_per_second=5.0), facility("north")],
        **changes,
    }
    return parse(tree)


def scores(config: Config, learned: Learned | None = None) -> list[tuple[float, float]]:
    seen: list[tuple[float, float]] = []

    def listen(event: Any, _: object) -> None:
        if type(event).__name__ == "ModelScored":
            seen.append((event.at, event.metrics["score"]))

    simulate(config, listeners=[listen], learned=learned)
    return seen


def fleet_scores(configs: list[Config], slots: int) -> list[list[tuple[float, float]]]:
    found = dict(run_many(configs, lambda i, learned: scores(configs[i], learned), device="cpu", slots=slots))
    return [found[i] for i in range(len(configs))]


def test_a_stacked_network_computes_and_differentiates_as_its_copies_do() -> None:
    torch.manual_seed(1)
    copies = [small_network() for _ in range(3)]
    stack = Stack(copies[0])
    rows = torch.stack([stack.flatten(dict(copy.state_dict())) for copy in copies])
    leaves = {name: view.detach().requires_grad_() for name, view in stack.unflatten(rows).items()}
    inputs, targets = images(3 * 6)
    inputs, targets = inputs.view(3, 6, 2, 8, 8), targets.view(3, 6)
    used = torch.ones(3, 6, dtype=torch.bool)
    used[1, 4:] = False
    outputs = stack.outputs(leaves, inputs, None)
    gradients = torch.autograd.grad(cross_entropy(outputs, targets, used).sum(), list(leaves.values()))
    for slot, copy in enumerate(copies):
        copy.eval()
        alone = copy(inputs[slot])
        torch.testing.assert_close(outputs[slot], alone)
        loss = nn.functional.cross_entropy(alone[used[slot]], targets[slot][used[slot]])
        for gradient, parameter in zip(gradients, copy.parameters(), strict=True):
            torch.testing.assert_close(gradient[slot], torch.autograd.grad(loss, parameter, retain_graph=True)[0])


def test_a_slot_trains_as_the_plain_loop_does_whatever_runs_beside_it() -> None:
    """Adam, a proximal term and a drift, by torch itself."""
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    samples = (torch.randn(40, 6), torch.randint(0, 3, (40,)))
    stack = Stack(network)
    slots = Slots(stack, samples, slots=3, batch_size=4, most_steps=5)
    start = dict(network.state_dict())
    ways = {name: torch.randn(tensor.shape) for name, tensor in start.items()}
    # Of other lengths and rates; the third has batches of two samples; two come while others run, the last of them
    # where a job with a proximal term and a drift was before it.
    plans = [(9, 0.01, 4, 0.0, False), (20, 0.02, 4, 0.0, True), (6, 0.05, 2, 3.0, True), (7, 0.02, 4, 0.0, False)]
    jobs = [
        SlotJob(
            row=stack.flatten(start),
            batches=torch.randint(0, 40, (n, size)),
            learning_rate=rate,
            key=n,
            proximal=proximal,
            drift=stack.flatten(ways) if drifts else None,
        )
        for n, rate, size, proximal, drifts in plans
    ]
    slots.load({0: jobs[0], 2: jobs[2]})
    slots.advance(4)
    slots.load({1: jobs[1]})
    slots.advance(4)
    third = slots.take([2])
    slots.load({2: jobs[3]})
    slots.advance(20)
    rest = slots.take([0, 1, 2])
    assert rest[1].all()
    for row, job in zip([*rest[0], *third[0]], [jobs[0], jobs[1], jobs[3], jobs[2]], strict=True):
        alone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        alone.load_state_dict(start)
        adam = torch.optim.Adam(alone.parameters(), lr=job.learning_rate)
        for batch in job.batches:
            adam.zero_grad()
            loss = nn.functional.cross_entropy(alone(samples[0][batch]), samples[1][batch])
            away = sum((now - start[name]).square().sum() for name, now in alone.named_parameters())
            torch.autograd.backward(loss + job.proximal / 2 * away)
            adam.step()
            for name, parameter in alone.named_parameters():
                if job.drift is not None:
                    parameter.data.add_(ways[name], alpha=job.learning_rate)
        for name, value in stack.unflatten(row).items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_dropout_depends_on_the_key_and_the_step_and_keeps_the_mean() -> None:
    x = torch.ones(4, 100, 200)
    dropped = keyed_drop(torch.tensor([7, 8, 7, 7]), torch.tensor([3, 3, 4, 3]))(x, 0.25, 1)
    assert torch.equal(dropped[0], dropped[3])
    for other in (1, 2):
        assert 0.60 < (dropped[0] == dropped[other]).double().mean() < 0.65  # 0.75^2 + 0.25^2
    assert sorted(set(dropped.flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert dropped[0].mean(0).std().item() == pytest.approx((0.25 / 0.75 / 100) ** 0.5, rel=0.2)
    assert not torch.equal(dropped[0], keyed_drop(torch.tensor([7]), torch.tensor([3]))(x[:1], 0.25, 2)[0])


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_run_in_a_fleet_scores_as_it_does_alone(strategy: str) -> None:
    configs = [config_of(strategy, seed) for seed in (1, 2, 3)]
    together = fleet_scores(configs, slots=4)
    for config, curve in zip(configs, together, strict=True):
        alone = scores(config)
        assert [at for at, _ in curve] == [at for at, _ in alone]
        # Sums in another order: a sample or two of 359 may fall on the other side.
        assert [score for _, score in curve] == pytest.approx([score for _, score in alone], abs=2.5 / 359)


@pytest.mark.parametrize("moments", ["own", "shared"])
def test_jobs_that_stay_and_train_ahead_of_their_models_score_in_a_fleet_as_alone(moments: str) -> None:
    stays = {"stay": 30.0, "between": "train", "absent": 0.7, "rounds": "auto"}
    faults = [{"kind": kind, "probability": 0.2} for kind in ("fail", "preempt")]
    sites = [facility(name, latency_seconds=0.4) for name in ("east", "west", "north")]
    chosen = {"facility": sites, "fault": faults, "model": {"moments": moments}}
    configs = [config_of("jit", seed, options=stays, **chosen) for seed in (1, 2)]
    together = fleet_scores(configs, slots=3)
    assert [fleet_scores([config], slots=3)[0] for config in configs] == together
    for config, curve in zip(configs, together, strict=True):
        ahead = [event.ahead for event, _ in trace_of(config) if isinstance(event, WorkTaken)]
        assert sum(map(bool, ahead)) > 5
        alone = scores(config)
        assert [at for at, _ in curve] == [at for at, _ in alone]
        assert [score for _, score in curve] == pytest.approx([score for _, score in alone], abs=4.5 / 359)


def test_staying_jobs_with_control_variates_score_in_a_fleet_as_alone_whatever_fails() -> None:
    faults = [{"kind": kind, "probability": 0.2} for kind in ("fail", "preempt", "corrupt")]
    config = config_of("scaffold", 3, options={"steps": 30, "stay": 30.0}, fault=faults)
    together, alone = fleet_scores([config, config_of("fedavg", 3)], slots=3)[0], scores(config)
    assert [at for at, _ in together] == [at for at, _ in alone]
    assert [score for _, score in together] == pytest.approx([score for _, score in alone], abs=4.5 / 359)


def test_the_number_of_runs_beside_it_changes_no_bit_of_a_run() -> None:
    configs = [config_of(strategy, seed) for strategy in ("jit", "fedasync") for seed in (1, 2)]
    together = fleet_scores(configs, slots=4)
    assert [fleet_scores([config], slots=4)[0] for config in configs] == together


def test_a_fleet_meets_faults_as_a_run_alone_does() -> None:
    faults = [
        {"kind": "corrupt", "probability": 0.3},
        {"kind": "preempt", "probability": 0.2},
        {"kind": "fail", "probability": 0.2},
        {"kind": "outage", "at": 12.0, "seconds": 8.0, "facility": "west", "loses_jobs": True},
    ]
    config = config_of("fedqueue", 4, fault=faults)
    tallies: list[dict[str, Any]] = []
    for learned in (None, "fleet"):
        if learned is None:
            tallies.append(simulate(config))
        else:
            tallies.append(next(run_many([config], lambda i, given: simulate(config, learned=given), device="cpu"))[1])
    for key in ("updates", "jobs", "virtual_seconds", "local_steps", "model_transfers"):
        assert tallies[0][key] == tallies[1][key]
    assert tallies[0]["updates"]["rejected"] > 0


def test_a_lane_trains_as_the_plain_loop_does_whatever_runs_beside_it() -> None:
    settings = TaskSettings(name="tests.test_fleet:normalised", partition="iid", batch_size=16)
    task = make_task(settings, facilities=2, seed=3)
    workload, start = workload_of(settings), task.initial_model()
    rows = rows_of(Normalised())
    lanes = Lanes(workload, rows, workload.train, slots=3, batch_size=16)
    parts = share_out(workload, settings, 2, seed=3)
    # Facility, steps, key; the last one comes into a lane that was used before.
    plans = [(0, 9, 4), (1, 12, 5), (1, 4, 6), (0, 7, 4)]
    rates = [0.01, 0.02, 0.05, 0.03]

    def job(number: int) -> SlotJob:
        (place, steps, key), rate = plans[number], rates[number]
        seed = seed_of_job(3, place, key)
        order = list(batches(parts[place], 16, steps, torch.Generator().manual_seed(seed)))
        return SlotJob(rows.flatten(start), torch.stack(order), rate, seed)

    lanes.load({0: job(0), 2: job(2)})
    lanes.advance(3)
    lanes.load({1: job(1)})
    lanes.advance(12)
    found = list(lanes.take([0, 1, 2])[0])
    lanes.load({0: job(3)})
    lanes.advance(20)
    found += lanes.take([0])[0]
    for row, (place, steps, key), rate in zip(found, plans, rates, strict=True):
        plain = task.train(facility=place, model=start, steps=steps, learning_rate=rate, key=key).model
        for name, value in rows.unflatten(row).items():
            torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
    assert lanes.losses(0).item() / 7 == pytest.approx(
        task.train(facility=0, model=start, steps=7, learning_rate=0.03, key=4).loss, rel=1e-4
    )


def test_a_job_by_recorded_steps_hands_in_what_the_plain_loop_does() -> None:
    """As on an accelerator, here without graphs: state dict, counters, loss and scores; ended early too, and from
    shared moments, with and without a last change of the model."""
    settings = TaskSettings(name="tests.test_fleet:normalised", partition="iid", batch_size=16)
    task, workload = make_task(settings, facilities=1, seed=3), workload_of(settings)
    assert RecordedTask.why_not(workload, settings) is None
    assert "Adam" in str(RecordedTask.why_not(workload, dataclasses.replace(settings, optimizer="sgd")))
    recorded, start = RecordedTask(workload, settings, facilities=1, seed=3), task.initial_model()
    job: dict[str, Any] = {"facility": 0, "learning_rate": 0.01, "key": 8}
    nobodys = {**start, **no_moments(start, roles_of(start, task.declared_roles()))}
    shared = {**start, **split_moments(task.train(model=nobodys, steps=20, **job).model)[1]}
    moved = {name: torch.full_like(tensor, 0.01) for name, tensor in start.items()}
    for during, done, model, change in (
        (None, 9, start, None),
        (range(4), 4, start, None),
        (None, 9, nobodys, None),
        (range(4), 4, shared, None),
        (None, 9, shared, moved),
    ):
        found = recorded.train(model=model, steps=9, during=during, change=change, **job)
        plain = task.train(model=model, steps=done, change=change, **job)
        assert found.samples == plain.samples == 16 * done
        assert found.loss == pytest.approx(plain.loss, rel=1e-4)
        assert list(found.model) == list(plain.model)
        for name, tensor in plain.model.items():
            torch.testing.assert_close(found.model[name], tensor, rtol=1e-4, atol=1e-5)
        assert recorded.score(found.model) == pytest.approx(task.score(plain.model), rel=1e-3)


def test_batches_smaller_than_others_are_no_filled_up_ones() -> None:
    """A normalisation sees the samples of its own batch, and no others."""
    workload = normalised()
    module = Normalised()
    rows = rows_of(module)
    lanes = Lanes(workload, rows, workload.train, slots=1, batch_size=16)
    lanes.load({0: SlotJob(rows.flatten(module.state_dict()), torch.tensor([[3, 4, 5]]), 0.01, 1)})
    lanes.advance(1)
    alone = Lanes(workload, rows, workload.train, slots=1, batch_size=3)
    alone.load({0: SlotJob(rows.flatten(module.state_dict()), torch.tensor([[3, 4, 5]]), 0.01, 1)})
    alone.advance(1)
    assert torch.equal(lanes.take([0])[0], alone.take([0])[0])


def test_a_row_holds_a_model_in_parts_that_are_averaged_alike() -> None:
    module = Normalised()
    rows = rows_of(module, buffer_roles(module))
    row = rows.flatten(module.state_dict())
    for name, value in rows.unflatten(row).items():
        assert torch.equal(value, module.state_dict()[name])
    parts = rows.parts(row)
    assert list(rows.roles.values()) == ["parameter", "statistic"]
    assert sum(part.count_nonzero() for part in parts.values()) == row.count_nonzero()
    assert parts["buffers: statistic"].sum() == 6.0  # of running_var
    assert torch.equal(rows.join(parts), row)


def test_runs_with_normalisation_share_a_device_and_score_as_alone() -> None:
    task = {"name": "tests.test_fleet:normalised", "batch_size": 8}
    configs = [config_of(strategy, 5, task=task) for strategy in ("fedavg", "fedasync", "jit")]
    together = fleet_scores(configs, slots=2)
    assert [fleet_scores([config], slots=2)[0] for config in configs] == together
    for config, curve in zip(configs, together, strict=True):
        alone = scores(config)
        assert [at for at, _ in curve] == [at for at, _ in alone]
        assert [score for _, score in curve] == pytest.approx([score for _, score in alone], abs=2.5 / 60)


def test_an_error_in_one_run_ends_all_and_is_raised() -> None:
    configs = [config_of("fedavg", seed) for seed in (1, 2, 3)]

    def work(number: int, learned: Learned) -> list[tuple[float, float]]:
        if number == 1:
            raise ValueError("of run 1")
        return scores(configs[number], learned)

    with pytest.raises(ValueError, match="of run 1"):
        list(run_many(configs, work, device="cpu", slots=2))


def test_what_cannot_be_stacked_is_said_in_one_line() -> None:
    assert "buffers" in str(why_not(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))))
    assert "stride" in str(why_not(nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1))))
    assert "not a Sequential" in str(why_not(nn.Linear(2, 2)))
    digits = load_workload("digits", {})
    assert why_not_in_slots(digits, digits.make_model(), TaskSettings()) is None
    assert "Adam" in str(why_not_in_slots(digits, digits.make_model(), TaskSettings(optimizer="sgd")))
    with pytest.raises(TaskError, match="not plain Adam; use --device cpu"):
        list(run_many([config_of("fedavg", 1, task={"optimizer": "sgd"})], lambda i, learned: None, device="cpu"))
    for reason, workload, module in (
        ("recordable", normalised(recordable=False), Normalised()),
        ("layer 1 draws random numbers", normalised(), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))),
        ("layer 0 has no momentum", normalised(), nn.Sequential(nn.BatchNorm1d(2, momentum=None))),
        ("weight is torch.float64", normalised(), nn.Linear(2, 2).double()),
        ("do not train", normalised(), nn.Linear(2, 2).requires_grad_(False)),
        ("loss or a score of its own", normalised(loss=nn.functional.mse_loss), Normalised()),
    ):
        assert reason in str(why_not_in_lanes(workload, module, TaskSettings()))
    assert "proximal" in str(why_not_in_lanes(normalised(), Normalised(), TaskSettings(proximal=0.1)))
    assert "augments" in str(why_not_in_slots(normalised(), digits.make_model(), TaskSettings()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_an_accelerator_it_is_said() -> None:
    with pytest.raises(FedQueueError, match="finds no CUDA device"):
        list(run_many([config_of("fedavg", 1)], lambda i, learned: None))
