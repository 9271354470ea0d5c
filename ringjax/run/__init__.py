"""Starting jobs: `ringrun` on the command line, `ringjax.run(fn, np=4)` in Python.

The package itself can be called, so that `ringjax.run(...)` means the function whether
or not a module below was imported first. Imports no jax; see job.py for the work.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    network_interfaces: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    executable: str | None = None,
    verbose: bool = False,
) -> list[Any]:
    """Run a function as the ranks of one job and return what each rank returned.

    The function is shipped with cloudpickle, so it may be a closure or a lambda.

    Args:
        fn: called in every rank as `fn(*args, **kwargs)`.
        args, kwargs: its arguments, the same for every rank.
        np: number of ranks; one, or every slot of `hosts` or `hostfile` if those are
            given.
        num_proc: Horovod's other name of `np`.
        hosts: `host1:2,host2:2`; this machine alone by default.
        hostfile: the same from a file.
        start_timeout: seconds for all ranks to call `ringjax.init()`.
        env: the environment of the ranks instead of this process's.
        network_interfaces: interfaces that ranks may use between hosts: `eth0,eth1`.
        ssh_port, ssh_identity_file: how other hosts are reached.
        output_filename: a directory that gets a copy of every rank's output.
        executable: the Python of the ranks, this one by default.
        verbose: say what is started where.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: a rank failed; it names the rank and holds its traceback.
        ValueError: an argument cannot be used.

    Example:
        >>> import ringjax
        >>> ringjax.run(lambda x: x + 1, (1,), np=2)  # doctest: +SKIP
        [2, 2]
    """
    import cloudpickle

    from ringjax.config import Config
    from ringjax.errors import LaunchError
    from ringjax.run import cli, environ, task
    from ringjax.run.job import Job
    from ringjax.run.order import Spec
    from ringjax.run.output import Console

    if np is not None and num_proc is not None and np != num_proc:
        raise ValueError(f"np={np} and num_proc={num_proc}: give only one of them")
    size = np if np is not None else num_proc
    if size is None and hosts is None and hostfile is None:
        size = 1
    slots = cli.find_hosts(size, hosts, hostfile, {})
    base = environ.inherited() if env is None else env
    changes = {}
    if start_timeout is not None:
        changes["RINGJAX_START_TIMEOUT"] = f"{start_timeout:g}"
    if network_interfaces is not None:
        changes["RINGJAX_NETWORK_INTERFACES"] = network_interfaces
    config = Config.from_env({**base, **changes})
    interfaces = config.network_interfaces.split(",")
    spec = Spec(
        slots=slots,
        command=[executable or sys.executable, "-m", "ringjax.run.task"],
        env=environ.for_ranks(base, {**changes, "PYTHONPATH": environ.task_path(base)}),
        start_timeout=config.start_timeout,
        payload=cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))),
        interfaces=[name for name in interfaces if name],
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        verbose=verbose,
    )
    outcome = Job(
        spec, Console(len(slots), directory=output_filename, python=True)
    ).run()
    if outcome.exit_code:
        text = task.error_text(outcome.results.get(outcome.rank, b""))
        message = outcome.reason + (f"\n\n{text}" if text else "")
        raise LaunchError(message, outcome.rank, outcome.exit_code)
    return [_result(outcome.results.get(slot.rank, b""), slot.rank) for slot in slots]


def _result(blob: bytes, rank: int) -> Any:
    from ringjax.errors import LaunchError
    from ringjax.run import task

    try:
        return task.decode(blob)
    except Exception as error:
        raise LaunchError(f"rank {rank}: no result: {error}", rank, 1) from error


class _Callable(types.ModuleType):
    """A module that is called like the function of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
