"""Low-rank adapters: it is their products that are averaged, not their matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fedqueue import tensorfile, tensorsum
from fedqueue.aggregate import Contribution, StateDict, aggregate
from fedqueue.config import parse
from fedqueue.errors import ConfigError
from fedqueue.protocol.aggregation import declaration, find_roles
from fedqueue.worker.ahead import Ahead

A, B = "layer.lora_A.weight", "layer.lora_B.weight"
ROLES = {A: "factor", B: "factor"}


def adapters(seed: int, rows: int = 6, columns: int = 7, rank: int = 2) -> StateDict:
    generator = torch.Generator().manual_seed(seed)
    return {
        A: torch.randn(rank, columns, generator=generator, dtype=torch.float64),
        B: torch.randn(rows, rank, generator=generator, dtype=torch.float64),
    }


def product(model: StateDict) -> torch.Tensor:
    return model[B].double() @ model[A].double()


def nearest(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best: torch.Tensor = (u[:, :rank] * s[:rank]) @ v[:rank]
    return best


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 4)),
    weights=st.lists(st.floats(0.05, 0.6), min_size=1, max_size=3),
    rule=st.sampled_from(["add_deltas", "mix_models"]),
)
def test_next_product_is_the_nearest_of_its_rank_to_the_sum_of_products(
    seed: int, shape: tuple[int, int, int], weights: list[float], rule: str
) -> None:
    current, *trained = (adapters(seed + number, *shape) for number in range(len(weights) + 1))
    shares = [Contribution(weight=w, trained=t, base=current) for w, t in zip(weights, trained, strict=True)]
    made = aggregate(current, shares, rule, ROLES)
    exact = product(current) + sum(
        (w * (product(t) - product(current)) for w, t in zip(weights, trained, strict=True)),
        torch.zeros_like(product(current)),
    )
    best = nearest(exact, shape[2])
    assert {name: tensor.shape for name, tensor in made.items()} == {n: t.shape for n, t in current.items()}
    error, least = torch.dist(product(made), exact), torch.dist(best, exact)
    assert error <= least + 1e-8 * (1 + exact.norm()), "no other product of this rank is nearer"


def test_an_update_alone_gives_itself_and_a_first_model_keeps_its_a() -> None:
    first = adapters(1) | {B: torch.zeros(6, 2, dtype=torch.float64)}
    trained = adapters(2)
    alone = aggregate(first, [Contribution(weight=1.0, trained=trained, base=first)], "add_deltas", ROLES)
    assert all(torch.allclose(alone[name], trained[name]) for name in alone)
    untrained = aggregate(first, [Contribution(weight=1.0, trained=first, base=first)] * 2, "add_deltas", ROLES)
    assert torch.allclose(untrained[A], first[A]), "with an A of zeros as well nothing would be learnt any more"
    assert not untrained[B].any()


def test_from_file_to_file_it_is_the_same_sum(tmp_path: Path) -> None:
    models = {name: {k: t.float() for k, t in adapters(seed).items()} for seed, name in enumerate("cxyz")}
    for name, model in models.items():
        save_file(model, tmp_path / name, metadata=declaration(ROLES))
    shares = [(0.5, "x", "c"), (0.25, "y", "z")]  # one of them stale
    tensorsum.aggregate(
        tmp_path / "c",
        [
            tensorsum.FileContribution(weight=w, trained=tmp_path / t, base=tmp_path / b, base_key=b)
            for w, t, b in shares
        ],
        "add_deltas",
        tmp_path / "out",
    )
    in_memory = aggregate(
        models["c"],
        [Contribution(weight=w, trained=models[t], base=models[b]) for w, t, b in shares],
        "add_deltas",
        ROLES,
    )
    found = load_file(tmp_path / "out")
    assert all(torch.equal(found[name], in_memory[name]) for name in ROLES)
    assert tensorfile.roles(tensorfile.read_header(tmp_path / "out"), tmp_path / "out") == ROLES, "as do later models"


def test_what_was_trained_ahead_is_carried_over_by_its_product() -> None:
    handed_in, now, newest = ({k: t.float() for k, t in adapters(seed).items()} for seed in (1, 2, 3))
    now = {A: handed_in[A], B: handed_in[B] + 0.1}
    ahead = Ahead(handed_in)
    ahead.went_on(now, steps=1, seconds=1.0, samples=1)
    carried = ahead.carry(newest, ROLES)
    exact = product(newest) + product(now) - product(handed_in)
    assert torch.dist(product(carried), nearest(exact, 2)) < 1e-5
    simulated = aggregate(newest, [Contribution(weight=1.0, trained=now, base=handed_in)], "add_deltas", ROLES)
    assert all(torch.equal(carried[name], simulated[name]) for name in ROLES), "as the simulator does it"


def test_a_factor_needs_the_other_one() -> None:
    with pytest.raises(ValueError, match=r"'layer\.lora_A\.weight' is a factor, but the other"):
        find_roles({A: "float32"}, ROLES)
    with pytest.raises(ValueError, match="neither lora_A nor lora_B"):
        find_roles({"weight": "float32"}, {"weight": "factor"})


@pytest.mark.parametrize("strategy", ["fedadam", "fadas", "scaffold"])
def test_strategies_that_do_more_than_add_up_refuse_factors(strategy: str) -> None:
    tree = {
        "run": {"strategy": strategy, "rounds": 1},
        "model": {"roles": {"*lora*": "factor"}},
        "facility": [{"name": "north"}],
    }
    with pytest.raises(ConfigError, match="cannot average products of factors"):
        parse(tree)


def test_so_do_rules_for_when_some_lie() -> None:
    tree = {
        "run": {"rounds": 1},
        "model": {"roles": {"*lora*": "factor"}},
        "trust": {"rule": "median"},
        "facility": [{"name": "north"}],
    }
    with pytest.raises(ConfigError, match=r'trust\.rule: "median" cannot average products of factors'):
        parse(tree)


def test_adapters_in_half_precision_are_summed_in_double(tmp_path: Path) -> None:
    for seed, name in enumerate("cx"):
        save_file({k: t.bfloat16() for k, t in adapters(seed).items()}, tmp_path / name, metadata=declaration(ROLES))
    share = tensorsum.FileContribution(weight=1.0, trained=tmp_path / "x", base=tmp_path / "c", base_key=0)
    tensorsum.aggregate(tmp_path / "c", [share], "add_deltas", tmp_path / "out")
    made, trained = load_file(tmp_path / "out"), load_file(tmp_path / "x")
    for name in ROLES:
        assert made[name].dtype == torch.bfloat16
        np.testing.assert_allclose(made[name].float(), trained[name].float(), rtol=0.01)
