"""Models that are taken back: on a run under way, over a kill, with what was trained from them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedqueue.cli import main
from fedqueue.ledger import LedgerReader
from tests.coordinators import Facility, Served, serving, update
from tests.waiting import wait_for


def made(served: Served) -> list[str]:
    """The digests of all models that were made, in their order."""
    with LedgerReader(served.folder / "ledger.sqlite") as ledger:
        ready = ledger.rows("SELECT body FROM events WHERE kind = 'ModelReady' ORDER BY seq")
        return [ledger.meta["first_model"], *(json.loads(row["body"])["digest"] for row in ready)]


def next_model(served: Served, who: Facility, content: bytes) -> None:
    before = served.status()["model"]
    assert who.hand_in(who.running(), content)["status"] == "accepted"
    who.taken = None
    wait_for(lambda: served.status()["model"] > before, "the next model", served.said)


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam", "fedasync"])
def test_models_are_taken_back_on_a_run_at_work_and_stay_so_over_a_kill(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, facilities=("north",), plain=True, strategy=strategy) as served:
        north = served.facility("north")
        north.poll()
        for value in (0.1, 0.2, 0.9):
            next_model(served, north, update(tmp_path, value))
        spoilt = north.running()
        assert spoilt.assignment is not None
        assert spoilt.assignment.base_version == 3
        folder = str(served.folder)
        assert main(["rollback", folder, "1"]) == 0
        assert "the next model is model 1 again" in capsys.readouterr().out
        wait_for(lambda: served.status()["model"] == 4, "model 1 again", served.said)
        assert made(served)[4] == made(served)[1]
        assert spoilt.sequence in north.poll(open=[spoilt.sequence])["cancel"], "its work is of no use"
        north.taken = None
        served.stop(signal.SIGKILL)
        served.start()
        served.agents.clear()
        north = served.facility("north")
        north.poll()
        again = north.running()
        north.taken = None
        assert again.assignment is not None
        assert again.assignment.base_version == 4
        path = served.folder / "objects"
        old = load_file(path / f"{made(served)[1]}.safetensors")["weight"]
        assert north.hand_in(again, update(tmp_path, float(old[0])))["status"] == "accepted"
        wait_for(lambda: served.status()["model"] == 5, "a model that is made from it", served.said)
        if strategy != "fedadam":  # its moments go on
            assert np.allclose(load_file(path / f"{made(served)[5]}.safetensors")["weight"], old)
        assert served.replays() > 0

        for version, said in ((5, "model 5 is the newest"), (77, "nothing after model 77"), (0, "no longer kept")):
            assert main(["rollback", folder, str(version)]) != 0
            assert said in capsys.readouterr().err
        assert main(["rollback", folder, "-1"]) != 0


def test_what_was_trained_from_a_model_that_is_taken_back_does_not_enter_later_ones(tmp_path: Path) -> None:
    """Handed in before, and waiting."""
    names, both = ("north", "south"), {"wait_for": 2}
    with serving(tmp_path, facilities=names, plain=True, strategy="fedavg", server=both) as served:
        north, south = served.facility("north"), served.facility("south")
        north.poll()
        south.poll()
        for who, value in ((north, 0.1), (south, 0.1)):
            assert who.hand_in(who.running(), update(tmp_path, value))["status"] == "accepted"
            who.taken = None
        wait_for(lambda: served.status()["model"] == 1, "a model", served.said)
        waits = north.running()
        assert waits.assignment is not None
        assert waits.assignment.base_version == 1
        assert north.hand_in(waits, update(tmp_path, 50.0))["status"] == "accepted"
        assert main(["rollback", str(served.folder), "0"]) == 0
        wait_for(lambda: served.status()["model"] == 2, "model 0 again", served.said)
        with LedgerReader(served.folder / "ledger.sqlite") as ledger:
            fates = [json.loads(row["body"])["facts"] for row in ledger.rows(
                "SELECT body FROM commands WHERE kind = 'Record' ORDER BY seq, place")]  # fmt: skip
        last = [facts for facts in fates if facts.get("job") == waits.order.job_id]
        assert [facts["fate"] for facts in last] == ["expired"]
        assert "model 1, which was taken back" in str(last[0]["reason"])
        assert made(served)[2] == made(served)[0]
