"""Facilities that lie, against each rule by which updates are combined: the table of docs/security.md.

python -m fedqueue_reproduction.attacks experiments/digits.toml --out experiments/results/attacks.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from fedqueue.config import Config, load
from fedqueue.machine import provenance
from fedqueue.sim.learning import RealLearning, Training
from fedqueue.sim.runner import simulate
from fedqueue.training.tasks import make_task

ATTACKS: Final = ("nobody", "sign", "scale", "noise", "flood")
"""What hostile facilities hand in: the change backwards, a hundred times as large, noise of the change's own size; or
they hand in what is backwards ten times as large, and as often as they can, late in each round."""

RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "none": ("trust.say=unbounded", "trust.clip=0"),
    "clipping": (),
    "median": ("trust.rule=median",),
    "trimmed": ("trust.rule=trimmed",),
    "krum": ("trust.rule=krum",),
}
SEEDS: Final = (1001, 1002, 1003)
STRATEGY: Final = "fedqueue"


class Lying(RealLearning):
    """What hostile facilities train is not what they hand in."""

    def __init__(self, task: Any, roles: Mapping[str, str], attack: str, hostile: range) -> None:
        super().__init__(task, roles)
        self._attack, self._hostile = attack, hostile

    def train(self, training: Training) -> int:
        samples = super().train(training)
        if training.facility in self._hostile and self._attack != "nobody":
            trained, version = self._updates[training.key]
            base, generator = self._models[version], torch.Generator().manual_seed(training.luck)
            self._updates[training.key] = (
                {name: self._lie(base[name], tensor, generator) for name, tensor in trained.items()},
                version,
            )
        return samples

    def _lie(self, base: torch.Tensor, trained: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        change = trained - base
        if self._attack == "noise":
            noise = torch.randn(change.shape, generator=generator)
            return torch.add(base, noise, alpha=float(change.norm()) / max(1, change.numel()) ** 0.5)
        return torch.add(base, change, alpha={"sign": -1.0, "scale": 100.0, "flood": -10.0}[self._attack])


def config_of(path: Path, facilities: int, attack: str, rule: str, seed: int) -> Config:
    """One of four, or two of eight: the profiles of the file come twice."""
    flood = ("strategy.fedqueue.overlap=true", "facility.first.max_jobs=8") if attack == "flood" else ()
    config = load(path, [f"run.strategy={STRATEGY}", f"run.seed={seed}", *flood, *RULES[rule]])
    if facilities > len(config.facility):
        twice = [replace(facility, name=f"{facility.name}-again") for facility in config.facility]
        config = replace(config, facility=[*config.facility, *twice])
    return config


def run(path: Path, case: tuple[int, str, str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    facilities, attack, rule, seed = case
    config = config_of(path, *case)
    task = make_task(config.task, facilities, seed)
    # The first facility, and the one with its profile among the second four.
    learning = Lying(task, config.model.roles, attack, range(0, facilities, 4))
    score = simulate(config, learned=(learning, task.data_sizes()))["score"]
    return {"facilities": facilities, "attack": attack, "rule": rule, "seed": seed, "final": score["final"]}


def table(runs: list[dict[str, Any]]) -> str:
    """In Markdown: mean final accuracy."""
    lines = [f"| hostile | attack | {' | '.join(RULES)} |", "|---|---|" + "---|" * len(RULES)]
    for facilities, attack in product((4, 8), ATTACKS):
        cells = []
        for rule in RULES:
            found = [
                run["final"] or 0.0
                for run in runs
                if (run["facilities"], run["attack"], run["rule"]) == (facilities, attack, rule)
            ]
            cells.append(f"{100 * fmean(found):.1f}" if found else "-")
        who = "nobody" if attack == "nobody" else f"{facilities // 4} of {facilities}"
        lines.append(
            f"| {who} | {attack if attack != 'nobody' else f'none ({facilities} facilities)'} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    cases = [(n, attack, rule, seed) for seed, n, attack, rule in product(SEEDS, (4, 8), ATTACKS, RULES)]
    made = provenance(["python", "-m", "fedqueue_reproduction.attacks", *sys.argv[1:]])
    runs = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for found in pool.map(partial(run, args.config), cases):
            runs.append(found)
            args.out.write_text(json.dumps({"made": made, "runs": runs}, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
