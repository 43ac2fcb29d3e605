"""Finds the data files a run needs, and fetches the public ones that are not there yet.

The data folder is the environment variable FEDQUEUE_DATA; without it, `fedqueue` in the user's cache folder.
No torch here: the planner and the simulator of timing read traces through this file too.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import os
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from fedqueue.errors import DataError

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/",
    "https://storage.googleapis.com/cvdf-datasets/",
)
"""Public copies; a known file's name is appended to them."""

SHA256 = {
    "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "mnist/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
"""The known files: these are checked when found and fetched when missing."""

TIMEOUT_SECONDS = 30.0
"""For connecting and for each read; a mirror that stays silent longer is given up."""

_BLOCK_BYTES = 1 << 20
_verified: set[Path] = set()


def root() -> Path:
    """The data folder; it may not exist yet."""
    if chosen := os.environ.get("FEDQUEUE_DATA"):
        return Path(chosen).expanduser().absolute()
    return cache()


def cache() -> Path:
    """The user's own folder, for what was fetched or worked out and can be again; it may not exist yet."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen).expanduser().absolute() / "fedqueue"
    return Path.home() / ".cache" / "fedqueue"


def find(name: str) -> Path:
    """The path of a data file, downloaded first if it is a known public one and absent.

    Example: `find("mnist/train-images-idx3-ubyte.gz")`, `find("traces/facility.csv.gz")`.
    Raises `DataError` when the file is missing or damaged.
    """
    places = candidates(name)
    for path in places:
        if path.is_file():
            _verify(name, path)
            return path
    failures = _download(name, places[0]) if name in SHA256 else []
    if failures is None:
        return places[0]
    raise DataError(_missing(name, places, failures))


def locate(name: str) -> Path:
    """Where a file or folder lies that a config names: `data:NAME` in the data folder, `package:PACKAGE/NAME` in an
    installed package, else it is a path."""
    kind, colon, rest = name.partition(":")
    if colon and kind == "data":
        return next((place for place in candidates(rest) if place.is_dir()), None) or find(rest)
    if colon and kind == "package":
        package, _, inside = rest.partition("/")
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        if not places:
            raise DataError(f"{name}: there is no package {package!r} in this Python; install it")
        return Path(places[0]) / inside
    return Path(name)


def find_log(file: str, folder: Path) -> Path:
    """A queue log as named, beside `folder`, or else in the data folder."""
    beside = folder / file
    try:
        if beside.exists():
            return beside
    except PermissionError:
        return beside  # who reads it says what is wrong
    name = file if "/" in file else f"traces/{file}"
    if not any(path.is_file() for path in candidates(name)):
        raise DataError(f"{file}: there is no such file, here or under {root()} (FEDQUEUE_DATA)")
    return find(name)


def candidates(name: str) -> tuple[Path, ...]:
    """Where a data file may lie. The further places let FEDQUEUE_DATA name a folder that holds data/, or a data/
    beside the file's."""
    folder = root()
    return (folder / name, folder / "data" / name, folder.parent / name)


def _verify(name: str, path: Path) -> None:
    expected = SHA256.get(name)
    if expected is None or path in _verified:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DataError(
            f"{path} is damaged: its sha256 is {found[:12]}... and should be {expected[:12]}...; "
            "delete it and run again to fetch a fresh copy"
        )
    _verified.add(path)


def _download(name: str, target: Path) -> list[str] | None:
    """None when `target` is now in place and checked, or why each mirror failed."""
    # The process id keeps two processes that fetch at once out of each other's way; the last rename wins.
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    failures = []
    for mirror in MIRRORS:
        url = mirror + name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            digest = _fetch(url, part)
            if digest == SHA256[name]:
                part.replace(target)
                _verified.add(target)
                return None
            failures.append(f"{url}: not the expected file (its sha256 is {digest[:12]}...)")
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
        finally:
            part.unlink(missing_ok=True)
    return failures


def _fetch(url: str, part: Path) -> str:
    """Stream `url` into `part`; the sha256 of what came, in hex."""
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, part.open("wb") as file:
        while block := answer.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _missing(name: str, candidates: Iterable[Path], failures: Iterable[str]) -> str:
    message = f"data file {name} is missing; looked for {', '.join(map(str, candidates))};"
    if tried := "; ".join(failures):
        message += f" could not fetch it ({tried}); connect to the network or"
    return f"{message} set FEDQUEUE_DATA to a folder that has it"
