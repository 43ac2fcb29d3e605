"""What a large model costs on its way: our client and server beside nginx and curl, and the memory of both ends.

One file of 2 GB over TLS on loopback, all in one run, the ways taking turns. Then four such updates arrive at once, are
checked and aggregated in the server's process, while anonymous memory (RssAnon) of the server and of the clients is
sampled. Run as a module with arguments, it is one of those processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from benchmarks.figure import Figure
from fedqueue.tensorfile import Content, check, write
from fedqueue.tensorsum import FileContribution, aggregate

GB = 1e9
SIZE = 2_000_000_000
"""Bytes of the model."""
REPEATS = 3
UPDATES = 4


# The processes that are measured ----


def serve(folder: Path, port: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from fedqueue.coordinator import transfers as blobs
    from fedqueue.coordinator.connections import Connection

    model = folder / "model"
    etag = (folder / "sha256").read_text()

    def part(request: Request) -> Path:
        return folder / f"update-{request.path_params['sequence']}"

    async def download(request: Request) -> Response:
        return blobs.send_file(model, request.headers.get("range"), etag, request.headers.get("if-range"))

    async def have(request: Request) -> Response:
        return JSONResponse({"offset": blobs.have(part(request))})

    async def upload(request: Request) -> Response:
        place, total = int(request.query_params["offset"]), int(request.query_params["bytes"])
        return JSONResponse({"offset": await blobs.receive(request, part(request), offset=place, total=total)})

    def combine() -> dict[str, float]:
        paths = [folder / f"update-{i}" for i in range(UPDATES)]
        began = time.perf_counter()
        reasons = [check(path, model, content=Content(etag)) for path in paths]
        if any(reasons):
            raise RuntimeError(f"an update was damaged: {reasons}")
        checked = time.perf_counter()
        shares = [FileContribution(weight=0.25, trained=path, base=model, base_key=0) for path in paths]
        aggregate(model, shares, "add_deltas", folder / "next")
        return {"check": checked - began, "aggregate": time.perf_counter() - checked}

    async def commit(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(combine))

    place = "/v1/updates/{sequence:int}/{attempt:int}/{sha256}"
    routes = [
        Route("/v1/models/{version:int}", download),
        Route(place, have),
        Route(place, upload, methods=["PUT"]),
        Route("/aggregate", commit, methods=["POST"]),
    ]
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    uvicorn.run(
        Starlette(routes=routes),
        port=int(port),
        http=Connection,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
    )


def client(what: str, folder: Path, port: str, number: str) -> None:
    from fedqueue.agent.http_transport import Client

    agent = Client(f"https://localhost:{port}", ca=folder / "certificate.pem")
    etag = (folder / "sha256").read_text()
    began = time.perf_counter()
    if what == "upload":
        agent.upload(folder / "model", int(number), 0, etag)
    else:
        agent.download(0, folder / f"copy-{number}", etag)
    print(time.perf_counter() - began)


# Measuring ----


@contextmanager
def running(command: list[str], port: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while port is not None:
            with suppress(OSError), socket.create_connection(("localhost", int(port)), timeout=5):
                break
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait()


def ours(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.transfer", *arguments]


class Watch:
    """Samples the anonymous memory of processes; peaks in bytes."""

    def __init__(self, pids: list[int]) -> None:
        self.peaks = dict.fromkeys(pids, 0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            for pid in self.peaks:
                with suppress(OSError, IndexError):  # it has ended
                    status = Path(f"/proc/{pid}/status").read_text()
                    self.peaks[pid] = max(self.peaks[pid], int(status.split("RssAnon:")[1].split()[0]) * 1024)


def make_certificate(folder: Path) -> None:
    """Self-signed, for localhost."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])  # curl wants one
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    kind = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(pem, kind, serialization.NoEncryption()))


def nginx(folder: Path, port: str) -> list[str] | None:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None or shutil.which("curl") is None:
        return None
    (folder / "nginx.conf").write_text(f"""
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port} ssl; root {folder};
    ssl_certificate certificate.pem; ssl_certificate_key key.pem;
  }}
}}
""")
    return [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log")]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def seconds(command: list[str]) -> float:
    """What the command says that its transfer took."""
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def hashing(path: Path) -> float:
    """Seconds to read it back and take its sha256: what our download does on the way."""
    began = time.perf_counter()
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")
    return time.perf_counter() - began


def rates(folder: Path, port: str, beside: str | None) -> dict[str, float]:
    """GB a second of each way; medians, the ways taking turns."""

    def curl(target: Path) -> Callable[[], float]:
        source = ["--cacert", str(folder / "certificate.pem"), f"https://localhost:{beside}/model"]
        return lambda: seconds(["curl", "-sSf", "--noproxy", "*", "-w", "%{time_total}", "-o", str(target), *source])

    ways: dict[str, Callable[[], float]] = {
        "download": lambda: seconds(ours("download", str(folder), port, "0")),
        "upload": lambda: seconds(ours("upload", str(folder), port, "0")),
    }
    if beside is not None:
        ways |= {"curl to /dev/null": curl(Path("/dev/null")), "curl to a file": curl(folder / "copy-curl")}
        ways["curl to a file, then sha256"] = lambda: curl(folder / "copy-curl")() + hashing(folder / "copy-curl")
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(REPEATS):
        for way, measure_one in ways.items():
            taken[way].append(measure_one())
            for left in (*folder.glob("copy-*"), *folder.glob("update-*")):
                left.unlink()
    return {way: SIZE / GB / statistics.median(times) for way, times in taken.items()}


def memory(folder: Path, port: str, server: subprocess.Popen[bytes]) -> tuple[float, float, dict[str, float]]:
    """Peaks in MB of the server and of a client, and seconds of checking and aggregating."""
    from fedqueue.agent.http_transport import Client

    with ExitStack() as stack:
        commands = [ours("upload", str(folder), port, str(i)) for i in range(UPDATES)]
        clients = [stack.enter_context(running(command)) for command in commands]
        watch = stack.enter_context(Watch([server.pid, *(process.pid for process in clients)]))
        if any(process.wait() for process in clients):
            raise RuntimeError("an upload failed")
        agent = Client(f"https://localhost:{port}", ca=folder / "certificate.pem", read_timeout=600)
        taken = agent.call("POST", "/aggregate")
    return watch.peaks.pop(server.pid) / 1e6, max(watch.peaks.values()) / 1e6, taken


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        folder = Path(home)
        layer = np.random.default_rng(0).random(SIZE // 100 // 4, np.float32)
        (folder / "sha256").write_text(write(folder / "model", {f"layer{i}": layer for i in range(100)}).sha256)
        make_certificate(folder)
        port, beside = free_port(), free_port()
        server = stack.enter_context(running(ours("serve", str(folder), port), port))
        other = nginx(folder, beside)
        if other is not None:
            stack.enter_context(running(other, beside))
        rate = rates(folder, port, beside if other is not None else None)
        at_server, at_client, taken = memory(folder, port, server)
    figures = [Figure(f"2 GB over TLS: {way}", value, "GB/s") for way, value in rate.items()]
    if other is None:
        print("nginx or curl is not installed: no figures beside them")
    else:
        for way in ("curl to /dev/null", "curl to a file, then sha256"):
            figures.append(
                Figure(f"2 GB download with its sha256 over nginx and {way}", rate["download"] / rate[way], "x")
            )
        share = rate["download"] / rate["curl to a file"]
        figures.append(
            Figure("2 GB download with its sha256 over nginx and curl to a file", share, "x", "at least 0.6")
        )
        figures.append(
            Figure("2 GB upload over nginx and curl to a file", rate["upload"] / rate["curl to a file"], "x")
        )
    return [
        *figures,
        Figure("4 x 2 GB arrive and are aggregated: server's memory", at_server, "MB", "at most 500"),
        Figure("4 x 2 GB arrive and are aggregated: a client's memory", at_client, "MB", "at most 150"),
        Figure("4 x 2 GB from disk to disk: check", taken["check"], "s"),
        Figure("4 x 2 GB from disk to disk: aggregate", taken["aggregate"], "s"),
    ]


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "serve":
        serve(Path(where), *rest)
    else:
        client(what, Path(where), *rest)
