"""Every error a person may meet, in one tree.

    FedQueueError                      exit  whose fault it is, and what helps
    ├── ConfigError                      2   the user's config or command line: change it
    ├── DataError                        3   a data file is missing or damaged: fetch it, or point FEDQUEUE_DATA at it
    ├── TaskError                        4   the user's training code: fix it
    ├── RunFolderError                   5   a run folder exists already, is missing, or is not one: name another
    ├── StorageError                     6   a file or folder cannot be written or read: the message says what to do
    ├── ReplayError                      7   a replay gave other commands than the ledger holds: a bug, or another build
    ├── TransportError                       between an agent and its coordinator (agent/transport.py)
    │   ├── CoordinatorUnreachableError  8   the network, or a coordinator that is down: it is tried again
    │   └── CoordinatorRefusedError      9   the coordinator said no: the message says why
    ├── LeaseError                      10   another agent works for this facility: stop that one (agent/journal.py)
    ├── TensorFileError                 11   a model or an update is not as it must be (tensorbytes.py)
    ├── SchedulerError                   1   a facility's scheduler said no, or did not answer (agent/schedulers)
    └── ProtocolError                   70   ours: a message or a command that must not exist; please report it

Each message is one line that says what is wrong, where, and what to do.
"""

from __future__ import annotations

import errno
from typing import ClassVar, Final

_HELP: Final = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "the quota is used up: make room",
    errno.EACCES: "let this user read and write it",
    errno.EPERM: "let this user read and write it; `lsattr` shows whether it is locked",
    errno.EROFS: "its file system is mounted read-only: mount it for writing",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOENT: "put it back",
    errno.ENOTDIR: "put it back",
    errno.EISDIR: "a folder is in its place: put the file back",
    errno.EIO: "the disk does not answer as it should: look after it",
    errno.ESTALE: "its file system was mounted anew: mount it where it was",
}


def what_to_do(error: OSError) -> str:
    """About a file or folder that could not be used.

    >>> what_to_do(OSError(errno.EMFILE, "Too many open files"))
    'raise the limit of open files (`ulimit -n`)'
    """
    return _HELP.get(error.errno or 0, "look at the file system")


class FedQueueError(Exception):
    """The root; `exit_code` is what the command line leaves with."""

    exit_code: ClassVar[int] = 1


class ConfigError(FedQueueError):
    exit_code = 2


class DataError(FedQueueError):
    exit_code = 3


class TaskError(FedQueueError):
    exit_code = 4


class RunFolderError(FedQueueError):
    exit_code = 5


class StorageError(FedQueueError):
    exit_code = 6


class ReplayError(FedQueueError):
    exit_code = 7


class ProtocolError(FedQueueError, ValueError):
    exit_code = 70


def describe(error: BaseException) -> str:
    """The error's type and the first line of its text: a message stays one line.

    >>> describe(ValueError("no\\nsuch"))
    'ValueError: no'
    """
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
