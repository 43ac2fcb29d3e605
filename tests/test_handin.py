"""What a job hands in: exactly the declared tensors, whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue.worker.job_folder import choose
from fedqueue.worker.participate import ParticipateError, participate
from tests.jobs import (
    TRAINED,
    enter,
    has_result,
    make_job,
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"b": None}, "the run declares 'b', not found among the 2 given"),
        ({"w": np.ones((3, 2))}, "'w' has shape (3, 2), the run declares (2, 3)"),
        ({"w": np.full((2, 3), np.inf)}, "'w' is not finite"),
        ({"b": [0, 0, 0]}, "'b' must be a torch tensor or a numpy array"),
    ],
)
def test_wrong_tensor_is_an_error_of_one_line_and_nothing_is_handed_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    says: str,
) -> None:
    enter(monkeypatch, make_job(tmp_path))
    given = {name: value for name, value in {**TRAINED, **change}.items() if value is not None}
    with pytest.raises(ParticipateError) as caught, participate() as work:  # noqa: PT012
        for _ in work.steps():
            pass
        work.submit(given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not has_result(tmp_path)
    assert not list(tmp_path.rglob("update.safetensors"))
    assert "nothing was handed in, so north/3 counts as failed" in capsys.readouterr().err


def test_script_without_submit_fails_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with participate() as work:
        for _ in work.steps():
            pass
    assert not has_result(tmp_path)
    assert capsys.readouterr().err.count("\n") == 1


def test_script_that_raises_hands_in_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with pytest.raises(ZeroDivisionError), participate() as work:  # noqa: PT012
        for _ in work.steps():
            1 / 0  # noqa: B018
    assert not has_result(tmp_path)
    assert "the script raised ZeroDivisionError" in capsys.readouterr().err


def test_nothing_trained_is_nothing_handed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with pytest.raises(ParticipateError, match=r"no step was done \(stopped by signal\)"), participate() as work:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in work.steps():
            pass
        work.submit(TRAINED)
    assert not has_result(tmp_path)


def test_job_hands_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with participate() as work:
        for _ in work.steps():
            pass
        work.submit(TRAINED)
        with pytest.raises(ParticipateError, match="handed in already"):
            work.submit(TRAINED)
    with pytest.raises(ParticipateError, match="north/3 has handed in already"), participate():
        pass


def test_disk_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path))
    with pytest.raises(ParticipateError, match=r"update\.safetensors: cannot be written"), participate() as work:  # noqa: PT012
        for _ in work.steps():
            pass
        shutil.rmtree(tmp_path / "jobs/3/attempt-0")
        work.submit(TRAINED)


def test_tied_shared_and_strided_tensors_keep_values_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    declared = {
        "tied": torch.zeros(4, 2),
        "embedding": torch.zeros(4, 2),
        "strided": torch.zeros(2, 3),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "scalar": torch.zeros((), dtype=torch.int64),
        "slice": torch.zeros(2),
    }
    save_file(declared, tmp_path / "m.safetensors")
    enter(monkeypatch, make_job(tmp_path, tmp_path / "m.safetensors"))
    embedding = torch.nn.Parameter(torch.arange(8.0).reshape(4, 2))
    trained = {
        "tied": embedding,
        "embedding": embedding,
        "strided": torch.arange(6.0).reshape(3, 2).T,
        "half": torch.full((3,), 1.5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "slice": torch.arange(10.0)[3:5],
    }
    with participate() as work:
        for _ in work.steps():
            pass
        work.submit({f"module.{name}": tensor for name, tensor in trained.items()})
    update = load_file(tmp_path / "jobs/3/attempt-0/update.safetensors")
    assert set(update) == set(declared)
    for name, tensor in trained.items():
        assert update[name].dtype == tensor.dtype
        assert torch.equal(update[name], tensor)


def test_prefix_is_stripped_only_if_that_makes_the_names_fit() -> None:
    shape = {"module.w": (2,)}
    assert (choose({"module.w": np.ones(2), "module.module.w": np.zeros(2)}, shape)["module.w"] == 1).all()
    assert list(choose({"_orig_mod.module.w": np.ones(2)}, {"w": (2,)})) == ["w"]
    with pytest.raises(ParticipateError, match="declares 'w'"):
        choose({"module.w": np.ones(2), "b": np.ones(2)}, {"w": (2,), "b": (2,)})
