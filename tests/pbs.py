"""A stand-in for an OpenPBS server: `qsub`, `qstat`, `qselect`, `qdel`, `qrls` and `qrerun` whose answers have the form
that the recordings of the real one have, and jobs that really run.

    with stand_in(tmp_path, kill_delay=2.0) as pbs:
        scheduler = PbsScheduler(PbsSettings(bin=str(pbs.bin)))

It does what a real server was seen or is documented to do where that is a trouble: `qdel` of a running job begins the
delay from SIGTERM to SIGKILL anew, a job whose predecessor is deleted while it waits is held for good, a move from a
routing queue sets `qtime` and `etime` anew, and a job may be in state R before it has a `stime`.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "pbs-host"
COMMANDS = ("qsub", "qstat", "qselect", "qdel", "qrls", "qrerun")
LOOK = 0.02  # seconds between two turns of the server

CLIENT = """\
#!{python} -IS
import json, os, socket, sys
with socket.create_connection(("127.0.0.1", {port})) as server:
    argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    server.sendall(json.dumps({{"argv": argv, "TZ": os.environ.get("TZ")}}).encode() + b"\\n")
    answer = json.loads(server.makefile().readline())
sys.stdout.write(answer["stdout"])
sys.stderr.write(answer["stderr"])
sys.exit(answer["rc"])
"""


@dataclass
class Job:
    number: int
    name: str
    argv: list[str]
    output: str
    wall: float
    queue: str
    arguments: list[str]
    created: float
    queued: float
    state: str = "Q"
    substate: int = 10
    hold: str = "n"
    after: int | None = None
    eligible: float | None = None
    started: float | None = None
    ended: float | None = None
    run_count: int = 0
    exit_status: int | None = None
    deleted: bool = False
    rerun: bool = False  # it is to run again when this run has ended
    kill_at: float | None = None
    process: subprocess.Popen[bytes] | None = None
    variables: dict[str, str] = field(default_factory=lambda: {"PBS_O_HOME": '"/home/user"'})  # values as printed

    @property
    def id(self) -> str:
        return f"{self.number}.{HOST}"

    def signal(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class StandIn:
    """The server. Its settings may be changed at any time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.bin = folder / "pbs-bin"
        self.slots = 4
        self.kill_delay = 10.0
        self.route_seconds = 0.0  # that a job stays in the queue `route`
        self.stime_seconds = 0.0  # from the start of a job to the moment at which its record has a stime
        self.plan_seconds: float | None = None  # from a submission to the planned start; None: it plans nothing
        self.tabs = True  # False: JSON as the release prints it
        self.lost_deletions = 0  # so many of the next qdel are forgotten, as by a server that is killed hard
        self.calls: list[list[str]] = []
        self.jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    # What a test does and sees ------------------------------------------------------------------------------

    def of(self, name: str) -> Job:
        """Our job of this name, or whose name ends so."""
        with self._lock:
            (found,) = (job for job in self.jobs.values() if job.name.endswith(name))
        return found

    def hold(self, job: Job, kind: str) -> None:
        with self._lock:
            job.state, job.substate, job.hold = "H", 20, kind

    def deletions(self, job: Job) -> int:
        return sum(call[0] == "qdel" and job.id in call for call in list(self.calls))

    # What it does by itself ---------------------------------------------------------------------------------

    def turn(self) -> None:
        with self._lock:
            for job in self.jobs.values():
                self._look(job)
            running = sum(job.process is not None for job in self.jobs.values())
            for job in self.jobs.values():
                if job.state == "Q" and job.queue != "route" and running < self.slots:
                    self._start(job)
                    running += 1

    def _look(self, job: Job) -> None:
        now = time.time()
        if job.state == "Q" and job.queue == "route" and now >= job.queued + self.route_seconds:
            job.queue, job.queued, job.eligible = "workq", now, now
        if job.process is None:
            return
        code = job.process.poll()
        if code is not None:
            job.signal(signal.SIGKILL)
            self._end(job, 128 - code if code < 0 else code)
        elif job.kill_at is not None and now >= job.kill_at:
            job.signal(signal.SIGKILL)
        elif job.kill_at is None and job.started is not None and now >= job.started + job.wall:
            job.exit_status, job.kill_at = -29, now + self.kill_delay
            job.signal(signal.SIGTERM)

    def _start(self, job: Job) -> None:
        with open(job.output, "ab") as out:
            job.process = subprocess.Popen(
                job.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd="/",
                env={**os.environ, "HOME": str(self.bin)},  # a login shell would run whatever this user's profile has
            )
        job.state, job.substate, job.started, job.kill_at = "R", 42, time.time(), None
        job.run_count += 1

    def _end(self, job: Job, code: int) -> None:
        job.process, job.ended = None, time.time()
        if job.rerun:
            job.state, job.substate, job.rerun, job.kill_at = "Q", 10, False, None
            return
        job.exit_status = 271 if job.deleted else job.exit_status if job.exit_status is not None else code
        job.state, job.substate = "F", 91 if job.deleted else 92 if job.exit_status == 0 else 93
        for other in self.jobs.values():
            if other.after == job.number and other.state == "H" and other.substate == 22:
                other.state, other.substate, other.hold, other.after = "Q", 10, "n", None
                other.eligible = None if other.queue == "route" else job.ended
                if other.queue == "route":
                    other.queued = job.ended  # only now it may be routed

    # Its commands -------------------------------------------------------------------------------------------

    def answer(self, argv: Sequence[str], zone: str | None) -> dict[str, Any]:
        with self._lock:
            self.calls.append(list(argv))
            code, out, err = getattr(self, f"_{argv[0]}")(list(argv[1:]), zone)
        return {"rc": code, "stdout": out, "stderr": f"{argv[0]}: {err}\n" if err else ""}

    def _qsub(self, argv: list[str], zone: str | None) -> tuple[int, str, str]:
        cut = argv.index("--")
        options: dict[str, list[str]] = {}
        words = argv[:cut]
        while words:
            flag = words.pop(0)
            options.setdefault(flag, []).append("" if flag == "-h" else words.pop(0))
        wall = next(value for value in options["-l"] if value.startswith("walltime=")).partition("=")[2]
        hours, minutes, seconds = map(int, wall.split(":"))
        now, number = time.time(), len(self.jobs) + 1
        queue = options.get("-q", ["workq"])[0]
        job = Job(
            number=number,
            name=options["-N"][0],
            argv=argv[cut + 1 :],
            output=options["-o"][0],
            wall=3600 * hours + 60 * minutes + seconds,
            queue=queue,
            arguments=argv,
            created=now,
            queued=now,
            eligible=None if queue == "route" else now,
        )
        if "-W" in options:
            job.after = int(options["-W"][0].partition(":")[2].partition(".")[0])
            before = self.jobs.get(job.after)
            if before is not None and before.state != "F":
                job.state, job.substate, job.hold, job.eligible = "H", 22, "s", None
        if "-h" in options:
            job.state, job.substate, job.hold, job.eligible = "H", 20, "u", None
        self.jobs[number] = job
        return 0, f"{job.id}\n", ""

    def _qdel(self, argv: list[str], zone: str | None) -> tuple[int, str, str]:
        job = self._found(argv[-1])
        if job is None:
            return 153, "", f"Unknown Job Id {argv[-1]}"
        if job.state == "F":
            return 35, "", f"Job has finished {job.id}"
        if self.lost_deletions > 0:
            self.lost_deletions -= 1
        elif job.process is None:  # jobs that depend on it are not told
            job.deleted, job.state, job.substate, job.ended = True, "F", 91, None
        else:
            job.deleted, job.kill_at = True, time.time() + self.kill_delay
            job.signal(signal.SIGTERM)
        return 0, "", ""

    def _qrls(self, argv: list[str], zone: str | None) -> tuple[int, str, str]:
        job = self._found(argv[-1])
        if job is None:
            return 153, "", f"Unknown Job Id {argv[-1]}"
        job.state, job.substate, job.hold, job.eligible = "Q", 10, "n", time.time()
        return 0, "", ""

    def _qrerun(self, argv: list[str], zone: str | None) -> tuple[int, str, str]:
        job = self._found(argv[-1])
        if job is None or job.process is None:
            return 168, "", f"Request invalid for state of job {argv[-1]}"
        job.rerun = True
        job.signal(signal.SIGKILL)
        return 0, "", ""

    def _qselect(self, argv: list[str], zone: str | None) -> tuple[int, str, str]:
        assert argv[argv.index("-u") + 1] == getpass.getuser()
        name = argv[argv.index("-N") + 1]
        found = [job for job in self.jobs.values() if job.name == name and ("-x" in argv or job.state != "F")]
        return 0, "".join(f"{job.id}\n" for job in found), ""

    def _qstat(self, argv: list[str], zone: str | None) -> tuple[int, str, str]:
        assert zone == "UTC", "its times would be local ones"
        every = argv[-1] == "json"
        asked = list(self.jobs.values()) if every else [self._found(argv[-1])]
        found = [job for job in asked if job is not None and (job.state != "F" or "-x" in argv)]
        if not found and not every:
            known = asked[0] is not None
            return (35, self._json([]), "Job has finished") if known else (153, self._json([]), "Unknown Job Id")
        return 0, self._json(found), ""

    def _found(self, job_id: str) -> Job | None:
        return self.jobs.get(int(job_id.partition(".")[0]))

    # How it says it -----------------------------------------------------------------------------------------

    def _json(self, jobs: Sequence[Job]) -> str:
        tree: dict[str, Any] = {"timestamp": str(int(time.time())), "pbs_version": '"23.06.06"'}
        if jobs:
            tree["Jobs"] = {job.id: self._record(job) for job in jobs}
        return self._printed(tree, 0) + "\n"

    def _printed(self, tree: dict[str, Any], depth: int) -> str:
        one, gap = ("\t", "\t") if self.tabs else ("    ", "")
        parts = [
            f'{one * (depth + 1)}"{name}":{gap}'
            + (self._printed(value, depth + 1) if isinstance(value, dict) else str(value))
            for name, value in tree.items()
        ]
        return "{\n" + ",\n".join(parts) + f"\n{one * depth}}}"

    def _record(self, job: Job) -> dict[str, Any]:
        stime = job.started
        if job.state == "R" and stime is not None and time.time() < stime + self.stime_seconds:
            stime = None
        times = {"ctime": job.created, "qtime": job.queued, "etime": job.eligible, "stime": stime}
        text = {
            "Job_Name": job.name,
            "job_state": job.state,
            "queue": job.queue,
            "Hold_Types": job.hold,
            "depend": f"afterany:{job.after}.{HOST}@{HOST}" if job.after is not None else None,
            **{name: said(moment) for name, moment in times.items()},
            "obittime": said(job.ended),
        }
        numbers = {
            "substate": job.substate,
            "run_count": job.run_count or None,
            "Exit_status": job.exit_status if job.state == "F" else None,
            "history_timestamp": int(time.time()) if job.state == "F" else None,
        }
        found: dict[str, Any] = {name: f'"{value}"' for name, value in text.items() if value is not None}
        found |= {name: value for name, value in numbers.items() if value is not None}
        found["Resource_List"] = {"ncpus": 1, "select": '"1:ncpus=1"', "walltime": f'"{clock(job.wall)}"'}
        if job.queue != "route":
            found["Resource_List"]["nodect"] = 1
        found["Variable_List"] = job.variables
        found["Submit_arguments"] = json.dumps(" ".join(job.arguments))
        if self.plan_seconds is not None and job.state != "H":  # it stays in the record when the job runs
            found["estimated"] = {"start_time": f'"{said(job.created + self.plan_seconds)}"'}
        return found


def said(moment: float | None) -> str | None:
    return None if moment is None else time.strftime("%a %b %e %H:%M:%S %Y", time.gmtime(moment))


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600:02d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


@contextmanager
def stand_in(folder: Path, **settings: Any) -> Iterator[StandIn]:
    pbs = StandIn(folder, **settings)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline()
            if not line:
                return  # who asked was killed
            asked = json.loads(line)
            self.wfile.write(json.dumps(pbs.answer(asked["argv"], asked["TZ"])).encode() + b"\n")

    over = threading.Event()

    def live() -> None:
        while not over.wait(LOOK):
            pbs.turn()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        pbs.bin.mkdir()
        for name in COMMANDS:
            (pbs.bin / name).write_text(CLIENT.format(python=sys.executable, port=server.server_address[1]))
            (pbs.bin / name).chmod(0o755)
        threads = [threading.Thread(target=target, daemon=True) for target in (server.serve_forever, live)]
        for thread in threads:
            thread.start()
        try:
            yield pbs
        finally:
            over.set()
            threads[1].join()
            for job in pbs.jobs.values():
                job.signal(signal.SIGKILL)
                if job.process is not None:
                    job.process.wait()
            server.shutdown()
