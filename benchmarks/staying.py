"""Jobs that stay, over two real Slurm clusters: what nodes do between two parts, and what start-up a part saves.

A step of the large model is a few milliseconds on a small part of it, as one on an accelerator leaves most of the
processor alone: the cores are for hand-in, transfer, checks and aggregation. Each script keeps a diary, which says what
it did beside what the ledger says of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure
from fedqueue.ledger import FILE, LedgerReader
from tests.slurm import Cluster, clusters

MEGABYTES = 200
ROUNDS = 8
ROUND_SECONDS = 30.0
TENSORS = 20

CONFIG = """
[run]
strategy = "jit"
rounds = {rounds}
round_length = {round_length}

[strategy.jit]
stay = 3000.0
rounds = "{rule}"
between = "{between}"

[model]
initial = "first.safetensors"
keep = "needed"

[evaluation]
where = "nowhere"

[worker]
command = "{python} {folder}/train.py"
poll_seconds = 0.2

[[facility]]
name = "north"
scheduler = {{ kind = "slurm", conf = "{north}" }}

[[facility]]
name = "south"
scheduler = {{ kind = "slurm", conf = "{south}" }}
"""

DIARY = """
import json
import os
import time

import torch

import fedqueue

torch.set_num_threads(1)
attempt = f"{os.environ['FEDQUEUE_JOB']}/attempt-{os.environ['FEDQUEUE_ATTEMPT']}"


def since(part):
    "When this job began, or took the work of this part."
    return os.stat(f"{attempt}/part-{part}/taken.json" if part else f"{attempt}/started").st_mtime


def hand_in(part, tensors, times):
    told = {"part": part.part, "ahead": part.is_ahead, "since": since(part.part - part.is_ahead), "times": times}
    part.submit(tensors)
    with open(f"{attempt}/diary", "a") as diary:
        print(json.dumps({**told, "handed_in": time.time()}), file=diary)

"""

LARGE = """
with fedqueue.participate() as work:
    for part in work.parts():
        model, times = part.model(), []
        for step in part.steps():
            model["w0"][:1000] += 1e-3
            time.sleep(0.004)
            times.append(time.time())
        hand_in(part, model, times)
"""

NETWORK = """
layers = [torch.nn.Linear(256, 256) for _ in range(8)]
model = torch.nn.Sequential(*(made for layer in layers for made in (layer, torch.nn.GELU())))
forward = {forward}
with fedqueue.participate() as work:
    optimizer = torch.optim.Adam(model.parameters())
    for part in work.parts():
        model.load_state_dict(part.model())
        for group in optimizer.param_groups:
            group["lr"] = part.learning_rate
        times = []
        for step in part.steps():
            optimizer.zero_grad()
            forward(torch.ones(32, 256)).square().mean().backward()
            optimizer.step()
            times.append(time.time())
        hand_in(part, model.state_dict(), times)
"""


@dataclass(frozen=True)
class Measured:
    """A run: what its ledger says, and the diaries of its jobs."""

    summary: Mapping[str, Any]
    parts: int
    trained: float  # node-seconds of what was handed in
    arrived_meanwhile: int  # of these, how many arrived when their job had done a step since it handed them in
    begun: Sequence[float]  # seconds from the start of a job to the end of its first step
    turned: Sequence[float]  # the same from taking the work of a further part
    waited: float  # node-seconds between handing in and taking the work of a further part, by the ledger
    idle: float  # node-seconds between two parts by the diaries: from handing in to the next step
    idle_told: float  # the same by the ledger
    handing_in: float  # node-seconds by the diaries: from the last step of a part to its being handed in

    @property
    def idle_share(self) -> float:
        return float(self.summary["idle_node_seconds"] / self.summary["node_seconds"])


def measure() -> Iterator[Figure]:
    with clusters(2, nodes=1) as sites, tempfile.TemporaryDirectory() as folder:
        for between in ("wait", "auto"):
            base = Path(folder) / between
            # By rule, rounds would follow how busy this machine is with making models.
            found = run_large(base, sites, MEGABYTES, ROUNDS, ROUND_SECONDS, between=between, rule="fixed")
            words = {"wait": "that waits", "auto": "that trains on if that pays"}[between]
            name = f"{MEGABYTES} MB, two Slurm clusters, a job {words} between parts"
            held = found.summary["node_seconds"]
            yield Figure(
                f"{name}: held node time idle", found.idle_share, "share", "at most 0.05" * (between == "auto")
            )
            yield Figure(f"{name}: held node time training", found.trained / held, "share")
            yield Figure(f"{name}: held node time writing updates", found.handing_in / held, "share")
            yield Figure(f"{name}: parts handed in", found.parts, "")
            yield Figure(f"{name}: of these, arrived while the job trained on", found.arrived_meanwhile, "")
        for kind, forward in (("plain", "model"), ("compiled", "torch.compile(model)")):
            found = run_network(Path(folder) / kind, sites, forward)
            yield Figure(f"{kind} network: start of a job to the end of its first step", median(found.begun), "s")
            yield Figure(f"{kind} network: taking further work to the same", median(found.turned), "s")


def run_large(
    base: Path,
    sites: Sequence[Cluster],
    megabytes: int,
    rounds: int,
    round_length: float,
    between: str = "auto",
    rule: str = "auto",
) -> Measured:
    """A model of so many megabytes, random, of which a step changes a little."""
    import torch

    values = megabytes * 1_000_000 // 4 // TENSORS
    first = {f"w{place}": torch.randn(values) for place in range(TENSORS)}
    return _run(base, sites, LARGE, first, rounds=rounds, round_length=round_length, between=between, rule=rule)


def run_network(base: Path, sites: Sequence[Cluster], forward: str, rounds: int = 12) -> Measured:
    import torch

    first: dict[str, Any] = {}
    for place in range(8):
        layer = torch.nn.Linear(256, 256)
        first |= {f"{2 * place}.{name}": value.detach() for name, value in layer.named_parameters()}
    script = NETWORK.format(forward=forward)
    return _run(base, sites, script, first, rounds=rounds, round_length=3.0, between="wait", rule="fixed")


def _run(base: Path, sites: Sequence[Cluster], script: str, first: Mapping[str, Any], **settings: Any) -> Measured:
    from safetensors.torch import save_file

    base.mkdir()
    save_file(dict(first), base / "first.safetensors")
    (base / "train.py").write_text(DIARY + script)
    north, south = (site.conf for site in sites)
    text = CONFIG.format(north=north, south=south, folder=base, python=sys.executable, **settings)
    (base / "run.toml").write_text(text)
    run = base / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(base / "run.toml"), "--json", "--no-plots", "--out", str(run)]
    summary = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    diaries = {
        "/".join(path.parts[-5:-1:2]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in run.glob("facilities/*/jobs/*/attempt-0/diary")
    }
    entries = [entry for diary in diaries.values() for entry in diary if not entry["ahead"] and entry["times"]]
    with LedgerReader(run / FILE) as ledger:
        arrivals = [(row["at"], json.loads(row["body"])["receipt"]) for row in ledger.rows(_ARRIVED)]
        takings = [(row["at"], json.loads(row["body"])) for row in ledger.rows(_TAKEN)]
    taken_at = {(taken["job_id"], taken["part"]): at - taken["ago"] for at, taken in takings}
    return Measured(
        summary=summary,
        parts=len(arrivals),
        trained=sum(receipt["train_seconds"] for _, receipt in arrivals),
        arrived_meanwhile=sum(
            at > _next_step(diaries[receipt["job_id"]], receipt.get("part", 0), receipt["job_id"], taken_at)
            for at, receipt in arrivals
        ),
        begun=[entry["times"][0] - entry["since"] for entry in entries if not entry["part"]],
        turned=[entry["times"][0] - entry["since"] for entry in entries if entry["part"]],
        waited=sum(taken["waited"] for _, taken in takings),
        idle=sum(_idle(diary) for diary in diaries.values()),
        idle_told=sum(taken["waited"] - taken.get("ahead_seconds", 0.0) for _, taken in takings)
        + sum(receipt.get("turn_seconds", 0.0) for _, receipt in arrivals if receipt.get("part", 0)),
        handing_in=sum(entry["handed_in"] - entry["times"][-1] for entry in entries),
    )


def _idle(diary: Sequence[Mapping[str, Any]]) -> float:
    """Seconds between two stretches of steps, less those of handing in."""
    stretches = [entry for entry in diary if entry["times"]]
    return float(
        sum(
            after["times"][0] - (before["times"][-1] if before["ahead"] else before["handed_in"])
            for before, after in pairwise(stretches)
        )
    )


def _next_step(
    diary: Sequence[Mapping[str, Any]], part: int, job: str, taken_at: Mapping[tuple[str, int], float]
) -> float:
    """When a job did its first step after it handed in this part, on the run clock; infinite: it did none. The ledger
    has from its facility how long ago it took work, so both clocks are known for that moment."""
    clocks = [
        taken_at[job, entry["part"]] - entry["since"]
        for entry in diary
        if (job, entry["part"]) in taken_at and not entry["ahead"]
    ]
    later = [entry["times"][0] for entry in diary if entry["part"] > part and entry["times"]]
    return later[0] + median(clocks) if later and clocks else inf


_ARRIVED = "SELECT at, body FROM events WHERE kind = 'UpdateArrived'"
_TAKEN = "SELECT at, body FROM events WHERE kind = 'WorkTaken'"
