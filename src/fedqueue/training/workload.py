"""A workload: a model, its data, its loss and its score. Built-in ones load as a user's own do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedqueue.errors import FedQueueError, TaskError

Samples = tuple[Tensor, Tensor]
"""Inputs and targets; the first dimension of both counts the samples."""

BUILT_IN = {
    "digits": "fedqueue.training.digits:workload",
    "mnist": "fedqueue.training.mnist:workload",
    "cifar100": "fedqueue.training.cifar100:workload",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a function named by a config's task returns.

    One module is built and used for every job, so whatever training changes must be in its state dict.
    """

    make_model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    """Of outputs and targets; a mean over the samples."""
    score: Callable[[Tensor, Tensor], float] | None = None
    """Of all test outputs and targets, higher is better. None: the accuracy if the targets are integers, else
    minus the loss."""
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    """Training inputs of one step -> what the model is given instead. The second argument has one 64-bit number a
    sample, every bit of it at random; they come from the job's key, so nothing else should be drawn."""
    precision: torch.dtype = torch.float32
    """Of products of matrices on an accelerator: torch.bfloat16 for autocast."""
    recordable: bool = False
    """Whether a training step does the same on the device whatever the values are, and draws no random numbers: on an
    accelerator it is then recorded and replayed, and jobs of several runs are trained side by side."""


def load_workload(name: str, options: Mapping[str, object]) -> Workload:
    """Call the function that `name` stands for; example: `load_workload("my_study:make", {"width": 64})`.

    Modules are looked for in the current folder and on PYTHONPATH. Raises `TaskError` in one line.
    """
    place = BUILT_IN.get(name, name)
    module_name, colon, function_name = place.partition(":")
    if not (colon and module_name and function_name):
        known = ", ".join(map(repr, BUILT_IN))
        raise TaskError(f"task {name!r} is not known; use one of {known}, or your own as 'module:function'")
    function = _find_function(name, module_name, function_name)
    try:
        workload = function(**options)
    except FedQueueError:
        raise
    except Exception as error:
        raise TaskError(f"task {name!r}: its function raised {describe(error)}") from error
    if not isinstance(workload, Workload):
        raise TaskError(f"task {name!r}: its function must return a Workload, not {type(workload).__name__}")
    for part, pair in (("train", workload.train), ("test", workload.test)):
        _check_samples(name, part, pair)
    return workload


def _find_function(name: str, module_name: str, function_name: str) -> Callable[..., object]:
    # An installed command does not look in the current folder, where a user's file is; `python -m` does.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(
                f"task {name!r}: there is no module {module_name!r} in the current folder or on PYTHONPATH"
            ) from error
        raise TaskError(f"task {name!r}: module {error.name!r} is not installed") from error
    except Exception as error:
        raise TaskError(f"task {name!r}: importing {module_name!r} raised {describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TaskError(f"task {name!r}: module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def _check_samples(name: str, part: str, pair: object) -> None:
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(tensor, Tensor) for tensor in pair)):
        raise TaskError(f"task {name!r}: {part} must be a pair of tensors, inputs and targets")
    inputs, targets = pair
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        raise TaskError(
            f"task {name!r}: {part} needs as many inputs as targets and at least one, "
            f"found shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )


def describe(error: Exception) -> str:
    """The error's type and the first line of its text: a message stays one line."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
