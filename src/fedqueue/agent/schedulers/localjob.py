"""One job of the local scheduler, from submission to end: `localjob.py JOB_FOLDER LOCK_FD`.

The scheduler starts one such process a job and forgets it; there is no daemon. The process holds the lock of its job
from before its first line (the lock is inherited) until it dies, however it dies: a job whose lock is free is over.
It waits for the job it comes after, for its extra wait and for a free slot, runs the script with bash in a session of
its own, keeps the wall time, and writes `state.json` by atomic rename. SIGTERM cancels, SIGUSR1 requeues.

Standard library only, and little of it: this is started once a job.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time

LOOK = 0.05  # seconds between two looks for a free slot
HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)  # blocked, and taken only where we wait


class Cancelled(Exception):
    pass


class Requeued(Exception):
    pass


class LocalJob:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        with open(os.path.join(folder, "record.json"), encoding="utf-8") as file:
            self.record = json.load(file)
        self.state = {
            "phase": "waiting",
            "pid": os.getpid(),
            "pid_started": started_ticks(os.getpid()),
            "incarnation": 0,
            "submitted_at": self.record["submitted_at"],
        }

    def write(self, **changes: object) -> None:
        self.state.update(changes)
        write_json(os.path.join(self.folder, "state.json"), self.state)

    def live(self) -> None:
        """Through all incarnations to the end."""
        self.write()
        try:
            if self.cancel_asked():  # before we could hear a signal
                raise Cancelled
            self.wait_for_dependency(self.record["after_lock"])
            while True:
                self.write(eligible_at=time.time())
                pause(self.record["extra_wait"])
                slot = self.take_slot()
                try:
                    outcome, code = self.run()
                    break
                except Requeued:
                    if self.cancel_asked():
                        raise Cancelled from None
                    again = self.state["incarnation"] + 1
                    self.write(phase="waiting", incarnation=again, started_at=None, group=None)
                finally:
                    os.close(slot)
        except Cancelled:
            outcome, code = "cancelled", None
        self.write(phase="ended", ended_at=time.time(), outcome=outcome, exit_code=code, group=None)

    def cancel_asked(self) -> bool:
        return os.path.exists(os.path.join(self.folder, "cancel"))

    def wait_for_dependency(self, lock: str | None) -> None:
        """Until the lock of the other job is free: it has ended, or died."""
        while lock is not None and is_held(lock):
            pause(LOOK)

    def take_slot(self) -> int:
        """The open file of a slot that is ours from now on; first come, first served."""
        spool, number = self.record["spool"], self.record["number"]
        with Mutex(spool):
            queue(spool, number, self.folder)
        try:
            while True:
                with Mutex(spool):
                    slot = first_free_slot(spool, self.record["slots"]) if is_first(spool, number) else None
                if slot is not None:
                    return slot
                pause(LOOK)
        finally:
            with Mutex(spool):
                os.unlink(ticket(spool, number))

    def run(self) -> tuple[str, int]:
        """(outcome, exit code) of the script."""
        deadline = time.monotonic() + self.record["wall_seconds"]
        delay = self.record["kill_delay_seconds"]
        child = start(self.record["script"], self.record["folder"])
        self.write(phase="running", started_at=time.time(), group=child, group_started=started_ticks(child))
        while True:
            code = reap(child)
            if code is not None:
                stop(child, 0.0)  # what it left behind
                return ("completed" if code == 0 else "failed"), code
            try:
                pause(min(1.0, max(0.0, deadline - time.monotonic())), until_child=True)
            except (Cancelled, Requeued):
                stop(child, delay)
                raise
            if time.monotonic() >= deadline:
                return "timeout", stop(child, delay)


def pause(seconds: float, until_child: bool = False) -> None:
    """Sleep, but hear signals; the only place where they are heard."""
    end = time.monotonic() + seconds
    while True:
        heard = signal.sigtimedwait(HEARD, max(0.0, end - time.monotonic()))
        if heard is None:
            return
        if heard.si_signo == signal.SIGTERM:
            raise Cancelled
        if heard.si_signo == signal.SIGUSR1 and until_child:  # a job that waits is queued as it is
            raise Requeued
        if heard.si_signo == signal.SIGCHLD and until_child:
            return


def start(script: str, folder: str) -> int:
    """bash with the script, in a session of its own."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that would be inherited
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(folder)
        os.execvp("bash", ["bash", script])
    finally:
        os._exit(127)


def stop(child: int, grace: float) -> int:
    """End the child and all its group; the exit code of the child, or 128 + N of the signal that ended it."""
    code = None
    send(child, signal.SIGTERM if grace else signal.SIGKILL)
    end = time.monotonic() + grace
    while time.monotonic() < end:
        code = reap(child) if code is None else code
        if code is not None and not send(child, 0):
            return code
        time.sleep(0.02)
    send(child, signal.SIGKILL)
    while code is None and grace:
        code = reap(child)
        time.sleep(0.005)
    return 0 if code is None else code


def send(group: int, signal_number: int) -> bool:
    """Whether there was anyone to hear it."""
    try:
        os.killpg(group, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(child: int) -> int | None:
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return None
    if not pid:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# Files that are shared with local.py ------------------------------------------------------------------------------


class Mutex:
    """One process at a time looks at the queue and the slots."""

    def __init__(self, spool: str) -> None:
        self.path = os.path.join(spool, "mutex")

    def __enter__(self) -> None:
        self.file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self.file)


def is_held(path: str) -> bool:
    """Whether a living process has this lock; a file that is not there is held by nobody."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not mistake each other for the job
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)


def ticket(spool: str, number: int) -> str:
    return os.path.join(spool, "queue", f"{number:012d}")


def queue(spool: str, number: int, folder: str) -> None:
    """A ticket is a link to the lock of its job: who holds that one still waits. A job has one ticket: who was killed
    while it submitted the job, and submitted it again, left another."""
    lock, mine = os.path.join(folder, "lock"), ticket(spool, number)
    for name in os.listdir(os.path.dirname(mine)):
        path = os.path.join(os.path.dirname(mine), name)
        if path != mine and os.readlink(path) == lock:
            os.unlink(path)
    try:
        os.symlink(lock, mine)
    except FileExistsError:
        return


def is_first(spool: str, number: int) -> bool:
    mine = ticket(spool, number)
    folder = os.path.dirname(mine)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if path == mine:
            return True
        if is_held(path):
            return False
        os.unlink(path)  # its job died while it waited
    return True


def first_free_slot(spool: str, slots: int) -> int | None:
    for number in range(slots):
        file = os.open(os.path.join(spool, "slots", str(number)), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            os.close(file)
    return None


def started_ticks(pid: int) -> int | None:
    """When this process began, in the kernel's ticks: with the pid it names one process for ever. None: no such."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None


def write_json(path: str, value: object) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(path + ".new", path)


def main(argv: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    os.set_inheritable(int(argv[2]), False)  # ours alone: the script must not hold it
    job = LocalJob(argv[1])
    try:
        job.live()
    except Exception as error:  # the spool was removed, the disk is full: nobody else can say so
        print(f"local scheduler: {error}", file=sys.stderr)
        job.write(phase="ended", ended_at=time.time(), outcome="failed", exit_code=None, reason=str(error))


if __name__ == "__main__":
    main(sys.argv)
