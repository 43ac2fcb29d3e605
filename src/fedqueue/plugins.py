"""What installed packages add to FedQueue, by entry points: nobody has to change ours for it.

Groups: `fedqueue.commands` (a module with HELP, add_arguments and run), `fedqueue.schedulers`, `fedqueue.strategies`,
`fedqueue.predictors`, `fedqueue.listeners`. docs/plugins.md has an example of each.
"""

from __future__ import annotations

import importlib.metadata
import sys
from functools import cache
from typing import Any


@cache
def plugins(group: str) -> dict[str, Any]:
    """Name -> object. One that cannot be loaded is named on standard error and left out: it must stop no other."""
    found = {}
    for entry in importlib.metadata.entry_points(group=f"fedqueue.{group}"):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"fedqueue: the {group[:-1]} {entry.name!r} of {package} cannot be used: {what}", file=sys.stderr)
    return found
