"""Who runs the ranks of an estimator: Spark, or what a program puts in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.spark import jobs


class Backend(ABC):
    """Runs a function in ranks; a program's own has these two methods."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` in every rank; the results by rank."""

    @abstractmethod
    def num_processes(self) -> int:
        """How many ranks there will be."""


class SparkBackend(Backend):
    """Runs it by `ringjax.spark.run`.

    Args:
        num_proc: how many ranks; None: as many as tasks can run at once.
        env: variables for the ranks.
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
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` in every rank; the results by rank.

        Raises:
            LaunchError: a rank failed.
        """
        both = {**self._env, **(env or {})}
        return jobs.run(fn, args, kwargs, self._num_proc, env=both, **self._options)

    def num_processes(self) -> int:
        """How many ranks there will be."""
        return self._num_proc
