"""Starts jobs: `ringrun` on the command line, `ringjax.run(fn, np=4)` in Python.

The package itself can be called, so `ringjax.run(...)` means the function even after a
module of the package was imported. horovod_arguments.py accepts the arguments that only
Horovod's function has. The package does not import jax. job.py runs a job.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    np: int | None = None,
    *,
    num_proc: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    spares: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    slots: int | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    network_interfaces: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    executable: str | None = None,
    same_bits: bool = False,
    verbose: bool = False,
) -> list[T]:
    """Runs a function as the ranks of one job, and returns the result of each rank.

    The function is sent by cloudpickle, so it may be a closure or a lambda. After a
    training, the last line on standard error is the goodput, as with ringrun.

    Args:
        fn: called in every rank as `fn(*args, **kwargs)`.
        args, kwargs: the arguments of `fn`, equal for all ranks.
        np: number of ranks; by default one, or all slots of `hosts` or `hostfile`.
        num_proc: another name of `np`, as in Horovod.
        min_np: with `min_np` or a script the job is elastic: ranks may be lost and are
            replaced, while at least `min_np` ranks are left. The function should use
            `ringjax.elastic.run`.
        max_np: the most ranks of an elastic job.
        spares: number of further processes of an elastic job that are ready and sleep
            until a rank is lost.
        hosts: hosts and their slots, as `host1:2,host2:2`; by default this machine.
        hostfile: a file with the hosts.
        host_discovery_script: a command that prints the hosts of an elastic job. It
            runs every second.
        slots: number of ranks on a host that the script prints without a number.
        elastic_timeout: seconds to wait for ranks if fewer than `min_np` are left.
        reset_limit: how often the ranks may change.
        cooldown_range: least and most seconds until a host on which a rank has failed
            is used again.
        start_timeout: seconds for all ranks to call `ringjax.init()`.
        env: the environment of the ranks; by default the environment of this process.
        network_interfaces: interfaces that ranks may use between hosts: `eth0,eth1`.
        ssh_port, ssh_identity_file: port and private key for ssh to other hosts.
        output_filename: a directory for a copy of the output of every rank.
        executable: the Python of the ranks; by default this one.
        same_bits: whether XLA gets one thread in each rank, and on GPUs deterministic
            kernels, as `ringjax.pieces` needs for equal results on every host.
        verbose: whether to show which process starts on which host.

    Returns:
        The results in the order of the ranks. In an elastic job only ranks at the end
        have results.

    Raises:
        LaunchError: a rank failed; the error names the rank and contains its traceback.
        ValueError: an argument is not valid.

    Example:
        >>> import ringjax
        >>> ringjax.run(lambda x: x + 1, (1,), np=2)  # doctest: +SKIP
        [2, 2]
    """
    from ringjax.config import Config
    from ringjax.errors import LaunchError
    from ringjax.run import environ, task
    from ringjax.run.console import Console
    from ringjax.run.elastic.elastic_settings import SizeOptions
    from ringjax.run.hosts import allocations
    from ringjax.run.hosts.job_spec import JobSpec
    from ringjax.run.job_setup import make_job

    size = only_one(np=np, num_proc=num_proc)
    if size is None and hosts is hostfile is host_discovery_script is None:
        size = 1
    base = environ.inherited() if env is None else env
    given = {
        "RINGJAX_START_TIMEOUT": _seconds(start_timeout),
        "RINGJAX_ELASTIC_TIMEOUT": _seconds(elastic_timeout),
        "RINGJAX_NETWORK_INTERFACES": network_interfaces,
        "RINGJAX_SAME_BITS": "1" if same_bits else None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    config = Config.from_env({**base, **changes})
    python = executable or sys.executable
    path = environ.task_path(base, same_python=python == sys.executable)
    spec = JobSpec(
        command=[python, "-m", "ringjax.run.task"],
        env=environ.for_ranks(base, {**changes, "PYTHONPATH": path}),
        config=config,
        payload=task.encode(fn, args, kwargs or {}),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        verbose=verbose,
        allocation=allocations.find_readable(base),
    )
    options = SizeOptions(
        np=size,
        hosts=hosts,
        hostfile=hostfile,
        script=host_discovery_script,
        min_np=min_np,
        max_np=max_np,
        spares=spares,
        slots=slots,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
    )
    make_console = functools.partial(Console, directory=output_filename, python=True)
    job = make_job(spec, options, make_console)
    outcome = job.run()
    if job.goodput:
        job.console.note(job.goodput)
    if outcome.exit_code:
        text = task.error_text(outcome.results.get(outcome.rank, b""))
        message = outcome.reason + (f"\n\n{text}" if text else "")
        raise LaunchError(message, outcome.rank, outcome.exit_code)
    return [_result(blob, rank) for rank, blob in outcome.results.items()]


def only_one(**values: int | None) -> int | None:
    """Returns the one value of an argument that has two names.

    Raises:
        ValueError: the user has given two values.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        words = " and ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"{words}: give only one of them")
    return next(iter(given.values()), None)


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _result(blob: bytes, rank: int) -> Any:
    from ringjax.errors import LaunchError
    from ringjax.run import task

    try:
        return task.decode(blob)
    except Exception as error:
        raise LaunchError(f"rank {rank}: no result: {error}", rank, 1) from error


class _RunModule(types.ModuleType):
    """The class of the module `ringjax.run`, which makes the module callable."""

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle recognizes modules only by their exact class. It pickles this
        # module for any function that contains `import ringjax` and an attribute `run`.
        return importlib.import_module, (self.__name__,)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        if kwargs.keys() <= inspect.signature(run).parameters.keys():
            return run(*args, **kwargs)
        # Horovod's function has more arguments, such as use_gloo.
        from ringjax.run import horovod_arguments

        return horovod_arguments.run(*args, **kwargs)


sys.modules[__name__].__class__ = _RunModule
