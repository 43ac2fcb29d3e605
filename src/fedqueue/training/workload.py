"""A workload: a model, its data, its loss and its score. Built-in ones are as a user's own are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
