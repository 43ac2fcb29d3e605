"""The coordinator's side of large files: bodies appended to a part as they arrive, files sent in ranges.

    BlobError                    status
    ├── BlobConflict          409   the offset is not what is there: go on from `have`
    ├── BlobLengthRequired            411   an upload must say its Content-Length
    ├── BlobTooLarge          413   it would go past the announced size
    └── BlobNoSpace           507   the disk is full; what arrived stays

The event loop never waits for a disk: that is done in threads, while the next bytes arrive.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fedqueue.coordinator.coordinator import Refused
from fedqueue.errors import FedQueueError
from fedqueue.protocol.contract import JobId, UpdateKey, job_id
from fedqueue.tensorbytes import Content
from fedqueue.tensorfile import ChangedFileError, TensorFileError, UnreadableFileError

WRITE_BYTES: Final = 1 << 20
"""Gathered from a connection before they are written."""
READ_BYTES: Final = 1 << 20
VECTORS: Final = 512  # buffers in one write; the kernel takes 1024


class BlobError(FedQueueError):
    status: ClassVar[int] = 500


class BlobConflict(BlobError):
    status = 409

    def __init__(self, have: int) -> None:
        super().__init__(f"{have:,} bytes are here; go on from there")
        self.have = have


class BlobLengthRequired(BlobError):
    status = 411


class BlobTooLarge(BlobError):
    status = 413


class BlobNoSpace(BlobError):
    status = 507


def have(part: Path) -> int:
    """Bytes that have arrived."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


async def receive(request: Request, part: Path, *, offset: int, total: int) -> int:
    """Writes the request's body into `part` at `offset`; returns how many bytes are there then.

    They outlive this process, not the machine: whoever takes a whole part has its sha256 checked, and syncs it. Refuses
    before it reads. What arrived before a connection broke (`ClientDisconnect`) or the disk was full stays, to be gone
    on from. Two requests for one part do no harm: each writes the same bytes at their own places, and a part has no
    holes because each began within it.
    """
    length = request.headers.get("content-length", "")
    if not re.fullmatch("[0-9]{1,18}", length):
        raise BlobLengthRequired("an upload must say its Content-Length")
    if offset + int(length) > total:
        raise BlobTooLarge(f"{offset:,} and {length} more bytes are more than the {total:,} announced")
    writer = _Writer(part, offset)
    try:
        async for data in request.stream():
            await writer.add(data, most=total)
    finally:
        # Also when the client is gone or the server stops: what arrived is kept.
        await asyncio.shield(writer.finish())
    return writer.place


class _Writer:
    """Gathers small pieces and writes them in a thread, one write at a time."""

    def __init__(self, part: Path, offset: int) -> None:
        try:
            self._file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _failure(error) from None
        if (there := os.fstat(self._file).st_size) != offset:
            os.close(self._file)
            raise BlobConflict(there)
        self.place = offset  # the end of what is written or being written
        self._gathered: list[bytes] = []
        self._size = 0
        self._under_way: asyncio.Future[None] | None = None

    async def add(self, data: bytes, *, most: int) -> None:
        if self.place + self._size + len(data) > most:
            raise BlobTooLarge(f"the body goes past the {most:,} bytes announced")
        if data:
            self._gathered.append(data)
            self._size += len(data)
        if self._size >= WRITE_BYTES or len(self._gathered) >= VECTORS:
            await self._start()

    async def _start(self) -> None:
        """Begins to write what is gathered, once the write before is done."""
        await self._wait()
        pieces, self._gathered, self._size = self._gathered, [], 0
        place, self.place = self.place, self.place + sum(map(len, pieces))
        loop = asyncio.get_running_loop()
        self._under_way = loop.run_in_executor(None, _write, self._file, pieces, place)

    async def _wait(self) -> None:
        if self._under_way is None:
            return
        try:
            await asyncio.shield(self._under_way)
        except BlobError:
            self._gathered, self._size = [], 0  # to write on would leave a hole
            raise
        finally:
            if self._under_way.done():
                self._under_way = None

    async def finish(self) -> None:
        try:
            await self._start()
            await self._wait()
        finally:
            os.close(self._file)


def _write(file: int, pieces: list[bytes], place: int) -> None:
    views = [memoryview(piece) for piece in pieces]
    try:
        while views:
            count = os.pwritev(file, views, place)
            place += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]
    except OSError as error:
        raise _failure(error) from None


def _failure(error: OSError) -> BlobError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return BlobNoSpace("no space is left here; make room, then go on")
    return BlobError(f"cannot be written: {error.strerror}")


class Update(NamedTuple):
    """Bytes that a facility brings, as it names them."""

    facility: str
    sequence: int
    attempt: int
    part: int
    sha256: str

    @property
    def job_id(self) -> JobId:
        return job_id(self.facility, self.sequence)

    @property
    def key(self) -> UpdateKey:
        return self.job_id, self.attempt, self.part


class Uploads:
    """Who writes to an update: one request at a time, and none while it is checked.

    An update that was checked must stay as it was: bytes that come late through a connection that was opened early
    would otherwise be summed into a model unseen.
    """

    def __init__(self) -> None:
        self._writing: dict[Update, asyncio.Task[int]] = {}
        self._checking: set[Update] = set()

    async def write(self, update: Update, receive: Callable[[], Awaitable[int]], have: Callable[[], int]) -> int:
        """Receive bytes of it; the newest request counts, since an older one may be a connection that broke."""
        await self.end(update)
        if update in self._checking or update in self._writing:
            raise Refused(409, "it is being checked, or sent by another request", offset=have())
        task = asyncio.ensure_future(receive())
        self._writing[update] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()  # whoever waited for it is gone
            if self._writing.get(update) is task:
                del self._writing[update]
        if task.cancelled():
            raise Refused(409, "another request sends this update now", offset=have())
        return task.result()

    async def end(self, update: Update) -> None:
        """Nobody writes to it when this returns."""
        task = self._writing.get(update)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if self._writing.get(update) is task:
                del self._writing[update]

    async def end_all(self, facility: str) -> None:
        for update in [update for update in self._writing if update.facility.partition("@")[0] == facility]:
            await self.end(update)

    @contextmanager
    def checked(self, update: Update) -> Iterator[Callable[[], None]]:
        """Inside, and until `release` if the function given was called, nobody may write to it."""
        self._checking.add(update)
        later = False

        def goes_on() -> None:
            nonlocal later
            later = True

        try:
            yield goes_on
        finally:
            if not later:
                self._checking.discard(update)

    def release(self, update: Update) -> None:
        """Its check is over."""
        self._checking.discard(update)


def send_file(
    path: Path,
    range_header: str | None,
    etag: str,
    if_range: str | None = None,
    content: Content | None = None,
    failed: Callable[[TensorFileError], None] = lambda error: None,
) -> Response:
    """The file, or the one byte range asked for (206, or 416 when there is no such range).

    `etag` is bare, without quotes. A range with an `if_range` of another file is answered with the whole file. If the
    file cannot be opened now, the `OSError` is raised. Each piece is compared with the checksum that `content` has of
    it; one that has changed is never sent, nor what comes after it. `failed` is told what is found wrong meanwhile.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
    headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
    if if_range is not None and if_range != f'"{etag}"':
        range_header = None
    found = _parse_range(range_header, size)
    if found is None:
        return _Stream(_read(path, 0, size, size, content, failed), size, 200, headers)
    begin, end = found
    if begin >= end:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    return _Stream(_read(path, begin, end, size, content, failed), end - begin, 206, headers)


def _parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and the one after the last; None for the whole file, which is also what odd headers get."""
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", (header or "").replace(" ", ""))
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size


class _Stream(StreamingResponse):
    """A part of a file, read in threads, the next piece while one is sent."""

    def __init__(self, pieces: AsyncIterator[bytes], size: int, status: int, headers: dict[str, str]) -> None:
        headers |= {"Content-Length": str(size)}
        super().__init__(pieces, status, headers, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await super().__call__(scope, receive, send)


async def _read(
    path: Path,
    begin: int,
    end: int,
    size: int,
    content: Content | None,
    failed: Callable[[TensorFileError], None],
) -> AsyncIterator[bytes]:
    places = [*sorted(content.checksums), size] if content is not None else [*range(0, size, READ_BYTES), size]
    try:
        async for data in _pieces(path, begin, end, places, content):
            yield data
    except OSError as error:
        failed(UnreadableFileError(path, error))
        raise BlobError(f"{path}: cannot be read: {error.strerror}") from None
    except TensorFileError as error:
        failed(error)
        raise BlobError(str(error)) from None


async def _pieces(path: Path, begin: int, end: int, places: list[int], content: Content | None) -> AsyncIterator[bytes]:
    """The bytes from `begin` to `end`, read by whole pieces, which begin at `places`; small ones together."""

    def read(first: int, last: int) -> bytes:
        data = os.pread(file, places[last] - places[first], places[first])
        if len(data) != places[last] - places[first]:
            raise ChangedFileError(path)
        if content is not None:
            for place, after in pairwise(places[first : last + 1]):
                content.must_have(path, place, memoryview(data)[place - places[first] : after - places[first]])
        return data[max(0, begin - places[first]) : end - places[first]]

    loop = asyncio.get_running_loop()
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    coming: asyncio.Future[bytes] | None = None
    try:
        os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_SEQUENTIAL)
        first = bisect_right(places, begin) - 1
        while places[first] < end or coming is not None:
            data, coming = await coming if coming is not None else b"", None
            if places[first] < end:
                last = max(first + 1, bisect_right(places, places[first] + READ_BYTES) - 1)
                coming, first = loop.run_in_executor(None, read, first, last), last
            if data:
                yield data
    finally:
        if coming is not None:
            await asyncio.wait([coming])  # the file must stay open until it is read
        os.close(file)
