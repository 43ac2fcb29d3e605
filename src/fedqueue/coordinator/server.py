"""Serves a coordinator over HTTP: TLS wherever it is not loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedqueue.config import Config, ServerSettings
from fedqueue.coordinator.access import OPERATOR, Access
from fedqueue.coordinator.audit import Audit
from fedqueue.coordinator.certificate import make_certificate
from fedqueue.coordinator.connections import HEAD_BYTES, Connection, Connections, Server
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.http_api import Api
from fedqueue.errors import ConfigError, FedQueueError
from fedqueue.files import only_mine, only_ours, write_json
from fedqueue.network import is_loopback
from fedqueue.protocol.contract import Address

ADDRESS = "address.json"
"""In the run folder: where the coordinator listens, for commands on the same machine."""

NOT_NOW = "the coordinator cannot work now, and tries again by itself; nothing is lost"


@contextlib.contextmanager
def serving(
    coordinator: Coordinator, access: Access, listener: socket.socket, *, plain: bool = False
) -> Iterator[Address]:
    """Answers requests in a thread of its own; gives the address. `plain`: no TLS, which only loopback allows."""
    config, folder = coordinator.config, coordinator.folder
    files = certificate_of(config.server, Path(config.folder), folder) if not plain else None
    address = address_of(config.server, listener, files, run=coordinator.run_id)
    audit = Audit(folder)
    api = Api(coordinator, access, address, audit)
    with answering(config.server, api.app, listener, files):
        write_json(folder / ADDRESS, address)
        try:
            yield address
        finally:
            api.close()
            audit.close()


def address_of(server: ServerSettings, listener: socket.socket, files: Files | None, *, run: str = "") -> Address:
    """Where we listen, with these files of TLS; None: without."""
    host, port = listener.getsockname()[:2]
    loopback = is_loopback(host)
    if files is None and not loopback:
        raise ConfigError(f"server.host: plain HTTP on {server.host} is refused; use loopback, or TLS")
    called = server.names[0] if server.names else (host if loopback else socket.gethostname())
    scheme = "http" if files is None else "https"
    url = _url(scheme, called, port)
    own = files is not None and server.certificate is None
    # For commands on this machine: our own certificate is good for this address too, another one for its name alone.
    near = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return Address(
        url=url,
        certificate=files.certificate.read_text() if own and files is not None else None,
        run=run,
        local=_url(scheme, near, port) if own or files is None else url,
        port=port,
        ca=str(files.certificate.absolute()) if files is not None else None,
        client=(str(files.own[0].absolute()), str(files.own[1].absolute()))
        if files is not None and files.own
        else None,
    )


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
            files = certificate_of(config.server, Path(config.folder), folder) if not plain else None
            held.enter_context(answering(config.server, later, listener, files))
        yield


@contextlib.contextmanager
def answering(limits: ServerSettings, app: ASGIApp, listener: socket.socket, files: Files | None) -> Iterator[None]:
    """In a thread of its own; without `files` there is no TLS."""
    settings = uvicorn.Config(
        app,
        log_config=None,  # its own would close the handlers of everybody else in this process
        log_level="critical",
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http=Connection,  # and no other: what is tested is what is served
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        ssl_certfile=files.certificate if files is not None else None,
        ssl_keyfile=files.key if files is not None else None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    _load(settings, files)
    server = Server(settings, Connections(limits.connections, limits.connections_per_address))
    sockets = [listener.dup()]  # the server closes what it is given
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def listen(server: ServerSettings) -> socket.socket:
    """The address is taken before anything else begins: two coordinators of one run cannot both have it."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # Named as TCP, so that asyncio sends each answer at once (TCP_NODELAY) instead of waiting for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        place = f"{server.host}:{server.port}"
        raise ConfigError(f"server.port: cannot listen on {place}: {error.strerror}; choose another") from None
    return listener


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _load(settings: uvicorn.Config, files: Files | None = None) -> None:
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        what = error.strerror or error
        raise ConfigError(f"server.certificate: it and its key cannot be used: {what}; give PEM files") from None
    if settings.ssl is not None:
        settings.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        settings.ssl.options |= ssl.OP_NO_RENEGOTIATION  # it costs us more than who asks for it
        if files is not None and files.clients:
            settings.ssl.verify_mode = ssl.CERT_REQUIRED
            for path in files.clients:
                _trust_clients_of(settings.ssl, path)


def _trust_clients_of(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"server.client_authority: {authority} cannot be used: {error}; give a PEM file") from None


class Files(NamedTuple):
    """Of TLS, in PEM."""

    certificate: Path
    key: Path
    clients: tuple[Path, ...] = ()  # whose certificates are asked for: an authority, and that of this very machine
    own: tuple[Path, Path] | None = None  # the certificate of commands on this machine, and its key


def certificate_of(server: ServerSettings, home: Path, folder: Path) -> Files:
    """Its own, beside its config, or one that is made in the folder."""
    if server.certificate is None or server.key is None:
        files = Files(*make_certificate(folder, [*server.names, server.host]))
    else:
        files = Files(home / server.certificate, home / server.key)
        _must_be_files({"certificate": files.certificate, "key": files.key})
        only_mine(files.key, of_system=True)
    if server.client_authority is None:
        return files
    authority = home / server.client_authority
    _must_be_files({"client_authority": authority})
    only_ours(authority)
    own = make_certificate(folder, [], prefix="local-")
    return files._replace(clients=(authority, own[0]), own=own)


def _must_be_files(given: dict[str, Path]) -> None:
    for key, path in given.items():
        if not path.is_file():
            raise ConfigError(f"server.{key}: {path} is not a file")
