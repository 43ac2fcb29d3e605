"""Real Slurm clusters for tests: each with its own folder, ports and munge key, all as children of this process.

    with clusters(2) as (east, west):
        scheduler = SlurmScheduler(east.settings())

Needs the Debian packages slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins and munge; root or not. Where they
are missing the test is skipped and says so, or fails if CI or FEDQUEUE_REQUIRE_SLURM is set. The settings are those
with which Slurm runs unprivileged on one machine without systemd; the comments say what happens without them.
"""

from __future__ import annotations

import ctypes
import getpass
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from fedqueue.agent.schedulers.base import SlurmSettings
from tests.waiting import wait_for

SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # daemons, also for who is not root
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

CONF = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SrunPortRange={first}-{last}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny  # else the controller listens on every address
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5  # a requeued job waits for its credential to expire: 6 s, not 121
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.log
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MinJobAge=3600
KillWait=3
SlurmctldTimeout=30
SlurmdTimeout=15
SlurmdParameters=config_overrides  # else a node with more CPUs than the hardware is invalid
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=10 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=20 PreemptMode=OFF
"""


class Cluster:
    """One facility's Slurm: a controller, a munge and so many nodes of one CPU (x1, x2, ...)."""

    def __init__(self, folder: Path, name: str, nodes: int = 2) -> None:
        self.folder = folder
        self.name = name
        self.nodes = [f"x{number}" for number in range(1, nodes + 1)]
        self.port = free_ports(nodes + 1)
        self.conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": SYSTEM_PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def settings(self, **changes: object) -> SlurmSettings:
        return SlurmSettings(**{"conf": str(self.conf), "partition": "batch", **changes})  # type: ignore[arg-type]

    # Begin and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns before the nodes are ready: see `wait_until_ready`."""
        for name in ("munge", "state", "spool", "log"):
            (self.folder / name).mkdir(parents=True)  # munged refuses a folder that others may write
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(random.randbytes(128))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={self.port + number} "
            "CPUs=1 RealMemory=2000 State=UNKNOWN"
            for number, node in enumerate(self.nodes, start=1)
        )
        text = CONF.format(
            name=self.name,
            host=socket.gethostname(),
            port=self.port,
            first=self.port + 50,
            last=self.port + 99,
            user=getpass.getuser(),
            folder=self.folder,
            nodes=nodes,
        )
        self.conf.write_text("\n".join(line.partition("  #")[0] for line in text.splitlines()) + "\n")
        self.restart_munged()
        self.restart_slurmctld(wait=False)
        for node in self.nodes:
            self.restart_slurmd(node)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.node_states() == ["idle"] * len(self.nodes), f"nodes of {self.name}", self.log)

    def stop(self) -> None:
        for name, daemon in self._daemons.items():
            daemon.send_signal(signal.SIGKILL if name == "munged" else signal.SIGTERM)
        end = time.monotonic() + 3.0
        for daemon in self._daemons.values():
            try:
                daemon.wait(max(0.01, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        for pid in processes_with(f"SLURM_CONF={self.conf}"):  # jobs and their shepherds outlive slurmd
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # What goes on -------------------------------------------------------------------------------------------

    def call(self, *argv: str) -> str:
        return subprocess.run(argv, env=self.env, check=True, capture_output=True, text=True, timeout=600).stdout

    def node_states(self) -> list[str]:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T", "--partition=batch"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return answer.stdout.split() if answer.returncode == 0 else []

    def load(self, jobs: int, seconds: float) -> list[str]:
        """Jobs of others, so that ours really wait; their ids."""
        script, minutes = f"sleep {seconds}", math.ceil(seconds / 60.0)
        return [
            self.call(
                "sbatch", "--parsable", "--output=/dev/null", f"--time={minutes}", "--job-name=load", "--wrap", script
            ).strip()
            for _ in range(jobs)
        ]

    def waiting(self) -> list[str]:
        """Jobs that have not started, by number."""
        return self.call("squeue", "--noheader", "--states=PENDING", "--format=%i").split()

    def clear(self) -> None:
        """End every job and wait for the nodes to be free."""
        self.call("scancel", f"--user={getpass.getuser()}")
        self.wait_until_ready()

    def log(self) -> str:
        return "\n".join(
            f"{path.name}: ...{path.read_text(errors='replace')[-1500:]}"
            for path in sorted((self.folder / "log").iterdir())
        )

    # Faults -------------------------------------------------------------------------------------------------

    def kill_munged(self) -> None:
        self._kill("munged")

    def restart_munged(self) -> None:
        folder = self.folder / "munge"
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        (folder / "socket").unlink(missing_ok=True)
        self._spawn("munged", "munged", "-F", "-f", *options)
        wait_for(lambda: (folder / "socket").exists(), "munged", (folder / "log").read_text)

    def kill_slurmctld(self) -> None:
        """With kill -9: what it was told in the last seconds may be forgotten."""
        self._kill("slurmctld")

    def stop_slurmctld(self) -> None:
        """As an operator does: its state is saved."""
        self._daemons["slurmctld"].terminate()
        self._daemons.pop("slurmctld").wait()

    def restart_slurmctld(self, wait: bool = True) -> None:
        self._spawn("slurmctld", "slurmctld", "-D", *([] if wait else ["-i"]))
        if wait:
            wait_for(lambda: bool(self.node_states()), f"slurmctld of {self.name}", self.log)

    def kill_slurmd(self, node: str) -> None:
        self._kill(f"slurmd {node}")

    def restart_slurmd(self, node: str) -> None:
        self._spawn(f"slurmd {node}", "slurmd", "-D", "-N", node)

    def _spawn(self, name: str, *argv: str) -> None:
        self._kill(name)
        with open(self.folder / "log" / f"{name.replace(' ', '-')}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                argv,
                executable=shutil.which(argv[0], path=SYSTEM_PATH),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # an interrupt at the terminal is for the tests, which then stop us
                preexec_fn=die_with_parent,
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()


@contextmanager
def clusters(number: int, nodes: int = 2) -> Iterator[list[Cluster]]:
    """So many clusters side by side, ready; ended at the end, whatever happened."""
    require_slurm()
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="fq", dir="/tmp"))  # short: a socket's path has 108 bytes at most
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)  # munged wants its socket to be reachable by all
        started = []
        for index in range(number):
            cluster = Cluster(root / f"c{index}", f"c{index}", nodes)
            stack.callback(cluster.stop)
            cluster.start()
            started.append(cluster)
        for cluster in started:
            cluster.wait_until_ready()
        yield started


def require_slurm() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        say_missing(
            f"no {', '.join(missing)}: install slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge", "SLURM"
        )


def say_missing(reason: str, what: str) -> None:
    if os.environ.get("CI") or os.environ.get(f"FEDQUEUE_REQUIRE_{what}") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def free_ports(number: int) -> int:
    """The first of a hundred ports of our own, below those the system gives out."""
    for _ in range(200):
        base = random.randrange(10_000, 32_000, 100)
        if all(_is_free(port) for port in range(base, base + number)):
            return base
    raise AssertionError("no free ports from 10000 to 32000")


def processes_with(variable: str) -> Sequence[int]:
    """Our processes that have this in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
