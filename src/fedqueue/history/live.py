"""Ask the scheduler of this machine for its own history."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Final, Literal

from fedqueue.errors import ConfigError, DataError
from fedqueue.history.joblog import JobLog
from fedqueue.history.lines import LoggedJob, Options, Tally, unreadable
from fedqueue.history.read import as_log, chunks, day_files, jobs

Scheduler = Literal["slurm", "pbs", "sge"]

SACCT: Final = ("sacct", "-a", "-X", "-P", "-o", "JobID,Submit,Eligible,Start,End,Timelimit,NNodes,NCPUS,State")
PATIENCE: Final = 600.0  # seconds that sacct may take
PBS_HOMES: Final = ("/var/spool/pbs", "/var/spool/torque")
SGE_ROOTS: Final = ("/var/lib/gridengine", "/opt/sge")


def read_live(scheduler: Scheduler, days: int = 30, options: Options | None = None) -> JobLog:
    """The jobs that this machine's scheduler let start in the last days, in order of submission."""
    tally = Tally()
    return as_log(scheduler, chunks(live_jobs(scheduler, days, options or Options(), tally)), tally, scheduler)


def live_jobs(scheduler: Scheduler, days: int, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    """Each job submitted in the last days, as `jobs` gives those of a file."""
    if days < 1:
        raise ConfigError(f"--days must be 1 or more, found {days}")
    since = time.time() - 86_400 * days
    for job in SOURCES[scheduler](days, options, tally):
        if job[0] >= since:
            yield job
        else:
            tally.jobs -= 1
            tally.dropped[f"submitted more than {days} days ago"] += 1


def _slurm(days: int, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    """Times are asked for in UTC, so that no hour is there twice."""
    env = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sacct.txt"
        try:
            with path.open("wb") as out:
                done = subprocess.run(
                    [*SACCT, "-S", f"now-{days}days"],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.PIPE,
                    timeout=PATIENCE,
                )
        except FileNotFoundError:
            raise DataError("sacct: is not installed here; run this where Slurm's commands are") from None
        except OSError as error:
            raise DataError(f"sacct: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise DataError(f"sacct: no answer in {PATIENCE:g} s; ask for fewer --days") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise DataError(
                f"sacct: {said[-1].strip().removeprefix('sacct: ')}; without accounting Slurm keeps no history"
            )
        utc = Options(timezone="UTC", facility=options.facility, cores=options.cores)
        yield from jobs(path, utc, tally)


def _pbs(days: int, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    folder = _first_there(map(_accounting, _pbs_homes()))
    if folder is None:
        raise DataError("PBS: no accounting folder here; run this on its server, or copy server_priv/accounting here")
    begin = (date.today() - timedelta(days=days)).strftime("%Y%m%d")
    try:
        files = [file for file in day_files(folder) if file.name >= begin]
    except OSError as error:
        raise unreadable(folder, error) from None
    for file in files:
        yield from jobs(file, options, tally)


def _first_there(paths: Iterable[Path]) -> Path | None:
    for path in paths:
        try:
            if path.exists():
                return path
        except OSError as error:  # it may not even be looked for
            raise unreadable(path, error) from None
    return None


def _accounting(home: str) -> Path:
    return Path(home) / "server_priv" / "accounting"


def _pbs_homes() -> list[str]:
    found = []
    with suppress(OSError):
        conf = Path(os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf"))
        for line in conf.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "PBS_HOME":
                found.append(value.strip())
    return [*found, *PBS_HOMES]


def _sge(days: int, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    cell = os.environ.get("SGE_CELL", "default")
    root = os.environ.get("SGE_ROOT")
    files = [Path(home) / cell / "common" / "accounting" for home in ((root,) if root else SGE_ROOTS)]
    path = _first_there(files)
    if path is None:
        raise DataError(f"Grid Engine: no accounting file {files[0]}; set SGE_ROOT and SGE_CELL, or copy the file")
    yield from jobs(path, options, tally)


SOURCES: Final[dict[Scheduler, Callable[[int, Options, Tally], Iterator[LoggedJob]]]] = {
    "slurm": _slurm,
    "pbs": _pbs,
    "sge": _sge,
}
