"""Allocations: the hosts that a batch system has assigned to this job.

Reads the variables of Slurm, LSF and Grid Engine, and makes the commands by which these
systems start an agent on a host. slots.py parses the hosts that the user names.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ringjax.control.slurm import hosts_of
from ringjax.run.hosts.slots import HostSlots, merge_hosts, parse_host

Environ = Mapping[str, str]

# Variables that restrict a Slurm step to a part of the job's share of the node. The
# step of an agent needs the whole share, because all ranks of the host run in the step.
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
    """The hosts that a batch system has assigned to this job.

    Attributes:
        hosts: the hosts, with a slot for each task that the user has requested.
        command: the command that starts the agent on the host `{host}`.
        unset: variables that the environment of this command must not contain.
    """

    hosts: tuple[HostSlots, ...]
    command: tuple[str, ...]
    unset: Set[str] = frozenset()

    def contains(self, host: str) -> bool:
        return any(host == known.name for known in self.hosts)


def find(environ: Environ) -> Allocation | None:
    """Returns the allocation in which this process runs, or None if there is none.

    Raises ValueError if a variable cannot be read; the error names the variable.

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


def find_readable(environ: Environ) -> Allocation | None:
    """Returns the allocation, or None if its variables cannot be read.

    If the job needs the hosts, call `find`, which raises the error.
    """
    try:
        return find(environ)
    except ValueError:
        return None


def _slurm(environ: Environ) -> Allocation | None:
    """Returns an allocation with a slot for each task, or each GPU without tasks."""
    nodelist = environ.get("SLURM_JOB_NODELIST")
    if not (nodelist and environ.get("SLURM_JOB_ID")):
        return None
    try:
        names = hosts_of(nodelist)
    except ValueError as error:
        raise ValueError(f"SLURM_JOB_NODELIST: {error}") from None
    counts = _slurm_tasks(environ, len(names))
    hosts = [
        parse_host(name, count, "SLURM_JOB_NODELIST")
        for name, count in zip(names, counts, strict=False)
    ]
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    _check_even(environ.get("SLURM_GPUS", ""), gpus, len(names))
    command = (
        "srun",
        "--quiet",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist={host}",
        "--overlap",  # share the CPUs that the step of the batch script holds
        "--cpu-bind=none",  # all ranks run in the agent's task, so do not bind the task
        "--mem=0",  # the step may use all memory of the job on this host
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        "--export=ALL",
        "--unbuffered",
        # ringrun, not Slurm, decides what happens after the loss of a host or a rank.
        "--no-kill",
        "--kill-on-bad-exit=0",
    )
    return Allocation(tuple(merge_hosts(hosts)), command, _SHAPE)


def _check_even(total: str, per_node: str, nodes: int) -> None:
    """Checks that all nodes have as many GPUs as Slurm reports for this node."""
    counted = total.isdecimal() and per_node.isdecimal()
    if counted and int(total) != nodes * int(per_node):
        raise ValueError(
            f"SLURM_GPUS: {total} GPUs are not the same number on each of {nodes} "
            "nodes; ask for --gpus-per-node instead of --gpus"
        )


def _slurm_tasks(environ: Environ, nodes: int) -> list[str]:
    """Returns the number of tasks on each node, as a list of strings."""
    asked = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if gpus and not asked:
        return [gpus] * nodes
    counts: list[str] = []
    for entry in environ.get("SLURM_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE: cannot read {entry!r}")
        # Keep at most one element for each node, even if the repeat count is huge.
        counts += [match[1]] * min(int(match[2] or 1), nodes)
    return counts + counts[-1:] * (nodes - len(counts))


def _lsf(environ: Environ) -> Allocation | None:
    if not environ.get("LSB_JOBID"):
        return None
    path = environ.get("LSB_DJOB_HOSTFILE")
    if path:
        lines = _read_lines(path, "LSB_DJOB_HOSTFILE")
        hosts = [parse_host(name, None, "LSB_DJOB_HOSTFILE") for name in lines]
    else:
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        if len(words) % 2:
            raise ValueError(f"LSB_MCPU_HOSTS: no number behind {words[-1]!r}")
        pairs = zip(words[::2], words[1::2], strict=True)
        hosts = [parse_host(name, slots, "LSB_MCPU_HOSTS") for name, slots in pairs]
    if not hosts:
        return None
    return Allocation(tuple(merge_hosts(hosts)), ("blaunch", "-z", "{host}"))


def _grid_engine(environ: Environ) -> Allocation | None:
    path = environ.get("PE_HOSTFILE")
    if not path or not environ.get("JOB_ID"):
        return None
    entries = [line.split() for line in _read_lines(path, "PE_HOSTFILE")]
    hosts = [
        parse_host(words[0], words[1] if len(words) > 1 else None, "PE_HOSTFILE")
        for words in entries
    ]
    return Allocation(
        tuple(merge_hosts(hosts)), ("qrsh", "-inherit", "-noshell", "{host}")
    )


def _read_lines(path: str, name: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} {path}: {error}") from error


def requeue(environ: Environ) -> str:
    """Makes Slurm queue this job again, unless somebody has canceled the job.

    Returns a sentence for the user, or "" without Slurm or if Slurm is ending the job.
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
    done = subprocess.run(
        ["scontrol", *words], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
