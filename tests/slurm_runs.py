"""Real runs over real Slurm clusters that a test disturbs: jobs that wait at a gate, and what must hold in the end."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.messages import CancelJob
from tests.faults.harness import WORKER, Run, free_port, tree_of
from tests.faults.ledger_checks import Story, check_run
from tests.slurm import Cluster, processes_with
from tests.waiting import wait_for

ROUNDING = 3.0
"""Seconds: Slurm's times are whole seconds, and its log is written a moment after the job was last asked about."""


class SlurmRun(Run):
    """Facilities on clusters, several on one if need be. A job waits while its gate is closed."""

    def __init__(
        self,
        base: Path,
        sites: Mapping[str, Cluster],
        *,
        strategy: str = "fedavg",
        rounds: int = 2,
        options: Mapping[str, Any] | None = None,
        scheduler: Mapping[str, Mapping[str, Any]] | None = None,
        round_length: float = 0.5,
        grace: float = 0.5,
        **more: Any,
    ) -> None:
        """`scheduler`: what some facilities say of theirs beside the rest."""
        tables = {"facility": [{"name": name} for name in sites], "run": {"round_length": round_length}}
        steps = {"steps": 5} if options is None else options
        tree = tree_of(strategy, rounds=rounds, port=free_port(), options=steps, **tables)
        super().__init__(base, tree, **more)
        self.sites = dict(sites)
        self.gates = base / "gates"
        self.gates.mkdir()
        for name, cluster in sites.items():
            settings = {"kind": "slurm", "conf": str(cluster.conf), "partition": "batch", "timeout_seconds": 8.0}
            command = shlex.join([sys.executable, "-I", "-S", str(WORKER), json.dumps(self.wishes)])
            gate = f'{shlex.quote(str(self.gates / name))}-"$(basename "$FEDQUEUE_JOB")-$FEDQUEUE_ATTEMPT"'
            self.write_agent(
                name,
                {
                    "command": f"while [ -e {gate} ]; do sleep 0.1; done; exec {command}",
                    "poll_seconds": 0.4,
                    "grace_seconds": grace,
                },
                {**settings, **(scheduler or {}).get(name, {})},
            )

    def __enter__(self) -> SlurmRun:
        return self

    def shut(self, facility: str, job: int = 0, attempt: int = 0) -> None:
        (self.gates / f"{facility}-{job}-{attempt}").touch()

    def open(self, facility: str, job: int = 0, attempt: int = 0) -> None:
        (self.gates / f"{facility}-{job}-{attempt}").unlink()

    def wait(self, kind: type[Any], *jobs: str, attempt: int | None = None) -> None:
        """Until the ledger has this of each of these jobs."""
        for job in jobs:
            self.run_until(lambda job=job: self._has(kind, job, attempt), f"{kind.__name__} of {job}")  # type: ignore[misc]

    def _has(self, kind: type[Any], job: str, attempt: int | None) -> bool:
        try:
            with LedgerReader(self.folder / FILE) as ledger:
                rows = ledger.rows(f"SELECT body FROM events WHERE kind = '{kind.__name__}' AND job = '{job}'")
        except RunFolderError:  # it has only begun to be made
            return False
        return any(attempt in (None, json.loads(row["body"]).get("attempt")) for row in rows)

    # At the scheduler -----------------------------------------------------------------------------------

    def job_folder(self, facility: str, job: int = 0) -> Path:
        return self.home(facility) / "jobs" / str(job)

    def ids(self, facility: str, job: int = 0) -> list[str]:
        """Slurm's ids of this job; there should be one."""
        answer = self.sites[facility].call("squeue", "--noheader", "--states=all", "--format=%A|%Z")
        lines = [line.partition("|") for line in answer.splitlines()]
        return [number for number, _, folder in lines if folder == str(self.job_folder(facility, job))]

    def id(self, facility: str, job: int = 0) -> str:
        (found,) = self.ids(facility, job)
        return found

    def node(self, facility: str, job: int = 0) -> str:
        """The node on which it runs."""
        return (
            self.sites[facility].call("squeue", "--noheader", "--format=%N", f"--jobs={self.id(facility, job)}").strip()
        )

    def down(self, facility: str, node: str) -> None:
        self.sites[facility].call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def up(self, facility: str, node: str) -> None:
        """No error if it came back by itself."""
        argv = ["scontrol", "update", f"nodename={node}", "state=resume"]
        subprocess.run(argv, env=self.sites[facility].env, capture_output=True, timeout=600, check=False)

    def forgets(self, facility: str, number: str) -> bool:
        """Whether Slurm no longer knows this job."""
        argv = ["scontrol", "show", "job", number]
        answer = subprocess.run(argv, env=self.sites[facility].env, capture_output=True, text=True, timeout=600)
        return "Invalid job id" in answer.stderr

    def processes(self, facility: str, job: int = 0) -> list[int]:
        return list(processes_with(f"FEDQUEUE_JOB={self.job_folder(facility, job)}"))

    # What must hold -------------------------------------------------------------------------------------

    def check(self, rounds: int) -> Story:
        """The ledger is sound; it knows every incarnation that ran before its job handed in, and how long it waited;
        nothing is left."""
        story = check_run(self.folder, [self.home(name) for name in self.sites], rounds=rounds)
        with LedgerReader(self.folder / FILE) as ledger:
            rows = ledger.rows("SELECT job, attempt, admission_delay FROM incarnations")
        delays = {(str(row["job"]), int(row["attempt"])): float(row["admission_delay"]) for row in rows}
        over = {command.job_id for command in story.commands(CancelJob)}
        settled = {job: attempt for job, attempt, _ in story.receipts}
        for facility in self.sites:
            seen = self._log(facility)
            for job, incarnations in seen.items():
                numbers = {incarnation["JobId"] for incarnation in incarnations}
                assert len(numbers) == 1, f"{facility}/{job} was submitted more than once: {numbers}"
                # A job that is PENDING here was given nodes that could not launch it.
                ran = [row for row in incarnations if row["NodeList"] != "(null)" and row["JobState"] != "PENDING"]
                for attempt, row in enumerate(ran):
                    key = (f"{facility}/{job}", attempt)
                    if (key[0] in over and key not in delays) or attempt > settled.get(key[0], attempt):
                        continue
                    assert key in delays, f"{key} is not in the ledger: {row}"
                    waited = max(0.0, row["StartTime"] - row["EligibleTime"])
                    assert abs(delays[key] - waited) <= ROUNDING, f"{key}: {delays[key]} in the ledger, {row}"
            for started in self.home(facility).glob("jobs/*/attempt-*/started"):
                key = (f"{facility}/{started.parent.parent.name}", int(started.parent.name.partition("-")[2]))
                late = key[1] > settled.get(key[0], key[1])
                assert key in delays or late or key[0] in over, f"{key} ran and is not in the ledger"
        for name, cluster in self.sites.items():
            wait_for(lambda c=cluster, n=name: not self._busy(c, n), f"{name}: no job is left", cluster.log)  # type: ignore[misc]
        return story

    def _busy(self, cluster: Cluster, facility: str) -> bool:
        lines = cluster.call("squeue", "--noheader", "--format=%Z").splitlines()
        return any(line.startswith(f"{self.home(facility)}/") for line in lines)

    def _log(self, facility: str) -> dict[int, list[dict[str, Any]]]:
        """What Slurm's own log of completed jobs says of each of our jobs, its incarnations one after the other."""
        found: dict[int, list[dict[str, Any]]] = {}
        for line in (self.sites[facility].folder / "log" / "jobcomp.log").read_text().splitlines():
            row: dict[str, Any] = dict(re.findall(r"(\w+)=(\S*)", line))
            folder = Path(row["WorkDir"])
            if folder.parent == self.home(facility) / "jobs" and folder.name.isdigit():
                for key in ("StartTime", "EligibleTime"):
                    row[key] = _epoch(row[key])
                found.setdefault(int(folder.name), []).append(row)
        return found


def _epoch(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:  # Unknown
        return 0.0
