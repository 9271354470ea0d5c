"""A private Slurm with two nodes on this machine, without files in /etc.

Each node has two GPUs, which are null devices under other names. Jobs in the partition
`urgent` preempt other jobs, which are requeued.

It needs root and the Debian packages slurmd, slurmctld, slurm-client and munge.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_SETTINGS = """ClusterName=two
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=36817
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=5
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=DEFAULT CPUs=64 RealMemory=1000 Gres=gpu:2
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[36821-36822]
PartitionName=p Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=4
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""
_DEVICES = "NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n"


def missing() -> str:
    """Names the missing programs of Slurm, or returns "" if none is missing."""
    absent = [name for name in PROGRAMS if _path(name) is None]
    if absent:
        return f"{', '.join(absent)}: install slurmd slurmctld slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _path(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """The daemons of Slurm. Client programs need the variables `env`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        config = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        config.write_text(_SETTINGS.format(host=host, folder=folder))
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        (folder / "gres.conf").write_text(_DEVICES.format(folder=folder))
        for name in ("gpu0", "gpu1"):
            os.mknod(folder / name, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            "SLURM_CONF": str(config),
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = ["pid", "log", "seed"]
        options = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in files]
        sock = f"--socket={self.folder}/munge.sock"
        self._run("munged", "-F", f"--key-file={key}", sock, "--force", *options)
        deadline = time.monotonic() + 10
        while not (self.folder / "munge.sock").exists():
            assert time.monotonic() < deadline, "munged does not start"
            time.sleep(0.02)
        self._run("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.start_slurmd(node)
        self.wait_until_idle()

    def start_slurmd(self, node: str) -> None:
        """Starts or restarts the daemon of a node."""
        self._run("slurmd", "-D", "-N", node)

    def wait_until_idle(self) -> None:
        """Waits until both nodes are up and idle."""
        self.wait_for(["sinfo", "-h", "-o", "%t %D"], "idle 2")

    def _run(self, name: str, *words: str) -> None:
        path = _path(name)
        assert path is not None
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[" ".join([name, *words[1:]])] = subprocess.Popen(
                [path, *words],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def kill_slurmd(self, node: str) -> None:
        """Kills the daemon of a node and all processes that the daemon has started."""
        process = self._processes[f"slurmd -N {node}"]
        process.kill()
        process.wait()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "environ").read_bytes()
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                mine = f"SLURM_CONF={self.env['SLURM_CONF']}".encode() in words
                here = f"SLURMD_NODENAME={node}".encode() in words.split(b"\0")
                if mine and (here or b"slurmstepd" in line) and here:
                    os.kill(int(entry.name), signal.SIGKILL)

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait_for(self, words: list[str], text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while (found := self.ask(*words)) != text:
            assert time.monotonic() < deadline, f"{words}: {found!r}"
            time.sleep(0.05)

    def submit(self, script: str, *options: str) -> str:
        """Submits a batch script; returns the number of the job."""
        file = self.folder / "job.sh"
        file.write_text(f"#!/bin/sh\n{script}")
        output = f"--output={self.folder}/%j.out"
        more = ["--open-mode=append", output]
        return self.ask("sbatch", "--parsable", *more, *options, str(file))

    def output(self, job: str) -> str:
        return (self.folder / f"{job}.out").read_text()

    def wait(self, job: str, seconds: float = 60) -> str:
        """Waits for the end of a job; returns its state and exit code."""
        deadline = time.monotonic() + seconds
        while True:
            fields = dict(
                field.partition("=")[::2]
                for field in self.ask("scontrol", "-o", "show", "job", job).split()
            )
            if fields["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"):
                return f"{fields['JobState']} {fields['ExitCode']}"
            assert time.monotonic() < deadline, f"{fields}\n{self.output(job)}"
            time.sleep(0.1)

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
