"""Training is repeatable to the bit, learns, and a user's own task loads or says in one line why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedqueue import data
from fedqueue.errors import ConfigError, DataError, TaskError
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import StateDict, Task, Trained, make_task

OWN_TASK = """
import torch
from torch import nn
from fedqueue.training.workload import Workload

def classes(width=8):
    x = torch.randn(120, 4)
    y = (x.sum(1) > 0).long()
    def make():
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
    return Workload(make_model=make, train=(x, y), test=(x[:40], y[:40]))

def numbers(scored=False):
    x = torch.randn(60, 3)
    y = x.sum(1, keepdim=True)
    def closeness(outputs, targets):
        return 7.0
    return Workload(make_model=lambda: nn.Linear(3, 1), train=(x, y), test=(x, y),
                    loss=nn.functional.mse_loss, score=closeness if scored else None)

def raises():
    raise RuntimeError("no such\\nluck")

def returns_nothing():
    return None

def uneven():
    x = torch.zeros(3, 1)
    return Workload(make_model=lambda: nn.Linear(1, 1), train=(x, x[:2]), test=(x, x))

def does_not_fit():
    x, y = torch.zeros(3, 1), torch.zeros(3).long()
    return Workload(make_model=lambda: nn.Linear(2, 2), train=(x, y), test=(x, y))

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "broken_task.py").write_text("import package_that_is_not_there")
    (tmp_path / "angry_task.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("own_task", "broken_task", "angry_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def same_bits(one: StateDict, other: StateDict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def own(function: str = "classes", *, seed: int = 0, **fields: object) -> Task:
    settings = TaskSettings(name=f"own_task:{function}", batch_size=16, **fields)  # type: ignore[arg-type]
    return make_task(settings, facilities=3, seed=seed)


def train(task: Task, model: StateDict, *, facility: int = 1, key: int = 5, steps: int = 12) -> Trained:
    return task.train(facility=facility, model=model, steps=steps, learning_rate=0.01, key=key)


def test_the_same_job_gives_the_same_bits_whatever_ran_before() -> None:
    task = own()
    start = task.initial_model()
    kept = {name: tensor.clone() for name, tensor in start.items()}
    first = train(task, start)
    assert same_bits(start, kept)
    torch.rand(7)
    other = train(task, first.model, facility=0, key=6)
    task.score(other.model)
    again = train(task, start)
    assert same_bits(first.model, again.model)
    assert first.loss == again.loss
    assert same_bits(first.model, train(own(), own().initial_model()).model)
    assert not same_bits(first.model, train(task, start, key=6).model)
    assert not same_bits(start, own(seed=1).initial_model())


def test_training_leaves_the_global_random_numbers_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    task = own()
    train(task, task.initial_model())
    assert torch.equal(torch.rand(3), expected)


def test_results_share_no_memory_and_carry_buffers() -> None:
    task = own()
    result = train(task, task.initial_model(), steps=4)
    kept = {name: tensor.clone() for name, tensor in result.model.items()}
    assert result.model["1.num_batches_tracked"] == 4
    assert result.samples == 4 * 16
    assert not any(tensor.requires_grad for tensor in result.model.values())
    train(task, result.model)
    for tensor in task.initial_model().values():
        tensor.zero_()
    assert same_bits(result.model, kept)
    assert not same_bits(task.initial_model(), {name: torch.zeros_like(t) for name, t in kept.items()})


@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_the_loop_equals_a_plain_one(optimizer: str, proximal: float) -> None:
    """One batch a step and all samples in it, so that only the order inside the batch is the task's choice."""
    momentum = 0.9 if optimizer == "sgd" else 0.0
    settings = TaskSettings(
        name="own_task:numbers",
        partition="iid",
        batch_size=60,
        optimizer=optimizer,  # type: ignore[arg-type]
        momentum=momentum,
        weight_decay=0.1,
        proximal=proximal,
    )
    task = make_task(settings, facilities=1, seed=0)
    result = train(task, task.initial_model(), facility=0)

    import own_task  # type: ignore[import-not-found]

    from fedqueue.training.tasks import derive_seed

    torch.manual_seed(derive_seed("workload", "own_task:numbers"))
    inputs, targets = own_task.numbers().train
    plain = nn.Linear(3, 1)
    plain.load_state_dict(task.initial_model())
    parameters = list(plain.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    step: torch.optim.Optimizer
    if optimizer == "sgd":
        step = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)
    else:
        step = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer](parameters, lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(12):
        step.zero_grad()
        loss = nn.functional.mse_loss(plain(inputs), targets)
        away = sum(((p - s).square().sum() for p, s in zip(parameters, start, strict=True)), torch.zeros(()))
        (loss + proximal / 2 * away).backward()  # type: ignore[no-untyped-call]
        step.step()
        losses.append(loss.item())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(result.model[name], tensor)
    assert result.loss == pytest.approx(sum(losses) / 12, rel=1e-5)


def test_digits_trained_in_one_place_reach_95_percent() -> None:
    task = make_task(TaskSettings(name="digits"), facilities=1, seed=42)
    assert task.data_sizes() == (1438,)
    start = task.initial_model()
    before = task.score(start)
    result = task.train(facility=0, model=start, steps=300, learning_rate=0.005, key=0)
    after = task.score(result.model)
    assert after["score"] >= 0.95
    assert after["loss"] < before["loss"]


def test_subsets_and_parts_follow_the_settings_and_the_seed() -> None:
    settings = TaskSettings(name="digits", train_samples=400, test_samples=50, dirichlet_alpha=0.1)
    sizes = make_task(settings, facilities=4, seed=1).data_sizes()
    assert sum(sizes) == 400
    assert min(sizes) >= 50
    assert sizes == make_task(settings, facilities=4, seed=1).data_sizes()
    assert sizes != make_task(settings, facilities=4, seed=2).data_sizes()
    with pytest.raises(ConfigError, match="train_samples is 9999 but the task has only 1438"):
        make_task(TaskSettings(name="digits", train_samples=9999), facilities=4, seed=1)
    with pytest.raises(ConfigError, match="too few for 4 facilities"):
        make_task(TaskSettings(name="digits", train_samples=3), facilities=4, seed=1)


def test_mnist_is_the_papers_network_and_learns() -> None:
    try:
        for name in data.SHA256:
            data.find(name)
    except DataError as error:
        pytest.skip(str(error))
    settings = TaskSettings(name="mnist", train_samples=2000, test_samples=500)
    task = make_task(settings, facilities=2, seed=42)
    start = task.initial_model()
    assert sum(tensor.numel() for tensor in start.values()) == 421_642
    result = task.train(facility=0, model=start, steps=20, learning_rate=0.001, key=0)
    assert all(tensor.is_contiguous() for tensor in result.model.values())
    assert task.score(result.model)["loss"] < task.score(start)["loss"] - 0.3


def test_an_own_task_takes_options_and_its_score() -> None:
    assert own(options={"width": 5}).initial_model()["0.weight"].shape == (5, 4)
    scored = own("numbers", partition="iid", options={"scored": True})
    assert scored.score(scored.initial_model())["score"] == 7.0
    plain = own("numbers", partition="iid")
    scores = plain.score(plain.initial_model())
    assert scores["score"] == -scores["loss"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cifar", "task 'cifar' is not known; use one of 'digits', 'mnist', 'cifar100', or your own"),
        (":x", "is not known"),
        ("absent_task:make", "there is no module 'absent_task' in the current folder or on PYTHONPATH"),
        ("broken_task:make", "module 'package_that_is_not_there' is not installed"),
        ("angry_task:make", "importing 'angry_task' raised ZeroDivisionError"),
        ("own_task:absent", "module 'own_task' has no function 'absent'"),
        ("own_task:not_a_function", "module 'own_task' has no function 'not_a_function'"),
        ("own_task:raises", "its function raised RuntimeError: no such"),
        ("own_task:returns_nothing", "its function must return a Workload, not NoneType"),
        ("own_task:uneven", "train needs as many inputs as targets and at least one, found shapes (3, 1) and"),
    ],
)
def test_a_task_that_cannot_be_loaded_says_why_in_one_line(name: str, line: str) -> None:
    with pytest.raises(TaskError) as caught:
        make_task(TaskSettings(name=name, partition="iid"), facilities=1, seed=0)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_take_its_data_is_a_task_error() -> None:
    task = own("does_not_fit", partition="iid")
    with pytest.raises(TaskError, match="training for facility 1 raised RuntimeError"):
        train(task, task.initial_model())
    with pytest.raises(TaskError, match="scoring raised RuntimeError"):
        task.score(task.initial_model())


def test_a_skewed_split_needs_integer_labels() -> None:
    with pytest.raises(ConfigError, match="'dirichlet' needs one integer label a sample"):
        own("numbers")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more, found 0"),
        ({"threads": 0}, "threads must be 1 or more, found 0"),
        ({"train_samples": 0}, "train_samples must be 1 or more, found 0"),
        ({"dirichlet_alpha": 0.0}, "dirichlet_alpha must be more than 0, found 0.0"),
        ({"momentum": 0.5}, "momentum must be 0 with optimizer 'adam', found 0.5"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more, found -1.0"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd, adamw, found 'lion'"),
    ],
)
def test_settings_name_the_field_that_is_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        TaskSettings(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_settings_and_data_do_not_load_torch() -> None:
    code = "import sys, fedqueue.data, fedqueue.training.job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
