"""How much a site has given away of its data: every update that leaves it is entered in an account, before it leaves.

The account is the site's: of all runs, in `privacy.json` of its home, because what several runs hand in adds up.
Epsilon is reckoned by Google's accountant (dp-accounting, the extra `privacy`), from Rényi divergences. What an entry
means depends on what the site protects (`privacy.unit`):

- "update": whatever is other in the site's data, a clipped update is 2 * clip away at most, and the noise on it is
  `noise * clip`.
- "records": the script trains by DP-SGD, and says with which noise, how large a share of its records was in each batch,
  and how many steps; the guarantee is for each record.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from fedqueue.agent.schedulers import SubmitRefusedError
from fedqueue.errors import ConfigError, FedQueueError
from fedqueue.files import write_json
from fedqueue.protocol.codec import message, more_than, read
from fedqueue.protocol.contract import Mechanism, Privacy, Result, Spent

FILE: Final = "privacy.json"
"""In a site's home."""
ENTERED: Final = "entered.json"
"""Beside an update that is in the account: what that came to."""


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """[privacy] of agent.toml."""

    unit: Literal["update", "records"] = "update"  # what is protected: all of the site's data, or each record
    clip: float  # the longest that an update's change may be (L2); with "records" for the script to use
    noise: float  # standard deviation of the noise, in clips; with "records" for the script to use
    delta: float = 1e-6  # the chance that epsilon does not hold
    epsilon: float | None = None  # nothing that would come to more is handed in; None: it is only on record

    def __post_init__(self) -> None:
        more_than(self, 0, "clip", "noise", "delta", "epsilon")
        if self.delta >= 1:
            raise ValueError(f"delta must be below 1, found {self.delta}")

    @property
    def of_jobs(self) -> Privacy:
        return Privacy(unit=self.unit, clip=self.clip, noise=self.noise)

    @property
    def of_an_update(self) -> Mechanism:
        return Mechanism(noise=self.noise / 2)


@message
class Entry:
    unit: Literal["update", "records"]
    mechanism: Mechanism


class PrivacySpentError(FedQueueError):
    """An update that may not leave."""


class PrivacyAccount:
    """Of one site; several threads hand in."""

    def __init__(self, home: Path, settings: PrivacySettings) -> None:
        self.settings = settings
        self._path = home / FILE
        self._lock = threading.Lock()
        self._entries = self._read()
        try:
            import dp_accounting  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"[privacy] needs an accountant: pip install 'fedqueue[privacy]' ({error})") from None
        self._must_be_of_one_unit()

    def _read(self) -> list[Entry]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return [read(Entry, entry, FILE) for entry in found]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"{self._path}: what was handed in before cannot be read: {error}; put it back") from None

    def _must_be_of_one_unit(self) -> None:
        if self.settings.unit == "update" and any(entry.unit == "records" for entry in self._entries):
            raise ConfigError(
                f"{self._path}: updates have left that protect single records alone, so nothing can be promised of all "
                'the data any more; say privacy.unit = "records"'
            )

    def spent(self, more: Sequence[Mechanism] = ()) -> Spent:
        """By all that has left, and by this too."""
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant()
        for one in [*(entry.mechanism for entry in self._entries), *more]:
            event = GaussianDpEvent(one.noise)
            accountant.compose(event if one.rate == 1 else PoissonSampledDpEvent(one.rate, event), one.count)
        epsilon = float(accountant.get_epsilon(self.settings.delta)) if self._entries or more else 0.0
        return Spent(epsilon=epsilon, delta=self.settings.delta, unit=self.settings.unit)

    def _lacks(self, spent: Spent) -> str | None:
        most = self.settings.epsilon
        if most is None or spent.epsilon <= most:
            return None
        return f"the site's privacy budget: epsilon would be {spent.epsilon:.3g} of {most:g} (delta {spent.delta:g})"

    def must_leave_room(self) -> None:
        """Before a job is submitted whose update could not leave."""
        more = [self.settings.of_an_update] if self.settings.unit == "update" else []
        with self._lock:
            lacks = self._lacks(self.spent(more))
        if lacks is not None:
            raise SubmitRefusedError(f"{lacks}; raise privacy.epsilon there to go on", transient=False)

    def enter(self, place: Path, result: Result) -> Spent:
        """Before the update in `place` leaves; once, but for a crash at the wrong moment, which counts it twice."""
        with self._lock:
            try:
                return read(Spent, json.loads((place / ENTERED).read_text(encoding="utf-8")), ENTERED)
            except (OSError, ValueError, ConfigError):
                pass
            said = result.mechanisms or []
            if not said:
                raise PrivacySpentError("its update was not made private: its script runs without the agent's worker")
            made = [self.settings.of_an_update] if self.settings.unit == "update" else said
            spent = self.spent(made)
            if (lacks := self._lacks(spent)) is not None:
                raise PrivacySpentError(f"its update may not leave: {lacks}")
            entries = _together([*self._entries, *(Entry(unit=self.settings.unit, mechanism=one) for one in made)])
            write_json(self._path, entries)
            self._entries = entries
            write_json(place / ENTERED, spent)
            return spent


def account_of(settings: PrivacySettings | None, home: Path) -> PrivacyAccount | None:
    return None if settings is None else PrivacyAccount(home, settings)


def _together(entries: Sequence[Entry]) -> list[Entry]:
    """Those that are alike are one."""
    counts: dict[Entry, int] = {}
    for entry in entries:
        alike = replace(entry, mechanism=replace(entry.mechanism, count=1))
        counts[alike] = counts.get(alike, 0) + entry.mechanism.count
    return [replace(entry, mechanism=replace(entry.mechanism, count=count)) for entry, count in counts.items()]
