"""Which facilities there are, and where the history of each comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedqueue import data
from fedqueue.config import Config, FacilitySettings, TraceQueue
from fedqueue.errors import ConfigError
from fedqueue.history.joblog import JobLog
from fedqueue.history.lines import Options
from fedqueue.history.live import SOURCES, read_live
from fedqueue.history.read import read_log
from fedqueue.planning.places import Place, alike, check_shape

LIVE_DAYS: Final = 90  # of a live scheduler's past


def by_facility(option: str, given: Sequence[str], config: Config) -> dict[str, str]:
    """FACILITY=VALUE pairs of the command line."""
    names = [facility.name for facility in config.facility]
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"{option} {text}: must be FACILITY=VALUE, such as {names[0]}=...")
        if name not in names:
            raise ConfigError(f"{option} {text}: there is no facility {name!r}; there are {', '.join(names)}")
        if name in found:
            raise ConfigError(f"{option} {text}: {name} has two; give one")
        found[name] = value
    return found


def read_places(
    config: Config, histories: Mapping[str, str], live: Mapping[str, str], per_node: Mapping[str, str]
) -> tuple[Place, ...]:
    """The facilities of a config with their histories; whatever cannot be planned with is refused in one line."""
    both = next((name for name in histories if name in live), None)
    if both:
        raise ConfigError(f"--live {both}={live[both]}: {both} has --history too; give one")
    return tuple(_place(config, facility, histories, live, per_node) for facility in config.facility)


def _place(
    config: Config,
    facility: FacilitySettings,
    histories: Mapping[str, str],
    live: Mapping[str, str],
    per_node: Mapping[str, str],
) -> Place:
    name = facility.name
    if facility.steps_per_second is None:
        raise ConfigError(f"facility.{name}.steps_per_second: is missing; a plan needs to know how fast it trains")
    count = per_node.get(name, "1")
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"--per-node {name}={count}: must be a whole number of processors, 1 or more")
    log, file = _history(config, facility, histories, live)
    if log is None:
        if facility.queue is None:
            raise ConfigError(f"facility.{name}: has no history and no queue; say --history {name}=FILE")
        return Place(settings=facility)
    queue = facility.queue
    given = queue.procs if isinstance(queue, TraceQueue) else None
    procs = given or alike(facility.nodes * int(count))
    place = Place(settings=facility, log=log, file=file, procs=procs, per_node=int(count))
    check_shape(place)
    return place


def _history(
    config: Config, facility: FacilitySettings, histories: Mapping[str, str], live: Mapping[str, str]
) -> tuple[JobLog | None, Path | None]:
    name = facility.name
    if name in live:
        kind = live[name]
        if kind not in SOURCES:
            raise ConfigError(f"--live {name}={kind}: must be one of {', '.join(SOURCES)}")
        return read_live(kind, LIVE_DAYS), None
    if name in histories:
        path = data.find_log(histories[name], Path())
        return read_log(path, Options(facility=name)), path.absolute()
    queue = facility.queue
    if isinstance(queue, TraceQueue) and queue.speed_up == 1:  # it is a history as good as any
        path = data.find_log(queue.file, Path(config.folder))
        return read_log(path), path.absolute()
    return None, None
