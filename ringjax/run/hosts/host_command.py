"""What is ordered from the hosts of a job: the ranks, and the agent that starts them.

A record and command lines; who orders is fleet.py, the other end agent.py.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ringjax.run import environ
from ringjax.run.hosts.slots import Slot


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to run and where.

    Attributes:
        handed_on: variables of `env` that other hosts get whatever they are about.
        stdin: rank 0 reads what ringrun's own standard input has.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    start_timeout: float
    tls: str = "auto"
    slots: Sequence[Slot] = ()
    payload: bytes | None = None
    interfaces: Sequence[str] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    verbose: bool = False
    handed_on: Set[str] = frozenset()
    stdin: bool = False


def agent_command() -> list[str]:
    """The agent's command. -P: no file of the user's directory may shadow a module."""
    return [sys.executable, "-P", "-m", "ringjax.run.hosts.agent"]


def ssh_command(host: str, spec: Spec) -> list[str]:
    """The agent's command on another host; all else goes over its standard input."""
    options = {
        "BatchMode": "yes",  # there is nobody to answer a question
        "StrictHostKeyChecking": "accept-new",
        "ConnectTimeout": str(max(1, round(spec.start_timeout))),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    command = ["ssh", *(f"-o{key}={value}" for key, value in options.items())]
    if spec.ssh_port is not None:
        command += ["-p", str(spec.ssh_port)]
    if spec.ssh_identity_file is not None:
        command += ["-i", spec.ssh_identity_file]
    program = ["env", f"PYTHONPATH={environ.agent_path()}", *agent_command()]
    return [*command, host, "exec " + shlex.join(program)]
