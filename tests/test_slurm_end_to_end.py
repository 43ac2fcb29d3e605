"""Real training over two real Slurm clusters whose nodes others use too, and the simulator's word about each run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.staying import run_large
from fedqueue.cli import main
from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.runs import replay
from tests.conftest import ONE_A_ROUND
from tests.slurm import Cluster, clusters
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(500)

CONFIG = """
[run]
name = "two-clusters"
rounds = 100  # it is stopped once it has shown what it should
round_length = 14.0
learning_rate = 0.003

[task]
name = "digits"

[strategy.fedqueue]
margin = 1.0

[strategy.fedavg]
steps = 200

[worker]
poll_seconds = 0.3

[[facility]]
name = "north"
scheduler = {{ kind = "slurm", conf = "{north}" }}

[[facility]]
name = "south"
scheduler = {{ kind = "slurm", conf = "{south}" }}
"""

SCORE = 0.8

ONCE = ["run.strategy=jit", *(f"strategy.jit.{key}={value}" for key, value in ONE_A_ROUND.items())]

RUNS = {
    "fedqueue": ["run.strategy=fedqueue"],
    "fedavg": ["run.strategy=fedavg"],
    "jit-independent": [*ONCE, "strategy.jit.pipeline=independent"],
    "jit-chain": [*ONCE, "strategy.jit.pipeline=chain"],
    "jit-stays": ["run.strategy=jit", "strategy.jit.stay=60.0", "strategy.jit.between=train"],
}


@pytest.fixture(scope="module")
def two() -> Iterator[list[Cluster]]:
    with clusters(2) as found:
        yield found


@contextmanager
def others_at_work(sites: list[Cluster]) -> Iterator[None]:
    """Jobs of other users hold all nodes until a job of ours has waited for two seconds. Then they take three seconds
    each on two nodes, as long as the test goes on."""
    over = threading.Event()

    def keep_busy(cluster: Cluster, first: list[str]) -> None:
        while not over.wait(0.2) and not cluster.waiting():
            pass
        over.wait(2.0)
        cluster.call("scancel", *first)
        while not over.is_set():
            cluster.load(jobs=2, seconds=3.0)
            over.wait(4.0)

    firsts = [cluster.load(jobs=len(cluster.nodes), seconds=1800.0) for cluster in sites]
    for cluster in sites:
        wait_for(lambda: set(cluster.node_states()) == {"allocated"}, "others' jobs hold the nodes", cluster.log)  # noqa: B023
    threads = [threading.Thread(target=keep_busy, args=pair) for pair in zip(sites, firsts, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for cluster in sites:
            cluster.clear()


@pytest.fixture(scope="module")
def done() -> dict[str, Path]:
    """Folders of the runs that reached the score, by name."""
    return {}


@pytest.mark.parametrize("name", RUNS)
def test_digits_over_two_slurm_clusters(
    name: str, two: list[Cluster], tmp_path: Path, capsys: pytest.CaptureFixture[str], done: dict[str, Path]
) -> None:
    config = tmp_path / "two.toml"
    config.write_text(CONFIG.format(north=two[0].settings().conf, south=two[1].settings().conf))
    for attempt in range(2):
        folder = tmp_path / f"run-{attempt}"
        with others_at_work(two):
            summary = run(config, folder, RUNS[name])
        check(name, summary, folder)
        done[name] = folder
        if main(["retrace", str(folder)]) == 0:
            return
        # An update that came within a blink of a cutoff may go either way in virtual time: then once more.
        assert attempt == 0, capsys.readouterr().out
        assert came_close_to_a_cutoff(folder), capsys.readouterr().out


def test_a_job_that_stays_waits_less_for_the_same_score(done: dict[str, Path]) -> None:
    """Seconds depend on the machine and on others' jobs: they are only printed."""
    names = ("jit-stays", "jit-independent", "fedavg")
    if not set(names) <= set(done):
        pytest.skip("the runs that are compared were not done")
    found = {name: what_it_took(done[name]) for name in names}
    for name, (seconds, jobs, waited) in found.items():
        print(f"{name}: {seconds:.1f} s to a score of {SCORE}, {jobs} jobs that waited for {waited:.1f} s")
    (_, jobs, waited), *others = found.values()
    assert all(jobs < other_jobs and waited < other_waited for _, other_jobs, other_waited in others), found


def what_it_took(folder: Path) -> tuple[float, int, float]:
    """Seconds to the score, jobs, and seconds that they waited in queues."""
    with LedgerReader(folder / FILE) as ledger:
        (reached,) = ledger.rows(f"SELECT min(scored_at) AS at FROM scores WHERE score > {SCORE}")
        (waits,) = ledger.rows("SELECT count(DISTINCT job) AS jobs, sum(admission_delay) AS waited FROM incarnations")
    return reached["at"], waits["jobs"], waits["waited"]


def test_nodes_hardly_idle_between_parts_and_updates_travel_while_the_job_trains(
    two: list[Cluster], tmp_path: Path
) -> None:
    """benchmarks/staying.py does the same with a model of 200 MB, and has a goal in per cent of the time held. Here
    others may need the processor: then models take longer to come, and to turn to training on takes longer too."""
    found = run_large(tmp_path / "large", two, megabytes=20, rounds=6, round_length=8.0)
    assert found.parts >= 4
    assert found.idle < found.waited / 2, found
    assert found.idle_told == pytest.approx(found.idle, abs=0.1 * found.parts), "the ledger says what the jobs saw"
    assert found.arrived_meanwhile >= found.parts / 2, found


def came_close_to_a_cutoff(folder: Path) -> bool:
    with LedgerReader(folder / FILE) as ledger:
        cutoffs = [row["at"] for row in ledger.rows("SELECT at FROM events WHERE kind = 'TimerFired'")]
        arrivals = [row["at"] for row in ledger.rows("SELECT at FROM events WHERE kind = 'UpdateArrived'")]
    return any(abs(arrival - cutoff) < 0.2 for arrival in arrivals for cutoff in cutoffs)


def check(name: str, summary: dict[str, Any], folder: Path) -> None:
    assert summary["rounds"] >= 4
    assert summary["score"]["final"] > SCORE, summary
    assert summary["jobs"]["failed"] == 0, summary
    with LedgerReader(folder / FILE) as ledger:
        waits = [row["admission_delay"] for row in ledger.rows("SELECT admission_delay FROM incarnations")]
        assert max(waits) >= 1.0, "nobody had to wait: this shows nothing"
        fates = ledger.rows("SELECT job, attempt, part, count(*) AS times FROM updates GROUP BY job, attempt, part")
        assert fates
        assert all(row["times"] == 1 for row in fates)
        if name == "jit-stays":
            assert max(row["part"] for row in fates) >= 2, "no job stayed"
            (failed,) = ledger.rows("SELECT count(*) AS n FROM events WHERE kind IN ('JobFailed', 'UpdateRejected')")
            assert failed["n"] == 0
        else:
            assert {row["part"] for row in fates} == {0}, "one job a round"
        if name == "jit-chain":
            orders = ledger.rows(
                "SELECT json_extract(body, '$.order.after') AS after FROM commands WHERE kind = 'SubmitJob'"
            )
            assert any(row["after"] is not None for row in orders), "no job was chained"
    replay(folder)


def run(config: Path, folder: Path, changes: list[str]) -> dict[str, Any]:
    """Until it has made four models and the newest score is good: how many that takes depends on the machine."""
    fedqueue = [sys.executable, "-m", "fedqueue"]
    argv = [*fedqueue, "run", str(config), "--json", "--no-plots", "--out", str(folder), "--set", *changes]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not is_good(scored(folder)):
            made = len(scored(folder))
            wait_for(lambda: process.poll() is not None or len(scored(folder)) > made, "a further score", every=0.5)  # noqa: B023
        subprocess.run([*fedqueue, "stop", str(folder)], capture_output=True, timeout=LONGEST)
        said, error = process.communicate(timeout=LONGEST)
    finally:
        process.terminate()  # its agents end with it
        process.wait(LONGEST)
    assert process.returncode == 0, error
    summary: dict[str, Any] = json.loads(said)
    return summary


def scored(folder: Path) -> dict[int, float]:
    """Models and their scores."""
    try:
        with LedgerReader(folder / FILE) as ledger:
            return {row["version"]: row["score"] for row in ledger.rows("SELECT version, score FROM scores")}
    except RunFolderError:  # it has only begun to be made
        return {}


def is_good(scores: dict[int, float]) -> bool:
    """The model before the first has a score too."""
    return bool(scores) and max(scores) >= 4 and scores[max(scores)] > SCORE
