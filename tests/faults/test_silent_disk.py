"""Disks that give back other bytes than were written, and leave no trace of it: found at the very next use."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue import tensorfile, tensorsum
from fedqueue.agent.transport import CoordinatorUnreachableError
from fedqueue.coordinator.store import Store, traces
from fedqueue.coordinator.transfers import BlobError, send_file
from fedqueue.tensorbytes import Content, checksum
from fedqueue.tensorfile import ChangedFileError, TensorFileError
from fedqueue.tensorsum import FileContribution
from tests.coordinators import Served, serving, update
from tests.faults.test_hindered import FEDAVG, PAIR, objects, state, until_it_is_over
from tests.waiting import wait_for

VALUES = 700_000
"""Of the largest tensor: three pieces."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: a page that is mapped there and dirty stays so."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("a file can only be changed without a trace in /dev/shm, which is missing here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Rot:
    """One bit of a file, which changes without a trace: through a page that is mapped, and dirty, before."""

    def __init__(self, path: Path, place: int) -> None:
        self.path, self.place = path, place
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self._bytes[place] = self._bytes[place]

    def flip(self) -> None:
        before = traces(self.path)
        self._bytes[self.place] ^= 1
        assert traces(self.path) == before


class Objects:
    """A model and two updates in a store, all three looked at, and one bit of one of them about to change."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = Store(folder), folder
        self.current, *self.trained = [self._make(seed) for seed in range(3)]
        with self.store.checking() as expected:
            self.content = {path: expected(path) for path in (self.current, *self.trained)}

    def _make(self, seed: int) -> Path:
        generator = np.random.default_rng(seed)
        tensors: dict[str, Any] = {
            "wide": generator.random(9, np.float64),
            "count": generator.integers(0, 9, 300_000),
            "weight": generator.random(VALUES).astype(np.float32),
            "flags": generator.random(5) < 0.5,
        }
        scratch = self.store.scratch("m")
        return self.store.keep(scratch, tensorfile.write(scratch, tensors))

    def aggregate(self, path: Path) -> None:
        contributions = [
            FileContribution(weight=0.25, trained=trained, base=self.current, base_key=0) for trained in self.trained
        ]
        with self.store.checking() as expected:
            tensorsum.aggregate(self.current, contributions, "add_deltas", self.folder / "out", content=expected)

    def score(self, path: Path) -> None:
        self.store.verify(path.stem)

    def serve(self, path: Path, wanted: str | None = None) -> bytes:
        sent: list[bytes] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()  # the client stays
            return {}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        found: list[TensorFileError] = []
        content = self.store.known(path.stem)
        assert content is not None
        response = send_file(path, wanted, "e", None, content, found.append)
        try:
            asyncio.run(response({"type": "http", "method": "GET", "asgi": {}}, receive, send))
        except BlobError:
            raise found[0] from None
        return b"".join(sent)

    def serve_around(self, path: Path) -> None:
        """A range that begins and ends within pieces."""
        middle = path.stat().st_size // 2
        self.serve(path, f"bytes={middle - 3}-{middle + 3}")

    def export(self, path: Path) -> None:
        tensorfile.copy(path, self.folder / "copy", path.stem)


USES: dict[str, Callable[[Objects, Path], object]] = {
    "aggregate": Objects.aggregate,
    "score": Objects.score,
    "serve": Objects.serve,
    "serve a range": Objects.serve_around,
    "export": Objects.export,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("which", ["model", "update"])
def test_a_bit_that_flipped_without_a_trace_is_found_at_the_next_use(memory: Path, use: str, which: str) -> None:
    there = Objects(memory)
    path = there.current if which == "model" else there.trained[1]
    rot = Rot(path, path.stat().st_size // 2)
    USES["score"](there, path)  # it was touched, and is what it was
    for again in USES.values():
        again(there, path)
    rot.flip()
    with pytest.raises(ChangedFileError, match="put the right file back") as found:
        USES[use](there, path)
    assert found.value.path == path
    rot.flip()
    USES[use](there, path)


@pytest.mark.parametrize("place", [0, 9, 400, -1])
def test_every_byte_counts(memory: Path, place: int) -> None:
    """The length of the header, the header, a small tensor, the last byte."""
    there = Objects(memory)
    path = there.trained[-1]  # of the newest all is used
    rot = Rot(path, place % path.stat().st_size)
    there.score(path)
    rot.flip()
    for use in (there.score, there.aggregate):
        with pytest.raises(ChangedFileError):
            use(path)


def test_ranges_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    there = Objects(tmp_path)
    whole, path = there.current.read_bytes(), there.current
    assert there.serve(path) == whole
    for begin, end in ((0, 1), (len(whole) - 1, len(whole)), (5, len(whole) - 5), (1 << 20, 3 << 20)):
        assert there.serve(path, f"bytes={begin}-{end - 1}") == whole[begin:end]


def test_what_reads_a_file_and_what_makes_it_know_the_same_pieces(tmp_path: Path) -> None:
    there = Objects(tmp_path)
    for path, content in there.content.items():
        anew, checked = Content(path.stem), Content(path.stem)
        tensorfile.verify(path, anew)
        assert tensorfile.check(path, path, content=checked) is None
        assert content.checksums == anew.checksums == checked.checksums != {}
    with Store(tmp_path).checking() as expected:  # which has not looked at any of them
        contents = []

        def noted(path: Path) -> Content:
            contents.append(expected(path))
            return contents[-1]

        share = FileContribution(weight=1.0, trained=there.trained[0], base=there.current, base_key=0)
        made = tensorsum.aggregate(there.current, [share], "add_deltas", out := tmp_path / "out", content=noted)
    for content in contents:
        assert content.checksums == there.content[there.store.path(content.sha256)].checksums
    tensorfile.verify(out, anew := Content(made.sha256))
    assert made.checksums == anew.checksums


def test_checksums_find_bits_and_blocks() -> None:
    data = np.random.default_rng(1).integers(0, 256, (1 << 20) + 17, dtype=np.uint8)
    right = checksum(data)
    for place in (0, 4095, 4096, 777_777, 1 << 20, len(data) - 1):
        for bit in range(8):
            wrong = data.copy()
            wrong[place] ^= 1 << bit
            assert checksum(wrong) != right
    zeroed, swapped = data.copy(), data.copy()
    zeroed[8192:8704] = 0
    swapped[:4096], swapped[4096:8192] = data[4096:8192], data[:4096]
    assert len({right, checksum(zeroed), checksum(swapped), checksum(data[:-1])}) == 4


# A whole coordinator --------------------------------------------------------------------------------------------


@contextmanager
def two_jobs(folder: Path) -> Iterator[tuple[Served, Path]]:
    with serving(folder, PAIR, ends=True, rounds=1, **FEDAVG) as served:
        (model,) = objects(served.folder)
        for name in PAIR:
            served.facility(name).poll()
        yield served, model


def test_an_update_that_rots_in_the_store_is_no_part_of_a_model(memory: Path) -> None:
    with two_jobs(memory) as (served, model):
        north, south = (served.facility(name) for name in PAIR)
        orders = {agent.name: agent.running() for agent in (north, south)}
        path = north.put(orders["north"], update(memory, 0.5))
        (part,) = (served.folder / "uploads").iterdir()
        rot = Rot(part, -1 % part.stat().st_size)
        assert north.commit(path, 0)["status"] == "accepted"
        (rot.path,) = objects(served.folder) - {model}
        rot.flip()
        south.hand_in(orders["south"], update(memory, 0.7))
        wait_for(lambda: state(served).startswith("paused"), "it is held", served.said)
        assert f"the coordinator's own copy of the update of north/0, objects/{rot.path.name}" in state(served)
        rot.flip()
        assert until_it_is_over(served).versions == [1]


@pytest.mark.parametrize("silent", [True, False])
def test_a_range_of_a_model_that_changed_is_not_sent(memory: Path, silent: bool) -> None:
    """Whoever goes on with a download gets nothing wrong, and is not told that the fault is on its side."""
    with two_jobs(memory) as (served, model):
        north, target, right = served.facility("north"), memory / "fetched.safetensors", model.read_bytes()
        rot = Rot(model, len(right) - 1)
        north.client.download(0, memory / "before.safetensors", model.stem)
        if silent:
            rot.flip()
        else:
            model.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        part = target.with_name(target.name + ".part")
        part.write_bytes(right[: len(right) // 2])
        with pytest.raises(CoordinatorUnreachableError) as refused:
            north.client.download(0, target, model.stem)
        assert "transfer is damaged" not in str(refused.value)
        assert not target.exists()
        wait_for(lambda: state(served).startswith("paused"), "it is held", served.said)
        assert f"the coordinator's own copy of model 0, objects/{model.name}, has changed" in state(served)
        if silent:
            rot.flip()
        else:
            model.write_bytes(right)
        wait_for(lambda: state(served) == "running", "it goes on", served.said)
        north.client.download(0, target, model.stem)
        assert target.read_bytes() == right
