"""What each holder of a credential may do: one table, which every endpoint is held to.

docs/security.md has the same table for people; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from fedqueue.protocol.service import UserRole

Role = UserRole | Literal["facility"]

Right = Literal["train", "look", "submit", "steer", "manage", "renew"]
"""train: what agents ask, of jobs, models and updates. look: see how runs get on, read their logs, fetch their models.
submit: begin runs. steer: pause, resume and stop a run, take models back; drain and join its facilities. manage: invite
and revoke facilities; add and remove users. renew: replace the credential by a new one."""

Extent = Literal["all", "own"]
"""Of all runs; or of those that a user has submitted, that a facility takes part in. A credential is always its own."""

RIGHTS: Final[Mapping[Role, Mapping[Right, Extent]]] = {
    "operator": {"look": "all", "submit": "all", "steer": "all", "manage": "all", "renew": "own"},
    "submitter": {"look": "all", "submit": "all", "steer": "own", "renew": "own"},
    "viewer": {"look": "all", "renew": "own"},
    "facility": {"train": "own", "renew": "own"},
}


def who_may(right: Right) -> str:
    """In words, for a refusal.

    >>> who_may("submit")
    'operators and submitters'
    """
    names = [f"{role}s" if role != "facility" else "facilities" for role, rights in RIGHTS.items() if right in rights]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
