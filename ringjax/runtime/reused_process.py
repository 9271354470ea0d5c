"""Runs a rank in a process that existed before the job, such as a Ray actor.

ringrun starts a process with the job's variables in the environment, and its exit code
shows whether the rank failed. For one function call in an existing process, this module
sets the variables and reports the failure instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ringjax.runtime import lifecycle

_T = TypeVar("_T")


def run_as_rank(
    ticket: Mapping[str, str],
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> _T | None:
    """Calls `fn` as a rank of a job, and leaves the job afterwards.

    Args:
        ticket: environment variables of the rank, from `EngineJob.tickets`, which are
            set during the call.
        fn: a function that calls `ringjax.init()`.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of `fn`; None if it calls `sys.exit` without an error.

    Raises:
        RuntimeError: `fn` called `sys.exit` with an error.
        Exception: the exception that `fn` raised. The other ranks receive its first
        line.
    """
    with environment(ticket):
        try:
            return call_reporting_failure(fn, args, kwargs)
        finally:
            lifecycle.shutdown()


def call_reporting_failure(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> _T | None:
    """Calls `fn` as a rank of the job that the environment variables describe.

    The rank stays in the job unless `fn` fails.
    """
    try:
        return fn(*args, **(kwargs or {}))
    except SystemExit as end:
        if not end.code:
            return None
        error = RuntimeError(f"it ended with exit code {end.code}")
        fail_job(error)
        raise error from end
    except BaseException as error:
        fail_job(error)
        raise


def fail_job(error: BaseException) -> None:
    """Leaves the job with an error. The other ranks receive the error's first line."""
    if lifecycle.is_initialized():
        text = lifecycle.first_line(type(error), error)
        lifecycle.current("shutdown").fail(text)
        lifecycle.shutdown()


def set_environment(changes: Mapping[str, str]) -> None:
    os.environ.update(changes)


def get_environment() -> dict[str, str]:
    return dict(os.environ)


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables, or removes those that are None, in a `with` block."""
    before = {name: os.environ.get(name) for name in changes}

    def update(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    update(changes)
    try:
        yield
    finally:
        update(before)
