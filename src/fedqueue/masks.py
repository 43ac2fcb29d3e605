"""Secure aggregation: updates that nobody can read one by one, and whose sum is exact.

Each facility of a group writes what it adds to the model as whole numbers (fixed-point, modulo 2^64) and adds a mask
for each other member: of two members one adds the stream that both can make, the other takes it away, so all masks
cancel in the sum of the group and in nothing less. Streams are ChaCha20's, keyed by HKDF from the X25519 secret of the
two and from all that makes the group what it is: who is in it, with which update and which weight. Agents mask,
coordinators sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from fedqueue.errors import FedQueueError
from fedqueue.protocol.aggregation import COUNTER, MOVING
from fedqueue.protocol.codec import encode
from fedqueue.protocol.contract import MaskGroup, MaskShare
from fedqueue.tensorbytes import (
    Buffer,
    Content,
    Entry,
    Header,
    Source,
    Target,
    encode_header,
    fill,
    opened,
    parts,
    pieces,
    roles,
)

SCALE: Final = 2.0**32
"""Of the fixed-point numbers: steps of 2.3e-10."""
MOST: Final = 2.0**20
"""As far as a number may be changed; so sums of a thousand members are within 2^63."""
NUMBER_BYTES: Final = 8


class MaskError(FedQueueError):
    """Why an update cannot be masked, or a sum not be made."""

    exit_code = 11


def new_secret() -> str:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw().hex()


def public_key(secret: str) -> str:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(bytes.fromhex(secret)).public_key().public_bytes_raw().hex()


def name_of(group: MaskGroup) -> str:
    """What tells it from every other: the sha256 of all that is in it."""
    return hashlib.sha256(encode(group).encode()).hexdigest()


class _Streams:
    """The masks of one member: what it adds to its numbers, piece after piece."""

    def __init__(self, group: MaskGroup, own: str, secret: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        private, salt = X25519PrivateKey.from_private_bytes(bytes.fromhex(secret)), bytes.fromhex(name_of(group))
        self._streams = []
        for other, key in group.keys.items():
            if other == own:
                continue
            first, second = sorted((own, other))
            try:
                shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
            except ValueError:
                raise MaskError(f"the key of {other} is none") from None
            info = f"fedqueue mask {first} {second}".encode()
            stream_key = HKDF(SHA256(), length=32, salt=salt, info=info).derive(shared)
            stream = Cipher(ChaCha20(stream_key, nonce=bytes(16)), mode=None).encryptor()
            self._streams.append((stream, own == first))

    def add_to(self, numbers: Buffer) -> None:
        for stream, adds in self._streams:
            mask = np.frombuffer(stream.update(bytes(numbers.nbytes)), "<u8")
            if adds:
                numbers += mask
            else:
                numbers -= mask


def _places(header: Header) -> Iterator[tuple[Entry, int, int]]:
    """The pieces of a model in the order in which masked files have them: by name."""
    for name in sorted(header.entries):
        entry = header.entries[name]
        for start, length in pieces(entry):
            yield entry, start, length


def masked_bytes(header: Header) -> int:
    """Of a masked file, for a model like this."""
    return NUMBER_BYTES * sum(entry.values * parts(entry) for entry in header.entries.values())


def why_not(update: Path, base: Path) -> str | None:
    """Why an update that fits its base cannot be masked; None: it can."""
    with ExitStack() as stack, np.errstate(all="ignore"):
        before = Source.open(stack, base)
        after = Source.open(stack, update, before)
        role_of = roles(before.header, base)
        for entry, start, length in _places(before.header):
            values = _numbers(after, before, entry, start, length, role_of[entry.name])
            if not (np.abs(values) <= MOST).all():
                return f"tensor {entry.name!r} is not finite, or further than {MOST:,.0f} from the model"
    return None


def _numbers(after: Source, before: Source, entry: Entry, start: int, length: int, role: str) -> Buffer:
    """What a member gives: of what training changes the change, else what it has."""
    values = after.values(entry.name, start, length) if entry.number.bits else _whole(after, entry, start, length)
    if role in MOVING:
        values -= before.values(entry.name, start, length)
    return values


def _whole(source: Source, entry: Entry, start: int, length: int) -> Buffer:
    return source.whole_numbers(entry.name, start, length).astype("<f8")


def mask(group: MaskGroup, own: str, secret: str, files: Mapping[MaskShare, tuple[Path, Path]], out: Path) -> str:
    """Writes what the facility `own` gives to the group, from the files (update, base) of its shares, and returns its
    sha256. Made again it is the same."""
    digest, total = hashlib.sha256(), sum(share.weight for share in group.updates)
    if total <= 0:
        raise MaskError("the updates of the group weigh nothing")
    streams = _Streams(group, own, secret)
    with ExitStack() as stack:
        opened_files = []
        for share, (update, base) in files.items():
            before = Source.open(stack, base)
            opened_files.append((share, Source.open(stack, update, before), before))
        like, path = opened_files[0][2], next(iter(files.values()))[1]
        role_of = roles(like.header, path)
        beside = out.with_name(out.name + ".part")
        with beside.open("wb") as file:
            for entry, start, length in _places(like.header):
                sum_ = np.zeros(length)
                for share, after, before in opened_files:
                    role = role_of[entry.name]
                    weight = share.weight if role in MOVING else share.weight / total
                    sum_ += weight * _numbers(after, before, entry, start, length, role)
                numbers = np.rint(sum_ * SCALE).astype("<i8").view("<u8")
                streams.add_to(numbers)
                digest.update(numbers.data)
                file.write(numbers.data)
            file.flush()
        beside.replace(out)
    return digest.hexdigest()


def unmask(current: Path, masked: Sequence[Path], out: Path) -> Content:
    """Writes the model that the sum of a whole group makes of the current one: parameters moved by it, statistics and
    counters as it says."""
    with ExitStack() as stack, np.errstate(all="ignore"):
        like = Source.open(stack, current)
        role_of = roles(like.header, current)
        files = [(path, stack.enter_context(opened(path))) for path in masked]
        target = stack.enter_context(Target.create(out))
        entries = list(like.header.entries.values())
        target.put(encode_header(entries, like.header.metadata))
        starts = _starts(like.header)
        for entry in entries:
            for start, length in pieces(entry):
                total, buffer = np.zeros(length, "<u8"), np.empty(length, "<u8")
                for path, file in files:
                    fill(path, file, buffer.view(np.uint8), NUMBER_BYTES * (starts[entry.name] + start))
                    total += buffer
                found = total.view("<i8").astype("<f8") / SCALE
                target.put(_stored(like, entry, start, found, role_of[entry.name]).view(np.uint8).data)
        return target.finish()


def _starts(header: Header) -> dict[str, int]:
    """Where in a masked file each tensor begins, in numbers."""
    found, place = {}, 0
    for name in sorted(header.entries):
        found[name] = place
        place += header.entries[name].values * parts(header.entries[name])
    return found


def _stored(like: Source, entry: Entry, start: int, found: Buffer, role: str) -> Buffer:
    """In the type of the model."""
    if not entry.number.bits:
        return np.asarray(np.rint(found).astype(np.dtype(entry.number.name).newbyteorder("<")))
    if role in MOVING:
        found = found + like.values(entry.name, start, len(found))
    if role == COUNTER:
        found = np.rint(found)
    if entry.code == "BF16":
        bits = found.astype("<f4").view("<u4")
        return np.asarray(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2"))
    return np.asarray(found.astype({"F16": "<f2", "F64": "<f8"}.get(entry.code, "<f4")))
