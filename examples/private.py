"""Training that protects each record of a site: DP-SGD by Opacus, with an account that the agent keeps.

    python private.py --first first.safetensors
    python private.py                                (tries it here, without a guarantee that anybody adds up)

In the site's agent.toml; epsilon, of all runs together, is on record with each update and in `fedqueue report`:

    [privacy]
    unit = "records"
    clip = 1.0
    noise = 1.0
    delta = 1e-5
    epsilon = 8.0

With `unit = "update"` a script needs nothing of this: what any script hands in is clipped, and gets noise.
"""

from __future__ import annotations

import sys

import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from safetensors.torch import save_file
from torch import nn

import fedqueue

RECORDS, BATCH = 4000, 200


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2))


def make_records() -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for the data of this site."""
    inputs = torch.randn(RECORDS, 20, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long()


def main() -> None:
    model = make_model()
    if sys.argv[1:2] == ["--first"]:
        save_file(model.state_dict(), sys.argv[2])
        return

    inputs, targets = make_records()
    rate = BATCH / RECORDS
    with fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 0.5}) as work:
        clip, noise = (work.privacy.clip, work.privacy.noise) if work.privacy is not None else (1.0, 1.0)
        model.load_state_dict(work.model())
        watched = GradSampleModule(model)  # keeps a gradient for each record
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=work.learning_rate),
            noise_multiplier=noise,
            max_grad_norm=clip,
            expected_batch_size=BATCH,
        )
        steps = 0
        for _ in work.steps():
            batch = torch.rand(RECORDS) < rate  # each record by its own chance: what the account relies on
            optimizer.zero_grad()
            nn.functional.cross_entropy(watched(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            steps += 1
        work.account(noise=noise, rate=rate, steps=steps)
        work.submit(model.state_dict())


if __name__ == "__main__":
    main()
