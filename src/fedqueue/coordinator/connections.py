"""Every connection, from the moment it is accepted until it is closed: how many there may be, for how long, for what.

uvicorn speaks HTTP and bounds the length of a request's head. What it leaves open is what anybody on the network could
end a run with: connections that it does not know of because they never finish their handshake, requests that do not go
on, answers that nobody reads, pieces so small that a processor is busy with nothing else. So we accept by ourselves.

A connection that has shown a credential is known, any other is a stranger. Where there are too many, the oldest
stranger has to go, so that who is honest gets in and who is at work stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import json
import logging
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedqueue.errors import ConfigError

log = logging.getLogger(__name__)

OWN_FILES: Final = 128
"""File descriptors that no connection may take: of the ledger, models, updates and logs."""
FILES_EACH: Final = 2
"""Of a connection: itself, and the file that it sends or receives."""
FEWEST: Final = 16
"""With fewer connections than that nobody can be served."""

KNOWN_EACH: Final = 32
"""Connections of one facility that count as known; an agent has three."""

HEAD_BYTES: Final = 16 << 10
"""Of a request, before its body."""
BODY_BYTES: Final = 16 << 10
"""Of a body, that must arrive in the time that a body has; else it stands still."""
PIECES: Final = 1000
PIECE_BYTES: Final = 32
"""A connection may come in so many pieces, and in as many more as it has brought so many bytes."""

_AT_ONCE: Final = struct.pack("ii", 1, 0)

TOGETHER: Final = 8
"""Connections that are accepted before others are served."""
HANDSHAKE_SECONDS: Final = 15.0
CLOSING_SECONDS: Final = 5.0

Phase = Literal["head", "body", "rest", "answer"]
"""head: what is asked. body: what comes with it. rest: what still comes of it although it was answered. answer: what
the other side takes of it."""


class Seldom:
    """Warnings that strangers can bring about as often as they like: one of a kind a minute."""

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._said: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def warn(self, kind: str, text: str) -> None:
        now = self._clock()
        if now - self._said.get(kind, -self._seconds) < self._seconds:
            self._unsaid[kind] += 1
            return
        more = self._unsaid.pop(kind, 0)
        log.warning(text + (f" (and {more} times more since it was said last)" if more else ""))
        self._said[kind] = now


@dataclass(eq=False, slots=True)
class Guest:
    """Whoever is at the other end of one connection."""

    address: str
    who: str = ""  # the name that it has shown a credential of
    socket: socket.socket | None = None  # while nothing else has it
    opening: asyncio.Task[None] | None = None
    connection: Connection | None = None  # once its handshake is over

    def send_away(self) -> None:
        if self.connection is not None:
            self.connection.cut()
        elif self.opening is not None:
            self.opening.cancel()


@dataclass
class Connections:
    """All that are open, whatever state they are in. Used from the event loop alone."""

    most: int
    most_of_address: int
    seldom: Seldom = field(default_factory=Seldom)
    _number: int = 0
    _of_address: Counter[str] = field(default_factory=Counter)
    _strangers: dict[str, dict[Guest, None]] = field(default_factory=dict)  # by address, the oldest first
    _known: dict[str, dict[Guest, None]] = field(default_factory=dict)  # by name

    def __post_init__(self) -> None:
        """Fewer if this process may not open so many files."""
        self.most = min(self.most, allow_files(self.most))

    def welcome(self, address: str) -> Guest | None:
        """A new one from there; None: there is no room even without the strangers."""
        group = _group(address)
        if self._of_address[group] >= self.most_of_address:
            self.seldom.warn("address", f"{address} has more than {self.most_of_address} connections: some are ended")
            if not self._send_one_away(group):
                return None
        elif self._number >= self.most:
            self.seldom.warn("all", f"there are more than {self.most} connections: some of strangers are ended")
            crowd = max(self._strangers, key=lambda key: len(self._strangers[key]), default=None)
            if crowd is None or not self._send_one_away(crowd):
                return None
        guest = Guest(group)
        self._number += 1
        self._of_address[group] += 1
        self._strangers.setdefault(group, {})[guest] = None
        return guest

    def send_any_away(self) -> None:
        """This process can open no more files."""
        self.seldom.warn("files", "no more files can be opened: some connections of strangers are ended")
        for group in list(self._strangers):
            self._send_one_away(group)

    def is_known_as(self, guest: Guest, who: str) -> None:
        """It has just shown a credential of this name."""
        if guest.who == who or guest.address not in self._of_address:
            return
        self._forget(guest)
        known = self._known.setdefault(who, {})
        if len(known) >= KNOWN_EACH:
            oldest = next(iter(known))
            self._forget(oldest)
            oldest.who = ""
            self._strangers.setdefault(oldest.address, {})[oldest] = None
        guest.who = who
        self._known.setdefault(who, {})[guest] = None

    def left(self, guest: Guest) -> None:
        """Its connection is closed, or is about to be."""
        if not self._forget(guest):
            return
        self._number -= 1
        self._of_address[guest.address] -= 1
        if not self._of_address[guest.address]:
            del self._of_address[guest.address]

    def _send_one_away(self, group: str) -> bool:
        oldest = next(iter(self._strangers.get(group, ())), None)
        if oldest is None:
            return False
        self.left(oldest)
        oldest.send_away()
        return True

    def _forget(self, guest: Guest) -> bool:
        book, key = (self._known, guest.who) if guest.who else (self._strangers, guest.address)
        if guest not in book.get(key, ()):
            return False
        del book[key][guest]
        if not book[key]:
            del book[key]
        return True


def _group(address: str) -> str:
    """Who has one address of IPv6 has all that begin like it."""
    with_zone, _, _ = address.partition("%")
    found = ipaddress.ip_address(with_zone)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address


def allow_files(connections: int) -> int:
    """Let this process open as many files as it needs for so many connections; for how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OWN_FILES + FILES_EACH * connections
    if 0 <= soft < wanted:
        soft = min(wanted, hard) if hard >= 0 else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = connections if soft < 0 else (soft - OWN_FILES) // FILES_EACH
    if found < min(FEWEST, connections):
        least = OWN_FILES + FILES_EACH * FEWEST
        raise ConfigError(f"server.connections: only {soft} files may be open; allow {least} or more (`ulimit -n`)")
    return found


class Server(uvicorn.Server):
    """uvicorn's, but it is we who say whom it lets in."""

    def __init__(self, settings: uvicorn.Config, connections: Connections) -> None:
        super().__init__(settings)
        self._connections = connections
        self._accepting: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (tasks := [*self._accepting, *self._opening]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        for number in itertools.count(1):
            try:
                accepted, (address, *_) = await loop.sock_accept(listener)
            except OSError as error:  # or who called has gone already
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._connections.send_any_away()
                    await asyncio.sleep(0.1)
                continue
            self._begin(accepted, address)
            if number % TOGETHER == 0:
                await asyncio.sleep(0)  # others are served meanwhile, and who was sent away leaves

    def _begin(self, accepted: socket.socket, address: str) -> None:
        guest = self._connections.welcome(address)
        if guest is None:
            accepted.close()
            return

        def over(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            guest.opening = None
            if guest.socket is not None:  # it was sent away before it was looked at
                guest.socket.close()
            if guest.connection is None:
                self._connections.left(guest)

        guest.socket = accepted
        guest.opening = asyncio.create_task(self._open(guest))
        self._opening.add(guest.opening)
        guest.opening.add_done_callback(over)

    async def _open(self, guest: Guest) -> None:
        """Its handshake, if there is TLS."""
        accepted, guest.socket = guest.socket, None
        assert accepted is not None
        seconds = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": CLOSING_SECONDS}
        with contextlib.suppress(OSError):  # which errors of TLS and of time are too
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection(guest),
                accepted,
                ssl=self.config.ssl,
                **(seconds if self.config.ssl is not None else {}),
            )

    def _connection(self, guest: Guest) -> asyncio.Protocol:
        state = {**self.lifespan.state, "known": lambda who: self._connections.is_known_as(guest, who)}
        made: Connection = self.config.http_protocol_class(  # type: ignore[assignment, call-arg]
            config=self.config, server_state=self.server_state, app_state=state
        )
        made.guest, made.gone = guest, lambda: self._connections.left(guest)
        return made


class _Requests(h11.Connection):
    """Takes no body whose length is not said: in chunks of a byte it costs a thousand times what it brings."""

    without_length = False

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            self.without_length = True
            raise h11.RemoteProtocolError("a body must say its Content-Length", error_status_hint=411)
        return event


class Connection(H11Protocol):
    """One connection that may speak: how long it may take over a request and its answer."""

    seconds: ClassVar[dict[Phase, float]] = {"head": 30.0, "body": 60.0, "rest": 60.0, "answer": 120.0}
    """All of a head and of a rest must be there by then. A body may take its time, but not stand still for so long; so
    may an answer, of which a mebibyte at most is on its way."""

    guest: Guest | None = None
    gone: Callable[[], None] | None = None

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        self.conn = self._requests = _Requests(h11.SERVER, HEAD_BYTES)
        self._phase: Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pieces = self._bytes = self._bytes_then = 0
        self._said_no = False  # and listens no more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket: socket.socket = transport.get_extra_info("socket")
        if self.guest is not None:
            self.guest.connection = self
        self._enter("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(None)
        if self.gone is not None:
            self.gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pieces += 1
        self._bytes += len(data)
        if self._pieces > PIECES + self._bytes // PIECE_BYTES:
            self.cut()
        elif not self._said_no:
            self._take(data)
            self._look()

    def _take(self, data: bytes) -> None:
        # A head that is too long is found before it is taken apart.
        step = HEAD_BYTES if self.conn.their_state is h11.IDLE else len(data)
        try:
            for begin in range(0, len(data), step):
                if not self._said_no:
                    super().data_received(data[begin : begin + step])
        except h11.LocalProtocolError:  # it was answered already, and what followed is no HTTP
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What comes after it is not looked at, but let come for a while: to close at once may lose the answer."""
        status, reason = (411, "a body must say its Content-Length") if self._requests.without_length else (400, msg)
        content = json.dumps({"reason": reason}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._said_no = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._enter("answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._phase = None
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._look()

    def _look(self) -> None:
        """What is it at?"""
        state: Any = self.conn.their_state
        if self.transport.is_closing() or self.flow.write_paused:
            self._enter("answer")  # also the last of it: who does not read would never let us close
        elif self._said_no:
            self._enter("rest")
        elif state is h11.IDLE:
            self._enter("head" if self.timeout_keep_alive_task is None else None)
        elif state is h11.SEND_BODY:
            self._enter("rest" if self.cycle is not None and self.cycle.response_complete else "body")
        else:
            self._enter(None)

    def _enter(self, phase: Phase | None) -> None:
        if phase == self._phase:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._phase, self._bytes_then = phase, self._bytes
        if phase is not None:
            self._timer = self.loop.call_later(self.seconds[phase], self._late, phase)

    def _late(self, phase: Phase) -> None:
        goes_on = self.flow.read_paused or self._bytes - self._bytes_then >= BODY_BYTES
        if phase == "body" and goes_on:  # or it is we who take our time
            self._phase = None
            self._enter(phase)
        else:
            self.cut()

    def cut(self) -> None:
        """The end, whatever is still under way: the kernel too lets go of what nobody reads."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()
