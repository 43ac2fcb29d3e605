"""The job that trains a config's task, which `fedqueue run` starts unless it is given a command, and what it is told.

    python -m fedqueue.training.job TASK.json

It is written as a user's own script would be: all it has of FedQueue is `participate` and its task. No torch before it
trains: the config reads its table `[task]` here, everywhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from fedqueue.protocol.codec import at_least, more_than, one_of, read

if TYPE_CHECKING:
    from fedqueue.training.tasks import Task
    from fedqueue.worker.participate import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """A task and how its data is shared out. The learning rate is not here: it comes with each assignment.

    Example: `TaskSettings(name="mnist", dirichlet_alpha=0.1)`.
    """

    name: str = "digits"
    """"digits", "mnist", "causal-lm", what installed packages add, or a function of your own that returns a `Workload`,
    as "module:function"."""
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    """How the training samples are split over the facilities: skewed by label, or evenly at random."""
    dirichlet_alpha: float = 0.5
    """Concentration of the split by label: 0.1 is very skewed, 100 nearly even."""
    batch_size: int = 64
    """Samples a step; a facility with fewer samples uses all of them in each step."""
    optimizer: Literal["adam", "sgd", "adamw"] = "adam"
    """Fresh for every job."""
    momentum: float = 0.0
    """Of "sgd"."""
    weight_decay: float = 0.0
    proximal: float = 0.0
    """mu of FedProx: mu/2 * |w - w_base|^2 is added to the loss, so that a job stays near the model it began with."""
    train_samples: int | None = None
    """Use only so many training samples, chosen by the run's seed; None: all."""
    test_samples: int | None = None
    """The same for the test samples."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    """Processor threads of the training; another number may change the last bits of a result."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for a function of your own, or what "causal-lm" trains (`CausalSettings`)."""

    def __post_init__(self) -> None:
        one_of(self, "partition", ("dirichlet", "iid"))
        one_of(self, "optimizer", ("adam", "sgd", "adamw"))
        one_of(self, "device", ("cpu", "cuda"))
        if not self.name:
            raise ValueError("name must be 'digits', 'mnist' or 'module:function', found ''")
        more_than(self, 0, "dirichlet_alpha")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, found {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum must be 0 with optimizer {self.optimizer!r}, found {self.momentum}")
        at_least(self, 0, "weight_decay", "proximal")
        at_least(self, 1, "batch_size", "threads", "train_samples", "test_samples")


@dataclass(frozen=True, kw_only=True)
class StoredTask:
    """task.json of a run folder: what a job or a scorer has to know of the run's config."""

    task: TaskSettings
    seed: int
    facilities: list[str]
    steps_per_second: dict[str, float]
    """How fast facilities pretend to be where nothing is trained."""
    folder: str
    """Where a task of the user's own may lie."""

    @classmethod
    def load(cls, path: Path) -> StoredTask:
        stored = read(cls, json.loads(path.read_text(encoding="utf-8")), path.name)
        if stored.folder not in sys.path:
            sys.path.insert(0, stored.folder)
        return stored


A_PRIME: Final = 998_244_353


def luck(facility: int, number: int, part: int) -> int:
    """Selects the random numbers of a job's part: the j-th job of a facility draws the same batches everywhere."""
    return facility * 1_000_003 + number + part * A_PRIME


def main(arguments: list[str]) -> int:
    from fedqueue.worker.participate import participate

    stored = StoredTask.load(Path(arguments[0]))
    with participate() as work:
        if stored.task.name == "timing":
            for part in work.parts():
                _pretend(stored.steps_per_second.get(work.facility, 10.0), part)
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
    for part in work.parts():
        train_part(task, part, index)


def train_part(task: Task, part: Work, facility: int = 0) -> None:
    """Trains a task for one part of a job and hands it in; `facility` is the place of its data in the task's.

    Also for scripts of your own: examples/llama_lora.py is one.
    """
    model = part.model()
    trained = task.train(
        facility=facility,
        model={**model, **part.moments()},
        steps=part.assigned_steps,
        learning_rate=part.learning_rate,
        key=luck(facility, int(part.job_id.rpartition("/")[2]), part.part),
        during=part.steps(),
        change=part.change(),
    )
    part.count(samples=trained.samples)
    part.submit(trained.model, metrics={"loss": trained.loss})


def _pretend(steps_per_second: float, work: Work) -> None:
    """The task that trains nothing: sleeps through its steps, and moves the model by a little. No torch."""
    from safetensors.numpy import load_file

    for _ in work.steps():
        time.sleep(1 / steps_per_second)
    tensors = load_file(work.model_path)
    work.submit({name: values + 0.01 for name, values in tensors.items()})


if __name__ == "__main__":
    from fedqueue.training import job  # as others import it, so that no class is there twice

    raise SystemExit(job.main(sys.argv[1:]))
