"""Serves a coordinator over HTTP: TLS wherever it is not loopback."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedqueue.config import Config
from fedqueue.coordinator.access import OPERATOR, Access
from fedqueue.coordinator.certificate import make_certificate
from fedqueue.coordinator.connection import Connection
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.http_api import Api
from fedqueue.errors import ConfigError, FedQueueError
from fedqueue.files import write_json
from fedqueue.network import is_loopback

ADDRESS = "address.json"
"""In the run folder: where the coordinator listens, for commands on the same machine."""

NOT_NOW = "the coordinator cannot work now, and tries again by itself; nothing is lost"

HEAD_BYTES = 64 << 10
"""Of a request, before its body."""


@contextlib.contextmanager
def serving(
    coordinator: Coordinator, access: Access, listener: socket.socket, *, plain: bool = False
) -> Iterator[dict[str, Any]]:
    """Answers requests in a thread of its own; gives the address. `plain`: no TLS, which only loopback allows."""
    config, folder = coordinator.config, coordinator.folder
    host, port = listener.getsockname()[:2]
    loopback = is_loopback(host)
    if plain and not loopback:
        raise ConfigError(f"server.host: plain HTTP on {config.server.host} is refused; use loopback, or TLS")
    certificate, key = _certificate(config, folder) if not plain else (None, None)
    called = config.server.names[0] if config.server.names else (host if loopback else socket.gethostname())
    url = _url("http" if plain else "https", called, port)
    own = certificate is not None and config.server.certificate is None
    address = {
        "url": url,
        "certificate": certificate.read_text() if own and certificate else None,
        "run": coordinator.run_id,
    }
    api = Api(coordinator, access, lambda: address)
    # For commands on this machine: our own certificate is good for this address too, another one for its name alone.
    near = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    local = _url("http" if plain else "https", near, port) if own or plain else url
    ca = str(certificate.absolute()) if certificate is not None else None
    with _answering(api.app, listener, certificate, key):
        write_json(folder / ADDRESS, {**address, "local": local, "port": port, "ca": ca})
        try:
            yield address
        finally:
            api.facility_api.close()


@contextlib.contextmanager
def excusing(config: Config, folder: Path, listener: socket.socket, reason: str, *, plain: bool) -> Iterator[None]:
    """While the coordinator cannot work, whoever calls is told so and comes again later; the operator is told why."""
    access: Access | None = None
    with contextlib.suppress(FedQueueError, OSError):
        access = Access(folder)

    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        secret = Request(scope).headers.get("authorization", "").partition(" ")[2]
        is_operator = access is not None and access.who(secret) == OPERATOR
        await JSONResponse({"reason": reason if is_operator else NOT_NOW}, 503)(scope, receive, send)

    with contextlib.ExitStack() as held:
        with contextlib.suppress(FedQueueError, OSError):  # without a certificate nobody can be told anything
            certificate, key = _certificate(config, folder) if not plain else (None, None)
            held.enter_context(_answering(later, listener, certificate, key))
        yield


@contextlib.contextmanager
def _answering(app: ASGIApp, listener: socket.socket, certificate: Path | None, key: Path | None) -> Iterator[None]:
    settings = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http=Connection,  # and no other: what is tested is what is served
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    _load(settings)
    server = uvicorn.Server(settings)
    _allow_many_files()
    sockets = [listener.dup()]  # the server closes what it is given
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def listen(config: Config) -> socket.socket:
    """The address is taken before anything else begins: two coordinators of one run cannot both have it."""
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    # Named as TCP, so that asyncio sends each answer at once (TCP_NODELAY) instead of waiting for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.server.host, config.server.port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        place = f"{config.server.host}:{config.server.port}"
        raise ConfigError(f"server.port: cannot listen on {place}: {error.strerror}; choose another") from None
    return listener


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _load(settings: uvicorn.Config) -> None:
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        what = error.strerror or error
        raise ConfigError(f"server.certificate: it and its key cannot be used: {what}; give PEM files") from None
    if settings.ssl is not None:
        settings.ssl.minimum_version = ssl.TLSVersion.TLSv1_2


def _allow_many_files() -> None:
    """Connections must not take the file descriptors that the ledger and the updates need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * Connection.most
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))


def _certificate(config: Config, folder: Path) -> tuple[Path, Path]:
    server = config.server
    if server.certificate is None or server.key is None:
        return make_certificate(folder, [*server.names, server.host])
    home = Path(config.folder)
    paths = home / server.certificate, home / server.key
    for path, key in zip(paths, ("certificate", "key"), strict=True):
        if not path.is_file():
            raise ConfigError(f"server.{key}: {path} is not a file")
    return paths
