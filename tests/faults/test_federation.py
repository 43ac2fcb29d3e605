"""Sites join a federation once; runs come and go, several at a time, and what goes wrong with one harms no other."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from fedqueue.protocol.messages import JobStarted, RunPaused, SubmitJob, UpdateArrived
from tests.faults.federation import COMMAND, SERVER, SITES, Served

pytestmark = pytest.mark.waits(12)


def test_two_runs_at_once_over_sites_that_joined_once(tmp_path: Path) -> None:
    with Served(tmp_path) as federation:
        federation.submit("first", rounds=4)
        federation.submit("second", strategy="jit", rounds=3)
        for name in ("first", "second"):
            federation.wait_for_end(name)
        federation.check("first", rounds=4)
        federation.check("second", rounds=3)
        federation.submit("third", rounds=2)  # nobody enrols again
        federation.wait_for_end("third")
        federation.check("third", rounds=2)
        federation.wait(
            "it is listed as over", lambda: all("over" in run["state"] for run in federation.listed()["runs"])
        )
        found = federation.listed()
        assert [site["enrolled"] for site in found["sites"]] == [True, True]
        assert {run["name"] for run in found["runs"]} == {"first", "second", "third"}
        federation.say("models", federation.run_folder("third"), "newest", "--out", tmp_path / "model.safetensors")
        assert (tmp_path / "model.safetensors").stat().st_size > 0
        assert "all rounds done" in federation.say("logs", federation.run_folder("third"))


def test_a_federation_that_is_killed_goes_on_with_all_its_runs(tmp_path: Path) -> None:
    with Served(tmp_path) as federation:
        for name in ("first", "second"):
            federation.submit(name, rounds=8)
        for name in ("first", "second"):
            federation.wait("updates", lambda name=name: federation.happened(name, UpdateArrived))
        federation.kill(SERVER)
        federation.kill("north")
        federation.start(SERVER, "north")
        for name in ("first", "second"):
            federation.wait_for_end(name)
            federation.check(name, rounds=8)


def test_a_run_that_cannot_go_on_harms_no_other(tmp_path: Path) -> None:
    with Served(tmp_path) as federation:
        federation.submit("hindered", rounds=1000)
        federation.wait("a job", lambda: federation.happened("hindered", JobStarted))
        objects = federation.run_folder("hindered") / "objects"
        objects.rename(objects.with_name("elsewhere"))
        objects.write_text("no folder")
        federation.wait("it stands still", lambda: federation.happened("hindered", RunPaused))
        federation.submit("healthy", rounds=3)
        federation.wait_for_end("healthy")
        federation.check("healthy", rounds=3)
        (hindered,) = [run for run in federation.listed()["runs"] if run["name"] == "hindered"]
        assert hindered["state"].startswith("paused: ")
        objects.unlink()
        objects.with_name("elsewhere").rename(objects)
        federation.say("resume", federation.run_folder("hindered"))
        before = len(federation.story("hindered").events(UpdateArrived))
        federation.wait("it goes on", lambda: federation.happened("hindered", UpdateArrived, before + 1))
        federation.say("stop", federation.run_folder("hindered"))
        federation.wait_for_end("hindered")


def test_a_site_takes_part_by_its_offers_alone(tmp_path: Path) -> None:
    special = {"offer": {"special": {"command": COMMAND, "runs": ["chosen*"], "users": ["operator"]}}}
    with Served(tmp_path, sites={"north": special, "south": {}}) as federation:
        federation.wait("both are heard of", lambda: all(s["offers"] for s in federation.listed()["sites"]))
        said = federation.submit("chosen", worker={"offer": "special"}, rounds=2)
        assert "south takes no part: it has no offer 'special', only default" in said
        federation.wait_for_end("chosen")
        assert {event.job_id.partition("/")[0] for event in federation.story("chosen").events(JobStarted)} == {"north"}
        refused = federation.config("nobody", worker={"offer": "unheard"})
        said = federation.say("submit", federation.folder, refused, fails=True)
        assert "worker.offer: no facility has the offer 'unheard'" in said
        assert not federation.run_folder("nobody").exists()
        other = federation.config("other", worker={"offer": "special"}, rounds=2)  # which north does not let use it
        said = federation.say("submit", federation.folder, other, fails=True)
        assert "north takes no part: its offer 'special' is not for this run or this user" in said


def test_what_a_site_shares_is_kept_to_by_all_runs_together(tmp_path: Path) -> None:
    with Served(tmp_path, sites={"north": {"agent": {"jobs_at_once": 1}, "scheduler": {"slots": 4}}}) as federation:
        for name in ("first", "second"):
            federation.submit(name, rounds=5)
        for name in ("first", "second"):
            federation.wait_for_end(name)
            federation.check(name, rounds=5)
        states = (tmp_path / "north").glob("scheduler/jobs/*/state.json")
        spans = sorted(
            (found["started_at"], found["ended_at"]) for found in map(read_state, states) if found["started_at"]
        )
        assert len(spans) >= 10
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "one after the other"


def test_a_run_with_three_times_the_weight_gets_three_of_four_places(tmp_path: Path) -> None:
    served = Served(tmp_path, sites={"north": {"agent": {"jobs_at_once": 1, "share_by": "jobs"}}})
    with (served.folder / "federation.toml").open("a") as file:
        file.write('\n[[share]]\nruns = ["heavy"]\nweight = 3.0\n')

    def starts(name: str) -> list[float]:
        jobs = (served.home("north") / "runs" / served.run_id(name)).glob("jobs/*/attempt-0/started")
        return sorted(path.stat().st_mtime for path in jobs)

    with served as federation:
        for name in ("light", "heavy"):
            federation.submit(name, rounds=100)
        federation.wait("both have had their turns", lambda: len(starts("heavy")) > 12 and len(starts("light")) > 3)
        heavy, light = starts("heavy"), starts("light")
    begin, end = max(heavy[0], light[0]), heavy[12]
    counts = [sum(begin <= at <= end for at in found) for found in (heavy, light)]
    assert 2 <= counts[0] / counts[1] <= 4.5, counts  # of 13 starts that are one run's, 4 of the other, or 1 less


def read_state(path: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(path.read_text())
    return found


def test_who_is_revoked_is_out_of_every_run_at_once(tmp_path: Path) -> None:
    with Served(tmp_path) as federation:
        for name in ("first", "second"):
            federation.submit(name, rounds=1000)
            federation.wait("updates", lambda name=name: federation.happened(name, UpdateArrived))
        federation.say("revoke", federation.folder, "north")
        federation.wait("its agent has ended", lambda: federation.processes["north"].poll() is not None)
        for name in ("first", "second"):
            story = federation.story(name)
            arrived = [event for event in story.events(UpdateArrived) if event.receipt.job_id.startswith("north/")]
            more = len(story.events(UpdateArrived)) + 3
            federation.wait("south goes on", lambda name=name, n=more: federation.happened(name, UpdateArrived, n))
            after = federation.story(name).events(UpdateArrived)
            assert len([event for event in after if event.receipt.job_id.startswith("north/")]) == len(arrived)
        refused = federation.say("revoke", federation.run_folder("first"), "south", fails=True)
        assert "who may ask is for the whole federation to say" in refused


def test_what_a_run_has_learnt_outlives_it(tmp_path: Path) -> None:
    with Served(tmp_path, sites={"north": {"scheduler": {"extra_waits": [1.0]}}}) as federation:
        federation.submit("first", rounds=4)
        federation.wait_for_end("first")
        first = federation.story("first")
        federation.submit("second", rounds=2)
        federation.wait_for_end("second")
        second = federation.check("second", rounds=2)
    waits = [event.admission_delay for event in first.events(JobStarted)]
    (before, *_), (after, *_) = (story.commands(SubmitJob) for story in (first, second))
    assert (before.order.purpose, after.order.purpose) == ("warm_up", "train")
    (profile,) = second.meta["plan"]["facilities"]
    assert profile["steps_per_second"] > 0
    assert min(waits) <= profile["first_delay"] <= max(waits)
    assert [wait for _, wait in profile["known_waits"]] == pytest.approx(waits)


def test_words_for_a_federation_are_not_for_a_run(tmp_path: Path) -> None:
    with Served(tmp_path) as federation:
        federation.submit("first", rounds=1000)
        assert "is not the folder of a federation" in federation.say("list", tmp_path, fails=True)
        assert "is a run of the federation" in federation.say("serve", federation.run_folder("first"), fails=True)
        taken = federation.config("port", server={"port": 8440})
        assert "server.port: is the federation's to say" in federation.say(
            "submit", federation.folder, taken, fails=True
        )
        assert set(SITES) == {site["name"] for site in federation.listed()["sites"]}
