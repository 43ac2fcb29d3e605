"""Credentials expire, and are renewed while they are in use, whatever answer is lost and whichever process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.access_file import AccessFile
from fedqueue.agent.enrolment import Enrolment
from fedqueue.cli import main
from fedqueue.coordinator.access import FILE, USERS, Access, digest
from fedqueue.files import write_secret
from fedqueue.protocol.service import Offer, SitePoll
from tests.coordinators import Served, refusal

pytestmark = pytest.mark.waits(2)

DAY = 86400.0
PEOPLE = ("ann", "bob", "cleo", "late")


def leave(folder: Path, seconds: dict[str, float]) -> None:
    """So many seconds to the credentials of these holders."""
    known = json.loads((folder / FILE).read_text())
    for held in known["credentials"].values():
        if held["who"] in seconds:
            held["until"] = time.time() + seconds[held["who"]]
    write_secret(folder / FILE, json.dumps(known))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A federation at which it is time to renew every credential but one, which has expired."""
    base = tmp_path_factory.mktemp("renewal")
    made = Served(base / "federation", base / "serve.log", plain=True)
    made.folder.mkdir(mode=0o700)
    (made.folder / "federation.toml").write_text("[server]\nport = 0\n")
    (made.folder / "federation.toml").chmod(0o600)
    access = Access(made.folder)
    made.credentials = {name: access.set_user(name, "viewer", anew=True) or "" for name in PEOPLE}
    found = access.enrol(access.invite("north"))
    assert found is not None
    made.credentials["north"] = found[1]
    leave(made.folder, {**{USERS + name: 29 * DAY for name in PEOPLE}, USERS + "late": -1.0, "north": 29 * DAY})
    made.start()
    for name in PEOPLE:
        AccessFile(url=made.url, name=name, credential=made.credentials[name]).save(base / f"{name}.access")
    try:
        yield made
        assert "ours:" not in made.said()
    finally:
        made.stop()


def command(*words: object, point: str = "") -> int:
    argv = [sys.executable, "-m", "fedqueue", *map(str, words)]
    environment = {**os.environ, "FEDQUEUE_FAILPOINT": point}
    return subprocess.run(argv, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize(("name", "point"), [("ann", ""), ("bob", "credential.came"), ("cleo", "credential.kept")])
def test_a_command_that_is_killed_while_it_renews_leaves_a_file_that_works(
    name: str, point: str, served: Served
) -> None:
    file, before = served.folder.parent / f"{name}.access", served.credentials[name]
    if point:
        assert command("list", file, point=point) == -9
    assert main(["list", str(file)]) == 0
    after = AccessFile.load(file).credential
    assert after != before
    assert main(["list", str(file)]) == 0
    assert AccessFile.load(file).credential == after, "there are ninety days again"
    refused = refusal(served.client(before).call, "GET", "/v1/federation")
    assert refused.status == 401, "the new one was used"


def test_an_agent_renews_the_credential_of_its_home(served: Served, tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = served.credentials["north"]
    Enrolment(url=served.url, facility="north", credential=before, federation=True).save(home)
    transport = Enrolment.load(home).client(home, None)
    said = SitePoll(poll_seconds=5.0, offers=[Offer(name="default")], runs=[])
    transport.poll_all(said)
    kept = Enrolment.load(home)
    assert kept.credential == transport.credential != before
    assert served.client(before).poll_all(said).runs == [], "the old one works until the new one is used"
    assert transport.of("any").credential == kept.credential
    transport.poll_all(said)
    assert refusal(served.client(before).poll_all, said).status == 401
    assert (home / "credential").stat().st_mode & 0o777 == 0o600


def test_who_comes_too_late_is_told_so_in_one_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(served.folder.parent / "late.access")]) == 9
    said = capsys.readouterr().err
    assert said == "fedqueue: error: this credential has expired; ask the operator for a new one\n"


# Without a network ---------------------------------------------------------------------------------------------------


def due(folder: Path) -> tuple[Access, str]:
    """A credential that it is time to renew."""
    credential = Access(folder).set_user("ann", "viewer", anew=True)
    assert credential is not None
    leave(folder, {USERS + "ann": 10.0})
    return Access(folder), credential


@pytest.mark.parametrize("point", ["secret.whole", "credential.given", "credential.used"])
def test_a_server_that_is_killed_while_it_renews_knows_the_old_or_both_or_the_new(point: str, tmp_path: Path) -> None:
    _, old = due(tmp_path)
    program = (
        "import sys; from pathlib import Path; from fedqueue.coordinator.access import Access; "
        "a = Access(Path(sys.argv[1])); a.used(a.renew(sys.stdin.read()))"
    )
    environment = {**os.environ, "FEDQUEUE_FAILPOINT": point}
    argv = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(argv, input=old, text=True, env=environment, check=False).returncode == -9
    again = Access(tmp_path)
    assert again.who(old) == "/users/ann"
    new = again.renew(old)
    assert new is not None
    assert new == again.renew(old), "the same, however often it is asked for"
    again.used(new)
    for access in (again, Access(tmp_path)):
        assert (access.who(old), access.who(new)) == (None, "/users/ann")


def test_what_was_begun_with_the_old_credential_may_end_and_no_revocation_is_undone(tmp_path: Path) -> None:
    access, old = due(tmp_path)
    new = access.renew(old)
    assert new is not None
    access.used(new)
    assert access.who(old) is None
    assert access.who(old, under_way=True) == "/users/ann"
    access.remove_user("ann")
    assert [access.who(secret, under_way=True) for secret in (old, new)] == [None, None]
    assert access.renew(old) is access.renew(new) is None


def test_a_renewal_that_nobody_took_up_ends_with_whoever_is_shut_out(tmp_path: Path) -> None:
    access, old = due(tmp_path)
    new = access.renew(old)
    assert new is not None
    access.remove_user("ann")
    assert Access(tmp_path).who(old) is Access(tmp_path).who(new) is None


def test_a_credential_is_renewed_when_a_third_of_its_time_is_left(tmp_path: Path) -> None:
    for days, is_due in ((31.0, False), (29.0, True), (-0.1, True)):
        access, credential = due(tmp_path)
        leave(tmp_path, {USERS + "ann": days * DAY})
        access = Access(tmp_path, 90.0)
        assert access.is_due(credential) is is_due
        assert (access.renew(credential) is not None) == (is_due and days > 0)


def test_the_file_of_an_earlier_version_is_read_on(tmp_path: Path) -> None:
    """Its credentials have no end; from now on they have."""
    secrets = {"north": "n" * 43, "/operator": "o" * 43}
    earlier: dict[str, Any] = {
        "tokens": {digest("t"): {"facility": "south", "until": time.time() + 100.0}},
        "credentials": {digest(secret): who for who, secret in secrets.items()},
        "unsettled": ["west"],
    }
    write_secret(tmp_path / FILE, json.dumps(earlier))
    write_secret(tmp_path / "operator", secrets["/operator"])
    access = Access(tmp_path, 90.0)
    assert {who: access.who(secret) for who, secret in secrets.items()} == {who: who for who in secrets}
    assert (access.invited("t"), access.unsettled, access.enrolled()) == ("south", ["west"], {"north"})
    kept = json.loads((tmp_path / FILE).read_text())["credentials"]
    ends = {held["who"]: held["until"] for held in kept.values()}
    assert ends["/operator"] is None
    assert 89.9 * DAY < ends["north"] - time.time() <= 90 * DAY
    assert (tmp_path / "operator").read_text() == secrets["/operator"]
