"""What an operator says to a run: on the coordinator's machine, by the run's folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedqueue.cli import terminal
from fedqueue.errors import ConfigError, FedQueueError, RunFolderError


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
        parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
        if self.facility:
            parser.add_argument("facility", metavar="FACILITY")
        if self.__name__ == "status":
            parser.add_argument("--json", action="store_true", help="print it as one JSON object and nothing else")
        if self.__name__ == "invite":
            parser.add_argument("--out", type=Path, metavar="FILE", help="into this file, readable by you alone")

    def run(self, args: argparse.Namespace) -> int:
        return self.act(args)


def ask(folder: Path, method: str, path: str) -> dict[str, Any]:
    """Ask the run's coordinator, as its operator."""
    from fedqueue.runs import SUMMARY
    from fedqueue.runtime.access import OPERATOR_FILE
    from fedqueue.runtime.server import ADDRESS
    from fedqueue.runtime.transport import Client, CoordinatorRefusedError, CoordinatorUnreachableError

    try:
        address = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
        credential = (folder / OPERATOR_FILE).read_text(encoding="utf-8")
    except OSError:
        raise RunFolderError(f"{folder}: is not the folder of a real run that was ever served") from None
    ca = Path(address["ca"]) if address["ca"] is not None else None
    client = Client(address["local"], credential=credential, ca=ca)
    try:
        return client.call(method, path)
    except CoordinatorRefusedError as error:
        raise SaidNoError(error.reason) from None
    except CoordinatorUnreachableError as error:
        if (folder / SUMMARY).exists():
            raise RunFolderError(f"{folder}: the run is over; `fedqueue report {folder}` shows it") from None
        said = f"its coordinator does not answer; `fedqueue serve {folder}` goes on with the run"
        raise CoordinatorUnreachableError(f"{folder}: {said} ({error})") from None
    finally:
        client.close()


def _tell(word: str) -> Callable[[argparse.Namespace], int]:
    def act(args: argparse.Namespace) -> int:
        ask(args.folder, "POST", f"/v1/run/{word}")
        print({"pause": "paused", "resume": "goes on", "stop": "told to stop"}[word])
        return 0

    return act


def _tell_facility(word: str) -> Callable[[argparse.Namespace], int]:
    def act(args: argparse.Namespace) -> int:
        answer = ask(args.folder, "POST", f"/v1/facilities/{quote(args.facility, safe='')}/{word}")
        if word == "revoke" and not answer["had"]:
            raise ConfigError(f"{args.facility} had neither a credential nor an invitation")
        said = {"drain": "gets no new job; what it has finishes", "join": "may have work", "revoke": "is shut out"}
        print(f"{args.facility} {said[word]}")
        return 0

    return act


def _invite(args: argparse.Namespace) -> int:
    from fedqueue.runtime.access import write_secret
    from fedqueue.runtime.enrolment import invitation

    answer = ask(args.folder, "POST", f"/v1/facilities/{quote(args.facility, safe='')}/invite")
    text = invitation(answer["url"], answer["token"], answer["certificate"], answer["run"])
    if args.out is not None:
        write_secret(args.out, text + "\n")
        print(f"wrote {args.out}: it lets {args.facility} enrol once, within a week; pass it on in private")
    else:
        print(text)
    return 0


def _status(args: argparse.Namespace) -> int:
    found = ask(args.folder, "GET", "/v1/status")
    if args.json:
        print(json.dumps(found))
        return 0
    score = "" if found["score"] is None else f", score {100 * found['score']:.1f} %"
    if found.get("unscored"):
        score += f" (models passed over: {found['unscored']})"
    print(f"{found['run']} ({found['strategy']}): {found['state']}")
    print(f"{found['run_seconds']:.0f} s on the run clock, model {found['model']}{score}")
    rows = [
        (
            facility["name"],
            facility["state"],
            str(facility["jobs"]),
            str(facility["ordered"]),
            _number(facility["expected_delay"]),
            _number(facility["steps_per_second"]),
            _number(facility["heard_seconds_ago"]),
        )
        for facility in found["facilities"]
    ]
    columns = ("facility", "state", "jobs out", "ordered", "expected wait (s)", "steps/s", "heard (s ago)")
    terminal.show_table("", columns, rows)
    return 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


VERBS = (
    Verb("status", "how a served run gets on", "How a run that is served gets on.", _status),
    Verb(
        "pause", "no new work; the run clock stands still", "No new work; the run clock stands still.", _tell("pause")
    ),
    Verb("resume", "go on after a pause", "Go on after a pause.", _tell("resume")),
    Verb("stop", "end a run now", "End a run as if its time were up; what is under way is cancelled.", _tell("stop")),
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
        "Take a facility's credential and invitations back: whoever has them is shut out at once.",
        _tell_facility("revoke"),
        True,
    ),
)
