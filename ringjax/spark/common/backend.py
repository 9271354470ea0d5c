"""The backends that run the ranks of an estimator: Spark, or a program's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringjax.spark import jobs

T = TypeVar("T")


class Backend(ABC):
    """Runs a function in ranks. A program's own backend needs both methods below."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Calls `fn(*args, **kwargs)` in every rank; returns the results by rank."""

    @abstractmethod
    def num_processes(self) -> int:
        """Returns the number of ranks."""


class SparkBackend(Backend):
    """Runs a function by `ringjax.spark.run`.

    Args:
        num_proc: the number of ranks; None means as many as tasks can run at the same
            time.
        env: environment variables for the ranks.
        options: further arguments of `ringjax.spark.run`.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._num_proc = num_proc or jobs.parallelism(jobs.active_session())
        self._env, self._options = dict(env or {}), options

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Calls `fn(*args, **kwargs)` in every rank; returns the results by rank.

        Raises:
            LaunchError: a rank failed.
        """
        both = {**self._env, **(env or {})}
        return jobs.run(fn, args, kwargs, self._num_proc, env=both, **self._options)

    def num_processes(self) -> int:
        """Returns the number of ranks."""
        return self._num_proc
