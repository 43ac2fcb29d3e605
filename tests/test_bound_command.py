"""`fedqueue bound` from the command line: what it takes, what it prints, what it refuses; and what is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue import data
from fedqueue.cli import main
from tests.conftest import check_refusal
from tests.test_bound import luck
from tests.test_simulation import write_trace

ROOT = Path(__file__).parent.parent
TIMING = ROOT / "experiments" / "timing.toml"
CASES = ROOT / "experiments" / "queue-cases.csv"
RESULTS = ROOT / "experiments" / "results" / "bound.json"

KEYS = [
    *("source", "kind", "facilities", "rounds", "round_length", "epsilon", "margin", "gamma", "shift", "errors"),
    *("lemma", "checks", "rules", "worst", "by_facility", "observed", "notes", "verdict"),
]


def numbers(seed: int = 1, count: int = 200) -> str:
    return "".join(f"{x}\n" for x in luck(seed).standard_normal(count))


def printed(capsys: Any, *args: str) -> dict[str, Any]:
    assert main(["bound", *args, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_timing_experiment_gives_one_object_with_the_promised_keys_and_a_plot(in_tmp: Path, capsys: Any) -> None:
    assert main(["simulate", str(TIMING), "--no-plots", "--json", "--out", "r"]) == 0
    summary = json.loads(capsys.readouterr().out)
    found = printed(capsys, "r")
    assert list(found) == KEYS
    assert list(found["by_facility"]) == ["first", "second", "third", "fourth"]
    assert (found["facilities"], found["rounds"], found["round_length"], found["margin"]) == (4, 50, 10.0, 2.0)
    assert [check["rho_from"] for check in found["checks"]] == ["all errors", "plain sd", "first half"]
    assert list(found["rules"]["of_run"]) == ["given", "lemma", "quantile", "log", "log quantile"]
    assert found["observed"]["max_staleness"] == summary["max_staleness"] <= found["lemma"]["sharper_bound"]
    given = found["rules"]["of_run"]["given"]["deferred"]
    assert given == pytest.approx(summary["missed_cutoff"], abs=0.02), "but for budgets that no whole step fits"
    assert found["lemma"]["needed_margin"] == max(f["needed_margin"] for f in found["by_facility"].values())
    assert Path("r/plots/bound.png").stat().st_size > 20_000


def test_person_sees_tables_and_a_verdict_within_their_terminal(in_tmp: Path, capsys: Any) -> None:
    assert main(["simulate", str(TIMING), "--no-plots", "--out", "r"]) == 0
    capsys.readouterr()
    assert main(["bound", "r", "--gamma", "1", "--no-plots"]) == 0
    out = capsys.readouterr().out
    assert "On these errors the Lemma needs a margin of" in out
    assert "no round has time left to train" in out
    assert "gamma = 1 needs a margin of" in out
    assert not Path("r/plots").exists()


def test_options_of_the_command_line_count_most(in_tmp: Path, capsys: Any) -> None:
    Path("e.txt").write_text(numbers())
    found = printed(
        capsys,
        *("e.txt", "--facilities", "8", "--rounds", "30", "--epsilon", "0.2", "--round-length", "5", "--margin", "1"),
        *("--gamma", "0.5", "--plot", "new/p.png"),
    )
    assert (found["facilities"], found["rounds"], found["epsilon"], found["round_length"]) == (8, 30, 0.2, 5.0)
    lemma = found["lemma"]
    assert lemma["needed_margin"] == pytest.approx(lemma["rho"] * sqrt(2 * log(8 * 30 / 0.2)), rel=1e-4)
    assert lemma["margin_for_gamma"] == pytest.approx(lemma["needed_margin"] - 0.5 * 5, rel=1e-4)
    assert Path("new/p.png").exists()


def test_first_errors_of_each_facility_can_be_left_out(in_tmp: Path, capsys: Any) -> None:
    rows = [f"east,{1000 if i < 3 else i % 7}\nwest,{i % 5}\n" for i in range(60)]
    Path("e.csv").write_text("facility,error\n" + "".join(rows))
    assert printed(capsys, "e.csv", "--round-length", "10", "--no-plots")["by_facility"]["east"]["stalest"] == 100
    found = printed(capsys, "e.csv", "--round-length", "10", "--no-plots", "--warm-up", "3")
    assert (found["errors"], found["by_facility"]["east"]["stalest"]) == (2 * 57, 1)


def test_errors_alone_give_no_log_space_and_say_so(in_tmp: Path, capsys: Any) -> None:
    Path("plain.txt").write_text(numbers())
    named_rows = (f"{'west' if i % 2 else 'east'},{error}\n" for i, error in enumerate(numbers().split()))
    Path("named.csv").write_text("facility,error\n" + "".join(named_rows))
    plain = printed(capsys, "plain.txt", "--round-length", "10")
    named = printed(capsys, "named.csv", "--round-length", "10", "--no-plots")
    assert (list(plain["by_facility"]), list(named["by_facility"])) == (["all"], ["east", "west"])
    assert (plain["facilities"], plain["rounds"], named["facilities"], named["rounds"]) == (1, 200, 2, 100)
    for found in (plain, named):
        assert "log" not in found["rules"]["of_run"]
        assert any("only errors were given" in note for note in found["notes"])
    assert Path("plain-bound.png").exists()


def test_delays_and_forecasts_in_a_file_give_log_space(in_tmp: Path, capsys: Any) -> None:
    rows = "".join(f"{x},{2.0}\n" for x in np.exp(luck().standard_normal(100)))
    Path("pairs.csv").write_text("admission_delay,expected_delay\n" + rows)
    found = printed(capsys, "pairs.csv", "--round-length", "10", "--no-plots")
    assert (found["shift"], found["by_facility"]["all"]["log"]["shape"]["errors"]) == (0, 100)
    Path("pairs.csv").write_text("admission_delay,expected_delay\n0,2.0\n" + rows)
    assert printed(capsys, "pairs.csv", "--round-length", "10", "--no-plots")["shift"] == 1, "0 has no logarithm"


def small_trace(path: str) -> None:
    waits = np.exp(3 + luck().standard_normal(900)).astype(int).tolist()
    write_trace(Path(path), [(i * 50, wait, 600, 1 + i % 3) for i, wait in enumerate(waits)])


def test_trace_is_replayed_for_the_jobs_of_a_shape(in_tmp: Path, capsys: Any) -> None:
    small_trace("t.csv")
    every = printed(capsys, "t.csv", "--round-length", "100", "--warm-up", "0", "--no-plots")
    one = printed(capsys, "t.csv", "--round-length", "100", "--warm-up", "0", "--procs", "2", "--no-plots")
    assert every["rounds"] > one["rounds"] > 200
    assert one["by_facility"]["t"]["log"] is not None
    again = printed(capsys, "t.csv", "--round-length", "100", "--predictor", "rolling-median", "--no-plots")
    assert again["errors"] == every["errors"] - 150, "warm-up"


def test_cases_are_the_same_figures_as_one_by_one(in_tmp: Path, capsys: Any) -> None:
    small_trace("t.csv")
    Path("c.csv").write_text("case,file,procs,requested,round_length\na,t.csv,1-2,,100\nb,t.csv,3,700,200\n")
    assert main(["bound", "--cases", "c.csv", "--json"]) == 0
    many = json.loads(capsys.readouterr().out)
    alone = printed(capsys, "t.csv", "--procs", "1-2", "--round-length", "100", "--no-plots")
    assert [case["case"] for case in many["cases"]] == ["a", "b"]
    assert {key: many["cases"][0][key] for key in KEYS} == alone
    assert main(["bound", "--cases", "c.csv"]) == 0
    assert "Lemma 1 on traces" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.5\n" * 40, "they have no spread"),
        ("3\n", "fewer than 20"),
        ("facility,error\na,1\nb,-2\n", "fewer than 20"),
        ("admission_delay,expected_delay\n" + "0,0\n" * 40, "they have no spread"),
        ("error\n" + "".join(f"{10 + x % 3}\n" for x in range(60)), "assumes a mean error of 0; that of all is 11 s"),
    ],
    ids=["all the same", "one", "one of each", "no wait", "too low a forecast"],
)
def test_odd_samples_are_drawn_and_told_without_a_slip(text: str, says: str, in_tmp: Path, capsys: Any) -> None:
    Path("odd.csv").write_text(text)
    found = printed(capsys, "odd.csv", "--round-length", "10")
    assert "NaN" not in json.dumps(found)
    assert "Infinity" not in json.dumps(found)
    assert main(["bound", "odd.csv", "--round-length", "10"]) == 0
    caught = capsys.readouterr()
    assert says in caught.out + caught.err
    assert Path("odd-bound.png").stat().st_size > 10_000


def test_few_errors_are_a_warning_of_one_line(in_tmp: Path, capsys: Any) -> None:
    Path("few.txt").write_text(numbers(count=19))
    assert main(["bound", "few.txt", "--round-length", "10", "--no-plots"]) == 0
    caught = capsys.readouterr()
    assert caught.err.count("\n") == 1
    assert "fewer than 20 errors" in caught.err
    Path("enough.txt").write_text(numbers(count=20))
    assert main(["bound", "enough.txt", "--round-length", "10", "--no-plots"]) == 0
    assert capsys.readouterr().err == ""


FILES = {
    "good.txt": numbers(),
    "empty.csv": "",
    "header.csv": "facility,error\n",
    "other.csv": "facility,mistake\neast,1\n",
    "words.csv": "error\n1\ntwo\n",
    "nan.txt": "1\nnan\n",
    "ragged.csv": "facility,error\neast,1\nwest\n",
    "negative.csv": "admission_delay,expected_delay\n1,-2\n",
    "zero.csv": "admission_delay,expected_delay\n0,2\n1,1\n",
    "trace.csv": "submit_s,wait_s,run_s,requested_s,procs\n0,1,1,60,1\n200,1,1,60,1\n",
    "cases.csv": "case,file,procs\na,trace.csv,1\n",
    "badcase.csv": "case,file,procs,requested,round_length\na,trace.csv,1,,soon\n",
}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "needs a run folder"),
        (["good.txt"], "say it with --round-length"),
        (["gone"], "gone"),
        (["folder"], "is not a run folder"),
        (["empty.csv", "--round-length", "10"], "no column error"),
        (["header.csv", "--round-length", "10"], "holds no error"),
        (["other.csv", "--round-length", "10"], "other.csv: has no column error"),
        (["words.csv", "--round-length", "10"], "line 3: 'two' is no number of seconds"),
        (["nan.txt", "--round-length", "10"], "line 2: 'nan'"),
        (["ragged.csv", "--round-length", "10"], "line 3 has 1 columns"),
        (["negative.csv", "--round-length", "10"], "line 2: a delay of -2 s"),
        (["zero.csv", "--round-length", "10", "--shift", "0"], "has no logarithm"),
        (["good.txt", "--round-length", "10", "--margin", "-1"], "margin must be 0 or more"),
        (["good.txt", "--round-length", "10", "--margin", "nan"], "margin must be 0 or more"),
        (["good.txt", "--round-length", "0"], "round_length must be more than 0"),
        (["good.txt", "--round-length", "10", "--epsilon", "0"], "epsilon must be more than 0"),
        (["good.txt", "--round-length", "10", "--epsilon", "1"], "epsilon must be more than 0 and less than 1"),
        (["good.txt", "--round-length", "10", "--facilities", "0"], "facilities must be 1 or more"),
        (["good.txt", "--round-length", "10", "--rounds", "0"], "rounds must be 1 or more"),
        (["good.txt", "--round-length", "10", "--gamma", "-1"], "gamma must be 0 or more"),
        (["good.txt", "--round-length", "10", "--warm-up", "200"], "there is no error left"),
        (["good.txt", "--round-length", "10", "--warm-up", "-1"], "--warm-up must be 0 or more"),
        (["good.txt", "--round-length", "10", "--procs", "4"], "--procs is for traces"),
        (["trace.csv"], "say how long they are with --round-length"),
        (["trace.csv", "--round-length", "-1"], "round_length must be more than 0"),
        (["trace.csv", "--round-length", "60", "--procs", "8-4"], "--procs must be A-B or A"),
        (["trace.csv", "--round-length", "60", "--procs", "8"], "no job has this shape"),
        (["trace.csv", "--round-length", "60", "--smoothing", "2"], "--smoothing must be"),
        (["trace.csv", "--round-length", "60", "--warm-up", "9"], "there is no error left"),
        (["trace.csv", "--round-length", "60", "--predictor", "oracle"], "invalid choice"),
        (["--cases", "cases.csv"], "column requested is missing"),
        (["--cases", "badcase.csv"], "badcase.csv: a: could not convert"),
        (["--cases", "cases.csv", "--procs", "3"], "--procs does not go with --cases"),
        (["good.txt", "--cases", "cases.csv"], "or else --cases"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(args: list[str], says: str, in_tmp: Path, capsys: Any) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("folder").mkdir()
    check_refusal(["bound", *args], says, capsys)


# What is committed --------------------------------------------------------------------------------------------


def committed() -> dict[tuple[str, float], Mapping[str, Any]]:
    return {(case["case"], case["round_length"]): case for case in json.loads(RESULTS.read_text())["cases"]}


def test_committed_figures_are_what_the_code_gives(in_tmp: Path, capsys: Any) -> None:
    wanted = [line for line in CASES.read_text().splitlines() if re.match(r"case,|(kth|gaia).*,7200$", line)]
    for line in wanted[1:]:
        name = f"traces/{line.split(',')[1]}"
        if not any(path.exists() for path in data.candidates(name)):
            pytest.skip(f"{name} is not under {data.root()}: set FEDQUEUE_DATA to the folder that has it")
    Path("c.csv").write_text("\n".join(wanted))
    assert main(["bound", "--cases", "c.csv", "--json"]) == 0
    for case in json.loads(capsys.readouterr().out)["cases"]:
        kept = committed()[case["case"], case["round_length"]]
        assert case["errors"] == kept["errors"]
        assert case["lemma"]["needed_margin"] == pytest.approx(kept["lemma"]["needed_margin"], rel=1e-4)
        for name, rule in case["rules"]["of_round"].items():
            for key in ("margin", "trains", "budget", "deferred"):
                assert rule[key] == pytest.approx(kept["rules"]["of_round"][name][key], rel=1e-4)


def test_committed_cases_are_those_of_the_table_of_cases() -> None:
    listed = [line.split(",") for line in CASES.read_text().splitlines()[1:]]
    assert list(committed()) == [(row[0], float(row[4])) for row in listed]


def test_table_of_the_protocol_page_has_the_committed_figures() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for name, length, cells in rows:
        case = committed()[name, float(length.replace(",", ""))]
        (figures,) = case["by_facility"].values()
        shape, logs, quantile = figures["shape"], figures["log"], case["rules"]["of_round"]["log quantile"]
        checks = {check["rho_from"]: check["above"] for check in case["checks"]}
        found = [
            *(case["errors"], shape["excess_kurtosis"], shape["proxy_ratio"], figures["needed_margin"]),
            *(checks["plain sd"], checks["first half"], logs["shape"]["sd"], logs["shape"]["excess_kurtosis"]),
            *(logs["shape"]["proxy_ratio"], logs["factor"], 100 * logs["trains"], 100 * quantile["trains"]),
        ]
        found[3] /= case["round_length"]
        said = [float(cell.replace(",", "").replace("\u2212", "-").removesuffix(" %")) for cell in cells.split(" | ")]
        for value, shown in zip(found, said, strict=True):
            assert shown == pytest.approx(value, rel=0.01, abs=0.5 if shown == int(shown) else 0.05)
