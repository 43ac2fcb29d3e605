"""What Adam learned, shared between facilities: with models, in jobs, and in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedqueue import participate, tensorfile
from fedqueue.aggregate import Contribution, aggregate, roles_of
from fedqueue.config import parse
from fedqueue.errors import ConfigError
from fedqueue.moments import ONWARD, TRUST, Moments, no_moments, put_together, taken_apart
from fedqueue.protocol.aggregation import is_moment, split_moments
from fedqueue.sim.runner import simulate
from tests.conftest import facility
from tests.jobs import enter, make_job, update_of

MATRIX = torch.tensor([[1.0, 2.0], [3.0, 6.0]])


def test_the_mean_of_what_travels_is_what_travels_of_the_mean() -> None:
    """So it does not matter whether many updates are averaged, or averages of them."""
    torch.manual_seed(1)
    seconds = [torch.rand(4, 3, 2, 2) for _ in range(3)]
    weights = (0.5, 0.3, 0.2)
    apart = [taken_apart("w", second) for second in seconds]
    mean = {
        name: torch.stack([w * parts[name] for w, parts in zip(weights, apart, strict=True)]).sum(0)
        for name in apart[0]
    }
    together = sum(w * second for w, second in zip(weights, seconds, strict=True))
    for name, part in taken_apart("w", torch.as_tensor(together)).items():
        torch.testing.assert_close(mean[name], part)
    assert sum(part.numel() for part in mean.values()) == 4 + 12
    again = put_together("w", (4, 3, 2, 2), mean)
    torch.testing.assert_close(again.mean(), torch.as_tensor(together).mean())


def test_a_facility_that_hands_in_nonsense_makes_no_step_longer_than_a_few_fresh_ones() -> None:
    for nonsense in (-1.0, 1e-38):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        Moments(optimizer, [("w", parameter)], {"w.second_moment": torch.tensor([nonsense, 1e-38, 1.0])}, None, 0.1)
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert parameter.abs().max() <= 0.1 * (TRUST + 2) ** 0.5


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"weight_decay": 0.1}])
def test_adam_goes_on_as_by_hand(kind: dict[str, Any], changes: bool) -> None:
    """From known moments, step by step in double precision, with one count for each moment."""
    torch.manual_seed(2)
    rate, (beta1, beta2), second = 0.05, (0.9, 0.999), MATRIX.double()
    module = nn.Linear(2, 2, bias=False)
    optimizer = (torch.optim.AdamW if "weight_decay" in kind else torch.optim.Adam)(
        module.parameters(), lr=rate, **kind
    )
    moved = torch.tensor([[0.3, -0.1], [0.0, 0.2]])
    given = taken_apart("weight", MATRIX)
    adam = Moments(optimizer, module.named_parameters(), given, {"weight": moved} if changes else None, rate)
    now = module.weight.detach().double().clone()
    first = -ONWARD * (1 - beta1) / rate * second.sqrt() * moved.double() if changes else torch.zeros(2, 2).double()
    count = TRUST if changes else 0
    second = second * (1 - beta2**TRUST)
    for step in range(1, 6):
        gradient = torch.randn(2, 2)
        module.weight.grad = gradient.clone()
        optimizer.step()
        first = beta1 * first + (1 - beta1) * gradient.double()
        second = beta2 * second + (1 - beta2) * gradient.double() ** 2
        if "weight_decay" in kind:  # is of the order of the bias too: let it be
            now = module.weight.detach().double().clone()
            continue
        way = first / (1 - beta1 ** (step + count))
        now = now - rate * way / ((second / (1 - beta2 ** (step + TRUST))).sqrt() + 1e-8)
        torch.testing.assert_close(module.weight.detach().double(), now, rtol=1e-5, atol=1e-6)
    assert [group["lr"] for group in optimizer.param_groups] == [rate]
    for name, part in taken_apart("weight", second / (1 - beta2 ** (TRUST + 5))).items():
        torch.testing.assert_close(adam.end()[name].double(), part, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_a_job_goes_on_by_a_share_of_the_last_change() -> None:
    parameter, moved = nn.Parameter(torch.zeros(4)), torch.tensor([1.0, -2.0, 0.5, 0.0])
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    Moments(optimizer, [("w", parameter)], {"w.second_moment": torch.full((4,), 9.0)}, {"w": moved}, 0.01)
    for _ in range(300):
        parameter.grad = torch.zeros(4)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), ONWARD * moved, rtol=0.2, atol=1e-3)


def test_what_does_not_travel_is_left_alone() -> None:
    shared, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([shared, own], lr=0.1)
    plain = torch.optim.Adam([lonely := nn.Parameter(torch.zeros(2))], lr=0.1)
    given = {"shared.second_moment": torch.ones(2), "gone.second_moment": torch.ones(5)}
    adam = Moments(optimizer, [("shared", shared), ("own", own)], given, None, 0.1)
    for _ in range(3):
        for parameter in (shared, own, lonely):
            parameter.grad = torch.full((2,), 0.5)
        optimizer.step()
        plain.step()
    assert torch.equal(own, lonely)
    assert not torch.equal(shared, lonely)
    left = adam.end()
    assert set(left) == set(given)
    assert torch.equal(left["gone.second_moment"], torch.ones(5))
    sgd = torch.optim.SGD([shared], lr=0.1, momentum=0.9)
    assert Moments(sgd, [("shared", shared)], given, None, 0.1).end() == given


# Models and configs ---------------------------------------------------------------------------------------


def test_moments_are_averaged_as_statistics_and_the_first_models_zeros_do_not_count(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 2, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.int8)}, tmp_path / "raw")
    tensorfile.select(tmp_path / "raw", tmp_path / "first", ["*"], moments=True)
    first = load_file(tmp_path / "first")
    roles = roles_of(first)
    assert {name for name, role in roles.items() if role == "statistic"} == {
        "w.second_moment_rows",
        "w.second_moment_columns",
    }
    assert set(no_moments(split_moments(first)[0], roles)) == set(split_moments(first)[1])

    def update(value: float) -> dict[str, Tensor]:
        return {**first, **taken_apart("w", torch.full((2, 2), value))}

    contributions = [Contribution(weight=0.25, trained=update(v), base=first) for v in (1.0, 3.0)]
    made = aggregate(first, contributions, "add_deltas", roles, from_first=True)
    assert put_together("w", (2, 2), made).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    content = tensorfile.write(tmp_path / "made", {n: t.float().numpy() for n, t in made.items()})
    tensorfile.export(tmp_path / "made", tmp_path / "plain", content.sha256)
    assert sorted(load_file(tmp_path / "plain")) == ["n", "w"]
    with pytest.raises(tensorfile.TensorFileError):
        tensorfile.export(tmp_path / "made", tmp_path / "other", "0" * 64)
    for _ in range(2):  # as what was fetched from a server, with moments and without
        tensorfile.export(tmp_path / "made", tmp_path / "made", content.sha256)
        assert (tmp_path / "made").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "shared"),
        ({"strategy": {"jit": {"stay": "off"}}}, "own"),
        ({"task": {"name": "digits", "optimizer": "sgd"}}, "own"),
        ({"worker": {"command": "python own.py"}}, "own"),
        ({"worker": {"command": "python own.py"}, "model": {"moments": "shared"}}, "shared"),
        ({"evaluation": {"command": "python score.py"}}, "own"),
        ({"model": {"moments": "own"}}, "own"),
        ({"trust": {"masked": True}, "strategy": {"jit": {"absent": 0.0, "rounds": "fixed"}}}, "own"),
    ],
)
def test_who_shares_moments_unless_told(changes: dict[str, Any], found: str) -> None:
    sites = [facility(name) for name in "abc"]
    tree = {"run": {"strategy": "jit", "seconds": 9.0}, "task": {"name": "digits"}, "facility": sites}
    assert parse({**tree, **changes}).model.moments == found
    assert parse({**tree, "run": {"strategy": "fedavg", "seconds": 9.0}}).model.moments == "own"


def test_what_a_site_keeps_private_is_not_in_its_moments(tmp_path: Path) -> None:
    from fedqueue.protocol.contract import Privacy
    from fedqueue.worker.privacy import made_private

    base = model_file(tmp_path / "base", 4.0)
    roles = roles_of(load_file(base))
    learned = {name: tensor + 1.0 for name, tensor in load_file(base).items()}
    made = made_private(learned, base, roles, Privacy(unit="update", clip=0.1, noise=1e-6))
    assert all(torch.equal(made[name], load_file(base)[name]) for name in roles if is_moment(name))
    assert not torch.equal(made["weight"], load_file(base)["weight"])


def test_sharing_what_the_optimizer_has_not_is_refused() -> None:
    tree = {"run": {"seconds": 9.0}, "task": {"optimizer": "sgd"}, "facility": [facility("a")]}
    with pytest.raises(ConfigError, match=r'model.moments: "shared" is for Adam'):
        parse({**tree, "model": {"moments": "shared"}})


def test_a_skewed_run_learns_more_with_shared_moments() -> None:
    """Dirichlet 0.1; without them its facilities pull apart."""

    def best(seed: int, moments: str) -> float:
        tree = {
            "run": {"strategy": "jit", "seed": seed, "seconds": 30.0, "learning_rate": 0.003},
            "task": {"name": "digits", "dirichlet_alpha": 0.1},
            "model": {"moments": moments},
            "facility": [facility("east"), facility("west", steps_per_second=20.0), facility("north")],
        }
        found: float = simulate(parse(tree))["score"]["max"]
        return found

    gains = [best(seed, "shared") - best(seed, "own") for seed in range(301, 305)]
    assert fmean(gains) > 0.02, gains


# Jobs -----------------------------------------------------------------------------------------------------


def model_file(path: Path, second: float, weight: float = 0.0) -> Path:
    tensors = {"weight": torch.full((1, 2), weight), "bias": torch.zeros(1)}
    moments = {**taken_apart("weight", torch.full((1, 2), second)), **taken_apart("bias", torch.full((1,), second))}
    save_file({**tensors, **moments}, path)
    return path


def test_a_script_that_knows_nothing_of_it_works_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, make_job(tmp_path, model_file(tmp_path / "m", 4.0), steps=2))
    module = nn.Linear(2, 1)
    with participate() as work:
        module.load_state_dict(work.model())  # strict
        for _ in work.steps():
            pass
        work.submit(module.state_dict())
    update = update_of(tmp_path)
    assert update["weight.second_moment_columns"].tolist() == [4.0, 4.0], "as they came"
    assert set(split_moments(update)[0]) == {"weight", "bias"}


def test_a_script_without_torch_hands_them_back_too(tmp_path: Path) -> None:
    from tests.jobs import run_script

    script = (
        "import sys, numpy, fedqueue\n"
        "with fedqueue.participate() as work:\n"
        "    for _ in work.steps(): pass\n"
        "    work.submit({'weight': numpy.ones((1, 2), numpy.float32), 'bias': numpy.ones(1, numpy.float32)})\n"
        "assert 'torch' not in sys.modules\n"
    )
    job = run_script(tmp_path, make_job(tmp_path, model_file(tmp_path / "m", 4.0), steps=1), script)
    assert job.communicate()[1] == ""
    assert update_of(tmp_path)["bias.second_moment"].tolist() == [4.0]


def test_a_prepared_optimizer_goes_on_and_hands_in_what_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first part from second moments alone, in the next one also from the way that the model went."""
    enter(monkeypatch, make_job(tmp_path, model_file(tmp_path / "v3", 4.0), steps=3, stay=0.4))
    attempt, module, went = tmp_path / "jobs/3/attempt-0", nn.Linear(2, 1), []
    optimizer = torch.optim.Adam(module.parameters())
    with participate() as work:
        for part in work.parts():
            module.load_state_dict(part.model())
            for group in optimizer.param_groups:
                group["lr"] = part.learning_rate
            part.prepare(optimizer, module)
            before = module.weight.detach().clone()
            for _ in part.steps():
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            went.append((module.weight.detach() - before).mean().item())
            if part.part == 0:
                (tmp_path / "v3").unlink()  # the agent clears it away
                work_of_next = {"base_version": 5, "steps": 50, "learning_rate": 0.01}
                (attempt / "part-1").mkdir()
                newer = model_file(tmp_path / "v5", 9.0, weight=2.0)
                beside = attempt / "beside"
                beside.write_text(json.dumps({**work_of_next, "model": str(newer)}))
                beside.replace(attempt / "part-1/further.json")
            part.submit(nn.parallel.DataParallel(module).state_dict())
    assert went[0] == 0.0
    assert went[1] == pytest.approx(ONWARD * 2.0 / 2, rel=0.1), "half as far as in each of the two versions"
    decayed = 4.0 * (1 - 0.999**TRUST) * 0.999**3 / (1 - 0.999 ** (TRUST + 3))
    assert update_of(tmp_path)["bias.second_moment"] == pytest.approx(decayed)
    assert is_moment("bias.second_moment")
    assert np.isfinite(update_of(tmp_path)["weight"]).all()
