"""The job that trains a config's task: what `fedqueue run` starts unless it is given a command.

    python -m fedqueue.training.job TASK.json

It is written as a user's own script would be: all it has of FedQueue is `participate` and its task.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import fedqueue
from fedqueue.training.settings import StoredTask

if TYPE_CHECKING:
    from fedqueue.worker.participate import Work


def main(arguments: list[str]) -> int:
    stored = StoredTask.load(Path(arguments[0]))
    with fedqueue.participate() as work:
        if stored.task.name == "timing":
            _pretend(stored.steps_per_second.get(work.facility, 10.0), work)
        else:
            _train(stored, work)
    return 0


def _train(stored: StoredTask, work: Work) -> None:
    from fedqueue.training.tasks import make_task

    index = stored.facilities.index(work.facility)
    task = make_task(stored.task, len(stored.facilities), stored.seed)
    if work.purpose == "evaluate":
        work.submit(metrics=task.score(work.model()))
        return
    trained = task.train(
        facility=index,
        model=work.model(),
        steps=work.assigned_steps,
        learning_rate=work.learning_rate,
        key=index * 1_000_003 + int(work.job_id.rpartition("/")[2]),
        during=work.steps(),
    )
    work.count(samples=trained.samples)
    work.submit(trained.model, metrics={"loss": trained.loss})


def _pretend(steps_per_second: float, work: Work) -> None:
    """The task that trains nothing: sleeps through its steps, and moves the model by a little. No torch."""
    from safetensors.numpy import load_file

    for _ in work.steps():
        time.sleep(1 / steps_per_second)
    tensors = load_file(work.model_path)
    work.submit({name: values + 0.01 for name, values in tensors.items()})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
