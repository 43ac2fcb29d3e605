"""The folder of a job, as the job sees it: which job this is, what lies there, and how it hands in.

A half-written result is never seen. Each part that a job hands in has a place of its own: the attempt's folder for the
first, part-1, part-2 and so on inside it for those of a job that stays. (How it finds its work is in find_work.py.)
Part of the worker: Python 3.9, the standard library, and numpy or torch only when their tensors come along. Times are
those of the shared file system (`FileClock`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedqueue import PROTOCOL
from fedqueue.errors import ConfigError, FedQueueError, describe
from fedqueue.files import FileClock, failpoint, sync
from fedqueue.protocol.aggregation import declared_roles, find_roles
from fedqueue.protocol.codec import Json, encode, read
from fedqueue.protocol.contract import AssignmentFile, Order, OrderFile, Privacy

T = TypeVar("T")

POLL_SECONDS = 0.05
FILE_PATIENCE = 60.0
"""Seconds: a shared file system may show a file this late."""

PREFIXES = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What DDP and torch.compile put before every name."""

Tensors = dict[str, Any]
"""By name: torch tensors or numpy arrays, whatever the script uses."""

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor of a file."""

TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
}
"""What a safetensors file calls a type, and how torch and numpy do."""

_BLOCK_BYTES = 1 << 20
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit

ENVIRONMENTS = (
    ("WORLD_SIZE", ("RANK", "SLURM_PROCID")),  # torchrun, and scripts that set it themselves
    ("PMI_SIZE", ("PMI_RANK",)),  # mpiexec of PBS sites
    ("OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ("SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",)),  # srun; the batch script itself has no step
)
"""Where launchers say how many processes there are and which one this is; the first that is set holds."""


class ParticipateError(FedQueueError):
    """A job cannot take part, or its result cannot be handed in. One line says why."""


# Which job, and which process of it --------------------------------------------------------------------


class Ranks(NamedTuple):
    """This process among those of the job.

    >>> Ranks.of({"WORLD_SIZE": "4", "RANK": "2"})
    Ranks(size=4, rank=2)
    """

    size: int
    rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Ranks:
        for size_name, rank_names in ENVIRONMENTS:
            if size_name in environment:
                rank_name = next((name for name in rank_names if name in environment), None)
                try:
                    size, rank = int(environment[size_name]), int(environment[rank_name]) if rank_name else 0
                except ValueError as error:
                    raise ParticipateError(f"{size_name} or {rank_name} is not a number: {error}") from error
                if size > 1 and rank_name is None:
                    raise ParticipateError(f"{size_name} is {size}, but {' or '.join(rank_names)} is not set")
                return cls(size, rank)
        return cls(1, 0)

    @classmethod
    def here(cls) -> Ranks:
        return cls.of(os.environ)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def connected(self) -> bool:
        """Whether there are several and they can talk."""
        if self.size == 1 or "torch" not in sys.modules:
            return False
        import torch.distributed as dist

        return dist.is_available() and dist.is_initialized()


class ThisJob(NamedTuple):
    """What the order and the environment say."""

    order: Order
    attempt: int
    folder: Path  # this attempt's own: a second incarnation has another
    state_dir: Path
    nodes: int
    entered_at: float  # when the script asked for work
    started_at: float  # when the batch script began
    wall_seconds: float  # infinite outside a facility
    stay: float | None  # it goes on after it has handed in, until it is so many seconds without work; None: it does not
    standing: Path  # where to take work from, if none is assigned
    assigned: AssignmentFile | None
    clock: FileClock
    privacy: Privacy | None = None  # what the site asks of what is handed in

    @property
    def wall_left(self) -> float:
        """Seconds until the scheduler ends the job."""
        return self.started_at + self.wall_seconds - self.clock.now()

    def place(self, part: int) -> Path:
        """Where this part is handed in."""
        return self.folder if part == 0 else self.folder / f"part-{part}"

    def share(self, part: int, taken: AssignmentFile, hurried: Callable[[], bool]) -> AssignmentFile:
        """Lay down what this part works on, for the job's other processes; `hurried`: it cannot wait any more.

        A model may still be on its way to the site: it travels while the job is in the queue.
        """
        model, told = Path(taken.model), False
        while not model.is_file():
            if self.wall_left < 0 or hurried():
                raise ParticipateError(f"{model}: the model did not come in time; look at the agent's log")
            if not told:
                say(f"waiting for the model {model.name}")
                told = True
            time.sleep(POLL_SECONDS)
        write_file(self.place(part) / "assignment.json", taken)
        return taken

    def parts(self) -> int:
        """That were handed in."""
        part = 0
        while (self.place(part) / "result.json").exists():
            part += 1
        return part


def this_job(environment: Mapping[str, str]) -> ThisJob | None:
    """The job that the batch script names; None outside one."""
    entered = time.monotonic()
    named = environment.get("FEDQUEUE_JOB")
    if not named:
        return None
    folder = Path(named)
    try:
        attempt = int(environment.get("FEDQUEUE_ATTEMPT", ""))
    except ValueError as error:
        raise ParticipateError(
            "FEDQUEUE_JOB is set but FEDQUEUE_ATTEMPT is not a number; start jobs by job.sh"
        ) from error
    where = folder / "order.json"
    protocol = read_object(where, entered + FILE_PATIENCE).get("protocol")
    if protocol not in range(1, PROTOCOL + 1):
        raise ParticipateError(f"{where}: protocol must be 1 to {PROTOCOL}, found {protocol!r}")
    file = read_file(OrderFile, where)
    stay = None if environment.get("FEDQUEUE_STAY") == "no" else file.order.stay
    assigned = None
    if file.assignment is not None and file.model is not None and (file.order.stay is None or attempt == 0):
        assigned = AssignmentFile(assignment=file.assignment, model=file.model)
    started = folder / f"attempt-{attempt}" / "started"
    read_text(started, entered + FILE_PATIENCE)
    clock = FileClock(started.parent)
    return ThisJob(
        order=file.order,
        attempt=attempt,
        folder=started.parent,
        state_dir=made_folder(Path(file.state_dir)),
        nodes=count_nodes(environment) if file.nodes is None else file.nodes,
        entered_at=clock.now() - (time.monotonic() - entered),
        started_at=started.stat().st_mtime,
        wall_seconds=file.order.wall_seconds,
        stay=stay,
        standing=Path(file.standing),
        assigned=assigned,
        clock=clock,
        privacy=file.privacy,
    )


def made_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParticipateError(f"{folder}: cannot be made: {describe(error)}") from error
    return folder


def count_nodes(environment: Mapping[str, str]) -> int:
    """How many nodes the scheduler gave, as far as it says.

    >>> count_nodes({"SLURM_JOB_NUM_NODES": "4"})
    4
    """
    slurm, pbs = environment.get("SLURM_JOB_NUM_NODES", ""), environment.get("PBS_NODEFILE")
    if slurm.isdigit():
        return int(slurm)
    try:
        hosts = Path(pbs).read_text(encoding="utf-8").split() if pbs else []
    except OSError:
        hosts = []
    return len(set(hosts)) or 1


# Reading ----------------------------------------------------------------------------------------------


def read_text(path: Path, wait_until: float = 0.0) -> str:
    """A small file; waits for it until `wait_until`, by `time.monotonic`."""
    while True:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            # Not there yet, or a stale handle of a network file system while it is replaced.
            if time.monotonic() >= wait_until:
                raise ParticipateError(f"{path}: cannot be read: {describe(error)}") from error
        time.sleep(POLL_SECONDS)


def read_object(path: Path, wait_until: float = 0.0) -> Json:
    """The JSON object in a file that is replaced by atomic rename, so it is whole once it is there."""
    text = read_text(path, wait_until)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ParticipateError(f"{path}: is not JSON: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ParticipateError(f"{path}: must hold one JSON object, found {type(found).__name__}")
    return found


def read_file(kind: type[T], path: Path, wait_until: float = 0.0) -> T:
    """What the object in a file is."""
    try:
        return read(kind, read_object(path, wait_until), "")
    except ConfigError as error:
        raise ParticipateError(f"{path}: {error}") from None


def read_header(path: Path, wait_until: float) -> tuple[Header, dict[str, str]]:
    """Of a safetensors file, without reading the tensors, and their roles; waits for the file until `wait_until`."""
    while not path.exists() and time.monotonic() < wait_until:
        time.sleep(POLL_SECONDS)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size).decode("utf-8"))
        declared = declared_roles(header.pop("__metadata__", {}))
        found = {name: (str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in header.items()}
        return found, find_roles({name: TYPES.get(kind, "") for name, (kind, _) in found.items()}, declared)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParticipateError(f"{path}: is not a readable safetensors file: {describe(error)}") from error


def torch_type(kind: str) -> Any:
    """The torch type of tensors that a safetensors file calls this."""
    import torch

    found = getattr(torch, TYPES.get(kind, ""), None)
    if found is None:
        raise ParticipateError(f"the model has a tensor of type {kind}, which this torch does not have")
    return found


def check_libraries() -> None:
    """What handing in will need is there; found out before training, not after."""
    try:
        import safetensors

        if "torch" in sys.modules:
            import safetensors.torch
        elif "numpy" in sys.modules:
            import safetensors.numpy  # noqa: F401
    except ImportError as error:
        raise ParticipateError(f"{describe(error)}; install safetensors and packaging for {sys.executable}") from error


def load_declared(module: Any, state: Mapping[str, Any]) -> None:
    """Put the declared tensors into a torch module, all of them; the rest of it stays."""
    try:
        unknown = module.load_state_dict(state, strict=False).unexpected_keys
    except RuntimeError as error:
        raise ParticipateError(f"the run's model does not fit this one: {' '.join(str(error).split())}") from error
    if unknown:
        raise ParticipateError(f"the run declares {unknown[0]!r}, which this model does not have")


# Choosing what to hand in -------------------------------------------------------------------------------


def choose(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Exactly the declared tensors, checked; the rest of `tensors` is not looked at.

    >>> import numpy
    >>> list(choose({"module.w": numpy.zeros(2), "module.frozen": numpy.zeros(9)}, {"w": (2,)}))
    ['w']
    """
    prefix = _prefix(tensors, shapes)
    chosen = {}
    for name, shape in shapes.items():
        value = tensors[prefix + name]
        found = getattr(value, "shape", None)
        if found is None:
            raise ParticipateError(f"submit: {name!r} must be a torch tensor or a numpy array, found {type(value)}")
        if tuple(found) != shape:
            raise ParticipateError(f"submit: {name!r} has shape {tuple(found)}, the run declares {shape}")
        if not _is_finite(value):
            raise ParticipateError(f"submit: {name!r} is not finite (NaN or infinity), so nothing is handed in")
        chosen[name] = value
    return chosen


def _prefix(tensors: Mapping[str, Any], shapes: Mapping[str, object]) -> str:
    for prefix in ("", *PREFIXES):
        if all(prefix + name in tensors for name in shapes):
            return prefix
    missing = [name for name in shapes if name not in tensors]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise ParticipateError(f"submit: the run declares {missing[0]!r}{more}, not found among the {len(tensors)} given")


def without_prefix(name: str) -> str:
    """
    >>> without_prefix("module._orig_mod.conv.weight")
    'conv.weight'
    """
    found = max((prefix for prefix in PREFIXES if name.startswith(prefix)), key=len, default="")
    return name[len(found) :]


def is_torch(value: object) -> bool:
    """Whether it is a torch tensor, without loading torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def in_the_scripts_library(value: Any) -> Any:
    """A tensor as torch has it, once the script has loaded torch, else as it is: a numpy array."""
    torch = sys.modules.get("torch")
    return value if torch is None else torch.as_tensor(value)


def _is_finite(value: Any) -> bool:
    if is_torch(value):
        import torch

        if not (value.is_floating_point() or value.is_complex()):
            return True
        if value.element_size() == 1:  # the 8-bit floats have no isfinite
            value = value.to(torch.float32)
        return bool(torch.isfinite(value.detach()).all())
    import numpy

    return value.dtype.kind not in "fc" or bool(numpy.isfinite(value).all())


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics as plain numbers. One that is not finite is None: it must not cost the job its update."""
    found: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParticipateError(f"submit: metric {name!r} must be a number, found {type(value).__name__}") from error
        found[str(name)] = number if math.isfinite(number) else None
        if found[str(name)] is None:
            say(f"metric {name!r} is {number}")
    return found


# Writing ------------------------------------------------------------------------------------------------


def write_update(path: Path, chosen: Mapping[str, Any]) -> tuple[int, str]:
    """Write a safetensors file under a temporary name, sync it, rename it; its bytes and sha256."""
    with replacing(path) as part:
        if any(is_torch(value) for value in chosen.values()):
            from safetensors.torch import save_file as save_torch

            save_torch(_on_cpu(chosen), str(part))
        else:
            import numpy
            from safetensors.numpy import save_file as save_numpy

            save_numpy({name: numpy.asarray(value, order="C") for name, value in chosen.items()}, str(part))
        digest, size = hashlib.sha256(), 0
        with part.open("rb") as file:
            for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
                digest.update(block)
                size += len(block)
    failpoint("worker.written")
    return size, digest.hexdigest()


def _on_cpu(chosen: Mapping[str, Any]) -> Tensors:
    """Contiguous, in processor memory, no two in the same: the format has no tied tensors."""
    import torch

    ready, seen = {}, set()
    for name, value in chosen.items():
        tensor = value if is_torch(value) else torch.as_tensor(value)
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    return ready


def write_file(path: Path, content: Any) -> None:
    """As JSON."""
    with replacing(path) as part:
        part.write_text(encode(content) + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; on leaving, what was written there is on disk and becomes `path` at once."""
    # The host too: other nodes write to the same folders.
    part = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        yield part
        sync(part)
        os.replace(str(part), str(path))
    except FedQueueError:
        raise
    except Exception as error:
        raise ParticipateError(f"{path}: cannot be written: {describe(error)}") from error
    finally:
        with suppress(OSError):
            part.unlink()
    with suppress(OSError):  # some file systems refuse this for folders
        sync(path.parent)


def say(text: str) -> None:
    print(f"fedqueue: {text}", file=sys.stderr, flush=True)
