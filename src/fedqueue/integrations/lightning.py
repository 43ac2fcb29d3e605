"""For `lightning.pytorch.Trainer`, or `pytorch_lightning` as it was called. Part of the worker: Python 3.9.

with fedqueue.participate() as work:
    for part in work.parts():
        trainer = Trainer(max_steps=part.assigned_steps, callbacks=[FedQueueCallback(part)])
        trainer.fit(module, data)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedqueue.worker.job_folder import is_torch, load_declared
from fedqueue.worker.participate import Work

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback


class FedQueueCallback(Callback):
    """Starts from the run's model and rate, stops when told, hands in at the end.

    The declared tensors must be among those of the state dict of the Lightning module, or of `module`, a part of it.
    """

    def __init__(self, work: Work, module: Any = None) -> None:
        self.work = work
        self._module = module
        self._steps = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        load_declared(self._part(pl_module), self.work.model())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.work.listen()  # Lightning has taken SIGTERM for itself, and would end without handing in
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = self.work.learning_rate
        if len(trainer.optimizers) == 1:
            self.work.prepare(trainer.optimizers[0], self._part(pl_module))
        for config in trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [self.work.learning_rate for _ in config.scheduler.base_lrs]
        self._steps = trainer.global_step
        self._before_step(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.work.count(samples=_samples_in(batch))
        if trainer.global_step > self._steps:  # else it accumulates gradients: not a step yet
            self._steps = trainer.global_step
            self._before_step(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.work.drop_step()  # allowed, but the Trainer had reached an end of its own
        self.work.submit(self._part(pl_module).state_dict(), metrics=trainer.callback_metrics)

    def _part(self, pl_module: Any) -> Any:
        return pl_module if self._module is None else self._module

    def _before_step(self, trainer: Any) -> None:
        if not self.work.go_on():
            trainer.should_stop = True


def _samples_in(batch: Any) -> int:
    """The first dimension of the first tensor in it."""
    if is_torch(batch):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((count for count in map(_samples_in, parts) if count), 0)
