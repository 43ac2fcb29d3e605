"""What a run says about its training; no torch, since the config reads it everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedqueue.protocol.checks import at_least, more_than, one_of
from fedqueue.protocol.codec import read


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """A task and how its data is shared out. The learning rate is not here: it comes with each assignment.

    Example: `TaskSettings(name="mnist", dirichlet_alpha=0.1)`.
    """

    name: str = "digits"
    """"digits", "mnist", what installed packages add, or a function of your own that returns a `Workload`, as
    "module:function"."""
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
        at_least(self, 0, "weight_decay")
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
