"""Results files: the records of an experiment, one a line, and on what machines they were made.

    {"experiment": "synthetic", "quick": false,
     "made": [{"command": "...", "date": "...", "machine": {...}}, ...],
     "runs": [
    {"row": "fedqueue", "setting": "data=full", "seed": 1001, "config": "...", "by": 0, ...},
    ...]}

`by` of a record says which entry of `made` it comes from. A file is written whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedqueue import comparison
from fedqueue.errors import ConfigError, StorageError

FOLDER: Final = "results"

RunKey = tuple[str, str, int]
"""Row, setting, seed."""


@dataclass
class Results:
    """What is known of an experiment so far."""

    experiment: str
    quick: bool = False
    made: list[dict[str, Any]] = field(default_factory=list)
    runs: dict[RunKey, dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Replaces an older record of the same run."""
        if provenance not in self.made:
            self.made.append(provenance)
        self.runs[key_of(record)] = {**record, "by": self.made.index(provenance)}

    def keep_only(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Drop the other records, and the machines that nothing is left of; returns how many were dropped."""
        left = {key: record for key, record in self.runs.items() if wanted(record)}
        dropped = len(self.runs) - len(left)
        used = sorted({record["by"] for record in left.values()})
        self.made = [self.made[by] for by in used]
        self.runs = {key: {**record, "by": used.index(record["by"])} for key, record in left.items()}
        return dropped

    def sorted(self) -> list[dict[str, Any]]:
        """All records, by row, setting and seed."""
        return [self.runs[key] for key in sorted(self.runs)]


def key_of(record: Mapping[str, Any]) -> RunKey:
    return record["row"], record["setting"], record["seed"]


def path_of(experiment: Path, *, quick: bool = False, folder: Path | None = None) -> Path:
    """Where the results of this experiment file lie."""
    name = f"{experiment.stem}.quick.json" if quick else f"{experiment.stem}.json"
    return (folder if folder is not None else experiment.parent / FOLDER) / name


def read(path: Path) -> Results:
    """A results file."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        runs = {key_of(record): record for record in tree["runs"]}
        return Results(tree["experiment"], tree["quick"], tree["made"], runs)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is no results file of an experiment; move it away, or use --force") from None


def write(path: Path, results: Results) -> None:
    """One record a line, so that a change of one run is a change of one line."""
    head = {"experiment": results.experiment, "quick": results.quick}
    lines = ",\n".join(json.dumps(record, separators=(",", ":"), allow_nan=False) for record in results.sorted())
    made = ",\n".join(json.dumps(one) for one in results.made)
    text = f'{json.dumps(head)[:-1]}, "made": [\n{made}\n], "runs": [\n{lines}\n]}}\n'
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror}; make room, then --resume") from None


def figure(record: Mapping[str, Any], key: str) -> float | None:
    """A figure of one record by its dotted key; None where the run has none, as a target that it never reached."""
    return comparison.figure(record, key)


def of_cell(records: Iterable[Mapping[str, Any]], row: str, setting: str) -> Sequence[Mapping[str, Any]]:
    """The records of one cell, by seed."""
    found = (record for record in records if record["row"] == row and record["setting"] == setting)
    return sorted(found, key=lambda record: int(record["seed"]))
