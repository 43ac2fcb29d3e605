"""A job on two nodes of a real Slurm cluster: examples/ddp.py, started by srun and torchrun, connected by gloo."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from os import kill
from pathlib import Path

import pytest

from fedqueue.ledger import LedgerReader
from tests.faults.harness import free_port
from tests.faults.ledger_checks import Story, check_counts, check_end, check_fates
from tests.slurm import Cluster, clusters, processes_with
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(90)

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "ddp.py"
PAGE = ROOT / "docs" / "operating.md"
BUSY_SECONDS = 4.0  # of processor time with the handler in place: by then it trains

CONFIG = """
[run]
name = "ddp"
strategy = "fedavg"
rounds = 2
round_length = 20.0

[task]
name = "timing"

[model]
initial = "first.safetensors"

[evaluation]
where = "nowhere"

[strategy.fedavg]
steps = 1000000    # more than it can do: it is told to stop

[worker]
poll_seconds = 0.5
command = '''
{command}
exit 3    # a result that is in counts, whatever the job's exit code: gloo is known to abort at exit
'''

[[facility]]
name = "north"
nodes = 2
scheduler = {{ kind = "slurm", conf = "{conf}", nodes = 2, max_wall_seconds = 600.0 }}
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with clusters(1) as (found,):
        yield found


def test_two_nodes_train_one_model_and_stop_together(cluster: Cluster, tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, "--first", tmp_path / "first.safetensors"], check=True, timeout=600)
    config = tmp_path / "ddp.toml"
    config.write_text(CONFIG.format(command=command_of_the_page(), conf=cluster.conf))
    folder = tmp_path / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--json", "--no-plots", "--out", str(folder)]
    home = folder / "facilities" / "north"
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as run:
        try:
            for job in (0, 1):
                kill(training(home / "jobs" / str(job), rank=1), signal.SIGUSR1)
            assert run.wait(LONGEST) == 0
        finally:
            run.terminate()

    story = Story(folder)
    check_end(story, rounds=2)
    check_counts(story)
    check_fates(story)
    assert list(story.receipts) == [("north/0", 0, 0), ("north/1", 0, 0)]
    assert [fate for _, fate in story.fates] == ["aggregated", "aggregated"]
    for receipt in story.receipts.values():
        assert (receipt.nodes, receipt.device) == (2, "cpu")
        assert 0 < receipt.steps_done < 1_000_000
        assert receipt.samples == 2 * 32 * receipt.steps_done, "the ranks did not end after the same step"
    for job in (0, 1):
        (attempt,) = (home / "jobs" / str(job)).glob("attempt-*")
        assert json.loads((attempt / "result.json").read_text())["stopped_by"] == "signal"
    with LedgerReader(folder / "ledger.sqlite") as ledger:
        assert len(ledger.rows("SELECT * FROM incarnations")) == 2
    log = cluster.folder / "log" / "jobcomp.log"  # the run may end before the last job has left its nodes
    wait_for(lambda: log.read_text().count(" NodeCnt=2 ") == 2, "the end of both jobs", cluster.log)
    cluster.wait_until_ready()


def test_two_nodes_stay_and_hand_in_part_after_part(cluster: Cluster, tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, "--first", tmp_path / "first.safetensors"], check=True, timeout=600)
    config = tmp_path / "ddp.toml"
    text = CONFIG.format(command=command_of_the_page(), conf=cluster.conf).replace("exit 3 ", "exit 0 ")
    config.write_text(text.replace("steps = 1000000", "stay = 300.0\nsteps = 50").replace("rounds = 2", "rounds = 4"))
    folder = tmp_path / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--json", "--no-plots", "--out", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    story = Story(folder)
    check_end(story, rounds=4)
    check_counts(story)
    check_fates(story)
    assert list(story.receipts) == [("north/0", 0, part) for part in range(4)]
    assert {fate for _, fate in story.fates} == {"aggregated"}
    for receipt in story.receipts.values():
        assert (receipt.nodes, receipt.steps_done, receipt.samples) == (2, 50, 2 * 32 * 50)
    log = cluster.folder / "log" / "jobcomp.log"
    wait_for(lambda: log.read_text().count(" NodeCnt=2 ") == 1, "the end of the job", cluster.log)
    cluster.wait_until_ready()


def command_of_the_page() -> str:
    """What docs/operating.md has agents run, with what is different here: both nodes are this machine."""
    (agent,) = re.findall(
        r"^```toml\n# agent.toml with torchrun\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    command = str(tomllib.loads(agent)["agent"]["command"])
    different = {
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        "--nproc-per-node=4": "--nproc-per-node=1",
        "$FIRST_NODE:29500": f"127.0.0.1:{free_port()}",
        "ddp.py": str(EXAMPLE),
    }
    for said, here in different.items():
        assert said in command, f"the page's command does not say {said}"
        command = command.replace(said, here)
    return command


def training(job: Path, rank: int) -> int:
    """The process of this rank, once it is in its loop."""
    began: dict[int, float] = {}
    found: list[int] = []

    def in_its_loop() -> bool:
        for pid in set(processes_with(f"FEDQUEUE_JOB={job}")) & set(processes_with(f"RANK={rank}")):
            with suppress(OSError):
                if handles(pid, signal.SIGUSR1):
                    used = processor_seconds(pid)
                    if used - began.setdefault(pid, used) >= BUSY_SECONDS:
                        found.append(pid)
        return bool(found)

    def said() -> str:
        output = job / "output.txt"
        return output.read_text() if output.exists() else "it printed nothing"

    wait_for(in_its_loop, f"{job.name} trains", said)
    return found[0]


def handles(pid: int, number: int) -> bool:
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(mask, 16) >> (number - 1) & 1)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0
