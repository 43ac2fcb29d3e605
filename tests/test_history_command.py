"""`fedqueue history`: what it says, draws and writes, and its mistakes in one line."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue.cli import main
from fedqueue.history.read import read_log
from tests.test_history import BEGIN, LOGS, table

HOUR, DAY = 3600, 86_400


@pytest.fixture
def weeks(tmp_path: Path) -> Path:
    """Four weeks, a job a minute. Jobs of Sundays wait 10 s, of 12:00-13:00 2 h, others 5 min; every tenth is large."""
    path = tmp_path / "weeks.swf"
    lines = [f"; UnixStartTime: {BEGIN - 10 * HOUR}"]  # Monday 00:00 UTC
    for n in range(28 * 24 * 60):
        at = 60 * n
        wait = 10 if at // DAY % 7 == 6 else 2 * HOUR if at // HOUR % 24 == 12 else 300
        procs = 64 if n % 10 == 0 else 2
        lines.append(f"{n} {at} {wait} 600 {procs} -1 -1 {procs} 3600 -1 1 1 1 -1 1 1 -1 -1")
    path.write_text("\n".join(lines) + "\n")
    return path


def printed(capsys: Any, *args: str) -> dict[str, Any]:
    assert main(["history", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_summary_by_known_answers(weeks: Path, capsys: Any) -> None:
    found = printed(capsys, str(weeks), "--timezone", "UTC")
    assert (found["jobs"], found["format"], found["dropped"], found["broken_lines"]) == (40_320, "swf", {}, 0)
    assert (found["first"], found["last"]) == (BEGIN - 10 * HOUR, BEGIN - 10 * HOUR + 60 * 40_319)
    assert (found["median"], found["p99"], found["longest"]) == (300, 7200, 7200)
    assert found["within"] == {
        "60": pytest.approx(1 / 7),
        "600": pytest.approx(1 - 6 / 7 / 24),
        "3600": pytest.approx(1 - 6 / 7 / 24),
    }
    assert found["mean"] == pytest.approx((10 + 6 * (23 * 300 + 7200) / 24) / 7)
    assert [hour["median"] for hour in found["hours"]] == [300] * 12 + [7200] + [300] * 11
    assert [day["median"] for day in found["weekdays"]] == [300] * 6 + [10]
    assert found["week"][6] == [10] * 24
    assert [(shape["procs"], shape["jobs"]) for shape in found["shapes"]] == [([2, 3], 36_288), ([64, 127], 4032)]
    # Ten jobs at once, one of them large; in the hours after noon those of two hours ago come on top.
    assert found["peak"] == pytest.approx(2 * (9 * 2 + 64), rel=0.1)
    later = printed(capsys, str(weeks), "--timezone", "Asia/Kolkata")
    assert [place for place, hour in enumerate(later["hours"]) if hour["p90"] == 7200] == [17, 18], "half past five"


def test_jobs_are_chosen_by_shape_and_date(weeks: Path, capsys: Any, tmp_path: Path) -> None:
    dates = ("--since", "2026-01-06", "--until", "2026-01-07", "--timezone", "UTC")
    found = printed(capsys, str(weeks), *dates, "--procs", "64", "--out", str(tmp_path / "out.csv.gz"))
    assert found["jobs"] == 144
    log = read_log(tmp_path / "out.csv.gz")
    assert len(log) == 144
    assert log.epoch == BEGIN - 10 * HOUR + DAY
    assert set(log.procs.tolist()) == {64}
    again = printed(capsys, str(tmp_path / "out.csv.gz"), "--timezone", "UTC")
    same = ("jobs", "first", "last", "mean", "median", "p90", "peak", "hours", "shapes")
    assert [again[key] for key in same] == [found[key] for key in same]


def test_people_read_the_same(weeks: Path, capsys: Any, tmp_path: Path) -> None:
    assert main(["history", str(weeks), "--timezone", "UTC", "--plots", str(tmp_path / "plots")]) == 0
    out = capsys.readouterr().out
    for words in ("40,320 jobs", "2026-01-05 to 2026-02-01", "12:00-13:00", "Sunday", "to 1 h", "64-127", "load"):
        assert words in out
    for name in ("week.png", "shape.png"):
        assert (tmp_path / "plots" / name).stat().st_size > 10_000


def test_every_small_log_is_told_and_drawn(capsys: Any, tmp_path: Path) -> None:
    for path in sorted(LOGS.iterdir()):
        assert main(["history", str(path), "--plots", str(tmp_path / path.name)]) == 0
        assert "jobs that started" in capsys.readouterr().out
    logs = [str(LOGS / name) for name in ("pbs-accounting", "small.swf")]
    assert printed(capsys, *logs)["jobs"] == 6


def test_a_run_of_ours_is_a_log(in_tmp: Path, capsys: Any) -> None:
    config = Path(__file__).parent.parent / "experiments" / "timing.toml"
    assert main(["simulate", str(config), "--set", "run.rounds=5", "--no-plots", "--out", "run"]) == 0
    capsys.readouterr()
    whole = printed(capsys, "run")
    assert whole["format"] == "ledger"
    assert whole["hours"] == []
    assert table(read_log(Path("run"))) == table(read_log(Path("run/ledger.sqlite")))
    assert main(["history", "run", "--facility", "nowhere"]) == 2
    names = capsys.readouterr().err.strip().rpartition(" has ")[2].split(", ")
    assert sum(printed(capsys, "run", "--facility", name)["jobs"] for name in names) == whole["jobs"]


def test_a_trace_without_a_clock_says_so(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("submit_s,wait_s,requested_s,procs\n" + "".join(f"{n},5,60,1\n" for n in range(30)))
    assert main(["history", str(path)]) == 0
    assert "no clock times" in capsys.readouterr().out
    found = printed(capsys, str(path), "--epoch", str(BEGIN), "--timezone", "UTC")
    assert found["hours"][10]["jobs"] == 30
    assert np.isfinite(found["mean"])


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "needs a log of a scheduler"),
        (["{logs}/sacct.txt", "--live", "slurm"], 2, "or else --live"),
        (["{logs}/sacct.txt", "--days", "3"], 2, "--days goes with --live"),
        (["--live", "sge", "--days", "0"], 2, "--days must be 1 or more"),
        (["{logs}/sacct.txt", "--timezone", "Mars/Base"], 2, "no such zone"),
        (["{logs}/sacct.txt", "--timezone", "../etc"], 2, "no such zone"),
        (["{logs}/sacct.txt", "--procs", "8-2"], 2, "--procs must be A-B"),
        (["{logs}/sacct.txt", "--requested", "-1"], 2, "--requested must be more than 0"),
        (["{logs}/sacct.txt", "--since", "yesterday"], 2, "--since must be a date"),
        (["{logs}/sacct.txt", "--procs", "999"], 3, "none of its 7 jobs is as asked for"),
        (["{logs}"], 3, "is neither a run folder nor one of PBS accounting files"),
        (["gone.csv"], 3, "gone.csv"),
        (["{logs}/sacct.txt", "--out", "/dev/null/x.csv"], 6, "cannot be written"),
        (["nothing.csv", "--out", "nothing.csv"], 2, "nothing.csv: exists already; nothing was changed"),
        (["{logs}/sacct.txt", "--out", "run.toml"], 2, "must end in .csv or .csv.gz"),
        (["{logs}/sacct.txt", "--facility", "north"], 2, "sacct.txt is no run of ours; leave --facility out"),
        (["nothing.csv", "--since", "2026-01-01"], 3, "has no clock times"),
        (["nothing.csv", "{logs}/sacct.txt"], 3, "has no clock times"),
    ],
)
def test_mistakes_are_one_line(args: list[str], code: int, says: str, in_tmp: Path, capsys: Any) -> None:
    Path("nothing.csv").write_text("submit_s,wait_s,requested_s,procs\n1,5,60,1\n")
    assert main(["history", *(arg.format(logs=LOGS) for arg in args)]) == code
    caught = capsys.readouterr()
    assert says in caught.err
    assert caught.err.count("\n") == 1
    assert caught.out == ""


# What may not be read --------------------------------------------------------------------------------------

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


def without_privileges() -> None:
    """Permissions hold for root too, once it has given up these."""
    libc = ctypes.CDLL(None)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [
        (["--live", "pbs"], "server_priv"),
        (["--live", "pbs"], "server_priv/accounting"),
        (["--live", "pbs"], "server_priv/accounting/{today}"),
        (["--live", "sge"], "default/common"),
        (["--live", "sge"], "default/common/accounting"),
        (["server_priv/accounting"], "server_priv"),
        (["server_priv/accounting"], "server_priv/accounting"),
        (["server_priv/accounting"], "server_priv/accounting/{today}"),
        (["default/common/accounting"], "default/common/accounting"),
    ],
)
def test_log_that_may_not_be_read_is_named_with_what_to_do(arguments: list[str], closed: str, tmp_path: Path) -> None:
    today = date.today().strftime("%Y%m%d")
    for name, log in (("server_priv/accounting", "pbs-accounting"), ("default/common", "sge-accounting")):
        (tmp_path / name).mkdir(parents=True)
        target = tmp_path / name / (today if name == "server_priv/accounting" else "accounting")
        shutil.copy(LOGS / log, target)
    (tmp_path / "pbs.conf").write_text(f"PBS_HOME={tmp_path}\n")
    path = tmp_path / closed.format(today=today)
    path.chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fedqueue", "history", *arguments],
            env={**os.environ, "PBS_CONF_FILE": str(tmp_path / "pbs.conf"), "SGE_ROOT": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            preexec_fn=without_privileges,
        )
    finally:
        path.chmod(0o755)
    assert done.returncode not in (0, 1), done.stderr
    (line,) = done.stderr.splitlines()
    where = "common" if "sge" in arguments or "common" in arguments[0] else "accounting"
    assert where in line, "the file"
    assert "permission denied" in line.lower()
    assert "ask the administrators" in line
