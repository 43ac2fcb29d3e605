"""What several runs get of one site: as much as their weights say, and no run waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedqueue.agent.settings import load_agent
from fedqueue.agent.site import Site
from fedqueue.protocol.service import RunHere
from fedqueue.protocol.shares import ShareSettings, after_rest, next_in_line, share_of

RUNS = st.lists(
    st.fixed_dictionaries(
        {
            "weight": st.floats(0.05, 20.0),
            "cost": st.floats(1.0, 1000.0),  # the longest job
            "arrives": st.integers(0, 60),
            "rests": st.integers(0, 60),  # after its arrival and some work, for so many turns
            "cap": st.integers(1, 4),
        }
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(runs=RUNS, places=st.integers(1, 5), lengths=st.randoms(use_true_random=False))
def test_no_run_starves_and_each_gets_what_its_weight_says(runs: list[dict[str, float]], places: int, lengths) -> None:  # type: ignore[no-untyped-def]
    """Jobs of arbitrary lengths, runs that come and rest whenever they like. Of two that want places all the time and
    are held by no cap of their own, none gets ahead of the other by more than a job of each, for its weight."""
    names = [f"run{number}" for number in range(len(runs))]
    facts = dict(zip(names, runs, strict=True))
    level = dict.fromkeys(names, 0.0)
    used = dict.fromkeys(names, 0.0)
    under_way: list[tuple[int, str]] = []  # when a job ends, and whose it is
    wanted_since: dict[str, int] = {}
    waited = dict.fromkeys(names, 0)
    highest = 0.0
    for turn in range(250):
        under_way = [(end, run) for end, run in under_way if end > turn]
        for run in names:
            begin = facts[run]["arrives"]
            wants = turn >= begin and not 50 <= turn - begin < 50 + facts[run]["rests"]
            if not wants:
                wanted_since.pop(run, None)
            elif run not in wanted_since:
                level[run] = after_rest(level[run], highest)
                wanted_since[run], waited[run] = turn, 0
        while True:
            held = {run: sum(1 for _, whose in under_way if whose == run) for run in names}
            wanting = {run: level[run] for run in wanted_since if held[run] < facts[run]["cap"]}
            chosen = next_in_line(wanting, places - len(under_way))
            if not chosen:
                break
            run = chosen[0]
            assert level[run] == min(wanting.values())
            highest = max(highest, level[run])
            cost = lengths.uniform(0.1, 1.0) * facts[run]["cost"]
            used[run] += cost
            level[run] += cost / facts[run]["weight"]
            under_way.append((turn + 1 + lengths.randrange(3), run))
            waited[run] = 0
            free = [one for one in wanting if one != run]
            # None that could have had this place is further behind than a job of whoever got it.
            assert all(level[one] >= level[run] - facts[run]["cost"] / facts[run]["weight"] for one in free)
        assert len(under_way) <= places
        for run in wanted_since:
            at_own_cap = sum(1 for _, whose in under_way if whose == run) >= facts[run]["cap"]
            waited[run] = 0 if at_own_cap else waited[run] + 1
            # Each place that another gets raises it by a tenth of its longest job at least.
            ahead = facts[run]["cost"] / facts[run]["weight"]
            steps = sum(12 + ahead * one["weight"] / (0.1 * one["cost"]) for one in runs)
            assert waited[run] <= 3 * steps, f"{run} waits for ever"
    together = [run for run in names if wanted_since.get(run, 250) < 200 and facts[run]["cap"] >= places]
    for run in together:
        for other in together:
            slack = sum(facts[one]["cost"] / facts[one]["weight"] for one in (run, other))
            assert abs(level[run] - level[other]) <= slack + 1e-6 * (level[run] + level[other])


def test_the_first_share_that_fits_counts() -> None:
    shares = [
        ShareSettings(weight=3.0, runs=["protein-*"], users=["ann"]),
        ShareSettings(weight=2.0, users=["ann", "b*"]),
        ShareSettings(weight=0.5, runs=["old-?"]),
    ]
    found = {
        (run, user): getattr(share_of(shares, run, user), "weight", None)
        for run in ("protein-1", "old-1")
        for user in ("ann", "bob", "cleo")
    }
    assert list(found.values()) == [3.0, 2.0, None, 2.0, 2.0, 0.5]


# At a site ------------------------------------------------------------------------------------------------------------


@dataclass
class Jobs:
    """Of one run that always wants one more place; each job holds it for a turn."""

    seconds: float  # of a job
    used: float = 0.0
    under_way: int = 0

    def node_seconds(self) -> tuple[float, float]:
        return self.used, self.under_way * self.seconds

    def at_scheduler(self) -> int:
        return self.under_way

    def end(self) -> None:
        self.used, self.under_way = self.used + self.under_way * self.seconds, 0


def site(home: Path, runs: dict[str, Jobs], agent: str = "", shares: str = "") -> Site:
    path = home.parent / "agent.toml"
    path.write_text(f'[agent]\nhome = "{home}"\ncommand = "true"\njobs_at_once = 3\n{agent}\n{shares}')
    path.chmod(0o600)
    made = Site(load_agent(path), home, "north", cast(Any, None))
    made._agents = {run: cast(Any, SimpleNamespace(jobs=jobs)) for run, jobs in runs.items()}
    made._told = {
        run: RunHere(run=run, name=run, offer="default", owner="ann", weight=3.0 if run == "large" else 1.0)
        for run in runs
    }
    return made


def take_turns(here: Site, runs: dict[str, Jobs], number: int) -> None:
    for _ in range(number):
        here._turn += 1
        for run, agent in here._by_use():
            while here.has_place(agent.jobs):
                runs[run].under_way += 1
        here._keep_uses()
        for jobs in runs.values():
            jobs.end()


def test_a_site_gives_places_by_the_servers_weights_or_its_own_and_remembers(tmp_path: Path) -> None:
    def shared(agent: str = "", shares: str = "", *, restarts: bool = False) -> dict[str, float]:
        home = tmp_path / f"home-{len(list(tmp_path.iterdir()))}"
        runs = {"large": Jobs(seconds=700.0), "small": Jobs(seconds=100.0)}
        here = site(home, runs, agent, shares)
        take_turns(here, runs, 300)
        if restarts:
            here.close = lambda: None  # type: ignore[method-assign]  # its lease is let go by hand
            here._lease.release()
            runs["late"] = Jobs(seconds=100.0)
            before = runs["small"].used
            take_turns(here := site(home, runs, agent, shares), runs, 300)
            assert runs["late"].used == pytest.approx(runs["small"].used - before, rel=0.2)
        here._lease.release()
        return {run: jobs.used for run, jobs in runs.items()}

    found = shared(restarts=True)
    assert found["large"] / found["small"] == pytest.approx(3.0, rel=0.1)
    found = shared(shares='[[share]]\nruns = ["large"]\nweight = 1.0\n')
    assert found["large"] / found["small"] == pytest.approx(1.0, rel=0.1)
    found = shared(agent='share_by = "jobs"\n')
    assert (found["large"] / 700) / (found["small"] / 100) == pytest.approx(3.0, rel=0.1)
    found = shared(shares='[[share]]\nruns = ["large"]\nweight = 100.0\njobs_at_once = 1\n')
    assert found["large"] <= 300 * 700.0
    assert found["small"] >= 300 * 100.0, "a cap of one run leaves places to others"
