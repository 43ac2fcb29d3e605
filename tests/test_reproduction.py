"""Claims against runs: what holds, what does not, what nobody can tell; and the page that says so."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.errors import ConfigError
from fedqueue.metrics import target_key
from fedqueue.report.style import styled
from fedqueue_reproduction import experiment as files
from fedqueue_reproduction import page, results
from fedqueue_reproduction.claims import Check, Comparison, Runs, assess, check, compare, condense, judge, sign_test
from fedqueue_reproduction.deployment import JOBS, deployment_tables
from fedqueue_reproduction.experiment import Experiment
from fedqueue_reproduction.figures import pictures
from fedqueue_reproduction.findings import findings_of, read_findings
from fedqueue_reproduction.lemma import check_bound
from fedqueue_reproduction.paired import paired_tables
from fedqueue_reproduction.results import Results
from fedqueue_reproduction.tables import figure_tables
from fedqueue_reproduction.theorem_page import PICTURE, read_theorem
from fedqueue_reproduction.wording import gain, in_one_seed, versus

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
NAMES = [found.name for found in read_findings(EXPERIMENTS, EXPERIMENTS / "nowhere")]
MADE = {
    "command": "fedqueue reproduce small",
    "date": "2026-11-16",
    "machine": {"processor": "a processor", "cores": 2, "fedqueue": "0.1.0", "torch": "2.4", "numpy": "2.0"},
}
TIME = "time_to.0.95"


def record(row: str, seed: int, time: float | None = None, *, setting: str = "", **more: Any) -> dict[str, Any]:
    """A run of 200 s that makes 5 steps and 0.4 transfers a second, and reaches 95 % after `time` seconds, or never."""
    return {
        "row": row,
        "setting": setting,
        "seed": seed,
        "config": "0" * 16,
        "rounds": 20,
        "virtual_seconds": 200.0,
        "local_steps": 1000,
        "model_transfers": 80,
        "node_seconds": 400.0,
        "max_staleness": 1,
        "score": {"max": 0.97, "final": 0.96},
        "time_to": {"0.95": time},
        "interpolated": {"0.95": time},
        "steps_to": {"0.95": None if time is None else int(5 * time)},
        "movement_to": {"0.95": None if time is None else int(0.4 * time)},
        "curve": [[10.0, 0.5, 50, 4], [time or 200.0, 0.96 if time else 0.9, 900, 70]],
        **more,
    }


def runs_of(figures: Mapping[str, Sequence[float | None]], **more: Any) -> Runs:
    """Times to 95 % of rows, one a seed."""
    return Runs(record(row, seed, time, **more) for row, times in figures.items() for seed, time in enumerate(times))


# One claim under one setting ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "others", "verdict"),
    [
        ([10, 12, 11], [20, 22, 25], "holds"),
        ([20, 22, 25], [10, 12, 11], "does not hold"),
        ([10, 22, 15], [20, 12, 16], "no difference seen"),
        ([10, 20, 30], [10, 20, 30], "no difference seen"),
        ([10], [20], "not measured"),
        ([], [20, 30, 40], "not measured"),
    ],
)
def test_verdict_is_that_of_the_paired_interval(ours: list[float], others: list[float], verdict: str) -> None:
    assert compare(runs_of({"a": ours, "b": others}), TIME, "a", "b", "").verdict == verdict


def test_interval_is_taken_over_differences_seed_by_seed() -> None:
    one = compare(runs_of({"a": [10, 40, 70], "b": [20, 52, 84]}), TIME, "a", "b", "")
    assert one.gain == pytest.approx(12.0)
    half = 4.302652729749464 * 2 / 3**0.5  # Student's t for two degrees of freedom
    assert one.interval == pytest.approx((12 - half, 12 + half), rel=1e-12)
    assert one.relative is not None
    assert one.relative[0] == pytest.approx(12 / 52)
    assert one.verdict == "holds", "though the seeds differ by far more than the rows do"


def test_only_seeds_that_both_rows_ran_are_paired() -> None:
    records = [record("a", seed, 10.0 + seed) for seed in (1, 2, 3)] + [record("b", seed, 20.0) for seed in (2, 3, 4)]
    assert compare(Runs(records), TIME, "a", "b", "").seeds == 2


def test_size_is_held_against_the_published_one() -> None:
    sure = compare(runs_of({"a": [60, 62, 61], "b": [100, 101, 102]}), TIME, "a", "b", "")  # 37 to 42 %
    assert [versus(sure, by) for by in (0.6, 0.4, 0.1)] == [
        ", less than published",
        ", as published",
        ", more than published",
    ]
    unsure = compare(runs_of({"a": [99, 101, 100], "b": [100, 100, 101]}), TIME, "a", "b", "")
    assert unsure.verdict == "no difference seen"
    assert [versus(unsure, by) for by in (0.6, 0.01)] == [", too little for the published difference", ""]
    assert versus(compare(runs_of({"a": [20, 21], "b": [10, 11]}), TIME, "a", "b", ""), 0.6) == ""


def test_more_of_a_score_is_better() -> None:
    records = [record(row, s, score={"max": m + s / 100}) for row, m in (("a", 0.9), ("b", 0.8)) for s in range(3)]
    assert compare(Runs(records), "score.max", "a", "b", "").verdict == "holds"
    assert (
        gain("score.max", compare(Runs(records), "score.max", "b", "a", ""))
        == "10.00 points lower (10.00 to 10.00 points)"
    )


def test_seeds_without_the_figure_are_left_out_and_told() -> None:
    delays: dict[str, list[float | None]] = {"a": [1.1, None, 1.2], "b": [1.3, 1.4, 1.6]}
    records = [record(row, s, normalised_delay_mean=d) for row, each in delays.items() for s, d in enumerate(each)]
    one = compare(Runs(records), "normalised_delay_mean", "a", "b", "")
    assert (one.seeds, one.runs, one.reached) == (2, 3, (2, 2))
    assert "2 of 3 seeds" in gain("normalised_delay_mean", one)


# Targets that were not reached --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "others", "verdict", "ahead", "behind"),
    [
        ([50.0] * 6, [None] * 6, "holds", 6, 0),
        ([50.0] * 5, [None] * 5, "no difference seen", 5, 0),  # five in five are luck in one case of sixteen
        ([None] * 6, [50.0] * 6, "does not hold", 0, 6),
        ([None] * 6, [None] * 6, "no difference seen", 0, 0),
        ([50.0] * 6 + [60.0], [70.0] * 6 + [None], "holds", 7, 0),
        ([50.0, 50.0, None, 90.0], [60.0, None, 70.0, 90.0], "no difference seen", 2, 1),
        ([200.0] * 6, [None] * 6, "holds", 6, 0),  # reached with the last model of the run
    ],
)
def test_unreached_targets_are_compared_by_who_was_first(
    ours: list[float | None], others: list[float | None], verdict: str, ahead: int, behind: int
) -> None:
    one = compare(runs_of({"a": ours, "b": others}), TIME, "a", "b", "")
    assert (one.verdict, one.ahead, one.behind) == (verdict, ahead, behind)
    assert one.gain is None, "no mean of times that do not exist"
    assert one.reached == (sum(t is not None for t in ours), sum(t is not None for t in others))


def test_a_run_that_ended_with_fewer_steps_than_the_other_needed_decides_nothing() -> None:
    """Who never got there after 100 steps may still need fewer than 250."""
    records = [record("a", seed, 50.0) for seed in range(8)]
    records += [record("b", seed, None, local_steps=100) for seed in range(8)]
    one = compare(Runs(records), "steps_to.0.95", "a", "b", "")
    assert (one.ahead, one.behind, one.verdict) == (0, 0, "no difference seen")


def test_sign_test_is_exact() -> None:
    assert sign_test(10, 0) == pytest.approx(2 / 1024)
    assert sign_test(9, 1) == pytest.approx(2 * 11 / 1024)
    assert sign_test(5, 5) == 1.0
    assert sign_test(0, 0) == 1.0


# Published values ---------------------------------------------------------------------------------------


def test_published_value_agrees_inside_our_interval_widened_by_its_spread() -> None:
    runs = runs_of({"a": [100.0, 110.0, 120.0]})  # 110 ± 24.8
    assert check(runs, TIME, "a", "", 130.0).verdict == "agrees"
    assert check(runs, TIME, "a", "", 140.0).verdict == "differs"
    assert check(runs, TIME, "a", "", 140.0, spread=6.0).verdict == "agrees"
    assert check(runs, TIME, "b", "", 140.0).verdict == "not measured"


def test_published_value_is_held_against_the_median_where_some_seeds_never_got_there() -> None:
    runs = runs_of({"a": [100.0, 110.0, 120.0, 130.0, 140.0, 150.0, 160.0, None, None, None]})
    assert check(runs, TIME, "a", "", 150.0).verdict == "agrees"
    assert check(runs, TIME, "a", "", 190.0).verdict == "agrees", "the median may be that late"
    assert check(runs, TIME, "a", "", 90.0).verdict == "differs"
    never = runs_of({"a": [None] * 10})
    assert check(never, TIME, "a", "", 150.0).verdict == "differs", "all are later than 200 s"
    assert check(never, TIME, "a", "", 250.0).verdict == "agrees"


# Over settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "no difference seen"], "holds only in: data=0"),
        (["holds", "does not hold"], "holds only in: data=0"),
        (["does not hold", "no difference seen"], "does not hold"),
        (["no difference seen", "no difference seen"], "not decided"),
        (["not measured", "not measured"], "not measured"),
        (["holds", "not measured"], "holds (1 of 2 settings not measured)"),
        (["no difference seen", "not measured"], "not decided (1 of 2 settings not measured)"),
    ],
)
def test_overall_verdict(verdicts: list[Any], text: str) -> None:
    assert judge([Comparison(f"data={i}", verdict) for i, verdict in enumerate(verdicts)]).text == text


def test_settings_are_told_by_the_axes_that_matter() -> None:
    every = [f"data={d}, rho={r}" for d in ("full", "scarce") for r in ("0.1", "0.5", "0.9")]
    assert condense(every[:3], every) == ["data=full"]
    assert condense([every[1], every[2], every[4], every[5]], every) == ["rho=0.5 or 0.9"]
    assert condense([every[3]], every) == ["data=scarce, rho=0.1"]
    assert condense([every[0], every[4]], every) == [every[0], every[4]], "no axis tells these two apart"
    assert condense(every, every) == ["all settings"]


def test_movement_ratio_is_taken_against_fedqueue_with_the_same_seed() -> None:
    runs = runs_of({"fedqueue": [50.0, 100.0, None], "a": [100.0, 100.0, 100.0]})
    ratios = {seed: one.value for seed, one in runs.readings("a", "", "movement_ratio.0.95").items()}
    assert ratios == {0: 2.0, 1: 1.0}, "the third has nothing to be compared with"


# The Lemma ----------------------------------------------------------------------------------------------


def test_staleness_bound_is_checked_run_by_run() -> None:
    calm, wild = {"east": [0.5, -0.5] * 10}, {"east": [8.0, -8.0] * 10}
    records = [
        record("a", 1, max_staleness=1, errors=calm),
        record("a", 2, max_staleness=2, errors=wild),
        record("a", 3, max_staleness=3, errors=wild),
        record("a", 4, max_staleness=3, errors=calm),
        record("a", 5),  # kept no errors
    ]
    one = check_bound(records, round_length=10.0, margin=2.0)
    assert one is not None
    assert (one.runs, one.most, one.above, one.above_sharper) == (4, 3, 2, 3)
    assert (one.given, one.met, one.above_met) == (4.0, 2, 1)
    assert check_bound([record("a", 5)], round_length=10.0, margin=2.0) is None


# The page -----------------------------------------------------------------------------------------------

SMALL = """
title = "Two methods"
paper = "Table 1"
config = "timing.toml"
targets = [0.95]
seeds = { first = 1, count = 6 }
figures = ["score.max", "time_to.0.95", "interpolated.0.95", "movement_ratio.0.95"]
keep = ["errors"]
about = "Some words."
[[axis]]
name = "data"
values = [{ name = "full" }, { name = "scarce" }]
[[row]]
name = "fedqueue"
label = "FedQueue"
paper = { "time_to.0.95" = 154.7 }
[[row]]
name = "jit"
label = "just in time"
changes = ["run.strategy=jit"]
[[row]]
name = "fedavg"
label = "FedAvg"
changes = ["run.strategy=fedavg"]
[[claim]]
text = "FedQueue reaches 95 % sooner than FedAvg"
paper = "37 % sooner"
figure = "time_to.0.95"
better = "fedqueue"
than = "fedavg"
by = 0.37
[[claim]]
text = "FedQueue takes about 155 s"
paper = "154.7 s"
figure = "time_to.0.95"
better = "fedqueue"
value = 154.7
spread = 5.0
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with experiments `synthetic`, which has results, and `skew`, which has none. FedQueue is 37 % sooner
    with all data, and later with little, where FedAvg gets there in four seeds of six."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "experiments"
    folder.mkdir()
    shutil.copy(EXPERIMENTS / "timing.toml", folder)
    for name in ("synthetic", "skew"):
        (folder / f"{name}.toml").write_text(SMALL)
    times: dict[tuple[str, str], list[float | None]] = {
        ("fedqueue", "data=full"): [60, 62, 64, 65, 63, 61],
        ("jit", "data=full"): [20, 21, 22, 21, 20, 22],
        ("fedavg", "data=full"): [96, 99, 100, 101, 102, 98],
        ("fedqueue", "data=scarce"): [150, 152, 158, 160, 153, 157],
        ("jit", "data=scarce"): [50, 52, 54, 51, 50, 52],
        ("fedavg", "data=scarce"): [90, 92, None, 94, 95, None],
    }
    found = Results("synthetic")
    for (row, setting), each in times.items():
        for seed, time in enumerate(each, 1):
            errors = {"first": [1.0, -1.0], "second": [0.5, -0.5]}
            found.add(record(row, seed, time, setting=setting, errors=errors), MADE)
    results.write(folder / "results" / "synthetic.json", found)
    return tmp_path


def test_page_has_every_experiment_with_claim_measurement_and_verdict(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "--page"]) == 0
    assert "with 2 figures" in capsys.readouterr().out
    text = (study / "docs" / "reproduction.md").read_text(encoding="utf-8")
    summary, ran, missing = text.partition("## synthetic")[0], *text.partition("## synthetic")[2].split("## skew")
    assert (
        "**0 hold in every setting tried here, 1 only in some settings, 0 do not hold, and 0 are not decided**"
        in summary
    )
    assert "1 further claim waiting for runs" in summary
    assert "only in data=full. FedQueue: there 37 % sooner" in summary
    assert "| FedQueue | in every setting: 66 to 67 % sooner |" in summary, "how just in time compares"
    assert "FedQueue 1; just in time 1" in summary, "models in 100 s"
    assert (
        "36 runs, 6 seeds (1 to 6), 2026-11-16, on a processor, 2 cores (fedqueue 0.1.0, torch 2.4, numpy 2.0)." in ran
    )
    assert "| *FedQueue, paper* |  | *154.7* |  |  |" in ran
    assert "| FedQueue | 97.00 ± 0.00 | 62.5 ± 2.0 | 62.5 ± 2.0 | 1.00 ± 0.00 |" in ran
    assert "94.5 (4/6)" in ran, "two seeds never got there: the median of all"
    assert "data=full: holds: 37 % sooner (36 to 38 %), as published" in ran
    assert "data=scarce: no difference seen: sooner in 2 of 6 seeds, later in 4 (reached by 6 and 4; p = 0.69)" in ran
    assert "**holds only in: data=full**" in ran
    assert "data=scarce: agrees: 155.0 ± 4.1 against 154.7" in ran
    assert "**agrees only in: data=scarce**" in ran
    assert "The Lemma's staleness bound, run by run" in ran
    assert "Not run yet: `fedqueue reproduce skew`" in missing
    assert "- FedQueue reaches 95 % sooner than FedAvg. Paper: 37 % sooner." in missing


def test_page_and_figures_lie_where_its_links_lead(study: Path) -> None:
    page.write(Path("experiments"), Path("experiments/results"), Path("docs"))
    text = (study / "docs" / "reproduction.md").read_text(encoding="utf-8")
    for link in ("../experiments/synthetic.toml", "../experiments/results/synthetic.json"):
        assert f"({link})" in text
        assert (study / "docs" / link).is_file()
    for picture in ("synthetic-times.png", "synthetic-curves.png"):
        assert f"(images/reproduction/{picture})" in text
        assert (study / "docs" / "images" / "reproduction" / picture).read_bytes().startswith(b"\x89PNG")


def test_same_results_give_the_same_page(study: Path) -> None:
    first, *_ = page.write(Path("experiments"), Path("experiments/results"), Path("docs"))
    before = first.read_bytes()
    (study / "experiments" / "results" / "synthetic.quick.json").write_text("{}")  # quick results are nobody's business
    second, *_ = page.write(Path("experiments"), Path("experiments/results"), Path("docs"))
    assert second.read_bytes() == before


def test_page_without_any_result_says_so(study: Path) -> None:
    page.write(Path("experiments"), Path("nowhere"), Path("docs"))
    text = (study / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert "Nothing has been run yet: 2 claims of the paper wait for their runs." in text
    assert text.count("Not run yet: `fedqueue reproduce") == 2
    assert "![" not in text


@pytest.mark.parametrize("arguments", [["--page", "--quick"], ["--docs", "docs"]])
def test_page_options_that_make_no_sense_are_refused(study: Path, arguments: list[str]) -> None:
    assert main(["reproduce", *arguments]) == ConfigError.exit_code
    assert not (study / "docs").exists()


# This repository ----------------------------------------------------------------------------------------


def deployed(final: float) -> dict[str, Any]:
    """What a run of the deployment keeps: its loss falls from 4 to `final`, at 1,000 and 9,000 s."""
    losses = [[1000.0, 3.0], [9000.0, final]]
    of_each = {"submitted": 5, "admitted": 3, "deferred": 1, "delays": [0.5, 1.25], "steps": [20, 61], "losses": losses}
    return {
        "virtual_seconds": 17000.0,
        "updates": {"admitted": 12, "deferred": 4},
        "first_loss": 4.0,
        "loss": {"final": final, "least": final},
        "curve": [[at, -loss, 100, 10] for at, loss in losses],
        "facilities": dict.fromkeys(JOBS, of_each),
        "answers": {f"{key}/{name}": 0.25 for key in ("exact_match", "numeric_error") for name in JOBS},
    }


def all_runs(experiment: Experiment) -> Results:
    """Two made-up runs of every cell, with every figure that a record can have."""
    found = Results(experiment.name)
    at_targets = ("time_to", "interpolated", "steps_to", "movement_to")
    for cell in experiment.cells():
        for seed in experiment.seeds_of()[:2]:
            time = 20.0 + seed % 7
            curve = [[10.0, 0.6, 50, 4], [time, 0.99, 200, 20]]
            more: dict[str, Any] = {
                **{name: {target_key(t): time for t in experiment.targets} for name in at_targets},
                **dict.fromkeys(("late_probability", "missed_cutoff", "deferred_weight"), 0.1 + seed % 7 / 100),
                **dict.fromkeys(("normalised_delay_mean", "normalised_delay_max"), 1.2),
                "arrival": {"p50": 0.9, "p90": 1.1},
                "arrivals": [0.7, 0.9, 1.1],
                "errors": {f.name: [1.0, -1.0, 0.5] for f in experiment.config_of(cell, seed).facility},
                "curve": curve,
            }
            if "facilities" in experiment.keep:
                more |= deployed(1.5 + seed % 7)
            found.add(record(cell.row.name, seed, setting=cell.setting, **more), MADE)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_figure_and_picture_of_an_experiment_is_about_what_its_runs_have(name: str) -> None:
    experiment = files.load(EXPERIMENTS / f"{name}.toml")
    found = findings_of(experiment, all_runs(experiment))
    for claim, judgement in found.judgements:
        assert judgement.each, f"{claim.text}: speaks of no setting that its rows exist in"
        assert not judgement.missing, f"{claim.text}: cannot be measured by {claim.figure}"
        kind = Comparison if claim.than else Check
        assert all(isinstance(one, kind) for one in judgement.each)
    if not experiment.grids:
        assert " - |" not in figure_tables(found), "a figure that no record has"
        assert pictures(found), "an experiment without a figure: see figures.py"
    for picture in pictures(found):
        with styled():
            drawn = [axes for axes in picture.make().axes if axes.lines or axes.patches]
        assert drawn, f"{picture.file}: is empty"


def test_deployment_is_held_against_the_paper_at_the_same_shares_of_the_way() -> None:
    """By hand: FedQueue-1 ends at 0.8, the best of all, and everything else at 1.6; all begin at 4."""
    experiment = files.load(EXPERIMENTS / "chemistry.toml")
    found = Results(experiment.name)
    for cell in experiment.cells():
        if cell.setting == "tuning=full":
            final = 0.8 if cell.row.name == "fedqueue-1" else 1.6
            more = deployed(final) | {"errors": {name: [100.0, -100.0, 900.0, 1000.0] for name in JOBS}}
            found.add(record(cell.row.name, 1001, setting=cell.setting, **more), MADE)
    text = deployment_tables(findings_of(experiment, found))
    # 0.8 + 3.2 * (1 - 0.3658) / (2 - 0.3658) = 2.042, and so on; 3.0 after 1,000 s is above all of them
    assert "time to 1 (2.042 here), s | time to 0.8 (1.650 here), s | time to 0.6 (1.259 here), s" in text
    assert "| FedQueue-1 (T 20 min) | 9,000.0 | 9,000.0 | 9,000.0 | 9,000.0 | 0.800 | 0.50 |" in text
    assert "| FedAvg | 9,000.0 | 9,000.0 | > 17,000.0 (0/1) | > 17,000.0 (0/1) | 1.600 | 1.00 |" in text
    assert "| *FedBuff (buffer 3), paper* | *1,574* | *3,351* | *9,328* | *-* | *0.499* | *1.10* |" in text
    assert "| aurora | 10 *[10]* | 6 *[6]* | 2 *[4]* | 1.25 *[1.34]* |" in text, "both runs of FedQueue together"
    assert "| FedQueue-2 | aurora | 4 | 475 | 556 (23 %) | 0 | 141 (6 %) | 20 to 61 |" in text, (
        "of its own round length"
    )
    assert "25.0 %; 0.25 |" in text


def test_a_single_seed_says_where_it_points_and_gives_no_verdict() -> None:
    runs = Runs([record("ours", 1, 100.0), record("other", 1, 150.0)])
    one = compare(runs, TIME, "ours", "other", "")
    assert (one.verdict, in_one_seed(TIME, one)) == ("not measured", "one seed, no verdict: sooner")
    other = compare(runs, TIME, "other", "ours", "")
    assert in_one_seed(TIME, other) == "one seed, no verdict: later"


def test_just_in_time_is_compared_seed_by_seed_where_all_rows_have_runs() -> None:
    """By hand: FedAvg takes twice and four times as long as just in time with the same seed, and half the node-seconds.
    FedBuff never gets there, which is not frugal. A seed that one row lacks does not count."""
    experiment = files.load(EXPERIMENTS / "mnist-regimes.toml")
    times = {"jit": (10.0, 10.0), "fedavg": (20.0, 40.0), "fedbuff": (None, None)}
    found = Results(experiment.name)
    for cell in experiment.cells():
        for seed, time in enumerate((*times.get(cell.row.name, (50.0, 50.0)), 1.0)):
            if seed == 2 and cell.row.name == "fedasync":
                continue
            needed = None if time is None else 30.0 if cell.row.name == "fedavg" else 60.0
            figures: dict[str, Any] = {"interpolated": time, "node_seconds_to": needed, "movement_to": time}
            more: dict[str, Any] = {n: {target_key(t): v for t in experiment.targets} for n, v in figures.items()}
            found.add(record(cell.row.name, seed, setting=cell.setting, **more), MADE)
    text = paired_tables(findings_of(experiment, found))
    half = 12.706204736 * (log(2) / 2)  # Student's t for one degree of freedom, standard error of two logarithms
    ends = f"{8**0.5 * exp(-half):.2f} to {8**0.5 * exp(half):.2f}"
    line = f"| regime=base | 2 | 10.0 | 30.0 FedAvg, tuned | 2.83 ({ends}) | 60 | 30 FedAvg, tuned | 10 and 30 |"
    assert text.count(line) == 3, "one a target"
    assert "| FedBuff, tuned | 20.00 (20.00) |" in text, "the whole length of its runs"
    assert "| the best of the tuned in each setting | 3.00 (3.00) |" in text
    assert "| node-seconds of the most frugal of the three fastest | 0.50 (0.50) |" in text


def test_committed_page_is_what_the_committed_results_give() -> None:
    everything = read_findings(EXPERIMENTS, EXPERIMENTS / "results")
    if not any(found.runs for found in everything):
        pytest.skip("no experiment has results yet: fedqueue reproduce NAME")
    links = {"experiments": "../experiments", "results": "../experiments/results"}
    text = page.render(everything, links, read_theorem(EXPERIMENTS / "results"))
    committed = ROOT / "docs" / page.FILE
    assert committed.is_file(), "missing: fedqueue reproduce --page"
    assert committed.read_text(encoding="utf-8") == text, "not up to date: fedqueue reproduce --page"
    for picture in (picture for found in everything for picture in pictures(found)):
        assert (ROOT / "docs" / page.IMAGES / picture.file).is_file(), "missing: fedqueue reproduce --page"
    assert (ROOT / "docs" / page.IMAGES / PICTURE).is_file(), "missing: fedqueue reproduce --page"


def test_claims_speak_only_of_the_settings_they_name() -> None:
    experiment = files.load(EXPERIMENTS / "gamma.toml")
    claim = next(claim for claim in experiment.claims if claim.only == {"partition": ["iid"]})
    judged = assess(experiment, claim, Runs(all_runs(experiment).sorted()))
    assert [one.setting for one in judged.each] == ["partition=iid"]
