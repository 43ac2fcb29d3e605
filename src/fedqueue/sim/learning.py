"""The tensors behind a simulation: model versions, updates, training, scores. Strategies never see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fedqueue.moments import change_of, no_moments
from fedqueue.protocol.aggregation import split_moments
from fedqueue.protocol.contract import Assignment, UpdateKey, facility_of
from fedqueue.protocol.messages import Aggregate
from fedqueue.training.job import luck

if TYPE_CHECKING:
    from fedqueue.aggregate import Moments, StateDict
    from fedqueue.training.tasks import Task, Trained


class Training(NamedTuple):
    """What a simulated job does for one update."""

    key: UpdateKey
    facility: int
    number: int  # of the job at its facility
    work: Assignment
    steps: int
    ahead: int = 0  # of these, from its own weights while the model of the assignment was on its way
    stays: bool = False  # it may train on from what it hands in

    @property
    def luck(self) -> int:
        """Selects its random numbers: the j-th job of a facility draws the same batches under every strategy."""
        return luck(self.facility, self.number, self.key[2])


class Learning:
    """What a simulated job really does: as it is, nothing, for studies of the protocol alone."""

    def __init__(self, megabytes: float) -> None:
        self.megabytes = megabytes  # of one model, for transfers
        self.roles: Mapping[str, str] = {}  # of its tensors
        self._corrupt: set[UpdateKey] = set()

    def foresee(self, training: Training) -> None:
        """A job began that will do this if nothing comes between: its training may begin."""

    def train(self, training: Training) -> int:
        """Train from the assignment's version; keeps the update and returns the samples seen."""
        return 0

    def corrupt(self, key: UpdateKey) -> None:
        self._corrupt.add(key)

    def misfit(self, key: UpdateKey) -> str | None:
        """Why this update cannot be used, or None."""
        return "not finite (simulated)" if key in self._corrupt else None

    def norm(self, key: UpdateKey) -> float | None:
        """How far this update moves the parameters; None: nobody measures it."""
        return None

    def aggregate(self, command: Aggregate) -> float | None:
        """Make a model. Returns how far its updates agree, if that is asked for and known."""
        return None

    def forget(self, key: UpdateKey) -> None:
        """This update has met its fate."""
        self._corrupt.discard(key)

    def end(self, job: UpdateKey) -> None:
        """This attempt of a job that stays is over: it trains on from nothing."""

    def keep(self, ready: int, versions: Collection[int]) -> None:
        """Of the versions before `ready` only these will be asked for again, and those of updates still held."""

    def score(self, version: int) -> dict[str, float] | None:
        return None

    def examine(self) -> dict[str, float]:
        """What is measured once of a run's newest model, because it takes long."""
        return {}


class RealLearning(Learning):
    """PyTorch training, done when a simulated job ends, on the version it was bound to."""

    def __init__(
        self,
        task: Task,
        chosen_roles: Mapping[str, str] | None = None,
        *,
        variates: bool = False,
        moments: bool = False,
    ) -> None:
        """`variates`: jobs and server have control variates, as SCAFFOLD has them. `moments`: those of Adam are
        shared."""
        from fedqueue import aggregate  # loads torch: only runs that train pay for it

        self._rules = aggregate
        self._task = task
        first = task.initial_model()
        roles = aggregate.roles_of(first, task.declared_roles(), chosen_roles)
        if moments:
            first |= no_moments(first, roles)
            roles = aggregate.roles_of(first, roles)
        super().__init__(sum(t.numel() * t.element_size() for t in first.values()) / 1e6)
        self.roles = roles
        self._shares_moments = moments
        self._models: dict[int, StateDict] = {0: first}
        self._moments: Moments = ()  # of the server's optimizer, with the newest model
        self._variates = self._rules.Variates(first, self.roles) if variates else None
        self._updates: dict[UpdateKey, tuple[StateDict, int]] = {}
        self._used: set[UpdateKey] = set()  # of the updates, those that were in a model and are kept
        self._handed_in: dict[tuple[str, int], StateDict] = {}  # by jobs that stay, last
        self._began_with: dict[tuple[str, int], tuple[int, StateDict]] = {}  # the same jobs, their part before

    def train(self, training: Training) -> int:
        job, attempt, _ = training.key
        version, samples = training.work.base_version, 0
        model = self._models[version]
        if training.ahead:
            own = self._handed_in[job, attempt]
            went_on = self._steps(training, own, training.ahead, -training.luck)
            carried = self._rules.Contribution(weight=1.0, trained=went_on.model, base=own)
            went_to = self._rules.aggregate(model, [carried], "add_deltas", self.roles)
            model = {**went_to, **split_moments(model)[1]}  # everybody's moments, not its own
            samples = went_on.samples
        trained = self._steps(training, model, training.steps - training.ahead, training.luck, self._change(training))
        if self._variates is not None:
            length = training.steps * training.work.learning_rate
            self._variates.trained(training.key, training.facility, model, trained.model, length)
        if training.stays:
            self._handed_in[job, attempt] = trained.model
            if self._shares_moments:
                self._began_with[job, attempt] = (version, self._models[version])
        self._updates[training.key] = (trained.model, version)
        return samples + trained.samples

    def _change(self, training: Training) -> StateDict | None:
        """How the model moved since the part before, in one version."""
        if not self._shares_moments:
            return None
        version = training.work.base_version
        before, model = self._began_with.get(training.key[:2], (version, {}))
        return change_of(self._models[version], model, version - before, self.roles)

    def _steps(
        self, training: Training, model: StateDict, steps: int, luck: int, change: StateDict | None = None
    ) -> Trained:
        return self._task.train(
            facility=training.facility,
            model=model,
            steps=steps,
            learning_rate=training.work.learning_rate,
            key=luck,
            drift=None if self._variates is None else self._variates.drift(training.facility),
            change=change,
        )

    def end(self, job: UpdateKey) -> None:
        self._handed_in.pop(job[:2], None)
        self._began_with.pop(job[:2], None)

    def corrupt(self, key: UpdateKey) -> None:
        next(t for t in self._updates[key][0].values() if t.is_floating_point()).view(-1)[0] = float("nan")

    def misfit(self, key: UpdateKey) -> str | None:
        trained, base = self._updates[key]
        return self._rules.misfit(trained, self._models[base])

    def norm(self, key: UpdateKey) -> float | None:
        trained, base = self._updates[key]
        return self._rules.norm_of_change(trained, self._models[base], self.roles)

    def aggregate(self, command: Aggregate) -> float | None:
        contributions = []
        for share in command.weights:
            trained, base = self._updates[share.key]
            contributions.append(
                self._rules.Contribution(
                    weight=share.weight,
                    trained=trained,
                    base=self._models[base],
                    clip=share.clip,
                    voice=facility_of(share.job_id),
                )
            )
        current = self._models[command.from_version]
        is_first = command.from_version == 0
        if command.step is None:
            made = self._rules.aggregate(
                current, contributions, command.rule, self.roles, from_first=is_first, guard=command.guard
            )
        else:
            made, self._moments = self._rules.take_step(
                current,
                contributions,
                command.rule,
                command.step,
                self._moments,
                self.roles,
                from_first=is_first,
                guard=command.guard,
            )
        if self._variates is not None and command.variates is not None:
            self._variates.move([(share.key, command.variates * share.weight) for share in command.weights])
        self._models[command.to_version] = made
        self._used.update(share.key for share in command.weights)
        for key in self._used.difference(command.keep):
            self._updates.pop(key, None)
        self._used.intersection_update(command.keep)
        fresh = [c for c, share in zip(contributions, command.weights, strict=True) if not share.again]
        return self._rules.agreement(fresh, self.roles) if command.agreement else None

    def forget(self, key: UpdateKey) -> None:
        self._updates.pop(key, None)
        if self._variates is not None:
            self._variates.forget(key)

    def keep(self, ready: int, versions: Collection[int]) -> None:
        held = {base for _, base in self._updates.values()}
        for version in [v for v in self._models if v < ready and v not in versions and v not in held]:
            del self._models[version]

    def score(self, version: int) -> dict[str, float] | None:
        return self._task.score(self._models[version])

    def examine(self) -> dict[str, float]:
        return self._task.examine(self._models[max(self._models)])
