"""The weighted sum against a plain one in double precision, and every way an update can fail to fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue import aggregate as module
from fedqueue import tensorfile, tensorsum
from fedqueue.aggregate import Contribution, StateDict, aggregate, misfit

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def model(generator: torch.Generator, dtype: torch.dtype = torch.float32, step: int = 0) -> StateDict:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "weight": draw(5, 7),
        "transposed": draw(4, 6).t(),
        "scalar": draw(),
        "empty": draw(0),
        "norm.running_mean": draw(3),
        "norm.num_batches_tracked": torch.tensor(step),
    }


def oracle(current: StateDict, contributions: list[Contribution], rule: str, name: str) -> torch.Tensor:
    if name == "norm.running_mean":
        shares = [(c.weight, c.trained[name].double()) for c in contributions]
        given = sum(weight for weight, _ in shares)
        if given == 0 or (rule == "mix_models" and given < 1):
            shares.append((1 - given, current[name].double()))
        return sum((weight * value for weight, value in shares), torch.zeros(3)) / sum(weight for weight, _ in shares)
    total = current[name].double()
    for c in contributions:
        start = c.base if rule == "add_deltas" else current
        total = total + c.weight * (c.trained[name].double() - start[name].double())
    return total


WEIGHTS = st.floats(0, 1, allow_subnormal=False)  # of which the oracle could make no mean


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(REAL),
    rule=st.sampled_from(["add_deltas", "mix_models"]),
    updates=st.lists(st.tuples(WEIGHTS, st.sampled_from(REAL), st.integers(0, 2)), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 4, 1 << 18]),
)
def test_result_equals_the_sum_in_double_precision_and_inputs_stay(
    seed: int,
    dtype: torch.dtype,
    rule: str,
    updates: list[tuple[float, torch.dtype, int]],
    chunk: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bases = [model(generator, dtype) for _ in range(3)]
    current = bases[0]
    contributions = [
        Contribution(weight=weight, trained=model(generator, kind, step), base=bases[base])
        for step, (weight, kind, base) in enumerate(updates)
    ]
    given_in = [*bases, *(c.trained for c in contributions)]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in given_in]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_VALUES", chunk)
        result = aggregate(current, contributions, rule)
    assert list(result) == list(current)
    for name, tensor in result.items():
        assert tensor.dtype == current[name].dtype
        assert tensor.shape == current[name].shape
        assert tensor.is_contiguous()
        if name == "norm.num_batches_tracked":
            assert 0 <= tensor <= len(updates) - 1
            continue
        precise = oracle(current, contributions, rule, name)
        # A value rounds by one unit of the result's type, and each term of a float32 sum by one of float32.
        tolerance = 2 * torch.finfo(dtype).eps + (0 if dtype == torch.float64 else 60 * 2**-24)
        torch.testing.assert_close(tensor.double(), precise, rtol=tolerance, atol=max(tolerance, 1e-14))
    for state, copy in zip(given_in, before, strict=True):
        assert all(torch.equal(state[name], copy[name]) for name in copy)


def test_without_contributions_the_model_stays() -> None:
    current = model(torch.Generator().manual_seed(1))
    result = aggregate(current, [], "add_deltas")
    assert result is not current
    assert all(torch.equal(result[name], current[name]) for name in current)


def test_weights_that_sum_to_one_over_the_current_model_give_the_mean_of_the_updates() -> None:
    current = {"w": torch.full((3,), 1e6)}
    contributions = [
        Contribution(weight=0.5, trained={"w": torch.full((3,), value)}, base=current) for value in (1.0, 3.0)
    ]
    # Exact, because the current model's factor is exactly zero: it does not enter the sum at all.
    assert aggregate(current, contributions, "add_deltas")["w"].tolist() == [2.0, 2.0, 2.0]


def test_complex_tensors_are_summed_and_integers_come_from_the_newest_without_sharing_memory() -> None:
    current = {"spectrum": torch.tensor([1 + 1j]), "seen": torch.tensor([False])}
    newest = {"spectrum": torch.tensor([3 - 1j]), "seen": torch.tensor([True])}
    result = aggregate(current, [Contribution(weight=0.5, trained=newest, base=current)], "add_deltas")
    assert result["spectrum"].tolist() == [2 + 0j]
    result["seen"][0] = False
    assert newest["seen"].tolist() == [True]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="rule must be"):
        aggregate({}, [], "average")


def changed(name: str, tensor: torch.Tensor) -> StateDict:
    return model(torch.Generator().manual_seed(2)) | {name: tensor}


BAD = torch.tensor([1.0, np.nan, -np.inf])


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"weight": torch.zeros(5, 7)}, "tensor 'transposed' (and 4 more) is missing"),
        (changed("extra", BAD), "tensor 'extra' is unexpected"),
        (changed("weight", torch.zeros(7, 5)), "tensor 'weight' has shape (7, 5), expected (5, 7)"),
        (changed("scalar", torch.tensor(1)), "tensor 'scalar' has type int64, expected float32"),
        (
            changed("norm.num_batches_tracked", torch.tensor(1.0)),
            "tensor 'norm.num_batches_tracked' has type float32, expected int64",
        ),
        (changed("norm.running_mean", BAD), "'norm.running_mean' has 2 of 3 values that are not finite"),
        (changed("scalar", torch.tensor(torch.inf).bfloat16()), "'scalar' has 1 of 1 values"),
    ],
)
def test_misfit_names_the_tensor_and_the_reason(update: StateDict, reason: str) -> None:
    found = misfit(update, model(torch.Generator().manual_seed(3)))
    assert found is not None
    assert reason in found
    assert "\n" not in found


@pytest.mark.parametrize("dtype", REAL)
def test_an_update_in_another_precision_fits(dtype: torch.dtype) -> None:
    like = model(torch.Generator().manual_seed(3))
    assert misfit(model(torch.Generator().manual_seed(4), dtype), like) is None


def test_a_complex_update_with_an_infinite_part_does_not_fit() -> None:
    like = {"spectrum": torch.zeros(2, dtype=torch.complex64)}
    assert misfit({"spectrum": torch.ones(2, dtype=torch.complex64)}, like) is None
    found = misfit({"spectrum": torch.tensor([complex(0, np.inf), 1])}, like)
    assert found == "tensor 'spectrum' has 1 of 2 values that are not finite"


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_agreement_is_the_same_from_memory_and_from_files(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("agreement")
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def model() -> StateDict:
        return {"w": torch.randn(3, 5, generator=generator), "running_mean": torch.randn(5, generator=generator)}

    bases = [model(), model()]
    inside, outside = [], []
    for number in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, 1))
        base, trained, weight = bases[place], model(), data.draw(st.floats(0.01, 1.0))
        inside.append(Contribution(weight=weight, trained=trained, base=base))
        paths = folder / f"base{place}", folder / f"trained{number}"
        for path, tensors in zip(paths, (base, trained), strict=True):
            tensorfile.write(path, {name: tensor.numpy() for name, tensor in tensors.items()})
        outside.append(tensorsum.FileContribution(weight=weight, trained=paths[1], base=paths[0], base_key=place))
    found = module.agreement(inside, module.roles_of(bases[0]))
    assert tensorsum.agreement(outside) == (None if found is None else pytest.approx(found))
    assert found is None or 0 <= found <= 1 + 1e-9
