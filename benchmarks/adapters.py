"""How far averaged low-rank adapters are from the average of what they stand for, on a small real run.

    python -m benchmarks.adapters --rank 4 --rate 0.01

Three facilities, each with questions of another kind about molecules, train adapters of stories260K.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedqueue import data
from fedqueue.aggregate import Contribution, StateDict, aggregate, roles_of
from fedqueue.protocol.aggregation import COUNTER, factor_names
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import make_task

ROUNDS, STEPS = 4, 8
QUESTIONS = ("property_prediction-esol", "property_prediction-bbbp", "name_conversion-s2f")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.01)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        print("averaging  error, each round                     test loss   values that train")
        for averaging in ("plain", "product", "frozen-a"):
            errors, loss, trained = run(averaging, files, arguments.rank, arguments.rate)
            shown = "  ".join(f"{error:7.1%}" for error in errors)
            print(f"{averaging:9}  {shown}   {loss:9.4f}   {trained:17,}", flush=True)


def write_files(folder: Path) -> dict[str, Any]:
    """A file of 64 short questions for each facility, and one to test all of them."""
    with gzip.open(data.find("chem/chem_instruct.jsonl.gz"), "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if len(row["input"]) + len(row["output"]) < 160]
    train: dict[str, str] = {}
    for kind in QUESTIONS:
        train[kind] = str(write(folder / f"{kind}.jsonl", [r for r in rows if r["task"] == kind][:64]))
    tested = [[r for r in rows if r["task"] == kind and r["split"] == "test"][:16] for kind in QUESTIONS]
    return {"train": train, "test": str(write(folder / "test.jsonl", [row for part in tested for row in part]))}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(averaging: str, files: Mapping[str, Any], rank: int, rate: float) -> tuple[list[float], float, int]:
    """The error of each round's average, the loss of the last model, and how many of its values train."""
    options = {
        **files,
        "model": str(data.root() / "models" / "stories260K"),
        "fields": {"prompt": ["input"], "answer": "output"},
        "sequence_length": 192,
        "lora": {"rank": rank, "averaging": averaging},
    }
    settings = TaskSettings(name="causal-lm", optimizer="adamw", batch_size=4, options=options)
    task = make_task(settings, len(QUESTIONS), seed=1)
    model, errors = task.initial_model(), []
    roles = roles_of(model, task.declared_roles())
    for number in range(ROUNDS):
        trained = [
            task.train(facility=place, model=model, steps=STEPS, learning_rate=rate, key=number).model
            for place in range(len(QUESTIONS))
        ]
        shares = [Contribution(weight=1 / len(trained), trained=update, base=model) for update in trained]
        made = aggregate(model, shares, "add_deltas", roles)
        errors.append(error_of(made, trained, model))
        model = made
    count = sum(tensor.numel() for name, tensor in model.items() if roles[name] != COUNTER)
    return errors, task.score(model)["loss"], count


def error_of(made: StateDict, trained: list[StateDict], before: StateDict) -> float:
    """|B·A - mean of B_k·A_k| over |mean of B_k·A_k - what it was before|, over all layers (Frobenius)."""
    wrong = moved = 0.0
    for b, a in sorted({factor_names(name) for name in made}):
        mean = torch.stack([update[b].double() @ update[a].double() for update in trained]).mean(dim=0)
        wrong += float((made[b].double() @ made[a].double() - mean).square().sum())
        moved += float((mean - before[b].double() @ before[a].double()).square().sum())
    return float((wrong / moved) ** 0.5)


if __name__ == "__main__":
    main()
