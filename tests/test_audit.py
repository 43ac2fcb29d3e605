"""Who did what, from where and when: on the disk before it takes effect, and nothing in it that must not be."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from fedqueue.agent.access_file import AccessFile
from fedqueue.agent.http_transport import Client, HttpRefusedError
from fedqueue.agent.transport import CoordinatorBusyError
from fedqueue.cli import main
from fedqueue.coordinator import audit
from fedqueue.coordinator.audit import Audit, read_audit
from tests.coordinators import Served, refusal
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A federation without sites."""
    base = tmp_path_factory.mktemp("audit")
    made = Served(base / "federation", base / "serve.log", plain=True)
    made.folder.mkdir(mode=0o700)
    (made.folder / "federation.toml").write_text("[server]\nport = 0\n")
    (made.folder / "federation.toml").chmod(0o600)
    made.start()
    try:
        yield made
        assert "ours:" not in made.said()
    finally:
        made.stop()


CONFIG = {
    "run": {"name": "first", "strategy": "fedasync", "rounds": 5},
    "task": {"name": "timing"},
    "evaluation": {"where": "nowhere"},
    "facility": [{"name": "north"}],
}


def answers(run: Client) -> bool:
    with suppress(CoordinatorBusyError):
        return bool(run.status())
    return False


def lines(served: Served) -> list[dict[str, str]]:
    return list(read_audit(served.folder))


def test_everything_that_changes_who_may_and_what_runs_is_noted(served: Served, tmp_path: Path) -> None:
    before = len(lines(served)) if (served.folder / audit.FILE).exists() else 0
    served.enrol("north")
    refusal(served.anyone().call, "POST", "/v1/enroll", {"token": "used or never there"})
    ann = tmp_path / "ann.access"
    assert main(["user", str(served.folder), "add", "ann", "--role", "submitter", "--out", str(ann)]) == 0
    with AccessFile.load(ann).client(ann) as client:
        assert client.call("POST", "/v1/runs", {"config": CONFIG})["name"] == "first"
        refusal(client.call, "POST", "/v1/runs", {"config": {}})
        wait_for(lambda: answers(client.of("first")), "its coordinator")
        refusal(client.of("first").steer, "pause")  # it has not started: it is noted that it was not done
        refusal(client.of("first").tell, "north", "drain")
        refusal(client.invite, "south")
        served.spoken.append(AccessFile.load(ann).credential)
    assert main(["user", str(served.folder), "add", "ann", "--role", "viewer"]) == 0
    assert main(["revoke", str(served.folder), "north"]) == 0
    assert main(["user", str(served.folder), "remove", "ann"]) == 0
    refusal(served.client("w" * 43).call, "GET", "/v1/federation")
    found = lines(served)[before:]
    told = [(line["who"], line["what"], line.get("facility") or line.get("user") or line.get("run")) for line in found]
    assert told == [
        ("operator", "invite", "north"),
        ("", "enrolled", "north"),
        ("", "refused: a token", None),
        ("operator", "user added", "ann"),
        ("ann", "submit", "first"),
        ("ann", "pause", "first"),
        ("ann", "pause: not done, 409", None),
        ("ann", "drain", "north"),
        ("ann", "drain: not done, 409", None),
        ("ann", "refused: invite a facility", None),
        ("operator", "user changed", "ann"),
        ("operator", "revoke", "north"),
        ("operator", "user removed", "ann"),
        ("", "refused: a credential", None),
    ]
    assert {line["from"] for line in found} == {"127.0.0.1"}
    moments = [datetime.fromisoformat(line["at"]) for line in found]
    assert moments == sorted(moments)
    content = (served.folder / audit.FILE).read_text()
    assert (served.folder / audit.FILE).stat().st_mode & 0o777 == 0o600
    assert not any(secret in content for secret in [*served.spoken, served.operator_secret, "w" * 43])


def test_what_cannot_be_noted_is_not_done(served: Served) -> None:
    path = served.folder / audit.FILE
    served.invite("there")
    aside = path.rename(path.with_name("aside"))
    path.mkdir()
    try:
        for what, body in (
            ("users/cleo", {"role": "viewer", "anew": True}),
            ("facilities/there/revoke", None),
            ("runs", {"config": CONFIG}),
        ):
            with pytest.raises(CoordinatorBusyError, match="507"):
                served.operator().call("POST", f"/v1/{what}", body)
        runs = len(served.operator().federation().runs)
        assert "cleo" not in [user.name for user in served.operator().users().users]
        assert len(list((served.folder / "runs").iterdir())) == runs
    finally:
        path.rmdir()
        aside.rename(path)
    assert served.operator().tell("there", "revoke").had, "its invitation is there still"


def test_what_strangers_cause_is_a_line_a_minute_with_how_often(served: Served) -> None:
    def refusals() -> int:
        return sum(line["what"].startswith("refused: a credential") for line in lines(served))

    before = refusals()
    with pytest.raises(HttpRefusedError):
        served.client("x" * 43).call("GET", "/v1/federation")
    for number in range(200):
        client = Client(served.url, credential=f"{number:043}")
        refusal(client.call, "GET", "/v1/federation")
        client.close()
    assert refusals() <= before + 1


def test_refusals_are_counted_and_none_is_lost_or_fills_the_disk(tmp_path: Path) -> None:
    now = 0.0
    noted = Audit(tmp_path, lambda: now)
    for number in range(10_000):
        now += 0.1  # a thousand seconds
        noted.note_refusals(noted.refusals("refused: a credential", "", f"192.0.2.{number % 250}"))
    noted.close()
    told = list(read_audit(tmp_path))
    assert sum(int(line["times"]) for line in told) == 10_000
    most = Counter(line["from"] for line in told)
    assert max(most.values()) <= 1000 / audit.SECONDS + 2
    assert len(most) <= audit.MOST_KINDS + 1


def test_a_line_is_one_printable_line_and_one_that_was_cut_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = Audit(tmp_path)
    noted.note("submit", "ann", "192.0.2.1", run="a\nb\x1b[2J\u202e" + "x" * 1000)
    with (tmp_path / audit.FILE).open("a") as file:
        file.write('{"at": "2026-')
    noted.note("pause", "ann", "192.0.2.1", run="first")
    text = (tmp_path / audit.FILE).read_text()
    assert text.isascii()
    assert all(line.isprintable() for line in text.splitlines())
    assert [line["what"] for line in read_audit(tmp_path)] == ["submit", "pause"]
    assert all(len(line.get("run", "")) <= audit.LENGTH for line in read_audit(tmp_path))
    assert main(["audit", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "192.0.2.1" in shown
    assert "\x1b[2J" not in shown
    assert main(["audit", str(tmp_path), "--json", "--since", "2999-01-01"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["audit", str(tmp_path), "--json", "--since", "1h"]) == 0
    assert [json.loads(line)["what"] for line in capsys.readouterr().out.splitlines()] == ["submit", "pause"]
    assert main(["audit", str(tmp_path), "--since", "soon"]) == 2
    assert main(["audit", str(tmp_path / "nothing")]) == 5
