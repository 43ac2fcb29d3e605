"""Who may ask the coordinator, and how much: credentials, and what one facility may take.

One-time tokens, a credential for each facility and each user, one for the operator on this machine. Only digests of
secrets are kept. A secret is a random text of 256 bits, so a plain digest of it tells nothing and needs no salt. The
file is written whole or not at all, and nobody but its owner may read it. Any thread may change it.

Credentials expire, but for the operator's own, and are renewed while they are in use: the old one works until the new
one is used for the first time. To ask for the new one again gives the same: it is made of the old one and of a key that
is kept here. So an answer that is lost, and an end of either side at any moment, harm nothing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
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
from fedqueue.coordinator.rights import Role
from fedqueue.errors import StorageError
from fedqueue.files import failpoint, only_mine, write_secret
from fedqueue.protocol.codec import encode, message, read
from fedqueue.protocol.service import UserRole

T = TypeVar("T")

FILE: Final = "access.json"
OPERATOR_FILE: Final = "operator"
TOKEN_SECONDS: Final = 7 * 24 * 3600.0
"""How long an invitation may be used."""

OPERATOR: Final = "/operator"
"""The operator on this machine among the holders of credentials; no facility can be called that."""
USERS: Final = "/users/"
"""Before the names of users, for the same reason."""
CREDENTIAL_DAYS: Final = 90.0
RENEWED_WITHIN: Final = 1 / 3
"""Of its time: so much of it must be left at most."""

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


def is_user(who: str) -> bool:
    return who.startswith(USERS)


def plain_name(who: str) -> str:
    """Of a holder, for people.

    >>> plain_name("/users/ann")
    'ann'
    """
    return who.removeprefix(USERS).removeprefix("/")


@message
class _Invited:
    facility: str
    until: float  # seconds since 1970


@message
class _Credential:
    who: str
    until: float | None = None  # seconds since 1970; None: it does not expire
    before: str = ""  # the digest of the one that this one renews, until this one is used
    key: str = ""  # of which its successor is made; empty: nobody has asked for one


@message
class _Known:
    """What the file holds, by digests of secrets."""

    tokens: dict[str, _Invited] = field(default_factory=dict)
    credentials: dict[str, _Credential] = field(default_factory=dict)
    users: dict[str, UserRole] = field(default_factory=dict)  # by plain name
    unsettled: list[str] = field(
        default_factory=list
    )  # revoked, and that their updates are rejected is not on record yet


class Access:
    """The access file of a run, or of a federation. One process owns it."""

    def __init__(self, folder: Path, credential_days: float = CREDENTIAL_DAYS) -> None:
        self.lock = threading.RLock()
        self._path = folder / FILE
        self._seconds = credential_days * 86400.0
        self._replaced: dict[str, str] = {}  # digests: what was begun with an old credential may end with it
        try:
            only_mine(self._path)
            self._known = self._read(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._known = _Known()
        holders = {held.who for held in self._known.credentials.values()}
        if not (folder / OPERATOR_FILE).exists() or OPERATOR not in holders:
            write_secret(folder / OPERATOR_FILE, self.give(OPERATOR))

    def _read(self, text: str) -> _Known:
        """Files of earlier versions too: their credentials say whose they are, and expire from now on."""
        tree = json.loads(text)
        found = tree.get("credentials")
        earlier = {key: who for key, who in found.items() if isinstance(who, str)} if isinstance(found, dict) else {}
        if not earlier:
            return read(_Known, tree, FILE)
        dated = {
            key: {"who": who, "until": None if who == OPERATOR else self._expiry()} for key, who in earlier.items()
        }
        known = read(_Known, {**tree, "credentials": {**tree["credentials"], **dated}}, FILE)
        write_secret(self._path, encode(known))
        return known

    # Who asks -------------------------------------------------------------------------------------------

    def who(self, secret: str, *, under_way: bool = False) -> str | None:
        """The facility or the user with this credential, the operator, or nobody. `under_way`: asked of what was begun
        with it, which a renewal meanwhile does not end."""
        # Looked up by digest: how long that takes says nothing about any secret.
        known, key = self._known.credentials, digest(secret)
        while under_way and key not in known and key in self._replaced:
            key = self._replaced[key]
        held = known.get(key)
        return held.who if held is not None and not _is_over(held) else None

    def role_of(self, who: str) -> Role | None:
        """None: it was a user, and is none any more."""
        if who == OPERATOR:
            return "operator"
        return self._known.users.get(plain_name(who)) if is_user(who) else "facility"

    def has_expired(self, secret: str) -> bool:
        held = self._known.credentials.get(digest(secret))
        return held is not None and _is_over(held)

    def is_due(self, secret: str) -> bool:
        """Whether it is time to renew it."""
        held = self._known.credentials.get(digest(secret))
        return held is not None and held.until is not None and held.until - time.time() < self._seconds * RENEWED_WITHIN

    def is_new(self, secret: str) -> bool:
        """Whether the one that it renews still works: `used` ends that."""
        held = self._known.credentials.get(digest(secret))
        return held is not None and bool(held.before)

    # Facilities -----------------------------------------------------------------------------------------

    def invite(self, facility: str) -> str:
        """A token with which this facility may enrol, once; earlier ones of its no longer work."""
        with self.lock:
            token = secrets.token_urlsafe(32)
            invited = {digest(token): _Invited(facility=facility, until=time.time() + TOKEN_SECONDS)}
            self._save(replace(self._known, tokens={**self._not_invited(facility), **invited}))
            return token

    def invited(self, token: str) -> str | None:
        """The facility that this token would enrol."""
        held = self._known.tokens.get(digest(token))
        return None if held is None or held.until < time.time() else held.facility

    def enrol(self, token: str) -> tuple[str, str] | None:
        """The facility and its new credential; None: the token is unknown, used or too old. An enrolment replaces
        the credential that the facility had."""
        with self.lock:
            facility = self.invited(token)
            if facility is None:
                return None
            tokens = {key: other for key, other in self._known.tokens.items() if key != digest(token)}
            credential, credentials = self._new(facility, self._expiry())
            unsettled = [name for name in self.unsettled if name != facility]  # what it brings now is of another
            self._save(replace(self._known, tokens=tokens, credentials=credentials, unsettled=unsettled))
            return facility, credential

    def give(self, name: str) -> str:
        """A new credential, without a token, which does not expire: for the operator, and for facilities on this very
        machine."""
        with self.lock:
            credential, credentials = self._new(name, None)
            self._save(replace(self._known, credentials=credentials))
            return credential

    def revoke(self, facility: str, *, keep: bool = True) -> bool:
        """Take back its credential and its invitations; False: it had none. Unless what it handed in is to be kept, it
        is unsettled until `settle`. On the disk when this returns; if it cannot be written, nothing is revoked."""
        with self.lock:
            before = self._known
            without = replace(before, tokens=self._not_invited(facility), credentials=self._others(facility))
            self._save(without if keep else replace(without, unsettled=sorted({*before.unsettled, facility})))
            return (without.tokens, without.credentials) != (before.tokens, before.credentials)

    @property
    def unsettled(self) -> list[str]:
        return self._known.unsettled

    def settle(self, facility: str) -> None:
        """That its updates are rejected is on record."""
        with self.lock:
            if facility in self.unsettled:
                self._save(replace(self._known, unsettled=[name for name in self.unsettled if name != facility]))

    def enrolled(self) -> set[str]:
        """Facilities whose credentials are good."""
        return {held.who for held in self._known.credentials.values() if held.who[0] != "/" and not _is_over(held)}

    # Users ----------------------------------------------------------------------------------------------

    @property
    def users(self) -> dict[str, UserRole]:
        """The role of each."""
        return self._known.users

    def set_user(self, name: str, role: UserRole, *, anew: bool) -> str | None:
        """Add somebody, or change a role. `anew`: with a new credential, which is returned and replaces any other."""
        with self.lock:
            users, credential, credentials = {**self.users, name: role}, None, self._known.credentials
            if anew:
                credential, credentials = self._new(USERS + name, self._expiry())
            self._save(replace(self._known, users=users, credentials=credentials))
            return credential

    def remove_user(self, name: str) -> bool:
        """With the credential. False: there was nobody."""
        with self.lock:
            users = {other: role for other, role in self.users.items() if other != name}
            had = users != self.users
            self._save(replace(self._known, users=users, credentials=self._others(USERS + name)))
            return had

    # Renewal --------------------------------------------------------------------------------------------

    def renew(self, secret: str) -> str | None:
        """The credential that comes after this one, the same however often it is asked for; None: this one is not good,
        or it is too early."""
        with self.lock:
            key, held = digest(secret), self._known.credentials.get(digest(secret))
            if held is None or _is_over(held) or not self.is_due(secret):
                return None
            if not held.key:
                held = replace(held, key=secrets.token_urlsafe(32))
            successor = _successor(secret, held.key)
            if digest(successor) not in self._known.credentials:
                made = _Credential(who=held.who, until=self._expiry(), before=key)
                self._save(
                    replace(self._known, credentials={**self._known.credentials, key: held, digest(successor): made})
                )
            failpoint("credential.given")
            return successor

    def used(self, secret: str) -> None:
        """A new credential arrived where it belongs: the one before it has served its time."""
        with self.lock:
            key, held = digest(secret), self._known.credentials.get(digest(secret))
            if held is None or not held.before:
                return
            failpoint("credential.used")
            others = {other: found for other, found in self._known.credentials.items() if other != held.before}
            self._save(replace(self._known, credentials={**others, key: replace(held, before="")}))
            self._replaced[held.before] = key

    def _expiry(self) -> float:
        return time.time() + self._seconds

    def _new(self, who: str, until: float | None) -> tuple[str, dict[str, _Credential]]:
        """A credential, and all that are known with it; others of the same holder no longer work."""
        credential = secrets.token_urlsafe(32)
        return credential, {**self._others(who), digest(credential): _Credential(who=who, until=until)}

    def _others(self, name: str) -> dict[str, _Credential]:
        return {key: held for key, held in self._known.credentials.items() if held.who != name}

    def _not_invited(self, facility: str) -> dict[str, _Invited]:
        return {key: held for key, held in self._known.tokens.items() if held.facility != facility}

    def _save(self, known: _Known) -> None:
        write_secret(self._path, encode(known))
        self._known = known


def _is_over(held: _Credential) -> bool:
    return held.until is not None and held.until < time.time()


def _successor(secret: str, key: str) -> str:
    made = hmac.new(key.encode(), secret.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


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
