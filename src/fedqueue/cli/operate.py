"""What an operator or a user says to a run or a federation: on its machine by the folder, from elsewhere by a file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedqueue.cli import terminal
from fedqueue.errors import ConfigError, FedQueueError, RunFolderError
from fedqueue.protocol.codec import body

RUN = "the run's folder; from elsewhere ACCESS/runs/NAME, with the access file of a user"
FEDERATION = "the folder of a served federation; from elsewhere the access file of a user"

MOST_JOBS = 8
"""Of one facility that `status` lists."""
FOLDER_SECONDS = 30.0
"""How long a folder is waited for that `fedqueue serve ... &` has not made yet."""
BUSY_SECONDS = 5.0
"""How long a server elsewhere is asked again that cannot answer now."""
STARTING_SECONDS = 60.0
"""How long a coordinator may take from its lock to its first answer: it may have to read a long ledger."""


if TYPE_CHECKING:
    from fedqueue.agent.access_file import Elsewhere
    from fedqueue.agent.http_transport import Client
    from fedqueue.protocol.service import FacilityStatus

T = TypeVar("T")


class SaidNoError(FedQueueError):
    """The coordinator's own words, without the address that nobody asked about."""

    exit_code = 9


class Verb:
    """A command as the command line's table wants it: like a module of one."""

    def __init__(
        self, name: str, short: str, about: str, act: Callable[[argparse.Namespace], int], facility: bool = False
    ) -> None:
        self.__name__ = name
        self.__doc__ = about
        self.HELP = short
        self.act = act
        self.facility = facility

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, metavar="RUN", help=RUN)
        if self.facility:
            parser.add_argument("facility", metavar="FACILITY")
        if self.__name__ == "rollback":
            parser.add_argument("version", type=int, metavar="VERSION", help="the model to go back to")
        if self.__name__ == "status":
            parser.add_argument("--json", action="store_true", help="print it as one JSON object and nothing else")
        if self.__name__ == "revoke":
            parser.add_argument("--keep", action="store_true", help="use what it has handed in and is in no model yet")
        if self.__name__ == "invite":
            parser.add_argument("--out", type=Path, metavar="FILE", help="into this file, readable by you alone")

    def run(self, args: argparse.Namespace) -> int:
        return self.act(args)


def ask(folder: Path, what: Callable[[Client], T]) -> T:
    """Ask the run's coordinator or a federation, as its operator or as a user. One on this machine that was started
    just now is waited for."""
    from fedqueue.agent.access_file import elsewhere
    from fedqueue.agent.transport import CoordinatorBusyError, CoordinatorRefusedError, CoordinatorUnreachableError
    from fedqueue.runs import SUMMARY

    there = elsewhere(folder)
    if there is not None:
        return ask_elsewhere(there, lambda client: what(client.of(there.run) if there.run else client))

    patience = Patience(folder)
    while True:
        client = _client(folder, patience)
        try:
            return what(client)
        except CoordinatorRefusedError as error:
            raise SaidNoError(error.reason) from None
        except CoordinatorBusyError as error:
            raise CoordinatorUnreachableError(f"{folder}: {error.reason}") from None
        except CoordinatorUnreachableError as error:
            if patience.is_left():
                continue
            if (folder / SUMMARY).exists():
                raise RunFolderError(f"{folder}: the run is over; `fedqueue report {folder}` shows it") from None
            said = f"its coordinator does not answer; `fedqueue serve {folder}` goes on with the run"
            raise CoordinatorUnreachableError(f"{folder}: {said} ({error})") from None
        finally:
            client.close()


def ask_elsewhere(there: Elsewhere, what: Callable[[Client], T]) -> T:
    """`what` is asked of the federation."""
    from fedqueue.agent.access_file import AccessFile
    from fedqueue.agent.transport import CoordinatorBusyError, CoordinatorRefusedError, CoordinatorUnreachableError

    tried, began = "", time.monotonic()
    while True:
        held = AccessFile.load(there.file)
        try:
            with held.client(there.file) as client:
                return what(client)
        except CoordinatorRefusedError as error:
            if error.refusal == "not allowed" and tried != held.credential != AccessFile.load(there.file).credential:
                tried = held.credential  # another command has renewed it meanwhile
                continue
            raise SaidNoError(error.reason) from None
        except CoordinatorBusyError as error:
            if time.monotonic() - began < BUSY_SECONDS:  # a run that has only begun reads its ledger
                time.sleep(0.2)
                continue
            raise CoordinatorUnreachableError(f"{held.url}: {error.reason}") from None


class Patience:
    """With a coordinator that has only begun to start: it makes its folder, then takes its lock, then listens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._told = False

    def is_left(self) -> bool:
        """Waits a moment; False: there is nobody who could answer."""
        from fedqueue.coordinator.run_folder import is_federation
        from fedqueue.coordinator.scoring import STORED
        from fedqueue.coordinator.serve import is_at_work
        from fedqueue.coordinator.server import ADDRESS

        waited = time.monotonic() - self._began
        there = self._folder.is_dir() and any(self._folder.iterdir())
        is_begun = (self._folder / STORED).exists() or is_federation(self._folder)
        if is_at_work(self._folder):
            longest = STARTING_SECONDS
        elif not there or (is_begun and not (self._folder / ADDRESS).exists()):
            longest = FOLDER_SECONDS
        else:  # the folder of something else, or of a run that nobody serves now
            return False
        if waited > longest:
            return False
        if waited > 1.0 and not self._told:
            print(f"waiting for the coordinator of {self._folder}", file=sys.stderr, flush=True)
            self._told = True
        time.sleep(0.1)
        return True


def _client(folder: Path, patience: Patience) -> Client:
    from fedqueue.agent.http_transport import Client
    from fedqueue.coordinator.access import OPERATOR_FILE
    from fedqueue.coordinator.server import ADDRESS
    from fedqueue.files import only_mine
    from fedqueue.protocol.codec import read
    from fedqueue.protocol.contract import Address

    while True:
        try:
            address = read(Address, json.loads((folder / ADDRESS).read_text(encoding="utf-8")), ADDRESS)
            own = folder / OPERATOR_FILE if address.operator is None else Path(address.operator)
            only_mine(own)
            credential = own.read_text(encoding="utf-8")
        except OSError:
            if patience.is_left():
                continue
            raise RunFolderError(f"{folder}: is not the folder of a real run that was ever served") from None
        ca = Path(address.ca) if address.ca is not None else None
        shown, key = map(Path, address.client) if address.client is not None else (None, None)
        return Client(address.local, credential=credential, ca=ca, certificate=shown, key=key)


def _tell(word: str) -> Callable[[argparse.Namespace], int]:
    def act(args: argparse.Namespace) -> int:
        must_be_run(args.folder)
        answer = ask(args.folder, lambda client: client.steer(word))
        said = {"pause": "paused", "resume": "goes on", "stop": "told to stop"}[word]
        print(f"tries again now; {answer.hindrance}" if word == "resume" and answer.hindrance else said)
        return 0

    return act


def _roll_back(args: argparse.Namespace) -> int:
    if args.version < 0:
        raise ConfigError(f"VERSION: must be 0 or more, found {args.version}")
    answer = ask(args.folder, lambda client: client.roll_back(args.version))
    print(f"the next model is model {args.version} again; what was made of those after it does not count")
    if answer.hindrance:
        print(f"the run is held: {answer.hindrance}")
    return 0


def _tell_facility(word: str) -> Callable[[argparse.Namespace], int]:
    def act(args: argparse.Namespace) -> int:
        if word != "revoke":
            must_be_run(args.folder)
        told = "revoke-and-keep" if word == "revoke" and args.keep else word
        answer = ask(args.folder, lambda client: client.tell(args.facility, told))
        if word == "revoke" and not answer.had:
            raise ConfigError(f"{args.facility} had neither a credential nor an invitation")
        said = {"drain": "gets no new job; what it has finishes", "join": "may have work", "revoke": "is shut out"}
        print(f"{args.facility} {said[word]}")
        return 0

    return act


def _invite(args: argparse.Namespace) -> int:
    from fedqueue.agent.enrolment import word_of
    from fedqueue.files import write_secret

    text = word_of(ask(args.folder, lambda client: client.invite(args.facility)))
    if args.out is not None:
        write_secret(args.out, text + "\n")
        print(f"wrote {args.out}: it lets {args.facility} enrol once, within a week; pass it on in private")
    else:
        print(text)
    return 0


def is_served_federation(folder: Path) -> bool:
    from fedqueue.agent.access_file import elsewhere
    from fedqueue.coordinator.run_folder import RUNS
    from fedqueue.coordinator.scoring import STORED

    there = elsewhere(folder)
    if there is not None:
        return not there.run
    return (folder / RUNS).is_dir() and not (folder / STORED).exists()


def must_be_federation(folder: Path) -> None:
    if not is_served_federation(folder):
        raise RunFolderError(f"{folder}: is not the folder of a federation; `fedqueue serve {folder}` begins one")


def must_be_run(folder: Path) -> None:
    if is_served_federation(folder):
        raise RunFolderError(f"{folder}: is a federation; name one of its runs: {folder}/runs/NAME")


def show_federation(folder: Path, *, as_json: bool) -> int:
    found = ask(folder, lambda client: client.federation())
    if as_json:
        print(json.dumps(body(found), default=body))
        return 0
    sites = [
        (
            site.name,
            "yes" if site.enrolled else "no",
            terminal.seconds(site.heard_seconds_ago),
            ", ".join(site.offers) or "-",
        )
        for site in found.sites
    ]
    terminal.show_table("", ("facility", "enrolled", "heard (s ago)", "offers"), sites)
    runs = [
        (
            run.name,
            run.state,
            "-" if run.model is None else str(run.model),
            "-" if run.score is None else f"{100 * run.score:.1f} %",
            ", ".join(run.facilities),
            run.owner or "-",
        )
        for run in found.runs
    ]
    terminal.show_table("", ("run", "state", "model", "score", "facilities", "owner"), runs)
    return 0


def _status(args: argparse.Namespace) -> int:
    if is_served_federation(args.folder):
        return show_federation(args.folder, as_json=args.json)
    found = ask(args.folder, lambda client: client.status())
    if args.json:
        print(json.dumps(found, default=body))
        return 0
    score = "" if found.score is None else f", score {100 * found.score:.1f} %"
    if found.unscored:
        score += f" (models passed over: {found.unscored})"
    print(f"{found.run} ({found.strategy}): {found.state}")
    print(f"{found.run_seconds:.0f} s on the run clock, model {found.model}{score}")
    rows = [
        (
            facility.name,
            facility.state,
            str(facility.jobs),
            terminal.seconds(facility.expected_delay),
            terminal.seconds(facility.steps_per_second),
            terminal.seconds(facility.heard_seconds_ago),
            _share(facility.idle_node_seconds, facility.node_seconds),
        )
        for facility in found.facilities
    ]
    columns = ("facility", "state", "jobs out", "wait (s)", "steps/s", "heard (s ago)", "nodes idle")
    terminal.show_table("", columns, rows)
    terminal.show_notes([note for facility in found.facilities for note in _notes(facility)])
    return 0


def _share(part: float, whole: float) -> str:
    """Of the node time that was held."""
    return f"{part / whole:.1%}" if whole else "-"


def _notes(facility: FacilityStatus) -> Iterator[tuple[str, str]]:
    """What its jobs do and since when, why it has none, and what its agent complains of."""
    name, jobs = facility.name, facility.open_jobs
    for job in jobs[:MOST_JOBS]:
        again = f" (attempt {job.attempt + 1})" if job.attempt else ""
        state = "ordered, and not at its scheduler yet," if job.state == "ordered" else job.state
        idle = f", {terminal.span(job.idle_seconds)} without work in all" if job.idle_seconds else ""
        yield job.job, f"{state} for {terminal.span(job.seconds)}{again}{idle}"
    if len(jobs) > MOST_JOBS:
        yield name, f"and {len(jobs) - MOST_JOBS} more jobs"
    if facility.idle_because is not None:
        until = facility.until_seconds
        how_long = "" if until is None else f" for another {terminal.span(until)}"
        yield name, f"idle{how_long}: {facility.idle_because}"
    for trouble in facility.troubles:
        yield name, f"its agent says, for {terminal.span(trouble.seconds)}: {trouble.reason}"


VERBS = (
    Verb("status", "how a served run gets on", "How a run that is served gets on.", _status),
    Verb(
        "pause", "no new work; the run clock stands still", "No new work; the run clock stands still.", _tell("pause")
    ),
    Verb("resume", "go on after a pause", "Go on after a pause.", _tell("resume")),
    Verb(
        "stop",
        "end a run now",
        "End a run now; jobs under way are cancelled.",
        _tell("stop"),
    ),
    Verb(
        "rollback",
        "take models back",
        "Take back every model after VERSION, such as those that a hostile facility has spoilt: the next one is that "
        "model again, on record, and later ones are made from it. Revoke or drain the facility first.",
        _roll_back,
    ),
    Verb(
        "drain",
        "give a facility no new work",
        "Give a facility no new work; what it has finishes. `fedqueue join` undoes it.",
        _tell_facility("drain"),
        True,
    ),
    Verb(
        "join",
        "let a drained or failed facility work again",
        "Let a facility work again that was drained, or was given up after too many failures.",
        _tell_facility("join"),
        True,
    ),
    Verb(
        "invite",
        "an invitation for a facility, good once",
        "Make an invitation with which a facility can enrol, once, within a week. Pass it on in private.",
        _invite,
        True,
    ),
    Verb(
        "revoke",
        "take a facility's credential back",
        "Take a facility's credential and invitations back: whoever has them is shut out at once. Its updates that are "
        "in no model yet are rejected, unless --keep is given.",
        _tell_facility("revoke"),
        True,
    ),
)
