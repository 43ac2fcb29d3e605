"""Where a test may kill this process: between two durable steps.

FEDQUEUE_FAILPOINT=agent.submitted:2 kills the process (SIGKILL: no handler runs, nothing is flushed) when it reaches
the point of that name for the second time. Without the variable a failpoint does nothing.
"""

from __future__ import annotations

import os
import signal
from typing import Final

COORDINATOR: Final = (
    "secret.whole",  # a file of secrets is written beside the old one, which it does not replace yet
    "object.whole",  # a model's or an update's file is whole; it does not have its name
    "object.kept",  # it has its name; the ledger does not have it
    "ledger.before",  # an event is about to be written
    "ledger.after",  # it is written; its commands are not carried out
    "heartbeat.noted",  # the run clock is in the ledger
    "answer.before",  # a facility's reports are taken; it is about to be answered
    "upload.stored",  # an update's bytes are all there
    "update.refused",  # a bad update is kept aside; the event is not written
    "run.over",  # everybody knows that the run is over; its summary and its last model are not written
    "run.finished",  # they are
)

AGENT: Final = (
    "lease.written",  # the agent says that it is here
    "journal.whole",  # a new journal is written beside the old one, which it does not replace yet
    "journal.before",  # something is about to be noted
    "journal.after",  # it is noted; nothing that depends on it is done
    "agent.ordered",  # an order is in the journal, its folder not made
    "agent.prepared",  # its folder is made; that we are about to ask the scheduler is not noted
    "agent.intended",  # about to ask the scheduler
    "agent.submitted",  # the scheduler has the job; the agent has not noted it
    "agent.fetched",  # a model is at the facility
    "agent.posted",  # standing work is laid out
    "agent.uploaded",  # the bytes are at the coordinator; it was not told so
    "agent.committed",  # the coordinator has it; the agent has not noted it
    "agent.scoring",  # the scheduler has a job that scores a model
)

WORKER: Final = ("worker.written",)  # the update's file is there, the result is not (worker/handin.py)

POINTS: Final = (*COORDINATOR, *AGENT, *WORKER)

_name = ""
_left = 0


def arm() -> None:
    """Read the variable; done on import, and by who forks processes of one that has imported us."""
    global _name, _left
    _name, _, count = os.environ.get("FEDQUEUE_FAILPOINT", "").partition(":")
    _left = int(count or 1) if _name else 0


def failpoint(name: str) -> None:
    global _left
    if _left and name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm()
