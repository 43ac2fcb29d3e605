"""What bounds a facility: its say, clipping, and that honest training is not touched by either."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fedqueue import tensorsum
from fedqueue.agent.http_transport import update_path
from fedqueue.aggregate import Contribution, aggregate, norm_of_change, take_step
from fedqueue.combining import combined
from fedqueue.config import parse
from fedqueue.ledger import LedgerReader
from fedqueue.protocol.aggregation import Norms, Say, at_most_one
from fedqueue.protocol.contract import Receipt, facility_of
from fedqueue.protocol.messages import (
    Aggregate,
    Event,
    Guard,
    JobEnded,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    Record,
    RunStarted,
    ServerStep,
    SetTimer,
    TimerFired,
    UpdateArrived,
)
from fedqueue.protocol.plan import FacilityProfile, Plan
from fedqueue.protocol.strategies.fedavg import FedAvg
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions
from fedqueue.sim.runner import simulate
from tests.conftest import facility
from tests.coordinators import Facility, Served, ended, serving, started, update
from tests.waiting import wait_for

NAMES = st.sampled_from("abcd")


# Rules ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(NAMES, st.floats(0, 1)), max_size=30))
def test_updates_that_meet_at_a_cutoff_are_together_worth_one_fresh_one_at_most(
    updates: list[tuple[str, float]],
) -> None:
    names, worth = [name for name, _ in updates], [value for _, value in updates]
    bounded = at_most_one(list(zip(names, worth, strict=True)))
    for name in set(names):
        mine = [(was, now) for owner, was, now in zip(names, worth, bounded, strict=True) if owner == name]
        assert sum(now for _, now in mine) <= 1 + 1e-12
        if sum(was for was, _ in mine) <= 1:
            assert all(was == now for was, now in mine), "what is within the bound is not touched, to the last bit"


@given(
    shares=st.lists(st.floats(0.01, 1), min_size=2, max_size=4),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4), st.floats(0, 0.5)), max_size=40),
)
def test_who_counts_as_it_comes_has_its_data_weight_and_one_update_more_at_most(
    shares: list[float], arrivals: list[tuple[int, float, float]]
) -> None:
    weights = {str(number): share for number, share in enumerate(shares)}
    say, at, counted = Say(weights, 10.0), 0.0, list[tuple[float, str, float]]()
    for number, gap, weight in arrivals:
        name, at = str(number % len(shares)), at + gap
        counted.append((at, name, say.allow(at, name, weight, full=0.5)))
        assert counted[-1][2] <= weight
        recent = [(owner, worth) for since, owner, worth in counted if since > at - 10.0]
        mine = sum(worth for owner, worth in recent if owner == name)
        share = weights[name] / sum(shares)
        bound = 0.5 + (sum(worth for _, worth in recent) - mine) * share / (1 - share)
        assert mine <= bound + 1e-9 or counted[-1][2] == 0


@given(
    st.lists(st.tuples(NAMES, st.floats(0, 1e6), st.floats(0, 10)), min_size=1, max_size=30),
    st.floats(0, 1e300),
    st.floats(0, 10),
)
def test_clipping_never_makes_an_update_larger_and_leaves_none_above_its_limit(
    seen: list[tuple[str, float, float]], norm: float, length: float
) -> None:
    norms = Norms(10.0)
    for name, usual, long in seen:
        norms.seen(name, usual, long)
    part = norms.part(norm, length)
    assert 0 <= part <= 1
    assert norms.part(part * norm, length) == pytest.approx(1.0), "what is left is not clipped again"


def test_one_of_three_that_floods_does_not_move_what_is_usual() -> None:
    norms = Norms(10.0)
    for name in ("a", "b", *["c"] * 100):
        norms.seen(name, 1e9 if name == "c" else 1.0, 1.0)
    assert norms.part(1e9, 1.0) == pytest.approx(1e-8)
    assert norms.part(9.9, 1.0) == 1.0


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    rule=st.sampled_from(["add_deltas", "mix_models"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    shares=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 1)), min_size=1, max_size=5),
)
def test_a_clipped_sum_is_the_same_in_memory_and_by_file_and_what_its_definition_says(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rule: str,
    dtype: torch.dtype,
    shares: list[tuple[float, float, int]],
) -> None:
    folder, generator = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(seed)

    def model() -> dict[str, torch.Tensor]:
        return {"w": torch.randn(7, generator=generator, dtype=torch.float64).to(dtype)}

    bases = [model(), model()]
    for number, base in enumerate(bases):
        save_file(base, folder / f"base{number}")
    inside, outside, precise = [], [], bases[0]["w"].double()
    for number, (weight, clip, which) in enumerate(shares):
        trained = model()
        save_file(trained, path := folder / f"update{number}")
        inside.append(Contribution(weight=weight, trained=trained, base=bases[which], clip=clip))
        outside.append(
            tensorsum.FileContribution(
                weight=weight, trained=path, base=folder / f"base{which}", base_key=which, clip=clip
            )
        )
        change = clip * (trained["w"].double() - bases[which]["w"].double())
        away = 0 * change if rule == "add_deltas" else bases[which]["w"].double() - bases[0]["w"].double()
        precise = precise + weight * (change + away)
        length = norm_of_change(trained, bases[which], {"w": "parameter"})
        assert length == pytest.approx(float((trained["w"].double() - bases[which]["w"].double()).norm()))
        assert tensorsum.norm_of_change(path, folder / f"base{which}") == pytest.approx(length)
    made = aggregate(bases[0], inside, rule)["w"]
    tensorsum.aggregate(folder / "base0", outside, rule, folder / "out")
    assert torch.equal(load_file(folder / "out")["w"], made)
    assert torch.allclose(made.double(), precise, rtol=2e-2, atol=5e-2 if dtype != torch.float64 else 1e-9)


GUARDS = [None, *(Guard(rule=rule, hostile=0.25) for rule in ("median", "trimmed", "krum"))]


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    rule=st.sampled_from(["add_deltas", "mix_models"]),
    guard=st.sampled_from(GUARDS),
    step=st.sampled_from([None, ServerStep(rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-3)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    shares=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from([1.0, 0.3]), st.integers(0, 1), NAMES), min_size=1, max_size=6
    ),
)
def test_every_rule_gives_the_same_bits_in_memory_and_by_file(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rule: str,
    guard: Guard | None,
    step: ServerStep | None,
    dtype: torch.dtype,
    shares: list[tuple[float, float, int, str]],
) -> None:
    folder, generator = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(seed)

    def model() -> dict[str, torch.Tensor]:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        return {
            "w": draw(5, 3).to(dtype),
            "empty": draw(0).to(dtype),
            "phase": torch.view_as_complex(draw(2, 2).float()),
            "norm.running_var": draw(4).square().to(dtype),
            "norm.num_batches_tracked": torch.randint(0, 3, (), generator=generator),
            "mask": torch.rand(3, generator=generator) > 0.5,
        }

    bases = [model(), model()]
    for number, base in enumerate(bases):
        save_file(base, folder / f"base{number}")
    inside, outside = [], []
    for number, (weight, clip, which, voice) in enumerate(shares):
        save_file(trained := model(), path := folder / f"update{number}")
        inside.append(Contribution(weight=weight, trained=trained, base=bases[which], clip=clip, voice=voice))
        there = folder / f"base{which}"
        outside.append(
            tensorsum.FileContribution(weight=weight, trained=path, base=there, base_key=which, clip=clip, voice=voice)
        )
    now, out = folder / "base0", folder / "out"
    if step is None:
        made = aggregate(bases[0], inside, rule, guard=guard)
        tensorsum.aggregate(now, outside, rule, out, guard=guard)
    else:
        made, moments = take_step(bases[0], inside, rule, step, (), guard=guard)
        files = [folder / "first", folder / "second"]
        tensorsum.take_step(now, outside, rule, out, tensorsum.FileStep(step=step, moments=(), out=files), guard=guard)
        for file, moment in zip(files, moments, strict=True):
            for name, tensor in load_file(file).items():
                assert torch.equal(tensor, moment[name]), name
    for name, tensor in load_file(out).items():
        assert torch.equal(tensor, made[name]), name
    said = [c.trained["norm.running_var"].double() for c in inside if c.weight > 0]
    if rule == "add_deltas" and said:
        values = torch.stack(said)
        assert (made["norm.running_var"].double() >= values.amin(dim=0)).all()
        assert (made["norm.running_var"].double() <= values.amax(dim=0)).all()


@given(
    st.lists(st.tuples(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(0.01, 1)), min_size=1, max_size=9),
    st.sampled_from(GUARDS[1:]),
)
def test_what_a_rule_makes_lies_within_the_range_of_what_was_handed_in(
    said: list[tuple[float, float]], guard: Guard
) -> None:
    values = np.array([[value] for value, _ in said], np.float32)
    made = combined(values, [weight for _, weight in said], guard)
    assert values.min() <= made[0] <= values.max()
    if len(said) == 1:
        assert made[0] == values[0, 0]


@pytest.mark.parametrize("guard", GUARDS[1:], ids=lambda guard: guard.rule)
@pytest.mark.parametrize("lie", [1e30, -1e30, -5.0, 0.0])
def test_one_of_four_moves_no_rule_beyond_what_the_honest_say(guard: Guard, lie: float) -> None:
    base = {"w": torch.zeros(3)}
    said = [Contribution(weight=0.25, trained={"w": torch.full((3,), v)}, base=base) for v in (0.9, 1.0, 1.1, lie)]
    made = aggregate(base, said, "add_deltas", guard=guard)["w"]
    assert 0.9 <= made.min() <= made.max() <= 1.1, made


def test_a_flood_of_one_facility_has_one_voice_under_every_rule() -> None:
    base = {"w": torch.zeros(3)}
    honest = [
        Contribution(weight=0.25, trained={"w": torch.full((3,), v)}, base=base, voice=v) for v in (0.9, 1.0, 1.1)
    ]
    lies = [Contribution(weight=0.01, trained={"w": torch.full((3,), 1e6)}, base=base, voice="liar")] * 25
    for guard in GUARDS[1:]:
        made = aggregate(base, [*lies, *honest], "add_deltas", guard=guard)["w"]
        assert 0.9 <= made.min() <= made.max() <= 1.1, (guard, made)


# Honest training is not touched --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedqueue", "jit", "fedasync", "fedbuff"])
def test_honest_training_is_never_clipped(strategy: str) -> None:
    """First updates, warm-up jobs of a few steps, stale ones and skewed data among them."""
    facilities = [
        facility(name, steps_per_second=speed, queue={"kind": "lognormal", "mean": mean, "rho": 0.9})
        for name, speed, mean in (("a", 30.0, 1.0), ("b", 10.0, 3.0), ("c", 20.0, 8.0), ("d", 4.0, 2.0))
    ]
    run = {"strategy": strategy, "seconds": 60.0, "learning_rate": 0.003, "warm_up": True}
    config = parse({"run": run, "task": {"name": "digits", "dirichlet_alpha": 0.1}, "facility": facilities})
    seen = 0

    def look(event: Any, commands: Any) -> None:
        nonlocal seen
        for command in commands:
            if isinstance(command, Aggregate):
                assert all(share.clip == 1 for share in command.weights), command
                seen += len(command.weights)

    simulate(config, listeners=[look])
    assert seen > 10


# A facility that floods, or hands in what is far too large, at a server at work ---------------------------------


def aggregates(served: Served) -> Iterator[dict[str, Any]]:
    with LedgerReader(served.folder / "ledger.sqlite") as ledger:
        for row in ledger.rows("SELECT body FROM commands WHERE kind = 'Aggregate' ORDER BY seq, place"):
            yield json.loads(row["body"])


def says(command: dict[str, Any]) -> dict[str, list[float]]:
    """The weights of each facility's updates."""
    found: dict[str, list[float]] = {}
    for share in command["weights"]:
        found.setdefault(facility_of(share["job_id"]), []).append(share["weight"])
    return found


def hand_in(who: Facility, content: bytes) -> None:
    """One more update; it gets another order at once where the strategy gives any."""
    assert who.hand_in(who.running(), content)["status"] == "accepted"
    who.taken = None


def test_a_facility_that_floods_a_round_counts_with_its_data_weight(tmp_path: Path) -> None:
    names = ("north", "south")
    with serving(tmp_path, facilities=names, plain=True, round_length=5.0, options={"pipeline": "off"}) as served:
        north, south = (served.facility(name) for name in names)
        north.poll()
        south.poll()
        content = update(tmp_path)

        def flooded() -> bool:
            """North hands in once, and South as often as it can until the next model is there."""
            made = served.status()["model"]
            hand_in(north, content)
            while served.status()["model"] == made:
                hand_in(south, content)
            return any(len(found.get("south", [])) >= 3 and "north" in found for found in map(says, aggregates(served)))

        wait_for(flooded, "a round with several updates of south and one of north", served.said)
        for found in map(says, aggregates(served)):
            assert sum(found.get("south", [0])) <= 0.5 + 1e-9 or "north" not in found, found
        assert served.replays() > 0


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff"])
def test_a_facility_that_floods_where_updates_count_as_they_come_has_one_update_and_its_share(
    strategy: str, tmp_path: Path
) -> None:
    names = ("north", "south")
    with serving(tmp_path, facilities=names, plain=True, strategy=strategy) as served:
        north, south = (served.facility(name) for name in names)
        north.poll()
        content = update(tmp_path)
        for who in (north, *[south] * 12):
            hand_in(who, content)
        wait_for(lambda: sum(len(c["weights"]) for c in aggregates(served)) >= 12, "the models", served.said)
        total = {name: sum(sum(says(c).get(name, [])) for c in aggregates(served)) for name in names}
        full = 0.5 if strategy == "fedasync" else 0.5 / 3
        assert total["north"] > 0
        assert total["south"] <= full + total["north"] + 1e-9
        assert served.replays() > 0


def test_an_update_that_is_far_too_large_counts_in_part(tmp_path: Path) -> None:
    names = ("north", "south", "south-1")
    with serving(tmp_path, facilities=names, plain=True, strategy="fedavg", server={"wait_for": 3}) as served:
        facilities = [served.facility(name) for name in names]
        for one in facilities:
            one.poll()
        for one, value in zip(facilities, (0.5, 1e30, 0.4), strict=True):
            hand_in(one, update(tmp_path, value))
        wait_for(lambda: served.status()["model"] == 1, "the model", served.said)
        (made,) = aggregates(served)
        parts = {facility_of(share["job_id"]): share.get("clip", 1.0) for share in made["weights"]}
        assert parts["north"] == parts["south-1"] == 1.0
        assert parts["south"] < 1e-28
        with LedgerReader(served.folder / "ledger.sqlite") as ledger:
            (ready,) = ledger.rows("SELECT body FROM events WHERE kind = 'ModelReady'")
            fates = ledger.rows("SELECT body FROM commands WHERE kind = 'Record'")
        digest = json.loads(ready["body"])["digest"]
        assert load_file(served.folder / "objects" / f"{digest}.safetensors")["weight"].abs().max() < 10 * 0.5
        assert sum("clip" in json.loads(row["body"])["facts"] for row in fates) == 1, "on record"
        assert served.replays() > 0


def is_at(served: Served, version: int) -> Callable[[], bool]:
    return lambda: bool(served.status()["model"] == version)


def fates_of(served: Served) -> dict[str, dict[str, Any]]:
    """By facility, of the newest update of each."""
    with LedgerReader(served.folder / "ledger.sqlite") as ledger:
        facts = [
            json.loads(row["body"])["facts"] for row in ledger.rows("SELECT body FROM commands WHERE kind = 'Record'")
        ]
    return {facility_of(found["job"]): found for found in facts if "fate" in found}


def test_a_sum_that_overflows_rejects_the_updates_of_whoever_did_it_and_the_run_goes_on(tmp_path: Path) -> None:
    """All that is handed in is finite; it is the sum that is not. Each model is of two updates of the first one."""
    names = ("a", "b", "c", "d")
    options = {"steps": 10, "buffer": 2, "alpha": 1.0, "exponent": 0.0}
    how: dict[str, Any] = {"strategy": "fedbuff", "options": options, "trust": {"clip": 0.0, "say": "unbounded"}}
    with serving(tmp_path, names, plain=True, server={"wait_for": 4}, **how) as served:
        for name in names:
            served.facility(name).poll()
        orders = {name: served.facility(name).running() for name in names}
        for number, (name, value) in enumerate({"a": 3e38, "b": 3e38, "c": 0.5, "d": 3e38}.items()):
            assert served.agents[name].hand_in(orders[name], update(tmp_path, value))["status"] == "accepted"
            if number % 2:
                wait_for(is_at(served, 1 + number // 2), "the model", served.said)
        assert served.status()["state"] == "running"
        fates = fates_of(served)
        assert {name: found["fate"] for name, found in fates.items()} == {
            **dict.fromkeys("abc", "aggregated"),
            "d": "rejected",
        }
        assert "not finite once summed as float32" in fates["d"]["reason"]
        assert "moves that furthest" in fates["d"]["reason"]
        path = update_path(orders["d"].sequence, 0, hashlib.sha256(update(tmp_path, 3e38)).hexdigest())
        assert served.agents["d"].commit(path, 0)["status"] == "rejected", "who asks again hears of it"
        assert served.replays() > 0


# A facility that polls and never hands in ----------------------------------------------------------------------------


def test_whoever_polls_and_never_hands_in_stalls_no_round_whatever_it_says_of_its_job(tmp_path: Path) -> None:
    """The four stages at which a job can stay for ever; and one that comes late, while the round is open, counts."""
    liars = ("ordered", "queued", "running", "ended")
    server = {"wait_for": 5, "overdue_seconds": 1.0, "startup_allowance_seconds": 0.0}
    how: dict[str, Any] = {"strategy": "fedavg", "round_length": 0.2, "options": {"steps": 10}, "server": server}
    with serving(tmp_path, ("north", *liars), plain=True, **how) as served:
        for name in ("north", *liars):
            served.facility(name).poll()
        for name in liars:
            liar = served.facility(name)
            (order,) = liar.poll()["orders"]
            sequence = int(order["job_id"].rpartition("/")[2])
            reports = [{"kind": "submitted", "sequence": sequence}, started(sequence), ended(sequence)]
            liar.poll(*reports[: liars.index(name)])
        north = served.facility("north")
        hand_in(north, update(tmp_path))

        def made() -> bool:
            for name in liars:  # they are there, and say nothing more
                served.facility(name).poll()
            return bool(served.status()["model"] == 1)

        wait_for(made, "the round without those that are overdue", served.said)
        with LedgerReader(served.folder / "ledger.sqlite") as ledger:
            rows = [json.loads(row["body"]) for row in ledger.rows("SELECT body FROM commands WHERE kind = 'Record'")]
        overdue = {row["facts"]["facility"]: row["facts"]["reason"] for row in rows if row["kind"] == "overdue"}
        assert set(overdue) == set(liars)
        assert "has not started" in overdue["queued"]
        assert "longer than its wall time" in overdue["running"]
        assert "its update has not come" in overdue["ended"]
        hand_in(north, update(tmp_path))
        wait_for(lambda: served.status()["model"] == 2, "the next round at once", served.said)
        assert served.replays() > 0


SAID_OF_A_JOB = st.sampled_from([JobSubmitted, JobStarted, JobRequeued, JobEnded, None])


@given(st.lists(st.tuples(SAID_OF_A_JOB, st.floats(0.1, 40)), max_size=40), st.floats(0, 50))
def test_no_story_of_a_job_stalls_fedavg_for_longer_than_its_bound(
    story: list[tuple[type | None, float]], longest: float
) -> None:
    """North hands in at once, south tells stories; the round ends within what order and queue make plausible."""
    north, south = (FacilityProfile(name=name, data_weight=0.5, steps_per_second=1.0) for name in ("north", "south"))
    plan = Plan(facilities=(north, south), round_length=10.0, rounds=9, overdue_seconds=20.0)
    strategy = FedAvg(plan, FixedStepOptions(steps=10))
    timers: list[SetTimer] = []

    def tell(event: Event) -> None:
        timers.extend(command for command in strategy.handle(event) if isinstance(command, SetTimer))

    def until(at: float) -> None:
        while (due := min(timers, key=lambda timer: timer.at, default=None)) is not None and due.at <= at:
            timers.remove(due)
            tell(TimerFired(at=due.at, key=due.key))

    strategy.state.facilities["south"].longest_wait = longest
    tell(RunStarted(at=0.0))
    receipt = Receipt(
        job_id="north/0", attempt=0, base_version=0, steps_done=10, train_seconds=1.0, admission_delay=0.0
    )
    tell(UpdateArrived(at=1.0, receipt=receipt))
    (job,) = strategy.state.facilities["south"].jobs.values()
    bound, at, attempt = 3 * (max(20.0, 4 * longest) + job.order.wall_seconds), 1.0, 0
    for kind, seconds in story:
        at += seconds
        if at >= bound:
            break
        until(at)
        attempt += kind is JobRequeued
        facts: dict[str, Any] = {"at": at, "job_id": "south/0", "attempt": attempt}
        facts |= {"admission_delay": 0.0} if kind is JobStarted else {}
        facts |= {"reason": "preempted"} if kind is JobRequeued else {}
        facts |= {"steps_done": 0, "train_seconds": 0.0} if kind is JobEnded else {}
        if kind is not None:
            tell(kind(**facts))
    until(bound + 1e-6)
    assert 1 in strategy.state.making, "the round is closed"


def test_a_job_that_waits_as_jobs_did_there_before_is_waited_for() -> None:
    """Four times as long as any that was seen; and a late one counts while the round is open."""
    profiles = [FacilityProfile(name=name, data_weight=0.5, steps_per_second=1.0) for name in ("north", "south")]
    strategy = FedAvg(Plan(facilities=tuple(profiles), round_length=10.0, overdue_seconds=20.0), FixedStepOptions())
    for there in strategy.state.facilities.values():
        there.longest_wait = 100.0
    strategy.handle(RunStarted(at=0.0))
    assert strategy.state.timer("overdue/0/south") == 400.0
    overdue = strategy.handle(TimerFired(at=400.0, key="overdue/0/south"))
    assert [c.facts["facility"] for c in overdue if isinstance(c, Record) and c.kind == "overdue"] == ["south"]
    facts = {"attempt": 0, "base_version": 0, "steps_done": 1, "train_seconds": 1.0, "admission_delay": 0.0}
    strategy.handle(UpdateArrived(at=500.0, receipt=Receipt(job_id="south/0", **facts)))  # type: ignore[arg-type]
    strategy.handle(UpdateArrived(at=501.0, receipt=Receipt(job_id="north/0", **facts)))  # type: ignore[arg-type]
    assert [share.job_id for share in strategy.state.making[1].weights] == ["south/0", "north/0"]
