"""What commands that read queue traces share: which file, which jobs, and tables of cases."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Final

from fedqueue.errors import DataError

CASE_COLUMNS: Final = ("case", "file", "procs", "requested", "round_length")


def procs_range(text: str | None) -> tuple[int, int] | None:
    """ValueError if it is no range.

    >>> procs_range("2-8"), procs_range("128")
    ((2, 8), (128, 128))
    """
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not dash)) or int(low) > int(high or low):
        raise ValueError(f"--procs must be A-B or A, found {text!r}")
    return int(low), int(high or low)


def read_cases(path: Path) -> list[dict[str, Any]]:
    """A dict a row, with the keys of `CASE_COLUMNS`: text, and numbers of seconds; None: any."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in CASE_COLUMNS if name not in (reader.fieldnames or ())]
            rows = [{name: (row[name] or "").strip() for name in CASE_COLUMNS} for row in reader if not missing]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if missing or not rows:
        what = f"column {missing[0]} is missing" if missing else "has no case"
        raise DataError(f"{path}: {what}; it needs {', '.join(CASE_COLUMNS)}")
    cases = []
    for row in rows:
        try:
            requested = float(row["requested"]) if row["requested"] else None
            length = float(row["round_length"])
        except ValueError as error:
            raise DataError(f"{path}: {row['case']}: {error}") from None
        cases.append({**row, "procs": row["procs"] or None, "requested": requested, "round_length": length})
    return cases
