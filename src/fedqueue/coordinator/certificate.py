"""A certificate of our own, for a coordinator that nobody gave one: facilities pin it when they enrol."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from fedqueue.files import write_secret

YEARS = 3


def make_certificate(folder: Path, names: Sequence[str], *, prefix: str = "") -> tuple[Path, Path]:
    """certificate.pem and key.pem in this folder, for these host names and addresses; kept if they are there. `prefix`:
    of the files' names."""
    certificate, key = folder / f"{prefix}certificate.pem", folder / f"{prefix}key.pem"
    if certificate.exists() and key.exists():
        return certificate, key
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    secret = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedQueue coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    everyone = dict.fromkeys([*names, socket.gethostname(), "localhost", "127.0.0.1"])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of facilities may be behind
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in everyone]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    pem = secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(key, pem.decode())
    write_secret(certificate, made.public_bytes(serialization.Encoding.PEM).decode())
    return certificate, key


def _name(name: str):  # type: ignore[no-untyped-def]  # of an optional library
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
