"""The same work on many items, in several processes at once."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fedqueue.errors import TaskError

T = TypeVar("T")
R = TypeVar("R")


def run_all(
    work: Callable[[T], R],
    items: Sequence[T],
    processes: int,
    *,
    go_on: Callable[[], bool] = lambda: True,
    prepare: Callable[..., None] | None = None,
    given: tuple[Any, ...] = (),
) -> Iterator[R]:
    """What `work` makes of every item, as it is done; one process: here, one after the other.

    Before each item `go_on` is asked, and when it says no, what has begun is finished and the rest is left. Every
    process first calls `prepare` with what is `given`.
    """
    if processes == 1:
        if prepare is not None:
            prepare(*given)
        for item in items:
            if not go_on():
                return
            yield work(item)
        return
    # A fresh process each: nothing of a parent's torch state is inherited.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=(prepare, given)) as pool:
        left, out = list(reversed(items)), set[Future[R]]()
        try:
            while True:
                while left and len(out) < processes and go_on():
                    out.add(pool.submit(work, left.pop()))
                if not out:
                    return
                done, out = wait(out, return_when=FIRST_COMPLETED)
                for one in done:
                    yield one.result()
        except BrokenProcessPool:
            raise TaskError("a worker process was killed, perhaps for want of memory; try fewer --jobs") from None
        except BaseException:  # an error in one of them, or Ctrl-C: the others need not go on
            for worker in multiprocessing.active_children():
                worker.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(prepare: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if prepare is not None:
        prepare(*given)
