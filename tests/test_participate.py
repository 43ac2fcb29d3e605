"""The worker API: what a job takes, and when it stops."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedqueue
from fedqueue.protocol import budget
from fedqueue.protocol.budget import binding, linger_until
from fedqueue.protocol.contract import Standing
from fedqueue.worker.participate import ParticipateError, participate
from tests.jobs import (
    TRAINED,
    enter,
    has_result,
    make_job,
    result_of,
    run_script,
    save,
    standing_of,
    update_of,
    wait_for,
)

# The numbers --------------------------------------------------------------------------------------------


@given(
    start=st.floats(0, 2e9),
    gap=st.floats(-1e4, 1e4),
    length=st.floats(0.5, 1e4),
    speed=st.floats(0.01, 1e4),
    overhead=st.floats(0, 1e3),
    min_steps=st.integers(1, 100),
    scaling=st.sampled_from(["none", "inverse"]),
    least=st.none() | st.integers(1, 1000),
    patience=st.floats(0, 10),
)
def test_job_and_strategy_fit_the_same_work(
    start: float,
    gap: float,
    length: float,
    speed: float,
    overhead: float,
    min_steps: int,
    scaling: Any,
    least: int | None,
    patience: float,
) -> None:
    fields = {
        "version": 3,
        "next_cutoff": max(0.0, start + gap),
        "round_length": length,
        "steps_per_second": speed,
        "overhead": overhead,
        "min_steps": min_steps,
        "learning_rate": 0.1,
        "lr_scaling": scaling,
        "least_steps": least,
        "patience": patience,
    }
    message, work = Standing(**fields), Standing(**fields)
    bound, found = budget.bind(message, start), binding(work, start)
    assert (bound.steps, bound.learning_rate, bound.train_budget, bound.cutoff) == found[:4]
    assert found.cutoff == work.next_cutoff + found.cutoff_index * work.round_length
    assert found.cutoff_index >= 0
    assert budget.linger_until(message, start) == linger_until(work, start)


def test_job_that_binds_itself_counts_its_startup_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "m.safetensors", w=np.ones(2))
    standing = standing_of(model)
    started = time.time() - 4.0
    enter(monkeypatch, make_job(tmp_path, model, standing=standing, started=started))
    with participate() as work:
        assert work.base_version == 3
        assert work.model_path == model
        for _ in work.steps():
            break
        work.submit({"w": np.ones(2)})
    bound = json.loads((tmp_path / "jobs/3/attempt-0/bound.json").read_text())
    as_simulated = budget.bind(
        Standing(**{k: v for k, v in standing.items() if k not in ("number", "model")}),
        bound["bound_at"] - bound["startup_seconds"],
    )
    assert bound["startup_seconds"] >= 4.0
    assert (bound["standing"], bound["cutoff_index"], bound["base_version"]) == (7, 0, 3)
    assert (bound["steps"], bound["train_budget"]) == (as_simulated.steps, as_simulated.train_budget)
    assert bound["steps"] == work.assigned_steps


def test_job_close_to_a_cutoff_lingers_for_the_newer_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = save(tmp_path / "old.safetensors", w=np.ones(2)), save(tmp_path / "new.safetensors", w=np.ones(2))
    enter(monkeypatch, make_job(tmp_path, standing=standing_of(old, next_cutoff=time.time() + 1.0, patience=30.0)))
    # Posted by another process, as an agent would, once the job is seen to wait.
    posted = json.dumps(standing_of(new, number=8, version=4, patience=30.0))
    poster = run_script(
        tmp_path,
        {},
        f"import os, time\ntime.sleep(0.3)\nopen('next', 'w').write({posted!r})\nos.replace('next', 'standing.json')",
    )
    with participate() as work:
        assert work.base_version == 4
        assert work.model_path == new
        for _ in work.steps():
            break
        work.submit({"w": np.ones(2)})
    poster.communicate()
    bound = json.loads((tmp_path / "jobs/3/attempt-0/bound.json").read_text())
    assert bound["standing"] == 8
    assert bound["lingered"] > 0


def test_job_lingers_no_longer_than_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "m.safetensors", w=np.ones(2))
    cutoff = time.time() + 0.1
    enter(monkeypatch, make_job(tmp_path, standing=standing_of(model, next_cutoff=cutoff, patience=0.3)))
    with participate() as work:
        assert work.base_version == 3
    bound = json.loads((tmp_path / "jobs/3/attempt-0/bound.json").read_text())
    assert bound["bound_at"] >= cutoff + 0.3
    assert bound["cutoff_index"] == 1


# What ends training -------------------------------------------------------------------------------------


def test_job_does_its_steps_and_hands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(monkeypatch, make_job(tmp_path))
    before = time.time()
    with fedqueue.participate() as work:
        identity = (work.job_id, work.facility, work.round, work.attempt, work.purpose)
        assert identity == ("north/3", "north", 2, 0, "train")
        assert (work.base_version, work.assigned_steps, work.learning_rate) == (3, 3, 0.01)
        assert set(work.model()) == {"b", "w"}
        assert 0 < work.seconds_left() <= 115.0
        seen = []
        for step in work.steps():
            seen.append(step)
            work.count(samples=8)
        assert work.should_stop
        work.submit(TRAINED, metrics={"loss": np.float32(0.25), "odd": float("nan")})
    assert seen == [0, 1, 2]
    result = result_of(tmp_path)
    assert result["metrics"] == {"loss": 0.25, "odd": None}
    assert "'odd' is nan" in capsys.readouterr().err
    assert (result["steps_done"], result["samples"], result["nodes"], result["device"]) == (3, 24, 2, "cpu")
    assert (result["stopped_by"], result["base_version"]) == ("steps", 3)
    assert before <= result["began_at"] <= result["finished_at"]
    assert result["train_seconds"] > 0
    content = (tmp_path / "jobs/3/attempt-0/update.safetensors").read_bytes()
    assert (result["bytes"], result["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    update = update_of(tmp_path)
    assert set(update) == {"w", "b"}  # what is not declared stays on site
    assert (update["w"] == 2.0).all()
    left = {path.name for path in (tmp_path / "jobs/3/attempt-0").iterdir()}
    assert left == {"started", "assignment.json", "update.safetensors", "result.json"}


def test_training_stops_when_its_budget_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path, steps=10**9, train_budget=0.2))
    with participate() as work:
        for _ in work.steps():
            time.sleep(0.01)
        assert work.seconds_left() < 0.2
        work.submit(TRAINED)
    result = result_of(tmp_path)
    assert result["stopped_by"] == "deadline"
    assert result["steps_done"] >= 1


def test_step_that_would_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path, steps=10**9, train_budget=0.9))
    with participate() as work:
        for _ in work.steps():
            time.sleep(0.4)
        work.submit(TRAINED)
    assert result_of(tmp_path)["steps_done"] in (1, 2)  # never a third, which would end at 1.2


def test_training_stops_before_the_wall_end_with_time_to_hand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = 800.0
    started = time.time() - wall + 5.5  # and five seconds are kept
    enter(monkeypatch, make_job(tmp_path, steps=10**9, wall_seconds=wall, started=started))
    left = []
    with participate() as work:
        for _ in work.steps():
            left.append(work.seconds_left())
            time.sleep(0.005)
        work.submit(TRAINED)
    result = result_of(tmp_path)
    assert result["stopped_by"] == "deadline"
    assert max(left) <= 0.5
    assert result["finished_at"] < started + wall


@pytest.mark.parametrize(("last", "left"), [(None, 95.0), (30.0, 70.0), (1e6, 50.0)])
def test_reserve_is_what_handing_in_took_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float | None, left: float
) -> None:
    before = time.time()
    enter(monkeypatch, make_job(tmp_path, wall_seconds=100.0))
    if last is not None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / ".fedqueue.json").write_text(json.dumps({"hand_in_seconds": last}))
    with participate() as work:
        found = work.seconds_left()
        assert left - (time.time() - before) - 0.1 < found <= left
        for _ in work.steps():
            pass
        work.submit(TRAINED)
    kept = json.loads((work.state_dir / ".fedqueue.json").read_text())
    assert 0 < kept["hand_in_seconds"] < 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_lets_the_step_finish_and_what_there_is_is_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    enter(monkeypatch, make_job(tmp_path, steps=10))
    finished = 0
    with participate() as work:
        for step in work.steps():
            if step == 1:
                os.kill(os.getpid(), number)
            finished += 1
        work.submit(TRAINED)
    assert finished == 2
    result = result_of(tmp_path)
    assert (result["stopped_by"], result["steps_done"]) == ("signal", 2)


def test_previous_signal_handlers_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        enter(monkeypatch, make_job(tmp_path))
        with participate() as work:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert work.should_stop
        assert not heard
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sigterm_from_outside_hands_in(tmp_path: Path) -> None:
    body = """
import numpy, time, pathlib, fedqueue
with fedqueue.participate() as work:
    for step in work.steps():
        time.sleep(0.01)
        if step == 3:
            pathlib.Path("training").touch()
    work.submit({"w": numpy.ones((2, 3)), "b": numpy.ones(3)})
"""
    job = run_script(tmp_path, make_job(tmp_path, steps=10**9), body)
    wait_for(tmp_path / "training", job)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    assert result_of(tmp_path)["stopped_by"] == "signal"
    assert result_of(tmp_path)["steps_done"] >= 4


def test_kill_between_update_and_result_leaves_no_result(tmp_path: Path) -> None:
    body = """
import numpy, os, signal, fedqueue
replace = os.replace
def strike(source, target):
    if target.endswith("result.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = strike
with fedqueue.participate() as work:
    for step in work.steps():
        pass
    work.submit({"w": numpy.ones((2, 3)), "b": numpy.ones(3)})
"""
    job = run_script(tmp_path, make_job(tmp_path), body)
    job.communicate(timeout=600)
    assert job.returncode == -signal.SIGKILL
    assert (tmp_path / "jobs/3/attempt-0/update.safetensors").exists()
    assert not has_result(tmp_path)


def test_two_incarnations_never_touch_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with participate() as first:
        (tmp_path / "jobs/3/attempt-1").mkdir()
        (tmp_path / "jobs/3/attempt-1/started").write_text(str(time.time()))
        monkeypatch.setenv("FEDQUEUE_ATTEMPT", "1")
        with participate() as second:
            for work, value in ((second, 5.0), (first, 4.0)):
                for _ in work.steps():
                    pass
                work.submit({"w": np.full((2, 3), value), "b": np.zeros(3)})
    assert (update_of(tmp_path, 0)["w"] == 4.0).all()
    assert (update_of(tmp_path, 1)["w"] == 5.0).all()
    assert second.attempt == 1


def test_script_that_breaks_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path, steps=10))
    with participate() as work:
        for step in work.steps():
            if step == 4:
                work.drop_step()  # no data left: this one is not done
                break
        work.submit(TRAINED)
    assert (result_of(tmp_path)["stopped_by"], result_of(tmp_path)["steps_done"]) == ("script", 4)


def test_job_that_only_evaluates_hands_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path, purpose="evaluate"))
    with participate() as work:
        assert not list(work.steps())
        work.submit(metrics={"score": 0.5})
    assert result_of(tmp_path)["metrics"] == {"score": 0.5}
    assert (result_of(tmp_path)["steps_done"], result_of(tmp_path)["bytes"]) == (0, 0)


# Outside a job ------------------------------------------------------------------------------------------


def test_outside_a_job_the_error_says_how_to_try_it() -> None:
    with pytest.raises(ParticipateError, match=r"not a FedQueue job.*dry_run="), participate():
        pass


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "none.safetensors", "steps": 1, "learning_rate": 1.0}, "must name a safetensors file"),
        ({"model": "m.safetensors", "learning_rate": 1.0}, "steps: is missing"),
        ({"model": "m.safetensors", "steps": 0, "learning_rate": 1.0}, "steps must be 1 or more"),
        ({"model": "m.safetensors", "steps": 1, "rate": 1.0}, "there is no 'rate'"),
    ],
)
def test_dry_run_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "m.safetensors", w=np.ones(2))
    with pytest.raises(ParticipateError, match=says), participate(dry_run=settings):
        pass


def test_dry_run_writes_beside_the_script_and_keeps_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "m.safetensors", w=np.ones(2))
    for attempt in range(2):
        with participate(dry_run={"model": "m.safetensors", "steps": 2, "learning_rate": 0.1}) as work:
            assert work.seconds_left() == float("inf")
            for _ in work.steps():
                pass
            work.submit({"w": np.ones(2)})
        assert (tmp_path / f"fedqueue-dry-run/attempt-{attempt}/result.json").exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("order.json", "[]", "must hold one JSON object"),
        ("order.json", "{", "is not JSON"),
        ("order.json", '{"protocol": 9}', "protocol must be 1 to 3, found 9"),
        ("order.json", '{"protocol": 1}', "standing: is missing"),
    ],
)
def test_damaged_job_folder_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str, says: str
) -> None:
    enter(monkeypatch, make_job(tmp_path))
    (tmp_path / "jobs/3" / file).write_text(content)
    with pytest.raises(ParticipateError, match=says), participate():
        pass
