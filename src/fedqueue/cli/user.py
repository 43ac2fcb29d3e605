"""The people of a federation: who may submit and steer runs from another machine, and who may look.

  fedqueue user FEDERATION add ann --role submitter --out ann.access
  fedqueue user FEDERATION list
  fedqueue user FEDERATION remove ann

The file lets its holder be that user: pass it on in private. Commands take it in the place of the federation's folder
(`fedqueue submit ann.access my.toml`, `fedqueue status ann.access/runs/first`). To add somebody who is there already
changes the role; with --out also the credential, which ends the one before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

from fedqueue.cli import operate, terminal
from fedqueue.errors import ConfigError
from fedqueue.protocol.codec import body
from fedqueue.protocol.service import UserRole

HELP = "add, list and remove users of a federation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("federation", type=Path, metavar="FEDERATION", help=operate.FEDERATION)
    parser.add_argument("word", choices=("add", "list", "remove"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the user")
    parser.add_argument("--role", choices=get_args(UserRole), help="what the user may do (docs/security.md)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the access file there, readable by you alone")
    parser.add_argument("--json", action="store_true", help="print the list as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    operate.must_be_federation(args.federation)
    if args.word != "list" and args.name is None:
        raise ConfigError(f"{args.word}: whom? name a user")
    return {"add": _add, "list": _list, "remove": _remove}[args.word](args)


def _add(args: argparse.Namespace) -> int:
    from fedqueue.agent.access_file import AccessFile

    if args.role is None:
        raise ConfigError(f"--role: say what {args.name} may do: {', '.join(get_args(UserRole))}")
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out: {args.out} exists already; nothing was changed; name another file")
    given = operate.ask(
        args.federation, lambda client: client.set_user(args.name, args.role, anew=args.out is not None)
    )
    if given.credential is None:
        print(f"{given.name} is a {given.role} from now on, with the same access file")
        return 0
    AccessFile.of(given).save(args.out)
    print(f"wrote {args.out}: its holder is {given.name}, a {given.role}; pass it on in private")
    return 0


def _list(args: argparse.Namespace) -> int:
    found = operate.ask(args.federation, lambda client: client.users()).users
    if args.json:
        print(json.dumps([body(user) for user in found]))
        return 0
    terminal.show_table("", ("user", "role"), [(user.name, user.role) for user in found])
    return 0


def _remove(args: argparse.Namespace) -> int:
    if not operate.ask(args.federation, lambda client: client.remove_user(args.name)).had:
        raise ConfigError(f"there is no user {args.name}")
    print(f"{args.name} is shut out; the runs that were submitted go on")
    return 0
