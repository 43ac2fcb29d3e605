"""What a server answers to operators, to who enrols and to who sends an update: all but polls and hand-ins of one run;
and what a federation and its sites say to each other of all their runs at once.

What is asked of facilities, and what jobs read, is in contract.py.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from fedqueue.protocol.codec import at_least, later, message, more_than
from fedqueue.protocol.contract import Answer
from fedqueue.protocol.reports import MOST_POLL_SECONDS, Poll, Trouble

MOST_OFFERS: Final = 100
MOST_PATTERNS: Final = 20
"""Of those who may use an offer."""
MOST_RUNS: Final = 100
"""Of one facility, at once."""
DEFAULT_OFFER: Final = "default"

UserRole = Literal["operator", "submitter", "viewer"]
"""Of somebody who is no facility."""

Refusal = Literal["superseded", "other bytes", "set back", "not allowed", "refused"]
"""Why not: the job is closed or another attempt counts; what arrived is not what was meant; reports do not follow on
those that are there; nobody knows who asks; anything else."""


@message
class Health:
    """It is there, and speaks this."""

    protocol: int
    version: str


@message
class EnrolmentRequest:
    """A token of an invitation, to be exchanged."""

    token: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.token) <= 200:
            raise ValueError("token must be 1 to 200 characters")


@message
class Enrolled:
    facility: str
    credential: str
    run: str  # its name


@message
class Renewed:
    """The next credential of who asks; the one before works until this one is used."""

    credential: str


@message
class Offset:
    """So many bytes of an update are here."""

    offset: int


@message
class RefusalBody:
    """Beside the status of every refusal."""

    reason: str
    received: int | None = later(default=None)  # the number of the newest report that is here, where reports do not fit
    offset: int | None = later(default=None)  # as in `Offset`, where bytes do not fit


@message
class MaskedHandin:
    """With the bytes that a facility gives to a group."""

    group: str  # its name: the sha256 of what it is

    def __post_init__(self) -> None:
        if len(self.group) != 64:
            raise ValueError("group must be 64 hexadecimal digits")


@message
class Done:
    """What an operator asked for is done."""

    done: str  # the word that was said
    hindrance: str = later(default="")  # what keeps the run from going on nevertheless
    had: bool | None = later(default=None)  # of "revoke": there was something to take back


# How a run gets on --------------------------------------------------------------------------------------


@message
class OpenJob:
    """Queued or running, for how many seconds of the run clock, and how long it held idle nodes."""

    job: str
    attempt: int
    state: str
    seconds: float
    idle_seconds: float


@message
class FacilityStatus:
    name: str
    state: str
    heard_seconds_ago: float | None  # None: not since this coordinator started
    host: str
    jobs: int
    open_jobs: list[OpenJob]
    idle_because: str | None  # None: it has a job
    until_seconds: float | None  # of the run clock, in which that ends; None: nobody knows
    troubles: list[Trouble]
    ordered: int  # jobs so far
    steps_per_second: float | None
    expected_delay: float | None
    overhead: float | None
    node_seconds: float
    idle_node_seconds: float


@message
class RunStatus:
    run: str
    strategy: str
    state: str
    run_seconds: float
    model: int  # the newest
    score: float | None
    unscored: int  # models that were passed over
    folder: str
    facilities: list[FacilityStatus]


# A federation -------------------------------------------------------------------------------------------


@message
class Offer:
    """A training command that a site is willing to run, by its name. What it is, the site alone knows."""

    name: str
    nodes: int = 1
    runs: list[str] | None = later(default=None)  # which may use it, by patterns of their names; None: all
    users: list[str] | None = later(default=None)  # the same of who submitted them

    def __post_init__(self) -> None:
        for text in (self.name, *(self.runs or ()), *(self.users or ())):
            if not 1 <= len(text) <= 64 or not text.isprintable():
                raise ValueError("name must be 1 to 64 printable characters, and so must each pattern")
        if max(len(self.runs or ()), len(self.users or ())) > MOST_PATTERNS:
            raise ValueError(f"runs must be {MOST_PATTERNS} at most, and users too")
        at_least(self, 1, "nodes")

    def is_for(self, run: str, user: str) -> bool:
        """Whether a run of this name, submitted by this user, may use it.

        >>> Offer(name="large", users=["ann"]).is_for("protein-1", "ann")
        True
        """
        wanted = ((run, self.runs), (user, self.users))
        return all(patterns is None or any(fnmatchcase(text, one) for one in patterns) for text, patterns in wanted)


@message
class SitePoll:
    """What an agent says of all its runs at once; with none it asks which there are."""

    poll_seconds: float
    offers: list[Offer]
    runs: list[Poll]

    def __post_init__(self) -> None:
        at_least(self, 0, "poll_seconds")
        if self.poll_seconds > MOST_POLL_SECONDS:
            raise ValueError(f"poll_seconds must be {MOST_POLL_SECONDS:g} at most")
        if len(self.offers) > MOST_OFFERS or len(self.runs) > MOST_RUNS:
            raise ValueError(f"offers must be {MOST_OFFERS} at most, and runs {MOST_RUNS}")


@message
class RunHere:
    """A run that this facility takes part in, by its offer of this name."""

    run: str  # tells runs apart, whatever their names
    name: str
    offer: str
    owner: str = later(default="operator")  # the user who submitted it
    weight: float = later(default=1.0)  # its share, if the site does not say otherwise

    def __post_init__(self) -> None:
        more_than(self, 0, "weight")


@message
class RunAnswer:
    """To the poll of one run: an answer, or why there is none."""

    run: str
    answer: Answer | None = None
    busy: bool = False  # it cannot be answered now
    refusal: Refusal = "refused"
    reason: str = ""


@message
class SiteAnswer:
    runs: list[RunHere]  # that it takes part in and that go on
    answers: list[RunAnswer]  # in the order of the polls
    over: dict[str, str]  # runs of those polls that have ended, and why


@message
class Submission:
    """A run that somebody wants: the plain values of its config file."""

    config: dict[str, Any]  # as TOML has it; it is read as every config is
    folder: str = later(default="")  # on the server, where relative paths in it begin: for who is on that machine


@message
class Submitted:
    run: str
    name: str
    folder: str
    notes: list[str]  # what its submitter should know: who is not there, who does not take part


@message
class SiteStatus:
    """A facility of a federation."""

    name: str
    enrolled: bool
    heard_seconds_ago: float | None  # None: not since this server started
    offers: list[str]


@message
class HostedRun:
    """A run of a federation."""

    name: str
    run: str
    folder: str
    state: str
    model: int | None  # the newest; None: nobody can say now
    score: float | None
    facilities: list[str]
    owner: str = later(default="")  # the user who submitted it; empty: the operator on the server's machine


@message
class FederationStatus:
    folder: str
    sites: list[SiteStatus]
    runs: list[HostedRun]


@message
class KeptModel:
    """Of a run, in its folder."""

    version: int
    ready_at: float  # seconds on the run clock
    score: float | None
    best: bool
    newest: bool
    sha256: str


@message
class KeptModels:
    models: list[KeptModel]  # the oldest first


# Users --------------------------------------------------------------------------------------------------


@message
class UserWanted:
    """Somebody who is to be known, or to have this role from now on."""

    role: UserRole
    anew: bool  # with a new credential, which ends the one before


@message
class UserGiven:
    """Where a user finds the federation, and by what it knows the user."""

    url: str
    certificate: str | None
    name: str
    role: UserRole
    credential: str | None  # None: it stays as it was


@message
class User:
    name: str
    role: UserRole


@message
class Users:
    users: list[User]
