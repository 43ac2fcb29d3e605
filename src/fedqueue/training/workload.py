"""A workload: a model, its data, its loss and its score. Built-in ones are as a user's own are."""

from __future__ import annotations

import gzip
import importlib
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedqueue import data
from fedqueue.errors import DataError, FedQueueError, TaskError, describe
from fedqueue.plugins import plugins

BUILT_IN = {"digits": "fedqueue.training.workload:digits", "mnist": "fedqueue.training.workload:mnist"}

SPLIT_SEED = 20240229
"""Fixed: every run, whatever its seed, is scored on the same fifth of the samples."""
MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081
"""Of the training pixels scaled to 0..1, as commonly used."""

Samples = tuple[Tensor, Tensor]
"""Inputs and targets; the first dimension of both counts the samples."""


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
    accelerator the package in reproduction/ then records and replays it, for jobs of several runs side by side."""


# Found by its name -----------------------------------------------------------------------------------


def load_workload(name: str, options: Mapping[str, object]) -> Workload:
    """Call the function that `name` stands for; example: `load_workload("my_study:make", {"width": 64})`.

    Modules are looked for in the current folder and on PYTHONPATH. Raises `TaskError` in one line.
    """
    place = BUILT_IN.get(name, name)
    module_name, colon, function_name = place.partition(":")
    if colon and module_name and function_name:
        function = _find_function(name, module_name, function_name)
    else:
        added = plugins("workloads")
        if name not in added:
            known = ", ".join(map(repr, [*BUILT_IN, *added]))
            raise TaskError(f"task {name!r} is not known; use one of {known}, or your own as 'module:function'")
        function = added[name]
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


# Built in --------------------------------------------------------------------------------------------


def digits() -> Workload:
    """1797 handwritten digits of 8 x 8 pixels, and a small network. Seconds on a laptop."""
    train, test = _digits_samples()
    return Workload(make_model=_digits_model, train=train, test=test)


def _digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def _digits_samples() -> tuple[Samples, Samples]:
    # As sklearn.datasets.load_digits, without what that imports first: a second of each job's start.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    inputs = torch.from_numpy(pixels[order]).to(torch.float32) / 16.0  # a pixel is 0 to 16
    targets = torch.from_numpy(labels[order]).to(torch.int64)
    held_out = len(labels) // 5
    return (inputs[held_out:], targets[held_out:]), (inputs[:held_out], targets[:held_out])


def mnist() -> Workload:
    """70,000 handwritten digits of 28 x 28 pixels, and the network of the paper."""
    return Workload(make_model=_mnist_model, train=_mnist_samples("train"), test=_mnist_samples("t10k"))


def _mnist_model() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    # Channels last is the quicker order for convolutions; the numbers a layer holds are the same.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _mnist_samples(part: str) -> Samples:
    """Normalised images (n, 1, 28, 28) and labels of "train" or "t10k"."""
    return _read_mnist(data.find(f"mnist/{part}-images-idx3-ubyte.gz"), data.find(f"mnist/{part}-labels-idx1-ubyte.gz"))


@cache
def _read_mnist(images: Path, labels: Path) -> Samples:
    """Once a process, as long as they lie there."""
    pixels = torch.from_numpy(_values(images, header_bytes=16)).to(torch.float32)
    inputs = pixels.div_(255.0).sub_(MNIST_MEAN).div_(MNIST_DEVIATION)
    return inputs.view(-1, 1, 28, 28), torch.from_numpy(_values(labels, header_bytes=8)).to(torch.int64)


def _values(path: Path, *, header_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return np.frombuffer(content, np.uint8, offset=header_bytes).copy()  # torch wants memory it may write
