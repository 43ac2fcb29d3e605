"""The groups whose masked updates make the models of a run: who has given what, and what is still waited for.

A group is what the strategy asks to be summed, with the public keys of its facilities; so it is in the ledger but for
the keys, which agents say in every poll. What a facility gave lies in the folder `masked` until the model is made.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from fedqueue.masks import name_of
from fedqueue.protocol.contract import MaskGroup, MaskShare, facility_of
from fedqueue.protocol.messages import Aggregate
from fedqueue.protocol.plan import Trust

FOLDER: Final = "masked"


class Masking:
    def __init__(self, folder: Path, run: str, trust: Trust) -> None:
        self._folder = folder / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._run = run
        self._trust = trust
        self._since: dict[int, float] = {}  # by version: since when it is waited for (monotonic)
        self.size: int | None = None  # bytes that each member gives, as long as the model has these tensors
        self.keys: dict[str, str] = {}  # public, by facility, as its agent said last

    def group(self, command: Aggregate) -> MaskGroup | None:
        """None: the key of one of them is not known."""
        names = {facility_of(share.job_id) for share in command.weights}
        if not names <= self.keys.keys():
            return None
        return MaskGroup(
            run=self._run,
            version=command.to_version,
            updates=[
                MaskShare(job_id=share.job_id, attempt=share.attempt, part=share.part, weight=share.weight)
                for share in command.weights
            ],
            keys={name: self.keys[name] for name in sorted(names)},
        )

    def place(self, group: MaskGroup, facility: str) -> Path:
        """Where what it gives lies."""
        return self._folder / f"{group.version}@{facility}@{name_of(group)[:32]}"

    def upload(self, group: MaskGroup, facility: str, sha256: str) -> Path:
        """Where it arrives; what was begun of other bytes is dropped."""
        place = self.place(group, facility)
        part = place.with_name(f"{place.name}@{sha256}.part")
        for left in self._folder.glob(f"{group.version}@{facility}@*.part"):
            if left != part:
                left.unlink(missing_ok=True)
        return part

    def given(self, command: Aggregate) -> list[Path] | None:
        """What all of the group gave; None: it is waited for."""
        self._since.setdefault(command.to_version, time.monotonic())
        group = self.group(command)
        if group is None:
            return None
        places = [self.place(group, name) for name in group.keys]
        return places if all(place.exists() for place in places) else None

    def missing(self, command: Aggregate) -> list[str]:
        names, group = {facility_of(share.job_id) for share in command.weights}, self.group(command)
        if group is None:
            return sorted(names - self.keys.keys())
        return sorted(name for name in names if not self.place(group, name).exists())

    def is_overdue(self, command: Aggregate) -> bool:
        since = self._since.get(command.to_version, time.monotonic())
        return time.monotonic() - since > self._trust.mask_seconds

    def too_few(self, command: Aggregate) -> bool:
        return len({facility_of(share.job_id) for share in command.weights}) < self._trust.least_members

    def sweep(self, versions: Collection[int]) -> None:
        """Delete what was given for models that are made, or never will be."""
        for version in [version for version in self._since if version not in versions]:
            del self._since[version]
        for left in self._folder.iterdir():
            if left.name.partition("@")[0] not in {str(version) for version in versions}:
                with suppress(OSError):
                    left.unlink(missing_ok=True)
