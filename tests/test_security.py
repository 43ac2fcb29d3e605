"""What docs/security.md promises, each promise against a real coordinator, real processes and real connections."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import logging
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import uvicorn

import fedqueue
from fedqueue.agent.agent import Agent
from fedqueue.agent.enrolment import Enrolment, enrol, word_of
from fedqueue.agent.http_transport import Client, HttpRefusedError
from fedqueue.agent.settings import AgentConfig, AgentSettings, load_agent
from fedqueue.agent.transport import (
    CoordinatorRefusedError,
    CoordinatorUnreachableError,
    CoordinatorUntrustedError,
)
from fedqueue.cli import live
from fedqueue.config import parse
from fedqueue.coordinator import server
from fedqueue.coordinator.access import FILE as ACCESS
from fedqueue.coordinator.access import OPERATOR_FILE, Access
from fedqueue.coordinator.certificate import make_certificate
from fedqueue.coordinator.connections import Connection, Connections, Server
from fedqueue.coordinator.http_api import ENDPOINTS
from fedqueue.coordinator.rights import RIGHTS
from fedqueue.errors import ConfigError, StorageError
from fedqueue.files import write_secret
from fedqueue.protocol.codec import encode
from fedqueue.protocol.contract import MOST_ORDERS, Invitation, Trained
from fedqueue.protocol.reports import Handin, Poll
from tests.conftest import what_is_logged
from tests.coordinators import VALUES, Raw, Served, config_file, failed, refusal, request, serving, update
from tests.waiting import LONGEST, wait_for


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("security")) as made:
        made.facility("north").poll()
        yield made
        assert made.replays() > 0
        assert "ours:" not in made.said()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Another one, with rounds of a second: what is handed in becomes part of a model."""
    with serving(tmp_path_factory.mktemp("quick"), round_length=1.0) as made:
        made.facility("north").poll()
        made.facility("south").poll()
        yield made
        assert made.status()["state"] == "running"
        assert made.replays() > 0


def cli(*words: str, said: str | None = None, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fedqueue", *words],
        input=said,
        stdin=subprocess.DEVNULL if said is None else None,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        check=False,
    )


# Who may ask ---------------------------------------------------------------------------------------------------------


def test_an_invitation_works_once(served: Served) -> None:
    token = served.invite("south-1")
    first = served.anyone().call("POST", "/v1/enroll", {"token": token})
    assert first["facility"] == "south-1"
    assert refusal(served.anyone().call, "POST", "/v1/enroll", {"token": token}).status == 403


def test_a_newer_invitation_replaces_an_older_one(served: Served) -> None:
    older, newer = served.invite("south-1"), served.invite("south-1")
    assert refusal(served.anyone().call, "POST", "/v1/enroll", {"token": older}).status == 403
    assert served.anyone().call("POST", "/v1/enroll", {"token": newer})["facility"] == "south-1"


def test_an_invitation_ends_after_a_week(tmp_path: Path) -> None:
    token = Access(tmp_path).invite("north")
    known = json.loads((tmp_path / ACCESS).read_text())
    for held in known["tokens"].values():
        assert 6.9 * 86400 < held["until"] - time.time() <= 7 * 86400
        held["until"] = time.time() - 1
    write_secret(tmp_path / ACCESS, json.dumps(known))
    assert Access(tmp_path).enrol(token) is None


def test_to_enrol_again_ends_the_credential_before(served: Served) -> None:
    before = served.client(served.enrol("south-1"))
    served.enrol("south-1")
    assert refusal(before.call, "GET", "/v1/models/0").status == 401


def test_a_revoked_credential_is_refused_at_once_on_an_open_connection(served: Served) -> None:
    credential = served.enrol("south-1")
    with Raw(served) as raw:
        raw.send(request("GET", "/v1/models/0", credential=credential))
        assert raw.status() == 200
        assert served.operator().call("POST", "/v1/facilities/south-1/revoke")["had"]
        raw.send(request("GET", "/v1/models/0", credential=credential))
        assert raw.status() == 401


def test_to_revoke_takes_back_invitations_too(served: Served) -> None:
    token = served.invite("south-1")
    served.operator().call("POST", "/v1/facilities/south-1/revoke")
    assert refusal(served.anyone().call, "POST", "/v1/enroll", {"token": token}).status == 403


def test_an_upload_under_way_ends_when_its_facility_is_revoked(served: Served, tmp_path: Path) -> None:
    served.agents.pop("south-1", None)
    served.enrol("south-1")
    order = served.facility("south-1").running()
    content = update(tmp_path)
    path = f"/v1/updates/{order.sequence}/0/{hashlib.sha256(content).hexdigest()}"
    with Raw(served) as raw:
        length = f"Content-Length: {len(content)}"
        query = f"?offset=0&bytes={len(content)}"
        raw.send(request("PUT", path + query, credential=served.credentials["south-1"], headers=[length]))
        raw.send(content[:100])
        wait_for(lambda: any(served.folder.glob("uploads/south-1*")), "the upload's file", every=0.02)
        served.operator().call("POST", "/v1/facilities/south-1/revoke")
        assert raw.status() == 409
    served.credentials.pop("south-1")
    served.agents.pop("south-1")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
def test_every_endpoint_asks_who_it_is(endpoint: Any, served: Served) -> None:
    numbers = dict.fromkeys(("version", "sequence", "attempt"), "0")
    words = {**numbers, "part": "1", "sha256": "a" * 64, "facility": "nobody", "file": "page.css", "run": "nobody"}
    path = re.sub(r"{(\w+)}", lambda found: words[found[1]], endpoint.path)
    path += "?offset=0&bytes=8" if endpoint.query else ""
    facility = served.credentials.get("north") or served.enrol("north")
    seen = {}
    with Raw(served) as raw:
        for who, credential in (("nobody", None), ("facility", facility), ("operator", served.operator_secret)):
            if who == "operator" and endpoint.path.startswith("/v1/run/"):
                continue  # others need the run; that an operator may is told by tests of these words
            raw.send(request(endpoint.method, path, b"", credential=credential))
            seen[who] = raw.status()
    if endpoint.right is None:
        assert 401 not in seen.values()
        assert 403 not in seen.values()
    else:
        assert seen["nobody"] == 401
        refused = {role for role in ("facility", "operator") if endpoint.right not in RIGHTS[role]}
        assert {who for who, status in seen.items() if status == 403} == refused
        assert [status for who, status in seen.items() if who != "nobody"].count(401) == 0


def test_a_facility_cannot_be_the_operator(tmp_path: Path) -> None:
    """Whatever it is called."""
    access = Access(tmp_path)
    credential = access.give("operator")
    assert access.who(credential) == "operator"
    operator = access.who((tmp_path / OPERATOR_FILE).read_text())
    assert operator != "operator"
    with pytest.raises(ConfigError, match="name"):
        parse({"run": {"rounds": 1}, "facility": [{"name": operator, "steps_per_second": 1.0}]})


# Only its own --------------------------------------------------------------------------------------------------------


def test_a_facility_touches_only_its_own_updates(served: Served, tmp_path: Path) -> None:
    """Its credential names it; a job's number means its own job. It can neither see, add to nor commit another's."""
    north, south = served.facility("north"), served.facility("south")
    order = north.running()
    content = update(tmp_path)
    path = north.put(order, content[:500], hashlib.sha256(content).hexdigest())
    assert north.client.call("GET", path) == {"offset": 500}
    south.poll()
    mine = south.running()
    assert mine.sequence == 0
    theirs = path.replace(f"/updates/{order.sequence}/", "/updates/0/")
    assert south.client.call("GET", theirs) == {"offset": 0}  # of its own job of that number
    assert refusal(south.commit, theirs, 0).status == 409
    other = path.replace(f"/updates/{order.sequence}/", "/updates/7/")
    assert refusal(south.client.call, "GET", other).status == 410
    south.poll(failed(0))
    assert refusal(south.client.call, "GET", theirs).status == 410
    assert refusal(south.put, mine, content).status == 410
    assert refusal(south.commit, theirs, 0).status == 410
    assert north.client.call("GET", path) == {"offset": 500}


def test_a_facility_reports_only_of_its_own_jobs(served: Served) -> None:
    north, south = served.facility("north"), served.facility("south")
    order = north.order()
    ordered = next(f["ordered"] for f in served.status()["facilities"] if f["name"] == "south")
    assert refusal(south.poll, failed(ordered)).status == 422
    jobs = {f["name"]: f["jobs"] for f in served.status()["facilities"]}
    south.poll(failed(max(0, ordered - 1)))
    assert next(f["jobs"] for f in served.status()["facilities"] if f["name"] == "north") == jobs["north"]
    assert order.sequence not in north.poll(open=[order.sequence])["cancel"]


def test_only_the_facility_that_scores_models_may_say_their_score(tmp_path: Path) -> None:
    with serving(tmp_path, scored_by="north", stop_at_score=0.9) as served:
        north, south = served.facility("north"), served.facility("south")
        north.poll()
        south.poll()
        assert refusal(south.poll, {"kind": "scored", "version": 0, "metrics": {"score": 1.0}}).status == 403
        assert refusal(north.poll, {"kind": "scored", "version": 5, "metrics": {"score": 1.0}}).status == 422
        assert served.status()["score"] is None
        north.poll({"kind": "scored", "version": 0, "metrics": {"score": 0.5}})
        assert served.status()["score"] == 0.5


# Secrets -------------------------------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_secrets_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text('[agent]\nhome = "home"\ncommand = "true"\n')
    with no_umask(), serving(tmp_path) as served:
        told = cli("invite", str(served.folder), "north", "--out", str(tmp_path / "invitation"))
        assert told.returncode == 0, told.stderr
        told = cli("enroll", str(config), "--invitation", str(tmp_path / "invitation"))
        assert told.returncode == 0, told.stderr
        served.facility("south").poll()
        order = served.facility("south").running()
        served.facility("south").put(order, update(tmp_path)[:100], "a" * 64)
        secret = [served.folder / name for name in (ACCESS, OPERATOR_FILE, "key.pem", "certificate.pem")]
        secret += [tmp_path / "invitation", tmp_path / "home" / "credential", *served.folder.glob("uploads/*")]
        assert len(secret) == 7
        assert {path.name: oct(mode(path)) for path in secret} == {path.name: "0o600" for path in secret}
        assert mode(tmp_path / "home") == 0o700


def test_a_secret_is_its_owners_alone_from_its_first_byte(tmp_path: Path) -> None:
    """Killed before the file has its name, it leaves nothing that others may read."""
    program = (
        "import os, sys; os.umask(0); from pathlib import Path; from fedqueue.coordinator.access import write_secret; "
        "write_secret(Path(sys.argv[1]), 'secret')"
    )
    environment = {**os.environ, "FEDQUEUE_FAILPOINT": "secret.whole"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "key")], env=environment, check=False)
    assert done.returncode == -9
    assert [(path.name, mode(path)) for path in tmp_path.iterdir()] == [("key.part", 0o600)]


def test_a_link_that_waits_where_a_secret_is_written_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key.part").symlink_to(tmp_path / "elsewhere")
    write_secret(tmp_path / "key", "secret")
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "key").read_text() == "secret"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o644])
def test_a_credential_that_others_may_read_is_not_used(bits: int, tmp_path: Path) -> None:
    Enrolment(url="https://a:1", facility="north", credential="c" * 43).save(tmp_path)
    (tmp_path / "credential").chmod(bits)
    with pytest.raises(ConfigError, match="others may read it"):
        Enrolment.load(tmp_path)


def test_a_home_that_everybody_may_write_to_is_not_used(tmp_path: Path) -> None:
    Enrolment(url="https://a:1", facility="north", credential="c" * 43).save(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write"):
        Enrolment.load(tmp_path)


def test_no_secret_is_in_a_command_line_a_log_the_ledger_or_an_answer(tmp_path: Path) -> None:
    """A coordinator, an operator and an agent at work; then every file and every word of theirs is looked through."""
    config = tmp_path / "agent.toml"
    config.write_text('[agent]\nhome = "home"\ncommand = "true"\n[scheduler]\nkind = "local"\n')
    heard: list[str] = []
    with serving(tmp_path, facilities=("north", "south")) as served:
        invited = cli("invite", str(served.folder), "north", "--out", str(tmp_path / "invitation"))
        text = (tmp_path / "invitation").read_text()
        (tmp_path / "invitation").unlink()
        with watching_command_lines() as lines:
            enrolled = cli("enroll", str(config), said=text)
            ran = cli("agent", str(config), "--once")
            again = cli("enroll", str(config), said=text)  # refused: used
            told = cli("status", str(served.folder), "--json")
        heard += [done.stdout + done.stderr for done in (invited, enrolled, ran, again, told)]
        assert (enrolled.returncode, ran.returncode, again.returncode) == (0, 0, 9), heard
        south = served.facility("south")
        wrong = served.client("w" * 43)
        heard += [str(refusal(wrong.call, "GET", "/v1/status")), str(refusal(south.client.call, "GET", "/v1/status"))]
        heard += [str(served.status()), served.said(), *lines]
        secrets = [text.strip().removeprefix("fedqueue1:"), served.operator_secret, *served.spoken]
        secrets += [Enrolment.load(tmp_path / "home").credential]
    own = {served.folder / OPERATOR_FILE, tmp_path / "home" / "credential"}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path not in own:
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), path
    assert not any(secret in line for secret in secrets for line in heard)
    assert len(secrets) >= 5


@contextmanager
def watching_command_lines() -> Iterator[set[str]]:
    """The command lines of all processes, as anybody on this machine can read them."""
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    seen.add(path.read_text(errors="replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()
    assert any("enroll" in line for line in seen)


# TLS -----------------------------------------------------------------------------------------------------------------


def test_plain_http_is_for_loopback_alone_on_both_sides(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nrounds = 1\n[task]\nname = "timing"\n[server]\nhost = "0.0.0.0"\nport = 0\n'
        '[[facility]]\nname = "north"\n'
    )
    told = cli("serve", str(config), "--plain-http", "--out", str(tmp_path / "run"))
    assert told.returncode == ConfigError.exit_code
    assert "plain HTTP on 0.0.0.0 is refused" in told.stderr
    for host in ("example.org", "192.0.2.1", "[2001:db8::1]", "127.0.0.1.example.org", "localhost.example.org"):
        with pytest.raises(ConfigError, match="plain http is for loopback only"):
            Client(f"http://{host}:8440")
    with pytest.raises(ConfigError, match="plain http is for loopback only"):
        enrol(invited("http://example.org:8440"), tmp_path / "home", None)


def test_plain_http_to_a_coordinator_with_tls_gets_nothing(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=LONGEST) as plain:
        plain.sendall(request("GET", "/v1/health"))
        with suppress(ConnectionError):
            assert b"HTTP/1.1 200" not in plain.recv(1000)


def test_another_certificate_is_not_trusted(served: Served, tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path, ["127.0.0.1"])
    with pytest.raises(CoordinatorUntrustedError):
        Client(served.url, ca=other).call("GET", "/v1/health")
    with pytest.raises(CoordinatorUntrustedError):
        Client(served.url).call("GET", "/v1/health")  # nor does any authority vouch for ours


def test_the_right_certificate_is_not_trusted_under_another_name(served: Served) -> None:
    context = ssl.create_default_context(cafile=served.certificate)
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=LONGEST) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(plain, server_hostname="coordinator.example.org")


def test_old_versions_of_tls_are_refused(served: Served) -> None:
    with Raw(served) as raw:
        assert isinstance(raw.socket, ssl.SSLSocket)
        assert raw.socket.version() in ("TLSv1.2", "TLSv1.3")
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to ask with")
    for version in ("-tls1", "-tls1_1"):
        words = ["openssl", "s_client", "-connect", f"127.0.0.1:{served.port}", version, "-cipher", "ALL:@SECLEVEL=0"]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        assert "Cipher is (NONE)" in done.stdout or done.returncode != 0


def test_the_servers_own_tls_settings_name_the_oldest_version(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, [])
    settings = uvicorn.Config(lambda: None, ssl_certfile=certificate, ssl_keyfile=key, log_level="critical")
    server._load(settings)
    assert settings.ssl is not None
    assert settings.ssl.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_key_that_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    make_certificate(tmp_path, [])
    (tmp_path / "key.pem").write_text("no key")
    names = '[server]\nport = 0\ncertificate = "certificate.pem"\nkey = "key.pem"\n'
    (tmp_path / "run.toml").write_text(
        f'[run]\nrounds = 1\n[task]\nname = "timing"\n{names}[[facility]]\nname = "north"\n'
    )
    told = cli("serve", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"))
    assert told.returncode == ConfigError.exit_code
    assert "server.certificate" in told.stderr
    assert len(told.stderr.strip().splitlines()[-1:]) == 1


@pytest.mark.parametrize("way", ["standard input", "a file"])
def test_a_facility_enrols_with_the_coordinators_own_certificate(way: str, served: Served, tmp_path: Path) -> None:
    """By the command line alone: what `fedqueue invite` prints is all that it needs."""
    config = tmp_path / "agent.toml"
    config.write_text('[agent]\nhome = "home"\ncommand = "true"\n')
    invited = cli("invite", str(served.folder), "south-1")
    assert invited.returncode == 0, invited.stderr
    if way == "a file":
        write_secret(tmp_path / "invitation", invited.stdout)
        told = cli("enroll", str(config), "--invitation", str(tmp_path / "invitation"))
    else:
        told = cli("enroll", str(config), said=invited.stdout)
    assert told.returncode == 0, told.stderr
    home = tmp_path / "home"
    held = Enrolment.load(home)
    assert (held.facility, held.certificate) == ("south-1", served.certificate.read_text())
    assert held.client(home, None).call("GET", "/v1/health")["protocol"] == fedqueue.PROTOCOL
    used = cli("enroll", str(config), said=invited.stdout)
    assert used.returncode == CoordinatorRefusedError.exit_code
    assert "used already" in used.stderr


def test_an_operator_reaches_a_coordinator_that_has_a_certificate_of_its_sites(tmp_path: Path) -> None:
    """It is good for its name alone, not for the loopback address."""
    site = tmp_path / "site"
    site.mkdir()
    make_certificate(site, [])
    given = {"certificate": str(site / "certificate.pem"), "key": str(site / "key.pem"), "names": ["localhost"]}
    config = config_file(tmp_path, server=given)
    process = subprocess.Popen(
        [sys.executable, "-m", "fedqueue", "serve", str(config), "--out", str(tmp_path / "run")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((tmp_path / "run" / "address.json").exists, "a coordinator")
        wait_for(lambda: cli("status", str(tmp_path / "run")).returncode == 0, "its status")
        address = json.loads((tmp_path / "run" / "address.json").read_text())
        assert address["local"].startswith("https://localhost:")
        assert address["certificate"] is None  # facilities trust it, or not, by themselves
        assert not (tmp_path / "run" / "key.pem").exists()
    finally:
        process.terminate()
        process.wait(LONGEST)


# Updates -------------------------------------------------------------------------------------------------------------


def header(text: dict[str, Any], data: bytes = b"") -> bytes:
    made = json.dumps(text).encode()
    return len(made).to_bytes(8, "little") + made + data


def float32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


_FORGED: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "other names": (lambda p: update(p, weights=np.zeros(VALUES, np.float32)), "missing"),
    "one name more": (
        lambda p: update(p, weight=np.zeros(VALUES, np.float32), more=np.zeros(1, np.float32)),
        "unexpected",
    ),
    "another shape": (lambda p: update(p, weight=np.zeros(VALUES + 1, np.float32)), "shape"),
    "another type": (lambda p: update(p, weight=np.zeros(VALUES, np.int32)), "type"),
    "NaN": (lambda p: update(p, float("nan")), "not finite"),
    "infinity": (lambda p: update(p, float("-inf")), "not finite"),
    "no file of tensors": (lambda p: b"\x80\x04" * 100, "no safetensors file"),
    "a pickle": (lambda p: b"\x80\x05\x95" + b"cos\nsystem\n" * 20, "no safetensors file"),
    "a header of 2**60 bytes": (lambda p: (2**60).to_bytes(8, "little") + b"{}" * 50, "no safetensors file"),
    "2**60 values": (lambda p: header({"weight": float32([2**60], 0, 2**62)}), "bytes"),
    "2**120 values": (lambda p: header({"weight": float32([2**60, 2**60], 0, 0)}), "too large"),
    "values that overlap": (
        lambda p: header({"weight": float32([10], 0, 40), "more": float32([10], 20, 60)}, bytes(60)),
        "does not begin",
    ),
    "a negative shape": (lambda p: header({"weight": float32([-1], 0, 4)}, bytes(4)), "shape"),
    "a shape of truths": (lambda p: header({"weight": {**float32([1], 0, 4), "shape": [True]}}, bytes(4)), "shape"),
    "a hundred thousand names": (
        lambda p: header({f"t{i}": float32([0], 0, 0) for i in range(10_000)}),
        "header of",
    ),
    "nested deep": (lambda p: (10_000).to_bytes(8, "little") + b"[" * 10_000, "header"),
}


@pytest.mark.parametrize("name", _FORGED)
def test_a_forged_update_is_refused_with_its_reason(name: str, served: Served, tmp_path: Path) -> None:
    make, reason = _FORGED[name]
    north = served.facility("north")
    order = north.running()
    verdict = north.hand_in(order, make(tmp_path))
    north.taken = None
    assert verdict["status"] == "rejected"
    assert reason in verdict["reason"]
    assert str(served.folder) not in verdict["reason"]


def test_bytes_that_are_not_those_of_the_digest_are_refused(served: Served, tmp_path: Path) -> None:
    north = served.facility("north")
    order = north.running()
    with pytest.raises(HttpRefusedError, match="its sha256 is") as refused:
        north.hand_in(order, update(tmp_path), "a" * 64)
    assert refused.value.status == 409
    assert refused.value.answer.offset == 0, "nothing of it is kept: the right bytes may come"


def test_an_upload_of_ten_gigabytes_is_refused_before_it_is_read(served: Served) -> None:
    """Announced in the query, in the length alone, or for a body of JSON; sent in part all the same."""
    north = served.facility("north")
    order = north.running()
    huge = 10 << 30
    path = f"/v1/updates/{order.sequence}/0/{'b' * 64}"
    targets = [("PUT", f"{path}?offset=0&bytes={huge}"), ("PUT", f"{path}?offset=0&bytes=4000"), ("POST", path)]
    before = served.memory()
    for method, target in [*targets, ("POST", "/v1/poll"), ("POST", "/v1/enroll")]:
        with Raw(served) as raw:
            credential = served.credentials["north"]
            raw.send(request(method, target, credential=credential, headers=[f"Content-Length: {huge}"]))
            with suppress(OSError):
                for _ in range(40):
                    raw.send(bytes(1 << 20))
            assert raw.status() == 413
        assert served.memory() - before < 50 << 20
    assert not list(served.folder.glob(f"uploads/*{'b' * 64}*"))


def test_a_head_that_never_ends_costs_no_memory(served: Served) -> None:
    before = served.memory()
    with Raw(served) as raw:
        raw.send(b"GET /v1/health HTTP/1.1\r\nHost: a\r\nA: ")
        with suppress(OSError):
            for _ in range(100):
                raw.send(b"a" * (1 << 20))
        assert raw.status() in (400, None)
    assert served.memory() - before < 50 << 20


def test_bytes_that_come_after_the_check_do_not_count(quick: Served, tmp_path: Path) -> None:
    """A connection opened early must not change an update that was found good: a sum that is not finite ends a run."""
    north = quick.facility("north")
    order = north.running()
    base = order.assignment.base_version if order.assignment else quick.status()["model"]
    content = update(tmp_path)
    path = f"/v1/updates/{order.sequence}/0/{hashlib.sha256(content).hexdigest()}"
    credential = quick.credentials["north"]
    with Raw(quick) as early:
        length = f"Content-Length: {len(content)}"
        early.send(request("PUT", f"{path}?offset=0&bytes={len(content)}", credential=credential, headers=[length]))
        wait_for(lambda: any(quick.folder.glob("uploads/north*")), "the upload's file", every=0.02)
        north.put(order, content)
        assert north.commit(path, base)["status"] == "accepted"
        made = quick.status()["model"]
        early.send(content[:-400] + np.full(100, np.nan, np.float32).tobytes())
        assert early.status() == 409
    north.taken = None
    wait_for(lambda: quick.status()["model"] > made + 1, "two more models", quick.said)
    assert refusal(north.put, order, content).status == 410


# One facility and the others -----------------------------------------------------------------------------------------


@contextmanager
def impatient(*, most: float = 1000, **seconds: float) -> Iterator[int]:
    """A server of the coordinator's connections that gives up soon; its port."""

    class Impatient(Connection):
        seconds: ClassVar[Any] = {"head": 60.0, "body": 60.0, "rest": 60.0, "answer": 60.0}

    Impatient.seconds.update(seconds)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/read":
            while (await receive()).get("more_body"):
                pass
        length = 1 << 26 if scope["path"] == "/long" else 0
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(length >> 20):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(app, http=Impatient, ws="none", lifespan="off", log_level="critical", loop="asyncio")
    found = Server(settings, Connections(int(most), int(most)))
    thread = threading.Thread(target=found.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        found.should_exit = True
        thread.join(LONGEST)


@pytest.mark.parametrize(
    ("phase", "sent", "answered"),
    [
        ("head", b"", False),
        ("head", b"GET / HTTP/1.1\r\nHost: a\r\n", False),
        ("body", b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n12345", False),
        ("rest", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n12345", True),
        ("rest", b"no HTTP\r\n\r\n", None),
    ],
)
def test_a_request_that_does_not_go_on_is_cut_off(phase: str, sent: bytes, answered: bool | None) -> None:
    with impatient(**{phase: 0.3}) as port, socket.create_connection(("127.0.0.1", port), timeout=LONGEST) as stuck:
        stuck.sendall(sent)
        seen = b""
        with suppress(ConnectionError):
            while piece := stuck.recv(1000):
                seen += piece
        assert seen.startswith({True: b"HTTP/1.1 200", False: b"", None: b"HTTP/1.1 400"}[answered])
        assert bool(seen) == (answered is not False)


def test_who_does_not_read_its_answer_is_cut_off() -> None:
    with impatient(answer=0.3) as port, socket.create_connection(("127.0.0.1", port), timeout=LONGEST) as stuck:
        stuck.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_for(lambda: not is_up(stuck), "the end of the connection", every=0.05)


def is_up(connection: socket.socket) -> bool:
    """Whether the other side still holds it, without reading anything."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 1  # TCP_ESTABLISHED


def test_a_body_that_comes_slowly_is_waited_for() -> None:
    with impatient(head=0.5, body=5.0) as port, socket.create_connection(("127.0.0.1", port), timeout=LONGEST) as slow:
        slow.sendall(b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            time.sleep(0.1)
            slow.sendall(b"x")
        assert slow.recv(1000).startswith(b"HTTP/1.1 200")


def test_one_connection_too_many_ends_the_oldest_that_has_shown_no_credential() -> None:
    with impatient(most=3) as port:
        held = [socket.create_connection(("127.0.0.1", port), timeout=LONGEST) for _ in range(6)]
        try:
            wait_for(lambda: not any(map(is_up, held[:3])), "the end of the oldest three", every=0.02)
            held[5].sendall(request("GET", "/"))
            assert held[5].recv(1000).startswith(b"HTTP/1.1 200")
            assert all(map(is_up, held[3:]))
        finally:
            for one in held:
                one.close()


# No code on the wire or on disk --------------------------------------------------------------------------------------

_CODE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle", "yaml"}
_RUNS = {"eval", "exec", "compile", "__import__", "execfile"}
_LOADS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("os", "system"), ("os", "popen")}
_PICKLES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
_ALLOWED = {
    # The names are the user's own: run.modules of the config on the coordinator, never of a message.
    ("config.py", "importlib.import_module"),
    # The same for a task of the user's own, named in the config.
    ("training/workload.py", "importlib.import_module"),
}


def test_nothing_unpickles_or_evaluates() -> None:
    """Every module of the package, by its syntax: imports, calls, and shells."""
    package = Path(fedqueue.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for what in _suspects(node):
                found.add((str(path.relative_to(package)), what))
    assert found == _ALLOWED


def _suspects(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in _CODE)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _CODE:
        yield str(node.module)
    elif isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name) and called.id in _RUNS:
            yield called.id
        if isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            safe = any(keyword.arg == "allow_pickle" for keyword in node.keywords)  # its value is looked at below
            if ((owner, called.attr) in _LOADS and not safe) or called.attr in _PICKLES:
                yield f"{owner}.{called.attr}"
            if (owner, called.attr) == ("importlib", "import_module"):
                yield "importlib.import_module"
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle") and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                yield str(keyword.arg)


# A coordinator that means harm ---------------------------------------------------------------------------------------

_SHA = hashlib.sha256(b"model").hexdigest()
_MODEL = {"version": 0, "sha256": _SHA}
_WORK = {"base_version": 0, "steps": 10, "learning_rate": 0.1, "train_budget": None, "cutoff": None}
_ORDER = {
    "job_id": "north/0", "facility": "north", "round": 0, "wall_seconds": 5.0, "expected_delay": None,
    "purpose": "train", "after": None, "replaces": None, "assignment": _WORK, "model": _MODEL,
}  # fmt: skip
_STANDING = {
    "number": 1, "next_cutoff": 5.0, "version": 0, "round_length": 10.0, "steps_per_second": 1.0, "overhead": 0.0,
    "min_steps": 1, "learning_rate": 0.1, "lr_scaling": "none", "least_steps": None, "patience": 0.0, "model": _MODEL,
}  # fmt: skip
_ANSWER = {"received": 0, "orders": [_ORDER], "cancel": [], "standing": _STANDING, "evaluate": None, "over": None}

_POLL = Poll(journal="a" * 16, session="b" * 16, generation=1, poll_seconds=5.0)

_OUT = "/../../../../outside"

_HOSTILE: dict[str, dict[str, Any]] = {
    "a digest that is a path": {"orders": [{**_ORDER, "model": {"version": 0, "sha256": _OUT}}]},
    "a digest that is none": {"orders": [{**_ORDER, "model": {"version": 0, "sha256": "A" * 64}}]},
    "a version that is a path": {"orders": [{**_ORDER, "model": {"version": _OUT, "sha256": _SHA}}]},
    "a number that is a path": {"orders": [{**_ORDER, "job_id": f"north/{_OUT}"}]},
    "a facility that is a path": {"orders": [{**_ORDER, "job_id": f"{_OUT}/0", "facility": _OUT}]},
    "an order of another facility": {"orders": [{**_ORDER, "job_id": "south/0", "facility": "south"}]},
    "an order whose job is another facility's": {"orders": [{**_ORDER, "job_id": "south/0"}]},
    "a job that is a number": {"orders": [{**_ORDER, "job_id": 0}]},
    "a number that is a command": {"orders": [{**_ORDER, "job_id": "north/0; touch outside"}]},
    "a negative number": {"orders": [{**_ORDER, "job_id": "north/-1"}]},
    "a number of 4000 digits": {"orders": [{**_ORDER, "job_id": "north/1" + "0" * 4000}]},
    "a purpose that is a command": {"orders": [{**_ORDER, "purpose": "$(touch outside)"}]},
    "a wall time that is none": {"orders": [{**_ORDER, "wall_seconds": float("nan")}]},
    "a wall time that is text": {"orders": [{**_ORDER, "wall_seconds": "5 --wrap=id"}]},
    "a wall time of 4000 digits": {"orders": [{**_ORDER, "wall_seconds": 10**4000}]},
    "an order after a list": {"orders": [{**_ORDER, "after": [1]}]},
    "an order after a path": {"orders": [{**_ORDER, "after": f"north/{_OUT}"}]},
    "an order to score": {"orders": [{**_ORDER, "purpose": "evaluate"}]},
    "an order by the run clock": {"orders": [{**_ORDER, "assignment": {**_WORK, "cutoff": 5.0}}]},
    "steps beyond counting": {"orders": [{**_ORDER, "assignment": {**_WORK, "steps": 2**53 + 1}}]},
    "another run": {"run": "another"},
    "steps that are text": {"orders": [{**_ORDER, "assignment": {**_WORK, "steps": "__import__('os')"}}]},
    "more keys in an order": {"orders": [{**_ORDER, "command": "touch outside", "environment": {"PATH": "."}}]},
    "a script": {"script": "touch outside"},
    "too many orders": {"orders": [{**_ORDER, "job_id": f"north/{n}"} for n in range(MOST_ORDERS + 1)]},
    "orders that are text": {"orders": "touch outside"},
    "an order that is none": {"orders": [None]},
    "a cancel that is a list": {"cancel": [[0]]},
    "standing work with a path": {"standing": {**_STANDING, "model": {"version": 0, "sha256": _OUT}}},
    "standing work with more keys": {"standing": {**_STANDING, "state_dir": _OUT}},
    "standing work without end": {"standing": {**_STANDING, "next_cutoff": float("inf")}},
    "standing work that is text": {"standing": "touch outside"},
    "an evaluation of a path": {"evaluate": {"version": _OUT, "model": _MODEL}},
    "an end that is a list": {"over": ["touch outside"]},
    "received text": {"received": "1"},
}


_OF_OTHERS = ("a facility that is a path", "an order of another facility", "another run")
"""What only an agent can tell, who knows its own name."""


@pytest.mark.parametrize("name", [name for name in _HOSTILE if name not in _OF_OTHERS])
def test_an_answer_that_is_none_is_not_taken(name: str, fake: type[FakeCoordinator]) -> None:
    fake.answer = {**_ANSWER, **_HOSTILE[name]}
    with pytest.raises(CoordinatorUnreachableError, match="none that this agent knows"):
        Client(fake.url).poll(_POLL)  # type: ignore[attr-defined]


def test_a_right_answer_is_taken_as_it_is(fake: type[FakeCoordinator]) -> None:
    client = Client(fake.url)  # type: ignore[attr-defined]
    fake.answer = _ANSWER
    assert json.loads(encode(client.poll(_POLL))) == _ANSWER
    fake.answer = {**_ANSWER, "over": "a\x1b[2J\nb"}
    assert client.poll(_POLL).over == "a?[2J b"
    handin = Handin(trained=Trained(base_version=0, steps_done=1, train_seconds=1.0), admission_delay=0.0)
    fake.answer = {"status": "rejected", "reason": "a\x1b[2J\nb"}
    assert client.commit(0, 0, _SHA, handin).reason == "a?[2J b"
    fake.answer = {"status": "run this"}
    with pytest.raises(CoordinatorUnreachableError):
        client.commit(0, 0, _SHA, handin)


def invited(url: str) -> str:
    return word_of(Invitation(url=url, token="t" * 43, certificate=None, run="r" * 16))


class FakeCoordinator(BaseHTTPRequestHandler):
    """Answers every poll with the same thing, whatever it is."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[Any] = {}
    polls: ClassVar[int] = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).polls += 1
        self._send(json.dumps(self.answer).encode())

    def do_GET(self) -> None:
        self._send(b"model", ETag=f'"{_SHA}"')

    def _send(self, content: bytes, **headers: str) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[type[FakeCoordinator]]:
    class Fake(FakeCoordinator):
        pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    Fake.url = f"http://127.0.0.1:{made.server_port}"  # type: ignore[attr-defined]
    yield Fake
    made.shutdown()
    made.server_close()
    thread.join()


@contextmanager
def agent_of(fake: type[FakeCoordinator], home: Path) -> Iterator[tuple[Agent, list[str]]]:
    settings = AgentSettings(home=str(home), command="true", poll_seconds=0.1, stage_worker=False)
    client = Client(fake.url, credential="c" * 43)  # type: ignore[attr-defined]
    agent = Agent(AgentConfig(agent=settings), home, "north", client)
    with what_is_logged() as said:
        try:
            yield agent, said
        finally:
            agent.close()


@pytest.mark.parametrize("name", _HOSTILE)
def test_an_agent_does_nothing_for_a_coordinator_that_means_harm(
    name: str, fake: type[FakeCoordinator], tmp_path: Path
) -> None:
    fake.answer = {**_ANSWER, **_HOSTILE[name]}
    home = tmp_path / "a" / "b" / "c" / "home"
    with agent_of(fake, home) as (agent, said):
        agent.turn()
        agent.turn()
        assert fake.polls == 2  # it did not die of it
        assert not (home / "jobs").exists()
        assert not (home / "standing.json").exists()
        assert any("the coordinator" in line for line in said)
        assert all(line.isprintable() for line in said)
        assert '"kind":"job"' not in (home / "journal.jsonl").read_text()
    assert {path.name for path in tmp_path.rglob("*") if not path.is_relative_to(home)} == {"a", "b", "c"}


def test_a_job_runs_the_agents_own_command_whatever_is_ordered(fake: type[FakeCoordinator], tmp_path: Path) -> None:
    """The script of a job differs from one order to another by its number alone."""
    home = tmp_path / "home"
    first = {**_ORDER, "purpose": "warm_up"}
    second = {
        **_ORDER,
        "job_id": "north/1",
        "round": 2**53,
        "wall_seconds": 1e300,
        "assignment": {**_WORK, "steps": 2**53, "learning_rate": 1e300, "train_budget": 1e300},
    }
    fake.answer = {**_ANSWER, "orders": [first, second]}
    with agent_of(fake, home) as (agent, _):
        agent.turn()
        agent.turn()
    scripts = [(home / "jobs" / str(number) / "job.sh").read_text() for number in (0, 1)]
    assert scripts[1] == scripts[0].replace("north/0", "north/1").replace("/jobs/0", "/jobs/1")
    assert scripts[0].splitlines()[-1] == "exec /bin/bash -c true"


@pytest.mark.parametrize(
    "facility",
    ["a\ntouch outside", "../north", "", "a b", "$(id)", "-rf", "a" * 65, 7, None, ["north"], "nörth", "a;b", "."],
    ids=str,
)
def test_a_name_that_is_none_is_not_enrolled_under(facility: Any, fake: type[FakeCoordinator], tmp_path: Path) -> None:
    """It would be in the script of every job."""
    fake.answer = {"facility": facility, "credential": "c" * 43, "run": "run"}
    text = invited(fake.url)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no enrolment"):
        enrol(text, tmp_path / "home", None)
    assert not (tmp_path / "home" / "credential").exists()


@pytest.mark.parametrize("text", ["", "fedqueue1:", "fedqueue1:!!!", "fedqueue1:W10=", "fedqueue1:eyJ1cmwiOjF9", "x"])
def test_a_text_that_is_no_invitation_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an invitation"):
        enrol(text, tmp_path / "home", None)


def test_what_others_say_is_one_line_of_a_log_without_control_characters() -> None:
    out, log = io.StringIO(), logging.getLogger("fedqueue.agent.north")
    with live.logged(out, stamped=False):
        log.warning("job 3 failed: it fell\n\x1b[2Jdown")
    with live.logged(out, stamped=True, debugged=True):
        log.info("job 4   started")
    log.warning("nobody listens")
    first, second = out.getvalue().splitlines()
    assert first == "job 3 failed: it fell ?[2Jdown"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  north: job 4   started", second)


# An agent and what it is answered ------------------------------------------------------------------------------------


@contextmanager
def answering(*pieces: bytes, every: float | None = None) -> Iterator[str]:
    """Whatever is asked, the answer is this; with `every`, its last piece comes again and again. The address."""
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while not done.is_set():
            with suppress(OSError):
                asked, _ = listener.accept()
                with asked:
                    asked.recv(1 << 16)
                    for piece in pieces:
                        asked.sendall(piece)
                    while every is not None and not done.wait(every):
                        asked.sendall(pieces[-1])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        done.set()
        with suppress(OSError):
            socket.create_connection(listener.getsockname()).close()
        thread.join(LONGEST)
        listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "begins",
    [(OK, b"A: b\r\n"), (OK + b"Content-Length: 1000000\r\n\r\n", b" "), (OK + b"Connection: close\r\n\r\n", b" ")],
    ids=["head", "body", "body without length"],
)
def test_a_coordinator_that_answers_byte_by_byte_is_left(begins: tuple[bytes, ...]) -> None:
    """Each byte is in time."""
    with answering(*begins, every=0.05) as url:
        client = Client(url, exchange_seconds=0.5)
        with pytest.raises(CoordinatorUnreachableError):
            client.poll(_POLL)


def test_a_model_without_end_or_without_room_is_not_taken(tmp_path: Path) -> None:
    model = OK + f'ETag: "{_SHA}"\r\n'.encode()
    endless = model + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        answering(endless, b"5\r\nmodel\r\n", every=0.0) as url,
        pytest.raises(HttpRefusedError, match="Content-Length"),
    ):
        Client(url, retries=0).download(0, tmp_path / "model", _SHA)
    with (
        answering(model + b"Content-Length: 999999999999999999\r\n\r\n", b"a", every=0.01) as url,
        pytest.raises(StorageError, match="make room"),
    ):
        Client(url, retries=0).download(0, tmp_path / "model", _SHA)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_what_a_coordinator_says_is_printable_in_a_terminal(tmp_path: Path) -> None:
    said = b"no \x1b]0;owned\x07\x1b[2J\xc2\x9b31m"
    for status in (b"403 Forbidden", b"500 Ours", b"\x1b[2J"):
        head = b"HTTP/1.1 " + status + b"\r\nContent-Length: " + str(len(said)).encode() + b"\r\n\r\n"
        with answering(head, said) as url:
            (tmp_path / "agent.toml").write_text('[agent]\nhome = "home"\ncommand = "true"\n')
            told = cli("enroll", str(tmp_path / "agent.toml"), said=invited(url))
        assert told.returncode != 0
        assert all(line.isprintable() for line in (told.stdout + told.stderr).splitlines())


def test_a_cap_on_node_hours_is_asked_for_at_the_enrolment(served: Served, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text('# ours\n[agent]  # the login node\nhome = "home"\ncommand = "true"\n')
    invitation = tmp_path / "invitation"
    assert cli("invite", str(served.folder), "south-1", "--out", str(invitation)).returncode == 0
    asked, answers = os.openpty()
    os.write(asked, b"many\n12.5\n")
    command = [sys.executable, "-m", "fedqueue", "enroll", str(config), "--invitation", str(invitation)]
    told = subprocess.run(command, stdin=answers, capture_output=True, text=True, timeout=LONGEST, check=False)
    os.close(asked)
    os.close(answers)
    assert told.returncode == 0, told.stderr
    assert "'many' is no number of hours" in told.stderr
    assert load_agent(config).agent.node_hours == 12.5
    assert config.read_text().startswith("# ours\n[agent]  # the login node\n")
