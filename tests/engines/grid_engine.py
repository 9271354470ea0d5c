"""A private Grid Engine with this machine as its only host, without files in /etc.

It needs root and the Debian packages gridengine-master, gridengine-exec and
gridengine-client.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

_PROGRAMS = ("sge_qmaster", "sge_execd", "qconf", "qsub", "qrsh")
_LIBRARY, _SHARE = Path("/usr/lib/gridengine"), Path("/usr/share/gridengine")
_HOST = """hostname {host}
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""
_PE = """pe_name ring
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $round_robin
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


def missing() -> str:
    """Names the missing programs of Grid Engine, or returns "" if none is missing."""
    absent = [name for name in _PROGRAMS if _path(name) is None]
    if absent or not (_LIBRARY / "spoolinit").exists():
        packages = "gridengine-master gridengine-exec gridengine-client"
        return f"{', '.join(absent) or 'spoolinit'}: install {packages}"
    return "" if os.geteuid() == 0 else "sge_execd needs root"


def _path(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class GridEngine:
    """The daemons of Grid Engine. Client programs need the variables `env`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.env = {
            **os.environ,
            "SGE_ROOT": str(folder),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "36444",
            "SGE_EXECD_PORT": "36445",
            "SGE_ND": "1",  # daemons stay in the foreground
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }

    def start(self) -> None:
        self._create_cell()
        self._daemon("sge_qmaster")
        self._retry("qconf", "-ah", self.host)
        self.ask("qconf", "-as", self.host)
        self._configure("-Ae", _HOST.format(host=self.host))
        self._daemon("sge_execd")
        self._configure("-Ap", _PE)
        template = self.ask("qconf", "-sq").replace("template", "all.q")
        values = {"hostlist": self.host, "pe_list": "ring", "slots": "8"}
        values |= {"load_thresholds": "NONE", "shell": "/bin/sh"}
        lines = (line.split(None, 1) for line in template.splitlines())
        self._configure("-Aq", "\n".join(f"{k} {values.get(k, v)}" for k, v in lines))

    def _create_cell(self) -> None:
        """Creates the cell, its spool and its configuration."""
        folder, common = self.folder, self.folder / "default" / "common"
        for path in (common, *(folder / n for n in ("db", "qmaster", "execd"))):
            path.mkdir(parents=True)
        for name in ("bin", "lib", "util", "utilbin"):
            (folder / name).symlink_to(f"/var/lib/gridengine/{name}")
        bootstrap = (_SHARE / "default-bootstrap").read_text()
        places = {"/var/spool/gridengine/spooldb": "db", "/var/spool/gridengine": ""}
        for old, new in places.items():
            bootstrap = bootstrap.replace(old, str(folder / new))
        (common / "bootstrap").write_text(bootstrap.replace("sgeadmin", "none"))
        (common / "act_qmaster").write_text(f"{self.host}\n")
        addresses = Path("/etc/hosts").read_text().splitlines()
        loopback = [line.split()[1:] for line in addresses if line.startswith("127.")]
        names = dict.fromkeys([self.host, *(name for row in loopback for name in row)])
        (common / "host_aliases").write_text(" ".join(names) + "\n")
        settings = (_SHARE / "default-configuration").read_text()
        settings = settings.replace("/var/spool/gridengine", str(folder))
        settings = re.sub(r"(min_[ug]id) .*", r"\1 0", settings)
        (folder / "configuration").write_text(settings)
        self._tool("spoolinit", "berkeleydb", "libspoolb", str(folder / "db"), "init")
        self._tool("spooldefaults", "configuration", str(folder / "configuration"))
        resources = _SHARE / "util" / "resources"
        self._tool("spooldefaults", "complexes", str(resources / "centry"))
        self._tool("spooldefaults", "usersets", str(resources / "usersets"))
        self._tool("spooldefaults", "managers", "root")

    def _tool(self, name: str, *words: str) -> None:
        self.ask(str(_LIBRARY / name), *words)

    def _daemon(self, name: str) -> None:
        path = _path(name)
        assert path is not None
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes.append(
                subprocess.Popen(
                    [path],
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def _configure(self, option: str, text: str) -> None:
        file = self.folder / f"config{option}"
        file.write_text(text + "\n")
        self._retry("qconf", option, str(file))

    def _retry(self, *words: str) -> None:
        """Repeats a command until the master, which may be starting, accepts it."""
        deadline = time.monotonic() + 20
        while True:
            try:
                self.ask(*words)
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def run(self, script: str, slots: int, seconds: float = 60) -> str:
        """Runs a job in the parallel environment; returns its output."""
        file, out = self.folder / "job.sh", self.folder / "job.out"
        file.write_text(f"#!/bin/sh\n{script}\necho ended with $?\n")
        out.unlink(missing_ok=True)
        files = ["-terse", "-V", "-cwd", "-j", "y", "-o", str(out)]
        self.ask("qsub", *files, "-pe", "ring", str(slots), str(file))
        deadline = time.monotonic() + seconds
        while not (out.exists() and "\nended with " in (text := out.read_text())):
            assert time.monotonic() < deadline, self.ask("qstat", "-f")
            time.sleep(0.1)
        return text

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
