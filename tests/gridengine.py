"""A real Grid Engine for tests: its own cell in a folder, its own ports, all daemons children of this process.

Needs the Debian packages gridengine-master, gridengine-exec and gridengine-client; root or not. Its daemons refuse a
host name that resolves to 127.x because the reverse look-up gives `localhost`, another name: the cell's `host_aliases`
says that both are the same host, and then they take it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedqueue.agent.schedulers.base import SgeSettings
from tests.slurm import die_with_parent, free_ports, processes_with, say_missing
from tests.waiting import LONGEST, wait_for

PROGRAMS = Path("/usr/lib/gridengine")  # what /usr/bin has are wrappers, which look for a cell elsewhere
SHARE = Path("/usr/share/gridengine")
BOOTSTRAP = """\
admin_user {admin}
default_domain none
ignore_fqdn false
spooling_method classic
spooling_lib libspoolc
spooling_params {root}/default/common;{root}/qmaster
binary_path {root}/bin
qmaster_spool_dir {root}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""


class GridEngine:
    """One host of so many slots in the queue all.q."""

    def __init__(self, root: Path, slots: int = 2) -> None:
        self.root = root
        self.slots = slots
        self.host = socket.gethostname()
        self.port = free_ports(2)
        self.variables = {
            "SGE_ROOT": str(root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": str(self.port),
            "SGE_EXECD_PORT": str(self.port + 1),
            "LD_LIBRARY_PATH": str(PROGRAMS),
        }
        self.env = {**os.environ, **self.variables, "SGE_ND": "true"}  # daemons stay in the foreground
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def settings(self, **changes: object) -> SgeSettings:
        given = {
            "bin": str(PROGRAMS),
            "environment": self.variables,
            "queue": "all.q",
            "min_wall_seconds": 1.0,
            **changes,
        }
        return SgeSettings(**given)  # type: ignore[arg-type]

    def call(self, name: str, *arguments: str) -> str:
        argv = [str(PROGRAMS / name), *arguments]
        return subprocess.run(argv, env=self.env, check=True, capture_output=True, text=True, timeout=600).stdout

    def start(self) -> None:
        self._make_cell()
        self._spawn("sge_qmaster")
        wait_for(self._answers, "sge_qmaster", self.log)
        self.call("qconf", "-as", self.host)
        self._change("-ssconf", "-Msconf", schedule_interval="0:0:1", flush_submit_sec="1", flush_finish_sec="1")
        self._change(
            "-sq",
            "-Aq",
            qname="all.q",
            hostlist=self.host,
            slots=str(self.slots),
            pe_list="NONE",
            rerun="TRUE",
            shell_start_mode="unix_behavior",  # else bash is a login shell, and runs what the user's profile says
            seq_no="0",
            priority="0",
            load_thresholds="NONE",  # else a busy machine runs nothing
        )
        self._spawn("sge_execd")
        wait_for(lambda: " lx-" in self.call("qstat", "-f"), "sge_execd", self.log)

    def stop(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        for pid in processes_with(f"SGE_ROOT={self.root}"):  # shepherds and jobs
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze_qmaster(self) -> None:
        """It does not answer; killed and started anew, it would not hear of its nodes for half a minute."""
        self._daemons["sge_qmaster"].send_signal(signal.SIGSTOP)

    def thaw_qmaster(self) -> None:
        self._daemons["sge_qmaster"].send_signal(signal.SIGCONT)

    def clear(self) -> None:
        """End every job and wait until none is left."""
        user = getpass.getuser()

        def empty() -> bool:  # a host that does not have the job yet may miss that it is deleted: again
            subprocess.run([PROGRAMS / "qdel", "-u", user], env=self.env, capture_output=True, timeout=LONGEST)
            return not self.call("qstat", "-u", user)

        wait_for(empty, "an empty queue", self.log)

    def log(self) -> str:
        paths = [*self.root.glob("*.out"), *self.root.glob("*/messages")]
        return "\n".join(f"{path.name}: ...{path.read_text(errors='replace')[-1500:]}" for path in paths)

    # Inside ---------------------------------------------------------------------------------------------------

    def _make_cell(self) -> None:
        common = self.root / "default" / "common"
        for folder in (common, self.root / "qmaster", self.root / "execd"):
            folder.mkdir(parents=True)
        (self.root / "util").symlink_to(SHARE / "util")
        for name in ("bin", "lib", "utilbin"):
            (self.root / name).mkdir()
            (self.root / name / self._arch()).symlink_to(PROGRAMS)
        admin = "none" if os.getuid() == 0 else getpass.getuser()  # whom the qmaster takes for one of its daemons
        (common / "bootstrap").write_text(BOOTSTRAP.format(root=self.root, admin=admin))
        (common / "act_qmaster").write_text(f"{self.host}\n")
        (common / "cluster_name").write_text("tests\n")
        (common / "host_aliases").write_text(f"{self.host} localhost\n")
        changes = {
            "execd_spool_dir": str(self.root / "execd"),
            "mailer": "/bin/true",
            "min_uid": "0",
            "min_gid": "0",
            "load_report_time": "00:00:01",
            "reporting_params": "accounting=true reporting=false accounting_flush_time=00:00:00 joblog=false",
        }
        conf = self.root / "configuration"
        conf.write_text(changed((SHARE / "default-configuration").read_text(), changes))
        self.call("spoolinit", "classic", "libspoolc", f"{common};{self.root / 'qmaster'}", "init")
        self.call("spooldefaults", "configuration", str(conf))
        self.call("spooldefaults", "complexes", str(SHARE / "util" / "resources" / "centry"))
        self.call("spooldefaults", "usersets", str(SHARE / "util" / "resources" / "usersets"))
        self.call("spooldefaults", "managers", getpass.getuser())

    def _arch(self) -> str:
        return subprocess.run([SHARE / "util" / "arch"], check=True, capture_output=True, text=True).stdout.strip()

    def _change(self, show: str, change: str, **values: str) -> None:
        path = self.root / f"given{change}"
        path.write_text(changed(self.call("qconf", show), values))
        self.call("qconf", change, str(path))

    def _answers(self) -> bool:
        return (
            subprocess.run([PROGRAMS / "qconf", "-sh"], env=self.env, capture_output=True, timeout=600).returncode == 0
        )

    def _spawn(self, name: str) -> None:
        with open(self.root / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [PROGRAMS / name],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )


@contextmanager
def grid_engine(slots: int = 2) -> Iterator[GridEngine]:
    """A Grid Engine, ready; ended at the end, whatever happened."""
    if not all((PROGRAMS / name).exists() for name in ("sge_qmaster", "sge_execd", "qsub")):
        say_missing("no Grid Engine: install gridengine-master gridengine-exec gridengine-client", "SGE")
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="fqge", dir="/tmp"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)
        engine = GridEngine(root, slots)
        stack.callback(engine.stop)
        engine.start()
        yield engine


def changed(text: str, values: dict[str, str]) -> str:
    """Lines of `key value` with other values."""
    for key, value in values.items():
        text = re.sub(rf"^{key}\s.*$", f"{key} {value}", text, flags=re.MULTILINE)
    return text
