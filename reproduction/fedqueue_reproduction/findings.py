"""What has been found: each experiment with its runs and what they make of the paper's claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedqueue.config import read_tree
from fedqueue_reproduction import results
from fedqueue_reproduction.claims import Judgement, Runs, assess
from fedqueue_reproduction.experiment import Claim, Experiment, Row, load, matches, setting_text
from fedqueue_reproduction.results import Results

# By how much hangs on them; others follow by name.
ORDER: Final = (
    *("synthetic", "tuned", "tuning", "ablation", "bound-grid", "admission", "variability", "gamma"),
    *("margin", "arrivals", "decay", "scalability", "skew"),
)


@dataclass(frozen=True)
class Findings:
    """An experiment, what has been run of it, and what follows for its claims."""

    experiment: Experiment
    results: Results | None  # None: not run yet
    runs: Runs
    judgements: tuple[tuple[Claim, Judgement], ...]

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def seeds(self) -> list[int]:
        """In which anything was run."""
        return sorted({seed for _, _, seed in self.results.runs}) if self.results else []

    def rows(self, setting: Mapping[str, str]) -> list[Row]:
        """Those that have runs under this setting."""
        name = setting_text(setting)
        return [row for row in self.experiment.rows if matches(setting, row.only) and self.runs.of(row.name, name)]

    def settings(self) -> list[dict[str, str]]:
        """Those with runs."""
        return [setting for setting in self.experiment.settings() if self.rows(setting)]


def findings_of(experiment: Experiment, found: Results | None) -> Findings:
    runs = Runs(found.sorted() if found else [])
    return Findings(
        experiment,
        found if runs else None,
        runs,
        tuple((claim, assess(experiment, claim, runs)) for claim in experiment.claims),
    )


def read_findings(experiments_dir: Path, results_dir: Path) -> list[Findings]:
    """Of all experiments in a folder; quick results are never counted."""
    paths = [path for path in experiments_dir.glob("*.toml") if "title" in read_tree(path)]
    paths.sort(key=lambda path: (ORDER.index(path.stem) if path.stem in ORDER else len(ORDER), path.stem))
    found = []
    for path in paths:
        kept = results.path_of(path, folder=results_dir)
        found.append(findings_of(load(path), results.read(kept) if kept.exists() else None))
    return found
