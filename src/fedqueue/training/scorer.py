"""A process beside the coordinator that knows the task: it makes the first model, and scores new ones.

    python -m fedqueue.training.scorer TASK.json            reads {"version", "model"} lines, writes {"version", ...}
    python -m fedqueue.training.scorer TASK.json FIRST      writes the first model there, and says the data's sizes

Whatever goes wrong in the task's code ends this process, not the run. Only it loads torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedqueue.protocol.roles import declaration
from fedqueue.training.settings import StoredTask


def main(arguments: list[str]) -> int:
    from safetensors.torch import load_file, save_file

    from fedqueue.training.tasks import make_task

    stored = StoredTask.load(Path(arguments[0]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the task prints is not an answer
    task = make_task(stored.task, len(stored.facilities), stored.seed)
    if len(arguments) > 1:
        save_file(task.initial_model(), arguments[1], metadata=declaration(task.declared_roles()))
        print(json.dumps({"sizes": task.data_sizes()}), file=answers)
        return 0
    for line in sys.stdin:
        asked = json.loads(line)
        metrics = task.score(load_file(asked["model"]))
        print(json.dumps({"version": asked["version"], "metrics": metrics}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
