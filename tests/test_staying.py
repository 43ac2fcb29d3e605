"""Jobs that stay, for real: one wait in the queue, part after part, every part with one fate, whoever is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedqueue.cli import main
from fedqueue.metrics import Tally
from fedqueue.protocol.codec import encode, read
from fedqueue.protocol.contract import Assignment, Order, Receipt, TakenFile
from fedqueue.protocol.messages import (
    AssignWork,
    JobEnded,
    JobStarted,
    ModelReady,
    RunStarted,
    SubmitJob,
    TimerFired,
    UpdateArrived,
    WorkTaken,
    parse,
)
from fedqueue.protocol.state import RunState
from fedqueue.runs import replay
from fedqueue.worker.participate import ParticipateError, participate
from tests.conftest import config_of, facility, journal, trace_of
from tests.jobs import enter, make_job, run_script, save, standing_of, wait_for
from tests.waiting import LONGEST

WORKER = """
import os
import time
import numpy as np
import fedqueue
from safetensors.numpy import load_file

with fedqueue.participate() as work:
    for part in work.parts():
        tensors = load_file(part.model_path)
        for step in part.steps():
            time.sleep(0.02)
        part.submit({name: values + 1 for name, values in tensors.items()})
"""

CONFIG = """
[run]
strategy = "{strategy}"
rounds = {rounds}
round_length = 1.5

[strategy.{strategy}]
{options}

[model]
initial = "first.safetensors"

[worker]
command = "{python} worker.py"
poll_seconds = 0.1

[[facility]]
name = "north"
queue = {{ kind = "fixed", delay = 1.0 }}

[[facility]]
name = "south"
"""


def lay_out(base: Path, strategy: str, options: str, rounds: int = 8, worker: str = WORKER) -> Path:
    (base / "worker.py").write_text(worker)
    save_file({"a": np.zeros(4, np.float32)}, base / "first.safetensors")
    text = CONFIG.format(strategy=strategy, options=options, rounds=rounds, python=sys.executable)
    (base / "run.toml").write_text(text)
    return base / "run.toml"


def run(config: Path, how: str = "--json") -> tuple[dict[str, Any], Path]:
    folder = config.parent / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), how, "--no-plots", "--out", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    replay(folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary, folder


def receipts(folder: Path) -> list[dict[str, Any]]:
    return [line["body"]["receipt"] for line in journal(folder) if line["kind"] == "UpdateArrived"]


def key(said: dict[str, Any]) -> tuple[str, int, int]:
    return said.get("job_id") or said["job"], said["attempt"], said.get("part", 0)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("jit", "stay = 30.0\nmin_steps = 5"),
        ("fedasync", "stay = 30.0\nsteps = 20"),
        ("fedavg", "stay = 30.0\nsteps = 20"),
        ("fedqueue", "stay = 30.0\nmin_steps = 5\nmargin = 0.2\nmin_train_budget = 0.2"),
    ],
)
def test_a_job_waits_once_and_hands_in_part_after_part(
    strategy: str, options: str, tmp_path: Path, capsys: Any
) -> None:
    summary, folder = run(lay_out(tmp_path, strategy, options))
    found = receipts(folder)
    parts: dict[tuple[str, int], list[int]] = {}
    for receipt in found:
        parts.setdefault((receipt["job_id"], receipt["attempt"]), []).append(receipt.get("part", 0))
    assert all(numbers == list(range(len(numbers))) for numbers in parts.values()), parts
    assert max(map(len, parts.values())) >= 4, parts
    lines = journal(folder)
    fates = [key(line["body"]["facts"]) for line in lines if line["body"].get("kind") == "fate"]
    assert sorted(fates) == sorted(map(key, found)), "every update has one fate"
    taken = {key(line["body"]) for line in lines if line["kind"] == "WorkTaken"}
    assert {key(receipt) for receipt in found if receipt.get("part", 0)} <= taken
    assert not [line for line in lines if line["kind"] in ("JobFailed", "UpdateRejected")]
    assert summary["rounds"] == 8
    assert load_file(folder / "model.safetensors")["a"].max() > 0
    capsys.readouterr()
    assert main(["retrace", str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("jit", {"stay": 60.0, "between": "wait"}),
        ("jit", {"stay": 60.0, "between": "train"}),
        ("fedasync", {"stay": 60.0, "steps": 30}),
        ("fedqueue", {"stay": 60.0, "margin": 1.0}),
    ],
)
def test_every_second_that_a_job_held_its_nodes_was_training_or_idle(strategy: str, options: dict[str, Any]) -> None:
    """In the simulator, where nothing else takes time at a facility: also the wait before it leaves."""
    wait = {"kind": "fixed", "delay": 2.0}  # models are there before jobs start
    slow = [facility(name, queue=wait, latency_seconds=0.7) for name in ("east", "west")]
    trace = trace_of(config_of(strategy, facilities=slow, options=options, seconds=400.0))
    idle: defaultdict[str, float] = defaultdict(float)
    trained: defaultdict[str, float] = defaultdict(float)
    ended = {}
    for event, _ in trace:
        match event:
            case JobStarted(job_id=job, lingered=seconds):
                idle[job] += seconds
            case WorkTaken(job_id=job):
                idle[job] += event.idle_seconds
                assert event.ahead_seconds <= event.waited + 1e-9
            case UpdateArrived(receipt=receipt):
                trained[receipt.job_id] += receipt.train_seconds
            case JobEnded(job_id=job):
                idle[job] += event.idle_seconds
                ended[job] = event
    assert len(ended) >= 4
    for job, end in ended.items():
        parts = [
            event.receipt.part for event, _ in trace if isinstance(event, UpdateArrived) and job == event.receipt.job_id
        ]
        if len(parts) == end.parts > 1:  # the run was over before the last came
            assert idle[job] + trained[job] == pytest.approx(end.held_seconds), job
    assert sum(idle.values()) > 0


def test_a_wait_with_a_step_in_it_is_idle_but_for_that_step() -> None:
    """Also the wait before it leaves, and that of a job which is out when somebody looks."""
    state = RunState(["east"])
    tally = Tally(state, round_length=10.0, nodes={"east": 2}, targets=())
    job: dict[str, Any] = {"job_id": "east/0", "attempt": 0}
    work = Assignment(base_version=0, steps=5, learning_rate=0.1)
    order = Order(job_id="east/0", facility="east", round=0, wall_seconds=100.0, stay=20.0)
    state(RunStarted(at=0.0), [SubmitJob(order=order), AssignWork(job_id="east/0", assignment=work)])
    state(JobStarted(at=1.0, admission_delay=1.0, **job), [])

    def arrives(at: float, part: int, turn: float) -> None:
        done: dict[str, Any] = {"base_version": part, "steps_done": 5, "train_seconds": 2.0, "admission_delay": 1.0}
        state(UpdateArrived(at=at, receipt=Receipt(part=part, turn_seconds=turn, **done, **job)), [])

    arrives(6.0, part=0, turn=3.0)
    assert tally.idle_node_seconds("east") == 0.0, "to start up is not to idle"
    state(TimerFired(at=7.0, key="nobody's"), [])
    assert tally.idle_node_seconds("east") == 2 * 1.0, "until now"
    state(
        WorkTaken(at=9.0, part=1, waited=4.0, ahead=1, ahead_seconds=0.5, bound=replace(work, base_version=1), **job),
        [],
    )
    assert tally.idle_node_seconds("east") == 2 * 3.5
    arrives(12.0, part=1, turn=0.25)
    assert tally.idle_node_seconds("east") == 2 * 3.75
    state(JobEnded(at=14.0, steps_done=5, train_seconds=2.0, held_seconds=13.0, parts=2, idle_seconds=2.5, **job), [])
    summary = tally.summary(strategy="fedavg", seed=1, wall_seconds=0.0)
    assert (summary["idle_node_seconds"], summary["node_seconds"]) == (2 * 6.25, 2 * 13.0)
    assert state.open_job("east/0") is None


def test_ledgers_and_agents_of_before_do_not_say_how_long_a_job_trained_ahead() -> None:
    said = {
        "at": 9.0,
        "job_id": "east/0",
        "attempt": 0,
        "part": 1,
        "bound": None,
        "waited": 4.0,
        "ahead": 7,
        "ago": 0.0,
    }
    old = parse("WorkTaken", said)
    assert isinstance(old, WorkTaken)
    assert old.idle_seconds == 4.0, "nothing is made up: its whole wait counts"
    assert json.loads(encode(old)) == said
    assert read(TakenFile, {"waited": 4.0, "ahead": 7}, "").ahead_seconds == 0.0


def test_in_one_process_each_job_hands_in_once_and_the_others_run_too(tmp_path: Path) -> None:
    _, folder = run(lay_out(tmp_path, "fedasync", "stay = 1000.0\nsteps = 5", rounds=5), "--debug")
    lines = journal(folder)
    assert {receipt.get("part", 0) for receipt in receipts(folder)} == {0}
    facilities = {line["body"]["job_id"].partition("/")[0] for line in lines if line["kind"] == "JobEnded"}
    assert facilities == {"north", "south"}
    assert not [line for line in lines if line["kind"] == "JobFailed"]


# What the job does --------------------------------------------------------------------------------------


def lie(path: Path, content: dict[str, Any]) -> None:
    """As an agent lays it out: whole or not at all."""
    beside = path.with_suffix(".beside")
    beside.write_text(json.dumps(content))
    beside.replace(path)


def work_of(model: Path, version: int, steps: int = 2) -> dict[str, Any]:
    return {"base_version": version, "steps": steps, "learning_rate": 0.1 * version, "model": str(model)}


def test_further_work_is_taken_when_it_comes_and_the_job_leaves_when_none_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "m.safetensors", w=np.ones(2, np.float32))
    enter(monkeypatch, make_job(tmp_path, model, steps=2, stay=0.4))
    attempt = tmp_path / "jobs/3/attempt-0"
    seen = []
    with participate() as work:
        for part in work.parts():
            seen.append((part.part, part.base_version, round(part.learning_rate, 3), sum(1 for _ in part.steps())))
            if part.part < 2:  # the agent brings the next work while this one is handed in
                place = attempt / f"part-{part.part + 1}"
                place.mkdir()
                lie(place / "further.json", work_of(model, part.part + 4, steps=part.part + 3))
            part.submit({"w": np.full(2, part.part, np.float32)})
            with pytest.raises(ParticipateError, match="submit once for each part"):
                part.submit({"w": np.ones(2)})
    assert seen == [(0, 3, 0.01, 2), (1, 4, 0.4, 3), (2, 5, 0.5, 4)]
    assert json.loads((attempt / "left.json").read_text()) == {"parts": 3}
    for number, place in enumerate((attempt, attempt / "part-1", attempt / "part-2")):
        assert load_file(place / "update.safetensors")["w"] == pytest.approx(number)
        assert json.loads((place / "result.json").read_text())["steps_done"] == number + 2
    assert json.loads((attempt / "part-2/taken.json").read_text())["bound"] is None


def test_a_script_for_one_update_hands_in_once_and_its_job_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, make_job(tmp_path, save(tmp_path / "m.safetensors", w=np.ones(2)), stay=1000.0))
    left = tmp_path / "jobs/3/attempt-0/left.json"
    with participate() as work:
        for _ in work.steps():
            pass
        work.submit({"w": np.ones(2)})
        assert left.exists(), "nobody waits for what the script does afterwards"


def test_a_job_takes_newer_standing_work_and_none_that_a_later_job_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "m.safetensors", w=np.ones(2))
    enter(monkeypatch, make_job(tmp_path, model, standing=standing_of(model, version=7), stay=1000.0))
    versions = []
    with participate() as work:
        for part in work.parts():
            versions.append(part.base_version)
            for _ in part.steps():
                break
            later = standing_of(model, version=7 + len(versions), number=7 + len(versions))
            if len(versions) == 3:
                later["from_job"] = 4  # this one is job 3
            lie(tmp_path / "standing.json", later)
            part.submit({"w": np.ones(2)})
    assert versions == [7, 8, 9]
    taken = json.loads((tmp_path / "jobs/3/attempt-0/part-2/taken.json").read_text())
    assert (taken["bound"]["standing"], taken["bound"]["base_version"]) == (9, 9)


def test_a_job_without_work_waits_for_its_first_and_ends_well_if_none_comes(tmp_path: Path) -> None:
    script = """
import fedqueue
with fedqueue.participate() as work:
    for part in work.parts():
        raise SystemExit("there was work")
"""
    environment = make_job(tmp_path, stay=0.5, assignment=None, model=None)
    job = run_script(tmp_path, environment, script)
    attempt = tmp_path / "jobs/3/attempt-0"
    wait_for(attempt / "waiting.json", job)
    out, error = job.communicate(timeout=LONGEST)
    assert job.returncode == 0, out + error
    assert json.loads((attempt / "left.json").read_text()) == {"parts": 0}
    assert "no work came" in error


def test_told_to_stop_while_it_waits_it_leaves_at_once(tmp_path: Path) -> None:
    script = """
import numpy as np
import fedqueue
with fedqueue.participate() as work:
    for part in work.parts():
        for step in part.steps():
            pass
        part.submit({"w": np.ones(2)})
"""
    environment = make_job(tmp_path, save(tmp_path / "m.safetensors", w=np.ones(2)), stay=1000.0)
    job = run_script(tmp_path, environment, script)
    attempt = tmp_path / "jobs/3/attempt-0"
    wait_for(attempt / "result.json", job)
    job.terminate()
    job.communicate(timeout=LONGEST)
    assert job.returncode == 0
    assert json.loads((attempt / "left.json").read_text()) == {"parts": 1}


def test_what_was_trained_on_from_own_weights_is_carried_over_to_the_next_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    first = save(tmp_path / "v3.safetensors", w=np.ones(2, np.float32), running_mean=np.zeros(2, np.float32))
    second = save(tmp_path / "v4.safetensors", w=np.full(2, 100.0, np.float32), running_mean=np.ones(2, np.float32))
    standing = standing_of(first, ahead=True, steps_per_second=1.0, next_cutoff=time.time() + 5.0, round_length=1000.0)
    enter(monkeypatch, make_job(tmp_path, standing=standing, stay=1000.0, wall_seconds=1000.0))
    seen: list[tuple[int, bool, float, int]] = []
    with participate() as work:
        for part in work.parts():
            state = part.model()
            began, steps = float(state["w"][0]), 0
            for _ in part.steps():
                steps += 1
                state = {"w": state["w"] + 1, "running_mean": state["running_mean"] + 10}
                if part.is_ahead and steps == 3:  # the next model comes
                    lie(tmp_path / "standing.json", {**standing, "model": str(second), "version": 4, "number": 8})
                if not part.is_ahead and steps == 2:
                    break
            seen.append((part.part, part.is_ahead, began, steps))
            part.submit(state)
            if part.part == 1 and not part.is_ahead:
                break
    # It handed in 3, went on from there, and began from the new model and the steps that it was ahead.
    ahead = seen[1][3]
    assert ahead >= 3
    assert seen == [(0, False, 1.0, 2), (1, True, 3.0, ahead), (1, False, 100.0 + ahead, 2)]
    place = tmp_path / "jobs/3/attempt-0/part-1"
    update = load_file(place / "update.safetensors")
    assert update["w"] == pytest.approx(102.0 + ahead)
    assert update["running_mean"] == pytest.approx(40.0 + 10 * ahead), (
        "what was measured is not added to what others measured"
    )
    result, taken = (json.loads((place / name).read_text()) for name in ("result.json", "taken.json"))
    assert (result["steps_done"], result["ahead"], taken["ahead"]) == (ahead + 2, ahead, ahead)
    assert 0 < taken["ahead_seconds"] < taken["waited"]


def test_it_trains_on_until_there_is_newer_work_however_few_steps_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    model = save(tmp_path / "v3.safetensors", w=np.ones(2, np.float32))
    enter(monkeypatch, make_job(tmp_path, model, steps=2, stay=1000.0, wall_seconds=1000.0))
    lie(tmp_path / "standing.json", standing_of(model, ahead=True, steps_per_second=1.0, round_length=1000.0))
    seen = []
    with participate() as work:
        for part in work.parts():
            state = part.model()
            for step in part.steps():
                if step == 99:
                    lie(tmp_path / "standing.json", standing_of(model, version=4, from_job=4))  # and it is to leave
            seen.append((part.is_ahead, step))
            part.submit(state)
    assert seen[0] == (False, 1)
    assert len(seen) == 2
    assert seen[1][1] >= 99


def test_optimizer_data_and_compiled_graph_live_on_from_part_to_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    compiled = []

    def compile_once(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    module = torch.nn.Linear(2, 1)
    tensors = {name: value.detach().numpy() for name, value in module.named_parameters()}
    model = save(tmp_path / "v3.safetensors", **tensors)
    enter(monkeypatch, make_job(tmp_path, model, steps=2, stay=0.4))
    forward = torch.compile(module, backend=compile_once)
    optimizer = torch.optim.Adam(module.parameters())
    data = iter(range(100))
    seen = []
    with participate() as work:
        for part in work.parts():
            module.load_state_dict(part.model())
            for group in optimizer.param_groups:
                group["lr"] = part.learning_rate
            for _ in part.steps():
                optimizer.zero_grad()
                forward(torch.full((4, 2), float(next(data)))).sum().backward()
                optimizer.step()
            seen.append((part.part, len(compiled), {int(state["step"]) for state in optimizer.state.values()}))
            if part.part < 2:
                place = tmp_path / f"jobs/3/attempt-0/part-{part.part + 1}"
                place.mkdir()
                lie(place / "further.json", work_of(model, part.part + 4, steps=3))
            part.submit(module.state_dict())
    assert seen == [(0, 1, {2}), (1, 1, {5}), (2, 1, {8})], "one graph, and Adam's count goes on"
    assert next(data) == 8


def test_a_first_part_is_trained_on_from_too_once_standing_work_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    model = save(tmp_path / "v3.safetensors", w=np.ones(2, np.float32))
    enter(monkeypatch, make_job(tmp_path, model, steps=2, stay=1000.0, wall_seconds=1000.0))
    standing = standing_of(model, ahead=True, steps_per_second=1.0, round_length=1000.0)
    posted = threading.Timer(0.3, lie, [tmp_path / "standing.json", standing])  # made of what was handed in
    seen = []
    with participate() as work:
        for part in work.parts():
            state = part.model()
            for _ in part.steps():
                state = {"w": state["w"] + 1}
                if part.is_ahead:
                    lie(tmp_path / "standing.json", {**standing, "from_job": 4})  # and it is to leave
            seen.append((part.part, part.is_ahead, float(state["w"][0])))
            part.submit(state)
            posted.start() if part.part == 0 else None
    (first, second) = seen
    assert first == (0, False, 3.0)
    assert second[:2] == (1, True)
    assert second[2] >= 4.0
    assert json.loads((tmp_path / "jobs/3/attempt-0/left.json").read_text()) == {"parts": 1}


def test_a_job_that_gave_up_before_its_work_came_waits_longer_the_next_time() -> None:
    """It may stay for less time than its model takes to come: then none would ever do anything."""

    def site(name: str, speed: float, seconds: float, **changes: Any) -> dict[str, Any]:
        queue = {"kind": "lognormal", "mean": 4.5, "rho": 0.27, "spread": "log"}
        return facility(name, queue=queue, steps_per_second=speed, latency_seconds=seconds, **changes)

    sites = [
        site("near", 6.5, 0.2, max_jobs=3, queue_limit=2, startup_seconds=0.2, megabytes_per_second=10.0),
        site("slow", 3.7, 0.3, max_jobs=1, queue_limit=1, startup_seconds=1.0, megabytes_per_second=0.6),
        site("far", 4.7, 0.8, max_jobs=2, queue_limit=2, megabytes_per_second=3.5),
    ]
    config = config_of("fedavg", facilities=sites, seconds=2000.0, warm_up=True, options={"steps": 8, "stay": 0.5})
    models = [event for event, _ in trace_of(config) if isinstance(event, ModelReady)]
    assert len(models) > 50, "a round takes about ten seconds"
    assert models[-1].at > 1900.0
