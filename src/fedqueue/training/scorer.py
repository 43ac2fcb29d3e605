"""A process beside the coordinator that knows the task: it makes the first model, and scores new ones.

    python -m fedqueue.training.scorer TASK.json            reads {"version", "model"} lines, writes {"version", ...}
    python -m fedqueue.training.scorer TASK.json FIRST      writes the first model there, and says the data's sizes

Whatever goes wrong in the task's code ends this process, not the run. Only it loads torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedqueue.protocol.aggregation import declaration
from fedqueue.training.job import StoredTask

if TYPE_CHECKING:
    from fedqueue.training.tasks import Task


def main(arguments: list[str]) -> int:
    from safetensors.torch import load_file

    answers = sys.stdout
    sys.stdout = sys.stderr  # what the task prints is not an answer
    task = load_task(Path(arguments[0]))
    if len(arguments) > 1:
        print(json.dumps({"sizes": write_first_model(task, Path(arguments[1]))}), file=answers)
        return 0
    for line in sys.stdin:
        asked = json.loads(line)
        metrics = task.score(load_file(asked["model"]))
        print(json.dumps({"version": asked["version"], "metrics": metrics}), file=answers, flush=True)
    return 0


def load_task(path: Path) -> Task:
    from fedqueue.training.tasks import make_task

    stored = StoredTask.load(path)
    return make_task(stored.task, len(stored.facilities), stored.seed)


def write_first_model(task: Task, target: Path) -> Sequence[int]:
    """The sizes of the facilities' data."""
    from safetensors.torch import save_file

    save_file(task.initial_model(), target, metadata=declaration(task.declared_roles()))
    return task.data_sizes()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
