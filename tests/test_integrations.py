"""Other people's training loops take part: real trainers, small models, a few steps on the processor."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedqueue import data
from tests.jobs import LAUNCHER_VARIABLES, ROOT, check_ended, enter, make_job, result_of, standing_of, update_of

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

EXAMPLES = ROOT / "examples"
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("accelerate")
HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
transformers_only = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs fedqueue[huggingface]")
lightning_only = pytest.mark.skipif(not HAS_LIGHTNING, reason="needs fedqueue[lightning]")

# Warnings of these libraries are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(folder: Path, *command: str | Path, environment: dict[str, str] | None = None) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    job = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**inherited, **quiet, **(environment or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    check_ended(job)


def run_example(folder: Path, name: str, *options: str | Path, launcher: tuple[str, ...] = (), **job: Any) -> None:
    """Write the first model, then run the script as a job that starts from it."""
    run(folder, EXAMPLES / name, *options, "--first", folder / "first.safetensors")
    environment = make_job(folder, folder / "first.safetensors", **job)
    run(folder, *launcher, EXAMPLES / name, *options, environment=environment)


def test_plain_example_takes_part(tmp_path: Path) -> None:
    run_example(tmp_path, "plain.py")
    assert result_of(tmp_path)["steps_done"] == 3
    assert result_of(tmp_path)["samples"] == 96
    assert (tmp_path / "state" / "optimizer.pt").exists()


def test_plain_example_tries_itself_out(tmp_path: Path) -> None:
    run(tmp_path, EXAMPLES / "plain.py", "--first", "first.safetensors")
    run(tmp_path, EXAMPLES / "plain.py")
    assert (tmp_path / "fedqueue-dry-run" / "attempt-0" / "result.json").exists()


def test_ddp_example_takes_part_with_two_processes(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    run_example(tmp_path, "ddp.py", launcher=launcher)
    assert result_of(tmp_path)["samples"] == 2 * 3 * 32
    assert set(update_of(tmp_path)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@lightning_only
def test_lightning_example_takes_part(tmp_path: Path) -> None:
    run_example(tmp_path, "lightning_module.py")
    result = result_of(tmp_path)
    assert (result["steps_done"], result["samples"], result["stopped_by"]) == (3, 96, "steps")
    assert result["metrics"]["loss"] > 0


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs fedqueue[lm]")
def test_adapters_of_a_pretrained_llama_leave_the_site_and_nothing_else(tmp_path: Path) -> None:
    folder = data.root() / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("models/stories260K is not in the data folder (FEDQUEUE_DATA)")
    rows = [{"prompt": f"How many are {n} and 1?", "completion": str(n + 1)} for n in range(8)]
    (tmp_path / "site.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_example(tmp_path, "llama_lora.py", folder, tmp_path / "site.jsonl")
    result = result_of(tmp_path)
    assert (result["steps_done"], result["samples"], result["stopped_by"]) == (3, 24, "steps")
    assert result["metrics"]["loss"] > 0
    update = update_of(tmp_path)
    assert all("lora_" in name for name in update)
    assert any(update[name].any() for name in update if "lora_B" in name), "zero at first"


# In this process: rates, deadlines, signals -------------------------------------------------------------


def tiny_llama() -> Any:
    """Tied embeddings: two names, one tensor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    make: Any = LlamaForCausalLM
    return make(LlamaConfig(vocab_size=32, num_attention_heads=2, tie_word_embeddings=True, **sizes))


def save_model(path: Path, module: Any) -> Path:
    from safetensors.torch import save_file

    save_file({name: torch.full_like(tensor, 0.125) for name, tensor in module.state_dict().items()}, path)
    return path


def trainer_of(model: Any, folder: Path, callbacks: list[Any], **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4096)]
    return Trainer(model, TrainingArguments(**settings), train_dataset=rows, callbacks=callbacks)


@transformers_only
def test_trainer_starts_from_the_runs_model_at_the_runs_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerCallback

    from fedqueue import participate
    from fedqueue.integrations.huggingface import FedQueueCallback

    seen: list[tuple[float, float]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (rate,) = {group["lr"] for group in kwargs["optimizer"].param_groups}
            seen.append((float(kwargs["model"].model.norm.weight[0]), rate))

    model = tiny_llama()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", model), steps=3))
    with participate() as work:
        options = {"max_steps": 4, "learning_rate": 9.0, "lr_scheduler_type": "linear"}  # a rate that must not count
        trainer_of(model, tmp_path / "out", [FedQueueCallback(work), Look()], **options).train()
    assert seen[0][0] == 0.125
    assert [rate for _, rate in seen] == pytest.approx([0.01, 0.0075, 0.005])  # the schedule, from the run's rate
    assert (result_of(tmp_path)["steps_done"], result_of(tmp_path)["stopped_by"]) == (3, "steps")
    assert set(update_of(tmp_path)) == set(model.state_dict())


@transformers_only
def test_trainer_stops_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedqueue import participate
    from fedqueue.integrations.huggingface import FedQueueCallback

    model = tiny_llama()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", model), steps=10**6, train_budget=0.5))
    with participate() as work:
        trainer_of(model, tmp_path / "out", [FedQueueCallback(work)], max_steps=10**6).train()
    assert result_of(tmp_path)["stopped_by"] == "deadline"


@transformers_only
def test_trainer_that_ends_by_itself_counts_the_steps_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedqueue import participate
    from fedqueue.integrations.huggingface import FedQueueCallback

    model = tiny_llama()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", model), steps=100))
    with participate() as work:
        options = {"max_steps": 2, "gradient_accumulation_steps": 2}
        trainer_of(model, tmp_path / "out", [FedQueueCallback(work)], **options).train()
    result = result_of(tmp_path)
    assert (result["steps_done"], result["samples"], result["stopped_by"]) == (2, 8, "script")


def bring_two_parts(home: Path) -> None:
    """Further work of four steps, as an agent brings it."""
    place = home / "jobs/3/attempt-0/part-1"
    place.mkdir()
    work = {"base_version": 4, "steps": 4, "learning_rate": 0.02, "model": str(home / "m.safetensors")}
    (place / "further.json").write_text(json.dumps(work))


def parts_of(home: Path) -> list[tuple[int, int]]:
    """Base version and steps of what was handed in."""
    attempt = home / "jobs/3/attempt-0"
    results = [json.loads((place / "result.json").read_text()) for place in (attempt, attempt / "part-1")]
    assert json.loads((attempt / "left.json").read_text()) == {"parts": 2}
    return [(result["base_version"], result["steps_done"]) for result in results]


@transformers_only
def test_trainer_goes_from_part_to_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedqueue import participate
    from fedqueue.integrations.huggingface import FedQueueCallback

    model = tiny_llama()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", model), steps=3, stay=0.3))
    bring_two_parts(tmp_path)
    with participate() as work:
        for part in work.parts():
            trainer_of(model, tmp_path / "out", [FedQueueCallback(part)], max_steps=part.assigned_steps).train()
    assert parts_of(tmp_path) == [(3, 3), (4, 4)]


@lightning_only
def test_lightning_goes_from_part_to_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedqueue import participate
    from fedqueue.integrations.lightning import FedQueueCallback

    module, loader = lightning_parts()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", module), steps=3, stay=0.3))
    bring_two_parts(tmp_path)
    with participate() as work:
        for part in work.parts():
            fit_with_lightning(tmp_path, module, loader, FedQueueCallback(part), max_steps=part.assigned_steps)
    assert parts_of(tmp_path) == [(3, 3), (4, 4)]
    assert module.rates == [0.01] * 3 + [0.02] * 4


class TrainsOn:
    """A job with posted work that trains on while its next model is not there, as with `jit`: its files, and what its
    loop was seen to do."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self._home = home
        self._standing = standing_of(
            save_model(home / "v3.safetensors", module),
            ahead=True,
            next_cutoff=time.time() + 1000.0,  # no machine is so slow that fewer steps fit
            round_length=1000.0,
            steps_per_second=0.004,
            stay_overhead=1.0,
        )
        enter(monkeypatch, make_job(home, standing=self._standing, stay=1000.0, wall_seconds=1000.0))
        self.began: list[tuple[int, bool, Any]] = []
        """Part, whether ahead, and the model that the loop began from."""
        self.steps_ahead = self.steps_own = 0

    def stepped(self, part: Any, state: dict[str, Any]) -> None:
        """A step was begun. The third ahead finds that the next model has come."""
        here = (part.part, part.is_ahead)
        if not self.began or self.began[-1][:2] != here:
            self.began.append((*here, {name: tensor.detach().clone() for name, tensor in state.items()}))
        self.steps_ahead += part.is_ahead
        self.steps_own += not part.is_ahead
        if part.is_ahead and self.steps_ahead == 3:
            newer = {**self._standing, "version": 4, "number": 8, "learning_rate": 0.02}
            beside = self._home / "beside"
            beside.write_text(json.dumps(newer))
            beside.replace(self._home / "standing.json")

    def check(self) -> None:
        from safetensors.torch import load_file

        assert [seen[:2] for seen in self.began] == [(0, False), (1, True), (1, False)]
        attempt = self._home / "jobs/3/attempt-0"
        first, handed_in = load_file(self._home / "v3.safetensors"), load_file(attempt / "update.safetensors")
        before, result = (json.loads((place / "result.json").read_text()) for place in (attempt, attempt / "part-1"))
        assert (before["base_version"], result["base_version"]) == (3, 4)
        assert result["ahead"] == self.steps_ahead >= 3
        assert before["steps_done"] + result["steps_done"] == self.steps_own + self.steps_ahead
        carried = False
        for name, start in first.items():
            _, own, from_next = (state[name] for _, _, state in self.began)
            assert torch.equal(own, handed_in[name]), "it went on from its own weights"
            carried = carried or not torch.equal(from_next, start)
        assert carried, "the next model has the values of the first, and what was trained ahead is added"


@transformers_only
def test_trainer_trains_on_from_its_own_weights_until_the_next_model_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainerCallback

    from fedqueue import participate
    from fedqueue.integrations.huggingface import FedQueueCallback

    model = tiny_llama()
    job = TrainsOn(tmp_path, monkeypatch, model)

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            job.stepped(part, kwargs["model"].state_dict())

    with participate() as work:
        for part in work.parts():
            callbacks = [FedQueueCallback(part), Look()]
            trainer_of(model, tmp_path / "out", callbacks, max_steps=part.assigned_steps).train()
            if part.part == 1 and not part.is_ahead:
                break
    job.check()


@lightning_only
def test_lightning_trains_on_from_its_own_weights_until_the_next_model_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch import Callback

    from fedqueue import participate
    from fedqueue.integrations.lightning import FedQueueCallback

    module, loader = lightning_parts()
    job = TrainsOn(tmp_path, monkeypatch, module)

    class Look(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            job.stepped(part, pl_module.state_dict())

    with participate() as work:
        for part in work.parts():
            fit_with_lightning(tmp_path, module, loader, FedQueueCallback(part), Look(), max_steps=part.assigned_steps)
            if part.part == 1 and not part.is_ahead:
                break
    job.check()
    assert set(module.rates[-3:]) == {0.02}


def lightning_parts() -> tuple[Any, Any]:
    from lightning.pytorch import LightningModule
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(3, 2)
            self.frozen = torch.nn.Linear(50, 50)
            self.rates: list[float] = []
            self.strike_at: int | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            if len(self.rates) == self.strike_at:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = self.network(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.network.parameters(), lr=9.0)

    return Module(), DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=4)


def fit_with_lightning(folder: Path, module: Any, loader: Any, *callbacks: Any, **changes: Any) -> None:
    from lightning.pytorch import Trainer

    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits: dict[str, Any] = {"max_epochs": -1, "enable_model_summary": False, "default_root_dir": folder}
    Trainer(**{**settings, **limits, **changes}, callbacks=list(callbacks)).fit(module, loader)


@lightning_only
def test_lightning_starts_at_the_runs_rate_and_accumulated_batches_are_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedqueue import participate
    from fedqueue.integrations.lightning import FedQueueCallback

    module, loader = lightning_parts()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", module.network), steps=3))
    with participate() as work:
        callback = FedQueueCallback(work, module=module.network)  # so the rest stays on site
        fit_with_lightning(tmp_path, module, loader, callback, accumulate_grad_batches=2)
    result = result_of(tmp_path)
    assert (result["steps_done"], result["samples"], result["stopped_by"]) == (3, 24, "steps")
    assert set(module.rates) == {0.01}
    assert set(update_of(tmp_path)) == {"weight", "bias"}


@lightning_only
def test_lightning_told_to_stop_hands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedqueue import participate
    from fedqueue.integrations.lightning import FedQueueCallback

    module, loader = lightning_parts()
    module.strike_at = 2
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", module), steps=1000))
    with participate() as work:
        fit_with_lightning(tmp_path, module, loader, FedQueueCallback(work))
    assert (result_of(tmp_path)["steps_done"], result_of(tmp_path)["stopped_by"]) == (2, "signal")


@lightning_only
def test_lightning_that_ends_by_itself_counts_the_steps_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedqueue import participate
    from fedqueue.integrations.lightning import FedQueueCallback

    module, loader = lightning_parts()
    enter(monkeypatch, make_job(tmp_path, save_model(tmp_path / "m.safetensors", module), steps=1000))
    with participate() as work:
        fit_with_lightning(tmp_path, module, loader, FedQueueCallback(work), max_epochs=1)
    assert (result_of(tmp_path)["steps_done"], result_of(tmp_path)["stopped_by"]) == (16, "script")
