"""The PBS adapter against recorded answers of OpenPBS 23.06; what no recording has is in test_pbs_stand_in.py.

Fake `qsub`, `qstat`, `qselect` and `qdel` answer what the real ones were recorded to answer, with the same exit code,
or hang where those hung. The recordings lie beside the checkout, or where FEDQUEUE_PBS_RECORDINGS says.
"""

from __future__ import annotations

import calendar
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.schedulers import (
    JobRequest,
    JobStatus,
    PbsScheduler,
    PbsSettings,
    SchedulerUnreachableError,
    SubmitRefusedError,
)
from fedqueue.agent.schedulers.pbs import read_status
from fedqueue.forecasting.state import Listed

ROOT = Path(__file__).parent.parent
RECORDINGS = Path(os.environ.get("FEDQUEUE_PBS_RECORDINGS") or ROOT.parent / "shared" / "facts" / "pbs")
pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="no recordings of PBS: point FEDQUEUE_PBS_RECORDINGS at their folder"
)

FAKE = """\
#!{python} -IS
import json, os, sys, time
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
name = os.path.basename(sys.argv[0])
with open(os.path.join(folder, "calls.jsonl"), "a") as file:
    file.write(json.dumps({{"argv": [name, *sys.argv[1:]], "TZ": os.environ.get("TZ")}}) + "\\n")
path = os.path.join(folder, name + ".json")
steps = json.load(open(path))
step = steps.pop(0)
json.dump(steps, open(path, "w"))
sys.stdout.write(step["stdout"])
sys.stderr.write(step["stderr"])
sys.stdout.flush()
if step["rc"] is None:
    time.sleep(600)
sys.exit(step["rc"])
"""


def steps(case: str, *command: str, note: str | None = None) -> list[dict[str, Any]]:
    """The recorded steps of a case whose command begins so."""
    (path,) = RECORDINGS.glob(f"{case}-*.json")
    found: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    return [
        step
        for step in found
        if step.get("argv", [])[: len(command)] == list(command) and (note is None or step.get("note") == note)
    ]


def at(clock: str) -> float:
    """A time of the day of the recordings, UTC."""
    return float(calendar.timegm(time.strptime(f"2026-11-16 {clock}", "%Y-%m-%d %H:%M:%S")))


class Pbs:
    """A folder of fake commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self, command: str, *given: dict[str, Any]) -> None:
        program = self.folder / command
        program.write_text(FAKE.format(python=sys.executable))
        program.chmod(0o755)
        (self.folder / f"{command}.json").write_text(json.dumps(given))

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def scheduler(self, **settings: Any) -> PbsScheduler:
        return PbsScheduler(PbsSettings(bin=str(self.folder), **settings))

    def poll(self, job_id: str, *given: dict[str, Any]) -> JobStatus:
        """`given` are its answers; it may also be asked for the job before this one, which runs."""
        self.answers(
            "qstat", *given, steps("24", "qstat", note="the parent, while it runs (its own depend attribute)")[0]
        )
        return self.scheduler().poll([job_id])[job_id]


@pytest.fixture
def pbs(tmp_path: Path) -> Pbs:
    return Pbs(tmp_path)


def request(folder: Path, after: str | None = None) -> JobRequest:
    return JobRequest(name="fq-test", script=folder / "job.sh", folder=folder, wall_seconds=299.5, after=after)


QSTAT = ("qstat", "-x", "-f", "-F", "json")


def one(case: str, job: str, note: str | None = None) -> dict[str, Any]:
    return steps(case, *QSTAT, f"{job}.pbs-host", note=note)[-1]


STATUSES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, object]]] = {
    "queued": (
        lambda: one("10", "36"),
        {
            "phase": "waiting",
            "name": "fq-test",
            "eligible_at": "05:51:18",
            "started_at": None,
            "never_starts": None,
            "incarnation": 0,
        },
    ),
    "held": (lambda: one("13", "37"), {"phase": "waiting", "eligible_at": None, "started_at": None}),
    "waits for its hour": (lambda: one("14", "38"), {"phase": "waiting", "eligible_at": None}),
    "too large": (
        lambda: one("06", "47"),
        {"never_starts": "Can Never Run: Insufficient amount of resource: ncpus (R: 64 A: 1 T: 1)"},
    ),
    "running": (
        lambda: one("11", "35"),
        {"phase": "running", "eligible_at": "05:51:14", "started_at": "05:51:14", "ended_at": None, "incarnation": 0},
    ),
    "released": (
        lambda: one("15", "37"),
        {"eligible_at": "05:51:49", "started_at": "05:51:52", "outcome": "completed"},
    ),
    "exit 0": (lambda: one("16", "73"), {"phase": "ended", "outcome": "completed", "exit_code": 0}),
    "exit 7": (lambda: one("17", "54"), {"outcome": "failed", "exit_code": 7, "ended_at": "05:52:44"}),
    "script killed": (lambda: one("17b", "57"), {"outcome": "failed", "exit_code": 137}),
    "shell killed": (lambda: one("28", "74"), {"outcome": "failed", "exit_code": 128 + 10}),
    "wall time": (lambda: one("18", "50"), {"outcome": "timeout", "exit_code": None, "ended_at": "05:53:07"}),
    "wall time, trapped": (lambda: one("19", "49"), {"outcome": "timeout"}),
    "deleted while queued": (
        lambda: one("20", "36"),
        {"phase": "ended", "outcome": "cancelled", "started_at": None, "exit_code": None},
    ),
    "just deleted": (lambda: one("21", "52", "right after qdel"), {"phase": "running", "outcome": None}),
    "deleted while running": (lambda: one("21", "52"), {"outcome": "cancelled", "exit_code": 143}),
    "first run": (lambda: one("22", "51", "first run"), {"phase": "running", "incarnation": 0}),
    "rerun": (
        lambda: one("22", "51", "second run"),
        {
            "phase": "running",
            "incarnation": 1,
            "eligible_at": "05:52:51",  # when its first run ended; PBS keeps the etime of that
            "started_at": "05:52:51",
            "ended_at": None,
            "outcome": None,
        },
    ),
    "rerun, ended": (
        lambda: one("22", "51", "finished"),
        {
            "incarnation": 1,
            "eligible_at": None,  # by now it is forgotten when the first run ended
            "started_at": "05:52:51",
            "ended_at": "05:53:16",
            "outcome": "completed",
        },
    ),
    "after another that runs": (
        lambda: one("24", "39", "while the parent runs"),
        {"phase": "waiting", "eligible_at": None},
    ),
    "after another, ended": (
        lambda: one("24", "39", "dependent finished"),
        {"eligible_at": "05:51:45", "started_at": "05:51:45", "outcome": "completed"},
    ),
    "after one that is unknown": (
        lambda: one("07", "46"),
        {"outcome": "cancelled", "exit_code": None, "started_at": None, "eligible_at": None},
    ),
    "dropped": (lambda: one("25", "64", "after the parent failed"), {"outcome": "cancelled", "exit_code": None}),
    "output folder missing": (lambda: one("29", "62", "missing folder"), {"outcome": "completed"}),
    "server back": (lambda: one("40", "68", "same job after the restart"), {"phase": "running", "incarnation": 0}),
}


@pytest.mark.parametrize("case", STATUSES)
def test_recorded_job_is_understood(case: str, pbs: Pbs) -> None:
    recorded, expected = STATUSES[case]
    step = recorded()
    status = pbs.poll(step["argv"][-1], step)
    for name, value in expected.items():
        wanted = at(value) if name.endswith("_at") and isinstance(value, str) else value
        assert getattr(status, name) == wanted, name


def test_no_recorded_job_without_an_exit_status_of_0_is_completed() -> None:
    seen = 0
    for path in sorted(RECORDINGS.glob("*.json")):
        for step in json.loads(path.read_text())["steps"]:
            if step.get("argv", [])[:5] == list(QSTAT) and step["rc"] == 0:
                for job in json.loads(step["stdout"])["Jobs"].values():
                    status = read_status(job)
                    assert (status.outcome == "completed") == (job["job_state"] == "F" and job.get("Exit_status") == 0)
                    seen += 1
    assert seen > 40


def test_jobs_are_asked_for_one_by_one_with_times_in_utc(pbs: Pbs) -> None:
    pbs.answers("qstat", one("11", "35"), steps("31", *QSTAT)[0], one("10", "36"))
    found = pbs.scheduler().poll(["35.pbs-host", "999999", "36.pbs-host"])
    assert {job_id: status.phase for job_id, status in found.items()} == {
        "35.pbs-host": "running",
        "36.pbs-host": "waiting",
    }
    assert [call["argv"] for call in pbs.calls()] == [[*QSTAT, job] for job in ("35.pbs-host", "999999", "36.pbs-host")]
    assert {call["TZ"] for call in pbs.calls()} == {"UTC"}


def test_malformed_id_is_absent(pbs: Pbs) -> None:
    pbs.answers("qstat", *steps("31", *QSTAT, note="malformed id"))
    assert pbs.scheduler().poll(["not-an-id"]) == {}


def test_answer_without_jobs_or_that_is_no_json_is_an_unknown_state(pbs: Pbs) -> None:
    other = '{"Jobs": {"36.pbs-host": {"job_state": "F", "Exit_status": 0}}}'
    for text in ("", "{", "[]", '{"timestamp": 1}', '{"Jobs": []}', '{"Jobs": {"35.pbs-host": null}}', other):
        step = {"rc": 0, "stdout": text, "stderr": ""}
        assert pbs.poll("35.pbs-host", step).phase == "unknown", text
    assert read_status({"job_state": "M"}).phase == "unknown", "moved to another server"


@pytest.mark.parametrize("case", STATUSES)
def test_json_that_variables_of_the_job_have_broken_is_understood_all_the_same(case: str, pbs: Pbs) -> None:
    """OpenPBS wrote digits of a variable as a number, and left quotes and backslashes as they were: its issues 1255,
    2049 and 2603."""
    step = STATUSES[case][0]()
    first = '"PBS_O_HOME":'
    broken = f"""\"CODE\":\t005,\n\t\t\t\t"SAID":\t"a "b" c\\, \\' d",\n\t\t\t\t{first}"""
    text = step["stdout"].replace(first, broken)
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(text)
    assert pbs.poll(step["argv"][-1], {**step, "stdout": text}) == pbs.poll(step["argv"][-1], step)


NO_HISTORY = {
    "rc": 36,
    "stdout": '{"timestamp": 1}',
    "stderr": "qstat: PBS is not configured to maintain job history\n",
}


def test_server_without_a_history_is_asked_for_what_lives(pbs: Pbs) -> None:
    """In no recording: the code is that of the error in its source, the words are what users of it report."""
    pbs.answers("qstat", NO_HISTORY, one("11", "35"), NO_HISTORY, steps("31", *QSTAT)[0])
    assert {n: s.phase for n, s in pbs.scheduler().poll(["35.pbs-host", "34.pbs-host"]).items()} == {
        "35.pbs-host": "running"
    }
    assert [call["argv"] for call in pbs.calls()][1::2] == [
        ["qstat", "-f", "-F", "json", job] for job in ("35.pbs-host", "34.pbs-host")
    ]
    pbs.answers("qselect", {**NO_HISTORY, "rc": 1}, steps("35", "qselect", "-u", "user", "-N")[0])
    assert pbs.scheduler().find("fq-test") == "39.pbs-host"
    assert pbs.calls()[-1]["argv"][:2] == ["qselect", "-u"]


def test_submission_asks_for_nodes_wall_time_and_output_and_runs_the_script_without_a_shell_above(pbs: Pbs) -> None:
    pbs.answers("qsub", *steps("02", "qsub"))
    scheduler = pbs.scheduler(queue="workq", account="abc", nodes=2, cpus_per_node=8, gpus_per_node=4, place="scatter")
    assert scheduler.submit(request(pbs.folder)) == "35.pbs-host"
    (call,) = pbs.calls()
    argv = call["argv"]
    asked = [argv[i + 1] for i, word in enumerate(argv) if word == "-l"][:3]
    assert asked == ["select=2:ncpus=8:ngpus=4", "walltime=00:05:00", "place=scatter"]
    assert argv[argv.index("-o") + 1] == f"{pbs.folder}/output.txt"
    assert argv[-4:] == ["--", "/bin/bash", "-l", f"{pbs.folder}/job.sh"]
    assert call["TZ"] == os.environ.get("TZ"), "a job would inherit it"


def test_dependency_is_afterany_and_left_out_when_pbs_has_forgotten_the_other(pbs: Pbs) -> None:
    pbs.answers("qstat", one("11", "35"), steps("31", *QSTAT)[0])
    pbs.answers("qsub", *steps("24", "qsub"), *steps("02", "qsub"))
    assert pbs.scheduler().submit(request(pbs.folder, after="35.pbs-host")) == "39.pbs-host"
    assert pbs.scheduler().submit(request(pbs.folder, after="999999")) == "35.pbs-host"
    first, second = (call["argv"] for call in pbs.calls() if call["argv"][0] == "qsub")
    assert "depend=afterany:35.pbs-host" in first
    assert "-W" not in second, "PBS would take it and drop the job"


@pytest.mark.parametrize(
    ("case", "index", "reason"),
    [
        ("03", 0, "Unknown queue"),
        ("04", 0, "Job violates queue and/or server resource limits"),
        ("05", 0, "Illegal attribute or resource value select.ncpus"),
        ("05", 1, "Unknown resource: nosuch"),
        ("05", 5, '"-lresource=" cannot be used with "select" or "place", resource is: ncpus'),
        ("05", 6, "script file:: No such file or directory"),
        ("05", 8, "illegal -N value"),
    ],
)
def test_recorded_refusal_is_permanent_and_says_why(case: str, index: int, reason: str, pbs: Pbs) -> None:
    pbs.answers("qsub", steps(case, "qsub")[index])
    with pytest.raises(SubmitRefusedError) as caught:
        pbs.scheduler().submit(request(pbs.folder))
    assert (caught.value.reason, caught.value.transient) == (reason, False)


def test_job_is_found_by_name_among_waiting_running_and_ended_ones(pbs: Pbs) -> None:
    pbs.answers("qselect", steps("35", "qselect", "-x")[0], steps("41", "qselect")[0])
    assert pbs.scheduler().find("fq-test") == "39.pbs-host", "the newest"
    assert pbs.scheduler().find("fq-frozen") is None
    assert pbs.calls()[0]["argv"][:2] == ["qselect", "-x"]


def test_cancelling_what_is_gone_is_no_error(pbs: Pbs) -> None:
    pbs.answers("qdel", *steps("21", "qdel"), *steps("20", "qdel", note="second qdel"), steps("34", "qdel")[0])
    for job_id in ("52.pbs-host", "36.pbs-host", "999999"):
        pbs.scheduler().cancel(job_id)


def test_cancelling_what_is_about_to_end_is_no_error(pbs: Pbs) -> None:
    exits = next(step for step in steps("28b", "qsig") if step["rc"] == 168)  # qdel answers so while a job exits
    pbs.answers("qdel", exits)
    pbs.scheduler().cancel("52.pbs-host")


def test_listing_has_what_waits_and_runs_and_a_broken_job_hides_no_other(pbs: Pbs) -> None:
    step = steps("36", "qstat", "-f", "-F", "json")[0]
    running = Listed(submitted=at("05:51:14"), started=at("05:51:14"), requested=300.0, procs=1)
    waiting = Listed(submitted=at("05:51:18"), requested=300.0, procs=1)
    broken = {
        **step,
        "stdout": step["stdout"].replace('"PBS_O_LOGNAME":', '"CODE":\t005,\n\t\t\t\t"PBS_O_LOGNAME":', 1),
    }
    pbs.answers("qstat", step, broken)
    for _ in range(2):
        assert pbs.scheduler().listing() == {"35.pbs-host": running, "36.pbs-host": waiting}


def test_server_that_is_down_is_unreachable(pbs: Pbs) -> None:
    for command in ("qstat", "qsub", "qselect", "qdel"):
        pbs.answers(command, next(step for step in steps("40", command) if step["rc"]))
    check_unreachable(pbs, "connect", 30.0)


def test_server_that_is_frozen_is_unreachable(pbs: Pbs) -> None:
    hangs = next(step for step in steps("41", *QSTAT) if step["rc"] is None)
    for command in ("qstat", "qsub", "qselect", "qdel"):
        pbs.answers(command, hangs)
    check_unreachable(pbs, "no answer in", 0.3)


def check_unreachable(pbs: Pbs, words: str, timeout: float) -> None:
    scheduler = pbs.scheduler(timeout_seconds=timeout)
    for ask in (
        lambda: scheduler.poll(["68.pbs-host"]),
        lambda: scheduler.find("fq-test"),
        lambda: scheduler.submit(request(pbs.folder)),
        lambda: scheduler.cancel("68.pbs-host"),
    ):
        with pytest.raises(SchedulerUnreachableError, match=words):
            ask()
