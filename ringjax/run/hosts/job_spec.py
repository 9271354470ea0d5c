"""JobSpec: the description of a job; and the commands (ssh, srun) that start agents.

A `JobSpec` contains the command, the environment, the hosts and the ways to reach the
hosts. `client_command` makes the commands, which the agent on this machine runs.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ringjax.config import Config
from ringjax.run import environ
from ringjax.run.hosts.allocations import Allocation
from ringjax.run.hosts.slots import HostSlots, SlotInfo, reachable_addresses


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """The address on which `ringrun --listen` accepts agents of `ringrun --join`.

    Attributes:
        addresses: addresses of this machine on which to listen. port: port for agents.
        Ranks connect to the next higher port. secret, job: the secret and the id of the
        job, which agents must have, too. static_hosts: the hosts of -H, on which
        ringrun itself starts agents.
    """

    addresses: Sequence[str]
    port: int
    secret: bytes = field(repr=False)
    job: str
    static_hosts: Sequence[HostSlots] = ()


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The command, the hosts and the options of a job.

    Attributes:
        command: the command that every rank runs. env: the environment of the ranks.
        config: the settings. Agents must send a message within the start timeout.
        slots: the slots of the ranks of a static job. payload: standard input of every
        rank, if the ranks call a function. forwarded: names of variables in `env` that
        all hosts receive (-x). stdin: whether rank 0 reads the standard input of
        ringrun.
        allocation: the hosts that a batch system has given to this job.
        agent_command: a user's command that starts agents on other hosts. listening:
        the address for agents of `ringrun --join`, or None without --listen.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    config: Config
    slots: Sequence[SlotInfo] = ()
    payload: bytes | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    verbose: bool = False
    forwarded: Set[str] = frozenset()
    stdin: bool = False
    allocation: Allocation | None = None
    agent_command: str = ""
    listening: ListenOptions | None = None

    def rendezvous_options(
        self, remote: Sequence[str]
    ) -> tuple[bytes, Sequence[str], int]:
        """Returns the job's secret, and the coordinator's addresses and port.

        The port is 0 if any port can be used. `remote` has the hosts of ranks except
        this machine.
        """
        if (listening := self.listening) is None:
            where = reachable_addresses(remote, self.config.network_interfaces)
            return secrets.token_bytes(32), where, 0
        return listening.secret, listening.addresses, listening.port + 1


def agent_command() -> list[str]:
    # Use -P, so that no file in the user's directory can shadow a module of Python or
    # ringjax.
    return [sys.executable, "-P", "-m", "ringjax.run.hosts.agent"]


def is_by_engine(host: str, spec: JobSpec) -> bool:
    """Returns whether an engine starts the agent on a host. Otherwise ssh does.

    Ranks keep the variables that the engine has set, such as the visible GPUs.
    """
    allocation = spec.allocation
    in_allocation = allocation is not None and allocation.contains(host)
    return bool(spec.agent_command) or in_allocation


def client_command(
    host: str, spec: JobSpec, *, relayed: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Returns the command (ssh, srun) that starts the agent on a host.

    Also returns the environment of this command. If the command is for a relay, ssh
    gives up early enough for another attempt from this machine.
    """
    env = environ.inherited()
    program = ["env", f"PYTHONPATH={environ.agent_path()}", *agent_command()]
    if spec.agent_command:
        return _fill_template(spec.agent_command, host, program), env
    found = spec.allocation
    if found is not None and found.contains(host):
        words = [word.replace("{host}", host) for word in found.command]
        env = {name: env[name] for name in env.keys() - found.unset}
        return [*words, *program], env
    limit = spec.config.start_timeout / (4 if relayed else 1)
    return [*_ssh(spec, limit), host, "exec " + shlex.join(program)], env


def _fill_template(template: str, host: str, program: Sequence[str]) -> list[str]:
    """Replaces {host} and {agent}. Appends the agent's command if {agent} is missing.

    Example:
        >>> _fill_template("kubectl exec -i {host} --", "pod-1", ["env", "python"])
        ['kubectl', 'exec', '-i', 'pod-1', '--', 'env', 'python']
        >>> _fill_template("rsh {host} 'exec {agent}'", "a", ["python", "-m", "x y"])
        ['rsh', 'a', "exec python -m 'x y'"]
    """
    words = [word.replace("{host}", host) for word in shlex.split(template)]
    if "{agent}" not in template:
        return [*words, *program]
    return [word.replace("{agent}", shlex.join(program)) for word in words]


def check_agent_command(template: str) -> str:
    """Returns the template of --agent-command unchanged if it is valid.

    Raises ValueError if the template is not a command, or does not contain {host}.
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


def _ssh(spec: JobSpec, connect_timeout: float) -> list[str]:
    options = {
        # ssh must not ask questions, because it has no terminal here.
        "BatchMode": "yes",
        "StrictHostKeyChecking": "accept-new",
        "ConnectTimeout": str(max(1, round(connect_timeout))),
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
