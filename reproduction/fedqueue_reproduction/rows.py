"""A model as one flat row of numbers: what slots of a device hold, and what is averaged there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from fedqueue.moments import put_together, taken_apart
from fedqueue.protocol.aggregation import PARAMETER

ALIGN = 32  # values; matrix kernels are quickest where rows begin at 128 bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the flat row of its slot."""

    name: str
    shape: tuple[int, ...]
    start: int
    part: str
    channels_last: bool = False

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    def of(self, row: Tensor) -> Tensor:
        """The view of a row, or of a stack of rows."""
        ahead, piece = row.shape[:-1], row[..., self.start : self.stop]
        if not self.channels_last:
            return piece.view(*ahead, *self.shape)
        after, before, height, width = self.shape
        return piece.view(*ahead, after, height, width, before).movedim(-1, -3)


class Rows:
    """How a model lies in a row: what trains, then its buffers; of both, what is aggregated alike lies side by side.

    `roles` are those of the tensors by name (see `protocol/aggregation.py`); who is not named is a parameter. With
    `channels_last`, weights of convolutions lie in the order in which accelerators want them.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        buffers: Iterable[tuple[str, Tensor]] = (),
        roles: Mapping[str, str] | None = None,
        *,
        channels_last: bool = False,
    ) -> None:
        self.places: list[Place] = []
        self.width = 0
        """Values in a row, gaps included."""
        self.roles: dict[str, str] = {}
        """Of the parts."""
        for kind, tensors in (("weights", weights), ("buffers", buffers)):
            named = [((roles or {}).get(name, PARAMETER), name, tensor) for name, tensor in tensors]
            for role, name, tensor in sorted(named, key=lambda item: item[0]):
                part = f"{kind}: {role}"
                self.roles[part] = role
                place = Place(name, tuple(tensor.shape), self.width, part, channels_last and tensor.ndim == 4)
                self.places.append(place)
                self.width = -(-place.stop // ALIGN) * ALIGN
            if kind == "weights":
                self.trained = list(self.places)
                """Where the tensors that train lie: before all others."""
                self.trained_width = self.width
        self._bounds = self._find_bounds()

    def flatten(self, model: Mapping[str, Tensor]) -> Tensor:
        """The model in one row."""
        first = next(iter(model.values()))
        row = torch.zeros(self.width, dtype=torch.float32, device=first.device)
        for place in self.places:
            place.of(row).copy_(model[place.name])
        return row

    def factored(self, row: Tensor) -> Tensor:
        """Second moments as they travel: of what is no vector, by the means of its rows and columns."""
        found = torch.zeros_like(row)
        for place in self.places:
            parts = taken_apart(place.name, place.of(row))
            place.of(found).copy_(put_together(place.name, place.shape, parts))
        return found

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Views of a row (or of a stack of rows) by the names of the tensors."""
        return {place.name: place.of(row) for place in self.places}

    def parts(self, row: Tensor) -> dict[str, Tensor]:
        """Views of a row by the names of its parts."""
        return {part: row[start:stop] for part, (start, stop) in self._bounds.items()}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The row of these parts, as `parts` gives them."""
        pieces = [parts[part] for part in self._bounds]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _find_bounds(self) -> dict[str, tuple[int, int]]:
        """Part -> where it begins and where the next one does: together they are the whole row."""
        starts = {part: next(places).start for part, places in groupby(self.places, key=lambda place: place.part)}
        ends = [*list(starts.values())[1:], self.width]
        return {part: (start, end) for (part, start), end in zip(starts.items(), ends, strict=True)}
