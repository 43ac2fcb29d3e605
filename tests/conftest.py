"""What tests share: small configs, traces of runs, and a way to renew golden files."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fedqueue.cli import main
from fedqueue.config import Config, parse
from fedqueue.protocol.messages import Command, Event
from fedqueue.sim.runner import simulate

Trace = list[tuple[Event, list[Command]]]

STRATEGY_NAMES = ("fedqueue", "jit", "fedavg", "fedasync", "fedbuff", "fedcompass")


# How long an example takes says nothing about the code on a machine that others use too.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    """Tests interrupt the programs that they start; who is started by a shell in the background would pass on that it
    hears no interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
