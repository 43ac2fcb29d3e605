"""The task "causal-lm": a Hugging Face language model learns the answers of instruction files, whole or by adapters.

    python -m fedqueue.training.causal_lm RUN MODEL OUT     makes a folder that transformers reads of a run's model

Models, tokenizers and chat templates are those of `transformers`, adapters those of `peft`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedqueue import data
from fedqueue.aggregate import StateDict
from fedqueue.errors import ConfigError, TaskError
from fedqueue.moments import Moments
from fedqueue.protocol.aggregation import COUNTER, FACTOR, buffer_roles, split_moments
from fedqueue.training.causal_settings import PLACE, read_options
from fedqueue.training.instructions import Conversation, count_records, prompt_tokens
from fedqueue.training.job import StoredTask, TaskSettings
from fedqueue.training.pretrained import (
    Source,
    alike_layers,
    keeps_examples_apart,
    not_compiled,
    takes_positions,
    travelling,
    with_adapters,
)
from fedqueue.training.recorded_steps import RecordedSteps, why_not_recorded
from fedqueue.training.sequences import IGNORED, Sequences
from fedqueue.training.tasks import (
    Task,
    Trained,
    batches,
    blaming,
    chosen_samples,
    derive_seed,
    drifting,
    make_optimizer,
    proximal_pull,
    seed_of_job,
    seeded,
    share_out_targets,
)

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class CausalTask(Task):
    """A language model, and instruction files of the facilities, which are read when they are needed."""

    def __init__(self, settings: TaskSettings, facilities: int, seed: int, source: Source | None = None) -> None:
        """`source`: shared with other tasks that have the same options."""
        self.name = settings.name
        self._settings = settings
        self._options = read_options(settings.options)
        self._source = source or Source(self._options)
        self._seed = seed
        self._device = torch.device(settings.device)
        self._facilities = facilities
        self._is_changed = False
        self._sequences: dict[int, Sequences] = {}
        self._on_device: dict[int, Sequences] = {}  # of facilities whose steps are recorded
        self._recorded: dict[tuple[int, int], RecordedSteps] = {}  # by the size of a batch
        files = self._options.train
        if isinstance(files, dict):
            if len(files) != facilities:
                raise ConfigError(f"{PLACE}.train: names {len(files)} files for {facilities} facilities")
            if settings.train_samples is not None:
                raise ConfigError(f"train_samples needs one file to choose from, but {PLACE}.train names several")
        elif self._options.labels is not None and len(self._options.labels) != facilities:
            raise ConfigError(f"{PLACE}.labels: names {len(self._options.labels)} facilities of {facilities}")
        elif files is not None and settings.partition == "dirichlet" and self._options.label is None and facilities > 1:
            raise ConfigError(
                f"partition 'dirichlet' needs {PLACE}.label, the field by which one file is split; or use 'iid'"
            )

    # What the run asks for

    def initial_model(self) -> StateDict:
        model = self._make_model() if self._is_changed else self._model
        return {name: tensor.detach().to(self._device, copy=True) for name, tensor in travelling(model).items()}

    def declared_roles(self) -> dict[str, str]:
        lora = self._options.lora
        if lora is None:
            return buffer_roles(self._model)
        if lora.averaging == "product":
            return dict.fromkeys(self._tensors, FACTOR)
        # What nobody trains must not be changed by the rounding of a sum either: it is taken from the newest.
        return {name: COUNTER for name in self._tensors if lora.averaging == "frozen-a" and "lora_A" in name}

    def data_sizes(self) -> tuple[int, ...]:
        """Examples of each facility; where others train, nobody knows, and all count the same."""
        files = self._options.train
        if files is None:
            return (1,) * self._facilities
        if isinstance(files, dict):
            if self._options.split is not None:
                return tuple(len(self._source.records(file, "train")) for file in files.values())
            return tuple(count_records(data.locate(file)) for file in files.values())
        return tuple(len(part) for part in self._shares[1])

    def train(
        self,
        *,
        facility: int,
        model: StateDict,
        steps: int,
        learning_rate: float,
        key: int,
        during: Iterable[object] | None = None,
        drift: StateDict | None = None,
        change: StateDict | None = None,
    ) -> Trained:
        if steps < 1:
            raise ValueError(f"steps must be 1 or more, found {steps}")
        sequences = self._training_sequences(facility)
        rows = torch.arange(len(sequences.tokens))
        job_seed = seed_of_job(self._seed, facility, key)
        with blaming(self.name, f"training for facility {facility}"), seeded(job_seed, self._device):
            schedule = batches(rows, self._settings.batch_size, steps, torch.Generator().manual_seed(job_seed))
            if during is not None:
                schedule = (batch for _, batch in zip(during, schedule, strict=False))
            self._load(model)
            moments, adam = split_moments(model)[1], None

            def go_on(optimizer: torch.optim.Optimizer, is_recorded: bool) -> Moments:
                nonlocal adam
                named = self._trained_parameters()
                adam = Moments(optimizer, named, moments, change, learning_rate, recorded=is_recorded)
                return adam

            if drift is None and self._why_not_recorded is None:
                steps_of = self._recorded_steps(min(self._settings.batch_size, len(rows)), sequences)
                shared = go_on if moments else None
                done, samples, total = steps_of.go(self._held(facility), schedule, learning_rate, shared)
            else:
                optimizer = make_optimizer(self._model, self._settings, learning_rate)
                if moments:
                    go_on(optimizer, False)
                if drift is not None:
                    optimizer.register_step_post_hook(drifting(self._trained_tensors(), drift, learning_rate))
                done, samples, total = self._train_steps(optimizer, sequences, schedule)
            trained = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
            trained |= {} if adam is None else adam.end()
        return Trained(model=trained, samples=samples, loss=total / max(1, done))

    def score(self, model: StateDict) -> dict[str, float]:
        """The mean loss over the tokens of all test answers; the score is minus that, or the share of exact matches."""
        metrics = self._measured(model, loss=True, answers=self._options.measures)
        best = -metrics["loss"] if self._options.score == "loss" else metrics["exact_match"]
        return {"score": best, **metrics}

    def examine(self, model: StateDict) -> dict[str, float]:
        """How well it answers test prompts: what `measures` can have, for a model that is worth the time."""
        return self._measured(model, loss=False, answers=("exact_match", "numeric_error"))

    def _measured(self, model: StateDict, *, loss: bool, answers: Collection[str]) -> dict[str, float]:
        tests = self._tests
        with blaming(self.name, "scoring"), not_compiled():
            self._load(model)
            self._model.eval()
            found = {}
            for name, (sequences, asked) in tests.items():
                own, counts = self._loss_of(sequences) if loss else ({}, {})
                if answers:
                    also, of = _measures(asked, self._answers_to(asked), answers)
                    own, counts = own | also, counts | of
                found[name] = own, counts
        metrics = _mean_metrics([metrics for metrics, _ in found.values()], [counts for _, counts in found.values()])
        if len(found) > 1:
            metrics |= {f"{key}/{name}": value for name, (own, _) in found.items() for key, value in own.items()}
        return metrics

    def export(self, model: StateDict, folder: Path) -> None:
        """Writes a folder that transformers, or peft, reads."""
        self._load(model)
        self._model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    # The model

    def _make_model(self) -> Any:
        return self._with_adapters(self._source.model())

    def _with_adapters(self, model: Any) -> Any:
        if self._options.lora is None:
            return model
        with seeded(derive_seed("model", self._seed), torch.device("cpu")), blaming(self.name, "making adapters"):
            return with_adapters(model, self._options.lora)

    @cached_property
    def _pretrained(self) -> tuple[Any, bool, bool]:
        """The model on the device; whether it takes positions; and whether several examples share a sequence."""
        with blaming(self.name, f"loading {self._options.model}"):
            model = self._source.model()
            apart = self._options.packing and keeps_examples_apart(model)
        if self._options.packing and not apart:
            print(
                f"{type(model).__name__} lets examples of one sequence see each other, so each has a sequence of its "
                "own (packing = false)",
                file=sys.stderr,
            )
        positions = takes_positions(model)
        model = self._with_adapters(model).to(self._device)
        if self._options.compile:
            for layer in alike_layers(model):  # compiled once, since they are alike
                layer.compile(dynamic=False)
        return model, positions, apart

    @property
    def _model(self) -> Any:
        return self._pretrained[0]

    @cached_property
    def _tensors(self) -> StateDict:
        return travelling(self._model)

    @cached_property
    def _tokenizer(self) -> Any:
        with blaming(self.name, f"loading the tokenizer of {self._options.model}"):
            return self._source.tokenizer

    def _load(self, model: StateDict) -> None:
        self._is_changed = True
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(model[name])

    def _trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that the optimizer changes, by the names under which they travel."""
        return ((name, self._tensors[name]) for name, _ in self._trained_parameters())

    def _trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        trained = {parameter.data_ptr(): parameter for parameter in self._model.parameters() if parameter.requires_grad}
        return (
            (name, trained[tensor.data_ptr()]) for name, tensor in self._tensors.items() if tensor.data_ptr() in trained
        )

    # Files

    @cached_property
    def _shares(self) -> tuple[Sequence[Conversation], list[Tensor]]:
        """The records of the one file, and the numbers of those that each facility has."""
        assert isinstance(self._options.train, str)
        records = self._source.records(self._options.train, "train")
        if self._options.labels is not None:
            chosen = chosen_samples(len(records), self._settings.train_samples, "train_samples", self._seed)
            if chosen is not None:
                records = [records[number] for number in chosen.tolist()]
            return records, [
                torch.tensor(_of_labels(records, labels, name), dtype=torch.int64)
                for name, labels in self._options.labels.items()
            ]
        labels = sorted({record.label or "" for record in records})
        numbers = {label: number for number, label in enumerate(labels)}
        targets = torch.tensor([numbers[record.label or ""] for record in records])
        return records, share_out_targets(targets, self._settings, self._facilities, self._seed)

    def _training_sequences(self, facility: int) -> Sequences:
        if facility not in self._sequences:
            files = self._options.train
            if files is None:
                raise ConfigError(f"{PLACE}.train: is missing; name the file to train on")
            if isinstance(files, dict):
                file = list(files.values())[facility]
                records = self._source.records(file, "train")
            else:
                file, (all_records, shares) = files, self._shares
                records = [all_records[number] for number in shares[facility].tolist()]
            self._sequences[facility] = self._sequences_of(records, file)
        return self._sequences[facility]

    @cached_property
    def _tests(self) -> dict[str, tuple[Sequences, Sequence[Conversation]]]:
        """By name: what is scored by its loss, and what the model has to answer."""
        files = self._options.test
        if files is None:
            raise ConfigError(f"{PLACE}.test: is missing; name the file to score on")
        made = {}
        for name, (file, records) in self._test_records(files).items():
            chosen = chosen_samples(len(records), self._settings.test_samples, "test_samples", self._seed)
            if chosen is not None:
                records = [records[number] for number in chosen.tolist()]
            made[name] = (self._sequences_of(records, file), records[: self._options.answers])
        return made

    def _test_records(self, files: str | dict[str, str]) -> dict[str, tuple[str, Sequence[Conversation]]]:
        if isinstance(files, dict):
            return {name: (file, self._source.records(file, "test")) for name, file in files.items()}
        records = self._source.records(files, "test")
        if self._options.labels is None:
            return {"": (files, records)}
        return {
            name: (files, [records[number] for number in _of_labels(records, labels, name)])
            for name, labels in self._options.labels.items()
        }

    def _sequences_of(self, records: Sequence[Conversation], file: str) -> Sequences:
        most = self._options.sequence_length
        examples = self._source.examples(records)
        fitting = [example for example in examples if len(example.tokens) <= most]
        if not fitting:
            raise TaskError(f"{file}: every example is longer than {most} tokens; raise {PLACE}.sequence_length")
        if left := len(examples) - len(fitting):
            print(
                f"{file}: {left} of {len(examples)} examples are longer than {most} tokens: left out", file=sys.stderr
            )
        filler = self._tokenizer.pad_token_id or 0
        return Sequences.of(fitting, most, filler, together=self._pretrained[2])

    # Steps and scores

    def record_steps(self) -> None:
        """Now, where steps can be recorded, instead of when they are first wanted: nothing else may run meanwhile."""
        if self._why_not_recorded is None:
            for facility in range(self._facilities):
                sequences = self._training_sequences(facility)
                self._recorded_steps(min(self._settings.batch_size, len(sequences.tokens)), sequences)
                self._held(facility)

    @cached_property
    def _why_not_recorded(self) -> str | None:
        return why_not_recorded(self._model, self._settings, self._options)

    def _recorded_steps(self, rows: int, sequences: Sequences) -> RecordedSteps:
        length = self._options.sequence_length if self._pretrained[2] else sequences.tokens.shape[1]
        if (rows, length) not in self._recorded:
            self._recorded[rows, length] = RecordedSteps(
                self._model, self._settings, self._options, rows=rows, length=length, positions=self._pretrained[1]
            )
        return self._recorded[rows, length]

    def _held(self, facility: int) -> Sequences:
        if facility not in self._on_device:
            self._on_device[facility] = self._training_sequences(facility).to(self._device)
        return self._on_device[facility]

    def _train_steps(
        self, optimizer: torch.optim.Optimizer, sequences: Sequences, schedule: Iterable[Tensor]
    ) -> tuple[int, int, float]:
        """How many steps, of how many examples, and the sum of their losses."""
        self._model.train()
        pull = proximal_pull(self._model, self._settings.proximal)
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        done, samples, total = 0, 0, torch.zeros((), device=self._device)
        for rows in schedule:
            optimizer.zero_grad()
            learnt = int((sequences.targets[rows] != IGNORED).sum())
            for piece in sequences.pieces(rows, self._options.sequences_at_once or len(rows), self._device):
                loss = self._sum_of_losses(*piece) / learnt
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            if pull is not None:
                pull()
            if self._options.gradient_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self._options.gradient_norm)
            optimizer.step()
            done, samples = done + 1, samples + int(sequences.examples[rows].sum())
        return done, samples, float(total)

    def _sum_of_losses(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        where = {"position_ids": positions} if self._pretrained[1] else {}
        with self._precision():
            logits = self._model(tokens, use_cache=False, **where).logits
        learnt = targets != IGNORED
        return nn.functional.cross_entropy(logits[learnt].float(), targets[learnt], reduction="sum")

    def _precision(self) -> AbstractContextManager[object]:
        if self._options.precision == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _loss_of(self, test: Sequences) -> tuple[dict[str, float], dict[str, int]]:
        """Of one file, and the number of tokens that it is the mean of."""
        rows, size = torch.arange(len(test.tokens)), self._options.sequences_at_once or self._settings.batch_size
        with torch.inference_mode():
            losses = [self._sum_of_losses(*piece) for piece in test.pieces(rows, size, self._device)]
            total = float(torch.stack(losses).sum(dtype=torch.float64))
        count = int((test.targets != IGNORED).sum())
        return {"loss": total / count}, {"loss": count}

    def _answers_to(self, asked: Sequence[Conversation]) -> list[str]:
        size = self._options.sequences_at_once or self._settings.batch_size
        with torch.inference_mode():
            return [answer for start in range(0, len(asked), size) for answer in self._answers(asked[start:][:size])]

    def _answers(self, asked: Sequence[Conversation]) -> list[str]:
        """What the model writes to these prompts, always the likeliest token."""
        prompts = [prompt_tokens(self._tokenizer, record) for record in asked]
        longest = max(map(len, prompts))
        filler = self._tokenizer.pad_token_id or 0
        tokens = torch.tensor([[filler] * (longest - len(prompt)) + prompt for prompt in prompts])
        given = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with self._precision():
            written = self._model.generate(
                input_ids=tokens.to(self._device),
                attention_mask=given.to(self._device),
                max_new_tokens=self._options.answer_tokens,
                do_sample=False,
                pad_token_id=filler,
            )
        return [self._tokenizer.decode(row[longest:], skip_special_tokens=True) for row in written]


def _of_labels(records: Sequence[Conversation], labels: Collection[str], facility: str) -> list[int]:
    """The numbers of the records that have one of these labels."""
    found = [number for number, record in enumerate(records) if record.label in labels]
    if not found:
        raise ConfigError(f"{PLACE}.labels.{facility}: no record has {' or '.join(map(repr, labels))}")
    return found


def _measures(
    asked: Sequence[Conversation], answers: Sequence[str], wanted: Collection[str]
) -> tuple[dict[str, float], dict[str, int]]:
    """How good these answers are, and of how many answers each measure is the mean."""
    metrics, counts = dict[str, float](), dict[str, int]()
    if "exact_match" in wanted:
        counts["exact_match"] = len(asked)
        right = sum(answer.strip() == record.answer.strip() for answer, record in zip(answers, asked, strict=True))
        metrics["exact_match"] = right / len(asked)
    if "numeric_error" in wanted:
        numbers = [(NUMBER.search(record.answer), NUMBER.search(a)) for record, a in zip(asked, answers, strict=True)]
        errors = [abs(float(want[0]) - float(got[0])) for want, got in numbers if want and got]
        counts["numeric_answers"] = sum(want is not None for want, _ in numbers)
        if counts["numeric_answers"]:
            metrics["numeric_answers"] = len(errors) / counts["numeric_answers"]
        if errors:
            counts["numeric_error"], metrics["numeric_error"] = len(errors), sum(errors) / len(errors)
    return metrics, counts


def _mean_metrics(metrics: Sequence[dict[str, float]], counts: Sequence[dict[str, int]]) -> dict[str, float]:
    """Of several files: each metric weighed by how many tokens or answers it is the mean of."""
    made = {}
    for key in dict.fromkeys(key for own in metrics for key in own):
        parts = [(own[key], count[key]) for own, count in zip(metrics, counts, strict=True) if key in own]
        made[key] = sum(value * count for value, count in parts) / sum(count for _, count in parts)
    if "loss" in made:
        made["perplexity"] = float(torch.tensor(made["loss"], dtype=torch.float64).exp())
    return made


def main(arguments: Sequence[str]) -> int:
    from safetensors.torch import load_file

    if len(arguments) != 3:
        print("usage: python -m fedqueue.training.causal_lm RUN MODEL OUT", file=sys.stderr)
        return 2
    run, model, out = map(Path, arguments)
    stored = StoredTask.load(run / "task.json")
    CausalTask(stored.task, len(stored.facilities), stored.seed).export(load_file(model), out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
