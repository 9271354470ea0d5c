"""`RingConfig` in Ray Train: lost workers, a loss of all workers, and `report`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import programs
from engines.clusters import MARKS, SMALL, ray_cluster
from ray.cluster_utils import Cluster

import ringjax.ray

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes, the second of which has two simulated GPUs."""
    with ray_cluster() as cluster:
        cluster.add_node(num_cpus=1, **SMALL)
        cluster.add_node(num_cpus=3, num_gpus=2, **SMALL)
        yield cluster


def fit(train: Any, folder: Path, size: int, gpus: bool = False, **options: Any) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    result = DataParallelTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        backend_config=ringjax.ray.RingConfig(**options),
        scaling_config=ScalingConfig(num_workers=size, use_gpu=gpus),
        run_config=RunConfig(
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    assert result.error is None
    return result


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_lost_worker_is_replaced_and_the_others_continue(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    def train(config: dict[str, str]) -> None:
        import ringjax

        ringjax.init()
        if ringjax.rank() == 1 and not Path(config["folder"], "failed").exists():
            threading.Thread(target=fail, args=[config["folder"]]).start()
        if ringjax.rank() == 0:
            threading.Thread(target=stop, args=[config["folder"]]).start()
        done = programs.train(config["folder"], 10**6)
        Path(config["folder"], f"sizes{done['rank']}").write_text(
            " ".join(str(size) for _, size, _ in done["sizes"])
        )

    def stop(folder: str) -> None:
        programs.wait_for_sizes(Path(folder), 1, 1)
        programs.wait_for_sizes(Path(folder), 2, 2)
        Path(folder, "stop").touch()

    def fail(folder: str) -> None:
        programs.wait_for_sizes(Path(folder), 2, 2)
        Path(folder, "failed").touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        import ringjax
        from ringjax.runtime import reused_process

        reused_process.fail_job(ValueError("boom"))
        assert not ringjax.is_initialized()

    fit(train, tmp_path, 2)
    assert (tmp_path / "sizes0").read_text() == "2 1 2"
    assert (tmp_path / "sizes1").read_text() == "2"


def test_if_all_workers_are_killed_all_restart(
    cluster: Cluster, tmp_path: Path
) -> None:
    def train(config: dict[str, str]) -> None:
        import ringjax

        ringjax.init()
        ringjax.barrier()
        file = Path(config["folder"], f"{ringjax.size()}-{ringjax.rank()}")
        if not file.exists():
            file.touch()
            ringjax.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        file.write_text(str(ringjax.rank()))
        ringjax.barrier()

    fit(train, tmp_path, 2)
    assert [(tmp_path / f"2-{rank}").read_text() for rank in range(2)] == ["0", "1"]


def test_reports_while_a_worker_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """`ray.train.report` would wait for a new worker, which waits for a commit."""

    def train(config: dict[str, str]) -> None:
        import numpy as np

        import ringjax.ray

        ringjax.init()
        folder = Path(config["folder"])
        failed, me = folder / "failed", folder / str(os.getpid())
        reported: list[int] = []  # steps that this process has reported since the loss

        @ringjax.elastic.run
        def loop(state: Any) -> None:
            while not state.done:
                flags = np.array([1.0, len(reported) == 3 and ringjax.rank() == 0])
                size, state.done = ringjax.allreduce(flags, op=ringjax.Sum).tolist()
                state.step += 1
                if state.step == 40 and ringjax.rank() == 1 and not failed.exists():
                    failed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step % 20 == 0:
                    sent = ringjax.ray.report({"step": state.step, "size": size})
                    with me.open("a") as file:
                        file.write(f"{state.step} {sent}\n")
                    if sent and failed.exists():
                        reported.append(state.step)
                time.sleep(0.02)
                state.commit()

        loop(ringjax.elastic.State(step=0, done=0))

    fit(train, tmp_path, 2)
    files = [f.read_text().splitlines() for f in tmp_path.iterdir() if f.name.isdigit()]
    survivor = max(files, key=len)
    assert survivor[0] == "20 True" and survivor[-1].endswith(" True")
    assert any(line.endswith(" False") for line in survivor)


def test_a_run_that_is_not_elastic(cluster: Cluster, tmp_path: Path) -> None:
    def train(config: dict[str, str]) -> None:
        text = " ".join(map(str, programs.allreduce()))
        devices = ",".join(sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
        Path(config["folder"], text.split()[0]).write_text(f"{text} {devices}")

    fit(train, tmp_path, 2, gpus=True, elastic=False)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 2 {rank} 3.0 0,1"
