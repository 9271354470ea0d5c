"""What is ordered from the hosts of a job: the ranks, and the agent that starts them.

A record and command lines; who orders is agent_pool.py, the other end agent.py.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringjax.run import environ
from ringjax.run.hosts.allocations import Allocation
from ringjax.run.hosts.slots import HostSlots, SlotInfo, own_addresses
from ringjax.run.monitor.wanted import NOTHING, MonitorOptions


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where ringrun waits for agents that come by themselves, and for ranks.

    Attributes:
        addresses: of this machine.
        port: for agents; ranks call the next one.
        secret, job: the job's, which the agents know.
        own: hosts of the job that need not come.
        patience: seconds to wait for hosts.
        silence: seconds without an answer until a host counts as lost.
    """

    addresses: Sequence[str]
    port: int
    secret: bytes = field(repr=False)
    job: str
    own: Sequence[HostSlots] = ()
    patience: float = 600.0
    silence: float = 5.0


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run and where.

    Attributes:
        handed_on: variables of `env` that other hosts get whatever they are about.
        stdin: rank 0 reads what ringrun's own standard input has.
        allocation: of the batch system that we run in.
        agent_command: what starts agents on other hosts, whatever else could.
        listening: agents come by themselves.
        wanted: what somebody wants to know of the ranks while they run.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    start_timeout: float
    tls: str = "auto"
    slots: Sequence[SlotInfo] = ()
    payload: bytes | None = None
    interfaces: Sequence[str] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    verbose: bool = False
    handed_on: Set[str] = frozenset()
    stdin: bool = False
    allocation: Allocation | None = None
    agent_command: str = ""
    listening: ListenOptions | None = None
    wanted: MonitorOptions = NOTHING

    def rendezvous(self, remote: Sequence[str]) -> tuple[bytes, Mapping[str, Any]]:
        """The job's secret, and where a server listens for ranks on `remote` hosts."""
        if (listening := self.listening) is None:
            where = own_addresses(remote, self.interfaces)
            return secrets.token_bytes(32), {"hosts": where}
        port = listening.port + 1
        return listening.secret, {"hosts": listening.addresses, "port": port}


def agent_command() -> list[str]:
    """The agent's command. -P: no file of the user's directory may shadow a module."""
    return [sys.executable, "-P", "-m", "ringjax.run.hosts.agent"]


class ClientCommand(NamedTuple):
    """The command that starts the agent on another host; all else goes over its pipes.

    Attributes:
        env: its environment.
        by_engine: an engine starts the agent, and has set on that host what its
            processes are to have: which GPUs, for example.
    """

    argv: list[str]
    env: dict[str, str]
    by_engine: bool


def client_command(host: str, spec: JobSpec) -> ClientCommand:
    """How the agent on a host is started: by a batch system, another engine, or ssh."""
    env = environ.inherited()
    program = ["env", f"PYTHONPATH={environ.agent_path()}", *agent_command()]
    if spec.agent_command:
        return ClientCommand(_filled(spec.agent_command, host, program), env, True)
    found = spec.allocation
    if found is not None and found.reaches(host):
        words = [word.replace("{host}", host) for word in found.command]
        env = {name: env[name] for name in env.keys() - found.unset}
        return ClientCommand([*words, *program], env, True)
    argv = [*_ssh(host, spec), host, "exec " + shlex.join(program)]
    return ClientCommand(argv, env, False)


def _filled(template: str, host: str, program: Sequence[str]) -> list[str]:
    """Puts host and agent into a command; without a place for it, the agent follows.

    Example:
        >>> _filled("kubectl exec -i {host} --", "pod-1", ["env", "python"])
        ['kubectl', 'exec', '-i', 'pod-1', '--', 'env', 'python']
        >>> _filled("rsh {host} 'exec {agent}'", "a", ["python", "-m", "x y"])
        ['rsh', 'a', "exec python -m 'x y'"]
    """
    words = [word.replace("{host}", host) for word in shlex.split(template)]
    if "{agent}" not in template:
        return [*words, *program]
    return [word.replace("{agent}", shlex.join(program)) for word in words]


def check_agent_command(template: str) -> str:
    """The template of `client_command`, as it stands.

    Raises:
        ValueError: it is no command, or has no place for the host.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ValueError(f"--agent-command {template!r}: {error}") from None
    if not words or "{host}" not in template:
        raise ValueError(
            f"--agent-command {template!r}: expected a command with {{host}} in it, "
            "such as 'kubectl exec -i {host} --'"
        )
    return template


def _ssh(host: str, spec: JobSpec) -> list[str]:
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
    return command
