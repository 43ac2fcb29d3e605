"""Which optional packages a command needs: it says so before it begins anything, and how to install them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

from fedqueue.errors import ConfigError

if TYPE_CHECKING:
    from fedqueue.config import Config

Extra = Literal["train", "plots", "serve", "lm"]

MODULES: Final[dict[str, tuple[str, ...]]] = {
    "boosting": ("sklearn",),
    "train": ("torch", "safetensors", "sklearn"),
    "plots": ("matplotlib",),
    "serve": ("uvicorn", "starlette", "cryptography"),
    "metrics": ("prometheus_client",),
    "huggingface": ("transformers", "accelerate"),
    "lm": ("transformers", "accelerate", "peft"),
    "lightning": ("lightning",),
}
"""The modules of each extra in pyproject.toml; where two have the same, the smaller one is first."""

USES: Final[dict[str, str]] = {
    "train": "training models",
    "plots": "drawing plots and reports",
    "serve": "serving runs and pages",
    "lm": "training language models",
}


def need(*extras: Extra, instead: str = "") -> None:
    """Refuse to begin without these. `instead`: what else helps."""
    for extra in extras:
        missing = [name for name in MODULES[extra] if not _is_here(name)]
        if missing:
            raise ConfigError(f"{USES[extra]} needs {', '.join(missing)}: {install(extra)}{instead}")


def need_for(config: Config, *, plots: bool = False, real: bool = False, elsewhere: bool = False) -> None:
    """What a run of this config needs; `elsewhere`: sites train by commands of their own."""
    from fedqueue.protocol.strategies import STRATEGIES
    from fedqueue.training.causal_settings import CAUSAL_LM

    trains = config.task.name != "timing" and not (real and config.worker.command is not None)
    if real:
        if STRATEGIES[config.run.strategy].keeps_variates:
            raise ConfigError(
                f"run.strategy: {config.run.strategy} has control variates, which real jobs do not exchange; "
                "simulate it, or choose another"
            )
        need("serve")
    if trains:
        need("train")
        if config.task.name == CAUSAL_LM:
            need("lm")
            if "train" not in config.task.options and not elsewhere:
                raise ConfigError("task.options.train: is missing; name one file, or a file for each facility")
    if plots:
        need("plots", instead=", or add --no-plots")


def install(extra: str) -> str:
    return f"pip install 'fedqueue[{extra}]'"


def extra_of(module: str | None) -> str | None:
    """The extra that brings a module which could not be imported."""
    top = (module or "").partition(".")[0]
    return next((extra for extra, names in MODULES.items() if top in names), None)


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
