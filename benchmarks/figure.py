"""One measured figure and what was promised of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    value: float
    unit: str
    goal: str = ""  # "at most 1.3", "at least 50,000"; "": only reported

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if there is none."""
        if not self.goal:
            return None
        kind, bound = self.goal.rsplit(" ", 1)
        limit = float(bound.replace(",", ""))
        return self.value <= limit if kind == "at most" else self.value >= limit
