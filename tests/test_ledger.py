"""The ledger is complete, can be replayed, and never lies about what was written."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedqueue.cli import main
from fedqueue.errors import ReplayError, RunFolderError, StorageError
from fedqueue.ledger import FILE, Ledger, LedgerReader
from fedqueue.protocol.messages import (
    CoordinatorResumed,
    ModelScored,
    RunPaused,
    RunStarted,
    SetTimer,
    StopRun,
    TimerFired,
    parse,
)
from fedqueue.runs import replay
from fedqueue.sim.runner import simulate
from tests.conftest import STRATEGY_NAMES, Trace, config_of, journal
from tests.test_golden import SCENARIOS

FAULTS = [
    {"kind": "fail", "probability": 0.15},
    {"kind": "preempt", "probability": 0.15},
    {"kind": "corrupt", "probability": 0.1},
    {"kind": "duplicate", "probability": 0.1},
]


def run_into(folder: Path, strategy: str = "jit", **changes: object) -> dict[str, object]:
    folder.mkdir()
    return simulate(config_of(strategy, faults=FAULTS, **changes), folder=folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_replay_of_a_run_gives_the_same_commands(strategy: str, tmp_path: Path) -> None:
    run_into(tmp_path / "run", strategy, rounds=20)
    with LedgerReader(tmp_path / "run" / FILE) as ledger:
        count = ledger.rows("SELECT count(*) AS n FROM events")[0]["n"]
    assert replay(tmp_path / "run") == count > 50


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE commands SET body = replace(body, '\"round\":3', '\"round\":4') WHERE kind = 'SubmitJob'",
        "DELETE FROM commands WHERE seq = (SELECT max(seq) FROM commands WHERE kind = 'Aggregate')",
        "DELETE FROM events WHERE seq = (SELECT min(seq) FROM events WHERE kind = 'UpdateArrived')",
        "UPDATE events SET body = replace(body, '\"steps_done\":', '\"steps_done\":1') WHERE kind = 'JobEnded'",
    ],
)
def test_replay_notices_a_ledger_that_was_changed(damage: str, tmp_path: Path) -> None:
    run_into(tmp_path / "run", "fedqueue", rounds=8)
    with sqlite3.connect(tmp_path / "run" / FILE) as db:
        assert db.execute(damage).rowcount > 0
    db.close()
    with pytest.raises(ReplayError, match=r"event \d+ .* command \d+") as caught:
        replay(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_views_agree_with_the_summary(tmp_path: Path) -> None:
    summary = run_into(tmp_path / "run", "fedqueue", rounds=30)
    jobs, updates = summary["jobs"], summary["updates"]
    assert isinstance(jobs, dict)
    assert isinstance(updates, dict)
    with LedgerReader(tmp_path / "run" / FILE) as ledger:

        def one(query: str) -> int:
            return int(ledger.rows(query)[0][0] or 0)

        assert one("SELECT count(*) FROM jobs") == jobs["submitted"]
        assert one("SELECT count(*) FROM jobs WHERE arrived_at IS NOT NULL") == jobs["completed"]
        assert one("SELECT count(*) FROM jobs WHERE failure IS NOT NULL") == jobs["failed"]
        assert one("SELECT count(*) FROM jobs WHERE replaces IS NOT NULL") == jobs["resubmitted"]
        assert one("SELECT sum(steps_done) FROM jobs") == summary["local_steps"]
        aggregated = "SELECT count(*) FROM updates WHERE fate = 'aggregated' AND deferred = "
        assert (one(aggregated + "0"), one(aggregated + "1")) == (updates["admitted"], updates["deferred"])
        assert one("SELECT count(*) FROM updates WHERE fate = 'rejected'") == updates["rejected"]
        assert one("SELECT max(staleness) FROM updates") == summary["max_staleness"]
        assert one("SELECT max(version) FROM models") == summary["rounds"]
        restarted = one("SELECT count(*) FROM incarnations WHERE attempt > 0")
        assert restarted == one("SELECT count(*) FROM events WHERE kind = 'JobRequeued'") > 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_journal_is_valid_json_lines_with_all_that_was_said(scenario: str, tmp_path: Path) -> None:
    trace: Trace = []
    simulate(config_of(**SCENARIOS[scenario]), folder=tmp_path, listeners=[lambda e, c: trace.append((e, list(c)))])
    said = [
        ("event" if message is event else "command", seq, event.at, message)
        for seq, (event, commands) in enumerate(trace)
        for message in (event, *commands)
    ]
    lines = journal(tmp_path)
    assert [(line["what"], line["seq"], line["at"], parse(line["kind"], line["body"])) for line in lines] == said


def test_journal_of_every_kind_of_message_is_valid_json(tmp_path: Path) -> None:
    """Also those that only a real run brings."""
    ledger = Ledger(tmp_path / FILE, {"strategy": "jit"})
    ledger(RunPaused(at=3.0), [])
    ledger(CoordinatorResumed(at=3.0, down_seconds=9.5), [SetTimer(key="end", at=20.0), StopRun(reason='a "word"')])
    ledger(ModelScored(at=4.0, version=1, metrics={"at": 0.5, "kind": 1.0}), [])
    ledger.close()
    assert [(line["kind"], line["at"]) for line in journal(tmp_path)] == [
        ("RunPaused", 3.0),
        ("CoordinatorResumed", 3.0),
        ("SetTimer", 3.0),
        ("StopRun", 3.0),
        ("ModelScored", 4.0),
    ]


def test_second_ledger_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / FILE, {}).close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(RunFolderError, match="already"):
        Ledger(tmp_path / FILE, {})
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("content", [None, b"", b"not a database at all, but long enough to be looked at" * 40])
def test_folder_that_is_no_run_is_one_clear_error(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunFolderError) as caught:
        replay(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_disk_while_writing_is_one_clear_error_and_keeps_what_was_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / FILE, {})
    ledger._db.execute("PRAGMA max_page_count = 30")  # SQLite answers as it does on a full disk
    written = 0

    def fill() -> None:
        nonlocal written
        for i in range(10_000):
            ledger(TimerFired(at=float(i), key="x" * 100), [])
            written += 1

    with pytest.raises(StorageError, match="full"):
        fill()
    ledger.abandon()
    with LedgerReader(tmp_path / FILE) as reader:
        assert reader.rows("SELECT count(*) AS n FROM events")[0]["n"] == written


def test_durable_ledger_survives_kill_9_with_every_event_it_took(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from fedqueue.ledger import Ledger
from fedqueue.protocol.messages import SetTimer, TimerFired
ledger = Ledger(Path({str(tmp_path / FILE)!r}), {{}}, durable=True)
for i in range(10**6):
    ledger(TimerFired(at=float(i), key="k"), [SetTimer(key="k", at=i + 1.0)])
    print(i, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = -1
    deadline = time.monotonic() + 60
    while seen < 200 and time.monotonic() < deadline:
        seen = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    seen = max([seen, *(int(line) for line in process.stdout if line.strip().isdigit())])
    process.wait()
    process.stdout.close()
    db = sqlite3.connect(tmp_path / FILE)
    events, commands = (db.execute(f"SELECT count(*), max(seq) FROM {t}").fetchone() for t in ("events", "commands"))
    db.close()
    assert events == commands, "an event and its commands are written together"
    assert events[1] >= seen, "what was acknowledged is there"
    assert events[0] == events[1] + 1, "without a gap"


def test_reader_sees_a_ledger_that_still_grows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / FILE, {"strategy": "jit"}, durable=True)
    ledger(RunStarted(at=0.0), [])
    with LedgerReader(tmp_path / FILE) as reader:
        assert reader.meta["strategy"] == "jit"
        assert len(list(reader.lines())) == 1
        ledger(TimerFired(at=1.0, key="k"), [])
        assert len(list(reader.lines())) == 2
    ledger.close()


def test_a_ledger_of_an_older_format_is_named_with_the_build_that_reads_it(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = in_tmp / "old" / "ledger.sqlite"
    path.parent.mkdir()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
    database.executemany("INSERT INTO meta VALUES (?, ?)", [("format", "2"), ("version", '"0.1.0"')])
    database.commit()
    database.close()
    assert main(["replay", "old"]) == 5
    said = capsys.readouterr().err
    assert "is of ledger format 2" in said
    assert "use the FedQueue that wrote it (0.1.0)" in said
    assert said.count("\n") == 1
