"""What `[task.options]` may say where the task is "causal-lm". No torch here: every config is checked by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from fedqueue.errors import ConfigError
from fedqueue.protocol.codec import at_least, more_than, read, share

CAUSAL_LM: Final = "causal-lm"
PLACE: Final = "task.options"
ELSEWHERE: Final = ("data:", "package:")
"""What begins a file's name that is no path."""


@dataclass(frozen=True, kw_only=True)
class FieldSettings:
    """Which fields of a record are its texts; None: found by the usual names."""

    messages: str | None = None
    """A list of messages, each with a role and a content."""
    system: str | None = None
    prompt: list[str] | None = None
    """Joined by an empty line; those that are empty are left out."""
    answer: str | None = None

    def __post_init__(self) -> None:
        if self.messages is not None and (self.prompt is not None or self.answer is not None):
            raise ValueError("messages must stand alone, without prompt and answer")
        if (self.prompt is None) != (self.answer is None):
            raise ValueError("prompt and answer belong together: give both or none")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters of low rank beside frozen weights, by `peft`."""

    rank: int = 8
    alpha: float = 16.0
    """Their product is multiplied by alpha / rank."""
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Ends of the names of the layers that have adapters; "all-linear": every linear layer but the last."""
    averaging: Literal["plain", "product", "frozen-a"] = "plain"
    """How adapters of several facilities become one: see docs/causal-lm.md."""

    def __post_init__(self) -> None:
        at_least(self, 1, "rank")
        more_than(self, 0, "alpha")
        share(self, "dropout")
        if not self.targets:
            raise ValueError("targets must name at least one layer")


@dataclass(frozen=True, kw_only=True)
class CausalSettings:
    model: str
    """A Hugging Face folder, or a GGUF file. Files may also be named as `data:NAME`, in the data folder, or as
    `package:PACKAGE/NAME`, in an installed package."""
    train: str | dict[str, str] | None = None
    """JSON lines: one file that is shared out, or a file for each facility. None: others train."""
    test: str | dict[str, str] | None = None
    """JSON lines: one file, or several with a name each. None: nothing is scored."""
    fields: FieldSettings | None = None
    """None: found by the usual names."""
    label: str | None = None
    """The field by which one shared file is split, with partition "dirichlet" or by `labels`."""
    labels: dict[str, list[str]] | None = None
    """The values of that field whose records each facility has, whatever `partition` says; each facility's test records
    are then scored by themselves too."""
    split: str | None = None
    """The field that says "train" or "test" of a record, where one file has both."""
    sequence_length: int = 512
    """Tokens; longer examples are left out."""
    packing: bool = True
    """Several examples in a sequence, none of which sees another; False: one each."""
    sequences_at_once: int | None = None
    """Of a step's batch, so many go through the model at a time; None: all."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of products of matrices, and of weights that do not train."""
    checkpointing: bool = False
    """Compute activations again instead of keeping them: less memory, more time."""
    compile: bool = False
    """Layers that are alike are compiled as one, by torch.compile, for training."""
    gradient_norm: float | None = 1.0
    """Gradients are scaled down to it; None: never."""
    lora: LoraSettings | None = None
    """None: every weight trains, and travels."""
    measures: list[Literal["exact_match", "numeric_error"]] = field(default_factory=list)
    """Of answers that the model writes to test prompts."""
    answers: int | None = None
    """To so many prompts of each test file; None: to all."""
    answer_tokens: int = 64
    """The longest answer it may write."""
    score: Literal["loss", "exact_match"] = "loss"
    """What ranks models: less loss, or more exact matches."""

    def __post_init__(self) -> None:
        at_least(self, 2, "sequence_length")
        at_least(self, 1, "sequences_at_once", "answers", "answer_tokens")
        more_than(self, 0, "gradient_norm")
        if self.labels is not None and (self.label is None or isinstance(self.train, dict)):
            raise ValueError("labels needs label, the field that has them, and one train file")
        if self.score == "exact_match" and "exact_match" not in self.measures:
            raise ValueError('score is "exact_match", so measures must have it too')
        for key in ("train", "test"):
            if getattr(self, key) == {}:
                raise ValueError(f"{key} must name at least one file")


def read_options(options: Mapping[str, object]) -> CausalSettings:
    return read(CausalSettings, options, PLACE)


def averages_products(options: Mapping[str, object]) -> bool:
    lora = read_options(options).lora
    return lora is not None and lora.averaging == "product"


def complete_options(options: Mapping[str, object], facilities: Sequence[str], folder: Path) -> dict[str, Any]:
    """The options of a config, checked: paths begin at `folder`, and each facility's file is in its place."""
    settings, made = read_options(options), dict(options)

    def absolute(files: str | dict[str, str]) -> str | dict[str, str]:
        if isinstance(files, dict):
            return {name: str(absolute(file)) for name, file in files.items()}
        return files if files.startswith(ELSEWHERE) else str(folder / Path(files).expanduser())

    made["model"] = absolute(settings.model)
    if settings.test is not None:
        made["test"] = absolute(settings.test)
    if isinstance(settings.train, dict):
        if set(settings.train) != set(facilities):
            raise ConfigError(f"{PLACE}.train: must be one file, or name each facility once: {', '.join(facilities)}")
        made["train"] = absolute({name: settings.train[name] for name in facilities})
    elif settings.train is not None:
        made["train"] = absolute(settings.train)
    if settings.labels is not None:
        if set(settings.labels) != set(facilities):
            raise ConfigError(f"{PLACE}.labels: must name each facility once: {', '.join(facilities)}")
        made["labels"] = {name: settings.labels[name] for name in facilities}
    return made
