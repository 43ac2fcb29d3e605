"""A row of the table of endpoints, and a request to one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from fedqueue.coordinator.rights import Right

BODY_LIMIT: Final = 1 << 20
"""Bytes of a JSON body."""


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, as a handler sees it: who asks, the numbers and names of its path, its body."""

    who: str
    secret: str  # by which that is known
    request: Request
    path: Mapping[str, Any]  # numbers are whole numbers
    body: Any

    @property
    def address(self) -> str:
        return address_of(self.request)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One row of the table."""

    method: str
    path: str
    right: Right | None  # that who asks needs; None: anyone may
    handle: Callable[[Any, Call], Awaitable[Any]]  # of the service whose table it is in; what it answers is a `Reply`
    body: type | None = None
    most: int = BODY_LIMIT
    query: tuple[str, ...] = ()
    about: str = ""
    public: bool = False  # nobody need ask for it where `server.open_reading` is set
    noted: str = ""  # what the audit says of it before it is done; empty: nothing, or its handler does
