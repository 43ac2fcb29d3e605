"""Waiting for a fact. The limit only ends what hangs, so that no test fails for being late on a slow machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LONGEST: Final = 550.0
"""Seconds; less than the 600 for which what must be ended by others sleeps, or is allowed to run."""


def wait_for(true: Callable[[], bool], what: str, explain: Callable[[], str] = str, every: float = 0.1) -> None:
    """Look every so many seconds until it is true."""
    end = time.monotonic() + LONGEST
    while not true():
        assert time.monotonic() < end, f"{what}: not within {LONGEST:g} s\n{explain()}"
        time.sleep(every)
