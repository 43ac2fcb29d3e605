"""Several processes with DistributedDataParallel; the launcher says which is which.

    python ddp.py --first first.safetensors
    torchrun --nproc-per-node 2 ddp.py
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d \\
        --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$FIRST_NODE:29500 ddp.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fedqueue


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def make_batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for the data of this site; each rank draws its own."""
    inputs = torch.randn(size, 20)
    return inputs, (inputs[:, 0] > 0).long()


def main() -> None:
    model = make_model()
    if sys.argv[1:2] == ["--first"]:
        save_file(model.state_dict(), sys.argv[2])
        return

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")  # address, port, rank and size are in the environment
    torch.manual_seed(dist.get_rank())

    with fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 1e-3}) as work:
        if cuda:
            model.cuda()
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(replica.parameters())
        for part in work.parts():  # all ranks go through the same
            model.load_state_dict(part.model(), strict=False)  # read by the first rank, sent to the others
            for group in optimizer.param_groups:
                group["lr"] = part.learning_rate
            loss = torch.zeros(())
            for _ in part.steps():  # all ranks end after the same step
                inputs, targets = make_batch()
                if cuda:
                    inputs, targets = inputs.cuda(), targets.cuda()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(replica(inputs), targets)
                loss.backward()
                optimizer.step()
                part.count(samples=len(inputs))
            part.submit(replica.state_dict(), metrics={"loss": loss.item()})  # the first rank's
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
