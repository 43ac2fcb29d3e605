"""The command line as people and scripts use it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.protocol.strategies import STRATEGIES, distinct
from tests.conftest import check_refusal

EXPERIMENTS = Path(__file__).parent.parent / "experiments"

FIGURES = [
    *("strategy", "seed", "rounds", "stopped", "virtual_seconds", "late_probability", "normalised_delay_mean"),
    *("normalised_delay_max", "max_staleness", "missed_cutoff", "node_seconds", "idle_node_seconds", "jobs"),
    *("updates", "local_steps", "model_transfers", "score", "time_to", "steps_to", "wall_seconds"),
]

TOML = """
[run]
name = "small"
strategy = "fedqueue"
rounds = 4
[task]
name = "timing"
[[facility]]
name = "east"
steps_per_second = 10.0
queue = { kind = "lognormal", mean = 2.0, rho = 0.9 }
[[facility]]
name = "west"
steps_per_second = 5.0
queue = { kind = "fixed", delay = 3.0 }
"""


@pytest.fixture
def config(in_tmp: Path) -> Path:
    path = in_tmp / "small.toml"
    path.write_text(TOML)
    return path


# What works ---------------------------------------------------------------------------------------------------


def test_json_prints_exactly_one_object_with_the_promised_figures(config: Path, capsys: Any) -> None:
    assert main(["simulate", str(config), "--json", "--no-plots"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    summary = json.loads(out)
    assert list(summary) == FIGURES
    assert list(summary["jobs"]) == ["submitted", "completed", "failed", "resubmitted"]
    assert list(summary["updates"]) == ["admitted", "deferred", "rejected", "expired"]
    assert list(summary["time_to"]) == list(summary["steps_to"]) == ["0.85", "0.90", "0.95"]
    assert list(summary["score"]) == ["max", "final", "not_finite"]


def test_choices_on_the_command_line_count_most(config: Path, capsys: Any) -> None:
    args = ["--strategy", "fedavg", "--seed", "9", "--set", "run.rounds=2", "facility.*.queue.rho=0.1"]
    with pytest.raises(SystemExit):
        main(["simulate", "--set"])
    config.write_text(TOML.replace('{ kind = "fixed", delay = 3.0 }', '{ kind = "lognormal", mean = 3.0 }'))
    assert main(["simulate", str(config), *args, "--set", "strategy.fedavg.steps=7", "--json", "--no-plots"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["strategy"], summary["seed"], summary["rounds"]) == ("fedavg", 9, 2)
    assert summary["local_steps"] == 2 * 2 * 7


def test_run_folder_has_ledger_summary_and_plots_and_names_never_clash(config: Path, capsys: Any) -> None:
    for _ in range(2):
        assert main(["simulate", str(config)]) == 0
    folders = sorted(p.name for p in Path("runs").iterdir())
    assert folders == ["small-fedqueue-seed1", "small-fedqueue-seed1-2"]
    first = Path("runs") / folders[0]
    assert {p.name for p in first.iterdir()} == {"ledger.sqlite", "summary.json", "plots"}
    assert (first / "plots" / "timeline.png").stat().st_size > 5000
    assert main(["replay", str(first)]) == 0
    assert "every command the same" in capsys.readouterr().out
    assert main(["journal", str(first)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(json.loads(line)["kind"] for line in lines)
    assert main(["report", str(first), "--out", "page.html"]) == 0
    assert "<svg" in Path("page.html").read_text()


def test_replay_finds_an_update_in_a_model_that_was_never_made(config: Path, capsys: Any) -> None:
    assert main(["simulate", str(config), "--no-plots", "--out", "r"]) == 0
    with contextlib.closing(sqlite3.connect("r/ledger.sqlite")) as ledger:
        (version,) = ledger.execute("SELECT max(version) FROM updates WHERE fate = 'aggregated'").fetchone()
        made = "kind = 'ModelReady' AND json_extract(body, '$.version') = ?"
        ledger.execute(f"UPDATE events SET kind = 'TimerFired' WHERE {made}", (version,))
        ledger.commit()
    assert main(["replay", "r"]) == 7
    assert f"is on record as part of model {version}, which the ledger does not have" in capsys.readouterr().err


def test_compare_gives_the_same_figures_with_one_process_and_with_two(config: Path, capsys: Any) -> None:
    figures = []
    for jobs in ("1", "2"):
        args = ["compare", str(config), "--strategies", "jit,fedavg", "--seeds", "2", "--jobs", jobs, "--json"]
        assert main(args) == 0
        runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for run in runs:
            del run["wall_seconds"]
        figures.append(sorted(runs, key=lambda r: (r["strategy"], r["seed"])))
    assert figures[0] == figures[1]
    assert [(r["strategy"], r["seed"]) for r in figures[0]] == [("fedavg", 1), ("fedavg", 2), ("jit", 1), ("jit", 2)]


def test_training_is_the_same_bit_for_bit_in_another_process(in_tmp: Path, capsys: Any) -> None:
    text = TOML.replace('"timing"', '"digits"').replace("rounds = 4", "rounds = 3\nlearning_rate = 0.003")
    (in_tmp / "digits.toml").write_text(text)
    args = ["compare", "digits.toml", "--strategies", "fedqueue,fedasync", "--seeds", "1", "--json", "--no-plots"]
    results = []
    for jobs in ("1", "2"):
        assert main([*args, "--jobs", jobs]) == 0
        runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        results.append({r["strategy"]: (r["score"], r["virtual_seconds"]) for r in runs})
    assert results[0] == results[1]
    scores = [
        subprocess.run(
            [sys.executable, "-m", "fedqueue", "journal", f"runs/small-compare{suffix}/fedasync-seed1"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for suffix in ("", "-2")
    ]
    assert scores[0] == scores[1], "every score to the last digit, every event, every command"


def test_compare_shows_means_and_paired_differences_to_a_person(in_tmp: Path, capsys: Any) -> None:
    text = TOML.replace('"timing"', '"digits"').replace("rounds = 4", "rounds = 6\nlearning_rate = 0.005")
    (in_tmp / "digits.toml").write_text(text.replace("[task]", "targets = [0.3, 0.5]\n[task]"))
    assert main(["compare", "digits.toml", "--strategies", "fedqueue,fedavg,jit", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "mean ± sd over 2 seeds" in out
    assert "than fedqueue, seed by seed" in out
    assert Path("runs/small-compare/comparison.png").exists()
    kept = json.loads(Path("runs/small-compare/comparison.json").read_text())
    assert set(kept) == {"command", "date", "machine", "runs"}


def test_starter_config_runs_as_it_is_for_every_strategy(in_tmp: Path, capsys: Any) -> None:
    assert main(["init", "mine.toml"]) == 0
    for strategy in STRATEGIES:
        args = ["simulate", "mine.toml", "--strategy", strategy, "--set", "run.seconds=25", "task.name=timing"]
        assert main([*args, "--no-plots"]) == 0
    assert main(["simulate", "mine.toml", "--set", "run.seconds=12", "--no-plots"]) == 0
    assert "score" in capsys.readouterr().out


def test_demo_runs_all_strategies_whose_orders_differ_and_says_what_to_try_next(in_tmp: Path, capsys: Any) -> None:
    assert main(["demo", "--out", "d"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in distinct())
    assert "Next:" in out
    kept = json.loads(Path("d/comparison.json").read_text())["runs"]
    assert set(kept) == set(distinct())
    assert min(runs[0]["score"]["max"] for runs in kept.values()) > 0.9
    assert Path("d/comparison.png").stat().st_size > 20_000
    assert Path("d/report.html").stat().st_size > 50_000
    assert "of digits it never saw" in out
    assert json.loads(Path("d/real/summary.json").read_text())["rounds"] >= 4
    assert Path("d/real/model.safetensors").exists()
    assert main(["replay", "d/real"]) == 0


def test_doctor_finds_this_installation_whole(in_tmp: Path, capsys: Any) -> None:
    assert main(["doctor"]) == 0
    assert "all that is needed is here" in capsys.readouterr().out


def test_help_of_every_command_can_be_read(capsys: Any) -> None:
    commands = ("demo", "init", "simulate", "compare", "reproduce", "report")
    for args in (["--help"], *([name, "--help"] for name in commands)):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "first steps" in out
    assert max(len(line) for line in out.splitlines()) <= 130


def test_output_cut_short_by_its_reader_is_no_error(config: Path) -> None:
    main(["simulate", str(config), "--no-plots", "--out", "r"])
    command = f"{sys.executable} -m fedqueue journal r | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_report_of_a_comparison_shows_its_runs(config: Path, capsys: Any) -> None:
    assert main(["compare", str(config), "--strategies", "jit,fedavg", "--seeds", "1", "--out", "both"]) == 0
    assert main(["report", "both"]) == 0
    page = Path("both/report.html").read_text()
    assert "jit-seed1" in page
    assert "fedavg-seed1" in page


def test_command_whose_output_is_closed_still_runs(config: Path) -> None:
    command = f"{sys.executable} -m fedqueue simulate small.toml --no-plots --out r >&- 2>&-"
    subprocess.run(["bash", "-c", command], check=True)
    assert Path("r/summary.json").exists()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_interrupted_run_stops_at_once_keeps_its_ledger_and_leaves_no_process(
    command: str, sent: signal.Signals, config: Path
) -> None:
    more = ["--strategies", "jit,fedavg", "--seeds", "2", "--jobs", "2"] if command == "compare" else []
    args = [sys.executable, "-m", "fedqueue", command, str(config), *more, "--out", "r", "--set", "run.rounds=9000000"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    ledger = Path("r/ledger.sqlite") if command == "simulate" else Path("r/jit-seed1/ledger.sqlite")
    give_up = time.monotonic() + 60
    while not (ledger.exists() and ledger.stat().st_size > 500_000) and time.monotonic() < give_up:
        time.sleep(0.05)
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "fedqueue: stopped"
    while _group_lives(process.pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not _group_lives(process.pid), "a process is left"
    if command == "simulate":
        assert main(["replay", "r"]) == 0


# What does not ------------------------------------------------------------------------------------------------

BAD_CONFIGS = {
    "unknown key": (
        "rounds = 4",
        "rounds = 4\nroundlength = 3",
        "roundlength: unknown key; did you mean round_length?",
    ),
    "unknown section": ("[task]", "[tasks]\n[task]", "tasks: unknown key; did you mean task?"),
    "wrong type": ("rounds = 4", 'rounds = "four"', "run.rounds: must be a whole number, found 'four'"),
    "true is no number": ("rounds = 4", "rounds = true", "run.rounds: must be a whole number, found True"),
    "negative round length": (
        "rounds = 4",
        "rounds = 4\nround_length = -1",
        "run.round_length must be more than 0",
    ),
    "endless": ("rounds = 4", "", "run.rounds or run.seconds is needed"),
    "no such strategy": (
        '"fedqueue"',
        '"fedqeue"',
        "run.strategy: there is no strategy 'fedqeue'; there are",
    ),
    "no such option": ("[task]", "[strategy.jit]\nmarginn = 1\n[task]", "strategy.jit.marginn: unknown key"),
    "option out of range": (
        "[task]",
        "[strategy.fedqueue]\nmargin = -1\n[task]",
        "margin must be 0 or more",
    ),
    "no such queue": (
        '"fixed"',
        '"fixd"',
        "west.queue.kind: must be one of fixed, lognormal",
    ),
    "queue without a value": (", delay = 3.0", "", "facility.west.queue.delay: is missing"),
    "nan": ("mean = 2.0", "mean = nan", "facility.east.queue.mean: must be a finite number, found nan"),
    "two of a name": ('"west"', '"east"', "facility.east: there are two facilities of this name"),
    "name that is a path": ('"west"', '"../west"', "facility.../west.name must be letters"),
    "no facility": ("[[facility]]", "[[facilitie]]", "facilitie: unknown key; did you mean facility?"),
    "not TOML": ("[run]", "[run", "not valid TOML"),
    "no such task": ('"timing"', '"digitz"', "digitz"),
    "no such module": ('"timing"', '"nowhere:make"', "nowhere"),
    "no such trace": ('"fixed", delay = 3.0', '"trace", file = "gone.csv"', "gone.csv"),
    "fault of nobody": (
        "[task]",
        '[[fault]]\nkind = "fail"\nfacility = "south"\njobs = [1]\n[task]',
        "fault.0.facility",
    ),
    "fault without a when": ("[task]", '[[fault]]\nkind = "fail"\n[task]', "needs probability or jobs"),
    "bad module of mine": ("rounds = 4", 'rounds = 4\nmodules = ["gone"]', "run.modules: cannot import 'gone'"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_config_is_one_clear_line(case: tuple[str, str, str], config: Path, capsys: Any) -> None:
    old, new, says = case
    assert old in TOML
    config.write_text(TOML.replace(old, new))
    code = main(["simulate", str(config)])
    err = capsys.readouterr().err
    assert code != 0
    assert err.count("\n") == 1, err
    assert err.startswith("fedqueue: error: ")
    assert says in err
    assert [p.name for p in Path().iterdir()] == ["small.toml"], "no trace of a run that did not begin"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["simulate", "gone.toml"], "gone.toml: no such file"),
        (["simulate", "small.toml", "--strategy", "best"], "there is no strategy 'best'"),
        (["simulate", "small.toml", "--set", "run.rounds"], "must be key=value"),
        (["simulate", "small.toml", "--set", "facility.south.nodes=2"], "south is none of east, west"),
        (["simulate", "small.toml", "--seed", "x"], "argument --seed"),
        (["compare", "small.toml", "--strategies", "jit,jit"], "names one twice"),
        (["compare", "small.toml", "--seeds", "0"], "--seeds 1 or more"),
        (["replay", "gone"], "gone: is not a run folder"),
        (["journal", "small.toml"], "is not a run folder"),
        (["report", "gone"], "is not a run folder"),
        (["init", "small.toml"], "exists already"),
        (["simulate", "small.toml", "--out", "taken"], "taken: exists already; nothing was changed"),
        (["compare", "small.toml", "--out", "taken"], "taken: exists already; nothing was changed"),
        (["simulate", "small.toml", "--out", "small.toml/x"], "cannot be made"),
        (["simulate", "small.toml", "--set", "run.targets=[nan]"], "must be a finite number"),
        (["simulate", "small.toml", "--set", "run.targets=[0.5]", "run.targets.0=0.6"], "give the whole list"),
        (["simulate", "small.toml", "--set", "facility.*=3"], "names a whole table"),
        (["simulate", "small.toml", "--set", "facility.*.steps_per_second=1e308"], "steps_per_second must be"),
        (["report", "taken", "--out", "small.toml"], "exists already; nothing was changed"),
        (["fly"], "invalid choice"),
        ([], "required"),
    ],
)
def test_bad_command_is_one_clear_line_and_changes_nothing(
    args: list[str], says: str, config: Path, capsys: Any
) -> None:
    Path("taken").mkdir()
    Path("taken/precious").write_text("keep me")
    check_refusal(args, says, capsys)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of its own, so small that it fills up."""
    mounted = shutil.which("mount") and os.geteuid() == 0
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if not mounted or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs privileges that are not here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kilobytes", [16, 400])
def test_full_disk_is_one_clear_line(kilobytes: int, config: Path, capsys: Any) -> None:
    Path("disk").mkdir()
    with small_disk(Path("disk"), kilobytes):
        Path("disk/other").write_text("keep me")
        args = ["simulate", str(config), "--set", "run.rounds=20000", "--out", "disk/run", "--no-plots"]
        code = main(args)
        err = capsys.readouterr().err.splitlines()[-1]
        assert code == 6
        assert "disk/run" in err
        assert "full" in err or "space" in err
        assert Path("disk/other").read_text() == "keep me"
        assert not Path("disk/run/summary.json").exists(), "a run that was cut off does not look finished"
