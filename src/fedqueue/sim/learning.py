"""The tensors behind a simulation: model versions, updates, training, scores. Strategies never see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from fedqueue.protocol.contract import Assignment, JobId
from fedqueue.protocol.messages import Aggregate

if TYPE_CHECKING:
    from fedqueue.aggregate import StateDict
    from fedqueue.training.tasks import Task

Key = tuple[JobId, int]
"""An update: job and attempt."""


class Learning:
    """What a simulated job really does: as it is, nothing, for studies of the protocol alone."""

    def __init__(self, megabytes: float) -> None:
        self.megabytes = megabytes  # of one model, for transfers
        self.roles: Mapping[str, str] = {}  # of its tensors
        self._corrupt: set[Key] = set()

    def foresee(self, key: Key, facility: int, number: int, work: Assignment, steps: int) -> None:
        """A job began that will do so many steps if nothing comes between: its training may begin."""

    def train(self, key: Key, facility: int, number: int, work: Assignment, steps: int) -> int:
        """Train from the assignment's version; keeps the update and returns the samples seen."""
        return 0

    def corrupt(self, key: Key) -> None:
        self._corrupt.add(key)

    def misfit(self, key: Key) -> str | None:
        """Why this update cannot be used, or None."""
        return "not finite (simulated)" if key in self._corrupt else None

    def aggregate(self, command: Aggregate) -> None:
        pass

    def forget(self, key: Key) -> None:
        """This update has met its fate."""
        self._corrupt.discard(key)

    def keep(self, ready: int, versions: Collection[int]) -> None:
        """Of the versions before `ready` only these will be asked for again, and those of updates still held."""

    def score(self, version: int) -> dict[str, float] | None:
        return None


def luck_of(facility: int, number: int) -> int:
    """Selects a job's random numbers: the j-th job of a facility draws the same batches under every strategy."""
    return facility * 1_000_003 + number


class RealLearning(Learning):
    """PyTorch training, done when a simulated job ends, on the version it was bound to."""

    def __init__(self, task: Task, chosen_roles: Mapping[str, str] | None = None) -> None:
        from fedqueue import aggregate  # loads torch: only runs that train pay for it

        self._rules = aggregate
        self._task = task
        first = task.initial_model()
        super().__init__(sum(t.numel() * t.element_size() for t in first.values()) / 1e6)
        self.roles = aggregate.roles_of(first, task.declared_roles(), chosen_roles)
        self._models: dict[int, StateDict] = {0: first}
        self._updates: dict[Key, tuple[StateDict, int]] = {}

    def train(self, key: Key, facility: int, number: int, work: Assignment, steps: int) -> int:
        trained = self._task.train(
            facility=facility,
            model=self._models[work.base_version],
            steps=steps,
            learning_rate=work.learning_rate,
            key=luck_of(facility, number),
        )
        self._updates[key] = (trained.model, work.base_version)
        return trained.samples

    def corrupt(self, key: Key) -> None:
        next(t for t in self._updates[key][0].values() if t.is_floating_point()).view(-1)[0] = float("nan")

    def misfit(self, key: Key) -> str | None:
        trained, base = self._updates[key]
        return self._rules.misfit(trained, self._models[base])

    def aggregate(self, command: Aggregate) -> None:
        contributions = []
        for share in command.weights:
            trained, base = self._updates.pop((share.job_id, share.attempt))
            contributions.append(
                self._rules.Contribution(weight=share.weight, trained=trained, base=self._models[base])
            )
        current = self._models[command.from_version]
        self._models[command.to_version] = self._rules.aggregate(
            current, contributions, command.rule, self.roles, from_first=command.from_version == 0
        )

    def forget(self, key: Key) -> None:
        self._updates.pop(key, None)

    def keep(self, ready: int, versions: Collection[int]) -> None:
        held = {base for _, base in self._updates.values()}
        for version in [v for v in self._models if v < ready and v not in versions and v not in held]:
            del self._models[version]

    def score(self, version: int) -> dict[str, float] | None:
        return self._task.score(self._models[version])
