"""The agent's side of HTTP: small calls in JSON, and files of any size that survive a cut connection.

TLS is always verified. Plain http is for loopback only, and never goes through a proxy.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from math import inf
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import quote, unquote
from urllib.request import getproxies_environment, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, LocationParseError, LocationValueError
from urllib3.response import BaseHTTPResponse, HTTPResponse
from urllib3.util import Url, make_headers, parse_url

from fedqueue import PROTOCOL, __version__
from fedqueue.agent.transport import (
    CoordinatorBusyError,
    CoordinatorRefusedError,
    CoordinatorUnreachableError,
    CoordinatorUntrustedError,
    TransportError,
)
from fedqueue.errors import ConfigError, FedQueueError, StorageError
from fedqueue.files import ArrivingFile, failpoint, only_mine
from fedqueue.network import is_loopback
from fedqueue.protocol.codec import Json, encode, read
from fedqueue.protocol.contract import REASON_LENGTH, Answer, Invitation, Verdict, one_line
from fedqueue.protocol.reports import Handin, Poll
from fedqueue.protocol.service import (
    Done,
    Enrolled,
    EnrolmentRequest,
    FederationStatus,
    KeptModel,
    KeptModels,
    MaskedHandin,
    Offset,
    Refusal,
    RefusalBody,
    Renewed,
    RunStatus,
    SiteAnswer,
    SitePoll,
    Submission,
    Submitted,
    UserGiven,
    UserRole,
    Users,
    UserWanted,
)

log = logging.getLogger("fedqueue.agent")

T = TypeVar("T")

PIECE_BYTES: Final = 64 << 20
"""Of an upload, in one request."""
BUFFER_BYTES: Final = 1 << 20
ANSWER_BYTES: Final = 16 << 20
"""The longest JSON answer that is read."""
EXCHANGE_SECONDS: Final = 180.0
"""That a request and its answer may take, beside what their files take."""
LEAST_RATE: Final = 16 << 10
"""Bytes a second, with which these must come."""
LATER: Final = frozenset({408, 425, 429})
"""Refusals that mean "not now", beside every 5xx."""
REFUSALS: Final[Mapping[int, Refusal]] = {401: "not allowed", 403: "not allowed", 410: "superseded"}


class HttpRefusedError(CoordinatorRefusedError):
    """With what only HTTP knows of it."""

    def __init__(self, url: str, status: int, reason: str, answer: RefusalBody | None = None) -> None:
        self.status, self.answer = status, answer or RefusalBody(reason=reason)
        refusal: Refusal = REFUSALS.get(status, "refused")
        if self.answer.received is not None:
            refusal = "set back"
        elif self.answer.offset is not None:
            refusal = "other bytes"
        super().__init__(f"{url}: refused with status {status}: {reason}", reason, refusal)


def update_path(sequence: int, attempt: int, sha256: str, part: int = 0) -> str:
    """Where an update is sent to (PUT), asked about (GET) and committed (POST)."""
    which = f"{attempt}/part-{part}" if part else f"{attempt}"
    return f"/v1/updates/{sequence}/{which}/{sha256}"


class Client:
    """Speaks to one coordinator. Times are in seconds.

    A transfer is tried again after a cut, from where it was, until `retries` tries in a row bring no byte; the pauses
    between them double from `backoff` up to `longest_backoff`, shortened at random so that agents do not come in step.
    """

    def __init__(
        self,
        url: str,
        *,
        credential: str | None = None,
        ca: Path | None = None,
        proxy: str | None = None,
        connect_timeout: float = 10.0,
        read_timeout: float = 60.0,
        retries: int = 6,
        exchange_seconds: float = EXCHANGE_SECONDS,
        backoff: float = 1.0,
        longest_backoff: float = 30.0,
        piece_bytes: int = PIECE_BYTES,
        keep: Callable[[str], object] | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        """`certificate`, with its `key`: to show, where the server asks for one.

        `keep`: writes a renewed credential where the one that it replaces came from; without, none is renewed."""
        parsed = _coordinator_url(url)
        self.url = self._root = parsed.url.rstrip("/")
        self._own = _Credential(credential, keep)
        self._retries = retries
        self._backoff = backoff
        self._longest_backoff = longest_backoff
        self._piece_bytes = piece_bytes
        self._exchange_seconds = exchange_seconds
        settings: Json = {  # of urllib3
            "timeout": urllib3.Timeout(connect=connect_timeout, read=read_timeout),
            "retries": False,  # they are made here, where it is known what has arrived
            "maxsize": 4,
            "blocksize": BUFFER_BYTES,
        }
        if parsed.scheme == "https":
            settings["ssl_context"] = _trust(ca)
            if certificate is not None:
                _show(settings["ssl_context"], certificate, key)
        through = _proxy_for(parsed, proxy)
        self._pool: urllib3.PoolManager
        if through is None:
            self._pool = urllib3.PoolManager(**settings)
        else:
            headers = make_headers(proxy_basic_auth=unquote(through.auth)) if through.auth else None
            bare = through._replace(auth=None).url
            self._pool = urllib3.ProxyManager(bare, proxy_headers=headers, **settings)
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}

    def close(self) -> None:
        self._pool.clear()

    @property
    def credential(self) -> str | None:
        return self._own.secret

    def of(self, run: str) -> Client:
        """To one run of a federation, over the same connections."""
        other = copy.copy(self)
        other.url = f"{self.url}/runs/{quote(run, safe='')}"
        return other

    def poll_all(self, said: SitePoll) -> SiteAnswer:
        answer = self._checked(SiteAnswer, self.call("POST", "/v1/poll", said))
        return replace(answer, over={run: _text(why) or "" for run, why in answer.over.items()})

    def poll(self, said: Poll) -> Answer:
        answer = self._checked(Answer, self.call("POST", "/v1/poll", said))
        return replace(answer, over=_text(answer.over))

    def commit(self, sequence: int, attempt: int, sha256: str, handin: Handin) -> Verdict:
        verdict = self._checked(Verdict, self.call("POST", update_path(sequence, attempt, sha256, handin.part), handin))
        return replace(verdict, reason=_text(verdict.reason))

    def enrol(self, token: str) -> Enrolled:
        return read(Enrolled, self.call("POST", "/v1/enroll", EnrolmentRequest(token=token)), "")

    # What an operator says

    def status(self) -> RunStatus:
        return self._checked(RunStatus, self.call("GET", "/v1/status"))

    def steer(self, word: str) -> Done:
        """Tell the run: pause, resume or stop."""
        return self._checked(Done, self.call("POST", f"/v1/run/{word}"))

    def roll_back(self, version: int) -> Done:
        """Take back every model after this one."""
        return self._checked(Done, self.call("POST", f"/v1/rollback/{version}"))

    def tell(self, facility: str, word: str) -> Done:
        """Have a facility treated so: drain, join or revoke."""
        return self._checked(Done, self.call("POST", f"/v1/facilities/{quote(facility, safe='')}/{word}"))

    def invite(self, facility: str) -> Invitation:
        return self._checked(Invitation, self.call("POST", f"/v1/facilities/{quote(facility, safe='')}/invite"))

    def federation(self) -> FederationStatus:
        return self._checked(FederationStatus, self.call("GET", "/v1/federation"))

    def submit(self, submission: Submission) -> Submitted:
        return self._checked(Submitted, self.call("POST", "/v1/runs", submission))

    def users(self) -> Users:
        return self._checked(Users, self.call("GET", "/v1/users"))

    def set_user(self, name: str, role: UserRole, *, anew: bool) -> UserGiven:
        wanted = UserWanted(role=role, anew=anew)
        return self._checked(UserGiven, self.call("POST", f"/v1/users/{quote(name, safe='')}", wanted))

    def remove_user(self, name: str) -> Done:
        return self._checked(Done, self.call("POST", f"/v1/users/{quote(name, safe='')}/remove"))

    def kept_models(self, run: str) -> KeptModels:
        """Of a run of a federation, also when it is over."""
        return self._checked(KeptModels, self.call("GET", f"{_run_path(run)}/models"))

    def kept_model(self, run: str, model: KeptModel, target: Path) -> None:
        self.download(model.version, target, model.sha256, below=_run_path(run))

    def log(self, run: str) -> str:
        """The end of it."""
        path = f"{_run_path(run)}/log"
        with self._request("GET", path, {}, None) as response:
            if response.status != 200:
                self._raise_for(path, response)
            return response.read(ANSWER_BYTES).decode(errors="replace")

    # How it is said

    def call(self, method: str, path: str, body: object = None) -> Json:
        """Sends JSON and returns the JSON object answered, for 200 and 202 alike. One try."""
        data = None if body is None else encode(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        return self._ask(method, path, headers, data)

    def upload(self, path: Path, sequence: int, attempt: int, sha256: str, part: int = 0) -> None:
        """Sends what the coordinator does not have of the file yet. To `commit` it comes afterwards."""
        self._upload(path, update_path(sequence, attempt, sha256, part))

    def give(self, path: Path, version: int, sha256: str, group: str) -> None:
        place = f"/v1/masked/{version}/{sha256}"
        self._upload(path, place)
        self._checked(Verdict, self.call("POST", place, MaskedHandin(group=group)))

    def _upload(self, path: Path, place: str) -> None:
        tries = _Tries(self._retries, self._backoff, self._longest_backoff)
        buffer = bytearray(BUFFER_BYTES)
        with path.open("rb", buffering=0) as file:
            total = os.fstat(file.fileno()).st_size
            have: int | None = None
            while True:
                try:
                    if have is None:
                        have = self._offset(
                            place, total, self._checked(Offset, self._ask("GET", place, {}, None)).offset
                        )
                        tries.progress(have)
                    if have == total:
                        return
                    length = min(self._piece_bytes, total - have)
                    answer = self._ask(
                        "PUT",
                        f"{place}?offset={have}&bytes={total}",
                        {"Content-Length": str(length), "Content-Type": "application/octet-stream"},
                        _pieces(file.fileno(), have, length, buffer),
                    )
                    have = self._offset(place, total, self._checked(Offset, answer).offset)
                    tries.progress(have)
                except CoordinatorUntrustedError:
                    raise
                except CoordinatorUnreachableError as error:
                    have = None  # how much of the piece arrived only the coordinator knows
                    tries.failed(error)
                except HttpRefusedError as error:
                    if error.status != 409 or error.answer.offset is None:
                        raise
                    have = self._offset(place, total, error.answer.offset)
                    tries.failed(CoordinatorUnreachableError(f"{self.url}{place}: never has what it says it has"))

    def download(self, version: int, target: Path, sha256: str | None = None, *, below: str = "/v1") -> str:
        """Fetches a model into `target`, whole or not at all, and returns its sha256, which is checked.

        What arrived before a cut stays in `target`.part, also when this process ends, and is gone on from.
        """
        path = f"{below}/models/{version}"
        tries = _Tries(self._retries, self._backoff, self._longest_backoff)
        part = ArrivingFile(target)
        etag = sha256
        restarted = False
        with part:
            while True:
                try:
                    etag = self._fetch(path, part, etag)
                except CoordinatorUntrustedError:
                    raise
                except CoordinatorUnreachableError as error:
                    tries.progress(part.have)
                    tries.failed(error)
                    continue
                wanted = sha256 or etag
                if part.sha256() == wanted:
                    part.finish()
                    return wanted
                if restarted:
                    raise CoordinatorUnreachableError(
                        f"{self.url}{path}: its sha256 is {part.sha256()}, expected {one_line(wanted)[:64]}; "
                        "the transfer is damaged"
                    )
                # What was left from an earlier try may have been of another file: once more from the start.
                part.restart()
                restarted = True

    def _fetch(self, path: str, part: ArrivingFile, etag: str | None) -> str:
        """Appends what is missing to `part`; returns the sha256 that the coordinator names."""
        headers = {"Accept-Encoding": "identity"}
        if part.have:
            headers["Range"] = f"bytes={part.have}-"
            if etag is not None:
                headers["If-Range"] = f'"{etag}"'
        with self._request("GET", path, headers, None) as response:
            named = response.headers.get("ETag", "").strip('"')
            if response.status == 416:  # nothing is missing, or what is there is not of this file
                if response.headers.get("Content-Range") != f"bytes */{part.have}":
                    part.restart()
                    raise CoordinatorUnreachableError(f"{self.url}{path}: has fewer bytes than were received before")
                return named
            if response.status not in (200, 206):
                self._raise_for(path, response)
            if response.status == 200:
                part.restart()
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {part.have}-"):
                part.restart()
                raise CoordinatorUnreachableError(f"{self.url}{path}: answered with another range than was asked for")
            if not re.fullmatch("[0-9a-f]{64}", named):
                raise HttpRefusedError(self.url + path, response.status, "its ETag is no sha256")
            length = response.headers.get("Content-Length", "")
            if not re.fullmatch("[0-9]{1,18}", length) or "Transfer-Encoding" in response.headers:
                raise HttpRefusedError(self.url + path, response.status, "it has no Content-Length")
            part.needs(int(length))
            _exchange.deadline.allow(int(length) / LEAST_RATE)
            end = part.have + int(length)
            part.fill(_body(response))
            if part.have != end:
                raise CoordinatorUnreachableError(f"{self.url}{path}: the connection was cut")
        return named

    @staticmethod
    def _checked(kind: type[T], given: object) -> T:
        """An agent checks all that a coordinator says before it notes, writes or names anything of it."""
        try:
            return read(kind, given, "answer")
        except (ConfigError, RecursionError) as error:
            what = one_line(str(error))[:REASON_LENGTH]
            raise CoordinatorUnreachableError(
                f"the coordinator's answer is none that this agent knows: {what}"
            ) from None

    def _offset(self, place: str, total: int, have: int) -> int:
        if not 0 <= have <= total:
            raise HttpRefusedError(
                self.url + place, 200, f"claims to have {str(have)[:40]} of {total:,} bytes; is it another file?"
            )
        return have

    def _ask(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> Json:
        with self._request(method, path, headers, body) as response:
            if response.status not in (200, 202):
                self._raise_for(path, response)
            answer = _json_object(response.read(ANSWER_BYTES + 1))
            if answer is None:
                raise CoordinatorUnreachableError(
                    f"{self.url}{path}: its answer is no JSON object; is it a coordinator?"
                )
            is_due = "FedQueue-Renew" in response.headers
        if is_due:
            self._renew()
        return answer

    def _renew(self) -> None:
        """Another credential in place of this one. Whatever goes wrong, this one works for a while: it is tried again
        by the next call."""
        own = self._own
        if own.keep is None or not own.renewing.acquire(blocking=False):
            return
        try:
            root = copy.copy(self)
            root.url, root._own = self._root, _Credential(own.secret, None)
            made = self._checked(Renewed, root.call("POST", "/v1/credential")).credential
            failpoint("credential.came")
            own.keep(made)
            failpoint("credential.kept")
            own.secret = made
        except (FedQueueError, ValueError) as error:
            log.debug(f"{self.url}: the credential is renewed later: {error}")
        finally:
            own.renewing.release()

    def _raise_for(self, path: str, response: BaseHTTPResponse) -> NoReturn:
        content = response.read(BUFFER_BYTES)
        answer = _json_object(content) or {}  # a proxy may have said it
        told = next((str(answer[key]) for key in ("reason", "error", "detail") if key in answer), "")
        reason = (one_line(told or content[:300].decode(errors="replace")) or "no reason given")[:300]
        if response.status >= 500 or response.status in LATER:
            raise CoordinatorBusyError(f"{self.url}{path}: cannot serve now ({response.status}): {reason}", reason)
        numbers = {name: answer[name] for name in ("received", "offset") if type(answer.get(name)) is int}
        raise HttpRefusedError(self.url + path, response.status, reason, RefusalBody(reason=reason, **numbers))

    def _unreachable(self, error: BaseException) -> CoordinatorUnreachableError:
        causes = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return CoordinatorUntrustedError(
                    f"{self.url}: its certificate is not trusted ({cause.verify_message}); if it is the right one, "
                    "name its file as `ca`"
                )
        why = one_line(str(causes[-1]))[:300] or type(causes[-1]).__name__
        return CoordinatorUnreachableError(f"{self.url}: cannot be reached: {why}")

    @contextmanager
    def _request(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> Iterator[BaseHTTPResponse]:
        """The answer, with its body still to be read; whatever goes wrong with the wire is `Unreachable`."""
        sent = {"User-Agent": f"fedqueue/{__version__}", "FedQueue-Protocol": str(PROTOCOL), **headers}
        if self.credential is not None:
            sent["Authorization"] = f"Bearer {self.credential}"
        response: BaseHTTPResponse | None = None
        length = int(headers.get("Content-Length", "0"))
        deadline = _exchange.deadline = _Deadline(self._exchange_seconds + length / LEAST_RATE)
        try:
            # Redirects are refused: the credential goes to no other place than the one that was configured.
            options = {"headers": sent, "body": body, "redirect": False, "preload_content": False}
            response = self._pool.request(method, self.url + path, **options)
            yield response
            response.drain_conn()
            response.release_conn()
            response = None
        except (HTTPError, HTTPException, OSError) as error:
            if deadline.has_passed:
                raise CoordinatorUnreachableError(f"{self.url}{path}: it takes longer than it may") from None
            raise self._unreachable(error) from None
        finally:
            deadline.over()
            if response is not None:  # its connection is in the middle of something
                response.close()


class _Credential:
    """That several clients of one server share."""

    def __init__(self, secret: str | None, keep: Callable[[str], object] | None) -> None:
        self.secret, self.keep = secret, keep
        self.renewing = threading.Lock()


class _Deadline:
    """Ends an exchange that takes longer than it may, however the other side keeps it going: byte by byte it could for
    ever, since each read would be in time."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._line: socket.socket | None = None
        self.has_passed = False
        self._wait()

    def _wait(self) -> None:
        self._timer = threading.Timer(max(0.0, self._ends - time.monotonic()), self._look)
        self._timer.daemon = True
        self._timer.start()

    def allow(self, seconds: float) -> None:
        """So much longer."""
        self._ends += seconds

    def watch(self, line: socket.socket) -> None:
        self._let_go()
        self._line = line.dup()  # what closes the connection does not end what is still read from it
        if self.has_passed:
            self._cut()

    def over(self) -> None:
        self._ends = inf
        self._timer.cancel()
        self._let_go()

    def _let_go(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _look(self) -> None:
        if self._ends == inf:
            return
        if time.monotonic() < self._ends:
            self._wait()
            return
        self.has_passed = True
        self._cut()

    def _cut(self) -> None:
        line = self._line
        if line is not None:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


class _Exchange(threading.local):
    deadline: _Deadline  # of the one that this thread is at


_exchange = _Exchange()


class _Connection(HTTPConnection):
    """Can be cut at any moment, also in the middle of a handshake, when its own socket belongs to nobody."""

    _line: socket.socket | None = None

    def _new_conn(self) -> socket.socket:
        made = super()._new_conn()
        self._line = made.dup()
        _exchange.deadline.watch(self._line)
        return made

    def request(self, *args: Any, **changes: Any) -> None:
        if self._line is not None:
            _exchange.deadline.watch(self._line)
        super().request(*args, **changes)

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
        super().close()


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class _Tries:
    """Counts tries in a row without progress, and pauses between them."""

    def __init__(self, most: int, backoff: float, longest: float) -> None:
        self._most, self._backoff, self._longest = most, backoff, longest
        self._failures, self._best = 0, 0

    def progress(self, have: int) -> None:
        if have > self._best:
            self._failures, self._best = 0, have

    def failed(self, error: TransportError) -> None:
        self._failures += 1
        if self._failures > self._most:
            raise error
        time.sleep(min(self._longest, self._backoff * 2 ** (self._failures - 1)) * random.uniform(0.5, 1.0))


def _run_path(run: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}"


def _pieces(file: int, place: int, length: int, buffer: bytearray) -> Iterator[memoryview]:
    """`length` bytes of a file, through one buffer: each piece is to be used before the next is asked for."""
    view = memoryview(buffer)
    end = place + length
    while place < end:
        try:
            count = os.preadv(file, [view[: end - place]], place)
        except OSError as error:
            raise StorageError(f"an update cannot be read: {error.strerror}") from None
        if count == 0:
            raise StorageError("an update became shorter while it was sent")
        yield view[:count]
        place += count


def _body(response: BaseHTTPResponse) -> Callable[[memoryview], int]:
    """Reads what is left of a body into a buffer. It goes past urllib3, which makes a new object of each piece;
    so urllib3 cannot tell whether all of it came."""
    assert isinstance(response, HTTPResponse)
    response.enforce_content_length = False
    read_into: Callable[[memoryview], int] = response._fp.readinto  # type: ignore[union-attr]
    return read_into


def _json_object(content: bytes) -> Json | None:
    if len(content) > ANSWER_BYTES:
        return None
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _text(said: str | None) -> str | None:
    return None if said is None else one_line(said)[:REASON_LENGTH]


# Where the coordinator is, what is trusted to be it, and the proxy on the way -----------------------------------


def _coordinator_url(url: str) -> Url:
    try:
        parsed = parse_url(url)
    except (LocationParseError, LocationValueError):
        raise ConfigError(f"coordinator URL {url!r} is no URL; it looks like https://host:8443") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"coordinator URL {url!r} must begin with https:// and name a host")
    if parsed.auth or parsed.query or parsed.fragment:
        raise ConfigError(f"coordinator URL {parsed._replace(auth=None).url!r} must have no user, '?' or '#'")
    if parsed.scheme == "http" and not is_loopback(parsed.host):
        raise ConfigError(f"coordinator URL {url!r}: plain http is for loopback only; use https")
    return parsed


def _trust(ca: Path | None) -> ssl.SSLContext:
    """Verifies the chain and the host's name; with `ca`, that file alone is trusted, be it an authority or a pin."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(f"{ca}: cannot be read as PEM certificates; give the coordinator's certificate") from None
    if ca is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a pinned certificate need not be its own issuer
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _show(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Our own certificate, to a server that asks for one."""
    try:
        if key is not None:
            only_mine(key)
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or error.__class__.__name__
        raise ConfigError(
            f"{certificate}: it and its key cannot be used: {why}; give PEM files without password"
        ) from None


def _proxy_for(url: Url, proxy: str | None) -> Url | None:
    """The proxy to go through: the one given, or that of HTTPS_PROXY unless NO_PROXY names the host."""
    host = url.host or ""
    if url.scheme == "http":
        if proxy is not None:
            raise ConfigError(f"plain http to {host} cannot go through a proxy; use https")
        return None
    if proxy is None:
        environment = getproxies_environment()
        where = host.strip("[]") if url.port is None else f"{host.strip('[]')}:{url.port}"
        found = environment.get("https") or environment.get("all")
        if not found or proxy_bypass(where):
            return None
        proxy = found
    try:
        parsed = parse_url(proxy if "://" in proxy else f"http://{proxy}")
    except (LocationParseError, LocationValueError):
        raise ConfigError("the proxy's URL cannot be read; it looks like http://proxy.site:3128") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError("the proxy's URL must begin with http:// or https:// and name a host")
    return parsed
