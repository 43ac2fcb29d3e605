"""Readers of schedulers' logs: real formats by known answers, the same jobs in every format, and broken files."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedqueue.config import TraceQueue
from fedqueue.errors import DataError, FedQueueError
from fedqueue.history.busy import Busy
from fedqueue.history.joblog import JobLog
from fedqueue.history.lines import Options, Tally
from fedqueue.history.live import read_live
from fedqueue.history.read import jobs, read_log
from fedqueue.history.sketch import ERROR, Sketch
from fedqueue.history.sorting import TraceWriter
from fedqueue.history.trace import write_log
from fedqueue.sim.queues import read_trace
from tests.gridengine import grid_engine
from tests.waiting import wait_for

LOGS = Path(__file__).parent / "logs"
BEGIN = 1767607200  # 2026-01-05 10:00 UTC, a Monday
UTC_OPTIONS = Options(timezone="UTC")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def table(log: JobLog) -> list[tuple[float | None, ...]]:
    columns = (log.submit, log.wait, log.run, log.requested, log.procs.astype(np.float64))
    return [tuple(None if np.isnan(x) else float(x) for x in row) for row in zip(*columns, strict=True)]


def test_sacct_dump_by_known_answers() -> None:
    tally = Tally()
    found = list(jobs(LOGS / "sacct.txt", UTC_OPTIONS, tally))
    assert [(submit - BEGIN, wait, procs) for submit, wait, _, _, procs in found] == [
        (0, 600, 2),
        (7200, 300, 4),  # held for two hours: it waits from when it was eligible
        (120, 5, 1),  # the separator is in its name
        (180, 600, 1),
        (240, 60, 8),  # preempted ...
        (1321, 3600, 8),  # ... and put back: a wait of its own
        (300, 60, 3),
    ]
    assert tally.dropped == {"never started": 3, "job step": 2, "part of another job": 1}
    assert tally.broken == 0
    log = read_log(LOGS / "sacct.txt", UTC_OPTIONS)
    assert log.epoch == BEGIN
    assert table(log)[0] == (0, 600, 3600, 7200, 2)
    by_wait = {row[1]: row for row in table(log)}
    assert by_wait[300.0][3] == 86_400
    assert by_wait[5.0][3] is None, "UNLIMITED is no number"
    assert by_wait[60.0][3] in (3600, 1800)
    assert read_log(LOGS / "sacct.txt", Options(timezone="UTC", cores=True)).procs[0] == 128


def test_sacct_times_are_local() -> None:
    berlin = read_log(LOGS / "sacct.txt", Options(timezone="Europe/Berlin"))
    assert berlin.epoch == BEGIN - 3600
    assert table(berlin) == table(read_log(LOGS / "sacct.txt", UTC_OPTIONS))


def test_sacct_times_with_an_offset_need_no_zone(tmp_path: Path) -> None:
    """The hour that is there twice in autumn: 20 minutes of waiting, whatever the zone of whoever reads it."""
    rows = [
        "1|2025-10-26T02:50:00+02:00|2025-10-26T02:10:00+01:00|2",
        "2|2025-10-26T01:50:00Z|2025-10-26T03:10:00+0100|2",
    ]
    (tmp_path / "log").write_text("\n".join(["JobID|Submit|Start|NNodes", *rows]))
    for zone in ("UTC", "America/New_York"):
        log = read_log(tmp_path / "log", Options(timezone=zone))
        assert log.wait.tolist() == [1200.0, 1200.0]
        assert log.epoch == 1761439800.0


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_log_is_the_log(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    plain = LOGS / "small.swf"
    (tmp_path / "log").write_bytes(pack(plain.read_bytes()))
    assert read_log(tmp_path / "log").wait.tolist() == read_log(plain).wait.tolist()
    (tmp_path / "log").write_bytes(pack(plain.read_bytes())[:-9])
    with pytest.raises(DataError, match="log: cannot be read"):
        read_log(tmp_path / "log")


def test_other_formats_by_known_answers() -> None:
    assert table(read_log(LOGS / "pbs-accounting")) == [
        (0, 600, 3600, 7200, 2),
        (100, 61, 39, 600, 1),
        (7200, 300, 3600, 86_400, 4),
    ]
    assert read_log(LOGS / "pbs-accounting", Options(cores=True)).procs.tolist() == [128, 20]
    assert table(read_log(LOGS / "sge-accounting")) == [
        (0, 600, 3600, 7200, 128),
        (30, 7470, 3600, 86_400, 1),
        (100, 60, 40, None, 1),  # moved to another node: its first wait
    ]
    both = [(0, 600, 3600, 7200, 2), (30, 7470, 3600, 86_400, 4)]
    assert table(read_log(LOGS / "small.swf")) == [*both, (120, 5, 1800, None, 1)]
    assert table(read_log(LOGS / "trace.csv")) == [*both, (120, 5, None, None, 1)]
    for name in ("pbs-accounting", "sge-accounting", "small.swf", "trace.csv"):
        assert read_log(LOGS / name).epoch == BEGIN


# The same jobs in every format ---------------------------------------------------------------------------


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def as_swf(log: JobLog) -> str:
    lines = [f"; UnixStartTime: {log.epoch:.0f}"]
    for n, (submit, wait, run, requested, procs) in enumerate(rows_of(log), 1):
        lines.append(f"{n} {submit} {wait} {run} {procs} -1 -1 {procs} {requested or -1} -1 1 1 1 -1 1 1 -1 -1")
    return "\n".join(lines) + "\n"


def as_sacct(log: JobLog) -> str:
    lines = ["State|NNodes|End|Start|JobID|Submit|Timelimit|"]
    for n, (submit, wait, run, requested, procs) in enumerate(rows_of(log), 1):
        begin = int(log.epoch or 0) + submit
        limit = f"{requested // 86400}-{requested // 3600 % 24:02}:{requested // 60 % 60:02}:{requested % 60:02}"
        times = f"{stamp(begin + wait + run)}|{stamp(begin + wait)}|{n}|{stamp(begin)}"
        lines.append(f"COMPLETED|{procs}|{times}|{limit if requested else 'UNLIMITED'}|")
    return "\n".join(lines) + "\n"


def as_pbs(log: JobLog) -> str:
    lines = []
    for n, (submit, wait, run, requested, procs) in enumerate(rows_of(log), 1):
        begin = int(log.epoch or 0) + submit
        limit = f" Resource_List.walltime={requested // 3600}:{requested // 60 % 60:02}:{requested % 60:02}"
        times = f"qtime={begin} etime={begin} start={begin + wait} end={begin + wait + run}"
        lines.append(f"01/05/2026 10:00:00;E;{n}.s;{times} Resource_List.nodect={procs}{limit if requested else ''}")
    return "\n".join(reversed(lines)) + "\n"


def as_sge(log: JobLog) -> str:
    lines = []
    for n, (submit, wait, run, requested, procs) in enumerate(rows_of(log), 1):
        begin = int(log.epoch or 0) + submit
        fields = ["0"] * 45
        fields[5], fields[8], fields[9], fields[10] = str(n), str(begin), str(begin + wait), str(begin + wait + run)
        fields[34], fields[41] = str(procs), "NONE"
        fields[39] = f"-l h_rt={requested}" if requested else "NONE"
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def rows_of(log: JobLog) -> list[list[int]]:
    """Whole numbers; 0 for a requested time that is not known."""
    columns = (log.submit, log.wait, log.run, np.nan_to_num(log.requested), log.procs)
    return [list(map(int, row)) for row in zip(*columns, strict=True)]


@st.composite
def logs(draw: st.DrawFn) -> JobLog:
    seconds = st.integers(0, 10**6)
    row = st.tuples(seconds, seconds, seconds, st.integers(0, 10**6), st.integers(1, 5000))
    rows = draw(st.lists(row, min_size=1, max_size=20))
    first = min(row[0] for row in rows)
    ordered = sorted(
        (submit - first, wait, run, requested or np.inf, procs) for submit, wait, run, requested, procs in rows
    )
    data = np.array(ordered, dtype=np.float64)
    data[np.isinf(data)] = np.nan
    submit, wait, run, requested, procs = data.T
    return JobLog(
        name="log", submit=submit, wait=wait, run=run, requested=requested, procs=procs.astype(np.int64), epoch=BEGIN
    )


@quick
@given(log=logs())
def test_the_same_jobs_are_the_same_log_in_every_format(log: JobLog, tmp_path: Path) -> None:
    for write in (as_swf, as_sacct, as_pbs, as_sge):
        path = tmp_path / "log"
        path.write_text(write(log))
        read = read_log(path, UTC_OPTIONS)
        assert table(read) == table(log), write.__name__
        assert read.epoch == log.epoch


@quick
@given(log=logs(), scale=st.sampled_from([1.0, 0.37, 1e-3]), epoch=st.sampled_from([None, BEGIN, BEGIN + 0.25]))
def test_a_log_written_as_trace_is_read_as_it_was(
    log: JobLog, scale: float, epoch: float | None, tmp_path: Path
) -> None:
    log = JobLog(
        name="t.csv.gz",
        submit=log.submit * scale,
        wait=log.wait * scale,
        run=log.run * scale,
        requested=log.requested * scale,
        procs=log.procs,
        epoch=epoch,
    )
    write_log(log, tmp_path / "t.csv.gz")
    read = read_log(tmp_path / "t.csv.gz")
    assert table(read) == table(log)
    assert (read.epoch, read.name) == (log.epoch, log.name)


@quick
@given(log=logs(), pages=st.integers(1, 7))
def test_a_sort_that_does_not_fit_is_the_sort(log: JobLog, pages: int, tmp_path: Path) -> None:
    columns = (log.submit + BEGIN, log.wait, log.run, log.requested, log.procs.astype(np.float64))
    rows = np.array(columns).T
    rows = rows[np.random.default_rng(len(rows)).permutation(len(rows))]
    with TraceWriter() as writer:
        writer._jobs.execute(f"PRAGMA cache_size = {pages}")
        for part in np.array_split(rows, 3):
            writer.add(part)
        writer.finish(tmp_path / "sorted.csv", clock=True)
    write_log(log, tmp_path / "whole.csv")
    assert (tmp_path / "sorted.csv").read_text() == (tmp_path / "whole.csv").read_text()


@pytest.mark.parametrize("name", ["sacct.txt", "pbs-accounting", "sge-accounting", "small.swf"])
def test_a_queue_of_a_config_may_be_a_log_of_any_format(name: str) -> None:
    jobs = read_trace(LOGS / name, TraceQueue(file=name, max_requested=7200.0)).whole
    assert jobs.submits[0] == 0
    assert jobs.waits[0] == 600


# Broken files --------------------------------------------------------------------------------------------


@quick
@given(
    name=st.sampled_from(sorted(path.name for path in LOGS.iterdir())),
    cut=st.integers(0, 3000),
    changes=st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=6)), max_size=8),
    packed=st.booleans(),
)
def test_a_mutated_file_is_read_or_is_one_clear_error(
    name: str, cut: int, changes: list[tuple[int, bytes]], packed: bool, tmp_path: Path
) -> None:
    data = bytearray((LOGS / name).read_bytes())
    if packed:
        data = bytearray(gzip.compress(bytes(data), mtime=0))
    for place, change in changes:
        data[place : place + len(change)] = change
    (tmp_path / "log").write_bytes(data[: max(0, len(data) - cut)])
    said, log = "", None
    try:
        log = read_log(tmp_path / "log", UTC_OPTIONS)
    except FedQueueError as error:
        said = str(error)
    assert "\n" not in said
    if log is None:
        assert str(tmp_path / "log") in said
    else:
        assert len(log) > 0
        assert np.all(log.wait >= 0)
        assert np.all(np.diff(log.submit) >= 0)
        assert np.all(log.procs > 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("hello\n", "line 1 is of no log we know: 'hello'; known are"),
        ("JobID  Submit  Start\n-----  ------  -----\n", "run sacct with -P"),
        ("1|a|b|2026-01-05T10:00:00|x\n", "run it without -n"),
        ("JobID|Submit|Start\n1|a|b\n", "column NNodes or NCPUS is missing"),
        ("JobID|Submit|Start|NNodes\n1|soon|2026-01-05T10:00:00|1\n", "line 2: 'soon' is no time"),
        ("JobID|Submit|Start|NNodes\n1|2026-01-05T10:00:0x|2026-01-05T10:00:00|1\n", "0x' is no time"),
        ("job,submitted,begun,nodes\n1,2,3,4\n", "a CSV needs the columns submit_s, wait_s, requested_s, procs"),
        ("PK\x03\x04submit_s,wait_s,requested_s,procs\n", "is packed with zip; unpack it first"),
        ("BZh91AY", "cannot be read"),
        ("; UnixStartTime: 5\n1 2 3\n", "line 2: 3 numbers instead of 18; 1 of 1 lines"),
    ],
)
def test_a_wrong_file_is_one_clear_line(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(DataError) as caught:
        read_log(tmp_path / "log", UTC_OPTIONS)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_few_broken_lines_are_counted_and_more_are_an_error(tmp_path: Path) -> None:
    good = [f"{n} {n} 5 60 1 -1 -1 1 60 -1 1 1 1 -1 1 1 -1 -1" for n in range(90)]
    (tmp_path / "log").write_text("\n".join([*good, *["oops"] * 10]) + "\n")
    tally = Tally()
    assert len(list(jobs(tmp_path / "log", Options(), tally))) == 90
    assert (tally.broken, tally.lines) == (10, 100)
    assert tally.first_broken is not None
    assert tally.first_broken.startswith("line 91")
    (tmp_path / "log").write_text("\n".join([*good, *["oops"] * 11]) + "\n")
    with pytest.raises(DataError, match="11 of 101 lines"):
        read_log(tmp_path / "log")


# Figures in bounded memory -------------------------------------------------------------------------------


@quick
@given(
    values=st.lists(st.one_of(st.integers(0, 10**7).map(float), st.floats(0.001, 1e9)), min_size=1, max_size=300),
    level=st.floats(0, 1),
)
def test_quantiles_are_within_their_error(values: list[float], level: float) -> None:
    sketch = Sketch()
    sketch.add(np.array(values))
    exact = float(np.quantile(values, level, method="inverted_cdf"))
    found = sketch.quantile(level)
    assert found is not None
    assert abs(found - exact) <= ERROR * exact * (1 + 1e-9)


def test_the_busiest_hour_by_a_known_answer() -> None:
    busy = Busy()
    # Four processors for two whole hours, two more for the second half of the second one.
    busy.add(np.array([3600.0, 9000.0]), np.array([7200.0, 1800.0]), np.array([4.0, 2.0]))
    assert busy.peak() == pytest.approx(5.0)
    assert busy.work == 4 * 7200 + 2 * 1800


def test_pbs_wait_in_a_routing_queue_counts(tmp_path: Path) -> None:
    record = "01/05/2026 11:10:00;E;{n}.pbs;queue=workq ctime={c} qtime={q} etime={e} start={s} end=1767611400 {rest}\n"
    rest = "Resource_List.nodect=2 Resource_List.walltime=02:00:00 Exit_status=0 run_count=1"
    lines = [
        record.format(n=1, c=1767607200, q=1767607210, e=1767607210, s=1767607212, rest=rest),  # routed after 10 s
        record.format(n=2, c=1767607300, q=1767607310, e=1767607400, s=1767607405, rest=rest),  # ... and then held
        record.format(n=3, c=1767607500, q=1767607500, e=1767607600, s=1767607607, rest=rest),  # held, and never routed
    ]
    path = tmp_path / "20260105"
    path.write_text("".join(lines))
    assert read_log(path).wait.tolist() == [12.0, 5.0, 7.0]


# Live ----------------------------------------------------------------------------------------------------


def test_live_without_accounting_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SGE_ROOT", str(tmp_path))
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    monkeypatch.setattr("fedqueue.history.live.PBS_HOMES", ())
    with pytest.raises(DataError, match="sacct: is not installed here"):
        read_live("slurm")
    with pytest.raises(DataError, match="PBS: no accounting folder"):
        read_live("pbs")
    with pytest.raises(DataError, match="no accounting file"):
        read_live("sge")
    script = tmp_path / "sacct"
    script.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(DataError, match="sacct: Slurm accounting storage is disabled") as caught:
        read_live("slurm")
    assert "\n" not in str(caught.value)


def test_live_slurm_is_asked_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = int(datetime.now(UTC).timestamp()) - 7200
    old = submit - 86_400 * 40
    script = tmp_path / "sacct"
    lines = "".join(f"{n}|{stamp(at)}|{stamp(at + 60)}|2\\n" for n, at in enumerate((submit, old), 1))
    script.write_text(f'#!/bin/sh\n[ "$TZ" = UTC ] && printf "JobID|Submit|Start|NNodes\\n{lines}"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log = read_live("slurm", 30)
    assert (log.epoch, table(log)) == (submit, [(0, 60, None, None, 2)])


def test_live_pbs_reads_the_days_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "server_priv" / "accounting"
    folder.mkdir(parents=True)
    at = int(datetime.now(UTC).timestamp()) - 3600
    record = f"E;1.s;qtime={at} etime={at} start={at + 9} end={at + 99} jobname=wait_s Resource_List.nodect=3"
    (folder / datetime.now().strftime("%Y%m%d")).write_text(f"01/05/2026 10:00:00;{record}\n")
    (folder / "20000101").write_text("this is never opened\n")
    (folder / "29990101").write_text("")
    (tmp_path / "pbs.conf").write_text(f"PBS_SERVER=s\nPBS_HOME={tmp_path}\n")
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    assert table(read_live("pbs", 2)) == [(0, 9, 90, None, 3)]


def test_the_accounting_file_of_a_real_grid_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with grid_engine(slots=1) as engine:
        script = tmp_path / "job.sh"
        script.write_text("#!/bin/sh\nsleep 2\n")
        log = ["-o", "/dev/null", "-e", "/dev/null"]
        for _ in range(2):
            engine.call("qsub", "-terse", "-l", "h_rt=120", *log, str(script))
        file = engine.root / "default" / "common" / "accounting"
        wait_for(lambda: file.exists() and file.read_text().count(":sge:") == 2, "two records", engine.log)
        monkeypatch.setenv("SGE_ROOT", str(engine.root))
        monkeypatch.delenv("SGE_CELL", raising=False)
        found = read_live("sge", 1)
    assert found.procs.tolist() == [1, 1]
    assert found.requested.tolist() == [120, 120]
    assert found.run.min() >= 1
    assert found.wait[1] >= found.wait[0] + 1, "the second waits for the one slot"
