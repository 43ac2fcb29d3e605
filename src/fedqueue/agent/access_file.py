"""By what a user reaches a federation from another machine than its server: one file, which is his alone.

It takes the place of a federation's folder in commands; below it are the runs, as in the folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from fedqueue.agent.enrolment import NAME, SECRET
from fedqueue.agent.http_transport import Client
from fedqueue.errors import ConfigError
from fedqueue.files import only_mine, write_secret
from fedqueue.protocol.service import UserGiven

RUNS: Final = "runs"


@dataclass(frozen=True, kw_only=True)
class AccessFile:
    url: str
    name: str
    credential: str
    certificate: str | None = None  # PEM, where the server's is of its own making
    client_certificate: str | None = None  # PEM files, beside this one, for a server that asks for a certificate
    client_key: str | None = None

    def __post_init__(self) -> None:
        files = (self.certificate or "", self.client_certificate or "", self.client_key or "")
        texts = (self.url, self.name, self.credential, *files)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it must hold texts")
        if not NAME.fullmatch(self.name) or not SECRET.fullmatch(self.credential):
            raise ValueError("it holds no name, or no credential")

    @classmethod
    def of(cls, given: UserGiven) -> AccessFile:
        return cls(url=given.url, name=given.name, credential=given.credential or "", certificate=given.certificate)

    def save(self, path: Path) -> None:
        write_secret(path, json.dumps(vars(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> AccessFile:
        try:
            only_mine(path)
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, TypeError):
            raise ConfigError(
                f"{path}: is neither a folder nor an access file; `fedqueue user FEDERATION add` writes one"
            ) from None

    @contextmanager
    def client(self, path: Path) -> Iterator[Client]:
        """`path`: where it was loaded from; a renewed credential goes there."""

        def keep(credential: str) -> None:
            replace(self, credential=credential).save(path)

        with tempfile.TemporaryDirectory() as folder:
            ca = None
            if self.certificate is not None:
                ca = Path(folder) / "server.pem"
                ca.write_text(self.certificate)
            shown, key = (
                None if name is None else path.parent / name for name in (self.client_certificate, self.client_key)
            )
            client = Client(self.url, credential=self.credential, ca=ca, keep=keep, certificate=shown, key=key)
            try:
                yield client
            finally:
                client.close()


class Elsewhere(NamedTuple):
    """What a path means that leads through an access file."""

    file: Path
    run: str  # the name of one; empty: the federation


def elsewhere(path: Path) -> Elsewhere | None:
    """None: it leads through folders alone."""
    file = next((place for place in (path, *path.parents) if place.is_file()), None)
    if file is None:
        return None
    below = path.relative_to(file).parts
    if len(below) > 1 and below[0] == RUNS:
        below = below[1:]
    if len(below) > 1 or below == (RUNS,):
        raise ConfigError(f"{path}: name a run as {file}/{RUNS}/NAME")
    return Elsewhere(file, below[0] if below else "")
