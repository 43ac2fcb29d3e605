"""A LightningModule. The callback loads the model, stops in time and hands in.

python lightning_module.py --first first.safetensors    write the first model of a run
python lightning_module.py                              take part, or try it here with that model
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedqueue
from fedqueue.integrations.lightning import FedQueueCallback


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.network(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())  # the rate comes with the work


def make_data(rows: int = 1024) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Stands in for the data of this site."""
    inputs = torch.randn(rows, 20)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=32, shuffle=True)


def main() -> None:
    module = Classifier()
    if sys.argv[1:2] == ["--first"]:
        save_file(module.state_dict(), sys.argv[2])
        return

    with fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 1e-3}) as work:
        for part in work.parts():  # once, or again and again if the job stays
            trainer = Trainer(
                max_steps=part.assigned_steps,
                max_epochs=-1,
                accelerator="auto",
                callbacks=[FedQueueCallback(part)],
                default_root_dir=part.state_dir,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
            )
            trainer.fit(module, make_data())


if __name__ == "__main__":
    main()
