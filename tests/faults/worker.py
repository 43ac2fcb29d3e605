"""A job that speaks the file contract and nothing else: no numpy, no fedqueue, so that starting it costs little.

    python -I -S worker.py '{"train_seconds": 0.1, "odd": {"2": "nan"}}'

It adds to the model what only this job, attempt and part adds (`step_of`), so that from a final model one can tell what
was left out or counted twice. A job that stays goes on from part to part (`look`). `odd` names jobs by number that do
something else: see `main`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
import time
import zlib
from typing import Any


def step_of(job_id: str, attempt: int, part: int, place: int, same: bool = False) -> float:
    """What an update adds to the value at `place`; exact in single precision. `same`: all add the same."""
    mark = 1 if same else zlib.crc32(f"{job_id}/{attempt}/{part}".encode())
    return ((mark >> (place % 16)) % 64 + 1) / 256


def read_values(path: str) -> tuple[bytes, list[float]]:
    """Header (with its length before it) and values of a safetensors file of float32."""
    with open(path, "rb") as file:
        data = file.read()
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start], list(struct.unpack(f"<{(len(data) - start) // 4}f", data[start:]))


def write_whole(path: str, data: bytes) -> None:
    with open(path + ".part", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def write_json(path: str, value: object) -> None:
    write_whole(path, json.dumps(value).encode())


def wait_for(path: str) -> None:
    until = time.monotonic() + 600.0
    while not os.path.exists(path):
        if time.monotonic() > until:
            raise SystemExit(f"{path} did not come")
        time.sleep(0.02)


met: list[str] = []  # failpoints


def failpoint(name: str) -> None:
    """As fedqueue/files.py has them."""
    met.append(name)
    point, _, count = os.environ.get("FEDQUEUE_FAILPOINT", "").partition(":")
    if name == point and met.count(name) == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def stamp_of(path: str) -> float:
    """When it was written, by the clock of the file system."""
    return os.stat(path).st_mtime


def bind(order: dict[str, Any], folder: str, started: float) -> dict[str, Any]:
    """Take standing work, roughly as fit.py does."""
    wait_for(order["standing"])
    with open(order["standing"], encoding="utf-8") as file:
        standing = json.load(file)
    write_whole(f"{folder}/.now", b"")
    now = stamp_of(f"{folder}/.now")
    index, budget = 0, standing["next_cutoff"] - standing["overhead"] - started
    while budget < standing["min_steps"] / standing["steps_per_second"]:
        index, budget = index + 1, budget + standing["round_length"]
    steps = max(standing["min_steps"], int(budget * standing["steps_per_second"]))
    bound = {"standing": standing["number"], "cutoff_index": index, "base_version": standing["version"]}
    work = {"steps": steps, "learning_rate": standing["learning_rate"], "train_budget": budget}
    write_json(
        f"{folder}/bound.json",
        {**bound, **work, "bound_at": now, "lingered": 0.0, "startup_seconds": max(0.0, now - started)},
    )
    return {**work, "base_version": standing["version"], "model": standing["model"]}


def place_of(folder: str, part: int) -> str:
    return f"{folder}/part-{part}" if part else folder


def look(order: dict[str, Any], folder: str, part: int, base: int, ends: float) -> dict[str, Any] | None:
    """The work of a further part, roughly as find_work.py looks for it; None: the job leaves."""
    place, began = place_of(folder, part), time.monotonic()
    while time.monotonic() < ends and time.monotonic() - began < order["stay"]:
        time.sleep(0.02)
        if os.path.exists(f"{place}/further.json"):
            with open(f"{place}/further.json", encoding="utf-8") as file:
                work: dict[str, Any] = json.load(file)
            failpoint("worker.found")
            write_json(f"{place}/taken.json", {"waited": time.monotonic() - began})
            failpoint("worker.taken")
            return work
        if not os.path.exists(order["standing"]):
            continue
        with open(order["standing"], encoding="utf-8") as file:
            standing = json.load(file)
        if standing.get("from_job", 0) > int(order["job_id"].rpartition("/")[2]):
            return None
        if standing["version"] > base:
            os.makedirs(place, exist_ok=True)
            work = {"base_version": standing["version"], "steps": 5, "learning_rate": 0.1, "train_budget": 0.2}
            bound = {"standing": standing["number"], "cutoff_index": 0, **work}
            failpoint("worker.found")
            write_json(f"{place}/taken.json", {"waited": time.monotonic() - began, "bound": bound})
            failpoint("worker.taken")
            return {**work, "model": standing["model"]}
    return None


def hand_in(folder: str, work: dict[str, Any], began: float, data: bytes, **metrics: float) -> None:
    finished = time.time()
    result = {
        "base_version": work["base_version"],
        "steps_done": max(1, int(work["steps"])),
        "train_seconds": finished - began,
        "samples": 1,
        "nodes": 1,
        "device": "cpu",
        "metrics": metrics,
        "began_at": began,
        "finished_at": finished,
        "stopped_by": "steps",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest() if data else "",
    }
    write_json(f"{folder}/result.json", result)


def main() -> None:
    wishes = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    job, attempt = os.environ["FEDQUEUE_JOB"], int(os.environ["FEDQUEUE_ATTEMPT"])
    folder = f"{job}/attempt-{attempt}"
    with open(f"{job}/order.json", encoding="utf-8") as file:
        order = json.load(file)
    odd = wishes.get("odd", {}).get(order["job_id"].rpartition("/")[2])
    if attempt > 0:
        odd = "hang" if odd == "signal" else None
    started = stamp_of(f"{folder}/started")
    stays = order.get("stay") is not None
    ends = time.monotonic() + order["wall_seconds"] - 1.0
    work: dict[str, Any] | None
    if order["assignment"] and (attempt == 0 or not stays):
        work = {**order["assignment"], "model": order["model"]}
    elif stays and not os.path.exists(order["standing"]):
        write_json(f"{folder}/waiting.json", {})
        work = look(order, folder, 0, -1, ends)
    else:
        work = bind(order, folder, started)
    part = 0
    while work is not None:
        train(order, wishes, work, attempt, part, odd)
        part, odd = part + 1, None
        work = look(order, folder, part, work["base_version"], ends) if stays else None
    if stays:
        write_json(f"{folder}/left.json", {"parts": part})


def train(
    order: dict[str, Any], wishes: dict[str, Any], work: dict[str, Any], attempt: int, part: int, odd: str | None
) -> None:
    folder = place_of(f"{os.environ['FEDQUEUE_JOB']}/attempt-{attempt}", part)
    wait_for(work["model"])
    began = time.time()
    if odd == "hang":
        time.sleep(1000.0)
    if odd == "signal":  # hands in when it is told to stop, and hangs when it is run again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        write_whole(f"{folder}/listens", b"")
        signal.sigwait({signal.SIGTERM})
    if odd in ("slow", "deaf"):  # deaf: an old incarnation that its scheduler cannot end
        if odd == "deaf" and (child := os.fork()):
            raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if odd == "deaf":
            os.setsid()
            write_whole(f"{folder}/deaf", b"")
        until = time.monotonic() + wishes["slow_seconds"]
        while time.monotonic() < until and not os.path.exists(f"{folder}/enough"):
            time.sleep(min(0.5, wishes["slow_seconds"]))
    if order["purpose"] == "evaluate":
        hand_in(folder, work, began, data=b"", score=0.5)
        return
    seconds = min(work["train_budget"] or 1e9, work["steps"] / 50.0, wishes.get("train_seconds", 0.1))
    time.sleep(max(0.0, seconds))
    header, values = read_values(work["model"])
    same = bool(wishes.get("same"))
    values = [value + step_of(order["job_id"], attempt, part, place, same) for place, value in enumerate(values)]
    if odd == "nan":
        values[0] = float("nan")
    if odd == "shape":
        text = header[8:].replace(b"[32]", b"[31]").rstrip() + b" "
        header, values = len(text).to_bytes(8, "little") + text, values[:31]
    data = header + struct.pack(f"<{len(values)}f", *values)
    if odd == "shape":
        data = data.replace(b"[0,128]", b"[0,124]")
    write_whole(f"{folder}/update.safetensors", data[:-8] if odd == "truncated" else data)
    if odd == "missing":
        os.unlink(f"{folder}/update.safetensors")
    failpoint("worker.written")
    hand_in(folder, work, began, data, loss=0.5)
    failpoint("worker.handed_in")


if __name__ == "__main__":
    main()
