"""One connection to the coordinator: how long it may take over a request, and how many there may be.

uvicorn bounds the length of a request's head, and how long a connection lies idle between two requests. It does not
bound how long a request takes to arrive, and a connection that never ends costs a file descriptor, which the ledger
and the updates need too.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

Phase = Literal["head", "body", "rest"]
"""head: what is asked. body: what comes with it. rest: what still comes of it although it was answered."""


class Connection(H11Protocol):
    most: ClassVar[int] = 512
    """At once, from everybody together; one more is closed."""

    seconds: ClassVar[dict[Phase, float]] = {"head": 30.0, "body": 60.0, "rest": 60.0}
    """All of a head and of a rest must be there by then; a body may take its time, but not stand still for longer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._phase: Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._enter("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # it was answered already, and what followed is no HTTP
            self.transport.abort()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._enter("rest")

    def _look(self) -> None:
        state: Any = self.conn.their_state
        if self.transport.is_closing():
            self._enter(None)
        elif state is h11.IDLE:
            self._enter("head")
        elif state is h11.SEND_BODY:
            self._enter("rest" if self.cycle is not None and self.cycle.response_complete else "body")
        else:
            self._enter(None)

    def _enter(self, phase: Phase | None) -> None:
        if phase == self._phase and phase != "body":
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._phase = phase
        if phase is not None:
            self._timer = self.loop.call_later(self.seconds[phase], self._late, phase)

    def _late(self, phase: Phase) -> None:
        if phase == "body" and self.flow.read_paused:  # it is we who take our time
            self._phase = None
            self._enter(phase)
        else:
            self.transport.abort()
