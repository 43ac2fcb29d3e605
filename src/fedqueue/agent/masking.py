"""What an agent does with updates of a run that takes them masked: it keeps each until a group is there for it, and
gives the group its part.

An update is masked once, for one group, which is written down before anything leaves: two groups with the same update
would tell what is between them. So a group that changed, or that names somebody whose key is not the one that this site
has known so far, gets nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from fedqueue.agent.jobs import Jobs
from fedqueue.agent.transport import CoordinatorRefusedError, Transport
from fedqueue.errors import FedQueueError
from fedqueue.files import failpoint, sync, write_json, write_secret
from fedqueue.protocol.contract import MaskGroup, MaskShare, facility_of, sequence_of
from fedqueue.protocol.state import PartKey

FOLDER: Final = "masked"
"""In a home: updates that wait for their group, each in a folder of its own."""
SECRET: Final = "mask-secret"
PEERS: Final = "mask-peers.json"
"""In a site's home: the key of each other facility, as it was seen first."""
GROUP: Final = "group"
"""In an update's folder: the group that it is masked for."""
UPDATE: Final = "update.safetensors"
BASE: Final = "base.safetensors"
KEPT: Final = 20
"""Updates that wait, at the most; the oldest go first: nobody asked for them."""


LIGHTEST: Final = 0.1
"""Of this site's weight: who has less hides nothing of it."""


class Models(Protocol):
    def file_of(self, version: int) -> Path | None:
        """A model that lies at this facility."""


class NotMaskedError(FedQueueError):
    """Why an update can be handed in to no group."""


class Masking:
    def __init__(self, jobs: Jobs, transport: Transport, model_cache: Models) -> None:
        self._jobs = jobs
        self._transport = transport
        self._model_cache = model_cache
        self._folder = jobs.home / FOLDER
        self._giver = ThreadPoolExecutor(1, thread_name_prefix="giver")
        self._giving: Future[None] | None = None
        self._not_before = 0.0  # monotonic
        self._secret = ""

    def close(self) -> None:
        self._giver.shutdown(wait=True, cancel_futures=True)

    @property
    def busy(self) -> bool:
        return self._giving is not None

    @property
    def key(self) -> str:
        """Public. Made when it is asked for first."""
        from fedqueue.masks import public_key

        return public_key(self._own_secret())

    def _own_secret(self) -> str:
        from fedqueue.masks import new_secret

        if not self._secret:
            path = self._jobs.site_home / SECRET
            if not path.exists():
                write_secret(path, new_secret())
            self._secret = path.read_text(encoding="utf-8").strip()
        return self._secret

    # Keeping --------------------------------------------------------------------------------------------

    def keep(self, sequence: int, key: PartKey, update: Path, base_version: int) -> str:
        """Keep the update of this attempt and part until a group is there; what to call it meanwhile. Again and again
        it is the same."""
        from fedqueue.masks import why_not
        from fedqueue.tensorfile import check

        attempt, part = key
        place = self._folder / f"{sequence}-{attempt}-{part}"
        if not place.exists():
            base = self._model_cache.file_of(base_version)
            if base is None:
                raise NotMaskedError(f"model {base_version}, which it was trained from, is not here any more")
            reason = check(update, base) or why_not(update, base)
            if reason is not None:
                raise NotMaskedError(f"its update cannot be masked: {reason}")
            beside = place.with_name(f".{place.name}.part")
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            _linked(update, beside / UPDATE)
            _linked(base, beside / BASE)
            sync(beside)
            beside.rename(place)
            sync(self._folder)
            failpoint("mask.held")
            for old in self._waiting()[:-KEPT]:
                _clear(old)
        # Not the update's own digest: who guesses the update could tell by that.
        return hashlib.sha256(f"{self._own_secret()} {sequence} {attempt} {part}".encode()).hexdigest()

    def _waiting(self) -> list[Path]:
        """The oldest first."""
        there = [path.parent for path in self._folder.glob(f"[0-9]*/{UPDATE}")]
        return sorted(there, key=lambda place: place.stat().st_mtime_ns)

    # Giving ---------------------------------------------------------------------------------------------

    def turn(self, group: MaskGroup | None) -> None:
        """`group`: that waits for what this facility gives; None: none does."""
        if self._giving is not None:
            if not self._giving.done():
                return
            error, self._giving = self._giving.exception(), None
            if error is None:
                self._jobs.fine("masked sum")
                return  # what is told here of groups is older than that
            if isinstance(error, FedQueueError | OSError):
                self._jobs.trouble("masked sum", f"nothing is given to the group of masked updates: {error}")
                self._not_before = time.monotonic() + self._jobs.settings.poll_seconds
            else:
                raise error
        if group is not None and time.monotonic() >= self._not_before:
            self._giving = self._giver.submit(self._give, group)

    def _give(self, group: MaskGroup) -> None:
        """In a thread beside."""
        from fedqueue.masks import mask, name_of

        own, name = self._jobs.facility, name_of(group)
        self._must_be_good(group)
        files: dict[MaskShare, tuple[Path, Path]] = {}
        for share in group.updates:
            if facility_of(share.job_id) == own:
                place = self._folder / f"{sequence_of(share.job_id)}-{share.attempt}-{share.part}"
                if not (place / UPDATE).exists():
                    raise NotMaskedError(f"the update of {share.job_id} is not here any more")
                files[share] = place / UPDATE, place / BASE
        for update, _ in files.values():
            self._bind(update.parent / GROUP, name)
        failpoint("mask.bound")
        out = self._folder / f".{group.version}.sum"
        sha256 = mask(group, own, self._own_secret(), files, out)
        failpoint("mask.made")
        try:
            self._transport.give(out, group.version, sha256, name)
        except CoordinatorRefusedError as error:
            if error.refusal != "superseded":
                raise
        failpoint("mask.given")
        out.unlink(missing_ok=True)
        for update, _ in files.values():
            _clear(update.parent)
        self._jobs.log.info(f"gave its masked part to model {group.version} ({len(group.keys)} facilities)")

    def _must_be_good(self, group: MaskGroup) -> None:
        if group.run != self._jobs.run and self._jobs.run:
            raise NotMaskedError("the group is of another run")
        least = self._jobs.settings.masked_least_members
        if len(group.keys) < least:
            raise NotMaskedError(
                f"the group has {len(group.keys)} facilities, and this site wants {least} at the least"
            )
        weights = dict.fromkeys(group.keys, 0.0)
        for share in group.updates:
            weights[facility_of(share.job_id)] += share.weight
        if sum(weight >= LIGHTEST * weights[self._jobs.facility] for weight in weights.values()) < least:
            raise NotMaskedError("the others of the group weigh so little that their sum would show this site's part")
        if group.keys.get(self._jobs.facility) != self.key:
            raise NotMaskedError("the group has another key for this facility")
        path = self._jobs.site_home / PEERS
        try:
            known: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            known = {}
        others = {name: key for name, key in group.keys.items() if name != self._jobs.facility}
        for name, key in others.items():
            if known.setdefault(name, key) != key:
                raise NotMaskedError(
                    f"the key of {name} is not the one that it had; if {name} says that it is right, "
                    f"take {name} out of {path}"
                )
        if len(set(others.values())) != len(others):
            raise NotMaskedError("two facilities of the group have one key")
        write_json(path, known)

    @staticmethod
    def _bind(path: Path, name: str) -> None:
        """On the disk before anything leaves."""
        if path.exists() and path.read_text(encoding="utf-8") != name:
            raise NotMaskedError("one of its updates was masked for another group before, and is masked once alone")
        part = path.with_name(".group.part")
        with part.open("w", encoding="utf-8") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)


def _clear(place: Path) -> None:
    """The update is of no more use. Its folder stays, so that it is not kept, and masked, once more."""
    for name in (UPDATE, BASE):
        (place / name).unlink(missing_ok=True)


def _linked(path: Path, target: Path) -> None:
    """The same file under another name, or a copy where that cannot be."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
        sync(target)
