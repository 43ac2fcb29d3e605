"""Seeded crash schedules: which strategy, and one to three kills of which process where or when."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedqueue.coordinator.run_folder import RUNS
from fedqueue.files import AGENT, COORDINATOR, POINTS, WORKER
from fedqueue.protocol.messages import FacilityLeft, JobFailed, ModelScored, StopRun, SubmitRefused
from tests.conftest import ONE_A_ROUND
from tests.faults import harness
from tests.faults.federation import TwoRuns
from tests.faults.harness import FACILITIES, Run, forked, free_port, tree_of
from tests.faults.ledger_checks import Home, Story, check_run
from tests.faults.worker import step_of

PLAIN: Final[dict[str, Any]] = {**ONE_A_ROUND, "min_steps": 3}
STRATEGIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("fedqueue", {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3}),
    ("fedqueue", {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3, "close": "early"}),
    ("jit", {**PLAIN, "pipeline": "timed"}),
    ("jit", {**PLAIN, "pipeline": "chain"}),
    ("jit", {**PLAIN, "pipeline": "independent", "max_staleness": 1}),
    ("fedavg", {"steps": 5}),
    ("fedasync", {"steps": 5}),
    ("fedbuff", {"steps": 5, "buffer": 2}),
    ("fedcompass", {"min_steps": 3, "max_steps": 10}),
    ("jit", {**PLAIN, "stay": 2.0}),
    ("fedasync", {"steps": 5, "stay": 2.0}),
    ("fedavg", {"steps": 5, "stay": 2.0}),
    ("fedqueue", {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3, "stay": 2.0}),
    ("fedbuff", {"steps": 5, "buffer": 2, "stay": 2.0}),
    ("fedcompass", {"min_steps": 3, "max_steps": 10, "stay": 2.0}),
    ("jit", {"min_steps": 3, "stay": "auto", "rounds": "auto", "absent": 0.7}),
    ("fedqueue", {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3, "stay": 2.0, "absent": 0.7}),
)
MOST_HITS: Final = {"ledger.before": 40, "ledger.after": 40, "answer.before": 30, "journal.before": 40}
MOST_HITS_OF_OTHERS: Final = 4
ONCE: Final = ("run.over", "run.finished", "secret.whole", "update.refused", "agent.scoring", "journal.whole")


@dataclass(frozen=True)
class Kill:
    """At a failpoint, when it is reached for the `hit`-th time; or `after` seconds."""

    process: str  # coordinator, north, south; "job/north" and "shepherd/north": a job, and what looks after it
    point: str = ""
    hit: int = 1
    after: float = 0.0

    def __str__(self) -> str:
        where = f"at {self.point}:{self.hit}" if self.point else f"after {self.after:.2f} s"
        return f"{self.process} {where}"


@dataclass(frozen=True)
class Schedule:
    seed: int
    strategy: str
    options: dict[str, Any]
    rounds: int
    kills: tuple[Kill, ...]
    real_worker: bool = False
    same_updates: bool = False  # both facilities hand in the same bytes
    evaluates: bool = False  # north scores models
    odd: dict[str, str] = field(default_factory=dict)
    waits: tuple[float, ...] = ()
    keep_all: bool = False
    short_journal: bool = False
    masked: bool = False
    beside: tuple[str, dict[str, Any]] | None = None  # strategy and options of a second run, both in one federation

    @property
    def stays(self) -> bool:
        return _stays(self.options)

    def __str__(self) -> str:
        runs = f"{self.strategy} {self.options}" + (f" beside {self.beside}" if self.beside else "")
        return f"seed {self.seed}: {runs}, kills: {'; '.join(map(str, self.kills))}"


def schedule_of(seed: int) -> Schedule:
    """The same for ever. Failpoints come in turn, each with strategies whose jobs or agents can meet it."""
    rng = random.Random(seed)
    aimed = seed - seed // 4  # three of four are
    point = POINTS[aimed % len(POINTS)] if seed % 4 != 3 else ""
    meet = [(name, chosen) for name, chosen in STRATEGIES if _can_meet(point, name, _stays(chosen))]
    place = aimed + aimed // len(POINTS) if point else seed // 4
    strategy, options = meet[place % len(meet)]
    kills = [_at(rng, point)] if point else [_any(rng)]
    kills += [_any(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    points = {kill.point for kill in kills}
    rounds = rng.choice((6, 9)) if _stays(options) else rng.choice((3, 3, 4))
    real_worker = seed % 50 == 13 or (kills[0].point in WORKER and rng.random() < 0.3)
    return Schedule(
        seed=seed,
        strategy=strategy,
        options=options,
        rounds=rounds,
        kills=tuple(kills),
        real_worker=real_worker,
        same_updates=rng.random() < 0.2,
        evaluates="agent.scoring" in points or rng.random() < 0.1,
        odd={"1": rng.choice(("nan", "shape"))} if "update.refused" in points else {},
        waits=rng.choice(((), (0.0, 0.2), (0.1, 0.0, 0.3))),
        keep_all=rng.random() < 0.5,
        short_journal=rng.random() < 0.3,
        beside=meet[(place + 1) % len(meet)] if seed % 5 == 2 and not real_worker else None,
    )


def _stays(options: dict[str, Any]) -> bool:
    return bool(options.get("stay", "off") != "off")


def _can_meet(point: str, strategy: str, stays: bool) -> bool:
    if point == "agent.posted":  # only just in time lays work out
        return strategy == "jit"
    if point == "agent.brought":
        return stays and strategy != "jit"
    return stays or point not in WORKER or point == "worker.written"


def _any(rng: random.Random) -> Kill:
    if rng.random() < 0.5:
        return _at(rng, rng.choice(POINTS))
    process = rng.choice(("coordinator", "coordinator", *FACILITIES, "job/north", "job/south", "shepherd/north"))
    return Kill(process, after=rng.uniform(0.05, 3.0))


def _at(rng: random.Random, point: str) -> Kill:
    most = 1 if point in ONCE else MOST_HITS.get(point, MOST_HITS_OF_OTHERS)
    hit = min(rng.randint(1, most), rng.randint(1, most))
    if point in COORDINATOR:
        return Kill("coordinator", point, hit)
    if point in AGENT:
        return Kill("north" if point == "agent.scoring" else rng.choice(FACILITIES), point, hit)
    return Kill(f"job/{rng.choice(FACILITIES)}", point, hit)


# Doing it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    seed: int
    seconds: float
    hit: list[str]  # failpoints at which a process died
    kills: int  # in all
    stays: bool = False
    parts: int = 0  # that were heard of beside the first of each job
    error: str = ""


def perform(schedule: Schedule, base: Path) -> Outcome:
    """One run in `base`, which is removed if all is well."""
    began = time.monotonic()
    error, hit, kills, parts = "", [], 0, 0
    run = _lay_out(schedule, base)
    try:
        with run:
            _go(run, schedule)
            parts = sum(1 for story in _check(run, schedule) for _, _, part in story.receipts if part)
    except Exception as problem:
        text = str(problem) if isinstance(problem, AssertionError) else traceback.format_exc()
        error = f"{schedule}\n{text}\n{run.tails()}\nfiles: {base}"
    for actor in run.actors.values():
        hit += actor.hit
        kills += actor.codes.count(-signal.SIGKILL)
    of_jobs = [kill for kill in schedule.kills if "/" in kill.process]
    if len(of_jobs) == 1 and of_jobs[0].point and _was_killed(run, of_jobs[0].process.partition("/")[2]):
        hit.append(of_jobs[0].point)
    if not error:
        shutil.rmtree(base)
    return Outcome(schedule.seed, round(time.monotonic() - began, 2), hit, kills, schedule.stays, parts, error)


def _lay_out(schedule: Schedule, base: Path) -> Run:
    rng = random.Random(~schedule.seed)
    evaluation = {"where": "north" if schedule.evaluates else "nowhere", "timeout_seconds": 10.0}
    runs = [(schedule.strategy, schedule.options), *([schedule.beside] if schedule.beside else [])]
    port = free_port()
    trees = [
        tree_of(
            strategy,
            rounds=schedule.rounds,
            options=options,
            port=port,
            evaluation=evaluation,
            model={"keep": "all" if schedule.keep_all else "needed"},
            facility=[{"name": name, "steps_per_second": 50.0} for name in FACILITIES],
            trust={"masked": True, "least_members": 2} if schedule.masked else {},
        )
        for strategy, options in runs
    ]
    agent: dict[str, Any] = {"before": _arming(schedule, base)}
    if schedule.masked:
        agent |= {"masked_only": True, "masked_least_members": 2}
    if schedule.evaluates:
        agent["evaluate_command"] = shlex.join([sys.executable, "-I", "-S", str(harness.WORKER)])
    if schedule.real_worker:
        agent["command"] = f"{sys.executable} -m fedqueue.training.job {base}/run/task.json"
        agent["environment"] = {"PYTHONPATH": str(harness.SOURCE)}
    scheduler: dict[str, Any] = {"extra_waits": list(schedule.waits)}
    if schedule.stays:
        scheduler["min_wall_seconds"] = 20.0
    if schedule.beside:
        scheduler["slots"] = 2
    settings: dict[str, Any] = {
        "spawn": forked_briefly if schedule.short_journal else forked,
        "wishes": {"train_seconds": 0.1, "same": schedule.same_updates, "odd": schedule.odd},
        "agent": agent,
        "scheduler": scheduler,
        "delay": lambda: rng.uniform(0.0, 0.4),
    }
    run = TwoRuns(base, trees, **settings) if schedule.beside else Run(base, trees[0], **settings)
    for kill in schedule.kills:
        if kill.process in run.actors and kill.point:
            run.actors[kill.process].points.append(f"{kill.point}:{kill.hit}")
    return run


def _arming(schedule: Schedule, base: Path) -> list[str]:
    """Shell lines that arm the n-th job of a facility, and no other; of jobs that stay the first, at its n-th part."""
    lines = []
    for kill in schedule.kills:
        if kill.point in WORKER:
            marks = f"{base}/marks-{kill.process.partition('/')[2]}"
            job, part = (1, kill.hit) if schedule.stays else (kill.hit, 1)
            lines.append(
                f'case "$job" in {base}/{kill.process.partition("/")[2]}/*) mkdir -p {marks}; n=1; '
                f"until mkdir {marks}/$n 2>/dev/null; do n=$((n + 1)); done; "
                f"if [ $n = {job} ]; then export FEDQUEUE_FAILPOINT={kill.point}:{part}; fi;; esac"
            )
    return lines


def _go(run: Run, schedule: Schedule) -> None:
    began = time.monotonic()
    timed = sorted((kill for kill in schedule.kills if not kill.point), key=lambda kill: kill.after)
    run.start()

    def over() -> bool:
        while timed and time.monotonic() - began >= timed[0].after and _strike(run, timed[0].process):
            timed.pop(0)
        if isinstance(run, TwoRuns):
            return run.is_over()
        coordinator = run.actors[harness.COORDINATOR]
        if coordinator.done and any(_is_alone(run, name) for name in FACILITIES):
            coordinator.done = False
            run.start(harness.COORDINATOR)  # as an operator does for an agent that came back after the end
        return all(actor.done for actor in run.actors.values())

    run.run_until(over, "the end of the run")
    expected = {0, -signal.SIGKILL}
    if isinstance(run, TwoRuns):
        run.end()
        expected.add(130)
    else:
        run.run_to_end()
    for actor in run.actors.values():
        odd = [code for code in actor.codes if code not in expected]
        assert not odd, f"{actor.name} ended with {odd}"


def _is_alone(run: Run, facility: str) -> bool:
    """Whether its agent lives and finds no coordinator."""
    said = run.log(facility)
    return not run.actors[facility].done and said.rfind("is out of reach") > said.rfind("well again")


def _strike(run: Run, process: str) -> bool:
    """Whether there was one to kill."""
    kind, _, facility = process.partition("/")
    if not facility:
        run.kill(process)
        return True
    for state in run.jobs_running(facility):
        with suppress(ProcessLookupError):
            if kind == "shepherd":
                os.kill(state["pid"], signal.SIGKILL)
                return True
            if state.get("group"):
                os.killpg(state["group"], signal.SIGKILL)
                return True
    return False


def _was_killed(run: Run, facility: str) -> bool:
    codes = [path.read_text() for path in run.home(facility).glob("scheduler/jobs/*/state.json")]
    return any(json.loads(text).get("exit_code") == 128 + signal.SIGKILL for text in codes)


def _check(run: Run, schedule: Schedule) -> list[Story]:
    if not isinstance(run, TwoRuns):
        return [_check_run(run, schedule, run.folder, [Home.of(run.home(name)) for name in FACILITIES])]
    stories = []
    for name in run.NAMES:
        begun = [site for site in map(run.home, FACILITIES) if (site / RUNS / run.run_id(name)).exists()]
        homes = [Home.below(site, run.run_id(name)) for site in begun]
        stories.append(_check_run(run, schedule, run.run_folder(name), homes))
    return stories


def _check_run(run: Run, schedule: Schedule, folder: Path, homes: Sequence[Home]) -> Story:
    def step(job: str, attempt: int, part: int, place: int) -> float:
        return 0.01 if schedule.real_worker else step_of(job, attempt, part, place, schedule.same_updates)

    story = check_run(folder, homes, rounds=schedule.rounds, step=step)
    # A crash of ours costs no job: only those fail that were killed themselves. (Once the run is over, the models that
    # late updates were made from may be gone.)
    killed = len([kill for kill in schedule.kills if kill.process.startswith(("job/", "shepherd/"))])
    over = next(at for at, (_, commands) in enumerate(story.steps) if any(isinstance(c, StopRun) for c in commands))
    before_end = [event for event, _ in story.steps[:over] if isinstance(event, JobFailed)]
    failed = [f"{event.job_id}: {event.reason}" for event in before_end]
    assert len(failed) <= killed, f"{killed} jobs were killed, these failed: {failed}"
    assert not story.events(SubmitRefused), f"a job was asked for twice: {story.events(SubmitRefused)}"
    assert not story.events(FacilityLeft)
    scored = {event.version for event in story.events(ModelScored)}
    killed_at_north = any(kill.process in ("job/north", "shepherd/north") for kill in schedule.kills)
    if schedule.evaluates and not killed_at_north:  # it may have been the job that scores
        assert max(story.versions) in scored, f"the last model was not scored, only {sorted(scored)}"
    return story


def forked_briefly(argv: Any, environment: Any, log: Path) -> harness.Process:
    """An agent whose journal is made short again and again."""
    from fedqueue.agent import journal

    names = vars(journal)
    usual, names["COMPACT_LINES"] = names["COMPACT_LINES"], 4
    try:
        return forked(argv, environment, log)
    finally:
        names["COMPACT_LINES"] = usual
