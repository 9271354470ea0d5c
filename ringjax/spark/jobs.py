"""`ringjax.spark.run` and `run_elastic`: a function as the ranks of a job on Spark."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ringjax.errors import LaunchError
from ringjax.run import environ, task
from ringjax.run.engine_job import EngineJob
from ringjax.spark.task import SCHEMA, RankTask

log = logging.getLogger("ringjax.spark")
_POLL_INTERVAL = 0.1  # seconds between two looks at what the workers say
_STOP_TIMEOUT = 2.0  # seconds for what was asked to end
_jobs = itertools.count()


def run(
    fn: Callable[..., Any],
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
) -> list[Any]:
    """Runs a function as the ranks of one job, in the tasks of a barrier stage.

    Args:
        fn: called in every rank as `fn(*args, **kwargs)`.
        args, kwargs: its arguments, the same for every rank.
        num_proc: how many; as many as tasks can run at once, if it is not given.
        start_timeout: seconds for Spark to start all tasks (600).
        env: variables for the ranks.
        stdout, stderr: get what the ranks wrote, once they have ended; the executors'
            logs get it at once.
        nics: network interfaces that the ranks may use.
        executable: the Python of the ranks; the tasks' own by default.
        use_mpi, use_gloo, extra_mpi_args, verbose, prefix_output_with_timestamp:
            Horovod's, without effect.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: a rank failed; it names the rank, the host and the error.
        RuntimeError: there is no Spark session.

    Example:
        >>> import ringjax.spark
        >>> ringjax.spark.run(lambda x: x + 1, (1,), num_proc=2)  # doctest: +SKIP
        [2, 2]
    """
    spark = active_session()
    size = num_proc or parallelism(spark)
    with EngineJob(size, env=_rank_environment(env, nics), note=log.info) as job:
        rank = RankTask(
            ticket=job.common_ticket(),
            payload=task.encode(fn, args, kwargs or {}),
            argv=[executable or sys.executable, "-m", "ringjax.run.task"],
            size=size,
            elastic=False,
            keeps_output=stdout is not None or stderr is not None,
        )
        return launch(spark, job, rank, start_timeout, stdout, stderr)


def run_elastic(
    fn: Callable[..., Any],
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
) -> list[Any]:
    """Runs a function in an elastic job: a lost task does not end it.

    Spark tries the task again, `spark.task.maxFailures` times at most, and it joins the
    others, who have gone on. The function should use `ringjax.elastic.run`.

    Args:
        fn, args, kwargs, env, stdout, stderr, nics: as in `run`.
        num_proc: how many to begin with; as many as tasks can run at once.
        min_num_proc: with fewer the others wait; `num_proc` if it is not given.
        max_num_proc: the most; `num_proc` if it is not given.
        start_timeout: seconds from the first rank's appearance to the last one's.
        elastic_timeout: seconds to wait for others if too few are left (600).
        reset_limit: how often the members may change.
        min_np, max_np: older names of `min_num_proc` and `max_num_proc`.
        verbose, prefix_output_with_timestamp: without effect.

    Returns:
        The results of those who are there at the end, in the order of their ranks.

    Raises:
        LaunchError: the job has failed.
        RuntimeError: there is no Spark session.
    """
    spark = active_session()
    size = num_proc or parallelism(spark)
    least = min_num_proc or min_np or size
    most = max_num_proc or max_np or size
    settings = _rank_environment(env, nics)
    given = {"START_TIMEOUT": start_timeout, "ELASTIC_TIMEOUT": elastic_timeout}
    for name, seconds in given.items():
        if seconds is not None:
            settings[f"RINGJAX_{name}"] = f"{seconds:g}"
    job = EngineJob(size, min_size=least, max_size=most, env=settings, note=log.info)
    with job:
        rank = RankTask(
            ticket=job.common_ticket(),
            payload=task.encode(fn, args, kwargs or {}),
            argv=[sys.executable, "-m", "ringjax.run.task"],
            size=most,
            elastic=True,
            keeps_output=stdout is not None or stderr is not None,
        )
        return launch(spark, job, rank, None, stdout, stderr, reset_limit)


def active_session() -> SparkSession:
    """The session that is there.

    Raises:
        RuntimeError: there is none.
    """
    try:
        return SparkSession.active()  # of this thread, or of another
    except PySparkException as error:
        raise RuntimeError(
            "Could not find an active SparkContext: make a SparkSession first"
        ) from error


def parallelism(spark: SparkSession) -> int:
    """How many tasks can run at once."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no context; it divides what has no division
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
    rank: RankTask,
    start_timeout: float | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    reset_limit: int | None = None,
) -> list[Any]:
    """Runs the tasks of a job to their end; the results by rank.

    Raises:
        LaunchError: the job has failed.
    """
    slots = None
    if start_timeout is not None and not isinstance(spark, SparkSession):
        slots = parallelism(spark)  # Spark Connect only tells while there is room
    tasks = _SparkJob(spark, job, rank, slots)
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
            if not checked and time.monotonic() - begin > (start_timeout or 600.0):
                checked = True
                tasks.check_started(time.monotonic() - begin)
        # Ranks that have just been told may end by themselves, and say more.
        tasks.ended.wait(_STOP_TIMEOUT)
    finally:
        tasks.end()
    job.poll()
    if tasks.error is not None and not job.stopped:
        raise LaunchError(f"Spark gave up: {_short_reason(tasks.error)}")
    for row in tasks.rows:
        _forward_output(json.loads(row.output or "[]"), row, stdout, stderr)
        job.runs_on(row.worker, row.node)
        if row.code:
            job.lost(row.worker, row.error)
        else:
            value = task.decode(row.result) if rank.payload is not None else None
            job.finished(row.worker, value)
    return job.results()


def _forward_output(
    lines: Sequence[Sequence[str]], row: Any, out: TextIO | None, err: TextIO | None
) -> None:
    for stream, line in lines:
        file = out if stream == "stdout" else err
        if file is not None:
            number = row.rank if row.rank >= 0 else row.worker
            file.write(f"[{number}]<{stream}>:{line}\n")


def _short_reason(error: Exception) -> str:
    """Of what Spark says, which is long, what matters: a rank's error, or no room."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if "RuntimeError: worker" in line]
    slots = [line for line in lines if "barrier" in line or "slots" in line]
    return (ours or slots or lines or [type(error).__name__])[0][:500]


class _SparkJob(threading.Thread):
    """Spark's job, in a thread: who waits for it can end it.

    Attributes:
        ended: set when Spark is through with it.
        rows: what the tasks returned.
        error: why Spark gave up.
    """

    def __init__(
        self, spark: SparkSession, job: EngineJob, rank: RankTask, slots: int | None
    ) -> None:
        super().__init__(name="spark-job", daemon=True)
        self._spark, self._job, self._rank, self._slots = spark, job, rank, slots
        self._tag = f"ringjax.spark.run.{next(_jobs)}"
        self.ended = threading.Event()
        self.rows: list[Any] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Runs the tasks."""
        size, barrier = self._rank.size, not self._rank.elastic
        try:
            self._spark.addTag(self._tag)  # of this thread
            if isinstance(self._spark, SparkSession):
                self._spark.sparkContext.setJobGroup(self._tag, "ringjax")
            frame = self._spark.range(0, size, 1, size)
            tasks = frame.mapInArrow(self._rank, SCHEMA, barrier=barrier)
            self.rows = tasks.collect()
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    def end(self) -> None:
        """Has Spark end what still runs."""
        if not self.ended.is_set():
            with contextlib.suppress(Exception):
                self._spark.interruptTag(self._tag)
            # While Spark waits for room it cannot be told; nobody waits for that.
            self.ended.wait(_STOP_TIMEOUT)

    def check_started(self, seconds: float) -> None:
        """Stops the job if Spark has not even started all of its tasks."""
        size = self._rank.size
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
        """The tasks of this job that have started."""
        tracker = self._spark.sparkContext.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._tag))
        stages = [number for job in jobs if job is not None for number in job.stageIds]
        infos = map(tracker.getStageInfo, stages)
        return sum(
            int(info.numActiveTasks + info.numCompletedTasks)
            for info in infos
            if info is not None
        )
