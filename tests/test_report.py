"""The report of real small runs: complete, self-contained, true to the summary, safe against what outsiders write."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue.config import Config
from fedqueue.errors import ConfigError, RunFolderError
from fedqueue.ledger import FILE
from fedqueue.report import Curve, comparison_plot, read_run, run_plots, write_report
from fedqueue.report.plots import mean_curve
from fedqueue.report.timeline import window
from fedqueue.runs import SUMMARY
from fedqueue.sim.runner import simulate
from tests.conftest import ONE_A_ROUND, config_of, facility

FAULTS: list[dict[str, Any]] = [
    {"kind": "fail", "facility": "north", "jobs": [1, 2, 3]},
    {"kind": "preempt", "facility": "south", "probability": 0.4},
    {"kind": "outage", "facility": "east", "at": 22.0, "seconds": 15.0, "loses_jobs": True},
]
STRATEGIES = ("fedqueue", "jit", "fedbuff")


def config(strategy: str, rounds: int = 10) -> Config:
    sites = [facility(name, nodes=n, megabytes_per_second=2.0) for name, n in (("north", 1), ("south", 3), ("east", 2))]
    options = ONE_A_ROUND if strategy == "jit" else {}
    return config_of(strategy, name="small", rounds=rounds, facilities=sites, faults=FAULTS, options=options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run folder a strategy, with faults; tests must not change them."""
    made = {}
    for strategy in STRATEGIES:
        made[strategy] = tmp_path_factory.mktemp("runs") / f"of-{strategy}"
        made[strategy].mkdir()
        simulate(config(strategy), folder=made[strategy])
    return made


@pytest.fixture
def copy_of(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda strategy: Path(shutil.copytree(runs[strategy], tmp_path / f"copy-{strategy}"))


def change_ledger(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / FILE)
    for statement in statements:
        assert db.execute(statement).rowcount > 0, statement
    db.commit()
    db.close()


def with_scores(folder: Path, scores: list[float]) -> None:
    """Write scores into a ledger and its summary as a training run would have."""
    db = sqlite3.connect(folder / FILE)
    ready = db.execute("SELECT at, body FROM events WHERE kind = 'ModelReady' ORDER BY seq").fetchall()
    first = db.execute("SELECT max(seq) + 1 FROM events").fetchone()[0]
    for place, ((at, body), score) in enumerate(zip(ready, scores, strict=False)):
        scored = {"at": at, "version": json.loads(body)["version"], "metrics": {"score": score, "loss": 1 - score}}
        row = (first + place, at, "ModelScored", None, json.dumps(scored), None)
        db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row)
    db.commit()
    db.close()
    (folder / SUMMARY).unlink()  # the report counts it again, from the ledger


class Page(HTMLParser):
    """Tables as rows of cells (exact numbers where the page has them), headings, and every tag and attribute."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tables: list[list[list[str]]] = []
        self.headings: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._exact: str | None = None
        self._open: list[str] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h1", "h2", "h3"):
            self.headings.append("")
        elif tag == "data":
            self._exact = dict(attrs)["value"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag  # well formed

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += (self._exact or data) if "th" not in self._open else f"{data} "
            self._exact = None
        elif self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings[-1] += data

    def columns(self, table: int) -> dict[str, list[str]]:
        """By head, without the first one; the cells from top to bottom."""
        heads, *rows = self.tables[table]
        return {head.strip(): [row[place] for row in rows] for place, head in enumerate(heads)}


def figures_of(columns: dict[str, list[str]], row: int) -> dict[str, float | None]:
    """The numbers in one row of a table; None where it has a dash."""
    found: dict[str, float | None] = {}
    for head, cells in columns.items():
        try:
            found[head] = float(cells[row])
        except ValueError:
            found[head] = None
    return found


def test_page_has_every_section_and_stands_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    out = write_report(list(runs.values()), tmp_path / "pages" / "report.html")
    page = Page(out)
    assert page.headings[0] == "small: 3 runs"
    expected = ["Comparison"]
    for strategy in STRATEGIES:
        expected += [f"of-{strategy}: {strategy}, seed 1", "Facilities", "Failures", "Suspensions and outages"]
    assert page.headings[1:] == expected
    for strategy in STRATEGIES:
        assert page.text.count(f'aria-label="timeline of of-{strategy}"') == 1
    assert "all rounds done" in page.text
    assert "lost in the outage" in page.text
    assert "preempted" in page.text
    assert "3 failures in a row" in page.text

    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"\w+://[^\s\"'<>)]*", page.text)) <= namespaces
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value is not None
                assert value.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in page.text
    anchors = {attributes["id"] for tag, attributes in page.tags if tag == "h2" and "id" in attributes}
    assert {"run-1", "run-2", "run-3"} <= anchors

    beside = {path.name for path in (out.parent / "report-plots").iterdir()}
    assert {"run-1-fedqueue-seed1-timeline.png", "run-3-fedbuff-seed1-staleness.png"} <= beside


def test_numbers_of_the_tables_equal_the_summaries(runs: dict[str, Path], tmp_path: Path) -> None:
    page = Page(write_report(list(runs.values()), tmp_path / "report.html"))
    fast, cost = page.columns(0), page.columns(1)
    for row, (strategy, folder) in enumerate(runs.items()):
        summary = json.loads((folder / SUMMARY).read_text())
        assert fast["strategy"][row] == strategy
        assert figures_of(fast, row) | {"run": None, "strategy": None} == {
            "run": None,
            "strategy": None,
            "seed": summary["seed"],
            "rounds": summary["rounds"],
            "virtual s": summary["virtual_seconds"],
            "late probability": summary["late_probability"],
            "missed cutoff": summary["missed_cutoff"],
            "staleness most": summary["max_staleness"],
        }
        assert figures_of(cost, row) | {"run": None, "strategy": None} == {
            "run": None,
            "strategy": None,
            "seed": summary["seed"],
            **{f"jobs {key}": value for key, value in summary["jobs"].items()},
            **{f"updates {key}": value for key, value in summary["updates"].items()},
            "local steps": summary["local_steps"],
            "model transfers": summary["model_transfers"],
            "cost node s": summary["node_seconds"],
            "idle node s": summary["idle_node_seconds"],
        }
        facilities = page.columns(2 + 3 * row)
        assert facilities["facility"] == ["north", "south", "east", "all"]
        total = figures_of(facilities, -1)
        assert total["jobs submitted"] == summary["jobs"]["submitted"]
        assert total["jobs failed"] == summary["jobs"]["failed"] > 0
        assert total["steps done"] == summary["local_steps"]
        assert total["cost node s"] == pytest.approx(summary["node_seconds"])
        assert {key: total[f"updates {key}"] for key in summary["updates"]} == summary["updates"]


def test_cut_off_run_is_counted_from_its_ledger_and_says_so(
    runs: dict[str, Path], copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy_of("jit")
    (folder / SUMMARY).unlink()
    counted, kept = dict(read_run(folder).summary), dict(read_run(runs["jit"]).summary)
    assert counted == kept | {"wall_seconds": None}

    change_ledger(
        folder,
        "DELETE FROM commands WHERE seq IN (SELECT seq FROM events WHERE at > 33)",
        "DELETE FROM events WHERE at > 33",
        "DELETE FROM meta WHERE key = 'stopped'",
    )
    page = Page(write_report([folder], tmp_path / "cut.html"))
    assert "summary.json is missing. The run was cut off, or still goes on." in page.text
    assert figures_of(page.columns(0), 0)["rounds"] == 3

    change_ledger(folder, "DELETE FROM commands", "DELETE FROM events")
    assert Page(write_report([folder], tmp_path / "empty.html")).headings[-1] == "Suspensions and outages"


def test_hostile_text_stays_text(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_of("fedqueue")
    hostile = '<script>alert(1)</script>"><img src=x onerror=alert(1)>&$x_1$'
    text = hostile.replace('"', '\\"')
    change_ledger(
        folder,
        f"UPDATE events SET body = replace(body, 'failed (simulated)', '{text}') WHERE kind = 'JobFailed'",
        f"UPDATE commands SET body = replace(body, 'failed (simulated)', '{text}') WHERE kind = 'Record'",
        f"""UPDATE meta SET value = replace(value, '"small"', '"{text}"') WHERE key = 'config'""",
        f"UPDATE meta SET value = '\"{text}\"' WHERE key IN ('stopped', 'version')",
        *(
            f"UPDATE {table} SET {column} = replace({column}, 'north', '{text}') WHERE {column} LIKE '%north%'"
            for table, column in (
                ("meta", "value"),
                ("events", "body"),
                ("events", "job"),
                ("commands", "body"),
                ("commands", "job"),
            )
        ),
    )
    page = Page(write_report([folder, folder], tmp_path / "report.html"))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    cells = [cell for table in page.tables for row in table for cell in row]
    assert hostile in cells


def test_plots_of_a_run_are_pictures(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    from matplotlib.image import imread

    jit, fedbuff = copy_of("jit"), copy_of("fedbuff")
    with_scores(jit, [0.5, 0.7, 0.8, 0.86, 0.84, 0.91, 0.93, 0.96])
    assert [path.name for path in run_plots(jit)] == ["score.png", "timeline.png", "staleness.png", "forecast.png"]
    assert [path.name for path in run_plots(fedbuff)] == ["timeline.png", "staleness.png"]  # it forecasts nothing

    curves: dict[str, list[Curve]] = {
        "jit": [read_run(jit).scores, [(8.0, 0.6), (50.0, 0.9)]],
        "fed & $buff$": [[(5.0, 0.2)], []],
    }
    both = comparison_plot(curves, tmp_path / "new" / "both.png", targets=[0.85, 0.9], title="Two")
    for path in (*(jit / "plots").iterdir(), *(fedbuff / "plots").iterdir(), both):
        picture = imread(path)
        assert min(picture.shape[:2]) > 300
        colours = np.unique((picture[..., :3] * 255).astype(int) @ [65536, 256, 1])
        assert len(colours) > 50, path.name

    page = Page(write_report([jit, fedbuff], tmp_path / "report.html"))
    row = figures_of(page.columns(0), 0)
    assert (row["score best"], row["score last"]) == (0.96, 0.96)
    assert (row["to 0.85 s"], row["to 0.90 s"], row["to 0.95 s"]) == (40.0, 60.0, 80.0)
    assert "not reached" in page.columns(0)["to 0.95 s"]


def test_timeline_of_a_long_run_shows_its_beginning(tmp_path: Path) -> None:
    simulate(config("jit", rounds=100), folder=tmp_path)
    run = read_run(tmp_path)
    assert run.end == 1000.0
    assert window(run) == 120.0
    assert len(run.cutoffs) == 100


def test_mean_curve_holds_scores_until_the_next_model() -> None:
    times, mean, low, high = mean_curve([[(1.0, 0.2), (3.0, 0.6)], [(2.0, 0.4), (4.0, 0.5)]])
    assert times == [2.0, 3.0, 4.0]
    assert mean == pytest.approx([0.3, 0.5, 0.55])
    assert (low, high) == ([0.2, 0.4, 0.5], [0.4, 0.6, 0.6])


def test_bad_input_is_named(tmp_path: Path, runs: dict[str, Path]) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        write_report([runs["jit"], tmp_path], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="at least one"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="no score to compare"):
        comparison_plot({"jit": [[]]}, tmp_path / "plot.png", targets=[], title="")


def test_plotting_leaves_matplotlib_as_it_was(copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    folder = copy_of("jit")
    run_plots(folder)
    assert dict(matplotlib.rcParams) == before
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"fedqueue\[plots\]"):
        run_plots(folder)
