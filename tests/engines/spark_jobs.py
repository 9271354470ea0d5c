"""Jobs on a local Spark: barrier stages, retried tasks, and killed executors."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines import programs
from engines.local_spark import WITH_JAVA, local_spark
from pyspark.sql import SparkSession

import ringjax.spark
from ringjax.errors import LaunchError

pytestmark = WITH_JAVA


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session with two executor processes, which have two slots for tasks each."""
    more = {"spark.executor.memory": "512m", "spark.task.maxFailures": "5"}
    with local_spark("local-cluster[2,2,512]", **more) as session:
        yield session


@pytest.mark.parametrize("size", [1, 3])
def test_run_calls_the_function_on_every_task(spark: SparkSession, size: int) -> None:
    results = ringjax.spark.run(programs.allreduce, (2.0,), num_proc=size)
    total = 2.0 * sum(range(1, size + 1))
    # All executors are on this host, so the local rank equals the rank.
    assert results == [(rank, size, rank, total) for rank in range(size)]


def test_without_num_proc_all_slots_are_used(spark: SparkSession) -> None:
    assert len(ringjax.spark.run(programs.allreduce)) == 4


def test_output_and_variables(spark: SparkSession) -> None:
    def fn() -> None:
        print("out", os.environ["OURS"])
        print("err", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    ringjax.spark.run(fn, num_proc=2, env={"OURS": "yes"}, stdout=out, stderr=err)
    assert sorted(out.getvalue().splitlines()) == [
        "[0]<stdout>:out yes",
        "[1]<stdout>:out yes",
    ]
    assert "[1]<stderr>:err\n" in err.getvalue()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 \(on .*\): ValueError: boom"),
        ("kill", r"rank 1 \(on .*\): its process was killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_the_first_to_fail_is_named(
    spark: SparkSession, how: str, message: str
) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        ringjax.spark.run(programs.fails, (1, how), num_proc=3)
    assert caught.value.rank == 1
    if how == "raise":
        assert "Traceback" in str(caught.value)


def test_too_few_slots(spark: SparkSession) -> None:
    message = "to start: 0 of 5 have within . s, and there is room for 4"
    with pytest.raises(LaunchError, match=message):
        ringjax.spark.run(programs.allreduce, num_proc=5, start_timeout=3)


def test_slow_tasks_count_as_started(spark: SparkSession) -> None:
    """`start_timeout` limits the start of the ranks, not the duration of the job."""
    begin = time.monotonic()
    ringjax.spark.run(int, num_proc=2)
    enough = 3 * (time.monotonic() - begin)  # for the start of two ranks

    def fn() -> int:
        time.sleep(enough + 1)
        return 1

    assert ringjax.spark.run(fn, num_proc=2, start_timeout=enough) == [1, 1]


def test_no_session() -> None:
    code = "import ringjax.spark; ringjax.spark.run(print, num_proc=1)"
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert "Could not find an active SparkContext" in done.stderr


def test_python_workers_of_spark_are_left_unchanged(spark: SparkSession) -> None:
    """Spark reuses its Python workers for later jobs."""
    ringjax.spark.run(programs.allreduce, num_proc=2)

    def inspect_worker(_: Any) -> list[Any]:
        names = [name for name in os.environ if name.startswith("RINGJAX_")]
        return [*names, *({"jax", "ringjax._native"} & sys.modules.keys())]

    assert (
        spark.sparkContext.range(4, numSlices=4).flatMap(inspect_worker).collect() == []
    )


def test_distributor(spark: SparkSession, tmp_path: Path) -> None:
    distributor = ringjax.spark.Distributor(num_processes=2, env={"OURS": "yes"})
    assert distributor.run(programs.allreduce, scale=3.0) == (0, 2, 0, 9.0)
    program = tmp_path / "train.py"
    program.write_text(
        "import os, sys, ringjax\n"
        "ringjax.init()\n"
        "name = f'{sys.argv[1]}/{ringjax.rank()}'\n"
        "open(name, 'w').write(f\"{ringjax.size()} {os.environ['OURS']}\")\n"
    )
    assert distributor.run(str(program), tmp_path) is None
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 yes", "2 yes"]
    program.write_text("raise SystemExit('no data')\n")
    with pytest.raises(LaunchError, match=r"rank . \(on .*no data \(exit code 1\)"):
        distributor.run(str(program))


def test_distributor_here() -> None:
    distributor = ringjax.spark.Distributor(num_processes=2, local_mode=True)
    assert distributor.run(programs.allreduce, 3.0) == (0, 2, 0, 9.0)
    runner = ringjax.spark.HorovodRunner(np=-1)
    assert runner.run(programs.allreduce, scale=3.0) == (0, 1, 0, 3.0)
    with pytest.raises(ValueError, match="expected 1 <= min_processes"):
        ringjax.spark.Distributor(2, min_processes=3)


def test_random_kills(spark: SparkSession, tmp_path: Path) -> None:
    """Executors and ranks are killed; the others continue, and retried tasks join."""
    times = random_kills(spark, tmp_path, ["executor", "rank", "executor"], seed=1)
    print("seconds to the next step of all survivors:", [f"{t:.2f} s" for t in times])
    assert max(times) < 10


def random_kills(
    spark: SparkSession, folder: Path, kinds: list[str], seed: int
) -> list[float]:
    """Kills one of four ranks, or one of two executors, for each of `kinds`.

    Returns:
        For each kill, the seconds until all survivors have made a step.
    """
    random = Random(seed)
    times: list[float] = []
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            for kind in kinds:
                programs.wait_for_sizes(folder, 4, 4, seconds=120)
                time.sleep(random.random())
                # The name of the file of a rank is its process id.
                ranks = [int(f.name) for f in folder.iterdir() if _is_running(f.name)]
                victim = random.choice(_executors() if kind == "executor" else ranks)
                began = time.time()
                os.kill(victim, signal.SIGKILL)
                left = 2 if kind == "executor" else 3
                while len(found := programs.next_steps(folder, began)) < left:
                    assert time.time() < began + 60, f"{kind}: {found}"
                    time.sleep(0.05)
                times.append(max(found))
            programs.wait_for_sizes(folder, 4, 4, seconds=120)
        except BaseException as error:
            failed.append(error)
        (folder / "stop").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    results = ringjax.spark.run_elastic(
        programs.train_until, (str(folder),), num_proc=4, min_num_proc=1
    )
    killer.join()
    assert not failed, failed
    assert len(results) == 4
    return times


def _is_running(name: str) -> bool:
    return name.isdigit() and Path("/proc", name).exists()


def _executors() -> list[int]:
    """Returns the executors of Spark that are descendants of this process."""
    descendants = {os.getpid()}
    found = []
    for entry in sorted(Path("/proc").iterdir(), key=lambda p: p.name.zfill(10)):
        try:
            stat = (entry / "stat").read_text()
            line = (entry / "cmdline").read_bytes()
        except OSError:  # not a process, or a process that has ended
            continue
        if (
            entry.name.isdigit()
            and int(stat.rpartition(")")[2].split()[1]) in descendants
        ):
            descendants.add(int(entry.name))
            if b"java" in line and b"CoarseGrainedExecutorBackend" in line:
                found.append(int(entry.name))
    return found


def test_a_rank_that_raises_is_restarted(spark: SparkSession, tmp_path: Path) -> None:
    def fn(folder: str) -> dict[str, Any]:
        import ringjax

        ringjax.init()
        once = Path(folder, "failed")
        if ringjax.rank() == 1 and not once.exists():
            once.touch()
            raise ValueError("once")
        return programs.train(folder, 300)

    results = ringjax.spark.run_elastic(fn, (str(tmp_path),), num_proc=2, min_np=1)
    assert (tmp_path / "failed").exists()
    assert results[0]["rank"] == 0


def test_a_spare_takes_the_place_of_a_lost_rank(
    spark: SparkSession, tmp_path: Path
) -> None:
    found: list[set[str]] = []

    def kill() -> None:
        try:
            programs.wait_for_sizes(tmp_path, 2, 2)
            found.append(programs.wait_for_start(tmp_path, 3))
            victim = max(int(f.name) for f in tmp_path.iterdir() if f.name.isdigit())
            os.kill(victim, signal.SIGKILL)
            programs.wait_for_start(tmp_path, 4)  # the next attempt of the task
            programs.wait_for_sizes(tmp_path, 2, 2)
            found.append({f.name for f in tmp_path.iterdir() if f.name.isdigit()})
        finally:
            (tmp_path / "stop").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    results = ringjax.spark.run_elastic(
        programs.train_noting_the_start,
        (str(tmp_path),),
        num_proc=2,
        min_num_proc=1,
        spares=1,
    )
    killer.join()
    started, members = found
    assert len(results) == 2
    assert len(members) == 3 and members <= started


def test_all_ranks_raise_at_once(spark: SparkSession, tmp_path: Path) -> None:
    """No rank that has the state is left, so the job fails with the error."""

    def fn(folder: str) -> None:
        import ringjax

        ringjax.init()
        file = Path(folder, str(ringjax.rank()))
        restarted = file.exists()
        file.touch()
        ringjax.barrier()
        if not restarted:
            raise ValueError("all at once")

    with pytest.raises(LaunchError, match="ValueError: all at once"):
        ringjax.spark.run_elastic(fn, (str(tmp_path),), num_proc=2, min_np=1)


def test_a_program_that_always_fails_ends(spark: SparkSession) -> None:
    def fn() -> None:
        raise ValueError("always")

    with pytest.raises(LaunchError, match="ValueError: always"):
        ringjax.spark.run_elastic(fn, num_proc=2, min_num_proc=1)
