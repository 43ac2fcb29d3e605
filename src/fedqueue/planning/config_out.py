"""The recommendation as a config file: what was given, what was changed, and where each number comes from."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from fedqueue.config import parse, toml_key, toml_value
from fedqueue.errors import ConfigError
from fedqueue.files import writing
from fedqueue.history.joblog import JobLog
from fedqueue.history.ledgers import ledger_of
from fedqueue.history.trace import write_log
from fedqueue.planning.advice import Advice, FacilityAdvice
from fedqueue.planning.candidates import first_delay, options_of
from fedqueue.planning.text import amount, duration

Comments = dict[tuple[str, ...], str]
"""By the path of a key: what stands behind its value."""

_PATHS = (("model", "initial"), ("server", "certificate"), ("server", "key"))


def write_config(advice: Advice, tree: Mapping[str, Any], path: Path) -> Path:
    """Write it, and the histories that lie in no file beside it; read back before anything is left there. `tree` is
    the config that the plan was made of."""
    folder = Path(advice.wish.setting.config.folder)
    made, comments, logs = _changed(advice, deepcopy(dict(tree)), path, folder)
    taken = next((file for file in (path, *logs) if file.exists()), None)
    if taken:
        raise ConfigError(f"{taken}: exists already; nothing was changed; name another --out")
    text = "\n".join([*_head(advice), "", *_table(made, comments)]) + "\n"
    if tomllib.loads(text) != made:
        raise ConfigError(f"{path}: the config cannot be written as TOML; use the recommendation by hand")
    parse(made, where=str(path), folder=folder)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, log in logs.items():
            write_log(log, file)
        with path.open("x", encoding="utf-8") as out:
            out.write(text)
    return path


def _changed(
    advice: Advice, tree: dict[str, Any], path: Path, folder: Path
) -> tuple[dict[str, Any], Comments, dict[Path, JobLog]]:
    best, candidate = advice.best, advice.best.candidate
    comments: Comments = {}
    run = tree.setdefault("run", {})
    run["strategy"], run["round_length"] = candidate.strategy, candidate.length
    comments["run", "strategy"] = f"{amount(best.mean('updates'))} updates a day in the simulation"
    comments["run", "round_length"] = f"{duration(candidate.length)}: the best of the lengths tried"
    if not candidate.timed:
        comments["run", "round_length"] = f"jobs train {duration(candidate.length)}"
    options = tree.setdefault("strategy", {}).setdefault(candidate.strategy, {})
    options.pop("round_length", None)
    recommended = dataclasses.asdict(options_of(advice.wish.setting.config, advice.places, candidate))
    for key in [*dict(candidate.options), *(k for k in ("steps", "min_steps", "max_steps") if not candidate.timed)]:
        if key in recommended:
            options[key] = recommended[key]
            comments["strategy", candidate.strategy, key] = "recommended"
    logs: dict[Path, JobLog] = {}
    for number, (given, facility) in enumerate(zip(tree["facility"], advice.facilities, strict=True)):
        logs |= _change_facility(given, facility, advice, path, comments, ("facility", str(number)))
    if path.absolute().parent != folder:
        for table, key in _PATHS:
            if key in tree.get(table, {}):
                tree[table][key] = str(folder / tree[table][key])
    return tree, comments, logs


def _change_facility(
    given: dict[str, Any],
    facility: FacilityAdvice,
    advice: Advice,
    path: Path,
    comments: Comments,
    where: tuple[str, ...],
) -> dict[Path, JobLog]:
    place, candidate = facility.place, advice.best.candidate
    before = next(p for p in advice.wish.places if p.name == place.name)
    comments[(*where, "name")] = (
        f"request {duration(facility.wall_seconds)} of wall time; {amount(facility.jobs)} jobs, "
        f"{amount(facility.updates)} updates and {amount(facility.node_hours)} node-hours a day"
    )
    if place.settings.nodes != before.settings.nodes:
        given["nodes"] = place.settings.nodes
        given["steps_per_second"] = place.settings.steps_per_second
        comments[(*where, "nodes")] = f"was {before.settings.nodes}"
        comments[(*where, "steps_per_second")] = f"nodes^{advice.wish.scaling:g}: a guess; measure it"
    if place.log is None or facility.waits is None:
        return {}
    if place.known_waits:
        given["known_waits"] = [list(pair) for pair in place.known_waits]
        comments[(*where, "known_waits")] = "wall time asked for and wait, from the history"
    given["first_delay"] = round(first_delay(place, candidate), 1)
    comments[(*where, "first_delay")] = "the median wait of jobs like ours"
    made: dict[Path, JobLog] = {}
    file = place.file
    if file is None or file.is_dir() or ledger_of(file):  # no file holds this facility's jobs and no others
        file = path.absolute().with_name(f"{path.stem}-{place.name}.csv")
        made[file] = place.log
    queue: dict[str, Any] = {"kind": "trace", "file": str(file)}
    if place.procs is not None:
        queue["procs"] = list(place.procs)
    if place.jobs.groups:
        queue["by_requested"] = True
    given["queue"] = queue
    comments[(*where, "queue")] = f"{len(facility.waits.waits):,} jobs; for simulations"
    return made


def _head(advice: Advice) -> list[str]:
    setting = advice.wish.setting
    return [
        "# Written by `fedqueue plan`. Try it:  fedqueue simulate THIS_FILE --set task.name=timing",
        f"# {advice.simulations:,} simulations, {setting.days:g} days each at most, from {setting.starts} starting "
        f"points, seed {setting.seed}.",
        "# Wall times are asked for by the strategy itself; those named below are what allocations must allow.",
    ]


def _table(tree: Mapping[str, Any], comments: Comments, path: tuple[str, ...] = ()) -> list[str]:
    """Lines of a table: its plain keys, then its tables, then its lists of tables."""
    lines = []
    plain = {k: v for k, v in tree.items() if not _is_table(v, k) and not _is_tables(v)}
    if path and (plain or not tree):
        lines += [f"[{'.'.join(toml_key(part) for part in path)}]"]
    lines += _pairs(plain, comments, path)
    if plain:
        lines.append("")
    for key, value in tree.items():
        if _is_table(value, key):
            lines += _table(value, comments, (*path, key))
        elif _is_tables(value):
            for number, item in enumerate(value):
                lines += [f"[[{'.'.join(map(toml_key, (*path, key)))}]]"]
                lines += [*_pairs(item, comments, (*path, key, str(number))), ""]
    return lines


def _pairs(tree: Mapping[str, Any], comments: Comments, path: tuple[str, ...]) -> list[str]:
    lines = []
    for key, value in tree.items():
        line = f"{toml_key(key)} = {toml_value(value)}"
        note = comments.get((*path, key))
        lines.append(f"{line}  # {note}" if note else line)
    return lines


def _is_table(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and key != "steps"  # of a strategy: by facility, on one line


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
