"""Horovod's functions `run` and `get_driver_ip`, with all of Horovod's arguments.

Arguments that choose among Horovod's launchers have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ringjax.run import only_one
from ringjax.run import run as ringjax_run
from ringjax.run.hosts.slots import ANY_HOST, reachable_addresses

__all__ = ["get_driver_ip", "run"]

T = TypeVar("T")


def get_driver_ip(nics: Sequence[str] | None = None) -> str:
    """Returns an address of this machine that other hosts can reach.

    Args:
        nics: names of the network interfaces that may be used; by default all.

    Raises:
        ValueError: an interface does not exist.

    Example:
        >>> get_driver_ip(["lo"])
        '127.0.0.1'
    """
    return reachable_addresses([ANY_HOST], ",".join(nics or ()))[0]


def run(
    func: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Runs a function as the ranks of a job, and returns the result of each rank.

    Args:
        func, args, kwargs: called in every rank as `func(*args, **kwargs)`.
        num_proc, np: number of ranks.
        hosts, hostfile: hosts of the ranks; by default this machine.
        start_timeout: seconds for all ranks to call `init`.
        ssh_port, ssh_identity_file: port and private key for ssh to other hosts.
        output_filename: a directory for a copy of the output of every rank.
        verbose: whether to show which process starts on which host.
        network_interface, network_interfaces: interfaces that ranks may use.
        executable: the Python of the ranks; by default this one.
        disable_cache, use_gloo, use_mpi, mpi_args: accepted, without effect.
        min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit, cooldown_range,
            host_discovery_script: options of elastic jobs, see `ringjax.run`.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: a rank failed.
        ValueError: an argument is not valid.

    Example:
        >>> run(lambda: 2, np=2)  # doctest: +SKIP
        [2, 2]
    """
    if network_interfaces is not None and not isinstance(network_interfaces, str):
        network_interfaces = ",".join(network_interfaces)
    return ringjax_run(
        func,
        args,
        kwargs,
        np,
        num_proc=num_proc,
        min_np=only_one(min_np=min_np, min_num_proc=min_num_proc),
        max_np=only_one(max_np=max_np, max_num_proc=max_num_proc),
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        start_timeout=start_timeout,
        network_interfaces=network_interfaces or network_interface,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        executable=executable,
        verbose=bool(verbose),
    )
