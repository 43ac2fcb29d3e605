"""Tensors by role: what layers measured is averaged, whatever the strategy, the weights and the staleness."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fedqueue
from fedqueue import tensorfile, tensorsum
from fedqueue.aggregate import Contribution, aggregate
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.aggregation import DECLARATION, is_moment
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.runs import replay
from fedqueue.worker.job_folder import read_header as worker_header
from tests.waiting import LONGEST

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RULES = ["add_deltas", "mix_models"]

NORMALISED = '''
import torch
from torch import nn
from fedqueue.training.workload import digits
from fedqueue.training.workload import Workload


class Centred(nn.Module):
    """A layer that nobody knows: it keeps a running statistic under a name of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("typical_square", torch.ones(()))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.typical_square.lerp_(x.square().mean(), 0.2)
        return x / self.typical_square.sqrt()


def make(score_is_nan_from=None):
    plain = digits()
    model = lambda: nn.Sequential(
        nn.Flatten(), Centred(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
    )
    score = None
    if score_is_nan_from is not None:
        def score(outputs, targets):
            accuracy = float((outputs.argmax(dim=1) == targets).double().mean())
            return accuracy if accuracy < score_is_nan_from else float("nan")
    return Workload(make_model=model, train=plain.train, test=plain.test, score=score)
'''

CONFIG = """
[run]
name = "normalised"
strategy = "jit"
rounds = {rounds}
round_length = {round_length}
learning_rate = 0.003

[strategy.fedavg]
steps = 20
[strategy.fedasync]
steps = 20
[strategy.fedbuff]
steps = 20

[task]
name = "normalised:make"

[model]
keep = "all"

[[facility]]
name = "quick"
steps_per_second = 40.0
queue = {{ kind = "fixed", delay = {quick} }}

[[facility]]
name = "slow"
steps_per_second = 10.0
queue = {{ kind = "lognormal", mean = {slow}, rho = 0.9 }}
"""


def study(folder: Path, **values: float) -> Path:
    (folder / "normalised.py").write_text(NORMALISED)
    path = folder / "normalised.toml"
    path.write_text(CONFIG.format(**{"rounds": 12, "round_length": 2.0, "quick": 0.3, "slow": 5.0, **values}))
    return path


def command(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "fedqueue", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3 * LONGEST, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_stale_updates_do_not_drive_a_variance_below_zero() -> None:
    """Base 1.0, both facilities measured 0.2, one of them from an older version: summed deltas give -0.6."""
    first, second = ({"norm.running_var": torch.full((2,), value)} for value in (1.0, 0.2))
    updates = [
        Contribution(weight=1.0, trained={"norm.running_var": torch.full((2,), 0.2)}, base=base)
        for base in (first, second)
    ]
    assert aggregate(second, updates, "add_deltas")["norm.running_var"].tolist() == pytest.approx([0.2, 0.2])


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(FLOATS),
    rule=st.sampled_from(RULES),
    from_first=st.booleans(),
    updates=st.lists(st.tuples(st.floats(0, 2), st.sampled_from(FLOATS), st.integers(0, 2)), min_size=1, max_size=5),
)
def test_a_statistic_stays_within_the_range_of_what_was_handed_in_and_both_ways_agree_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    dtype: torch.dtype,
    rule: str,
    from_first: bool,
    updates: list[tuple[float, torch.dtype, int]],
) -> None:
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(seed)

    def model(kind: torch.dtype, step: int) -> dict[str, torch.Tensor]:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)

        return {
            "weight": draw(4),
            "norm.running_mean": draw(6),
            "norm.running_var": draw(6).square(),
            "norm.num_batches_tracked": torch.tensor(step),
            "own": draw(3),
            "visits": draw(1),
        }

    chosen = {"own": "statistic", "visits": "counter"}
    metadata = {DECLARATION: json.dumps(chosen)}
    bases = [model(dtype, 0) for _ in range(3)]
    for number, base in enumerate(bases):
        save_file(base, folder / f"base{number}", metadata=metadata)
    in_memory, in_files = [], []
    for step, (weight, kind, base_number) in enumerate(updates):
        trained = model(kind, step + 1)
        save_file(trained, path := folder / f"update{step}")
        in_memory.append(Contribution(weight=weight, trained=trained, base=bases[base_number]))
        base_path = folder / f"base{base_number}"
        in_files.append(tensorsum.FileContribution(weight=weight, trained=path, base=base_path, base_key=base_number))
    usual = {"norm.running_mean": "statistic", "norm.running_var": "statistic", "norm.num_batches_tracked": "counter"}
    result = aggregate(bases[0], in_memory, rule, {"weight": "parameter", **usual, **chosen}, from_first=from_first)
    tensorsum.aggregate(folder / "base0", in_files, rule, folder / "out", from_first=from_first)
    for name, tensor in load_file(folder / "out").items():
        assert torch.equal(tensor, result[name]), name
    handed_in = [c.trained for c in in_memory if c.weight > 0]
    total = sum(c.weight for c in in_memory)
    if not handed_in or (rule == "mix_models" and total < 1 and not from_first):
        handed_in.append(bases[0])  # a model that is mixed keeps a share of what the facilities measured before
    for name in ("norm.running_mean", "norm.running_var", "own"):
        values = torch.stack([trained[name].to(dtype).double() for trained in handed_in])
        assert (result[name].double() >= values.amin(dim=0)).all(), name
        assert (result[name].double() <= values.amax(dim=0)).all(), name
    heard = [c for c in in_memory if c.weight > 0]
    for name in ("norm.num_batches_tracked", "visits"):
        said = [(float(c.trained[name].to(result[name].dtype)), c.weight) for c in heard]
        if not said:
            assert torch.equal(result[name], bases[0][name]), name
            continue
        below = sum(weight for value, weight in said if value < float(result[name]))
        upto = sum(weight for value, weight in said if value <= float(result[name]))
        half = sum(weight for _, weight in said) / 2
        assert below <= half * (1 + 1e-6), "what most of the weight says, or the middle"
        assert upto >= half * (1 - 1e-6), "what most of the weight says, or the middle"


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_model_with_batch_normalisation_learns_in_the_simulator(in_tmp: Path, strategy: str) -> None:
    config = study(in_tmp)
    done = command("simulate", config, "--strategy", strategy, "--out", "sim", "--json", "--no-plots")
    summary = json.loads(done.stdout)
    assert summary["score"]["not_finite"] == 0
    assert summary["score"]["final"] > 0.8, summary
    with LedgerReader(in_tmp / "sim" / FILE) as ledger:
        assert {name for name in ledger.meta["roles"] if not is_moment(name)} == {
            "1.typical_square", "3.running_mean", "3.running_var", "3.num_batches_tracked"
        }  # fmt: skip


@pytest.mark.parametrize("strategy", ["fedqueue", "fedasync"])
def test_a_real_run_averages_statistics_within_what_was_handed_in(in_tmp: Path, strategy: str) -> None:
    config = study(in_tmp, rounds=4, round_length=4.0, quick=0.1, slow=3.0)
    command("run", config, "--strategy", strategy, "--out", "real", "--json", "--no-plots", "--set",
            "run.warm_up=true")  # fmt: skip
    replay(in_tmp / "real")
    with LedgerReader(in_tmp / "real" / FILE) as ledger:
        assert ledger.meta["roles"]["1.typical_square"] == "statistic"
        models = [json.loads(row["body"]) for row in ledger.rows("SELECT body FROM events WHERE kind = 'ModelReady'")]
    assert len(models) >= 4
    kept = {path.stem: load_file(path) for path in (in_tmp / "real/objects").glob("*.safetensors")}
    for made in models:
        model = kept[made["digest"]]
        assert (model["3.running_var"] > 0).all(), made
        assert 0 < model["1.typical_square"] <= 1.0, "digits are pixels of 0 to 1"


def test_a_score_that_is_not_finite_is_on_record_and_the_run_goes_on(in_tmp: Path) -> None:
    config = study(in_tmp)
    done = command("simulate", config, "--set", "task.options.score_is_nan_from=0.5", "--out", "sim", "--json",
                   "--no-plots")  # fmt: skip
    summary = json.loads(done.stdout)
    assert summary["rounds"] == 12
    assert summary["score"]["final"] is None
    assert summary["score"]["not_finite"] > 0
    with LedgerReader(in_tmp / "sim" / FILE) as ledger:
        scores = [row["score"] for row in ledger.rows("SELECT score FROM scores ORDER BY version")]
    assert len(scores) == 12
    assert scores.count(None) == summary["score"]["not_finite"]
    command("replay", "sim")
    command("report", "sim")


def test_a_score_that_is_not_finite_is_on_record_in_a_real_run(in_tmp: Path) -> None:
    config = study(in_tmp, rounds=3, round_length=3.0, quick=0.1, slow=0.1)
    changes = ("--set", "task.options.score_is_nan_from=0.0")
    done = command("run", config, "--strategy", "fedavg", "--out", "real", "--no-plots", *changes)
    summary = json.loads((in_tmp / "real/summary.json").read_text())
    assert summary["score"]["max"] is None
    assert summary["score"]["not_finite"] > 0
    assert "is not a finite number" in done.stderr


def test_a_config_sets_roles_by_pattern_and_a_pattern_without_a_tensor_is_refused(in_tmp: Path) -> None:
    config = study(in_tmp)
    command("simulate", config, "--set", "model.roles={'1.*' = 'counter'}", "--out", "sim", "--no-plots", "--json")
    with LedgerReader(in_tmp / "sim" / FILE) as ledger:
        assert ledger.meta["roles"]["1.typical_square"] == "counter"
    for verb in ("simulate", "run"):
        refused = command(verb, config, "--set", "model.roles={'momentum.*' = 'statistic'}", "--no-plots", code=2)
        assert refused.stderr.strip().endswith("model.roles: no tensor's name matches 'momentum.*'"), refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_a_first_model_declares_what_its_buffers_are(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module.register_buffer("typical", torch.ones(1))
    module.register_buffer("forgotten", torch.ones(1), persistent=False)
    save_file(module.state_dict(), first := tmp_path / "first", metadata=fedqueue.declare_roles(module))
    found = tensorfile.roles(tensorfile.read_header(first), first)
    assert {name for name, role in found.items() if role == "statistic"} == {
        "typical",
        "1.running_mean",
        "1.running_var",
    }
    assert found["1.num_batches_tracked"] == "counter"
    assert "forgotten" not in found
    # What every later model inherits, also without the tensors that stay at home.
    tensorfile.select(first, chosen := tmp_path / "chosen", ["typical", "0.*"])
    assert tensorfile.roles(tensorfile.read_header(chosen), chosen)["typical"] == "statistic"


@pytest.mark.parametrize("said", ["[]", "{", '{"w": "average"}'])
def test_a_declaration_that_is_none_is_named(tmp_path: Path, said: str) -> None:
    tensorfile.write(path := tmp_path / "m", {"w": np.zeros(1, np.float32)}, metadata={"fedqueue.roles": said})
    with pytest.raises(tensorfile.TensorFileError, match=r"m: its metadata 'fedqueue.roles' must be"):
        tensorfile.select(path, tmp_path / "out", ["*"])


@pytest.mark.parametrize("key", ["fedqueue.roles", "fedqueue.protocol.roles"])
def test_a_declaration_is_read_under_its_older_name_too_and_written_under_one(tmp_path: Path, key: str) -> None:
    said = {key: json.dumps({"w": "statistic"})}
    tensorfile.write(path := tmp_path / "m", {"w": np.zeros(1, np.float32)}, metadata=said)
    assert tensorfile.roles(tensorfile.read_header(path), path) == {"w": "statistic"}
    tensorfile.select(path, out := tmp_path / "out", ["*"])
    assert tensorfile.read_header(out).metadata == {"fedqueue.roles": '{"w":"statistic"}'}
    assert worker_header(out, 0.0)[1] == worker_header(path, 0.0)[1] == {"w": "statistic"}
