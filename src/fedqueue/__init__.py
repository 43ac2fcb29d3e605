"""Federated learning across supercomputers, where every participant waits in a batch queue.

A training script takes part by `with fedqueue.participate() as work:`. Jobs import this file with Python 3.9.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedqueue.protocol.aggregation import declare_roles
    from fedqueue.worker.participate import ParticipateError, participate

__all__ = ["ParticipateError", "__version__", "declare_roles", "participate"]

__version__ = "0.2.0.dev0"

PROTOCOL = 3
"""Of what coordinator, agent and job say to each other; goes with every request and every order. Coordinators
and jobs take this one and the one before."""

# A job may import from a copy that is renewed meanwhile: what it imports later comes from the folder it began with.
__path__[0] = os.path.realpath(__path__[0])


def __getattr__(name: str) -> Any:
    # Not imported above: whoever needs the protocol alone does not load the worker.
    if name in ("participate", "ParticipateError"):
        from fedqueue.worker import participate

        return getattr(participate, name)
    if name == "declare_roles":
        from fedqueue.protocol.aggregation import declare_roles

        return declare_roles
    raise AttributeError(f"module 'fedqueue' has no attribute {name!r}")
