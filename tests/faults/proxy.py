"""A bad network: a TCP proxy that refuses, stalls, cuts connections in the middle, and delivers things twice."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

Mode = Literal["open", "refuse", "stall", "cut"]

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Proxy:
    """Listens on a port of its own and speaks to `target` on loopback."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.mode: Mode = "open"
        self.cut_after = 0  # bytes of a connection, either way, with mode "cut"
        self.twice: Callable[[bytes], bool] = lambda request: False  # which requests to deliver once more
        self.hold: Callable[[bytes], bool] = lambda request: False  # which requests never arrive
        self.held = 0  # of those
        self.repeated: list[tuple[bytes, bytes]] = []  # what was delivered once more, and the answer
        self.broken = 0  # connections that we cut or refused
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                self.broken += 1
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, requests: bool) -> None:
        passed, held = 0, b""
        with suppress(OSError):
            while data := source.recv(65536):
                if self.mode == "stall":
                    while self.mode == "stall" and not self._closed:
                        time.sleep(0.02)
                    self.broken += 1
                    break
                if self.mode in ("cut", "refuse"):
                    room = max(0, self.cut_after - passed) if self.mode == "cut" else 0
                    if room < len(data):
                        sink.sendall(data[:room])
                        self.broken += 1
                        break
                if requests and self.hold(data):
                    self.held += 1
                    continue
                sink.sendall(data)
                passed += len(data)
                if requests:
                    held = self._repeat(held + data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _repeat(self, held: bytes) -> bytes:
        """Take whole requests off what was sent, and send some of them again."""
        while True:
            head, found, rest = held.partition(b"\r\n\r\n")
            length = LENGTH.search(head)
            size = int(length.group(1)) if length else 0
            if not found or len(rest) < size:
                return held
            request, held = head + found + rest[:size], rest[size:]
            if self.twice(request):
                for later in (0.0, 0.3):
                    threading.Timer(later, self._deliver, args=(request,)).start()

    def _deliver(self, request: bytes) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._target), timeout=10.0) as again:
            again.sendall(request)
            self.repeated.append((request, again.recv(65536)))
