"""Run folders: made whole or not at all, never overwritten."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, Final

from fedqueue import __version__
from fedqueue.config import Config, import_modules
from fedqueue.errors import ReplayError, RunFolderError, StorageError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.codec import encode
from fedqueue.protocol.plan import AS_PUBLISHED, FacilityProfile, FailurePolicy, Plan, Trust
from fedqueue.protocol.strategies import STRATEGIES, Strategy

SUMMARY: Final = "summary.json"


@contextmanager
def new_folder(wanted: Path | None, default_name: str, *, kept_with: str | None = None) -> Iterator[Path]:
    """A run folder: the one asked for, which must not exist, or runs/NAME with a number that is free.

    If what is done in it fails before anything is there, nothing is left of it; `kept_with`: before this file of it is
    there, whatever else is.
    """
    folder = wanted if wanted is not None else _free_name(default_name)
    lacking = [parent for parent in folder.parents if not parent.exists()]
    _make(folder)
    try:
        yield folder
    except BaseException:
        if kept_with is not None and not (folder / kept_with).exists():
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # it holds something: what was written stays
            for empty in (place for place in (folder, *lacking) if place.exists()):
                empty.rmdir()
        raise


def _free_name(name: str) -> Path:
    for number in count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise AssertionError("there is always a free number")


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, mode=0o700)  # a real run's has secrets
    except FileExistsError:
        raise RunFolderError(f"{folder}: exists already; nothing was changed; name another folder") from None
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}; name another folder") from None
    return folder


def describe(config: Config, plan: Plan, *, seed: int, driver: str) -> dict[str, Any]:
    """What the ledger has to know so that a run can be replayed and understood without its config file."""
    return {
        "version": __version__,
        "driver": driver,
        "seed": seed,
        "strategy": config.run.strategy,
        "options": dataclasses.asdict(config.options()),
        "plan": dataclasses.asdict(plan),
        "config": dataclasses.asdict(config),
    }


def rebuild_strategy(meta: Mapping[str, Any]) -> Strategy:
    """The strategy of a ledger, as it was before its first event."""
    name = meta["strategy"]
    import_modules(meta["config"]["run"], "the ledger's config", Path(meta["config"]["folder"]))
    if name not in STRATEGIES:
        raise ReplayError(f"the ledger's strategy {name!r} is not registered; put its module on PYTHONPATH")
    kind = STRATEGIES[name]
    return kind(rebuild_plan(meta), kind.Options(**meta["options"]))


def rebuild_plan(meta: Mapping[str, Any]) -> Plan:
    """What the strategy of a ledger was told before the run."""
    plan = dict(meta["plan"])
    plan["facilities"] = tuple(FacilityProfile(**profile) for profile in plan["facilities"])
    plan["failures"] = FailurePolicy(**plan["failures"])
    plan["trust"] = Trust(**plan["trust"]) if "trust" in plan else AS_PUBLISHED  # as it was before there was a choice
    return Plan(**plan)


def replay(folder: Path) -> int:
    """Feed the events of a run into a fresh strategy; the number of events, or a `ReplayError` at a difference."""
    number = 0
    with LedgerReader(folder / FILE) as ledger:
        strategy = rebuild_strategy(ledger.meta)
        for event, recorded in ledger.steps():
            given = [(type(c).__name__, encode(c)) for c in strategy.handle(event)]
            if given != recorded:
                pairs = zip_longest(recorded, given, fillvalue=("nothing", ""))
                place, (was, now) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
                built = ledger.meta.get("version")
                raise ReplayError(
                    f"{folder}: event {number} ({type(event).__name__} at {event.at:g} s), command {place}: "
                    f"the ledger (build {built}) has {' '.join(was)}; "
                    f"replaying (build {__version__}) gives {' '.join(now)}"
                )
            number += 1
    if number == 0:
        raise RunFolderError(f"{folder}: its ledger has no event; the run was cut off before anything was written")
    return number


def rounded(value: Any) -> Any:
    """The same with floats of six significant digits.

    >>> rounded({"a": [0.12345678, 3]})
    {'a': [0.123457, 3]}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
