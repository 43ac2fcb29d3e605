"""The algorithms, one a file. To add one: write its file, and name its class in `STRATEGIES`."""

from __future__ import annotations

from typing import Final

from fedqueue.protocol.strategies.base import Strategy
from fedqueue.protocol.strategies.fedasync import FedAsync
from fedqueue.protocol.strategies.fedavg import FedAvg
from fedqueue.protocol.strategies.fedbuff import FedBuff
from fedqueue.protocol.strategies.fedcompass import FedCompass
from fedqueue.protocol.strategies.fedqueue import FedQueue
from fedqueue.protocol.strategies.jit import Jit

STRATEGIES: Final[dict[str, type[Strategy]]] = {
    strategy.name: strategy for strategy in (FedQueue, Jit, FedAvg, FedAsync, FedBuff, FedCompass)
}


def register(strategy: type[Strategy]) -> type[Strategy]:
    """Make a strategy known by its name, from any module: works as a decorator."""
    STRATEGIES[strategy.name] = strategy
    return strategy


__all__ = ["STRATEGIES", "Strategy", "register"]
