"""Files over real connections: TLS, cuts at any byte, a killed server, a proxy, wrong certificates, full disks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedqueue.agent.http_transport import Client, HttpRefusedError
from fedqueue.agent.transport import (
    CoordinatorRefusedError,
    CoordinatorUnreachableError,
    CoordinatorUntrustedError,
    TransportError,
)
from fedqueue.coordinator import transfers as blobs
from fedqueue.errors import ConfigError, StorageError
from tests.waiting import LONGEST, wait_for

CREDENTIAL = "secret-of-north"
SIZE = 6_000_011
CONTENT = random.Random(1).randbytes(SIZE)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


# The server: the smallest app over blobs.py, run as a process of its own ---------------------------------------------


def app(folder: Path) -> Starlette:
    """Serves FOLDER/model as any version; parts of updates go to FOLDER/SHA256."""

    def refused(error: blobs.BlobError) -> Response:
        answer: dict[str, Any] = {"reason": str(error)}
        if isinstance(error, blobs.BlobConflict):
            answer["offset"] = error.have
        return JSONResponse(answer, error.status)

    async def update(request: Request) -> Response:
        part = folder / request.path_params["sha256"]
        if request.headers.get("authorization") != f"Bearer {CREDENTIAL}":
            return JSONResponse({"reason": "unknown credential"}, 401)
        if request.method == "GET":
            return JSONResponse({"offset": blobs.have(part)})
        if request.method == "POST":
            body = await request.json()
            found = hashlib.sha256(part.read_bytes()).hexdigest()
            return JSONResponse({"status": "accepted" if found == part.name else "rejected", "reason": body["note"]})
        query = request.query_params
        try:
            have = await blobs.receive(request, part, offset=int(query["offset"]), total=int(query["bytes"]))
        except blobs.BlobError as error:
            return refused(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse({"offset": have})

    async def model(request: Request) -> Response:
        path = folder / "model"
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        return blobs.send_file(path, request.headers.get("range"), etag, request.headers.get("if-range"))

    async def status(request: Request) -> Response:
        return Response("down\nfor repair", int(request.path_params["status"]), {"Location": "/v1/models/1"})

    place = "/v1/updates/{sequence:int}/{attempt:int}/{sha256}"
    return Starlette(
        routes=[
            Route(place, update, methods=["GET", "PUT", "POST"]),
            Route("/v1/models/{version:int}", model),
            Route("/status/{status}", status),
        ]
    )


def serve(folder: str, port: str, certificate: str, key: str) -> None:
    uvicorn.run(app(Path(folder)), port=int(port), ssl_certfile=certificate, ssl_keyfile=key, log_level="critical")


class Server:
    def __init__(self, folder: Path, certificate: Path, key: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._arguments = [str(folder), str(self.port), str(certificate), str(key)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.test_transfer", *self._arguments])
        wait_for(lambda: is_open(self.port), "it listens", every=0.01)

    def stop(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(LONGEST)

    def part(self) -> Path:
        return self.folder / SHA256


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator")])
    names = [x509.DNSName("localhost")]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(*encoding))
    return paths


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "right")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "model").write_bytes(CONTENT)
    server = Server(folder, *certificate)
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def server(shared: Server) -> Server:
    """The shared one, as if fresh."""
    shared.part().unlink(missing_ok=True)
    return shared


@pytest.fixture
def update(tmp_path: Path) -> Path:
    path = tmp_path / "update"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(autouse=True)
def no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextlib.contextmanager
def client(port: int, certificate: tuple[Path, Path], **settings: Any) -> Iterator[Client]:
    settings = {"credential": CREDENTIAL, "ca": certificate[0], "backoff": 0.01, **settings}
    made = Client(f"https://localhost:{port}", **settings)
    yield made
    made.close()


# A TCP proxy that cuts connections, and can be asked to connect ------------------------------------------------------


class Relay:
    """Passes bytes on to `target`; cuts each connection after the next number of bytes in `cuts`, if any is left.

    With `connect`, it is an HTTP proxy: it expects CONNECT and goes where that says. With `hold`, it stops after that
    many bytes until `go` is set.
    """

    def __init__(
        self, target: int, cuts: list[int] | None = None, *, connect: bool = False, hold: int | None = None
    ) -> None:
        self._target, self._cuts, self._connect, self._hold = target, list(cuts or []), connect, hold
        self.go = threading.Event()
        self._passed = 0
        self.cut = 0
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self.go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(LONGEST)  # from here on no connection is added
        for end in self._sockets[1:]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(LONGEST)
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(near)
            self._threads.append(threading.Thread(target=self._pass, args=(near,), daemon=True))
            self._threads[-1].start()

    def _pass(self, near: socket.socket) -> None:
        target = self._target
        if self._connect:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := near.recv(4096)):
                    return
                head += data
            self.asked.append(head.decode())
            target = int(head.split()[1].rpartition(b":")[2])
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            far = socket.create_connection(("127.0.0.1", target))
        except OSError:
            near.shutdown(socket.SHUT_RDWR)
            return
        self._sockets.append(far)
        limit = [self._cuts.pop(0)] if self._cuts else []
        back = threading.Thread(target=self._copy, args=(far, near, limit), daemon=True)
        back.start()
        self._copy(near, far, limit)
        back.join()

    def _copy(self, source: socket.socket, sink: socket.socket, limit: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(8192):
                if limit:
                    data = data[: limit[0]]
                    limit[0] -= len(data)
                self._passed += len(data)
                if self._hold is not None and self._passed > self._hold:
                    self.go.wait(timeout=600)
                if data:
                    sink.sendall(data)
                if limit and limit[0] <= 0:
                    self.cut += 1
                    for end in (source, sink):  # a reset, not a polite end
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def some_cuts(seed: int, count: int = 8) -> list[int]:
    """Bytes after which connections are cut: in the handshake, in the headers, in the body."""
    draw = random.Random(seed)
    return [draw.choice([draw.randrange(200, 4000), draw.randrange(4000, SIZE // 2)]) for _ in range(count)]


# Uploads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_an_upload_cut_anywhere_resumes_and_arrives_whole(
    server: Server, certificate: tuple[Path, Path], update: Path, seed: int
) -> None:
    relay = Relay(server.port, some_cuts(seed))
    with client(relay.port, certificate, retries=20, piece_bytes=1_500_000) as agent:
        agent.upload(update, 3, 0, SHA256)
        assert server.part().read_bytes() == CONTENT
        answer = agent.call("POST", f"/v1/updates/3/0/{SHA256}", {"note": "done"})
    assert answer == {"status": "accepted", "reason": "done"}
    assert relay.cut > 0
    relay.close()


def test_bytes_that_arrived_before_a_cut_are_kept(server: Server, certificate: tuple[Path, Path], update: Path) -> None:
    relay = Relay(server.port, [4_000_000, 10, 10, 10])
    with client(relay.port, certificate, retries=2) as agent, pytest.raises(CoordinatorUnreachableError):
        agent.upload(update, 3, 0, SHA256)
    wait_for(lambda: blobs.have(server.part()) > 3_500_000, "most is there", every=0.01)
    assert CONTENT.startswith(server.part().read_bytes())
    relay.close()


def test_an_upload_goes_on_after_the_server_was_killed(
    tmp_path: Path, certificate: tuple[Path, Path], update: Path
) -> None:
    (folder := tmp_path / "server").mkdir()
    server = Server(folder, *certificate)
    relay = Relay(server.port, hold=SIZE // 2)
    try:
        with client(relay.port, certificate, retries=20) as agent:
            sending = threading.Thread(target=agent.upload, args=(update, 3, 0, SHA256))
            sending.start()
            wait_for(lambda: blobs.have(server.part()) > SIZE // 4, "a part is there", every=0.01)
            server.stop(signal.SIGKILL)
            before = blobs.have(server.part())
            server.start()
            relay.go.set()
            sending.join(timeout=600)
        assert SIZE // 4 < before < SIZE
        assert server.part().read_bytes() == CONTENT
    finally:
        relay.close()
        server.stop(signal.SIGKILL)


def test_an_upload_that_is_there_already_sends_nothing(
    server: Server, certificate: tuple[Path, Path], update: Path
) -> None:
    server.part().write_bytes(CONTENT)
    with client(server.port, certificate) as agent:
        agent.upload(update, 3, 0, SHA256)


def test_a_coordinator_that_has_more_than_the_file_is_refused(
    server: Server, certificate: tuple[Path, Path], update: Path
) -> None:
    server.part().write_bytes(CONTENT + b"more")
    with client(server.port, certificate) as agent, pytest.raises(CoordinatorRefusedError, match="another file"):
        agent.upload(update, 3, 0, SHA256)


def test_a_wrong_credential_is_refused_with_the_reason(
    server: Server, certificate: tuple[Path, Path], update: Path
) -> None:
    refused = pytest.raises(HttpRefusedError, match="unknown credential")
    with client(server.port, certificate, credential="wrong") as agent, refused as caught:
        agent.upload(update, 3, 0, SHA256)
    assert (caught.value.status, caught.value.reason, caught.value.exit_code) == (401, "unknown credential", 9)


# Downloads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_download_cut_anywhere_resumes_and_arrives_whole(
    server: Server, certificate: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    relay = Relay(server.port, some_cuts(10 + seed))
    target = tmp_path / "model"
    with client(relay.port, certificate, retries=20) as agent:
        assert agent.download(7, target, SHA256 if seed % 2 else None) == SHA256
    assert target.read_bytes() == CONTENT
    assert relay.cut > 0
    assert list(tmp_path.iterdir()) == [target]
    relay.close()


@pytest.mark.parametrize("sha256", [SHA256, None])
@pytest.mark.parametrize(
    "left",
    [CONTENT[:3_000_000], CONTENT, b"of another file", CONTENT + b"more", bytes(SIZE)],
    ids=["a beginning", "all of it", "a foreign beginning", "too much", "a foreign whole"],
)
def test_a_part_left_behind_is_gone_on_from_or_thrown_away(
    server: Server, certificate: tuple[Path, Path], tmp_path: Path, left: bytes, sha256: str | None
) -> None:
    (tmp_path / "model.part").write_bytes(left)
    with client(server.port, certificate) as agent:
        agent.download(7, tmp_path / "model", sha256)
    assert (tmp_path / "model").read_bytes() == CONTENT


def test_a_model_that_is_not_the_one_expected_is_never_put_in_place(
    server: Server, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    with client(server.port, certificate) as agent, pytest.raises(TransportError, match="expected 0000"):
        agent.download(7, tmp_path / "model", "0" * 64)
    assert not (tmp_path / "model").exists()


def test_a_full_disk_is_named_and_not_taken_for_a_cut(server: Server, certificate: tuple[Path, Path]) -> None:
    with client(server.port, certificate) as agent, pytest.raises(StorageError):
        agent.download(7, Path("/proc/nowhere/model"))


# Trust, proxies, calls -----------------------------------------------------------------------------------------------


def test_another_certificate_is_refused(server: Server, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    for ca in (make_certificate(tmp_path, "wrong")[0], None):
        refused = pytest.raises(CoordinatorUntrustedError, match="certificate is not trusted")
        with client(server.port, certificate, ca=ca) as agent, refused:
            agent.download(7, tmp_path / "model")


def test_a_certificate_for_another_host_is_refused(server: Server, certificate: tuple[Path, Path]) -> None:
    agent = Client(f"https://127.0.0.1:{server.port}", ca=certificate[0])
    with pytest.raises(CoordinatorUntrustedError):
        agent.call("POST", "/v1/poll", {})
    agent.close()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_an_http_proxy_is_used(
    server: Server, certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    relay = Relay(0, connect=True)
    proxy = f"http://user:p%40ss@127.0.0.1:{relay.port}"
    if how == "environment":
        monkeypatch.setenv("HTTPS_PROXY", proxy)
    with client(server.port, certificate, proxy=proxy if how == "argument" else None) as agent:
        agent.download(7, tmp_path / "model")
    assert relay.asked[0].startswith(f"CONNECT localhost:{server.port} HTTP/1.")
    assert "Basic dXNlcjpwQHNz" in relay.asked[0]
    assert CREDENTIAL not in "".join(relay.asked)
    relay.close()


def test_no_proxy_names_hosts_that_are_reached_directly(
    server: Server, certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org,localhost")
    with client(server.port, certificate) as agent:
        agent.download(7, tmp_path / "model")


@pytest.mark.parametrize(
    ("url", "settings", "said"),
    [
        ("http://coordinator.example.org:8443", {}, "plain http is for loopback only"),
        ("http://10.0.0.1", {}, "plain http is for loopback only"),
        ("http://localhost.example.org", {}, "plain http is for loopback only"),
        ("ftp://localhost", {}, "must begin with https"),
        ("localhost:8443", {}, "must begin with https"),
        ("https://", {}, "must begin with https"),
        ("https://user:secret@localhost", {}, "must have no user"),
        ("https://localhost:notaport", {}, "is no URL"),
        ("https://localhost", {"ca": Path(__file__)}, "cannot be read as PEM"),
        ("https://localhost", {"ca": Path("/nowhere.pem")}, "cannot be read as PEM"),
        ("https://localhost", {"proxy": "socks5://localhost"}, "the proxy's URL must begin with"),
        ("http://localhost", {"proxy": "http://localhost:3128"}, "cannot go through a proxy"),
    ],
)
def test_a_place_that_cannot_be_trusted_is_a_config_error(url: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Client(url, **settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.9.9.9:9", "http://[::1]:9", "http://localhost:9"])
def test_plain_http_is_allowed_on_loopback(url: str) -> None:
    agent = Client(url, connect_timeout=2)
    with pytest.raises(CoordinatorUnreachableError, match="cannot be reached") as caught:
        agent.call("POST", "/v1/poll", {})
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 507])
def test_a_coordinator_that_cannot_serve_now_is_unreachable(
    server: Server, certificate: tuple[Path, Path], status: int
) -> None:
    unreachable = pytest.raises(CoordinatorUnreachableError, match=rf"\({status}\): down for repair")
    with client(server.port, certificate) as agent, unreachable:
        agent.call("GET", f"/status/{status}")


@pytest.mark.parametrize("status", [302, 307, 400, 403, 404, 410])
def test_a_no_is_refused_and_a_redirect_is_not_followed(
    server: Server, certificate: tuple[Path, Path], status: int
) -> None:
    with client(server.port, certificate) as agent, pytest.raises(CoordinatorRefusedError, match="down for repair"):
        agent.call("GET", f"/status/{status}")


def test_an_answer_that_is_no_json_is_unreachable(server: Server, certificate: tuple[Path, Path]) -> None:
    with (
        client(server.port, certificate) as agent,
        pytest.raises(CoordinatorUnreachableError, match="is no JSON object"),
    ):
        agent.call("GET", "/status/200")


# blobs.py by itself --------------------------------------------------------------------------------------------------


def put(
    part: Path, pieces: list[bytes], *, offset: int, total: int, length: int | None = None, cut: bool = False
) -> int:
    """`receive` on a body that comes in these pieces, and may break off after them."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.disconnect"} if cut else {"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    length = sum(map(len, pieces)) if length is None else length
    headers = [(b"content-length", str(length).encode())] if length >= 0 else []
    request = Request({"type": "http", "method": "PUT", "headers": headers}, receive)
    return asyncio.run(blobs.receive(request, part, offset=offset, total=total))


def test_a_body_is_appended_where_the_part_ends(tmp_path: Path) -> None:
    part = tmp_path / "part"
    assert put(part, [b"abc", b"", b"d"], offset=0, total=10) == 4
    assert put(part, [b"x"] * 6, offset=4, total=10) == 10
    assert part.read_bytes() == b"abcdxxxxxx"
    assert put(part, [], offset=10, total=10) == 10


@pytest.mark.parametrize("offset", [0, 3, 5])
def test_an_offset_that_is_not_what_is_there_conflicts(tmp_path: Path, offset: int) -> None:
    (part := tmp_path / "part").write_bytes(b"abcd")
    with pytest.raises(blobs.BlobConflict) as caught:
        put(part, [b"e"], offset=offset, total=10)
    assert caught.value.have == 4
    assert part.read_bytes() == b"abcd"


def test_a_body_past_the_announced_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(blobs.BlobTooLarge):
        put(tmp_path / "part", [b"abcd"], offset=0, total=3)
    assert not (tmp_path / "part").exists()
    with pytest.raises(blobs.BlobTooLarge):  # a body longer than it said
        put(tmp_path / "part", [b"ab", b"cd"], offset=0, total=3, length=2)
    assert (tmp_path / "part").read_bytes() == b"ab"


def test_an_upload_without_a_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(blobs.BlobLengthRequired):
        put(tmp_path / "part", [b"abcd"], offset=0, total=4, length=-1)


def test_what_arrived_before_the_client_left_is_kept(tmp_path: Path) -> None:
    pieces = [os.urandom(300_000) for _ in range(9)]
    with pytest.raises(ClientDisconnect):
        put(tmp_path / "part", pieces, offset=0, total=10**7, cut=True)
    assert (tmp_path / "part").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("pieces", [[b"abc"], [bytes(1 << 20)] * 3])
def test_a_full_disk_is_no_space(pieces: list[bytes]) -> None:
    with pytest.raises(blobs.BlobNoSpace):
        put(Path("/dev/full"), pieces, offset=0, total=10**7)


@pytest.mark.parametrize(
    ("header", "if_range", "status", "body", "content_range"),
    [
        (None, None, 200, b"0123456789", None),
        ("bytes=0-", None, 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=3-5", None, 206, b"345", "bytes 3-5/10"),
        ("bytes=3-500", '"e"', 206, b"3456789", "bytes 3-9/10"),
        ("bytes=-4", None, 206, b"6789", "bytes 6-9/10"),
        ("bytes=3-5", '"other"', 200, b"0123456789", None),
        ("bytes=3-5", 'W/"e"', 200, b"0123456789", None),
        ("bytes=10-", None, 416, b"", "bytes */10"),
        ("bytes=-0", None, 416, b"", "bytes */10"),
        ("bytes=5-3", None, 200, b"0123456789", None),
        ("bytes=1-2,4-5", None, 200, b"0123456789", None),
        ("lines=1-2", None, 200, b"0123456789", None),
        ("bytes=-", None, 200, b"0123456789", None),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_file_is_sent_in_the_range_asked_for(
    tmp_path: Path,
    method: str,
    header: str | None,
    if_range: str | None,
    status: int,
    body: bytes,
    content_range: str | None,
) -> None:
    (path := tmp_path / "model").write_bytes(b"0123456789")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the client stays
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        response = blobs.send_file(path, header, "e", if_range)
        await response({"type": "http", "method": method, "asgi": {}}, receive, send)

    asyncio.run(answer())
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert sent[0]["status"] == status
    assert headers["etag"] == '"e"'
    assert headers.get("content-range") == content_range
    assert headers["content-length"] == str(len(body))
    assert b"".join(message["body"] for message in sent[1:]) == (body if method == "GET" else b"")


if __name__ == "__main__":
    serve(*sys.argv[1:])
