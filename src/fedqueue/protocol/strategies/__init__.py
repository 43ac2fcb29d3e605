"""The algorithms, one a file. To add one: write its file, and name its class in `STRATEGIES`."""

from __future__ import annotations

from typing import Final

from fedqueue.protocol.strategies.base import Strategy
from fedqueue.protocol.strategies.fadas import Fadas
from fedqueue.protocol.strategies.fedadam import FedAdam
from fedqueue.protocol.strategies.fedasync import FedAsync
from fedqueue.protocol.strategies.fedavg import FedAvg
from fedqueue.protocol.strategies.fedbuff import FedBuff
from fedqueue.protocol.strategies.fedcompass import FedCompass
from fedqueue.protocol.strategies.fedprox import FedProx
from fedqueue.protocol.strategies.fedqueue import FedQueue
from fedqueue.protocol.strategies.jit import Jit
from fedqueue.protocol.strategies.scaffold import Scaffold

STRATEGIES: Final[dict[str, type[Strategy]]] = {
    strategy.name: strategy
    for strategy in (FedQueue, Jit, FedAvg, FedAsync, FedBuff, FedCompass, FedProx, FedAdam, Fadas, Scaffold)
}


def distinct() -> list[str]:
    """The strategies that differ in when they do what: not those that only treat models in another way."""
    return [name for name, strategy in STRATEGIES.items() if not strategy.variation_of]


def register(strategy: type[Strategy]) -> type[Strategy]:
    """Make a strategy known by its name, from any module: works as a decorator."""
    STRATEGIES[strategy.name] = strategy
    return strategy


__all__ = ["STRATEGIES", "Strategy", "distinct", "register"]
