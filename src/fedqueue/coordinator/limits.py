"""What one facility may ask of the coordinator at once and over time, so that it cannot take it from the others.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from fedqueue.coordinator.coordinator import Refused
from fedqueue.protocol.contract import JobId, job_id

MOST_AT_ONCE: Final = 16
"""Requests of one facility that are being served; an agent makes three."""

REPORTS_PER_SECOND: Final = 10.0
"""Each is a line in the ledger, for good. A job brings four or five."""
REPORTS_IN_STOCK: Final = 2000
"""What an agent may tell at once after it was away."""


class Update(NamedTuple):
    """Bytes that a facility brings, as it names them."""

    facility: str
    sequence: int
    attempt: int
    sha256: str

    @property
    def job_id(self) -> JobId:
        return job_id(self.facility, self.sequence)


class Limits:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served: Counter[str] = Counter()
        self._stock: dict[str, tuple[float, float]] = {}  # reports left, and when that was

    @contextmanager
    def one_more(self, who: str) -> Iterator[None]:
        """A request, for as long as it is served."""
        if self._served[who] >= MOST_AT_ONCE:
            raise Refused(429, f"{MOST_AT_ONCE} requests of yours are being served; try again later")
        self._served[who] += 1
        try:
            yield
        finally:
            self._served[who] -= 1

    def reports(self, who: str, number: int) -> None:
        """So many reports come with a poll."""
        now = self._clock()
        left, then = self._stock.get(who, (float(REPORTS_IN_STOCK), now))
        left = min(REPORTS_IN_STOCK, left + (now - then) * REPORTS_PER_SECOND)
        if number > left:
            raise Refused(429, f"more than {REPORTS_PER_SECOND:g} reports a second; try again later")
        self._stock[who] = (left - number, now)


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
        for update in [update for update in self._writing if update.facility == facility]:
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
