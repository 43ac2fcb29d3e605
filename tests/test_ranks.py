"""Several processes in one job: one binds, all stop together, one hands in."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from fedqueue.worker.job_folder import Ranks, count_nodes
from fedqueue.worker.participate import ParticipateError, Work, participate
from tests.jobs import (
    check_ended,
    enter,
    make_job,
    result_of,
    save,
    standing_of,
    torchrun,
    update_of,
)

pytestmark = pytest.mark.waits(8)

DDP_BODY = """
import time, torch, torch.distributed as dist, fedqueue
with fedqueue.participate() as work:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(work.model())
    assert float(model.weight.detach().sum()) == 6.0
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=work.learning_rate)
    done = 0
    for step in work.steps():
        optimizer.zero_grad()
        ddp(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        work.count(samples=4)
        time.sleep(0.02 * (1 + rank))
        done += 1
    torch.save({"done": done, "weight": model.weight.detach()}, f"rank-{rank}.pt")
    work.submit(ddp.state_dict())
dist.destroy_process_group()
"""


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    weights = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
    return save(tmp_path / "models" / "linear.safetensors", **weights)


def test_ranks_stop_together_at_the_deadline_and_hand_in_once(tmp_path: Path, linear: Path) -> None:
    import torch

    job = torchrun(tmp_path, make_job(tmp_path, linear, steps=10**9, train_budget=0.8), DDP_BODY)
    check_ended(job)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert first["done"] == second["done"] > 0
    assert torch.equal(first["weight"], second["weight"])
    result = result_of(tmp_path)
    assert (result["stopped_by"], result["steps_done"]) == ("deadline", first["done"])
    assert result["samples"] == 2 * 4 * first["done"]
    assert np.array_equal(update_of(tmp_path)["weight"], first["weight"].numpy())


def test_only_the_first_rank_binds(tmp_path: Path, linear: Path) -> None:
    import torch

    standing = standing_of(linear, next_cutoff=time.time() + 600, round_length=600.0, steps_per_second=0.005)
    job = torchrun(tmp_path, make_job(tmp_path, standing=standing), DDP_BODY)
    check_ended(job)
    bound = json.loads((tmp_path / "jobs/3/attempt-0/bound.json").read_text())
    assert torch.load(tmp_path / "rank-1.pt")["done"] == bound["steps"] == result_of(tmp_path)["steps_done"]


def test_several_processes_without_a_process_group_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, {**make_job(tmp_path), "WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(ParticipateError, match="2 processes but no process group"), participate() as work:
        for _ in work.steps():
            pass


def test_work_is_what_participate_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with participate() as work:
        assert isinstance(work, Work)


def test_nodes_are_counted_as_the_scheduler_says(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    assert count_nodes({"PBS_NODEFILE": str(tmp_path / "nodes")}) == 2
    assert count_nodes({"PBS_NODEFILE": str(tmp_path / "none")}) == 1
    assert count_nodes({}) == 1


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, (1, 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (1, 0)),  # a batch script, not a step
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (4, 3)),
        ({"WORLD_SIZE": "8", "RANK": "5", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (8, 5)),
        ({"WORLD_SIZE": "8", "SLURM_PROCID": "1"}, (8, 1)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, (2, 1)),
    ],
)
def test_rank_comes_from_the_launcher(environment: dict[str, str], ranks: tuple[int, int]) -> None:
    assert Ranks.of(environment) == ranks


STAYING_BODY = """
import json, os, sys, torch, torch.distributed as dist, fedqueue
home, second = sys.argv[1:3]

def lie(**changes):  # as the agent does, while the job trains
    standing = {**json.load(open(f"{home}/standing.json")), **changes}
    json.dump(standing, open(f"{home}/beside", "w"))
    os.replace(f"{home}/beside", f"{home}/standing.json")

seen = []
with fedqueue.participate() as work:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for part in work.parts():
        state, steps = part.model(), 0
        began = float(state["weight"][0, 0])
        for step in part.steps():
            steps += 1
            state = {name: value + 1 for name, value in state.items()}
            part.count(samples=1)
            if rank == 0 and part.is_ahead and steps == 3:
                lie(version=4, number=8, model=second)
            if rank == 0 and part.part == 1 and not part.is_ahead:
                lie(from_job=4, version=5, number=9)
            if not part.is_ahead and steps == 2:
                break
        seen.append([part.part, part.is_ahead, began, steps])
        part.submit(state if rank == 0 else None)
json.dump(seen, open(f"{home}/seen-{rank}.json", "w"))
dist.destroy_process_group()
"""


def test_ranks_go_from_part_to_part_together(tmp_path: Path, linear: Path) -> None:
    weights = {"weight": np.full((2, 3), 100.0, np.float32), "bias": np.zeros(2, np.float32)}
    second = save(tmp_path / "models" / "second.safetensors", **weights)
    standing = standing_of(linear, ahead=True, next_cutoff=time.time() + 100.0, round_length=1000.0)
    environment = make_job(tmp_path, standing=standing, stay=1000.0, wall_seconds=1000.0)
    job = torchrun(tmp_path, environment, STAYING_BODY.replace("sys.argv[1:3]", repr([str(tmp_path), str(second)])))
    check_ended(job)
    ranks = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    ahead = ranks[0][1][3]  # until it has looked whether the next model is there
    assert ahead >= 3
    assert ranks[0] == ranks[1] == [[0, False, 1.0, 2], [1, True, 3.0, ahead], [1, False, 100.0 + ahead, 2]]
    attempt = tmp_path / "jobs/3/attempt-0"
    result = json.loads((attempt / "part-1/result.json").read_text())
    assert (result["steps_done"], result["ahead"]) == (ahead + 2, ahead)
    assert json.loads((attempt / "left.json").read_text()) == {"parts": 2}
