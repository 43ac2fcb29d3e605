"""A real run to which much was done, fed back to the simulator: every update meets the same fate."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedqueue.agent.schedulers import LocalScheduler, LocalSettings
from fedqueue.cli import main
from fedqueue.coordinator.run_folder import stored_config
from fedqueue.ledger import FILE
from fedqueue.sim.playback import simulate_recording
from fedqueue.sim.recorded import read_recording
from tests.conftest import journal
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(60)

WORKER = """
import os, time
import numpy as np
import fedqueue
from safetensors.numpy import load_file

job = "/".join(os.environ["FEDQUEUE_JOB"].split("/")[-3:])
adds = -1 if os.environ["DISAGREE"] and job.startswith("south") else 1
with fedqueue.participate() as work:
    for part in work.parts():
        odd = {"north/jobs/1": "fails", "north/jobs/3": "is not finite"}.get(job)
        if os.environ["DISAGREE"] or part.part < int(os.environ["ODD_PART"]):
            odd = None
        tensors = load_file(part.model_path)
        for step in part.steps():
            time.sleep(0.05)
            if odd == "fails":
                raise SystemExit(3)
        if odd == "is not finite":
            tensors = {name: values * np.nan for name, values in tensors.items()}
        part.submit({name: values + adds for name, values in tensors.items()})
"""

CONFIG = """
[run]
strategy = "{strategy}"
rounds = 1000
round_length = 2.0

{options}
[model]
initial = "first.safetensors"

[worker]
command = "ODD_PART={odd_part} DISAGREE={disagree} {python} worker.py"
poll_seconds = 0.2

[failures]
retry_seconds = 0.5

[server]
away_seconds = 3.0
startup_allowance_seconds = {startup}

[[facility]]
name = "north"
queue = {{ kind = "fixed", delay = 0.4 }}

[[facility]]
name = "south"
queue = {{ kind = "fixed", delay = 0.2 }}
"""


ONE_A_ROUND = """[strategy.jit]
stay = "off"
rounds = "fixed"
absent = 0.0
"""


class RealRun:
    """A run on this machine, and what can be done to it."""

    def __init__(self, base: Path, strategy: str, options: str, disagree: str = "") -> None:
        """Its first jobs fail, unless south shall `disagree` with north."""
        self.base, self.folder = base, base / "run"
        (base / "worker.py").write_text(WORKER)
        save_file({"a": np.zeros(4, np.float32)}, base / "first.safetensors")
        stays = "stay = " in options and 'stay = "off"' not in options
        text = CONFIG.format(
            strategy=strategy,
            options=options,
            python=sys.executable,
            odd_part=int(stays),
            disagree=disagree,
            startup=0.0 if stays else 300.0,
        )
        (base / "run.toml").write_text(text)
        self.process = self._start(str(base / "run.toml"), "--out", str(self.folder))

    def _start(self, *which: str) -> subprocess.Popen[bytes]:
        with (self.base / "log").open("ab") as log:
            argv = [sys.executable, "-m", "fedqueue", "run", "--no-plots", *which]
            return subprocess.Popen(argv, stdout=log, stderr=log)

    def until(self, true: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """Until this is true of the journal."""

        def look() -> bool:
            try:
                return true(journal(self.folder))
            except (AssertionError, SystemExit):  # it is being made
                return False

        wait_for(look, what, lambda: (self.base / "log").read_text()[-3000:], every=0.1)

    def happened(self, kind: str, times: int = 1, job: str = "") -> None:
        def enough(lines: list[dict[str, Any]]) -> bool:
            return len([line for line in lines if line["kind"] == kind and job in json.dumps(line["body"])]) >= times

        self.until(enough, f"{times} times {kind} {job}")

    def more_updates(self) -> None:
        """Of both facilities."""
        before = [line["seq"] for line in journal(self.folder)][-1]

        def both(lines: list[dict[str, Any]]) -> bool:
            new = [
                line["body"]["receipt"]["job_id"]
                for line in lines
                if line["kind"] == "UpdateArrived" and line["seq"] > before
            ]
            return {job.partition("/")[0] for job in new} >= {"north", "south"}

        self.until(both, "updates of both")

    def say(self, *words: str) -> None:
        assert main([words[0], str(self.folder), *words[1:]]) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start(str(self.folder))
        resumed = sum(line["kind"] == "CoordinatorResumed" for line in journal(self.folder))
        self.happened("CoordinatorResumed", resumed + 1)

    def requeue(self) -> None:
        """A job that runs at south; one that ended just then is followed by another."""
        home = self.folder / "facilities" / "south"
        asked: set[str] = set()

        def requeued() -> bool:
            for path in home.glob("scheduler/jobs/*/state.json"):
                state = json.loads(path.read_text())
                if state["phase"] != "ended" and state.get("group") and path.parent.name not in asked:
                    asked.add(path.parent.name)
                    LocalScheduler(LocalSettings(), home).requeue(path.parent.name)
            return any(line["kind"] == "JobRequeued" for line in journal(self.folder))

        wait_for(requeued, "a job at south is requeued", every=0.1)

    def close(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
            self.process.wait(LONGEST)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("jit", ONE_A_ROUND),
        ("jit", ONE_A_ROUND + 'pipeline = "chain"\n'),
        ("fedavg", "[strategy.fedavg]\nsteps = 12\n"),
        ("jit", '[strategy.jit]\nstay = 6.0\nrounds = "auto"\nabsent = 0.7\nmin_steps = 5\n'),
        ("fedavg", "[strategy.fedavg]\nsteps = 12\nstay = 6.0\n"),
    ],
)
def test_after_pauses_restarts_and_failures_every_update_meets_the_same_fate(
    strategy: str, options: str, tmp_path: Path, capsys: Any
) -> None:
    run = RealRun(tmp_path, strategy, options)
    try:
        run.happened("JobFailed", job="north/1")
        run.say("pause")
        run.happened("RunPaused")
        run.say("resume")
        run.more_updates()
        run.requeue()
        run.happened("JobFailed", job="north/3")
        run.kill()
        run.more_updates()
        run.say("drain", "south")
        run.say("pause")
        run.kill()
        run.say("resume")
        run.say("join", "south")
        run.more_updates()
        run.say("stop")
        assert run.process.wait(LONGEST) == 0, (tmp_path / "log").read_text()
    finally:
        run.close()
    capsys.readouterr()
    code = main(["retrace", str(run.folder)])
    said = capsys.readouterr().out
    assert code == 0, said
    fates = [line["body"]["facts"] for line in journal(run.folder) if line["body"].get("kind") == "fate"]
    assert said == f"{len(fates)} of {len(fates)} updates met the same fate as in the run\n"
    assert len(fates) >= 8

    # A ledger that says otherwise: the difference is named, and so is what nobody wrote down.
    with sqlite3.connect(run.folder / FILE) as db:
        first = next(line for line in journal(run.folder) if line["body"].get("facts", {}).get("fate") == "aggregated")
        body = json.dumps(first["body"]).replace('"aggregated"', '"expired"')
        changed = db.execute(
            "UPDATE commands SET body = ? WHERE seq = ? AND json(body) = json(?)",
            (body, first["seq"], json.dumps(first["body"])),
        )
        assert changed.rowcount == 1
    db.close()
    assert main(["retrace", str(run.folder)]) == 1
    said = capsys.readouterr().out
    assert f"{len(fates) - 1} of {len(fates)} updates" in said
    into = f"into version {first['body']['facts']['version']}"
    assert f"expired {into} in the run, aggregated {into} here" in said
    for kind in ("RunPaused: how long the run clock stood still", "CoordinatorResumed: what was in hand"):
        assert f" s {kind}" in said


def test_rounds_that_grow_late_in_training_grow_in_virtual_time_too(tmp_path: Path, capsys: Any) -> None:
    """Scores stand still and the facilities pull apart."""
    options = '[strategy.jit]\nstay = 20.0\nrounds = "auto"\nmin_steps = 5\n'
    options += '[evaluation]\ncommand = "echo \'{\\"score\\": 0.5}\'"\n'
    run = RealRun(tmp_path, "jit", options, disagree="1")
    try:
        run.happened("ModelScored", 8)
        run.happened("ModelReady", 14)
        run.say("stop")
        assert run.process.wait(LONGEST) == 0, (tmp_path / "log").read_text()
    finally:
        run.close()
    lines = journal(run.folder)
    posted = [line["body"]["standing"]["round_length"] for line in lines if line["kind"] == "PostWork"]
    assert posted[0] == 2.0, "until it is known what can be done, rounds are as they were set"
    assert len(set(posted)) > 5, "from then on they are chosen anew"
    recording = read_recording(run.folder)
    played = simulate_recording(recording, stored_config(run.folder))
    assert played.cutoffs.keys() == recording.cutoffs.keys()
    assert played.cutoffs == pytest.approx(recording.cutoffs, abs=0.01)
    unknown = simulate_recording(dataclasses.replace(recording, agreements={}), stored_config(run.folder))
    last = [key for key in recording.cutoffs if key in unknown.cutoffs][-1]  # the other run may end a round earlier
    assert recording.cutoffs[last] > unknown.cutoffs[last] + 1.0, "that the updates disagree made rounds longer"
    capsys.readouterr()
    assert main(["retrace", str(run.folder)]) == 0, capsys.readouterr().out
