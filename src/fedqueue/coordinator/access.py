"""Who may ask: one-time tokens, a credential for each facility, one for the operator.

Only digests of secrets are kept. A secret is a random text of 256 bits, so a plain digest of it tells nothing and
needs no salt. The file is written whole or not at all, and nobody but its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any, Final

from fedqueue.files import write_secret

FILE: Final = "access.json"
OPERATOR_FILE: Final = "operator"
TOKEN_SECONDS: Final = 7 * 24 * 3600.0
"""How long an invitation may be used."""

OPERATOR: Final = "/operator"
"""Who the operator is among the holders of credentials; no facility can be called that."""


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Access:
    """The access file of a run. One process owns it; it is used from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        try:
            self._known: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._known = {"tokens": {}, "credentials": {}}
        if not (folder / OPERATOR_FILE).exists() or OPERATOR not in self._known["credentials"].values():
            write_secret(folder / OPERATOR_FILE, self.give(OPERATOR))

    def who(self, secret: str) -> str | None:
        """The facility with this credential, the operator, or nobody."""
        # Looked up by digest: how long that takes says nothing about any secret.
        found: str | None = self._known["credentials"].get(digest(secret))
        return found

    def invite(self, facility: str) -> str:
        """A token with which this facility may enrol, once; earlier ones of its no longer work."""
        token = secrets.token_urlsafe(32)
        tokens = {key: held for key, held in self._known["tokens"].items() if held["facility"] != facility}
        tokens[digest(token)] = {"facility": facility, "until": time.time() + TOKEN_SECONDS}
        self._save(tokens=tokens)
        return token

    def enrol(self, token: str) -> tuple[str, str] | None:
        """The facility and its new credential; None: the token is unknown, used or too old. An enrolment replaces
        the credential that the facility had."""
        held = self._known["tokens"].get(digest(token))
        if held is None or held["until"] < time.time():
            return None
        facility: str = held["facility"]
        credential = secrets.token_urlsafe(32)
        tokens = {key: other for key, other in self._known["tokens"].items() if key != digest(token)}
        self._save(tokens=tokens, credentials={**self._others(facility), digest(credential): facility})
        return facility, credential

    def give(self, name: str) -> str:
        """A new credential, without a token: for the operator, and for facilities on this very machine."""
        credential = secrets.token_urlsafe(32)
        self._save(credentials={**self._others(name), digest(credential): name})
        return credential

    def revoke(self, facility: str) -> bool:
        """Take back its credential and its invitations; False: it had none."""
        others = self._others(facility)
        tokens = {key: held for key, held in self._known["tokens"].items() if held["facility"] != facility}
        had = len(others) < len(self._known["credentials"]) or len(tokens) < len(self._known["tokens"])
        self._save(tokens=tokens, credentials=others)
        return had

    def enrolled(self) -> set[str]:
        return set(self._known["credentials"].values()) - {OPERATOR}

    def _others(self, name: str) -> dict[str, str]:
        return {key: who for key, who in self._known["credentials"].items() if who != name}

    def _save(self, **changes: Any) -> None:
        known = {**self._known, **changes}
        write_secret(self._path, json.dumps(known))
        self._known = known
