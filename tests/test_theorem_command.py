"""`fedqueue bound --theorem` from the command line, the section of the page, and what is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.config import load
from fedqueue_reproduction import theorem_results
from fedqueue_reproduction.theorem_command import floored
from fedqueue_reproduction.theorem_page import PICTURE, RESULT, TheoremFindings, read_theorem, section
from fedqueue_reproduction.theorem_run import Depth, watch
from fedqueue_reproduction.theorem_text import verdict
from tests.conftest import check_refusal

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
TWO = str(EXPERIMENTS / "theorem-two.toml")
TIMING = str(EXPERIMENTS / "timing.toml")
QUICK = ["--seeds", "2", "--models", "2", "--draws", "2"]
DIGITS = ["--set", "task.name=digits", "task.optimizer=sgd", "run.rounds=3", "run.learning_rate=0.05"]


def measured(capsys: Any, *args: str) -> dict[str, Any]:
    assert main(["bound", "--theorem", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_digits_by_default_are_measured_at_their_rate_and_at_half_of_what_is_allowed(in_tmp: Path, capsys: Any) -> None:
    found = measured(capsys, TIMING, *QUICK, *DIGITS, "--out", "new/r.json", "--plot", "new/p.png")
    assert list(found) == ["command", "date", "machine", "cases"]
    chosen, again = found["cases"]
    assert (chosen["chosen"], again["chosen"]) == (True, False)
    assert [run["seed"] for run in chosen["runs"]] == [1, 2]
    stated = chosen["found"]["conditions"][0]
    assert (stated["held"], chosen["found"]["rate"]) == (0, 0.05)
    assert again["found"]["rate"] == floored(stated["rate"] / 2)
    assert again["found"]["conditions"][0]["held"] == 2
    for case in found["cases"]:
        assert case["found"]["measured"] < case["found"]["stated_bound"]
        for run in case["runs"]:
            constants = run["constants"]
            assert constants["least_steps"] >= 10
            assert constants["least_stride"] > 0.999 * constants["rate"] * constants["least_steps"]
            assert constants["most_stride"] < 1.001 * constants["rate"] * constants["most_steps"]
            assert 0 < run["mean_smoothness"] <= constants["smoothness"]
            assert constants["smoothness"] == max(run["searched"], run["secant"])
            assert constants["gap"] >= run["least_gap"]
    assert json.loads(Path("new/r.json").read_text()) == found
    assert Path("new/p.png").read_bytes().startswith(b"\x89PNG")


def test_same_command_measures_the_same_whatever_the_number_of_processes(in_tmp: Path, capsys: Any) -> None:
    one, two = (measured(capsys, TIMING, *QUICK, *DIGITS, "--no-plots", "--jobs", jobs)["cases"] for jobs in ("1", "2"))
    assert one == two
    assert not list(in_tmp.iterdir())


def test_person_sees_constants_conditions_bounds_and_a_verdict(in_tmp: Path, capsys: Any) -> None:
    assert main(["bound", "--theorem", TWO, *QUICK, "--set", "run.rounds=40", "--least-loss", "0.5"]) == 0
    out = capsys.readouterr().out
    for said in ("theorem-two: rate 0.0025, 40 rounds, 2 seeds (1 to 2)", "known from", "eta <= 1 / (8 L E_max)"):
        assert said in out
    assert "The theorem's condition on the rate holds." in out
    assert "plot: theorem-two-bound.png" in out
    assert Path("theorem-two-bound.png").stat().st_size > 20_000


def test_broken_bound_is_said_to_be_broken(in_tmp: Path, capsys: Any) -> None:
    changes = ["--set", "run.rounds=300", "run.learning_rate=0.02"]
    few = ["--seeds", "1", "--models", "2", "--least-loss", "0.5", "--no-plots"]
    assert main(["bound", "--theorem", TWO, *few, *changes, "--out", "r.json"]) == 0
    assert "The stated bound with C0 = C1 = 1 is broken" in capsys.readouterr().out
    _, (one,) = theorem_results.load(Path("r.json"))
    assert one.holds("stated")
    assert one.least_constant == pytest.approx(one.measured[-1].mean / (2 * 0.02), rel=1e-3), "D is 0, L and G are 1"
    assert one.is_above


CASES = """
[[case]]
name = "small"
label = "A small one"
config = "{config}"
changes = ["run.rounds=30"]
seeds = 1
models = 2
least_loss = 0.5
about = "About it."

[[case]]
name = "images"
config = "{timing}"
changes = ["task.name=mnist", "task.optimizer=sgd"]
"""


def test_file_of_cases_is_run_and_a_case_without_its_data_is_left_out(
    in_tmp: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDQUEUE_DATA", str(in_tmp / "nothing"))
    Path("c.toml").write_text(CASES.format(config=TWO, timing=TIMING))
    assert main(["bound", "--theorem", "c.toml", "--no-plots", "--json"]) == 0
    caught = capsys.readouterr()
    (case,) = json.loads(caught.out)["cases"]
    assert (case["name"], case["label"], case["about"], len(case["runs"])) == ("small", "A small one", "About it.", 1)
    assert case["runs"][0]["rounds"] == 30
    assert caught.err.count("\n") == 1
    assert caught.err.startswith("fedqueue: warning: images is left out: ")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["gone.toml"], "gone.toml"),
        (["bad.toml"], "bad.toml: case.one.colour: unknown key"),
        (["case.toml"], "case.toml: one: "),
        (["twice.toml"], "two cases are called 'one'"),
        ([TIMING], "task 'timing' trains nothing"),
        ([TWO, "--set", "run.strategy=jit"], "the theorem is about 'fedqueue'"),
        ([TWO, "--seeds", "0"], "--seeds must be 1 or more"),
        ([TWO, "--jobs", "0"], "--jobs must be 1 or more"),
        ([TWO, "--models", "1"], "--models must be 2 or more"),
        ([TWO, "--draws", "0"], "--draws must be 1 or more"),
        ([TWO, "--least-loss", "nan"], "--least-loss must be a number"),
        ([TWO, "--out", "r.txt"], "--out r.txt: must end in .json"),
        ([TWO, "--gamma", "1"], "--gamma does not go with --theorem"),
        ([TWO, "--epsilon", "0.1"], "--epsilon does not go with --theorem"),
        ([TWO, "--cases", "c.csv"], "or else --theorem"),
        ([TWO, "--set", "run.rounds=3", "--least-loss", "0.9", "--seeds", "1"], "seed 1: a loss of"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(args: list[str], says: str, in_tmp: Path, capsys: Any) -> None:
    Path("bad.toml").write_text(f'[[case]]\nname = "one"\nconfig = "{TWO}"\ncolour = 3\n')
    Path("case.toml").write_text('[[case]]\nname = "one"\nconfig = "gone.toml"\n')
    Path("twice.toml").write_text(f'[[case]]\nname = "one"\nconfig = "{TWO}"\n' * 2)
    check_refusal(["bound", "--theorem", *args], says, capsys)


@pytest.mark.parametrize(
    "args", [["--seeds", "3"], ["--set", "run.rounds=3"], ["--least-loss", "0"], ["--out", "r.json"]]
)
def test_options_of_the_theorem_are_refused_without_it(args: list[str], in_tmp: Path, capsys: Any) -> None:
    Path("e.txt").write_text("1\n")
    check_refusal(["bound", "e.txt", "--round-length", "10", *args], f"{args[0]} is for --theorem", capsys)


# What is committed --------------------------------------------------------------------------------------


def committed() -> TheoremFindings:
    found = read_theorem(EXPERIMENTS / "results")
    assert found is not None, "missing: fedqueue bound --theorem --out experiments/results/theorem.json"
    return found


def test_committed_figures_follow_from_what_was_measured() -> None:
    lines = json.loads((EXPERIMENTS / "results" / RESULT).read_text())["cases"]
    for one, line in zip(committed().everything, lines, strict=True):
        again = theorem_results.as_json(one)["found"]
        assert set(again) == set(line["found"])
        for name, value in again.items():
            if name == "conditions":
                assert [c["held"] for c in value] == [c["held"] for c in line["found"]["conditions"]]
            else:
                kept = line["found"][name]
                assert value == (kept if kept is None else pytest.approx(kept, rel=1e-3))


@pytest.mark.parametrize(("name", "rounds"), [("two", 60), ("linear", 6), ("digits", 6)])
def test_committed_gradients_are_what_the_code_gives(name: str, rounds: int) -> None:
    one = next(one for one in committed().everything if one.name == name and one.chosen)
    kept = one.runs[0]
    config = load(EXPERIMENTS / one.config, [*one.changes, f"run.seed={kept.seed}", f"run.rounds={rounds}"])
    again = watch(config, Depth(models=2, draws=1, least_loss=one.least_loss))
    common = [r for r in again.at if r in kept.at]
    assert len(common) > 4
    for r in common:
        assert again.measured[again.at.index(r)] == pytest.approx(kept.measured[kept.at.index(r)], rel=1e-4, abs=1e-9)


def test_committed_cases_are_those_of_the_file_at_both_rates() -> None:
    names = re.findall(r'^name = "(\w+)"', (EXPERIMENTS / "theorem.toml").read_text(), re.MULTILINE)
    everything = committed().everything
    assert [one.name for one in everything if one.chosen] == names
    for one in everything:
        assert one.chosen or one.holds("stated"), "the second rate is one that the theorem allows"
        if one.chosen and not one.holds("stated") and one.name != "adam":
            assert any(other.name == one.name for other in everything if not other.chosen)


def test_committed_explicit_bound_holds_wherever_its_conditions_do() -> None:
    proved = [one for one in committed().everything if one.holds("explicit")]
    assert len(proved) >= 4
    assert all(one.is_above for one in proved)


def test_section_says_where_the_bound_is_broken_and_where_it_says_something() -> None:
    found = committed()
    text = section(found, "made.", {"experiments": "../e", "results": "../r"}, Path("images") / PICTURE)
    assert text.startswith("## Theorem 1\n")
    assert f"(../r/{RESULT})" in text
    assert "With C0 = C1 = 1 it is broken in *One number, two facilities, rate 0.0025*" in text
    for one in found.everything:
        assert text.count(f"| {one.label}, rate ") >= 3, "a line in each table"
        assert verdict(one)
