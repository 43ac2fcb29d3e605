"""The job that trains a config's task: what `fedqueue run` starts unless it is given a command.

    python -m fedqueue.training.worker CONFIG.json FACILITY

It is written as a user's own script would be: all it has of FedQueue is `participate`, its config and its task.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedqueue
from fedqueue.config import Config, parse
from fedqueue.messages import sequence_of

if TYPE_CHECKING:
    from fedqueue.training.participate import Work


def main(arguments: list[str]) -> int:
    config = load_stored(Path(arguments[0]))
    with fedqueue.participate() as work:
        if config.task.name == "timing":
            _pretend(config, work)
        else:
            _train(config, work)
    return 0


def load_stored(path: Path) -> Config:
    """The config of a run, as its folder keeps it."""
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    folder = Path(stored["folder"])
    if str(folder) not in sys.path:  # a task of the user's own may lie beside the config
        sys.path.insert(0, str(folder))
    return parse(stored["tree"], where=str(path), folder=folder)


def _train(config: Config, work: Work) -> None:
    from fedqueue.training.tasks import make_task

    names = [facility.name for facility in config.facility]
    index = names.index(work.facility)
    task = make_task(config.task, len(names), config.run.seed)
    if work.purpose == "evaluate":
        work.submit(metrics=task.score(work.model()))
        return
    trained = task.train(
        facility=index,
        model=work.model(),
        steps=work.assigned_steps,
        learning_rate=work.learning_rate,
        key=index * 1_000_003 + sequence_of(work.job_id),
        during=work.steps(),
    )
    work.count(samples=trained.samples)
    work.submit(trained.model, metrics={"loss": trained.loss})


def _pretend(config: Config, work: Work) -> None:
    """The task that trains nothing: sleeps through its steps, and moves the model by a little. No torch."""
    from safetensors.numpy import load_file

    speed = next(f.steps_per_second for f in config.facility if f.name == work.facility) or 10.0
    for _ in work.steps():
        time.sleep(1 / speed)
    tensors = load_file(work.model_path)
    work.submit({name: values + 0.01 for name, values in tensors.items()})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
