"""One job in a process that was there before it and stays: an actor, a reused worker.

A process that ringrun starts has its variables from the beginning, and its end tells
the others. Here both last as long as a call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringjax.runtime import lifecycle


def visit(
    ticket: Mapping[str, str],
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls `fn` as a rank of the job that the ticket is for, and leaves that job.

    Args:
        ticket: variables that hold during the call.
        fn: calls `ringjax.init()` itself.
        args, kwargs: its arguments.

    Returns:
        As `stay`, and raises as it does.
    """
    with variables(ticket):
        try:
            return stay(fn, args, kwargs)
        finally:
            lifecycle.shutdown()


def stay(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls `fn` as a rank of the job that this process's variables are for.

    It leaves the job only if `fn` does so, or fails.

    Returns:
        What `fn` returns; None if it ends by `sys.exit` without an error.

    Raises:
        RuntimeError: it ended by `sys.exit` with an error.
        Exception: what `fn` raised; the other ranks have been told.
    """
    try:
        return fn(*args, **(kwargs or {}))
    except SystemExit as end:
        if not end.code:
            return None
        error = RuntimeError(f"it ended with exit code {end.code}")
        fail(error)
        raise error from end
    except BaseException as error:
        fail(error)
        raise


def fail(error: BaseException) -> None:
    """Leaves the job because of an error, which the other ranks are told."""
    if lifecycle.is_initialized():
        text = lifecycle.first_line(type(error), error)
        lifecycle.current("shutdown").fail(text)
        lifecycle.shutdown()


def set_variables(changes: Mapping[str, str]) -> None:
    """Sets variables of the environment for good."""
    os.environ.update(changes)


def all_variables() -> dict[str, str]:
    """This process's environment."""
    return dict(os.environ)


@contextlib.contextmanager
def variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
