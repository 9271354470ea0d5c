"""`Distributor`: runs a function or a program on Spark, like `TorchDistributor`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.run import environ, task
from ringjax.run import run as run_locally
from ringjax.run.engine_job import EngineJob
from ringjax.spark.jobs import FUNCTION, active_session, launch


class Distributor:
    """Runs a function or a program as the ranks of a job on Spark.

    Args:
        num_processes: the number of ranks.
        local_mode: whether the ranks run in the driver, without tasks of Spark.
        use_gpu: whether each rank sees the GPUs that Spark has assigned to its task.
        min_processes: makes the job elastic. The job continues while this many ranks
            are left, and the rank of a task that Spark repeats joins the job.
        env: environment variables for the ranks.

    Raises:
        ValueError: a number is wrong.

    Example:
        >>> distributor = Distributor(num_processes=4)
        >>> distributor.run(train, 1e-3, epochs=3)  # doctest: +SKIP
        >>> distributor.run("train.py", "--epochs", "3")  # doctest: +SKIP
    """

    def __init__(
        self,
        num_processes: int = 1,
        *,
        local_mode: bool = False,
        use_gpu: bool = True,
        min_processes: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        min_size = num_processes if min_processes is None else min_processes
        if not 1 <= min_size <= num_processes:
            raise ValueError(
                f"num_processes={num_processes}, min_processes={min_processes}: "
                "expected 1 <= min_processes <= num_processes"
            )
        self.num_processes, self.min_processes = num_processes, min_processes
        self.local_mode, self.use_gpu = local_mode, use_gpu
        self._env = dict(env or {})

    def run(self, train: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Runs `train(*args, **kwargs)`, or the program `train` with arguments.

        Returns:
            The result of the function on rank 0; None for a program.

        Raises:
            LaunchError: a rank failed, with its error.
            ValueError: keyword arguments were given for a program.
        """
        if isinstance(train, str):
            if kwargs:
                raise ValueError(f"{train}: a program takes no keyword arguments")
            argv = [sys.executable, train, *map(str, args)]
            payload = None
        else:
            argv = [sys.executable, *FUNCTION]
            payload = task.encode(train, args, kwargs)
        if self.local_mode:
            return self._run_locally(train, args, kwargs)
        spark = active_session()
        env = {**environ.rank_defaults(), **self._env}
        with EngineJob(self.num_processes, min_size=self.min_processes, env=env) as job:
            return launch(spark, job, argv, payload, use_gpu=self.use_gpu)[0]

    def _run_locally(
        self,
        train: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if isinstance(train, str):
            program, argv = train, [train, *map(str, args)]

            def fn() -> None:
                sys.argv = argv
                runpy.run_path(program, run_name="__main__")

            args = ()
        else:
            fn = train
        return run_locally(
            fn,
            args,
            kwargs,
            np=self.num_processes,
            min_np=self.min_processes,
            env={**environ.inherited(), **self._env},
        )[0]


class HorovodRunner:
    """A `Distributor` with the interface of Databricks' HorovodRunner.

    Args:
        np: the number of ranks; if it is negative, the driver runs them.
        driver_log_verbosity: without effect; the executors' logs have the output.
    """

    def __init__(
        self, np: int, driver_log_verbosity: str = "log_callback_only"
    ) -> None:
        self._distributor = Distributor(abs(np), local_mode=np < 0)

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Calls `main(**kwargs)` on all ranks; returns the result of rank 0."""
        return self._distributor.run(main, **kwargs)
