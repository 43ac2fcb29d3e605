"""A server that asks for certificates: who has none of its authority is not listened to."""

from __future__ import annotations

import datetime
import json
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedqueue.agent.enrolment import Enrolment
from fedqueue.agent.http_transport import Client
from fedqueue.agent.settings import load_agent, own_of
from fedqueue.agent.transport import CoordinatorUnreachableError
from fedqueue.cli import main
from fedqueue.coordinator.certificate import make_certificate
from fedqueue.files import write_secret
from tests.coordinators import Raw, Served, request

pytestmark = pytest.mark.waits(3)


def authority(folder: Path, name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """NAME.pem is its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = signed(name, key, name, key, x509.BasicConstraints(ca=True, path_length=0))
    write_secret(folder / f"{name}.pem", made.public_bytes(serialization.Encoding.PEM).decode())
    return made, key


def client_of(folder: Path, name: str, issuer: str, issuer_key: ec.EllipticCurvePrivateKey) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    made = signed(name, key, issuer, issuer_key, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))
    write_secret(folder / f"{name}.pem", made.public_bytes(serialization.Encoding.PEM).decode())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_secret(folder / f"{name}-key.pem", key.private_bytes(*form).decode())


def signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    use: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, issuer)]
    return (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(use, critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for of, client in (("ours", "north"), ("another", "stranger")):
        _, key = authority(folder, of)
        client_of(folder, client, of, key)
    return folder


class Asking(Served):
    """Its tests are on its machine: they show its own certificate."""

    def client(self, credential: str | None) -> Client:
        own = (self.folder / "local-certificate.pem", self.folder / "local-key.pem")
        return Client(self.url, credential=credential, ca=self.certificate, certificate=own[0], key=own[1])


@pytest.fixture(scope="module")
def served(base: Path) -> Iterator[Served]:
    made = Asking(base / "federation", base / "serve.log")
    made.folder.mkdir(mode=0o700)
    (made.folder / "federation.toml").write_text('[server]\nport = 0\nclient_authority = "../ours.pem"\n')
    (made.folder / "federation.toml").chmod(0o600)
    made.start()
    try:
        yield made
        assert "ours:" not in made.said()
    finally:
        made.stop()


def test_who_shows_no_certificate_of_the_authority_is_not_listened_to(served: Served, base: Path) -> None:
    """Also with a credential of the operator: nothing of the request is answered."""
    forged = make_certificate(base, ["127.0.0.1"], prefix="forged-")
    for shown in (None, (base / "stranger.pem", base / "stranger-key.pem"), forged):
        context = ssl.create_default_context(cafile=served.certificate)
        if shown is not None:
            context.load_cert_chain(*shown)
        for method, path in (("GET", "/v1/health"), ("GET", "/v1/federation"), ("POST", "/v1/enroll")):
            try:
                with Raw(served, context=context) as raw:
                    raw.send(request(method, path, b"{}", credential=served.operator_secret))
                    assert raw.answer() is None
            except (ssl.SSLError, ConnectionError):
                continue
    bare = Client(served.url, credential=served.operator_secret, ca=served.certificate)
    with pytest.raises(CoordinatorUnreachableError):
        bare.call("GET", "/v1/health")


def test_facilities_users_and_commands_on_the_machine_show_theirs(
    served: Served, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = base / "agent.toml"
    named = 'certificate = "north.pem"\nkey = "north-key.pem"\n'
    toml.write_text(f'[agent]\nhome = "home"\ncommand = "true"\nnode_hours = 1.0\n{named}')
    toml.chmod(0o600)
    assert main(["invite", str(served.folder), "north", "--out", str(base / "invitation")]) == 0
    assert main(["enroll", str(toml), "--invitation", str(base / "invitation")]) == 0
    home, own = base / "home", own_of(load_agent(toml), toml)
    assert Enrolment.load(home).client(home, None, own).call("GET", "/v1/health")
    with pytest.raises(CoordinatorUnreachableError):
        Enrolment.load(home).client(home, None).call("GET", "/v1/health")
    access = base / "ann.access"
    assert main(["user", str(served.folder), "add", "ann", "--role", "viewer", "--out", str(access)]) == 0
    assert main(["list", str(access)]) == 8
    assert capsys.readouterr().err.count("\n") == 1
    held = json.loads(access.read_text())
    write_secret(access, json.dumps({**held, "client_certificate": "north.pem", "client_key": "north-key.pem"}))
    assert main(["list", str(access)]) == 0
    (base / "north-key.pem").chmod(0o644)
    try:
        assert main(["list", str(access)]) == 2
        assert "others may read it" in capsys.readouterr().err
    finally:
        (base / "north-key.pem").chmod(0o600)


def test_an_authority_that_is_none_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "federation"
    folder.mkdir(mode=0o700)
    (folder / "ca.pem").write_text("nothing")
    others = logging.FileHandler(tmp_path / "others")
    others.emit(logging.makeLogRecord({"msg": "it is open"}))
    stream = others.stream
    assert stream is not None
    for named, expected in (("missing.pem", "is not a file"), ("ca.pem", "cannot be used")):
        (folder / "federation.toml").write_text(f'[server]\nport = 0\nclient_authority = "{named}"\n')
        assert main(["serve", str(folder)]) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert len(said) == 1
        assert f"server.client_authority: {folder / named} {expected}" in said[0]
    assert not stream.closed, "a server leaves alone what others in its process log with"
    others.close()
