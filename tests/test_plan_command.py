"""`fedqueue plan` from the command line: what it takes, prints, writes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue.cli import main
from fedqueue.config import TraceQueue, load, toml_key
from fedqueue.data import find
from fedqueue.errors import DataError
from fedqueue.planning.config_out import _table
from fedqueue.protocol.messages import SubmitJob
from fedqueue.sim.queues import read_trace
from tests.conftest import commands_of, trace_of
from tests.test_simulation import write_trace

CONFIG = """
[run]
name = "sites"
seconds = 172800.0

[task]
name = "timing"

[strategy.jit]
patience = 0.05

[[facility]]
name = "north"
nodes = 2
steps_per_second = 10.0
startup_seconds = 30.0

[[facility]]
name = "south"
nodes = 4
steps_per_second = 20.0
"""

QUICK = ("--days", "2", "--starts", "2", "--jobs", "1", "--strategies", "jit,fedavg", "--longest", "14400")


@pytest.fixture
def site(in_tmp: Path) -> Path:
    """A config and two histories: north's jobs wait minutes, south's hours."""
    luck = np.random.default_rng(1)
    for name, mean, procs in (("north", 300, (2, 4)), ("south", 9000, (4,))):
        rows = [
            (int(at), int(luck.exponential(mean)), 3600, int(luck.choice(procs))) for at in range(0, 6 * 86_400, 900)
        ]
        write_trace(in_tmp / f"{name}.csv", rows)
    (in_tmp / "c.toml").write_text(CONFIG)
    return in_tmp


def planned(capsys: Any, *args: str) -> dict[str, Any]:
    assert main(["plan", "c.toml", *QUICK, *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


HISTORIES = ("--history", "north=north.csv", "--history", "south=south.csv")


def test_person_sees_the_recommendation_first_within_a_hundred_columns(site: Path, capsys: Any) -> None:
    assert main(["plan", "c.toml", *QUICK, *HISTORIES, "--what-if", "south.wait=2x", "--plot", "p/plan.png"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("Run jit (")
    assert lines[1].startswith("Ask for jobs of: north")
    assert max(map(len, lines)) <= 100
    for words in (
        "Waiting for south costs FedAvg",
        "What is uncertain:",
        "south.wait=2x",
        "effective local steps a day",
        "share of time training, with jobs that stay",
        "the first half of the history advises 1 h and promises",
    ):
        assert words in out
    assert "begun anew" not in out, "six days of history hold two days"
    assert Path("p/plan.png").stat().st_size > 20_000


def test_written_config_loads_and_simulates_and_can_be_planned_again(site: Path, capsys: Any) -> None:
    found = planned(capsys, *HISTORIES, "--no-stay", "--out", "out/plan.toml")["recommendation"]
    config = load(Path("out/plan.toml"))
    assert (config.run.strategy, config.run.round_length) == ("jit", found["round_length"])
    assert {key: getattr(config.options("jit"), key) for key in found["options"]} == found["options"]
    assert config.options("jit").patience == 0.05, "what the user chose stays"
    for facility in config.facility:
        said = found["facilities"][facility.name]
        assert facility.nodes == said["nodes"]
        assert isinstance(facility.queue, TraceQueue)
        assert list(facility.queue.procs or ()) == said["history"]["procs"]
        assert facility.first_delay == pytest.approx(said["wait_median"], abs=0.1)
    assert main(["simulate", "out/plan.toml", "--json", "--no-plots", "--out", "run"]) == 0
    summary = json.loads(capsys.readouterr().out)
    updates = summary["updates"]["admitted"] + summary["updates"]["deferred"]
    assert updates / 2 == pytest.approx(found["updates_per_day"], rel=0.5)
    assert main(["plan", "out/plan.toml", *QUICK, "--keep-nodes", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["recommendation"]
    assert again["strategy"] == "jit"
    nodes = f"facility.north.nodes={config.facility[0].nodes}"  # those of the run's own jobs
    assert (
        main(["plan", "c.toml", *QUICK, "--history", "north=run", "--history", "south=south.csv", "--set", nodes]) == 0
    )


def test_staying_jobs_are_searched_shown_and_written_with_what_the_history_knows(site: Path, capsys: Any) -> None:
    """South's jobs wait hours: with one job at a time, staying ones train far more."""
    one = ("--set", "facility.*.max_jobs=1", "--strategies", "jit")
    found = planned(capsys, *HISTORIES, *one, "--keep-nodes", "--out", "plan.toml")
    stay = found["recommendation"]["options"]["stay"]
    assert {one["options"].get("stay", "off") for one in found["tried"]} >= {"off", "auto", 3600.0, 14_400.0}
    curves = {curve["facility"]: curve for curve in found["stays"]}
    assert curves["south"]["chosen"]["wall_seconds"] == 3600.0
    assert 0 < curves["south"]["chosen"]["share"] < curves["north"]["chosen"]["share"] < 1
    assert curves["north"]["check"]["promised"] == pytest.approx(curves["north"]["check"]["achieved"], abs=0.1)
    config = load(Path("plan.toml"))
    assert config.options("jit").stay == stay
    assert main(["simulate", "plan.toml", "--json", "--no-plots", "--out", "run"]) == 0


@pytest.mark.parametrize(("history", "asked_for"), [("south.csv", 3600.0), ("before", 1800.0)])
def test_what_a_log_or_a_ledger_knows_of_waits_is_written_whatever_wins_and_is_what_staying_jobs_begin_with(
    history: str, asked_for: float, site: Path, capsys: Any
) -> None:
    """South's jobs wait for hours, so what is asked for first is twice what they asked for; without a history it would
    be eight rounds."""
    stayed = ["run.strategy=jit", "strategy.jit.stay=1740.0", "strategy.jit.rounds=fixed", "run.seconds=400000.0"]
    queues = [
        f'facility.{name}.queue={{kind="fixed", delay={delay}}}' for name, delay in (("north", 60), ("south", 6e3))
    ]
    if history == "before":
        assert main(["simulate", "c.toml", "--no-plots", "--out", "before", "--set", *stayed, *queues]) == 0
        capsys.readouterr()
    given = ("--history", "north=north.csv", "--history", f"south={history}", "--no-stay", "--keep-nodes")
    found = planned(capsys, *given, "--out", "plan.toml")
    assert found["recommendation"]["options"].get("stay", "off") == "off"
    known = load(Path("plan.toml")).facility[1].known_waits
    assert {wall for wall, _ in known} == {asked_for}
    assert max(wait for _, wait in known) > 3600
    assert first_job_of("south", known) == pytest.approx(2 * asked_for, rel=0.1)
    assert first_job_of("south", []) != pytest.approx(2 * asked_for, rel=0.2)


def first_job_of(facility: str, known: list[tuple[float, float]]) -> float:
    """Seconds that the first job with stay = "auto" asks for, in the simulation of a plan."""
    config = load(Path("plan.toml"), ["run.strategy=jit", "strategy.jit.stay=auto", "run.rounds=3"])
    config = replace(config, facility=[replace(f, known_waits=known) for f in config.facility])
    orders = [command.order for command in commands_of(trace_of(config), SubmitJob)]
    return float(next(order.wall_seconds for order in orders if order.facility == facility))


def test_plan_that_cannot_be_written_is_told_all_the_same(site: Path, capsys: Any) -> None:
    quick = ("plan", "c.toml", *QUICK, *HISTORIES, "--keep-nodes")
    assert main([*quick, "--out", "/dev/null/plan.toml"]) == 6
    caught = capsys.readouterr()
    assert caught.out.startswith("Run ")
    assert "/dev/null/plan.toml: cannot be written" in caught.err
    assert main([*quick, "--plot", "/dev/null/plan.png", "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["recommendation"]["strategy"] == "jit"


def test_history_of_one_facility_in_a_ledger_is_written_beside_the_config(site: Path, capsys: Any) -> None:
    """A run's ledger holds all facilities; the queue that the config names must be that of one."""
    queues = [
        f'facility.{name}.queue={{kind="fixed", delay={delay}}}' for name, delay in (("north", 60), ("south", 7200))
    ]
    assert main(["simulate", "c.toml", "--no-plots", "--out", "run", "--set", *queues]) == 0
    capsys.readouterr()
    both = [f"--history={name}=run/ledger.sqlite" for name in ("north", "south")]
    planned(capsys, *both, "--keep-nodes", "--out", "plan.toml")
    first = Path("plan-south.csv").read_text()
    queue = load(Path("plan.toml")).facility[1].queue
    assert isinstance(queue, TraceQueue)
    assert min(read_trace(Path(queue.file), queue).whole.waits) >= 7200
    Path("plan.toml").unlink()
    assert main(["plan", "c.toml", *QUICK, *both, "--keep-nodes", "--out", "plan.toml"]) == 2
    assert "plan-north.csv: exists already; nothing was changed" in capsys.readouterr().err
    assert Path("plan-south.csv").read_text() == first


def test_same_seed_same_plan_in_one_process_or_two(site: Path, capsys: Any) -> None:
    one = planned(capsys, *HISTORIES, "--keep-nodes")
    assert planned(capsys, *HISTORIES, "--keep-nodes", "--jobs", "2") == one
    assert planned(capsys, *HISTORIES, "--keep-nodes", "--seed", "7") != one


def test_facility_without_history_keeps_the_queue_of_its_config(site: Path, capsys: Any) -> None:
    found = planned(
        capsys, *("--history", "north=north.csv", "--set", 'facility.south.queue={kind="fixed", delay=60.0}')
    )
    south = found["recommendation"]["facilities"]["south"]
    assert south["history"] is None
    assert south["wait_median"] == 60.0
    assert any("south: has no history" in caution for caution in found["uncertain"])


def test_curve_makes_time_to_target_the_objective(site: Path, capsys: Any) -> None:
    Path("curve.csv").write_text("steps,score\n1000,0.5\n50000,0.9\n")
    found = planned(capsys, *HISTORIES, "--keep-nodes", "--curve", "curve.csv", "--target", "0.9")
    assert found["objective"]["needed"] == 50_000
    assert found["recommendation"]["target_days"] > 0
    assert "The target should be reached after" in " ".join(found["recommendation"]["words"])
    assert main(["plan", "c.toml", *HISTORIES, "--curve", "curve.csv", "--target", "0.99"]) == 3
    assert "never reaches 0.99" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--history", "east=north.csv"), 2, "there is no facility 'east'; there are north, south"),
        (("--history", "north.csv"), 2, "must be FACILITY=VALUE"),
        (("--history", "north=north.csv"), 2, "facility.south: has no history and no queue; say --history south=FILE"),
        (("--history", "north=none.csv"), 3, "none.csv"),
        ((*HISTORIES, "--set", "facility.north.nodes=64"), 3, "sizes with enough jobs: 2 (277), 3-5 (299)"),
        ((*HISTORIES, "--what-if", "south.colour=blue"), 2, "keys are wait, nodes"),
        ((*HISTORIES, "--what-if", "without east"), 2, "there is no facility 'east'"),
        ((*HISTORIES, "--live", "north=slurm"), 2, "north has --history too"),
        (("--live", "north=lsf"), 2, "must be one of slurm, pbs, sge"),
        ((*HISTORIES, "--target", "0.9"), 2, "belong together"),
        ((*HISTORIES, "--strategies", "best"), 2, "there is no strategy 'best'"),
        ((*HISTORIES, "--days", "0"), 2, "--days must be more than 0"),
        ((*HISTORIES, "--per-node", "north=few"), 2, "must be a whole number of processors"),
        ((*HISTORIES, "--shortest", "9999999"), 2, "--shortest and --longest"),
        ((*HISTORIES, "--out", "c.toml"), 2, "exists already; nothing was changed"),
        ((*HISTORIES, "--plot", "c.toml"), 2, "--plot c.toml: must end in .png; nothing was changed"),
    ],
)
def test_bad_input_is_one_line(site: Path, capsys: Any, args: tuple[str, ...], code: int, says: str) -> None:
    assert main(["plan", "c.toml", *args]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert Path("c.toml").read_text() == CONFIG


def test_toml_is_written_as_it_is_read() -> None:
    import tomllib

    tree = {
        "run": {"name": "a", "targets": [0.5, 0.25], "warm_up": False},
        "strategy": {"fedavg": {"steps": {"north": 3, "so.uth": 4}}, "jit": {}},
        "facility": [{"name": 'tab\t"quote"', "queue": {"kind": "fixed", "delay": 1e-07}}, {"name": "ü\x7f"}],
    }
    assert tomllib.loads("\n".join(_table(tree, {("run", "name"): "why"}))) == tree
    assert toml_key("so.uth") == '"so.uth"'


def test_plan_over_real_traces(in_tmp: Path, capsys: Any) -> None:
    try:
        find("traces/anl-theta-2021.csv.gz"), find("traces/kth-sp2-1996.csv.gz")
    except DataError:
        pytest.skip("the traces are not here: set FEDQUEUE_DATA")
    Path("c.toml").write_text(CONFIG)
    args = ("--history", "north=anl-theta-2021.csv.gz", "--history", "south=kth-sp2-1996.csv.gz", "--keep-nodes")
    found = planned(capsys, *args, "--out", "plan.toml")
    assert found["recommendation"]["strategy"] == "jit"
    history = found["recommendation"]["facilities"]["south"]["history"]
    assert history["jobs"] >= 50
    assert history["requested_about"] is not None
    assert 0 < found["price"]["fedavg_cost"] < 1
    assert load(Path("plan.toml")).run.strategy == "jit"
