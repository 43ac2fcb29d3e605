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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedqueue.failpoints import AGENT, COORDINATOR, POINTS
from fedqueue.protocol.messages import FacilityLeft, JobFailed, ModelScored, SubmitRefused
from tests.faults import harness
from tests.faults.harness import FACILITIES, Run, forked, free_port, tree_of
from tests.faults.ledger_checks import check_run
from tests.faults.worker import step_of

STRATEGIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("fedqueue", {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3}),
    ("fedqueue", {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3, "close": "early"}),
    ("jit", {"min_steps": 3, "pipeline": "timed"}),
    ("jit", {"min_steps": 3, "pipeline": "chain"}),
    ("jit", {"min_steps": 3, "pipeline": "independent", "max_staleness": 1}),
    ("fedavg", {"steps": 5}),
    ("fedasync", {"steps": 5}),
    ("fedbuff", {"steps": 5, "buffer": 2}),
    ("fedcompass", {"min_steps": 3, "max_steps": 10}),
)
MOST_HITS: Final = {"ledger.before": 40, "ledger.after": 40, "answer.before": 30, "journal.before": 40}
MOST_HITS_OF_OTHERS: Final = 4
ONCE: Final = ("run.over", "run.finished", "secret.whole", "update.refused", "agent.scoring", "journal.whole")
SECONDS: Final = 60.0  # a schedule may take


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

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.strategy} {self.options}, kills: {'; '.join(map(str, self.kills))}"


def schedule_of(seed: int) -> Schedule:
    """The same for ever. Failpoints come in turn, so that every one is met by some schedule of any 30 in a row."""
    rng = random.Random(seed)
    strategy, options = STRATEGIES[seed % len(STRATEGIES)]
    point = POINTS[(seed // 2) % len(POINTS)] if seed % 2 == 0 else ""
    if point == "agent.posted":  # only just in time lays work out
        strategy, options = STRATEGIES[2 + seed // 2 % 3]
    kills = [_at(rng, point)] if point else [_any(rng)]
    kills += [_any(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    points = {kill.point for kill in kills}
    return Schedule(
        seed=seed,
        strategy=strategy,
        options=options,
        rounds=rng.choice((3, 3, 4)),
        kills=tuple(kills),
        real_worker=seed % 50 == 13,
        same_updates=rng.random() < 0.2,
        evaluates="agent.scoring" in points or rng.random() < 0.1,
        odd={"1": rng.choice(("nan", "shape"))} if "update.refused" in points else {},
        waits=rng.choice(((), (0.0, 0.2), (0.1, 0.0, 0.3))),
        keep_all=rng.random() < 0.5,
        short_journal=rng.random() < 0.3,
    )


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
    error: str = ""


def perform(schedule: Schedule, base: Path) -> Outcome:
    """One run in `base`, which is removed if all is well."""
    began = time.monotonic()
    error, hit, kills = "", [], 0
    run = _lay_out(schedule, base)
    try:
        with run:
            _go(run, schedule)
            _check(run, schedule)
    except Exception as problem:
        text = str(problem) if isinstance(problem, AssertionError) else traceback.format_exc()
        error = f"{schedule}\n{text}\n{run.tails()}\nfiles: {base}"
    for actor in run.actors.values():
        hit += actor.hit
        kills += actor.codes.count(-signal.SIGKILL)
    written = [kill.process.partition("/")[2] for kill in schedule.kills if kill.point == "worker.written"]
    hit += ["worker.written" for facility in written if _was_killed(run, facility)]
    if not error:
        shutil.rmtree(base)
    return Outcome(schedule.seed, round(time.monotonic() - began, 2), hit, kills, error)


def _lay_out(schedule: Schedule, base: Path) -> Run:
    rng = random.Random(~schedule.seed)
    evaluation = {"where": "north" if schedule.evaluates else "nowhere", "timeout_seconds": 10.0}
    tree = tree_of(
        schedule.strategy,
        rounds=schedule.rounds,
        options=schedule.options,
        port=free_port(),
        evaluation=evaluation,
        model={"keep": "all" if schedule.keep_all else "needed"},
        facility=[{"name": name, "steps_per_second": 50.0} for name in FACILITIES],
    )
    agent: dict[str, Any] = {"before": _arming(schedule, base)}
    if schedule.evaluates:
        agent["evaluate_command"] = shlex.join([sys.executable, "-I", "-S", str(harness.WORKER)])
    if schedule.real_worker:
        agent["command"] = f"{sys.executable} -m fedqueue.training.job {base}/run/task.json"
        agent["environment"] = {"PYTHONPATH": str(harness.SOURCE)}
    run = Run(
        base,
        tree,
        spawn=forked_briefly if schedule.short_journal else forked,
        wishes={"train_seconds": 0.1, "same": schedule.same_updates, "odd": schedule.odd},
        agent=agent,
        scheduler={"extra_waits": list(schedule.waits)},
        delay=lambda: rng.uniform(0.0, 0.4),
    )
    for kill in schedule.kills:
        if kill.process in run.actors and kill.point:
            run.actors[kill.process].points.append(f"{kill.point}:{kill.hit}")
    return run


def _arming(schedule: Schedule, base: Path) -> list[str]:
    """Shell lines that arm the n-th job of a facility, and no other."""
    lines = []
    for kill in schedule.kills:
        if kill.point == "worker.written":
            marks = f"{base}/marks-{kill.process.partition('/')[2]}"
            lines.append(
                f'case "$job" in {base}/{kill.process.partition("/")[2]}/*) mkdir -p {marks}; n=1; '
                f"until mkdir {marks}/$n 2>/dev/null; do n=$((n + 1)); done; "
                f"if [ $n = {kill.hit} ]; then export FEDQUEUE_FAILPOINT=worker.written; fi;; esac"
            )
    return lines


def _go(run: Run, schedule: Schedule) -> None:
    began = time.monotonic()
    timed = sorted((kill for kill in schedule.kills if not kill.point), key=lambda kill: kill.after)
    run.start()

    def over() -> bool:
        while timed and time.monotonic() - began >= timed[0].after and _strike(run, timed[0].process):
            timed.pop(0)
        return all(actor.done for actor in run.actors.values())

    run.run_until(over, "the end of the run", SECONDS)
    run.run_to_end(5.0)
    for actor in run.actors.values():
        odd = [code for code in actor.codes if code not in (0, -signal.SIGKILL)]
        assert not odd, f"{actor.name} ended with {odd}"


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


def _check(run: Run, schedule: Schedule) -> None:
    def step(job: str, attempt: int, place: int) -> float:
        return 0.01 if schedule.real_worker else step_of(job, attempt, place, schedule.same_updates)

    story = check_run(run.folder, [run.home(name) for name in FACILITIES], rounds=schedule.rounds, step=step)
    # A crash of ours costs no job: only those fail that were killed themselves.
    killed = len([kill for kill in schedule.kills if kill.process.startswith(("job/", "shepherd/"))])
    failed = [f"{event.job_id}: {event.reason}" for event in story.events(JobFailed)]
    assert len(failed) <= killed, f"{killed} jobs were killed, these failed: {failed}"
    assert not story.events(SubmitRefused), f"a job was asked for twice: {story.events(SubmitRefused)}"
    assert not story.events(FacilityLeft)
    scored = {event.version for event in story.events(ModelScored)}
    killed_at_north = any(kill.process in ("job/north", "shepherd/north") for kill in schedule.kills)
    if schedule.evaluates and not killed_at_north:  # it may have been the job that scores
        assert max(story.versions) in scored, f"the last model was not scored, only {sorted(scored)}"


def forked_briefly(argv: Any, environment: Any, log: Path) -> harness.Process:
    """An agent whose journal is made short again and again."""
    from fedqueue.agent import agent_state as works

    names = vars(works)
    usual, names["COMPACT_LINES"] = names["COMPACT_LINES"], 4
    try:
        return forked(argv, environment, log)
    finally:
        names["COMPACT_LINES"] = usual
