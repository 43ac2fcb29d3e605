"""What anybody on the network can do to a coordinator at work, with TLS and without: nothing that a run feels.

Each attack goes on while `honest` asks that the run be as before: a poll is answered, an update becomes part of a
model, the operator is served.
"""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.enrolment import Enrolment
from fedqueue.agent.transport import CoordinatorBusyError
from fedqueue.cli import main, operate
from fedqueue.config import read_tree
from fedqueue.coordinator.access import FILE as ACCESS
from fedqueue.coordinator.access import OPERATOR_FILE, Access
from fedqueue.coordinator.run_folder import store_config
from fedqueue.errors import ConfigError
from fedqueue.files import lock_file
from fedqueue.ledger import LedgerReader
from fedqueue.protocol.codec import encode
from fedqueue.protocol.contract import Address, JobOrder
from tests.coordinators import Facility, Raw, Served, config_file, failed, refusal, request, serving, update
from tests.test_security import is_up, mode, no_umask
from tests.waiting import LONGEST, wait_for

FEW_FILES = ("bash", "-c", 'ulimit -n 400; exec "$0" "$@"')
"""So that what needs thousands of connections elsewhere needs hundreds here."""


@pytest.fixture(scope="module", params=["TLS", "plain"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, plain = tmp_path_factory.mktemp("attacked"), request.param == "plain"
    with serving(folder, facilities=("north",), prefix=FEW_FILES, plain=plain, round_length=1.0) as made:
        made.facility("north").poll()
        yield made
        honest(made, folder)
        assert made.replays() > 0
        assert "ours:" not in made.said()


def honest(served: Served, folder: Path) -> None:
    """Facility and operator get what they ask for, and the next model is made."""
    north = served.facility("north")
    made = served.status()["model"]
    order = north.running()
    base = order.assignment.base_version if order.assignment else made
    assert north.commit(north.put(order, update(folder)), base)["status"] == "accepted"
    north.taken = None
    wait_for(lambda: served.status()["model"] > base, "the next model", served.said)


@contextmanager
def connected(served: Served, number: int) -> Iterator[list[socket.socket]]:
    """So many connections, one after the other, that say nothing."""
    with ExitStack() as held:
        made = []
        for _ in range(number):
            with suppress(OSError):
                made.append(held.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=LONGEST)))
        yield made


def test_a_thousand_silent_connections_neither_end_nor_stall_a_run(served: Served, tmp_path: Path) -> None:
    known = served.facility("north")
    with Raw(served) as before:
        before.send(request("GET", "/v1/models/0", credential=served.credentials["north"]))
        assert before.status() == 200
        with connected(served, 1000) as strangers:
            for _ in range(3):
                known.poll()
                served.client(served.credentials["north"]).call("GET", "/v1/health")  # a newcomer
            honest(served, tmp_path)
            wait_for(lambda: sum(map(is_up, strangers)) < 140, "the end of the oldest", every=0.05)
            before.send(request("GET", "/v1/health"))
            assert before.status() == 200, "who has shown a credential stays"
    assert len(served.said().splitlines()) < 40, "a thousand connections are no thousand lines in a log"


def test_who_never_reads_its_answers_locks_nobody_out(served: Served, tmp_path: Path) -> None:
    asked = request("GET", "/v1/openapi.json") * 200  # more than the buffers between us take
    with ExitStack() as held:
        stuck = []
        for _ in range(160):
            with suppress(OSError):
                raw = held.enter_context(Raw(served))
                raw.socket.settimeout(0.02)
                stuck.append(raw)
                raw.send(asked)
        honest(served, tmp_path)
        wait_for(lambda: sum(is_up(raw.socket) for raw in stuck) < 140, "the end of the oldest", every=0.05)


@pytest.mark.parametrize("way", ["chunks", "segments"])
def test_pieces_of_one_byte_do_not_keep_a_processor_busy(way: str, served: Served, tmp_path: Path) -> None:
    """Chunks of a byte cost h11 much and the network little; so do segments."""
    if way == "chunks":
        head = request("POST", "/v1/enroll", headers=["Transfer-Encoding: chunked"])
        pieces = [b"1\r\n \r\n" * 20_000] * 1000
    else:
        head = request("POST", "/v1/enroll", headers=["Content-Length: 4000"])
        pieces = [b" "] * 1_000_000
    done = threading.Event()

    def attack(ends: list[bool]) -> None:
        while not done.is_set():
            with suppress(OSError, ssl.SSLError), Raw(served) as raw:
                raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.send(head)
                for piece in pieces:
                    raw.send(piece)
                    if done.is_set():
                        return
            ends.append(True)

    ended: list[bool] = []
    attackers = [threading.Thread(target=attack, args=(ended,)) for _ in range(4)]
    for one in attackers:
        one.start()
    try:
        for _ in range(5):
            honest(served, tmp_path)
        wait_for(lambda: len(ended) >= 4, "the end of connections that bring nothing")
    finally:
        done.set()
        for one in attackers:
            one.join(LONGEST)


def test_a_server_that_may_open_too_few_files_says_so_and_how_many_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedqueue", "serve", str(config_file(tmp_path)), "--out", str(tmp_path / "run")]
    told = subprocess.run(
        ["bash", "-c", 'ulimit -n 100; exec "$0" "$@"', *command], capture_output=True, text=True, check=False
    )
    assert told.returncode == ConfigError.exit_code
    assert "server.connections: only 100 files may be open; allow 160 or more" in told.stderr


# A facility that means harm, and the others --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["TLS", "plain"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """North is honest; south is not, and is revoked by tests."""
    folder, plain = tmp_path_factory.mktemp("shared"), request.param == "plain"
    with serving(folder, facilities=("north", "south"), plain=plain, round_length=1.0) as made:
        made.facility("north").poll()
        yield made
        honest(made, folder)
        assert made.replays() > 0
        assert "ours:" not in made.said()


def enrolled_anew(served: Served, name: str) -> Facility:
    served.agents.pop(name, None)
    served.credentials.pop(name, None)
    return served.facility(name)


def poll_of(facility: Facility, **changes: Any) -> bytes:
    body = {"journal": facility.journal, "session": facility.session, "generation": 1, "poll_seconds": 5.0, **changes}
    return json.dumps(body).encode()


def test_a_body_with_too_much_in_it_is_refused_by_its_count_alone(shared: Served, tmp_path: Path) -> None:
    """What its first report is, nobody has looked at."""
    south = enrolled_anew(shared, "south")
    for changes in (
        {"reports": [{"kind": "none"}] * 24_000},
        {"reports": [{"kind": "foreseen", "levels": [0.1] * 1001}]},
        {"reports": [{"kind": "none that there is", "x": [0] * 300}] * 900},
    ):
        with Raw(shared) as raw:
            raw.send(request("POST", "/v1/poll", poll_of(south, **changes), credential=shared.credentials["south"]))
            answer = raw.answer()
        assert answer is not None
        assert answer[0] == 422, answer
        assert b"the body has" in answer[2]
    honest(shared, tmp_path)


def test_a_facility_that_sends_too_much_is_refused_before_its_body_is_read(shared: Served, tmp_path: Path) -> None:
    south = enrolled_anew(shared, "south")
    body = poll_of(south, reports=[{"kind": "none"}] * 24_000)
    head = request("POST", "/v1/poll", body, credential=shared.credentials["south"])[: -len(body)]

    def refused() -> bool:
        with Raw(shared) as raw:
            raw.send(head)  # the body never comes
            raw.socket.settimeout(0.3)
            try:
                return raw.status() == 429
            except TimeoutError:  # it waits for the body
                return False

    wait_for(refused, "the end of its patience", every=0.0)
    honest(shared, tmp_path)


def test_a_poll_begun_before_a_revocation_takes_no_effect_after_it(shared: Served) -> None:
    south = enrolled_anew(shared, "south")
    south.poll()
    order = south.order()
    body = poll_of(south, reports=[{"n": south.n + 1, **failed(order.sequence)}])
    with Raw(shared) as raw:
        raw.send(request("POST", "/v1/poll", body, credential=shared.credentials["south"])[:-1])
        shared.operator().call("POST", "/v1/facilities/south/revoke")
        raw.send(body[-1:])
        assert raw.status() == 401
    assert "JobFailed" not in kinds(shared, order.order.job_id)


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Served]:
    """A run with rounds so long that what is handed in waits."""
    with serving(tmp_path, facilities=("north", "south"), plain=True) as made:
        made.facility("north").poll()
        made.facility("south").poll()
        yield made
        assert made.replays() > 0
        assert "ours:" not in made.said()


def verdict_on(served: Served, order: JobOrder, path: str) -> dict[str, Any]:
    """What its agent hears when it has enrolled anew and asks again."""
    return enrolled_anew(served, "south").commit(path, order.assignment.base_version if order.assignment else 0)


@pytest.mark.parametrize("keep", [False, True])
def test_what_waits_of_a_facility_that_is_revoked_is_rejected_or_kept_as_the_operator_says(
    keep: bool, patient: Served, tmp_path: Path
) -> None:
    south = patient.facility("south")
    order = south.running()
    path = south.put(order, update(tmp_path))
    assert south.commit(path, 0)["status"] == "accepted"
    assert main(["revoke", str(patient.folder), "south", *(["--keep"] if keep else [])]) == 0
    assert refusal(south.poll).status == 401
    verdict = verdict_on(patient, order, path)
    assert verdict["status"] == ("accepted" if keep else "rejected")
    assert keep or verdict["reason"] == "south was revoked"
    with LedgerReader(patient.folder / "ledger.sqlite") as ledger:
        assert len(ledger.rows("SELECT 1 FROM events WHERE kind = 'UpdatesWithdrawn'")) == (0 if keep else 1)
    digest = path.rpartition("/")[2]
    waits = (patient.folder / "objects" / f"{digest}.safetensors").exists
    if keep:
        assert waits()
    else:
        wait_for(lambda: not waits(), "the end of its file")


def test_a_revocation_that_cannot_be_written_changes_nothing_and_says_so(patient: Served) -> None:
    in_the_way = patient.folder / f"{ACCESS}.part"
    in_the_way.mkdir()
    with pytest.raises(CoordinatorBusyError, match=r"507.*nothing was changed"):
        patient.operator().call("POST", "/v1/facilities/south/revoke")
    assert main(["revoke", str(patient.folder), "south"]) != 0
    patient.facility("south").poll()
    in_the_way.rmdir()
    patient.operator().call("POST", "/v1/facilities/south/revoke")
    assert refusal(patient.facility("south").poll).status == 401


def test_a_revocation_that_was_cut_short_is_gone_on_with(patient: Served, tmp_path: Path) -> None:
    """Killed between the file of credentials and the ledger."""
    south = patient.facility("south")
    order = south.running()
    path = south.put(order, update(tmp_path))
    assert south.commit(path, 0)["status"] == "accepted"
    patient.stop(signal.SIGKILL)
    Access(patient.folder).revoke("south", keep=False)
    patient.start()
    anew = patient.client(patient.credentials["south"])
    assert refusal(anew.call, "GET", "/v1/models/0").status == 401
    assert verdict_on(patient, order, path)["status"] == "rejected"
    assert Access(patient.folder).unsettled == []


def test_a_download_under_way_ends_when_its_facility_is_revoked(tmp_path: Path) -> None:
    with serving(tmp_path, facilities=("north",), plain=True, megabytes=64) as served:
        served.facility("north").poll()
        with Raw(served) as raw:
            raw.send(request("GET", "/v1/models/0", credential=served.credentials["north"]))
            raw.socket.recv(1)
            served.operator().call("POST", "/v1/facilities/north/revoke")
            answer = raw.answer()
        assert answer is None or len(answer[2]) < 32 << 20


def kinds(served: Served, job: str) -> list[str]:
    """Of the events about this job."""
    with LedgerReader(served.folder / "ledger.sqlite") as ledger:
        return [row["kind"] for row in ledger.rows("SELECT kind FROM events WHERE job = ? ORDER BY seq", job)]


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "meant"), [(0o022, False), (0o020, False), (0o002, True), (0o020, True)])
@pytest.mark.parametrize("what", ["agent.toml", "home", "run.toml", "run"])
def test_what_others_may_change_is_not_used(
    what: str, bits: int, meant: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything else is looked at, such as whether there is such an address."""
    says = "group_may_write = true\n" if meant else ""
    agent = tmp_path / "agent.toml"
    agent.write_text(f'[agent]\nhome = "home"\ncommand = "true"\n{says}')
    Enrolment(url="https://127.0.0.1:1", facility="north", credential="c" * 43).save(tmp_path / "home")
    config = config_file(tmp_path, server={"group_may_write": meant, "host": "192.0.2.1"})
    (tmp_path / "run").mkdir(mode=0o700)
    store_config(tmp_path / "run", read_tree(config), tmp_path)
    place = tmp_path / what
    place.chmod(place.stat().st_mode | bits)
    words = {
        "agent.toml": ["agent", str(agent), "--once"],
        "home": ["agent", str(agent), "--once"],
        "run.toml": ["serve", str(config), "--out", str(tmp_path / "new")],
        "run": ["serve", str(tmp_path / "run")],
    }[what]
    code, said = main(words), capsys.readouterr().err
    refused = f"{place}: its group may write" in said or f"{place}: everybody may write" in said
    assert refused == (not meant or bits == 0o002), said
    if refused:
        assert code == ConfigError.exit_code


@pytest.mark.parametrize("what", [OPERATOR_FILE, ACCESS])
def test_a_secret_that_others_may_read_is_not_used(what: str, tmp_path: Path) -> None:
    Access(tmp_path)
    address = Address(url="https://a:1", certificate=None, run="r", local="https://a:1", port=1, ca=None)
    (tmp_path / "address.json").write_text(encode(address))
    (tmp_path / what).chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        Access(tmp_path) if what == ACCESS else operate.ask(tmp_path, lambda client: client.status())


def test_a_lock_is_its_owners_alone_whatever_the_umask(patient: Served, tmp_path: Path) -> None:
    """Who can open it could hold it for good."""
    with no_umask():
        lock_file(tmp_path / "lock").close()
    locks = [tmp_path / "lock", patient.folder / ".coordinator.lock"]
    assert [mode(path) for path in locks] == [0o600] * 2


def test_an_upload_that_nobody_can_end_is_deleted(patient: Served, tmp_path: Path) -> None:
    south = patient.facility("south")
    order = south.running()
    content = update(tmp_path)
    south.put(order, content[:500], hashlib.sha256(content).hexdigest())
    assert list(patient.folder.glob("uploads/south@*"))
    south.poll(failed(order.sequence))
    wait_for(lambda: not list(patient.folder.glob("uploads/south@*")), "the end of what was begun")
