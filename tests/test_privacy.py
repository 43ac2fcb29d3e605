"""What leaves a site that keeps an account of its privacy, and what the account says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.stats import norm

from fedqueue.agent.privacy import ENTERED, FILE, PrivacyAccount, PrivacySettings, PrivacySpentError
from fedqueue.agent.schedulers import SubmitRefusedError
from fedqueue.errors import ConfigError
from fedqueue.protocol.contract import Mechanism, Privacy, Result, Trained
from fedqueue.protocol.messages import SubmitRefused, UpdateArrived
from fedqueue.report.page import write_report
from fedqueue.worker.privacy import made_private
from tests.faults.harness import SOURCE, Run, free_port, tree_of

ROOT = Path(__file__).parent.parent
MECHANISM = Mechanism(noise=2.0)
RESULT = Result(
    began_at=0.0,
    finished_at=1.0,
    stopped_by="steps",
    bytes=0,
    sha256="",
    trained=Trained(base_version=0, steps_done=1, train_seconds=1.0),
    mechanisms=[MECHANISM],
)


# The update -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(length=st.floats(1e-3, 1e6), clip=st.floats(0.01, 100), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_without_noise_to_speak_of_an_update_is_its_change_no_longer_than_the_clip(
    tmp_path_factory: pytest.TempPathFactory, length: float, clip: float, dtype: torch.dtype
) -> None:
    base = {"w": torch.zeros(3, 4, dtype=dtype), "phase": torch.zeros(2, dtype=torch.complex64)}
    path = tmp_path_factory.mktemp("base") / "base"
    save_file({**base, "norm.running_mean": torch.zeros(5)}, path)
    direction = {"w": torch.ones(3, 4, dtype=dtype), "phase": torch.tensor([2j, 1 + 1j])}
    far = sqrt(12 + 4 + 2)
    trained = {name: tensor * (length / far) for name, tensor in direction.items()}
    roles = {"w": "parameter", "phase": "parameter", "norm.running_mean": "statistic"}
    given_back = {**trained, "norm.running_mean": torch.ones(5)}
    made = made_private(given_back, path, roles, Privacy(unit="update", clip=clip, noise=1e-9))
    moved = sqrt(sum(float(made[name].abs().double().square().sum()) for name in trained))
    assert moved == pytest.approx(min(length, clip), rel=1e-4)
    for name, tensor in trained.items():
        assert torch.allclose(made[name], tensor * min(1.0, clip / length), rtol=1e-3, atol=1e-6 * clip)
        assert made[name].dtype == tensor.dtype
    assert not made["norm.running_mean"].any(), "what layers measured stays where it is"


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_the_noise_is_as_wide_as_was_asked_and_never_the_same(library: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(200, 500)}, tmp_path / "base")
    trained: Any = {"w": torch.zeros(200, 500)} if library == "torch" else {"w": np.zeros((200, 500), np.float32)}
    privacy = Privacy(unit="update", clip=0.5, noise=3.0)
    made = [np.asarray(made_private(trained, tmp_path / "base", {"w": "parameter"}, privacy)["w"]) for _ in range(2)]
    for one in made:
        assert one.std() == pytest.approx(1.5, rel=0.02)
        assert abs(one.mean()) < 0.03
    assert abs(np.corrcoef(made[0].ravel(), made[1].ravel())[0, 1]) < 0.02


# The account ----------------------------------------------------------------------------------------------------------


def account(home: Path, **changes: Any) -> PrivacyAccount:
    return PrivacyAccount(home, PrivacySettings(**{"clip": 1.0, "noise": 4.0, "delta": 1e-5, **changes}))


def enter(made: PrivacyAccount, home: Path, name: str, result: Result = RESULT) -> float:
    (home / name).mkdir(exist_ok=True)
    return made.enter(home / name, result).epsilon


def exact_delta(epsilon: float, noise: float) -> float:
    """Of one release with Gaussian noise (Balle and Wang, 2018)."""
    return float(
        norm.cdf(1 / (2 * noise) - epsilon * noise) - exp(epsilon) * norm.cdf(-1 / (2 * noise) - epsilon * noise)
    )


def test_epsilon_is_never_less_than_the_exact_one_and_not_far_from_it(tmp_path: Path) -> None:
    """Many releases with noise s are as one with noise s / sqrt(n)."""
    made = account(tmp_path)
    for number in range(1, 17):
        epsilon = enter(made, tmp_path, str(number))
        assert exact_delta(epsilon, 2.0 / sqrt(number)) <= 1e-5
        assert exact_delta(0.75 * epsilon, 2.0 / sqrt(number)) > 1e-5


def test_an_update_is_entered_once_and_the_account_outlives_the_agent(tmp_path: Path) -> None:
    once = enter(account(tmp_path), tmp_path, "a")
    assert enter(account(tmp_path), tmp_path, "a") == once, "asked again, also by the next agent"
    assert enter(account(tmp_path), tmp_path, "b") > once
    (tmp_path / "b" / ENTERED).unlink()
    assert enter(account(tmp_path), tmp_path, "b") > enter(account(tmp_path), tmp_path, "a"), "a crash counts twice"
    (entry,) = json.loads((tmp_path / FILE).read_text())
    assert entry == {"unit": "update", "mechanism": {"noise": 2.0, "rate": 1.0, "count": 3}}


def test_what_several_threads_enter_is_all_there(tmp_path: Path) -> None:
    made = account(tmp_path)
    threads = [threading.Thread(target=enter, args=(made, tmp_path, str(number))) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / FILE).read_text())[0]["mechanism"]["count"] == 8


def test_beyond_its_budget_nothing_leaves_and_nothing_is_submitted(tmp_path: Path) -> None:
    first = account(tmp_path).spent([MECHANISM]).epsilon
    made = account(tmp_path, epsilon=1.1 * first)
    made.must_leave_room()
    enter(made, tmp_path, "a")
    with pytest.raises(SubmitRefusedError, match="privacy budget: epsilon would be"):
        made.must_leave_room()
    with pytest.raises(PrivacySpentError, match="may not leave"):
        enter(made, tmp_path, "b")
    assert json.loads((tmp_path / FILE).read_text())[0]["mechanism"]["count"] == 1
    assert enter(made, tmp_path, "a") == pytest.approx(first), "what is entered may still go"


def test_what_cannot_be_promised_is_refused(tmp_path: Path) -> None:
    plain = replace(RESULT, mechanisms=None)
    with pytest.raises(PrivacySpentError, match="was not made private"):
        enter(account(tmp_path), tmp_path, "a", plain)
    records = account(tmp_path, unit="records")
    assert 0 < enter(records, tmp_path, "b") < enter(account(tmp_path, unit="records"), tmp_path, "c")
    with pytest.raises(ConfigError, match="single records alone"):
        account(tmp_path)
    (tmp_path / FILE).write_text("[]]")
    with pytest.raises(ConfigError, match="cannot be read"):
        account(tmp_path)


# At work --------------------------------------------------------------------------------------------------------------


@pytest.mark.waits(15)
def test_what_leaves_is_on_record_and_the_run_ends_with_the_budget(tmp_path: Path) -> None:
    """North protects all its data, and has a budget for two updates; south trains by the example, record by record."""
    for_two = account(tmp_path / "none").spent([MECHANISM, MECHANISM]).epsilon
    tree = tree_of("fedavg", rounds=3, port=free_port(), options={"steps": 5})
    script = ROOT / "examples" / "private.py"
    python = f"{sys.executable} {script}"
    agent = {"command": python, "environment": {"PYTHONPATH": str(SOURCE)}}
    with Run(tmp_path, tree, agent=agent) as run:
        subprocess.run([sys.executable, str(script), "--first", str(tmp_path / "first.safetensors")], check=True)
        settings = {
            "north": f'epsilon = {1.001 * for_two}\nunit = "update"\nnoise = 4.0',
            "south": 'unit = "records"\nnoise = 1.0',
        }
        for name, more in settings.items():
            with run.toml(name).open("a") as file:
                file.write(f"\n[privacy]\nclip = 1.0\ndelta = 1e-5\n{more}\n")
        run.start()
        run.run_to_end()
        story = run.story()
    spent: dict[str, list[float]] = {"north": [], "south": []}
    for event in story.events(UpdateArrived):
        assert event.receipt.spent is not None
        assert event.receipt.spent.delta == 1e-5
        spent[event.receipt.job_id.partition("/")[0]].append(event.receipt.spent.epsilon)
    assert spent["north"] == sorted(spent["north"])
    assert spent["north"][-1] == pytest.approx(for_two)
    assert len(spent["north"]) == 2
    assert len(set(spent["south"])) == 3
    (refused,) = story.events(SubmitRefused)
    assert "privacy budget" in refused.reason
    base, first = load_file(tmp_path / "first.safetensors"), story.folder
    assert base.keys() == load_file(first / "model.safetensors").keys()
    page = write_report([run.folder], tmp_path / "report.html").read_text()
    assert "all of a site&#x27;s data" in page or "all of a site's data" in page
    assert "each record" in page
