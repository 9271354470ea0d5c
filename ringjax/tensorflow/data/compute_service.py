"""TensorFlow's data service for a training job: its configuration, and both its sides.

The compute job's processes run `compute_worker_fn`, the training program calls
`send_to_data_service` on its dataset. How they find each other is directory.py. A
dataset gets Horovod's method `send_to_data_service` when this module is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ringjax import elastic, runtime
from ringjax.control import addresses as address
from ringjax.ops import Min
from ringjax.tensorflow.data.compute_registry import ComputeClient, ServiceAddresses
from ringjax.tensorflow.reductions import allreduce

_service = tf.data.experimental.service
_STOP = 1.5  # seconds for a worker's readers to end; it reports every second
_still_read: list[Any] = []


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """What the compute job tells the training job, through a file.

    The file lets whoever can read it take part, so only its owner can.

    Attributes:
        dispatchers: how many; 1 for all ranks, or one for each rank.
        workers_per_dispatcher: how many processes prepare data for each of them.
        dispatcher_side: where they run, "compute" or "training".
        addresses: where the directory of the service is.
        key: the secret of the directory.
        timeout: seconds to wait for the other side.

    Example:
        >>> config = TfDataServiceConfig(1, 2, "compute", {"lo": [("::1", 5)]}, b"k")
        >>> TfDataServiceConfig.from_dict(config.to_dict()) == config
        True
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: ServiceAddresses
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A way to ask who is there."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Undoes `to_dict`.

        Raises:
            TypeError, ValueError: something is missing, or is too much.
        """
        places = {
            name: [(str(host), int(port)) for host, port in pairs]
            for name, pairs in config["addresses"].items()
        }
        key = bytes.fromhex(config["key"])
        return TfDataServiceConfig(**{**config, "addresses": places, "key": key})

    def write(self, filename: str) -> None:
        """Writes the file; it is there when it is complete."""
        path = Path(filename)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            json.dump(self.to_dict(), file)
        os.replace(file.name, path)

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False
    ) -> TfDataServiceConfig:
        """Reads the file, waiting for it if that is wanted.

        Raises:
            FileNotFoundError: it is not there.
        """
        path = Path(filename)
        while wait_for_file_creation and not path.exists():
            time.sleep(0.1)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of the dispatcher for a rank of the training job.

    With dispatchers on the side of training, the dispatcher runs in this process for as
    long as the `with` block does.

    Args:
        compute_config: as the compute job has written it.
        rank: this process's rank in the training job.

    Raises:
        TimeoutError: the other side is not there in time.
    """
    compute = compute_config.compute_client()
    number = rank if compute_config.dispatchers > 1 else 0
    server = None
    if compute_config.dispatcher_side == "training" and number == rank:
        server = _start_dispatcher(compute, number)
    try:
        limit = compute_config.timeout
        where = compute.wait_for_dispatcher_registration(number, limit)
        compute.wait_for_dispatcher_worker_registration(number, limit)
        yield where
    finally:
        if server is not None:
            _stop(server)


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """The same dataset, prepared by the compute job.

    Args:
        dataset: what the workers are to compute.
        compute_config: as the compute job has written it.
        rank: this process's rank in the training job.
        size: how many ranks there are; needed for `round_robin`.
        processing_mode: as for `tf.data.experimental.service.distribute`.
        reuse_dataset: all ranks share one pass over the data.
        round_robin: with `reuse_dataset`: ranks take turns.

    Raises:
        RuntimeError: the dispatchers are on the side of training.
        TimeoutError: the compute job is not there in time.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "training side dispatcher not supported, use tf_data_service context "
            "manager instead"
        )
    takes_turns = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as where:
        return dataset.apply(
            _service.distribute(
                processing_mode=processing_mode,
                service=where,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if takes_turns else None,
                num_consumers=size if takes_turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Prepares data, until the service is shut down; every rank of the compute job.

    Raises:
        TimeoutError: the other side is not there in time.
    """
    runtime.init()
    index = runtime.rank()
    number = index // compute_config.workers_per_dispatcher
    compute = compute_config.compute_client()
    servers = []
    try:
        first = index % compute_config.workers_per_dispatcher == 0
        if compute_config.dispatcher_side == "compute" and first:
            servers.append(_start_dispatcher(compute, number))
        limit = compute_config.timeout
        where = compute.wait_for_dispatcher_registration(number, limit)
        protocol, dispatcher = where.split("://")
        worker = _service.WorkerServer(
            _service.WorkerConfig(
                protocol=protocol,
                dispatcher_address=dispatcher,
                worker_address=f"{_host()}:%port%",
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=limit * 1000,
            )
        )
        servers.append(worker)
        compute.register_worker_for_dispatcher(number, index)
        if runtime.elastic():
            _wait_for_shutdown(elastic.State(), compute)
        else:
            compute.wait_for_shutdown()
    finally:
        for server in reversed(servers):
            _stop(server)


@elastic.run
def _wait_for_shutdown(state: elastic.State, compute: ComputeClient) -> None:
    """Ranks may be lost meanwhile, and join."""
    running = True
    while running:
        mine = tf.constant(int(compute.is_running()))
        running = bool(allreduce(mine, op=Min, name="data service running"))
        state.commit()


def _start_dispatcher(compute: ComputeClient, number: int) -> Any:
    server = _service.DispatchServer(_service.DispatcherConfig())
    # TensorFlow says localhost, which means nothing on another host.
    protocol, _, place = server.target.partition("://")
    port = place.rpartition(":")[2]
    compute.register_dispatcher(number, f"{protocol}://{_host()}:{port}")
    return server


def _host() -> str:
    """This host as others may reach it."""
    names = runtime.config().network_interfaces
    host = address.of_interfaces(names)[0]
    return f"[{host}]" if ":" in host else host


def _stop(server: Any) -> None:
    """Ends a server, unless trainers still read from it: then it ends with the process.

    TensorFlow's stop waits for every request, holds Python's lock meanwhile, and a
    request of a round whose other consumers have gone never ends. A reader that has
    come to its end is known here with the worker's next report.
    """
    tasks = getattr(server, "_num_tasks", int)  # dispatchers have none
    end = time.monotonic() + _STOP
    while tasks() and time.monotonic() < end:
        time.sleep(0.1)
    if tasks():
        _still_read.append(server)  # its destructor would stop it, too
        return
    server._stop()  # there is no public way
    server.join()
