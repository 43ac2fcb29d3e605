"""How a facility comes to its credential: an invitation from the operator, used once, becomes a file in its home."""

from __future__ import annotations

import base64
import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fedqueue.agent.http_transport import Client
from fedqueue.agent.transport import NO_OWN, Own
from fedqueue.errors import ConfigError, StorageError
from fedqueue.files import only_mine, only_ours, write_secret
from fedqueue.protocol.codec import encode, read
from fedqueue.protocol.contract import Invitation

FILE: Final = "credential"
MARK: Final = "fedqueue1:"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a facility, as in the config of a run. It comes from the coordinator, and goes into files and scripts here."""
GROUP: Final = "agent.group_may_write"
SECRET: Final = re.compile(r"[A-Za-z0-9_-]{16,200}")


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What HOME/credential holds; nobody but its owner may read it."""

    url: str
    facility: str
    credential: str
    certificate: str | None = None  # PEM, where the coordinator's is of its own making
    run: str = ""  # which one
    federation: bool = False  # with all its runs

    def __post_init__(self) -> None:
        texts = (self.url, self.facility, self.credential, self.certificate or "", self.run)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it must hold texts")
        if not NAME.fullmatch(self.facility) or not SECRET.fullmatch(self.credential):
            raise ValueError("it holds no name of a facility, or no credential")

    def save(self, home: Path) -> None:
        make_home(home)
        write_secret(home / FILE, json.dumps(vars(self)))

    @classmethod
    def load(cls, home: Path, *, group_may_write: bool = False) -> Enrolment:
        path = home / FILE
        try:
            only_mine(path)
            only_ours(home, group="" if group_may_write else GROUP)
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigError(f"{home}: this facility is not enrolled; `fedqueue enroll AGENT.toml`") from None
        except (ValueError, TypeError):
            raise ConfigError(f"{path}: is not a credential; enrol this facility anew") from None

    def client(self, home: Path, proxy: str | None, own: Own = NO_OWN) -> Client:
        ca = None
        if self.certificate is not None:
            ca = home / "coordinator.pem"
            write_secret(ca, self.certificate)

        def keep(credential: str) -> None:
            replace(self, credential=credential).save(home)

        return Client(
            self.url,
            credential=self.credential,
            ca=ca,
            proxy=proxy,
            keep=keep,
            certificate=own.certificate,
            key=own.key,
        )


def make_home(home: Path) -> None:
    """Its owner's alone, if it is not there."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{home}: cannot be made: {error.strerror}; choose another home") from None


def word_of(invitation: Invitation) -> str:
    return MARK + base64.urlsafe_b64encode(encode(invitation).encode()).decode()


def enrol(text: str, home: Path, proxy: str | None, own: Own = NO_OWN, *, group_may_write: bool = False) -> Enrolment:
    """Use an invitation; the credential is in the home then."""
    held = _open(text)
    make_home(home)  # while the invitation is still good
    only_ours(home, group="" if group_may_write else GROUP)
    if (home / FILE).exists() and Enrolment.load(home, group_may_write=group_may_write).run not in ("", held.run):
        raise ConfigError(
            f"{home}: belongs to another run, whose jobs and journal it holds; name another home for this one"
        )
    with tempfile.TemporaryDirectory() as folder:
        ca = None
        if held.certificate is not None:
            ca = Path(folder) / "coordinator.pem"
            ca.write_text(held.certificate)
        client = Client(held.url, ca=ca, proxy=proxy, certificate=own.certificate, key=own.key)
        try:
            answer = client.enrol(held.token)
        except ConfigError as error:
            raise _no_enrolment(held.url, error) from None
        finally:
            client.close()
    try:
        made = Enrolment(
            url=held.url,
            facility=answer.facility,
            credential=answer.credential,
            certificate=held.certificate,
            run=held.run,
            federation=not held.run,
        )
    except ValueError as error:
        raise _no_enrolment(held.url, error) from None
    made.save(home)
    return made


def _no_enrolment(url: str, error: Exception) -> ConfigError:
    return ConfigError(f"{url}: its answer is no enrolment: {error}; is it a coordinator?")


def _open(text: str) -> Invitation:
    word = "".join(text.split())
    try:
        if not word.startswith(MARK):
            raise ValueError
        return read(Invitation, json.loads(base64.urlsafe_b64decode(word.removeprefix(MARK))), "")
    except (ValueError, ConfigError, RecursionError):
        raise ConfigError(
            f"that is not an invitation: it begins with {MARK} and comes whole; `fedqueue invite` makes one"
        ) from None
