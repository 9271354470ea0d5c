"""`ringjax.spark.run` and `run_elastic`, which run a function as a job on Spark."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from ringjax.errors import LaunchError
from ringjax.run import environ, task
from ringjax.run.engine_job import EngineJob
from ringjax.spark.task import SCHEMA, RankTask

T = TypeVar("T")
log = logging.getLogger("ringjax.spark")
FUNCTION = ("-m", "ringjax.run.task")  # the program that runs a function as a rank
_POLL_INTERVAL = 0.1  # seconds between two polls of the coordinator
_STOP_TIMEOUT = 2.0  # seconds to wait for tasks that were stopped
_START_TIMEOUT = 600.0  # seconds until Spark must have started all tasks
_job_numbers = itertools.count()


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Runs a function as the ranks of one job, in the tasks of a barrier stage.

    Args:
        fn: called in every rank as `fn(*args, **kwargs)`.
        args, kwargs: the arguments of `fn`, the same for every rank.
        num_proc: the number of ranks; None means as many as tasks can run at the same
            time.
        start_timeout: seconds for Spark to start all tasks (600).
        env: environment variables for the ranks.
        stdout, stderr: receive the output of the ranks after the ranks have ended. The
            logs of the executors receive the output immediately.
        nics: network interfaces that the ranks may use.
        executable: the Python of the ranks; None means the Python of the tasks.
        use_mpi, use_gloo, extra_mpi_args, verbose, prefix_output_with_timestamp:
            arguments of Horovod without effect.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: a rank failed; the text names the rank, the host and the error.
        RuntimeError: there is no Spark session.

    Example:
        >>> import ringjax.spark
        >>> ringjax.spark.run(lambda x: x + 1, (1,), num_proc=2)  # doctest: +SKIP
        [2, 2]
    """
    spark = active_session()
    size = num_proc or parallelism(spark)
    with EngineJob(size, env=_rank_environment(env, nics), note=log.info) as job:
        return launch(
            spark,
            job,
            [executable or sys.executable, *FUNCTION],
            task.encode(fn, args, kwargs or {}),
            start_timeout=start_timeout,
            stdout=stdout,
            stderr=stderr,
        )


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    spares: int = 0,
) -> list[T]:
    """Runs a function in an elastic job, which continues if a task is lost.

    Spark tries the task again, at most `spark.task.maxFailures` times, and the new rank
    joins the job. The function should use `ringjax.elastic.run`.

    Args:
        fn, args, kwargs, env, stdout, stderr, nics: as in `run`.
        num_proc: the number of ranks at the start; None means as many as tasks can run
            at the same time.
        min_num_proc: with fewer ranks the job waits; None means `num_proc`.
        max_num_proc: the largest number of ranks; None means `num_proc`.
        start_timeout: seconds between the arrivals of the first and the last rank.
        elastic_timeout: seconds to wait for new ranks if too few are left (600).
        reset_limit: the largest number of changes of the members.
        min_np, max_np: older names of `min_num_proc` and `max_num_proc`.
        spares: the number of further tasks, whose processes have called `ringjax.init`
            and `warm_up`, and wait until a rank is lost. One of them then takes its
            place at the next commit.
        verbose, prefix_output_with_timestamp: arguments of Horovod without effect.

    Returns:
        The results of the last members, in the order of their ranks.

    Raises:
        LaunchError: the job failed.
        RuntimeError: there is no Spark session.
    """
    spark = active_session()
    size = num_proc or parallelism(spark)
    min_size = min_num_proc or min_np or size
    max_size = max_num_proc or max_np or size
    if spares < 0:
        raise ValueError(f"spares={spares}: less than 0")
    settings = _rank_environment(env, nics)
    timeouts = {"START_TIMEOUT": start_timeout, "ELASTIC_TIMEOUT": elastic_timeout}
    for name, seconds in timeouts.items():
        if seconds is not None:
            settings[f"RINGJAX_{name}"] = f"{seconds:g}"
    with EngineJob(
        size, min_size=min_size, max_size=max_size, env=settings, note=log.info
    ) as job:
        return launch(
            spark,
            job,
            [sys.executable, *FUNCTION],
            task.encode(fn, args, kwargs or {}),
            stdout=stdout,
            stderr=stderr,
            reset_limit=reset_limit,
            spares=spares,
        )


def active_session() -> SparkSession:
    """Returns the Spark session of this thread, or else that of another thread."""
    try:
        return SparkSession.active()
    except PySparkException as error:
        raise RuntimeError(
            "Could not find an active SparkContext: make a SparkSession first"
        ) from error


def parallelism(spark: SparkSession) -> int:
    """Returns how many tasks can run at the same time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:
        # Spark Connect has no context. Count the partitions of a range: by default
        # there are as many partitions as tasks can run at the same time.
        parts = spark.range(1 << 16).selectExpr("spark_partition_id() AS part")
        return int(parts.selectExpr("max(part) + 1").head()[0])


def _rank_environment(
    env: Mapping[str, str] | None, nics: Sequence[str] | None
) -> dict[str, str]:
    names = {"RINGJAX_NETWORK_INTERFACES": ",".join(sorted(nics))} if nics else {}
    return {**environ.rank_defaults(), **(env or {}), **names}


def launch(
    spark: SparkSession,
    job: EngineJob,
    argv: Sequence[str],
    payload: bytes | None,
    *,
    use_gpu: bool = True,
    start_timeout: float | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    reset_limit: int | None = None,
    spares: int = 0,
) -> list[Any]:
    """Runs the tasks of a job until all tasks have ended; returns the results by rank.

    `argv`, `payload` and `use_gpu` are as for `RankTask`, all other options as for
    `run` and `run_elastic`.
    """
    rank_task = RankTask(
        common_env=job.common_ticket(),
        payload=payload,
        argv=argv,
        size=job.max_size + spares,
        elastic=job.elastic,
        keep_output=stdout is not None or stderr is not None,
        use_gpu=use_gpu,
    )
    slots = None
    if start_timeout is not None and not isinstance(spark, SparkSession):
        # Count the slots now, because Spark Connect sends no replies while it waits for
        # free slots.
        slots = parallelism(spark)
    tasks = _SparkJob(spark, job, rank_task, slots)
    tasks.start()
    begin, checked = time.monotonic(), False
    try:
        while not tasks.ended.wait(_POLL_INTERVAL) and not job.stopped:
            job.poll()
            if reset_limit is not None and job.resets > reset_limit:
                job.stop(
                    f"the members have changed {job.resets} times; the reset limit is "
                    f"{reset_limit}"
                )
            waited = time.monotonic() - begin
            if not checked and waited > (start_timeout or _START_TIMEOUT):
                checked = True
                tasks.check_started(waited)
        # Wait until ranks that were stopped have ended and have reported their errors.
        tasks.ended.wait(_STOP_TIMEOUT)
    finally:
        tasks.interrupt()
    job.poll()
    if tasks.error is not None and not job.stopped:
        raise LaunchError(f"Spark gave up: {_short_reason(tasks.error)}")
    for row in tasks.rows:
        _forward_output(row, stdout, stderr)
        job.runs_on(row.worker, row.node)
        if row.code:
            job.lost(row.worker, row.error)
        elif not job.workers[row.worker].dismissed:  # else it has no result
            job.finished(row.worker, task.decode(row.result) if payload else None)
    return job.results()


def _forward_output(row: Row, stdout: TextIO | None, stderr: TextIO | None) -> None:
    number = row.rank if row.rank >= 0 else row.worker
    for stream, line in json.loads(row.output or "[]"):
        file = stdout if stream == "stdout" else stderr
        if file is not None:
            file.write(f"[{number}]<{stream}>:{line}\n")


def _short_reason(error: Exception) -> str:
    """Returns the line of Spark's error that names a rank's error or a lack of slots.

    If the text has no such line, the result is its first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ranks = [line for line in lines if "RuntimeError: worker" in line]
    slots = [line for line in lines if "barrier" in line or "slots" in line]
    return (ranks or slots or lines or [type(error).__name__])[0][:500]


class _SparkJob(threading.Thread):
    """Runs Spark's job in a thread, so that the caller can interrupt it.

    When `ended` is set, `rows` has the results of the tasks, or `error` the error with
    which Spark's job has failed.
    """

    def __init__(
        self,
        spark: SparkSession,
        job: EngineJob,
        rank_task: RankTask,
        slots: int | None,
    ) -> None:
        super().__init__(name="spark-job", daemon=True)
        self._spark, self._job = spark, job
        self._rank_task, self._slots = rank_task, slots
        self._tag = f"ringjax.spark.run.{next(_job_numbers)}"
        self.ended = threading.Event()
        self.rows: list[Row] = []
        self.error: Exception | None = None

    def run(self) -> None:
        size, barrier = self._rank_task.size, not self._rank_task.elastic
        try:
            self._spark.addTag(self._tag)  # this tag marks the jobs of this thread
            if isinstance(self._spark, SparkSession):
                self._spark.sparkContext.setJobGroup(self._tag, "ringjax")
            frame = self._spark.range(0, size, 1, size)
            tasks = frame.mapInArrow(self._rank_task, SCHEMA, barrier=barrier)
            self.rows = tasks.collect()
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    def interrupt(self) -> None:
        """Makes Spark stop the tasks that still run."""
        if not self.ended.is_set():
            with contextlib.suppress(Exception):
                self._spark.interruptTag(self._tag)
            # Wait with a limit, because Spark ignores interrupts while it waits for
            # free slots.
            self.ended.wait(_STOP_TIMEOUT)

    def check_started(self, seconds: float) -> None:
        """Stops the job if Spark has not started all of its tasks in `seconds`."""
        size = self._rank_task.size
        if self._job.elastic:
            return
        if isinstance(self._spark, SparkSession):
            count, slots = self._count_started(), parallelism(self._spark)
        elif self._slots is not None and self._slots < size:
            count, slots = 0, self._slots
        else:
            return
        if count < size:
            self._job.stop(
                f"Timed out waiting for Spark tasks to start: {count} of {size} have "
                f"within {seconds:.0f} s, and there is room for {slots} at once; are "
                "there enough executors and cores?"
            )

    def _count_started(self) -> int:
        tracker = self._spark.sparkContext.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._tag))
        stages = [number for job in jobs if job is not None for number in job.stageIds]
        infos = map(tracker.getStageInfo, stages)
        return sum(
            int(info.numActiveTasks + info.numCompletedTasks)
            for info in infos
            if info is not None
        )
