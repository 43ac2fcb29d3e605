"""Data files are found, checked, fetched when public, and their absence is explained. No network is used."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedqueue import data
from fedqueue.errors import DataError

NAME = "mnist/t10k-labels-idx1-ubyte.gz"
CONTENT = b"stands in for the labels"


class Network:
    """Answers in place of the mirrors and remembers what was asked."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, url: str, *, timeout: float) -> io.BytesIO:
        assert timeout > 0
        self.asked.append(url)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and a known file small enough for a test."""
    root = tmp_path / "outer" / "root"
    root.mkdir(parents=True)
    monkeypatch.setenv("FEDQUEUE_DATA", str(root))
    monkeypatch.setitem(data.SHA256, NAME, hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(data, "_verified", set())
    return root


def connect(monkeypatch: pytest.MonkeyPatch, *answers: bytes | Exception) -> Network:
    network = Network(*answers)
    monkeypatch.setattr(urllib.request, "urlopen", network)
    return network


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_folder_itself_comes_before_its_data_folder_and_its_parent(folder: Path) -> None:
    for place in (folder.parent, folder / "data", folder):
        path = put(place / "traces" / "a.csv", b"1")
        assert data.find("traces/a.csv") == path


def test_the_folder_is_in_the_users_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDQUEUE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.root() == tmp_path / ".cache" / "fedqueue"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert data.root() == tmp_path / "elsewhere" / "fedqueue"


def test_a_known_file_is_checked_once(folder: Path) -> None:
    path = put(folder / NAME, CONTENT)
    assert data.find(NAME) == path
    path.write_bytes(b"changed behind our back")
    assert data.find(NAME) == path


def test_a_damaged_file_is_refused_and_kept(folder: Path) -> None:
    path = put(folder / NAME, CONTENT[:-1])
    with pytest.raises(DataError, match="is damaged") as caught:
        data.find(NAME)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == CONTENT[:-1]


def test_a_missing_public_file_is_fetched_from_the_first_mirror_that_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = connect(monkeypatch, b"a log-in page", CONTENT)
    path = data.find(NAME)
    assert path == folder / NAME
    assert path.read_bytes() == CONTENT
    assert network.asked == [mirror + NAME for mirror in data.MIRRORS]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert data.find(NAME) == path
    assert len(network.asked) == 2


def test_without_a_network_one_line_says_what_where_and_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, urllib.error.URLError("no route"), TimeoutError("timed out"))
    with pytest.raises(DataError) as caught:
        data.find(NAME)
    message = str(caught.value)
    for part in (NAME, str(folder / NAME), str(folder / "data"), "no route", "timed out", "FEDQUEUE_DATA"):
        assert part in message
    assert "\n" not in message
    assert not list((folder / "mnist").iterdir())


def test_a_file_that_is_not_public_is_never_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = connect(monkeypatch)
    with pytest.raises(DataError, match=r"traces/none\.csv is missing; looked for .* set FEDQUEUE_DATA"):
        data.find("traces/none.csv")
    assert network.asked == []
