"""The run clock of a real run: seconds that the run was going, without those in which it was paused or down."""

from __future__ import annotations

import time


class RunClock:
    """Stands still until `start`."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at  # where it stands, or stood when it was started
        self._since: float | None = None  # monotonic; None: it stands

    def now(self) -> float:
        return self._at if self._since is None else self._at + (time.monotonic() - self._since)

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        self._at, self._since = self.now(), None

    @property
    def running(self) -> bool:
        return self._since is not None
