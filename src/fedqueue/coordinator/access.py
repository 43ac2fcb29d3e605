"""Who may ask the coordinator, and how much: credentials, and what one facility may take.

One-time tokens, a credential for each facility, one for the operator. Only digests of secrets are kept. A secret is a
random text of 256 bits, so a plain digest of it tells nothing and needs no salt. The file is written whole or not at
all, and nobody but its owner may read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Final, TypeVar

from fedqueue.coordinator.coordinator import Coordinator, Refused
from fedqueue.errors import StorageError
from fedqueue.files import only_mine, write_secret
from fedqueue.protocol.codec import encode, message, read

T = TypeVar("T")

FILE: Final = "access.json"
OPERATOR_FILE: Final = "operator"
TOKEN_SECONDS: Final = 7 * 24 * 3600.0
"""How long an invitation may be used."""

OPERATOR: Final = "/operator"
"""Who the operator is among the holders of credentials; no facility can be called that."""

MOST_AT_ONCE: Final = 16
"""Requests of one facility that are being served; an agent makes three."""

REPORTS_PER_SECOND: Final = 10.0
"""Each is a line in the ledger, for good. A job brings four or five."""
REPORTS_IN_STOCK: Final = 2000
"""What an agent may tell at once after it was away."""
BYTES_PER_SECOND: Final = 64 << 10
"""Of bodies in JSON; a poll of an agent at work has some hundred."""
BYTES_IN_STOCK: Final = 8 << 20


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@message
class _Invited:
    facility: str
    until: float  # seconds since 1970


@message
class _Known:
    """What the file holds, by digests of secrets."""

    tokens: dict[str, _Invited] = field(default_factory=dict)
    credentials: dict[str, str] = field(default_factory=dict)  # whose
    unsettled: list[str] = field(
        default_factory=list
    )  # revoked, and that their updates are rejected is not on record yet


class Access:
    """The access file of a run. One process owns it; it is used from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()  # for who changes it from several threads
        self._path = folder / FILE
        try:
            only_mine(self._path)
            self._known = read(_Known, json.loads(self._path.read_text(encoding="utf-8")), FILE)
        except FileNotFoundError:
            self._known = _Known()
        if not (folder / OPERATOR_FILE).exists() or OPERATOR not in self._known.credentials.values():
            write_secret(folder / OPERATOR_FILE, self.give(OPERATOR))

    def who(self, secret: str) -> str | None:
        """The facility with this credential, the operator, or nobody."""
        # Looked up by digest: how long that takes says nothing about any secret.
        return self._known.credentials.get(digest(secret))

    def invite(self, facility: str) -> str:
        """A token with which this facility may enrol, once; earlier ones of its no longer work."""
        token = secrets.token_urlsafe(32)
        invited = {digest(token): _Invited(facility=facility, until=time.time() + TOKEN_SECONDS)}
        self._save(replace(self._known, tokens={**self._not_invited(facility), **invited}))
        return token

    def enrol(self, token: str) -> tuple[str, str] | None:
        """The facility and its new credential; None: the token is unknown, used or too old. An enrolment replaces
        the credential that the facility had."""
        held = self._known.tokens.get(digest(token))
        if held is None or held.until < time.time():
            return None
        credential = secrets.token_urlsafe(32)
        tokens = {key: other for key, other in self._known.tokens.items() if key != digest(token)}
        credentials = {**self._others(held.facility), digest(credential): held.facility}
        unsettled = [name for name in self.unsettled if name != held.facility]  # what it brings now is of another
        self._save(_Known(tokens=tokens, credentials=credentials, unsettled=unsettled))
        return held.facility, credential

    def give(self, name: str) -> str:
        """A new credential, without a token: for the operator, and for facilities on this very machine."""
        credential = secrets.token_urlsafe(32)
        self._save(replace(self._known, credentials={**self._others(name), digest(credential): name}))
        return credential

    def revoke(self, facility: str, *, keep: bool = True) -> bool:
        """Take back its credential and its invitations; False: it had none. Unless what it handed in is to be kept, it
        is unsettled until `settle`. On the disk when this returns; if it cannot be written, nothing is revoked."""
        before = self._known
        without = replace(before, tokens=self._not_invited(facility), credentials=self._others(facility))
        self._save(without if keep else replace(without, unsettled=sorted({*before.unsettled, facility})))
        return (without.tokens, without.credentials) != (before.tokens, before.credentials)

    @property
    def unsettled(self) -> list[str]:
        return self._known.unsettled

    def settle(self, facility: str) -> None:
        """That its updates are rejected is on record."""
        if facility not in self.unsettled:
            return
        self._save(replace(self._known, unsettled=[name for name in self.unsettled if name != facility]))

    def enrolled(self) -> set[str]:
        return set(self._known.credentials.values()) - {OPERATOR}

    def _others(self, name: str) -> dict[str, str]:
        return {key: who for key, who in self._known.credentials.items() if who != name}

    def _not_invited(self, facility: str) -> dict[str, _Invited]:
        return {key: held for key, held in self._known.tokens.items() if held.facility != facility}

    def _save(self, known: _Known) -> None:
        write_secret(self._path, encode(known))
        self._known = known


def changed(change: Callable[[], T]) -> T:
    """A change of the file that can fail without harm: the run goes on as before."""
    try:
        return change()
    except StorageError as error:
        raise Refused(507, f"nothing was changed: {error}") from None


def revoke(coordinator: Coordinator, access: Access, facility: str, *, keep: bool) -> bool:
    """In the coordinator's thread, as everything that takes effect: from here on nothing of it does."""
    had = changed(lambda: access.revoke(facility, keep=keep))
    try:
        coordinator.shut_out(facility, keep=keep)
    except StorageError as error:
        raise StorageError(f"{facility} is shut out; what follows is done as soon as it can be: {error}") from None
    with suppress(StorageError):  # then it is done again by the next coordinator, or ends with an enrolment
        access.settle(facility)
    return had


def settle(coordinator: Coordinator, access: Access) -> None:
    """What a coordinator that was ended, or had no room, left undone of revocations."""
    for facility in access.unsettled:
        coordinator.shut_out(facility, keep=False)
        access.settle(facility)


class _Stock:
    """How much of something each may still use: it grows back with time."""

    def __init__(self, per_second: float, most: float, clock: Callable[[], float]) -> None:
        self._per_second, self._most, self._clock = per_second, most, clock
        self._left: dict[str, tuple[float, float]] = {}  # and when that was

    def take(self, who: str, number: int) -> bool:
        """False: there is not so much."""
        now = self._clock()
        left, then = self._left.get(who, (self._most, now))
        left = min(self._most, left + (now - then) * self._per_second)
        if number > left:
            return False
        self._left[who] = (left - number, now)
        return True


class Limits:
    """What one facility may ask at once and over time, so that it cannot take it from the others. Used from the event
    loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._served: Counter[str] = Counter()
        self._reports = _Stock(REPORTS_PER_SECOND, REPORTS_IN_STOCK, clock)
        self._bytes = _Stock(BYTES_PER_SECOND, BYTES_IN_STOCK, clock)
        self._bodies: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

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
        if not self._reports.take(who, number):
            raise Refused(429, f"more than {REPORTS_PER_SECOND:g} reports a second; try again later")

    def bytes(self, who: str, number: int) -> None:
        """So many bytes come with a request, which are not read yet."""
        if who and not self._bytes.take(who, number):
            raise Refused(429, f"more than {BYTES_PER_SECOND} bytes a second; try again later")

    def one_body(self, who: str) -> asyncio.Lock:
        """Large bodies are read one after the other, each of whom has one in line."""
        return self._bodies[who]
