"""Pretrained language models, their tokenizers and their examples, as files have them; adapters by `peft`."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedqueue import data
from fedqueue.aggregate import StateDict
from fedqueue.errors import ConfigError
from fedqueue.training.causal_settings import PLACE, CausalSettings, LoraSettings
from fedqueue.training.instructions import (
    Conversation,
    Example,
    read_conversations,
    tokenize_all,
    with_template,
)

Part = Literal["train", "test"]


class Source:
    """What a task is made of, as it is in the files. Several tasks in one process may share one that `keeps` it."""

    def __init__(self, options: CausalSettings, *, keeps: bool = False) -> None:
        self._options = options
        self._keeps = keeps
        self._records: dict[tuple[str, Part], Sequence[Conversation]] = {}
        self._examples: dict[str, Example] = {}  # by the place of the record
        self._model: Any = None

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._options)

    def model(self) -> Any:
        """One of the caller's own, on the processor."""
        if not self._keeps:
            return load_model(self._options)
        if self._model is None:
            self._model = load_model(self._options)
        return copy.deepcopy(self._model)

    def records(self, file: str, part: Part) -> Sequence[Conversation]:
        """Of a file, or of a part of it where one file has both."""
        if (file, part) not in self._records:
            options = self._options
            only = None if options.split is None else (options.split, part)
            # Nobody shares out test records, unless each facility has some of its own.
            is_shared_out = options.labels is not None or (part == "train" and isinstance(options.train, str))
            label = options.label if is_shared_out else None
            found = read_conversations(data.locate(file), options.fields, label, only)
            if not self._keeps:
                return found
            self._records[file, part] = found
        return self._records[file, part]

    def examples(self, records: Sequence[Conversation]) -> list[Example]:
        """Their tokens."""
        missing = [record for record in records if record.place not in self._examples]
        made = dict(zip((r.place for r in missing), tokenize_all(self.tokenizer, missing), strict=True))
        found = [made.get(record.place) or self._examples[record.place] for record in records]
        if self._keeps:
            self._examples |= made
        return found


def load_tokenizer(settings: CausalSettings) -> Any:
    from transformers import AutoTokenizer

    folder, options = _place_of(settings.model)
    return with_template(AutoTokenizer.from_pretrained(folder, **options))


def load_model(settings: CausalSettings) -> Any:
    """The pretrained model, on the processor. Weights that train are in single precision."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder, options = _place_of(settings.model)
    is_half = settings.lora is not None and settings.precision == "bfloat16"
    dtype = torch.bfloat16 if is_half else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if settings.checkpointing:
        # By its new name, where there is one: the other warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _place_of(model: str) -> tuple[Path, dict[str, Any]]:
    """The folder, and what else `from_pretrained` is told; it never asks a network."""
    path = data.locate(model)
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, {"gguf_file": path.name, "local_files_only": True}
    if not (path / "config.json").is_file():
        raise ConfigError(f"{PLACE}.model: {path} is neither a folder with a config.json nor a .gguf file")
    return path, {"local_files_only": True}


def with_adapters(model: Any, settings: LoraSettings) -> Any:
    import peft

    targets: str | list[str] = settings.targets
    if targets == ["all-linear"]:
        targets = "all-linear"
    made = peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
            lora_dropout=settings.dropout,
            target_modules=targets,
        ),
    )
    if settings.averaging == "frozen-a":
        for name, parameter in made.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
    return made


def travelling(model: Any) -> StateDict:
    """The tensors that travel, as they are in the model: its adapters, if it has any, else all, each once."""
    if hasattr(model, "peft_config"):
        import peft

        return dict(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    once: dict[int, str] = {}  # tied weights have two names
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        once.setdefault(tensor.data_ptr(), name)
    return {name: tensors[name] for name in once.values()}


def takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def keeps_examples_apart(model: Any) -> bool:
    """Whether a token sees only its own example where positions begin anew: tried with two different neighbours."""
    if not takes_positions(model):
        return False
    model.eval()
    positions = torch.arange(8).repeat(2)[None]
    vocabulary = model.get_input_embeddings().num_embeddings
    second = torch.arange(8) % vocabulary
    with torch.inference_mode():
        seen = [
            model(torch.cat([(second + shift) % vocabulary, second])[None], position_ids=positions, use_cache=False)
            for shift in (1, vocabulary // 2)
        ]
    return torch.allclose(seen[0].logits[:, 8:], seen[1].logits[:, 8:], atol=1e-5)


def alike_layers(model: Any) -> list[nn.Module]:
    """The layers of which the model mostly consists: they are all of one kind."""
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((stack for stack in stacks if len({type(layer) for layer in stack}) == 1), key=len, default=[])


_eager = threading.RLock()


@contextmanager
def not_compiled() -> Iterator[None]:
    """Layers that are compiled for training run as they are written, since each further size would be compiled too."""
    with _eager, torch.compiler.set_stance("force_eager"):  # which is so for all threads
        yield
