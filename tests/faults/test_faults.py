"""What goes wrong beside crashes, one fact each, with real processes on this machine: networks, jobs, agents."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.schedulers import LocalScheduler, LocalSettings
from fedqueue.protocol.contract import WALL_TIME
from fedqueue.protocol.messages import (
    FacilityJoined,
    FacilityLeft,
    JobFailed,
    JobRequeued,
    JobStarted,
    Record,
    RunStarted,
    UpdateRejected,
)
from tests.faults.facts import check, ended_with, updates
from tests.faults.harness import (
    COORDINATOR,
    FACILITIES,
    SOURCE,
    Run,
    free_port,
    tree_of,
)
from tests.faults.ledger_checks import Story, check_run
from tests.faults.proxy import Proxy
from tests.faults.worker import step_of
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(8)

BUFF = {"steps": 5, "buffer": 2}
JIT = {"min_steps": 3}


# Network -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["jit", "fedbuff"])
def test_a_network_that_refuses_stalls_and_cuts_costs_time_and_nothing_else(tmp_path: Path, strategy: str) -> None:
    rng = random.Random(strategy)
    tree = tree_of(strategy, port=free_port(), options=JIT if strategy == "jit" else BUFF)
    with ExitStack() as stack:
        proxies = {name: stack.enter_context(Proxy(tree["server"]["port"])) for name in FACILITIES}
        run = stack.enter_context(Run(tmp_path, tree, url=lambda name: f"http://127.0.0.1:{proxies[name].port}"))
        run.start()
        run.run_until(lambda: run.happened(RunStarted), "the start of the run")
        bad_until, next_change = time.monotonic() + 5.0, 0.0

        def weather() -> bool:
            nonlocal next_change
            if time.monotonic() >= next_change:
                next_change = time.monotonic() + rng.uniform(0.1, 0.4)
                for proxy in proxies.values():
                    proxy.mode = rng.choice(("open", "open", "refuse", "stall", "cut", "cut"))
                    proxy.cut_after = rng.randint(0, 2000)
            return time.monotonic() >= bad_until or all(actor.done for actor in run.actors.values())

        run.run_until(weather, "bad weather passes")
        for proxy in proxies.values():
            proxy.mode = "open"
        run.run_to_end()
        assert sum(proxy.broken for proxy in proxies.values()) > 3
        check(run)
        ended_with(run)


def test_what_is_delivered_twice_counts_once(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=4, port=free_port(), options={"steps": 5})
    with ExitStack() as stack:
        proxies = {name: stack.enter_context(Proxy(tree["server"]["port"])) for name in FACILITIES}
        for proxy in proxies.values():
            proxy.twice = lambda request: request.startswith((b"POST /v1/poll", b"POST /v1/updates/"))
        run = stack.enter_context(Run(tmp_path, tree, url=lambda name: f"http://127.0.0.1:{proxies[name].port}"))
        run.start()
        run.run_to_end()
        repeated = [pair for proxy in proxies.values() for pair in proxy.repeated]
        assert any(b"/poll " in request[:20] and b" 200 " in answer[:20] for request, answer in repeated)
        commits = [answer for request, answer in repeated if b"/updates/" in request[:20]]
        assert any(b'"accepted"' in answer for answer in commits), "no commit came twice, or not with the same answer"
        check(run, rounds=4)
        ended_with(run)


def test_a_facility_away_for_long_is_left_and_joins_again_with_what_its_job_made(tmp_path: Path) -> None:
    tree = tree_of("fedbuff", rounds=9, port=free_port(), options=BUFF, server={"away_seconds": 1.0})
    with Run(tmp_path, tree, wishes={"odd": {"1": "slow"}, "slow_seconds": 1.5}) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "north/1"), "the second job at north runs")
        run.stop("north")
        run.run_until(lambda: run.happened(FacilityLeft), "north is away")
        wait_for(lambda: (run.home("north") / "jobs/1/attempt-0/result.json").exists(), "the job ends without an agent")
        run.start("north")
        run.run_until(lambda: run.happened(FacilityJoined), "north is back")
        run.run_to_end()
        story = check(run, rounds=9)
        assert ("north/1", 0, 0) in story.receipts
        assert dict(story.fates)["north/1", 0, 0] == "aggregated"
        ended_with(run, -signal.SIGKILL)


# Jobs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
def test_of_two_incarnations_that_both_finish_one_counts(tmp_path: Path, first: bool) -> None:
    """The scheduler starts a job again while the old process lives on; the old one ends last, or first."""
    tree = tree_of("fedavg", port=free_port(), options={"steps": 5})
    wishes = {"odd": {"0": "deaf"}, "slow_seconds": LONGEST}
    waits = [3.0 if first else 0.0, 0.0, 0.0, 0.0, 0.0]
    with Run(tmp_path, tree, wishes=wishes, scheduler={"extra_waits": waits}) as run:
        run.start()
        other, old = (run.home(name) / "jobs/0/attempt-0" for name in ("south", "north"))
        run.run_until((other / "deaf").exists, "the first job at south is deaf")
        (other / "enough").touch()
        run.run_until((old / "deaf").exists, "the first job at north is deaf")
        home = run.home("north")
        scheduler = LocalScheduler(LocalSettings(), home)
        (name,) = [job["name"] for job in run.jobs_running("north")]
        scheduler.requeue(name)
        run.run_until(lambda: run.happened(JobRequeued, "north/0"), "it is known to be requeued")
        if not first:
            run.run_until(lambda: ("north/0", 1, 0) in run.story().receipts, "the new incarnation has handed in")
        (old / "enough").touch()
        run.run_to_end()
        wait_for((old / "result.json").exists, "the old incarnation ends too")
        story = check(run)
        assert (home / "jobs/0/attempt-1/result.json").exists()
        assert [(e.job_id, e.attempt) for e in story.events(JobRequeued)][:1] == [("north/0", 1)]
        assert ("north/0", 1, 0) in story.receipts
        assert ("north/0", 0, 0) not in story.receipts
        ended_with(run)


def test_an_incarnation_that_starts_after_the_update_was_taken_is_ended(tmp_path: Path) -> None:
    tree = tree_of("fedavg", rounds=4, port=free_port(), options={"steps": 5})
    with Run(tmp_path, tree, wishes={"odd": {"0": "deaf"}, "slow_seconds": 0.5}) as run:
        run.start()
        home = run.home("north")
        run.run_until(lambda: run.happened(JobStarted, "north/0"), "the first job at north")
        run.run_until(lambda: (home / "jobs/0/attempt-0/result.json").exists(), "its result")
        (home / "jobs/0/attempt-1").mkdir(exist_ok=True)  # what its script does first
        run.run_to_end()
        story = check_fates_only(run)
        assert not [key for key in story.receipts if key[0] == "north/0" and key[1] > 1]


def check_fates_only(run: Run) -> Story:
    from tests.faults.ledger_checks import check_counts, check_end, check_fates, check_models

    story = run.story()
    check_end(story, 3)
    check_counts(story)
    check_fates(story)
    check_models(story, step_of)
    return story


def test_a_killed_worker_and_a_hung_worker_fail_and_are_replaced(tmp_path: Path) -> None:
    tree = tree_of("fedavg", rounds=3, port=free_port(), options={"steps": 5})
    wishes = {"odd": {"1": "hang", "2": "slow"}, "slow_seconds": 1.0}
    with Run(tmp_path, tree, wishes=wishes, scheduler={"min_wall_seconds": 2.0}) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "south/2"), "a job to kill")
        (job,) = run.jobs_running("south")
        os.killpg(job["group"], signal.SIGKILL)
        run.run_to_end()
        story = check(run)
        reasons = {event.job_id: event.reason for event in story.events(JobFailed)}
        for name in ("north/1", "south/1"):
            assert reasons[name].startswith(WALL_TIME)
            assert "jobs/1/output.txt" in reasons[name]
        assert "137" in reasons["south/2"]
        ended_with(run)


def test_a_real_worker_killed_between_its_update_and_its_result_handed_in_nothing(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=2, port=free_port(), options={"steps": 3})
    command = f"{sys.executable} -m fedqueue.training.job {tmp_path}/run/task.json"
    agent = {
        "command": command,
        "environment": {"PYTHONPATH": str(SOURCE)},
        "before": ['case "$job" in */0) export FEDQUEUE_FAILPOINT=worker.written;; esac'],
    }
    with Run(tmp_path, tree, agent=agent) as run:
        run.start()
        run.run_to_end()
        story = check_run(
            run.folder, [run.home(name) for name in FACILITIES], rounds=2, step=lambda job, attempt, part, place: 0.01
        )
        assert {event.job_id for event in story.events(JobFailed)} == {"north/0", "south/0"}
        assert (run.home("north") / "jobs/0/attempt-0/update.safetensors").exists()


def test_a_bad_update_is_rejected_with_its_reason_and_kept_aside(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=6, port=free_port(), options={"steps": 5}, failures={"max_attempts": 20})
    odd = {"0": "nan", "1": "truncated", "2": "shape", "3": "missing"}
    with Run(tmp_path, tree, wishes={"odd": odd}) as run:
        run.start()
        run.run_to_end()
        story = check(run, rounds=6)
        reasons = {event.job_id: event.reason for event in story.events(UpdateRejected)}
        assert "not finite" in reasons["north/0"]
        assert "shape" in reasons["north/2"]
        missing = {event.job_id: event.reason for event in story.events(JobFailed)}
        assert "its sha256 is" in missing["north/1"], "sent again a few times: it may have been damaged on its way"
        assert "is not there" in missing["north/3"]
        kept = {path.name.rpartition("-")[0] for path in (run.folder / "refused").iterdir()}
        assert {"north@0-0-0", "north@2-0-0", "south@0-0-0", "south@2-0-0"} <= kept
        ended_with(run)


NOT_FINITE = """
import fedqueue, numpy
with fedqueue.participate() as work:
    for step in work.steps():
        pass
    work.submit({"weight": numpy.full(32, numpy.nan, numpy.float32)})
"""


def test_the_last_line_of_a_job_that_failed_reaches_log_ledger_and_status(tmp_path: Path) -> None:
    tree = tree_of("fedavg", port=free_port(), options={"steps": 5}, failures={"max_attempts": 1})
    tree["failures"]["suspend_seconds"] = 600.0
    (tmp_path / "train.py").write_text(NOT_FINITE)
    with Run(tmp_path, tree, agent={"environment": {"PYTHONPATH": str(SOURCE)}}) as run:
        run.write_agent("north", {"command": f"exec {sys.executable} {tmp_path}/train.py", "stage_worker": True}, {})
        evil = "printf '\\033[2Jit fell\\007 %s\\n\\n' \"$(yes x | head -n 2000 | tr '\\n' ' ')\" >&2; exit 3"
        run.write_agent("south", {"command": evil}, {})
        run.start()
        run.run_until(lambda: len(suspended(run)) == 2, "both facilities are suspended")
        facilities = status_of(run)["facilities"]
        reasons = {event.job_id: event.reason for event in run.story().events(JobFailed)}
        for reason in (reasons["north/0"], facilities[0]["idle_because"], run.log(COORDINATOR), run.log("north")):
            assert "'weight' is not finite" in reason
        assert "exit code 3" in reasons["south/0"]
        assert "ends with: ?[2Jit fell? x x x" in reasons["south/0"]
        assert len(reasons["south/0"]) < 400
        for text in (*reasons.values(), run.log(COORDINATOR), run.log("south"), facilities[1]["idle_because"]):
            assert not set(text) & {chr(27), chr(7)}


def suspended(run: Run) -> list[Record]:
    return [] if not run.happened(JobFailed) else [r for r in run.story().commands(Record) if r.kind == "suspended"]


def status_of(run: Run) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fedqueue", "status", str(run.folder), "--json"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_agent_says_what_becomes_of_each_job_with_its_number_and_the_schedulers(tmp_path: Path) -> None:
    tree = tree_of("fedavg", rounds=2, port=free_port(), options={"steps": 5})
    with Run(tmp_path, tree) as run:
        run.start()
        run.run_to_end()
        said = run.log("north")
        for path in run.home("north").glob("scheduler/jobs/fq-*"):
            number = path.name.rpartition("-")[2]
            for what in ("job {} ({}) is at the scheduler", "job {} ({}) started after ", "job {} ({}) ended: "):
                assert what.format(number, path.name) in said
            assert f"the update of job {number} ({path.name}) is handed in" in said
        check(run, rounds=2)


# Agents ------------------------------------------------------------------------------------------------


def agent_line(config: Path, **environment: str) -> tuple[int, list[str]]:
    """Exit code, and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "fedqueue", "agent", str(config)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def test_the_same_signal_twice_ends_an_agent_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    tree = tree_of("fedbuff", port=free_port(), options=BUFF)
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(tree["server"]["port"]))
        proxy.hold = lambda request: request.startswith(b"PUT /v1/updates/")
        run = stack.enter_context(Run(tmp_path, tree, url=lambda name: f"http://127.0.0.1:{proxy.port}"))
        run.start()
        run.run_until(lambda: proxy.held > 1, "both agents hand in, which takes for ever")
        north = run.actors["north"]
        assert north.process is not None
        os.kill(north.process.pid, signal.SIGTERM)
        wait_for(lambda: "waiting for a transfer" in north.log.read_text(), "it waits for its transfer")
        assert north.process.poll() is None
        os.kill(north.process.pid, signal.SIGTERM)
        wait_for(lambda: north.process is not None and north.process.poll() is not None, "it ends at once")
        assert north.process.poll() == 130
        assert "stopped at once" in north.log.read_text()
        proxy.hold = lambda request: False
        run.kill("south")
        run.run_to_end()
        check(run)


def is_heard_of(run: Run, name: str) -> bool:
    argv = [sys.executable, "-m", "fedqueue", "status", str(run.folder), "--json"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True).stdout
    return any(row["name"] == name and row["heard_seconds_ago"] is not None for row in json.loads(said)["facilities"])


def test_a_second_agent_is_refused_in_one_line(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=3, port=free_port(), options={"steps": 5})
    with Run(tmp_path, tree) as run:
        run.start(COORDINATOR, "north")  # the run does not start: south is not there
        run.run_until(lambda: (run.home("north") / "lease.json").exists(), "the first agent")
        code, said = agent_line(run.toml("north"))
        assert code == 10
        assert len(said) == 1
        assert "an agent for this facility runs on this host" in said[0]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "credential").write_bytes((run.home("north") / "credential").read_bytes())
        (elsewhere / "credential").chmod(0o600)
        other = tmp_path / "other.toml"
        other.write_text(run.toml("north").read_text().replace(str(run.home("north")), str(elsewhere)))
        run.run_until(lambda: is_heard_of(run, "north"), "the coordinator has heard of it")
        code, said = agent_line(other)
        assert code == 9
        assert "another agent of north is at work" in said[-1]
        run.start("south")
        run.run_to_end()
        check(run)
        ended_with(run)


def test_agents_that_only_visit_bring_a_run_to_its_end(tmp_path: Path) -> None:
    tree = tree_of("fedbuff", rounds=2, port=free_port(), options=BUFF)
    with Run(tmp_path, tree) as run:
        for name in FACILITIES:
            run.actors[name].argv.append("--once")
            run.actors[name].visits = True
        run.start()
        run.run_until(lambda: run.actors[COORDINATOR].done, "the end of the run")
        check(run, rounds=2)


def test_a_facility_whose_agent_lost_its_home_gives_its_jobs_up_and_goes_on(tmp_path: Path) -> None:
    tree = tree_of("fedavg", rounds=3, port=free_port(), options={"steps": 5})
    with Run(tmp_path, tree, wishes={"odd": {"1": "slow"}, "slow_seconds": 30.0}) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "north/1"), "a job at north")
        agent = run.actors["north"]
        assert agent.process is not None
        os.kill(agent.process.pid, signal.SIGTERM)
        wait_for(lambda: agent.process is not None and agent.process.poll() is not None, "the agent ends")
        run.stop("north")
        for job in run.jobs_running("north"):
            os.killpg(job["group"], signal.SIGKILL)
        wait_for(lambda: not run.jobs_running("north"), "no job is left")
        subprocess.run(["rm", "-rf", *(str(p) for p in run.home("north").iterdir() if p.name != "credential")])
        run.start("north")
        for job in run.jobs_running("south"):  # slow too
            os.killpg(job["group"], signal.SIGKILL)
        run.run_until(lambda: run.happened(JobFailed, "north/1"), "north/1 is given up")
        run.run_to_end()
        story = check(run)
        (given_up,) = [event for event in story.events(JobFailed) if event.job_id == "north/1"]
        assert "lost its journal" in given_up.reason
        assert len(updates(story, "north")) >= 3
