"""Token sequences that a language model learns from: examples side by side, none of which sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedqueue.training.instructions import Example, pack

IGNORED = -100
"""The target of a token that is not learnt."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Examples side by side in rows of equal length; the rest of a row is filled with tokens that nobody learns."""

    tokens: Tensor
    positions: Tensor
    """Of each token in its own example, from 0: by them a model knows where another example begins."""
    targets: Tensor
    """The token that follows, where it is learnt; elsewhere `IGNORED`."""
    examples: Tensor
    """How many there are in each row."""

    @classmethod
    def of(cls, examples: Sequence[Example], length: int, filler: int, *, together: bool) -> Sequences:
        rows = pack([len(example.tokens) for example in examples], length, together=together)
        longest = max(sum(len(examples[number].tokens) for number in row) for row in rows)
        shape = (len(rows), longest)
        made = cls(
            tokens=torch.full(shape, filler, dtype=torch.int32),
            positions=torch.zeros(shape, dtype=torch.int32),
            targets=torch.full(shape, IGNORED, dtype=torch.int32),
            examples=torch.tensor([len(row) for row in rows]),
        )
        for place, row in enumerate(rows):
            start = 0
            for example in (examples[number] for number in row):
                end = start + len(example.tokens)
                tokens = torch.tensor(example.tokens, dtype=torch.int32)
                made.tokens[place, start:end] = tokens
                made.positions[place, start:end] = torch.arange(end - start)
                made.targets[place, start : end - 1] = tokens.where(torch.tensor(example.is_answer), IGNORED)[1:]
                start = end
            made.positions[place, start:] = torch.arange(longest - start)
        return made

    def pieces(self, rows: Tensor, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens, positions and targets of these rows, so many rows at a time."""
        for piece in torch.split(rows, size):
            tokens, positions, targets = (
                part[piece].to(device, torch.int64) for part in (self.tokens, self.positions, self.targets)
            )
            yield tokens, positions, targets

    def to(self, device: torch.device) -> Sequences:
        """The same, with what the model is given on this device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            targets=self.targets.to(device),
        )
