"""What a crash leaves of files, and the list of failpoints."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.journal import FILE as JOURNAL
from fedqueue.agent.journal import Journal
from fedqueue.coordinator.store import Store
from fedqueue.errors import StorageError
from tests.faults.harness import (
    SOURCE,
)


def kinds(home: Path) -> list[str]:
    with closing(Journal(home)) as journal:
        entries: Any = list(journal.lines())
        return [entry["kind"] for entry in entries]


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_journal_entries_that_belong_together_are_kept_or_lost_together(tmp_path: Path, lost: int) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "alone"})
    journal.append({"kind": "submitted", "sequence": 3}, {"kind": "report", "n": 1, "report": {"kind": "submitted"}})
    journal.close()
    path = tmp_path / JOURNAL
    os.truncate(path, path.stat().st_size - lost)  # as a crash leaves it
    assert kinds(tmp_path) == ["journal", "alone"]


@pytest.mark.parametrize("left", [b"", b'{"kind":"settled","sequence":3}\n', b"\xff\xfe\n"])
def test_a_journal_without_its_beginning_is_named_with_what_to_do(tmp_path: Path, left: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(left)
    with pytest.raises(StorageError, match=r"journal.jsonl: .*; put back the one that was there, or move it away"):
        kinds(tmp_path)
    (tmp_path / JOURNAL).unlink()
    assert kinds(tmp_path) == ["journal"]


def test_a_journal_that_cannot_be_made_short_stays_and_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (tmp_path / f"{JOURNAL}.part").mkdir()
    with pytest.raises(StorageError, match="a folder is in its place"):
        journal.rewrite([{"kind": "memory"}])
    journal.append({"kind": "after"})
    journal.close()
    assert kinds(tmp_path) == ["journal", "after"]


def test_a_journal_made_short_is_the_one_that_is_written_to(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "before"})
    journal.rewrite([{"kind": "memory"}])
    journal.append({"kind": "after"})
    journal.close()
    assert kinds(tmp_path) == ["memory", "after"]


def test_the_uploads_of_a_facility_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine, other = store.upload("a", 1, 0, 0, "f" * 64), store.upload("a-1", 0, 0, 0, "f" * 64)
    mine.touch()
    other.touch()
    store.drop_uploads("a", 1)
    assert (mine.exists(), other.exists()) == (False, True)


def test_the_newest_refused_updates_of_each_facility_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for facility, count in (("south-1", 2), ("south", 14)):
        for sequence in range(count):
            upload = store.upload(facility, sequence, 0, 0, "a" * 64)
            upload.write_bytes(b"bytes")
            os.utime(upload, (sequence, sequence))
            store.refuse(upload)
    kept = {path.name.rpartition("-")[0] for path in (tmp_path / "refused").iterdir()}
    assert kept == {"south-1@0-0-0", "south-1@1-0-0", *(f"south@{sequence}-0-0" for sequence in range(4, 14))}


def test_no_failpoint_is_listed_twice_or_dead() -> None:
    from fedqueue.files import MASKS, POINTS, RENEWAL

    every = (*POINTS, *RENEWAL, *MASKS)
    assert len(set(every)) == len(every)
    text = "".join(path.read_text() for path in (SOURCE / "fedqueue").rglob("*.py"))
    used: list[Any] = [point for point in every if f'failpoint("{point}")' in text]
    assert used == list(every)
