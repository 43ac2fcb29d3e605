"""Experiments: what their files may say, which runs they mean, and what is kept of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from fedqueue.cli import main
from fedqueue.comparison import estimate
from fedqueue.errors import ConfigError
from fedqueue_reproduction import experiment as files
from fedqueue_reproduction import results
from fedqueue_reproduction.execute import execute, runs_of
from fedqueue_reproduction.record import fingerprint, interpolate
from fedqueue_reproduction.results import Results
from fedqueue_reproduction.tuning import ranked, winner_for

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
FILES = [path for path in sorted(EXPERIMENTS.glob("*.toml")) if "title" in path.read_text().splitlines()[0]]

BASE = """
[run]
strategy = "fedqueue"
rounds = 4
learning_rate = 0.005
[task]
name = "timing"
[[facility]]
name = "east"
steps_per_second = 10.0
queue = { kind = "lognormal", mean = 2.0, rho = 0.9 }
[[facility]]
name = "west"
steps_per_second = 5.0
queue = { kind = "lognormal", mean = 3.0, rho = 0.9 }
"""

SMALL = """
title = "Two strategies over two queues"
paper = "none"
config = "base.toml"
targets = [0.3, 0.5]
seeds = { first = 11, count = 2 }
figures = ["score.max", "time_to.0.50", "late_probability"]
keep = ["arrivals"]
[[axis]]
name = "rho"
values = [
  { name = "low", changes = ["facility.*.queue.rho=0.1"] },
  { name = "high", changes = ["facility.*.queue.rho=0.9"] },
]
[[row]]
name = "fedqueue"
paper = { late_probability = 0.015 }
[[row]]
name = "fedavg"
changes = ["run.strategy=fedavg"]
[[claim]]
text = "fedqueue is better"
figure = "late_probability"
better = "fedqueue"
than = "fedavg"
[quick]
seeds = 1
changes = ["run.rounds=2"]
keep = { rho = ["low"] }
"""

GRID = """
title = "A grid"
config = "base.toml"
targets = [0.95]
seeds = { first = 1, count = 2 }
figures = ["time_to.0.95"]
objective = "interpolated.0.95"
[[grid]]
name = "fedqueue"
vary = [["run.learning_rate=0.001", "run.learning_rate=0.002"], ["strategy.fedqueue.margin=1.0"]]
"""

TUNED = """
title = "The best of a grid"
config = "base.toml"
seeds = { first = 1001, count = 2 }
figures = ["late_probability"]
[[row]]
name = "fedqueue"
tuned = "grid/fedqueue"
"""


@pytest.fixture
def small(in_tmp: Path) -> Path:
    """A study of eight runs, in ./experiments."""
    folder = in_tmp / "experiments"
    folder.mkdir()
    (folder / "base.toml").write_text(BASE)
    (folder / "small.toml").write_text(SMALL)
    return folder / "small.toml"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def records(path: Path) -> list[dict[str, Any]]:
    return results.read(path).sorted()


def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what depends on when and where it was run."""
    return [{key: value for key, value in record.items() if key not in ("wall_seconds", "by")} for record in found]


# Files --------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "no such row in a claim": ('than = "fedavg"', 'than = "fedavgg"', "claim.0.than: there is no row 'fedavgg'"),
    "no such axis": ('keep = { rho = ["low"] }', 'keep = { data = ["low"] }', "quick.keep.data: there is no axis"),
    "no such value": ('keep = { rho = ["low"] }', 'keep = { rho = ["mid"] }', "quick.keep.rho: 'mid' is none of low"),
    "unknown key": ('paper = "none"', 'papper = "none"', "papper: unknown key; did you mean paper?"),
    "no such figure": ('"score.max", ', '"score.best", ', "figures: there is no figure 'score.best'"),
    "no such target": ("time_to.0.50", "time_to.0.95", "needs one of the targets 0.30, 0.50"),
    "two of a name": ('name = "fedavg"', 'name = "fedqueue"', "row.fedqueue: there are two of this name"),
    "nothing to keep": ('["arrivals"]', '["arrival"]', "keep.0: must be one of answers"),
    "claim of nothing": ('than = "fedavg"', "", "claim.0: needs than (a row) or value"),
    "no seeds": ("count = 2", "count = 0", "seeds.count must be 1 or more"),
    "bad change": (
        '"run.strategy=fedavg"',
        '"run.strateggy=fedavg"',
        "small.toml: fedavg (rho=low): experiments/base.toml: run.strateggy: unknown key",
    ),
    "change that is none": ('"run.strategy=fedavg"', '"fedavg"', "small.toml: fedavg (rho=low): --set fedavg: must be"),
    "no such config": ('"base.toml"', '"bass.toml"', "small.toml: fedqueue (rho=low): experiments/bass.toml: no such"),
}


@pytest.mark.parametrize("case", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_experiment_is_one_line_with_file_and_key(case: tuple[str, str, str], small: Path, capsys: Any) -> None:
    old, new, says = case
    change(small, old, new)
    assert main(["reproduce", "small"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("fedqueue: error: experiments/small.toml: ")
    assert says in err
    assert not (small.parent / "results").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["larger"], "larger: there is no such experiment; there are: small"),
        (["base"], "base.toml: is the config of one run, no experiment"),
        (["small", "small"], "small: is named twice"),
        (["small", "--seeds", "0"], "--seeds 1 or more"),
        (["small", "--resume", "--force"], "give one of the two"),
    ],
)
def test_bad_command_is_one_line(args: list[str], says: str, small: Path, capsys: Any) -> None:
    assert main(["reproduce", *args]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_is_sound_and_no_two_of_its_cells_are_the_same_run(path: Path, quick: bool) -> None:
    experiment = files.load(path)
    seed = experiment.seeds_of(quick=quick)[0]
    found: dict[str, str] = {}
    cells = experiment.cells(quick=quick)
    for cell in cells:
        config = experiment.config_of(cell, seed, quick=quick)
        assert config.run.seed == seed
        if cell.row.tuned is None:  # otherwise its changes are the winner's
            assert found.setdefault(fingerprint(config), str(cell)) == str(cell)
    assert cells
    assert all(claim.text and claim.paper for claim in experiment.claims)


def test_there_is_an_experiment_for_every_controlled_table_and_figure() -> None:
    assert {path.stem for path in FILES} >= {
        *("synthetic", "ablation", "bound-grid", "variability", "gamma", "margin", "arrivals", "decay", "scalability"),
        *("skew", "tuning", "tuned", "admission"),
    }


def test_fingerprint_knows_what_decides_a_run_and_nothing_else(small: Path) -> None:
    experiment = files.load(small)
    cell = experiment.cells()[0]
    same = experiment.config_of(cell, 11)
    for changes in (["run.name=other"], ["task.device=cuda"], ["strategy.jit.lead=0.9"], ["server.port=1"]):
        assert fingerprint(experiment.config_of(cell, 11, winner=changes)) == fingerprint(same)
    for changes in (["run.rounds=5"], ["strategy.fedqueue.margin=1.0"], ["facility.east.nodes=2"]):
        assert fingerprint(experiment.config_of(cell, 11, winner=changes)) != fingerprint(same)
    assert fingerprint(experiment.config_of(cell, 12)) != fingerprint(same)


# Runs ---------------------------------------------------------------------------------------------------------


def test_reproduce_runs_every_cell_and_shows_the_paper_beside_it(small: Path, capsys: Any) -> None:
    assert main(["reproduce", "small", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "small, rho=low: 2 seeds" in out
    assert "in the paper" in out
    assert "0.015" in out
    assert "small: 8 of 8 runs in experiments/results/small.json" in out
    found = records(small.parent / "results" / "small.json")
    assert [results.key_of(r) for r in found] == [
        (row, f"rho={rho}", seed) for row in ("fedavg", "fedqueue") for rho in ("high", "low") for seed in (11, 12)
    ]
    for record in found:
        assert len(record["arrivals"]) == record["jobs"]["completed"]
        assert min(record["arrivals"]) <= record["arrival"]["p50"] <= record["arrival"]["p90"]
        assert "errors" not in record


def test_quick_is_smaller_and_keeps_to_a_file_of_its_own(small: Path) -> None:
    for _ in range(2):  # quick results may be replaced
        assert main(["reproduce", "small", "--quick", "--jobs", "1"]) == 0
    assert [p.name for p in (small.parent / "results").iterdir()] == ["small.quick.json"]
    found = records(small.parent / "results" / "small.quick.json")
    assert [results.key_of(r) for r in found] == [
        ("fedavg", "rho=low", 11),
        ("fedqueue", "rho=low", 11),
    ]
    assert {r["rounds"] for r in found} == {2}


def test_results_that_are_there_are_refused_unless_told(small: Path, capsys: Any) -> None:
    path = small.parent / "results" / "small.json"
    assert main(["reproduce", "small", "--jobs", "1", "--seeds", "1"]) == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert main(["reproduce", "small"]) == 5
    assert "small.json: exists already; --resume adds what is missing, --force replaces it" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["reproduce", "small", "--jobs", "1", "--force"]) == 0
    assert len(records(path)) == 8


def mark(path: Path) -> None:
    """So that a record which is made again can be told from one that was kept."""
    known = results.read(path)
    for record in known.runs.values():
        record["wall_seconds"] = -1.0
    results.write(path, known)


def test_resume_runs_only_what_is_missing(small: Path) -> None:
    path = small.parent / "results" / "small.json"
    main(["reproduce", "small", "--jobs", "1", "--seeds", "3"])
    whole = timeless(records(path))
    mark(path)
    known = results.read(path)
    del known.runs["fedavg", "rho=low", 12], known.runs["fedqueue", "rho=high", 11]
    results.write(path, known)
    assert main(["reproduce", "small", "--jobs", "1", "--resume", "--seeds", "2"]) == 0
    found = records(path)
    assert timeless(found) == whole, "the third seed was not asked for and is kept"
    again = {results.key_of(r) for r in found if r["wall_seconds"] >= 0}
    assert again == {("fedavg", "rho=low", 12), ("fedqueue", "rho=high", 11)}
    made = results.read(path).made
    assert len(made) == 1, "the same command of the same day on the same machine"


def test_run_whose_config_has_changed_is_run_again(small: Path, capsys: Any) -> None:
    path = small.parent / "results" / "small.json"
    main(["reproduce", "small", "--jobs", "1"])
    mark(path)
    change(small, '["run.strategy=fedavg"]', '["run.strategy=fedavg", "strategy.fedavg.steps=7"]')
    assert main(["reproduce", "small", "--jobs", "1", "--resume"]) == 0
    assert "4 runs no longer fit the experiment" in capsys.readouterr().err
    found = records(path)
    assert {r["row"] for r in found if r["wall_seconds"] >= 0} == {"fedavg"}
    assert all(r["local_steps"] <= 7 * r["jobs"]["submitted"] for r in found if r["row"] == "fedavg")
    assert len(found) == 8


def test_after_the_minutes_are_over_no_run_begins_and_resume_goes_on(small: Path, capsys: Any) -> None:
    assert main(["reproduce", "small", "--jobs", "1", "--minutes", "1e-9"]) == 0
    assert "8 runs are missing; the same command with --resume goes on" in capsys.readouterr().out
    assert main(["reproduce", "small", "--jobs", "1", "--resume"]) == 0
    assert len(records(small.parent / "results" / "small.json")) == 8


HOLD = """
from pathlib import Path
import time
from fedqueue.protocol.strategies import register
from fedqueue.protocol.strategies.fedavg import FedAvg

@register
class Hold(FedAvg):
    name = "hold"

    def begin(self):
        super().begin()
        if Path("held").exists():
            calls = len(list(Path("held").iterdir()))
            (Path("held") / str(calls)).touch()
            while calls >= 2:  # the third run of it never ends
                time.sleep(0.01)
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_interrupted_reproduce_leaves_what_resume_completes_to_the_same_records(jobs: str, small: Path) -> None:
    (small.parent / "hold.py").write_text(HOLD)
    change(small.parent / "base.toml", "[run]", '[run]\nmodules = ["hold"]')
    change(small, "run.strategy=fedavg", "run.strategy=hold")
    Path("held").mkdir()
    command = [sys.executable, "-m", "fedqueue", "reproduce", "small", "--jobs", jobs]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    give_up = time.monotonic() + 60
    while not Path("held/2").exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "of 8 runs are kept; --resume goes on" in err
    assert err.splitlines()[-1] == "fedqueue: stopped"
    path = small.parent / "results" / "small.json"
    assert 2 <= len(records(path)) < 8
    shutil.rmtree("held")
    for more in (["--resume"], ["--results", "whole"]):
        subprocess.run([*command, *more], check=True, capture_output=True, timeout=600)
    assert timeless(records(path)) == timeless(records(Path("whole/small.json")))
    assert len(records(path)) == 8


def test_error_of_a_run_names_cell_and_seed_and_keeps_the_others(small: Path, capsys: Any) -> None:
    change(small, '"run.strategy=fedavg"', '"run.strategy=fedavg", "task.name=nowhere:make"')
    assert main(["reproduce", "small", "--jobs", "1"]) == 4
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("fedqueue: error: small: fedavg (rho=low), seed 11: ")
    assert "2 of 8 runs are kept" in err[-2]


def test_cuda_that_is_not_there_is_one_line(small: Path, capsys: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["reproduce", "small", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "fedqueue: error: --device cuda: torch finds no CUDA device here; leave it out to run on the CPU\n"
    )


# Records of runs that train -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The same study of digits with one process and with two, and with an even partition."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "base.toml").write_text(BASE.replace('"timing"', '"digits"').replace("rounds = 4", "rounds = 6"))
    (folder / "small.toml").write_text(
        SMALL.replace('changes = ["run.strategy=fedavg"]', 'changes = ["run.strategy=jit"]')
    )
    (folder / "even.toml").write_text(
        SMALL.replace('config = "base.toml"', 'config = "base.toml"\nchanges = ["task.partition=iid"]')
    )
    found = {}
    for name, experiment, jobs in (("one", "small", 1), ("two", "small", 2), ("even", "even", 1)):
        loaded = files.load(folder / f"{experiment}.toml")
        made = Results(loaded.name)
        for _, record in execute(runs_of(loaded, loaded.seeds_of()), processes=jobs):
            made.add(record, {})
        results.write(folder / f"{name}.json", made)
        found[name] = records(folder / f"{name}.json")
    return found


def test_records_are_the_same_with_one_process_and_with_two(trained: Mapping[str, list[dict[str, Any]]]) -> None:
    assert timeless(trained["one"]) == timeless(trained["two"])
    assert len(trained["one"]) == 8


def test_interpolated_times_lie_between_the_models(trained: Mapping[str, list[dict[str, Any]]]) -> None:
    reached = 0
    for record in trained["one"]:
        points = [(0.0, 0.0, 0, 0), *map(tuple, record["curve"])]
        for name, at in record["interpolated"].items():
            first = next((i for i, point in enumerate(points) if point[1] >= float(name)), None)
            assert (first is None) == (at is None)
            if first is not None:
                reached += 1
                assert points[first - 1][0] < at <= points[first][0] == record["time_to"][name]
                assert points[first][2] == record["steps_to"][name]
                assert points[first][3] == record["movement_to"][name]
    assert reached >= 8


def test_interpolation_meets_a_target_that_a_model_scores_exactly() -> None:
    assert interpolate([(5.0, 0.2, 0, 0), (10.0, 0.9, 0, 0)], 0.9) == 10.0
    assert interpolate([(5.0, 0.2, 0, 0)], 0.9) is None


def test_partition_does_not_change_when_updates_arrive(trained: Mapping[str, list[dict[str, Any]]]) -> None:
    skewed = {(r["setting"], r["seed"]): r for r in trained["one"] if r["row"] == "fedqueue"}
    even = {(r["setting"], r["seed"]): r for r in trained["even"] if r["row"] == "fedqueue"}
    assert {key: r["arrivals"] for key, r in skewed.items()} == {key: r["arrivals"] for key, r in even.items()}
    assert {key: r["curve"] for key, r in skewed.items()} != {key: r["curve"] for key, r in even.items()}


# Tuning -------------------------------------------------------------------------------------------------------


def tuning_record(row: str, seed: int, at: float | None) -> dict[str, Any]:
    return {
        "row": row,
        "setting": "",
        "seed": seed,
        "config": "",
        "virtual_seconds": 100.0 if at is None else at,
        "interpolated": {"0.95": at},
        "score": {"max": 0.9},
    }


@pytest.fixture
def grid(small: Path) -> Path:
    (small.parent / "grid.toml").write_text(GRID)
    (small.parent / "tuned.toml").write_text(TUNED)
    return small.parent / "grid.toml"


def write_grid(grid: Path, times: Mapping[tuple[str, int], float | None]) -> None:
    made = Results("grid")
    for (row, seed), at in times.items():
        made.add(tuning_record(row, seed, at), {})
    results.write(results.path_of(grid), made)


def test_tuning_picks_the_best_mean_and_never_looks_at_other_seeds(grid: Path) -> None:
    first, second = "fedqueue/01", "fedqueue/02"
    times = {(first, 1): 30.0, (first, 2): None, (second, 1): 60.0, (second, 2): 60.0, (first, 1001): 0.1}
    write_grid(grid, times)
    (choices,) = ranked(files.load(grid), records(results.path_of(grid))).values()
    assert [(c.row.name, c.objective, c.reached) for c in choices] == [(second, 60.0, 2), (first, 115.0, 1)]
    tuned = files.load(grid.with_name("tuned.toml"))
    (cell,) = tuned.cells()
    winner = winner_for(tuned, tuned.seeds_of(), None)
    config = tuned.config_of(cell, 1001, winner=winner(cell))
    assert config.run.learning_rate == 0.002
    assert config.options().margin == 1.0


def test_setting_may_be_judged_by_an_objective_of_its_own(grid: Path) -> None:
    text = GRID.replace("targets = [0.95]", "targets = [0.90, 0.95]")
    easy = 'values = [{ name = "all" }, { name = "few", objective = "interpolated.0.90" }]'
    grid.write_text(f'{text}[[axis]]\nname = "data"\n{easy}\n')
    judged = ranked(
        files.load(grid),
        [
            tuning_record(f"fedqueue/0{row}", seed, 10.0 * row) | {"setting": f"data={data}"} | {"interpolated": at}
            for row, at in ((1, {"0.90": 20.0, "0.95": 30.0}), (2, {"0.90": 10.0, "0.95": 40.0}))
            for seed in (1, 2)
            for data in ("all", "few")
        ],
    )
    best = {setting: (choices[0].row.name, choices[0].figure) for (_, setting), choices in judged.items()}
    assert best == {
        "data=all": ("fedqueue/01", "interpolated.0.95"),
        "data=few": ("fedqueue/02", "interpolated.0.90"),
    }
    grid.write_text(grid.read_text().replace("interpolated.0.90", "interpolated.0.80"))
    with pytest.raises(ConfigError, match=r"axis.data.few.objective: 'interpolated.0.80' needs one of the targets"):
        files.load(grid)


def test_tuned_experiment_wants_a_whole_grid_and_fresh_seeds(grid: Path, capsys: Any) -> None:
    assert main(["reproduce", "tuned"]) == 2
    assert "grid.json: is missing, and tuned takes its winners; `fedqueue reproduce grid`" in capsys.readouterr().err
    write_grid(grid, {("fedqueue/01", 1): 30.0, ("fedqueue/01", 2): 30.0, ("fedqueue/02", 1): 30.0})
    assert main(["reproduce", "tuned"]) == 2
    assert "1 rows lack runs; `fedqueue reproduce grid --resume`" in capsys.readouterr().err
    tuned = files.load(grid.with_name("tuned.toml"))
    with pytest.raises(ConfigError, match="seeds: 2 was used for tuning"):
        winner_for(tuned, range(2, 5), None)(tuned.cells()[0])


def test_seeds_of_tuning_are_never_reported() -> None:
    experiments = {path.stem: files.load(path) for path in FILES}
    grids = [experiments.pop(name) for name in ("tuning", "regimes-tuning", "mnist-regimes-tuning")]
    tuning = {seed for experiment in grids for seed in experiment.seeds_of()}
    for experiment in experiments.values():
        assert not tuning & set(experiment.seeds_of())
        assert not tuning & set(experiment.seeds_of(quick=True))


@pytest.mark.parametrize(
    ("grids", "rows", "size"),
    [("tuning", "tuned", 60), ("regimes-tuning", "regimes", 6), ("mnist-regimes-tuning", "mnist-regimes", 12)],
)
def test_every_method_has_a_grid_of_the_same_size_and_every_grid_a_tuned_row(grids: str, rows: str, size: int) -> None:
    tuning, tuned = files.load(EXPERIMENTS / f"{grids}.toml"), files.load(EXPERIMENTS / f"{rows}.toml")
    sizes = {grid.name: sum(row.grid == grid.name for row in tuning.rows) for grid in tuning.grids}
    assert set(sizes.values()) == {size}
    assert {row.tuned for row in tuned.rows if row.tuned} == {f"{grids}/{name}" for name in sizes}


def test_every_strategy_of_the_first_stage_is_tuned() -> None:
    tuning = files.load(EXPERIMENTS / "tuning.toml")
    strategies = {tuning.config_of(cell, 1).run.strategy for cell in tuning.cells()}
    assert strategies == {"fedqueue", "jit", "fedavg", "fedasync", "fedbuff", "fedcompass"}


@pytest.mark.parametrize("seeds", [2, 10, 31, 32, 33, 50, 200, 5000])
def test_intervals_are_those_of_students_t(seeds: int) -> None:
    values = [float((7 * n) % seeds) for n in range(seeds)]
    found = estimate(values)
    assert found.mean is not None
    assert found.half_width is not None
    low, high = scipy.stats.t.interval(0.95, seeds - 1, found.mean, scipy.stats.sem(values))
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high), rel=1e-12)


def test_results_file_has_one_run_a_line_and_reads_back(tmp_path: Path) -> None:
    made = Results("grid")
    for seed, machine in ((2, "a"), (1, "b"), (3, "a")):
        made.add(tuning_record("fedqueue/01", seed, 30.0), {"machine": machine})
    path = tmp_path / "grid.json"
    results.write(path, made)
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["seed"] for line in lines if line.startswith('{"row"')] == [1, 2, 3]
    again = results.read(path)
    assert again == made
    assert again.keep_only(lambda record: record["seed"] == 1) == 2
    assert again.made == [{"machine": "b"}]
    assert [record["by"] for record in again.sorted()] == [0]
