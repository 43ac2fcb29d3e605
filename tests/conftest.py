"""What tests share: small configs, traces of runs, and a way to renew golden files."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from fedqueue.cli import main
from fedqueue.config import Config, parse
from fedqueue.protocol.messages import Command, Event
from fedqueue.sim.runner import simulate

ROOT = Path(__file__).parent.parent

Trace = list[tuple[Event, list[Command]]]

STRATEGY_NAMES = (
    "fedqueue",
    "jit",
    "fedavg",
    "fedasync",
    "fedbuff",
    "fedcompass",
    "fedprox",
    "fedadam",
    "fadas",
    "scaffold",
)

ONE_A_ROUND: dict[str, Any] = {"stay": "off", "rounds": "fixed", "absent": 0.0}
"""Options of just in time: one job a round, as long as it is set."""

# How long an example takes says nothing about the code on a machine that others use too.
# Where nobody looks at what it finds, a search looks at the same examples each time.
hypothesis.settings.register_profile("any machine", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    """Tests interrupt the programs that they start; who is started by a shell in the background would pass on that it
    hears no interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Which tests go to the same worker: those of a file that share what is costly to set up. Every other one goes
    where there is room."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if sets_up_for_many(file) else nodeid


@cache
def sets_up_for_many(file: str) -> bool:
    return re.search(r"fixture\(scope=", (ROOT / file).read_text(encoding="utf-8")) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Spread(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For several workers: tests that wait (`pytest.mark.waits`) are spread among those that compute, the longest
    first."""
    if hasattr(config, "workerinput"):
        waiting = [item for item in items if item.get_closest_marker("waits")]
        others = [item for item in items if not item.get_closest_marker("waits")]
        items[:] = spread(sorted(waiting, key=seconds_of, reverse=True), others)


def seconds_of(item: pytest.Item) -> float:
    """About how long its file waits if it is one piece, or else the test."""
    marker = item.get_closest_marker("waits")
    return float(marker.args[0]) if marker is not None else 0.0


def spread(few: Sequence[pytest.Item], many: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The few in their order, evenly among the many."""
    placed = [(n / max(1, len(few)), 0, n, item) for n, item in enumerate(few)]
    placed += [(n / max(1, len(many)), 1, n, item) for n, item in enumerate(many)]
    return [item for *_, item in sorted(placed, key=lambda found: found[:3])]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden traces from what happens now")


def facility(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "steps_per_second": 10.0,
        "queue": {"kind": "lognormal", "mean": 2.0, "rho": 0.9},
        **changes,
    }


def config_of(
    strategy: str,
    *,
    facilities: Sequence[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    faults: Sequence[dict[str, Any]] = (),
    **run: Any,
) -> Config:
    """A timing-only run of two facilities, unless said otherwise."""
    tree: dict[str, Any] = {
        "run": {"strategy": strategy, "seed": 1, "round_length": 10.0, **run},
        "task": {"name": "timing"},
        "strategy": {strategy: options or {}},
        "facility": list(facilities or [facility("east"), facility("west", steps_per_second=5.0)]),
        "fault": list(faults),
    }
    if "rounds" not in run and "seconds" not in run:
        tree["run"]["rounds"] = 10
    return parse(tree)


def trace_of(config: Config) -> Trace:
    """Every event of a run with its commands."""
    trace: Trace = []
    simulate(config, listeners=[lambda event, commands: trace.append((event, list(commands)))])
    return trace


def commands_of(trace: Trace, kind: type[Any]) -> list[Any]:
    return [command for _, commands in trace for command in commands if isinstance(command, kind)]


def check_refusal(args: Sequence[str], says: str, capsys: Any) -> None:
    """The command ends with one clear line, and no file here is new, gone or another."""

    def files() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}

    before = files()
    try:
        code = main(list(args))
    except SystemExit as stop:
        code = int(str(stop.code))
    caught = capsys.readouterr()
    assert code not in (0, 70)
    assert caught.err.count("\n") == 1, caught.err
    assert says in caught.err
    assert caught.out == ""
    assert files() == before


def strictly(line: str) -> Any:
    """A line of JSON as the strictest reader takes it: no key twice, no NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), f"a key is there twice: {line}"
        return dict(pairs)

    def no_number(word: str) -> None:
        raise AssertionError(f"{word} is no JSON: {line}")

    return json.loads(line, object_pairs_hook=once, parse_constant=no_number)


def journal(folder: Path) -> list[dict[str, Any]]:
    """What `fedqueue journal` prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["journal", str(folder)]) == 0
    return [strictly(line) for line in printed.getvalue().splitlines()]


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def what_is_logged() -> Iterator[list[str]]:
    """The messages that fedqueue logs inside, as they come."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("fedqueue")
    ours.addHandler(handler)
    before = ours.level
    ours.setLevel(logging.INFO)
    try:
        yield said
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)


@pytest.fixture
def said() -> Iterator[list[str]]:
    with what_is_logged() as said:
        yield said
