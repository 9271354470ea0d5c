"""The data service of TensorFlow: one job prepares data, and another trains on them."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("tensorflow")]


def serve(world: Any, path: Path, dispatchers: int, **how: bool) -> list[int]:
    """Serves the numbers 0 to 63, and returns those that this rank receives.

    Each rank is a worker of the data service and also a rank of the training job.
    """
    import tensorflow as tf

    from ringjax.tensorflow.data.compute_service import TfDataServiceConfig
    from ringjax.tensorflow.data.compute_worker import main

    worker = threading.Thread(target=main, args=(dispatchers, "compute", str(path), 30))
    worker.start()
    config = TfDataServiceConfig.read(str(path), wait_for_file_creation=True)
    try:
        data = tf.data.Dataset.range(64)
        data = data.repeat() if how.get("round_robin") else data
        data = data.batch(16).send_to_data_service(
            config, world.rank, world.size, **how
        )
        batches = islice(data.as_numpy_iterator(), 4 if how.get("round_robin") else 99)
        return sorted(int(number) for batch in batches for number in batch)
    finally:
        import ringjax

        ringjax.barrier()
        if world.rank == 0:
            config.compute_client().shutdown()
        worker.join(30)
        assert not worker.is_alive()


@pytest.fixture
def path(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the path of a new file, which is equal on all ranks."""
    import ringjax

    mine = str(tmp_path_factory.mktemp("data") / "config.json")
    return Path(ringjax.broadcast_object(mine))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dispatchers", [1, 2])
def test_every_rank_receives_all_data(world: Any, path: Path, dispatchers: int) -> None:
    assert serve(world, path, dispatchers) == list(range(64))
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.ranks(2)
def test_ranks_share_one_epoch_of_data(world: Any, path: Path) -> None:
    import ringjax

    found = ringjax.allgather_object(serve(world, path, 1, reuse_dataset=True))
    assert sorted(number for one in found for number in one) == list(range(64))


@pytest.mark.ranks(2)
def test_ranks_read_round_robin(world: Any, path: Path) -> None:
    found = serve(world, path, 1, reuse_dataset=True, round_robin=True)
    assert len(found) == 64 and set(found) <= set(range(64))


@pytest.mark.ranks(2)
def test_unsupported_arguments_are_refused(world: Any, path: Path) -> None:
    import tensorflow as tf

    from ringjax.errors import StartupError
    from ringjax.tensorflow.data import TfDataServiceConfig, compute_service
    from ringjax.tensorflow.data.compute_registry import ComputeClient, ComputeService
    from ringjax.tensorflow.data.compute_worker import main, parse

    with pytest.raises(ValueError, match=r"\(2\) must be a multiple .* \(3\)"):
        main(3, "compute", str(path))
    with pytest.raises(ValueError, match="expected 'compute' or 'training'"):
        main(1, "elsewhere", str(path))
    given = parse(["--dispatchers", "2", "--dispatcher-side", "training", "file"])
    assert (given.dispatchers, given.dispatcher_side) == (2, "training")
    config = TfDataServiceConfig(1, 1, "training", {"lo": [("127.0.0.1", 1)]}, b"k", 1)
    with pytest.raises(RuntimeError, match="use tf_data_service"):
        tf.data.Dataset.range(3).send_to_data_service(config, 0)
    there = compute_service.tf_data_service(config, 1)
    with pytest.raises(OSError, match="data service"):
        there.__enter__()
    service = ComputeService(1, 2, b"secret", hosts=["127.0.0.1"])
    client = ComputeClient(service.address_map(), b"secret")
    with pytest.raises(StartupError, match="there is no dispatcher 1, there are 1"):
        client.register_dispatcher(1, "grpc://here:1")
    client.register_dispatcher(0, "grpc://here:1")
    with pytest.raises(StartupError, match="registered already"):
        client.register_dispatcher(0, "grpc://there:1")
    client.register_worker_for_dispatcher(0, 7)
    client.register_worker_for_dispatcher(0, 7)
    with pytest.raises(TimeoutError, match="has not said 'workers' of 0 in time"):
        client.wait_for_dispatcher_worker_registration(0, 0.3)
    assert client.is_running()
    stranger = ComputeClient(service.address_map(), b"another")
    with pytest.raises(RuntimeError, match="secret|another job"):
        stranger.wait_for_dispatcher_registration(0, 1)
    service.shutdown()
    assert not client.is_running()
