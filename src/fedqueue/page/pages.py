"""Serves the page of several runs to browsers: its files, what it asks, and what it is told without asking.

Nobody's run waits for it: ledgers are read in a thread of its own, one read at a time, and only while somebody looks.
Who may look is for its callers to say; here nobody is asked.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

from starlette.responses import FileResponse, Response, StreamingResponse

from fedqueue.errors import ConfigError, FedQueueError, RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.models import Models, read_models
from fedqueue.page import answers, log
from fedqueue.page.follower import Follower
from fedqueue.protocol.service import RunStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVERY: Final = 1.0
"""Seconds between two looks at a run that somebody watches."""
AT_LEAST: Final = 15.0
"""Seconds between two things that a watching page is told, so that it knows that we are there."""
ANEW: Final = 10.0
"""Seconds after which all is told anew: what a page counts by itself does not drift."""
FORGET: Final = 300.0
"""Seconds after which a run that nobody looks at is let go of."""
PIECE: Final = 2000
"""Events of a ledger that are sent at once."""
REPORT: Final = "report.html"
MOST_STREAMS: Final = 100
"""Pages that are told without asking, at once."""

STATIC: Final[dict[str, str]] = {
    "icon.svg": "image/svg+xml",
    "page.css": "text/css",
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
    "page.js": "text/javascript",
    "server.js": "text/javascript",
    "timeline.js": "text/javascript",
    "charts.js": "text/javascript",
    "log.js": "text/javascript",
    "words.js": "text/javascript",
}
"""All files that there are, and their types: nothing else in the folder can be asked for."""

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""The browser runs nothing but our files, sends nothing elsewhere, and makes no text into markup."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run that has a page."""

    id: str
    name: str
    folder: Path
    owner: str = ""
    steer: str | None = None  # the beginning of the addresses where it is steered; None: not from here
    status: Callable[[], Awaitable[RunStatus]] | None = None  # of its coordinator; None: its ledger is all there is


@dataclass
class _Watched:
    """A run that somebody looks at."""

    source: Source
    follower: Follower | None = None
    glance: answers.Answer | None = None
    number: int = 0  # of what was told last
    told_at: float = 0.0  # monotonic
    wanted_at: float = 0.0  # monotonic, of when somebody asked last
    streams: int = 0
    trouble: str = ""  # why it cannot be read now
    task: asyncio.Task[None] | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)  # replaced with every glance


class Pages:
    """`sources`: the runs there are now. Its methods are for one event loop."""

    def __init__(self, sources: Callable[[], Sequence[Source]], *, title: str) -> None:
        self._sources = sources
        self._title = title
        self._watched: dict[str, _Watched] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="page")
        self._closed = False
        self._boot = secrets.token_hex(4)  # numbers of glances count from here

    def close(self) -> None:
        self._closed = True
        self._reader.shutdown(wait=True, cancel_futures=True)

    # Files ----------------------------------------------------------------------------------------------

    @staticmethod
    def file(name: str) -> Response:
        """index.html for the empty name; a `FedQueueError` if there is no such file."""
        kind = "text/html" if not name else STATIC.get(name)
        if kind is None:
            raise RunFolderError(f"there is no file {name[:80]!r} of the page")
        content = (files("fedqueue.page") / "static" / (name or "index.html")).read_bytes()
        return Response(content, media_type=kind, headers=HEADERS)

    # What a page asks -----------------------------------------------------------------------------------

    def source(self, run: str) -> Source:
        found = {source.id: source for source in self._sources()}
        if run not in found:
            raise RunFolderError(f"there is no run {run[:80]!r} here")
        return found[run]

    def runs(self, more: Mapping[str, Any]) -> Response:
        """Which there are. `more`: what else the page is to know."""
        named = [{"id": s.id, "name": s.name, "owner": s.owner} for s in self._sources()]
        return _answer({"title": self._title, "sites": None, "runs": named, **more})

    async def state(self, run: str, may: Sequence[str] = ()) -> Response:
        watched = self._watch(run)
        return _answer({**await self._known(watched), **_steering(watched, may)})

    async def timeline(self, run: str, query: Mapping[str, str]) -> Response:
        since, until = _number(query, "since"), _number(query, "until")
        return await self._of(run, lambda follower: answers.timeline(follower, since, until))

    async def charts(self, run: str) -> Response:
        return await self._of(run, answers.charts)

    async def log(self, run: str, query: Mapping[str, str]) -> Response:
        before, group = _number(query, "before"), query.get("group", "")
        if group and group not in log.GROUPS:
            raise ConfigError(f"group must be one of {', '.join(log.GROUPS)}")
        path, facility, text = self.source(run).folder / FILE, query.get("facility", ""), query.get("text", "")

        def look() -> answers.Answer:
            with LedgerReader(path) as ledger:
                first = None if before is None else int(before)
                found = log.rows(ledger, before=first, group=group, facility=facility[:200], text=text[:200])
            return {"rows": found, "more": len(found) >= log.ROWS}

        return _answer(await self._read(look))

    async def ledger(self, run: str) -> Response:
        """As `fedqueue journal` prints it, piece after piece."""
        source = self.source(run)
        path = source.folder / FILE

        def read(after: int) -> tuple[int, bytes]:
            with LedgerReader(path) as ledger:
                last = after + PIECE
                return last, "".join(f"{line}\n" for line in ledger.lines(after, last)).encode()

        async def pieces() -> AsyncIterator[bytes]:
            after, piece = await self._read(partial(read, -1))
            while piece:
                yield piece
                after, piece = await self._read(partial(read, after))

        headers = {**HEADERS, "content-disposition": f'attachment; filename="{_plain(source.name)}.jsonl"'}
        return StreamingResponse(pieces(), media_type="application/jsonl", headers=headers)

    async def models(self, run: str) -> Response:
        """Those that are kept, but for their bytes; a simulation keeps none. And whether there is a report."""
        source = self.source(run)
        report = (source.folder / REPORT).is_file()
        found = await self._models(source)
        if found is None:
            return _answer({"models": [], "report": report})
        there = [
            {"version": one.version, "score": one.score, "best": one == found.best, "newest": one == found.newest}
            for one in found.there
        ]
        return _answer({"models": there, "report": report})

    async def model(self, run: str, version: str) -> Response:
        source = self.source(run)
        kept = await self._models(source)
        found = next((one for one in kept.there if str(one.version) == version), None) if kept is not None else None
        if found is None:
            raise RunFolderError(f"model {version[:20]} is not kept, or there is none")
        name = f"{_plain(source.name)}-model-{found.version}.safetensors"
        return FileResponse(found.file, media_type="application/octet-stream", headers=HEADERS, filename=name)

    async def _models(self, source: Source) -> Models | None:
        """None: of a simulation, which keeps none."""

        def look() -> Models | None:
            with LedgerReader(source.folder / FILE) as ledger:
                if "first_model" not in ledger.meta:
                    return None
            return read_models(source.folder)

        return await self._read(look)

    async def report(self, run: str) -> Response:
        source = self.source(run)
        path = source.folder / REPORT
        if not path.is_file():
            raise RunFolderError("there is no report yet: `fedqueue report RUN` makes it")
        name = f"{_plain(source.name)}-report.html"
        return FileResponse(path, media_type="text/html", headers=HEADERS, filename=name)

    # What a page is told --------------------------------------------------------------------------------

    def stream(self, run: str, may: Sequence[str], last: str) -> Response:
        """Server-sent events: the state of a run whenever it changes. `last`: what the page has."""
        watched = self._watch(run)
        if sum(other.streams for other in self._watched.values()) >= MOST_STREAMS:
            raise RunFolderError(f"{MOST_STREAMS} pages are open already; close one")
        headers = {**HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(self._events(watched, may, last), media_type="text/event-stream", headers=headers)

    async def _events(self, watched: _Watched, may: Sequence[str], last: str) -> AsyncIterator[bytes]:
        watched.streams += 1
        try:
            yield b"retry: 1000\n\n"
            while True:
                watched.wanted_at = time.monotonic()
                number = f"{self._boot}-{watched.number}"
                if watched.glance is not None and number != last:
                    last = number
                    said = json.dumps({**watched.glance, **_steering(watched, may)}, separators=(",", ":"))
                    yield f"id: {number}\nevent: state\ndata: {said}\n\n".encode()
                elif not await self._told(watched):
                    yield b": here\n\n"
        finally:
            watched.streams -= 1

    async def _known(self, watched: _Watched) -> answers.Answer:
        """What was told last, or is told first."""
        while watched.glance is None:
            await self._told(watched)
            if watched.glance is None and watched.trouble:
                raise RunFolderError(watched.trouble)
        return watched.glance

    async def _told(self, watched: _Watched) -> bool:
        """Waits until there is something new; False: there was nothing for a while."""
        self._follow(watched)
        try:
            async with asyncio.timeout(AT_LEAST):
                await watched.told.wait()
        except TimeoutError:
            return False
        return True

    # Following runs -------------------------------------------------------------------------------------

    def _watch(self, run: str) -> _Watched:
        source = self.source(run)
        watched = self._watched.setdefault(run, _Watched(source))
        watched.wanted_at = time.monotonic()
        self._follow(watched)
        return watched

    def _follow(self, watched: _Watched) -> None:
        if watched.task is None or watched.task.done():
            # In a context of its own: who asked first may be gone long before.
            loop, context = asyncio.get_running_loop(), contextvars.Context()
            watched.task = context.run(loop.create_task, self._look_again_and_again(watched))

    async def _look_again_and_again(self, watched: _Watched) -> None:
        """Until nobody has wanted it for a while, or the server ends."""
        more, known = False, None
        while not self._closed and time.monotonic() - watched.wanted_at < FORGET:
            trouble = ""
            try:
                if watched.follower is None:
                    watched.follower = await self._read(partial(Follower, watched.source.folder))
                more = await self._read(watched.follower.catch_up)
                live = await self._live(watched)
                known = await self._read(partial(answers.glance, watched.follower, live))
            except (FedQueueError, OSError, sqlite3.Error, LookupError, ValueError, TypeError) as error:
                # Its ledger is damaged, of another build, or cannot be read now: it may be mended.
                trouble = f"{type(error).__name__}: {error}".replace(str(watched.source.folder), watched.source.name)
                more = False
            if trouble != watched.trouble and trouble:
                logger.warning(f"the page of {watched.source.name} cannot go on: {trouble}")
            self._tell(watched, answers.in_trouble(known, trouble) if trouble and known is not None else known, trouble)
            if not more:
                await asyncio.sleep(EVERY)
        self._watched.pop(watched.source.id, None)

    def _tell(self, watched: _Watched, glance: answers.Answer | None, trouble: str) -> None:
        """Everybody who waits, if it is news."""
        now, before = time.monotonic(), watched.glance
        changed = glance is not None and (before is None or _lasting(glance) != _lasting(before))
        if not changed and trouble == watched.trouble and now - watched.told_at < ANEW:
            return
        watched.glance, watched.trouble, watched.told_at = glance, trouble, now
        watched.number += 1
        told, watched.told = watched.told, asyncio.Event()
        told.set()

    async def _live(self, watched: _Watched) -> RunStatus | None:
        """What its coordinator says; None: there is none, or it does not answer now."""
        try:
            ask = self.source(watched.source.id).status
            return None if ask is None else await asyncio.wait_for(ask(), 5.0)
        except (FedQueueError, TimeoutError):
            return None

    async def _of(self, run: str, what: Callable[[Follower], answers.Answer]) -> Response:
        watched = self._watch(run)
        await self._known(watched)
        assert watched.follower is not None  # it has told something
        return _answer(await self._read(partial(what, watched.follower)))

    async def _read(self, act: Callable[[], T]) -> T:
        """One after the other, in a thread of its own: nobody else touches a follower."""
        if self._closed:
            raise RunFolderError("the server is stopping")
        return await asyncio.get_running_loop().run_in_executor(self._reader, act)


def _answer(content: Mapping[str, Any]) -> Response:
    return Response(json.dumps(content, separators=(",", ":")).encode(), media_type="application/json", headers=HEADERS)


def _steering(watched: _Watched, may: Sequence[str]) -> answers.Answer:
    return {"steer": watched.source.steer if "steer" in may else None}


def _lasting(glance: answers.Answer) -> answers.Answer:
    """Without what changes as time goes by, which a page can count by itself."""
    passing = ("clock", "wall", "node_seconds", "idle_node_seconds")
    fleeting = ("heard_seconds_ago", "until_seconds", "node_seconds", "idle_node_seconds")
    return {
        **{key: value for key, value in glance.items() if key not in passing},
        "facilities": [
            {
                **{key: value for key, value in facility.items() if key not in fleeting},
                "open_jobs": [{**job, "seconds": 0, "idle_seconds": 0} for job in facility["open_jobs"]],
                "troubles": [trouble["reason"] for trouble in facility["troubles"]],
            }
            for facility in glance["facilities"]
        ],
        "wrong": [{**wrong, "seconds": 0} for wrong in glance["wrong"]],
    }


def _number(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise ConfigError(f"{name} must be a number, 0 or more")
    return value


def _plain(name: str) -> str:
    """For a file that a browser saves."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in name)[:80]
