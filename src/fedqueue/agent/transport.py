"""What an agent needs of whatever carries its words to the coordinator, and how that may fail.

TransportError
├── CoordinatorUnreachableError      8   cut network, a proxy or a server that is not up: try again later
│   ├── CoordinatorBusyError         8   it answered that it cannot serve now
│   └── CoordinatorUntrustedError    8   it is not who it should be: name the right certificate as `ca`
└── CoordinatorRefusedError          9   it answered no: the same request will be refused again
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple, Protocol

from fedqueue.errors import FedQueueError
from fedqueue.protocol.contract import Answer, Verdict
from fedqueue.protocol.reports import Handin, Poll
from fedqueue.protocol.service import Refusal, SiteAnswer, SitePoll


class Own(NamedTuple):
    """A certificate of our own, for a server that asks for one."""

    certificate: Path | None = None
    key: Path | None = None


NO_OWN: Final = Own()


class Transport(Protocol):
    """Every method raises a `TransportError` if it cannot have done what it says."""

    def poll(self, said: Poll) -> Answer:
        """Tell, and hear what to do. One try."""

    def upload(self, path: Path, sequence: int, attempt: int, sha256: str, part: int = 0) -> None:
        """Send what the coordinator does not have of an update's file yet, however often the connection is cut."""

    def commit(self, sequence: int, attempt: int, sha256: str, handin: Handin) -> Verdict:
        """Say that all its bytes are there. Asked again, the answer is the same."""

    def give(self, path: Path, version: int, sha256: str, group: str) -> None:
        """Send this facility's part of the masked sum that makes a model, to the group of this name."""

    def download(self, version: int, target: Path, sha256: str) -> str:
        """Fetch a model into `target`, whole or not at all, from where an earlier try broke off."""


class FederationTransport(Protocol):
    """The same for a site of a federation."""

    def poll_all(self, said: SitePoll) -> SiteAnswer:
        """Tell of all runs at once, and hear of all. One try."""

    def of(self, run: str) -> Transport:
        """To one of its runs."""


class TransportError(FedQueueError):
    """A request that did not get what it wanted."""


class CoordinatorUnreachableError(TransportError):
    exit_code = 8


class CoordinatorBusyError(CoordinatorUnreachableError):
    """`reason` says why, in its words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CoordinatorUntrustedError(CoordinatorUnreachableError):
    """Its certificate is not the expected one. Waiting may help (it may be renewed), hurrying does not."""


class CoordinatorRefusedError(TransportError):
    exit_code = 9

    def __init__(self, message: str, reason: str, refusal: Refusal) -> None:
        super().__init__(message)
        self.reason = reason
        self.refusal: Refusal = refusal
