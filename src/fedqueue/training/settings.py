"""What a run says about its training; no torch, since the config reads it everywhere."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedqueue.protocol.codec import read


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """A task and how its data is shared out. The learning rate is not here: it comes with each assignment.

    Example: `TaskSettings(name="mnist", dirichlet_alpha=0.1)`.
    """

    name: str = "digits"
    """"digits", "mnist", "cifar100", or a function of your own as "module:function" that returns a `Workload`."""
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
    train_samples: int | None = None
    """Use only so many training samples, chosen by the run's seed; None: all."""
    test_samples: int | None = None
    """The same for the test samples."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    """Processor threads of the training; another number may change the last bits of a result."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for a function of your own."""

    def __post_init__(self) -> None:
        _check_choice("partition", self.partition, ("dirichlet", "iid"))
        _check_choice("optimizer", self.optimizer, ("adam", "sgd", "adamw"))
        _check_choice("device", self.device, ("cpu", "cuda"))
        if not self.name:
            raise ValueError("name must be 'digits', 'mnist', 'cifar100' or 'module:function', found ''")
        if not (math.isfinite(self.dirichlet_alpha) and self.dirichlet_alpha > 0):
            raise ValueError(f"dirichlet_alpha must be above 0, found {self.dirichlet_alpha}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, found {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum must be 0 with optimizer {self.optimizer!r}, found {self.momentum}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay must be 0 or more, found {self.weight_decay}")
        _check_count("batch_size", self.batch_size)
        _check_count("threads", self.threads)
        if self.train_samples is not None:
            _check_count("train_samples", self.train_samples)
        if self.test_samples is not None:
            _check_count("test_samples", self.test_samples)


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


def _check_count(field_name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{field_name} must be 1 or more, found {value}")


def _check_choice(field_name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ValueError(f"{field_name} must be {choices}, found {value!r}")
