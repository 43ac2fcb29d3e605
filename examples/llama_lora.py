"""A pretrained language model learns the answers in this site's file, by LoRA adapters. Only these leave the site.

python llama_lora.py FOLDER site.jsonl --first first.safetensors    write the first adapters of a run
python llama_lora.py FOLDER site.jsonl                              take part, or try it here
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fedqueue
from fedqueue.training.job import TaskSettings, train_part
from fedqueue.training.scorer import write_first_model
from fedqueue.training.tasks import make_task


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("data", help="JSON lines of prompts and answers")
    parser.add_argument("--first", type=Path)
    arguments = parser.parse_args()

    options = {  # the same at every site, but for the file; docs/causal-lm.md has them all
        "model": arguments.model,
        "train": arguments.data,
        "sequence_length": 512,
        "lora": {"rank": 8, "averaging": "frozen-a"},
    }
    settings = TaskSettings(name="causal-lm", optimizer="adamw", batch_size=8, options=options)
    task = make_task(settings, facilities=1, seed=1)
    if arguments.first:
        write_first_model(task, arguments.first)
        return

    with fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 20, "learning_rate": 1e-3}) as work:
        for part in work.parts():  # once, or again and again if the job stays
            train_part(task, part)


if __name__ == "__main__":
    main()
