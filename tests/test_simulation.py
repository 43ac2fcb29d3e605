"""The virtual world behaves as it says: queues, links, chains, limits, time."""

from __future__ import annotations

import dataclasses
import gc
import gzip
import tracemalloc
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest

from fedqueue import data
from fedqueue.config import LognormalQueue, SpikeQueue, StepQueue, TraceQueue, load
from fedqueue.errors import ConfigError, DataError
from fedqueue.protocol.messages import (
    JobEnded,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
)
from fedqueue.sim.queues import Recorded, make_queue, read_trace
from fedqueue.sim.runner import simulate
from tests.conftest import ONE_A_ROUND, config_of, facility, trace_of

WALL = 60.0  # seconds that a job asks for, where it does not matter
EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def queue_of(settings: Any, seed: int = 1, name: str = "east") -> Any:
    return make_queue(settings, facility=name, seed=seed, folder=Path())


@pytest.mark.parametrize(("spread", "rho"), [("log", 0.9), ("log", 0.1), ("seconds", 2.0)])
def test_lognormal_waits_have_the_given_mean_and_spread(spread: Any, rho: float) -> None:
    queue = queue_of(LognormalQueue(kind="lognormal", mean=3.0, rho=rho, spread=spread))
    waits = [queue.delay(i, 0, 0.0, WALL) for i in range(200_000)]
    assert fmean(waits) == pytest.approx(3.0, rel=0.02)
    sd = pstdev(np.log(waits).tolist()) if spread == "log" else pstdev(waits)
    assert sd == pytest.approx(rho, rel=0.03)


def test_delays_are_keyed_by_seed_facility_and_number() -> None:
    settings = LognormalQueue(kind="lognormal", mean=3.0, rho=0.9)
    queue, again = queue_of(settings), queue_of(settings)
    forwards = [queue.delay(i, 0, 0.0, WALL) for i in range(3000)]
    assert [again.delay(i, 0, 99.0, WALL) for i in range(3000)] == forwards
    assert queue_of(settings, seed=2).delay(0, 0, 0.0, WALL) != forwards[0]
    assert queue_of(settings, name="west").delay(0, 0, 0.0, WALL) != forwards[0]
    assert queue.delay(5, 1, 0.0, WALL) != forwards[5], "a requeued job waits anew"
    assert queue.delay(5, 1, 0.0, WALL) == again.delay(5, 1, 0.0, WALL)


def test_step_changes_the_mean_for_good_and_spike_for_a_while() -> None:
    step = queue_of(StepQueue(kind="step", mean=2.0, mean_after=20.0, change_at=50.0, rho=0.0))
    assert [step.delay(0, 0, at, WALL) for at in (0.0, 49.9, 50.0, 1e6)] == pytest.approx([2.0, 2.0, 20.0, 20.0])
    spike = queue_of(
        SpikeQueue(kind="spike", mean=2.0, factor=3.0, spike_at=10.0, spike_seconds=5.0, every=100.0, rho=0.0)
    )
    moments = (0.0, 10.0, 14.9, 15.0, 109.9, 112.0)
    assert [spike.delay(0, 0, at, WALL) for at in moments] == pytest.approx([2.0, 6.0, 6.0, 2.0, 2.0, 6.0])


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "lognormal"},
        {"kind": "step", "mean_after": 9.0, "change_at": 50.0},
        {"kind": "spike", "factor": 3.0, "spike_at": 50.0, "spike_seconds": 5.0},
    ],
    ids=lambda kind: kind["kind"],
)
def test_a_job_that_asks_for_more_waits_longer_by_the_power_with_the_same_luck(kind: dict[str, Any]) -> None:
    given = {"mean": 2.0, "rho": 0.9, **kind, "wall_power": 0.5, "usual_wall_seconds": 30.0}
    (site,) = config_of("jit", facilities=[facility("east", queue=given)]).facility
    queue = queue_of(site.queue)
    assert isinstance(site.queue, LognormalQueue | StepQueue | SpikeQueue)
    plain = queue_of(dataclasses.replace(site.queue, wall_power=0.0))
    for number, at in ((0, 0.0), (7, 51.0)):
        usual = plain.delay(number, 0, at, 999.0)
        assert queue.delay(number, 0, at, 30.0) == usual
        assert queue.delay(number, 0, at, 120.0) == pytest.approx(2 * usual)
    assert queue.mean(120.0) == pytest.approx(4.0)
    with pytest.raises(ConfigError, match="wall_power needs usual_wall_seconds"):
        config_of("jit", facilities=[facility("east", queue={**given, "usual_wall_seconds": None})])


def test_a_staying_job_waits_as_its_wall_time_says() -> None:
    queue = {"kind": "lognormal", "mean": 2.0, "rho": 0.0, "wall_power": 1.0, "usual_wall_seconds": 25.0}
    for stay in (24.0, 49.0):  # and a second to end in
        config = config_of("jit", facilities=[facility("east", queue=queue)], options={"stay": stay}, seconds=400.0)
        delays = [e.admission_delay for e, _ in trace_of(config) if isinstance(e, JobStarted)]
        assert delays[0] == pytest.approx(2.0 * (stay + 1.0) / 25.0)


def write_trace(path: Path, rows: list[tuple[int, int, int, int]], header: str = "") -> Path:
    text = (header or "submit_s,wait_s,run_s,requested_s,procs") + "\n"
    text += "".join(f"{s},{w},60,{r},{p}\n" for s, w, r, p in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_trace_gives_the_wait_of_the_next_recorded_job_of_that_shape(tmp_path: Path, name: str) -> None:
    other_shapes = [(10, 99, 600, 64), (200, 9, 9999, 4)]
    write_trace(tmp_path / name, [(0, 7, 600, 4), (100, 8, 600, 4), (300, 5, 60, 8), *other_shapes])
    settings = TraceQueue(kind="trace", file=name, procs=(1, 8), max_requested=3600.0, start=0.0)
    queue = make_queue(settings, facility="east", seed=1, folder=tmp_path)
    assert [queue.delay(0, 0, at, WALL) for at in (0.0, 1.0, 100.0, 101.0, 300.0, 301.0)] == [7, 8, 8, 5, 5, 7]
    fast = dataclasses.replace(settings, speed_up=10.0)
    assert make_queue(fast, facility="east", seed=1, folder=tmp_path).delay(0, 0, 10.0, WALL) == 0.8


def test_trace_by_requested_gives_the_wait_of_jobs_that_asked_for_about_as_much(tmp_path: Path) -> None:
    """Half-hour jobs wait 10 s, four-hour jobs 900 s; there are too few of two hours to count."""
    rows = [(i * 100, 10, 1800, 4) for i in range(60)] + [(i * 100, 900, 14_400, 4) for i in range(60)]
    write_trace(tmp_path / "t.csv", sorted([*rows, *[(i * 100, 7, 7200, 4) for i in range(9)]]))
    settings = TraceQueue(kind="trace", file="t.csv", start=0.0, by_requested=True)
    queue = make_queue(settings, facility="east", seed=1, folder=tmp_path)
    asked = (60.0, 1800.0, 2500.0, 3600.0, 7200.0, 14_400.0, 1e6)
    assert [queue.delay(0, 0, 0.0, wall) for wall in asked] == [10, 10, 10, 10, 900, 900, 900]
    assert [queue.mean(wall) for wall in (1800.0, 14_400.0)] == [10, 900]
    fast = make_queue(dataclasses.replace(settings, speed_up=100.0), facility="east", seed=1, folder=tmp_path)
    assert [fast.delay(0, 0, 0.0, wall) for wall in (18.0, 144.0)] == [0.1, 9.0], "the wall time is sped up too"
    write_trace(tmp_path / "t.csv", rows[:10])
    with pytest.raises(DataError, match="by_requested needs 50 jobs that asked for about the same"):
        make_queue(settings, facility="east", seed=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("submit_s,wait_s,procs\n1,2,3\n", "column requested_s is missing"),
        ("submit_s,wait_s,requested_s,procs\n1,soon,3,4\n", "cannot be read as a trace"),
        ("submit_s,wait_s,requested_s,procs\n1,-5,3,4\n", "line 2: submit_s 1, wait_s -5"),
        ("submit_s,wait_s,requested_s,procs\n1,nan,3,4\n", "line 2: submit_s 1, wait_s nan"),
        ("submit_s,wait_s,requested_s,procs\n", "holds no job that started"),
        ("submit_s,wait_s,requested_s,procs\n1,2,3,0\n", "1 number of processors unknown"),
    ],
)
def test_bad_trace_is_one_clear_error(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=says) as caught:
        read_trace(tmp_path / "t.csv", TraceQueue(kind="trace", file="t.csv"))
    assert "t.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "median"), [("anl-theta-2021", 93), ("kth-sp2-1996", 300), ("cea-curie-2012", 0)])
def test_real_trace_is_read_whole(name: str, median: float) -> None:
    found = next((p for p in data.candidates(f"traces/{name}.csv.gz") if p.exists()), None)
    if found is None:
        pytest.skip(f"traces/{name}.csv.gz is not under {data.root()}: set FEDQUEUE_DATA to the folder that has it")
    queue = queue_of(TraceQueue(kind="trace", file=f"{name}.csv.gz"))
    assert isinstance(queue, Recorded)
    assert float(np.median(queue.jobs.whole.waits)) == median


def test_chained_job_waits_from_the_end_of_the_other_and_may_keep_its_age() -> None:
    def delays(accrue: float) -> list[float]:
        sites = [facility("east", accrue=accrue, queue={"kind": "fixed", "delay": 4.0})]
        trace = trace_of(config_of("jit", facilities=sites, rounds=6, options={**ONE_A_ROUND, "pipeline": "chain"}))
        starts = [e for e, _ in trace if isinstance(e, JobStarted)]
        ends = {e.job_id: e.at for e, _ in trace if isinstance(e, JobEnded)}
        for before, after in pairwise(starts):
            begun = after.at - after.lingered
            assert begun - after.admission_delay == pytest.approx(ends[before.job_id]), "eligible when the other ended"
        return [s.admission_delay for s in starts[1:]]

    assert delays(0.0) == pytest.approx([4.0] * len(delays(0.0)))
    assert delays(1.0) == pytest.approx([0.0] * len(delays(1.0)))
    assert all(0 < d < 4 for d in delays(0.4))


def test_site_refuses_more_jobs_than_its_limit() -> None:
    sites = [facility("east", queue_limit=1, queue={"kind": "fixed", "delay": 4.0})]
    trace = trace_of(config_of("jit", facilities=sites, rounds=6, options={**ONE_A_ROUND, "pipeline": "independent"}))
    refused = [e for e, _ in trace if isinstance(e, SubmitRefused)]
    assert refused
    assert all("limit of 1 job" in e.reason and e.transient for e in refused)


def test_transfers_take_latency_plus_size_over_bandwidth() -> None:
    link = {"megabytes_per_second": 2.0, "latency_seconds": 0.25}
    sites = [facility("east", queue={"kind": "fixed", "delay": 0.5}, startup_seconds=0.1, **link)]
    trace = trace_of(config_of("fedavg", facilities=sites, rounds=1, options={"steps": 10}))
    at = {type(e): e.at for e, _ in trace}
    assert at[JobStarted] == 0.5
    # One megabyte down takes 0.75 s, longer than queue plus start-up; then one second of training; then up again.
    assert at[JobEnded] == pytest.approx(0.75 + 1.0)
    assert at[UpdateArrived] == pytest.approx(0.75 + 1.0 + 0.75)


def test_slower_than_it_says_means_fewer_steps_until_it_is_measured() -> None:
    sites = [facility("east", slowdown=2.0, queue={"kind": "fixed", "delay": 2.0})]
    trace = trace_of(config_of("fedqueue", facilities=sites, rounds=6))
    done = [e.steps_done for e, _ in trace if isinstance(e, JobEnded)]
    wanted = [c.assignment.steps for _, cs in trace for c in cs if type(c).__name__ == "AssignWork"]  # type: ignore[union-attr]
    assert (wanted[0], done[0]) == (60, 30)
    assert wanted[-1] < 34, "the strategy has learned how fast it really is"
    assert done[-1] == 30


def test_preempted_job_starts_again_as_its_next_attempt() -> None:
    trace = trace_of(config_of("fedavg", faults=[{"kind": "preempt", "facility": "east", "jobs": [0]}], rounds=1))
    east = [e for e, _ in trace if getattr(e, "job_id", None) == "east/0"]
    kinds = [type(e) for e in east]
    assert kinds == [JobSubmitted, JobStarted, JobRequeued, JobStarted, JobEnded]
    assert [e.attempt for e in east] == [0, 0, 1, 1, 1]  # type: ignore[union-attr]


def test_update_at_the_very_second_of_the_cutoff_has_met_it() -> None:
    sites = [facility("east", queue={"kind": "fixed", "delay": 2.0}, first_delay=2.0)]
    config = config_of("fedqueue", facilities=sites, rounds=1, options={"margin": 0.0})
    trace = trace_of(config)
    kinds = [type(e) for e, _ in trace if e.at == 10.0]
    assert kinds.index(UpdateArrived) < kinds.index(TimerFired)
    assert simulate(config)["updates"]["admitted"] == 1


def test_memory_does_not_grow_with_the_number_of_rounds() -> None:
    def peak(rounds: int) -> int:
        config = config_of("jit", rounds=rounds)
        # What other tests left in memory would put off the collection of cycles, and the peak would show that.
        gc.collect()
        gc.freeze()
        tracemalloc.start()
        simulate(config)
        _, top = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.unfreeze()
        return top

    peak(200)  # warms caches
    # A single event kept a round would be over a hundred bytes; free lists and hash tables make some noise.
    assert (peak(5000) - peak(1000)) / 4000 < 25


# Numbers that nobody here tuned: an independent implementation of the published algorithm gave them.


@pytest.mark.parametrize(
    ("rho", "margin", "spread", "expected"),
    [
        (0.9, 2.0, "log", 0.169),
        (0.5, 2.0, "log", 0.113),
        (0.1, 2.0, "log", 0.005),
        (0.9, 2.0, "seconds", 0.041),
        (0.9, 1.0, "seconds", 0.155),
    ],
)
def test_late_probability_agrees_with_an_independent_check(
    rho: float, margin: float, spread: str, expected: float
) -> None:
    seen = []
    for seed in range(1, 41):
        changes = (
            f"run.seed={seed}",
            f"strategy.fedqueue.margin={margin}",
            f"facility.*.queue.rho={rho}",
            f"facility.*.queue.spread={spread}",
        )
        seen.append(simulate(load(EXPERIMENTS / "timing.toml", changes))["late_probability"])
    # Two samples of 40 seeds each differ by sqrt(2) standard errors; three of those is beyond chance.
    error = 3 * 2**0.5 * pstdev(seen) / len(seen) ** 0.5
    assert fmean(seen) == pytest.approx(expected, abs=error)
