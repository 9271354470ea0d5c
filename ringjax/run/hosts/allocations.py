"""Allocations: the hosts that a batch system has given us, and how agents get there.

Slurm, LSF and Grid Engine, by their variables. What asks for hosts by name is slots.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ringjax.control.slurm import hosts_of
from ringjax.run.hosts.slots import HostSlots, host_of, merged

Environ = Mapping[str, str]

# What makes a step of Slurm smaller than the job's part of the node. The agent's is one
# task, and has all of it.
_SHAPE = frozenset(
    f"SLURM_{name}"
    for name in (
        *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "TRES_PER_TASK", "EXACT"),
        *("CPUS_PER_TASK", "CPUS_PER_GPU", "MEM_PER_CPU", "MEM_PER_GPU"),
        *("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
        *("GPU_BIND", "TRES_BIND"),
    )
) | {"SRUN_CPUS_PER_TASK"}


@dataclass(frozen=True, slots=True)
class Allocation:
    """The hosts that we have been given.

    Attributes:
        hosts: with a slot for each task that was asked for.
        command: what starts the agent on one of them; `{host}` stands for its name.
        unset: variables that this command must not see.
    """

    hosts: tuple[HostSlots, ...]
    command: tuple[str, ...]
    unset: Set[str] = frozenset()

    def reaches(self, host: str) -> bool:
        """Whether the batch system starts agents on this host."""
        return any(host == known.name for known in self.hosts)


def find(environ: Environ) -> Allocation | None:
    """The allocation that we run in, if any.

    Raises:
        ValueError: naming the variable that cannot be read.

    Example:
        >>> found = find({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 4"})
        >>> found.hosts
        (HostSlots(name='a', slots=2), HostSlots(name='b', slots=4))
        >>> found.command
        ('blaunch', '-z', '{host}')
        >>> find({}) is None
        True
    """
    return _slurm(environ) or _lsf(environ) or _grid_engine(environ)


def reachable(environ: Environ) -> Allocation | None:
    """As `find`; None if it cannot be read, which who needs its hosts is told."""
    try:
        return find(environ)
    except ValueError:
        return None


def _slurm(environ: Environ) -> Allocation | None:
    """A slot for each task; for each GPU, if the job asked for no number of tasks."""
    nodelist = environ.get("SLURM_JOB_NODELIST")
    if not (nodelist and environ.get("SLURM_JOB_ID")):
        return None
    try:
        names = hosts_of(nodelist)
    except ValueError as error:
        raise ValueError(f"SLURM_JOB_NODELIST: {error}") from None
    counts = _slurm_tasks(environ, len(names))
    hosts = [
        host_of(name, count, "SLURM_JOB_NODELIST")
        for name, count in zip(names, counts, strict=False)
    ]
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    _check_even(environ.get("SLURM_GPUS", ""), gpus, len(names))
    command = (
        "srun",
        "--quiet",
        *("--nodes=1", "--ntasks=1", "--nodelist={host}"),
        "--overlap",  # the step of the batch script holds the CPUs
        "--cpu-bind=none",  # one task, but all the ranks of this host
        "--mem=0",  # all that the job has there
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        "--export=ALL",
        "--unbuffered",
        # Another host's end, or a rank's, is for ringrun to judge.
        *("--no-kill", "--kill-on-bad-exit=0"),
    )
    return Allocation(tuple(merged(hosts)), command, _SHAPE)


def _check_even(total: str, per_node: str, nodes: int) -> None:
    """Of GPUs Slurm tells the number on this node, which is to be all nodes'."""
    counted = total.isdecimal() and per_node.isdecimal()
    if counted and int(total) != nodes * int(per_node):
        raise ValueError(
            f"SLURM_GPUS: {total} GPUs are not the same number on each of {nodes} "
            "nodes; ask for --gpus-per-node instead of --gpus"
        )


def _slurm_tasks(environ: Environ, nodes: int) -> list[str]:
    """How many tasks each of the nodes has."""
    asked = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if gpus and not asked:
        return [gpus] * nodes
    counts: list[str] = []
    for entry in environ.get("SLURM_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE: cannot read {entry!r}")
        # More than there are nodes are of no use.
        counts += [match[1]] * min(int(match[2] or 1), nodes)
    return counts + counts[-1:] * (nodes - len(counts))


def _lsf(environ: Environ) -> Allocation | None:
    """A slot for each that LSF has given."""
    if not environ.get("LSB_JOBID"):
        return None
    path = environ.get("LSB_DJOB_HOSTFILE")
    if path:
        lines = _lines(path, "LSB_DJOB_HOSTFILE")
        hosts = [host_of(name, None, "LSB_DJOB_HOSTFILE") for name in lines]
    else:
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        if len(words) % 2:
            raise ValueError(f"LSB_MCPU_HOSTS: no number behind {words[-1]!r}")
        pairs = zip(words[::2], words[1::2], strict=True)
        hosts = [host_of(name, slots, "LSB_MCPU_HOSTS") for name, slots in pairs]
    if not hosts:
        return None
    return Allocation(tuple(merged(hosts)), ("blaunch", "-z", "{host}"))


def _grid_engine(environ: Environ) -> Allocation | None:
    """A slot for each that the parallel environment has given."""
    path = environ.get("PE_HOSTFILE")
    if not path or not environ.get("JOB_ID"):
        return None
    entries = [line.split() for line in _lines(path, "PE_HOSTFILE")]
    hosts = [
        host_of(words[0], words[1] if len(words) > 1 else None, "PE_HOSTFILE")
        for words in entries
    ]
    return Allocation(tuple(merged(hosts)), ("qrsh", "-inherit", "-noshell", "{host}"))


def _lines(path: str, name: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} {path}: {error}") from error


def requeue(environ: Environ) -> str:
    """Has Slurm queue the job that we run in once more, unless it is ending it.

    Returns:
        A sentence about it; empty if there is nothing to say.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    try:
        if "JobState=RUNNING" not in _scontrol("show", "job", job).split():
            return ""
        _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()
        return f"job {job} is not queued again: {why}"
    return f"job {job} is queued again"


def _scontrol(*words: str) -> str:
    """What Slurm's `scontrol` says."""
    done = subprocess.run(
        ["scontrol", *words], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
