"""Plain PyTorch: one process, one loop.

python plain.py --first first.safetensors    write the first model of a run
python plain.py                              take part, or try it here with that model
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import nn

import fedqueue


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def make_batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for the data of this site."""
    inputs = torch.randn(size, 20)
    return inputs, (inputs[:, 0] > 0).long()


def main() -> None:
    model = make_model()
    if sys.argv[1:2] == ["--first"]:
        save_file(model.state_dict(), sys.argv[2])
        return

    with fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 1e-3}) as work:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters())
        memory = work.state_dir / "optimizer.pt"  # of this site alone: it never leaves
        if memory.exists():
            optimizer.load_state_dict(torch.load(memory, map_location=device, weights_only=True))

        for part in work.parts():  # once, or again and again if the job stays: model and optimizer live on
            model.load_state_dict(part.model(), strict=False)
            for group in optimizer.param_groups:
                group["lr"] = part.learning_rate
            part.prepare(optimizer, model)  # goes on from what all facilities learned, if the run shares that
            loss = torch.zeros(())
            for _ in part.steps():  # ends at the step budget, the deadline or a signal
                inputs, targets = make_batch()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
                part.count(samples=len(inputs))
            part.submit(model.state_dict(), metrics={"loss": loss.item()})

        torch.save(optimizer.state_dict(), memory.with_suffix(".new"))
        memory.with_suffix(".new").replace(memory)


if __name__ == "__main__":
    main()
