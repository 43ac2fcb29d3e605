"""For `transformers.Trainer`. Part of the worker: Python 3.9.

with fedqueue.participate() as work:
    for part in work.parts():
        arguments = TrainingArguments("out", max_steps=part.assigned_steps, learning_rate=part.learning_rate)
        Trainer(model, arguments, train_dataset=data, callbacks=[FedQueueCallback(part)]).train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from fedqueue.worker.job_folder import load_declared
from fedqueue.worker.participate import Work


class FedQueueCallback(TrainerCallback):
    """Starts from the run's model and rate, stops when told, hands in at the end.

    The declared tensors must be among those of the model's state dict, so adapters alone will do.
    """

    def __init__(self, work: Work) -> None:
        self.work = work

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        load_declared(kwargs["model"], self.work.model())
        scheduler = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])  # accelerate may wrap it
        groups, rate = kwargs["optimizer"].param_groups, self.work.learning_rate
        bases = list(getattr(scheduler, "base_lrs", None) or [group["lr"] for group in groups])
        for place, group in enumerate(groups):
            group["lr"] = rate * (group["lr"] / bases[place] if bases[place] else 1.0)  # as warm as the schedule has it
        if hasattr(scheduler, "base_lrs"):  # the later rates of a schedule are made from the first
            scheduler.base_lrs = [rate for _ in bases]
        optimizer = kwargs["optimizer"]
        self.work.prepare(getattr(optimizer, "optimizer", optimizer), kwargs["model"])
        self._before_step(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.work.count(samples=args.train_batch_size * args.gradient_accumulation_steps)
        self._before_step(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.work.drop_step()  # allowed, but the Trainer had reached an end of its own
        metrics: dict[str, float] = {}
        for row in state.log_history:  # the newest of each
            metrics.update({name: row[name] for name in row if "loss" in name or name.startswith("eval_")})
        self.work.submit(kwargs["model"].state_dict(), metrics=metrics)

    def _before_step(self, control: Any) -> None:
        if not self.work.go_on():
            control.should_training_stop = True
