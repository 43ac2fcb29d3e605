"""A real coordinator in a process of its own, over TLS on loopback, with a tiny model and nobody who trains.

Tests speak to it as agents, operators and strangers do. `Facility` says what an agent says, in its words and in wrong
ones; `Raw` sends bytes that no client would.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedqueue import tensorfile
from fedqueue.agent.http_transport import Client, HttpRefusedError
from fedqueue.agent.transport import CoordinatorUnreachableError
from fedqueue.coordinator.access import OPERATOR_FILE
from fedqueue.coordinator.server import ADDRESS
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import Answer, JobOrder
from fedqueue.runs import replay
from tests.conftest import ONE_A_ROUND
from tests.waiting import LONGEST, wait_for

FACILITIES = ("north", "south", "south-1")
"""The last two have names of which one begins like the other."""

VALUES = 1000
"""Of the model: float32."""


@dataclass
class Served:
    """A coordinator under way, from outside."""

    folder: Path
    log: Path
    prefix: Sequence[str] = ()  # words before the command by which it is started
    plain: bool = False  # without TLS
    process: subprocess.Popen[bytes] = field(init=False)
    address: dict[str, Any] = field(init=False)
    credentials: dict[str, str] = field(default_factory=dict)
    agents: dict[str, Facility] = field(default_factory=dict)  # one for each facility: a second one is turned away
    spoken: list[str] = field(default_factory=list)  # every secret that was handed out
    _operator: Client | None = None

    def start(self, config: Path | None = None) -> None:
        """With a config: begin; without: go on."""
        with suppress(FileNotFoundError):
            (self.folder / ADDRESS).unlink()
        which = [str(config), "--out", str(self.folder)] if config is not None else [str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "fedqueue", "serve", *which, *["--plain-http"] * self.plain],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "FEDQUEUE_TRACEBACK": "1"},
            )
        wait_for(self._listens, "a coordinator that listens", self.said, every=0.02)
        self.address = json.loads((self.folder / ADDRESS).read_text())
        self._operator = None

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.said()
        if not (self.folder / ADDRESS).exists():
            return False
        with suppress(CoordinatorUnreachableError):
            self.address = json.loads((self.folder / ADDRESS).read_text())
            return bool(self.anyone().call("GET", "/v1/health"))
        return False

    def stop(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(LONGEST)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def port(self) -> int:
        return int(self.address["port"])

    @property
    def url(self) -> str:
        return f"{'http' if self.plain else 'https'}://127.0.0.1:{self.port}"

    @property
    def operator_secret(self) -> str:
        return (self.folder / OPERATOR_FILE).read_text()

    def client(self, credential: str | None) -> Client:
        ca = None if self.plain else self.certificate
        return Client(self.url, credential=credential, ca=ca, retries=1, backoff=0.01)

    def anyone(self) -> Client:
        return self.client(None)

    def operator(self) -> Client:
        if self._operator is None:
            self._operator = self.client(self.operator_secret)
        return self._operator

    def invite(self, name: str) -> str:
        token = str(self.operator().call("POST", f"/v1/facilities/{name}/invite")["token"])
        self.spoken.append(token)
        return token

    def enrol(self, name: str) -> str:
        answer = self.anyone().call("POST", "/v1/enroll", {"token": self.invite(name)})
        self.credentials[name] = str(answer["credential"])
        self.spoken.append(self.credentials[name])
        return self.credentials[name]

    def status(self) -> dict[str, Any]:
        return self.operator().call("GET", "/v1/status")

    def facility(self, name: str) -> Facility:
        if name not in self.agents:
            self.agents[name] = Facility(self, name, self.client(self.credentials.get(name) or self.enrol(name)))
        return self.agents[name]

    def replays(self) -> int:
        """Events in the ledger, which gives the same commands when it is read again."""
        return replay(self.folder)

    def memory(self) -> int:
        """Bytes of memory that are the process's own."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


@dataclass
class Facility:
    """What an agent says, as a test wants it said."""

    served: Served
    name: str
    client: Client
    journal: str = field(default_factory=lambda: secrets.token_hex(8))
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    n: int = 0
    taken: int | None = None  # the newest order

    def poll(self, *reports: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """Reports are numbered on from the last ones that were taken."""
        numbered = [{"n": self.n + i, **report} for i, report in enumerate(reports, 1)]
        body = {
            "journal": self.journal,
            "session": self.session,
            "generation": 1,
            "poll_seconds": 5.0,
            "reports": numbered,
            **changes,
        }
        answer = self.client.call("POST", "/v1/poll", body)
        self.n = int(answer["received"])
        return answer

    def order(self) -> JobOrder:
        """An order, taken to its scheduler; what it had before has failed."""
        found: list[JobOrder] = []

        def there() -> bool:
            self.served.operator().call("POST", f"/v1/facilities/{self.name}/join")
            found.extend(read(Answer, self.poll(), "answer").orders)
            return bool(found)

        if self.taken is not None:
            self.poll(failed(self.taken))
        wait_for(there, f"an order for {self.name}", every=0.05)
        self.taken = found[0].sequence
        self.poll({"kind": "submitted", "sequence": self.taken})
        return found[0]

    def running(self) -> JobOrder:
        """An order whose job has begun to run."""
        order = self.order()
        self.poll(started(order.sequence))
        return order

    def put(self, order: JobOrder, content: bytes, digest: str | None = None, attempt: int = 0) -> str:
        """Upload these bytes, whatever they are, as that digest; returns the path to commit."""
        path = f"/v1/updates/{order.sequence}/{attempt}/{digest or hashlib.sha256(content).hexdigest()}"
        with self.client._request(
            "PUT", f"{path}?offset=0&bytes={len(content)}", {"Content-Length": str(len(content))}, content
        ) as response:
            if response.status != 200:
                self.client._raise_for(path, response)
        return path

    def commit(self, path: str, base_version: int, **changes: Any) -> dict[str, Any]:
        """As an agent does it: while the update is being checked it asks again."""
        handin = {"base_version": base_version, "steps_done": 10, "train_seconds": 1.0, "admission_delay": 0.5}
        answers: list[dict[str, Any]] = []

        def decided() -> bool:
            answers.append(self.client.call("POST", path, {**handin, **changes}))
            return bool(answers[-1]["status"] != "checking")

        wait_for(decided, "what becomes of the update")
        return answers[-1]

    def hand_in(self, order: JobOrder, content: bytes, digest: str | None = None) -> dict[str, Any]:
        """Trained from the version of its assignment, or from the first."""
        base = order.assignment.base_version if order.assignment is not None else 0
        return self.commit(self.put(order, content, digest), base)


def started(sequence: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "started", "sequence": sequence, "attempt": 0, "admission_delay": 0.5, "ago": 0.1, **changes}


def ended(sequence: int, **changes: Any) -> dict[str, Any]:
    facts = {"attempt": 0, "steps_done": 10, "train_seconds": 1.0, "held_seconds": 1.5}
    return {"kind": "ended", "sequence": sequence, **facts, **changes}


def failed(sequence: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "failed", "sequence": sequence, "attempt": 0, "reason": "it fell", "transient": True, **changes}


def update(folder: Path, value: float = 0.5, **tensors: Any) -> bytes:
    """The bytes of an update that fits the model, or with these tensors instead."""
    path = folder / f"{secrets.token_hex(4)}.safetensors"
    tensorfile.write(path, tensors or {"weight": np.full(VALUES, value, np.float32)})
    content = path.read_bytes()
    path.unlink()
    return content


def refusal(act: Any, *args: Any, **changes: Any) -> HttpRefusedError:
    """What the coordinator answered when it would not."""
    try:
        answer = act(*args, **changes)
    except HttpRefusedError as error:
        return error
    raise AssertionError(f"it was not refused: {answer}")


def config_file(folder: Path, facilities: Sequence[str] = FACILITIES, **run: Any) -> Path:
    """A run whose rounds are long, so that nothing happens that a test did not do, unless `run` says otherwise."""
    settings = {"name": "wire", "strategy": "jit", "round_length": 600.0, "seconds": 36000.0, **run}
    strategy = {**(ONE_A_ROUND if settings["strategy"] == "jit" else {}), **settings.pop("options", {})}
    server = {"host": "127.0.0.1", "port": 0, "wait_for": 1, **settings.pop("server", {})}
    evaluation = {"where": settings.pop("scored_by", "nowhere"), **settings.pop("evaluation", {})}
    failures, trust = settings.pop("failures", {}), settings.pop("trust", {})
    megabytes = settings.pop("megabytes", VALUES * 4 / 1e6)
    lines = [
        "[run]",
        *_lines(settings),
        "[task]",
        'name = "timing"',
        "[simulator]",
        f"model_megabytes = {megabytes}",
        "[evaluation]",
        *_lines(evaluation),
        "[server]",
        *_lines(server),
        "[failures]",
        *_lines(failures),
        "[trust]",
        *_lines(trust),
        f"[strategy.{settings['strategy']}]",
        *_lines(strategy),
    ]
    for name in facilities:
        lines += ["[[facility]]", f'name = "{name}"']
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)  # whatever the umask
    return path


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


@contextmanager
def serving(
    folder: Path,
    facilities: Sequence[str] = FACILITIES,
    *,
    ends: bool = False,
    prefix: Sequence[str] = (),
    plain: bool = False,
    **run: Any,
) -> Iterator[Served]:
    """A coordinator of its own; in the end it must be alive, or over by itself where it `ends`."""
    served = Served(folder / "run", folder / "serve.log", prefix, plain)
    served.start(config_file(folder, facilities, **run))
    try:
        yield served
        assert served.process.poll() in (None, 0 if ends else None), f"the coordinator died:\n{served.said()}"
    finally:
        served.stop()


class Raw:
    """A connection, for bytes that no client would send."""

    def __init__(self, served: Served, *, context: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", served.port), timeout=LONGEST)
        if not served.plain:
            trusting = context or ssl.create_default_context(cafile=served.certificate)
            self.socket = trusting.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def status(self) -> int | None:
        """The status of the next answer, whose body is read too; None: the connection was closed without one."""
        answer = self.answer()
        return None if answer is None else answer[0]

    def answer(self) -> tuple[int, dict[str, str], bytes] | None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = self._receive()
            if not piece:
                return None
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        length = int(headers.get("content-length", "0"))
        while len(body) < length and (piece := self._receive()):
            body += piece
        return int(first.split()[1]), headers, body

    def is_closed(self) -> bool:
        """Whether the other side ends the connection; waits for it."""
        return self._receive() == b""

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except (ConnectionError, ssl.SSLError):
            return b""


def request(
    method: str, path: str, body: bytes = b"", *, credential: str | None = None, headers: Sequence[str] = ()
) -> bytes:
    """A request as bytes; its length is said unless `headers` say it."""
    lines = [f"{method} {path} HTTP/1.1", "Host: coordinator", *headers]
    if credential is not None:
        lines.append(f"Authorization: Bearer {credential}")
    said = any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers)
    if not said and (body or method in ("POST", "PUT")):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
