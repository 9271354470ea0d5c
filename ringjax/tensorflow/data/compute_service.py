"""TensorFlow's data service: its configuration, and its functions for both jobs.

The processes of the compute job run `compute_worker_fn`. The training program calls
`send_to_data_service` on its dataset. The two jobs find each other through the registry
of compute_registry.py. The import of this module adds Horovod's method
`send_to_data_service` to TensorFlow's class `tf.data.Dataset`.
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
from ringjax.tensorflow.tf_types import Server

_service = tf.data.experimental.service
# The seconds to wait until no trainer reads from a worker. A worker reports its readers
# every second, so at least one report arrives within this time.
_STOP_TIMEOUT = 1.5
_kept_alive: list[Server] = []


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """The data that the compute job passes to the training job through a file.

    Every process that can read the file can take part in the service, so only the owner
    of the file can read it.

    Attributes:
        dispatchers: the number of dispatchers: one for all ranks, or one for each rank.
        workers_per_dispatcher: the number of processes that prepare data for each
            dispatcher.
        dispatcher_side: the job that runs the dispatchers, "compute" or "training".
        addresses: the addresses of the registry.
        key: the secret of the registry.
        timeout: seconds to wait for the other job.

    Example:
        >>> config = TfDataServiceConfig(1, 2, "compute", {"lo": [("::1", 5)]}, b"k")
        >>> TfDataServiceConfig.from_dict(config.to_dict()) == config
        True
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: ServiceAddresses
    key: bytes = dataclasses.field(repr=False)
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Returns a client of the registry."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as values that JSON can represent."""
        return {**dataclasses.asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Undoes `to_dict`.

        Raises:
            TypeError, ValueError: a value is missing, unknown or wrong.
        """
        places = {
            name: [(str(host), int(port)) for host, port in pairs]
            for name, pairs in config["addresses"].items()
        }
        key = bytes.fromhex(config["key"])
        return TfDataServiceConfig(**{**config, "addresses": places, "key": key})

    def write(self, filename: str) -> None:
        """Writes the file at once: a reader finds no file or the complete file."""
        path = Path(filename)
        # The file contains the secret key. Only the owner can read a
        # NamedTemporaryFile.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            json.dump(self.to_dict(), file)
        os.replace(file.name, path)

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False
    ) -> TfDataServiceConfig:
        """Reads the file; `wait_for_file_creation` first waits until the file exists.

        Raises:
            FileNotFoundError: there is no such file.
        """
        path = Path(filename)
        while wait_for_file_creation and not path.exists():
            time.sleep(0.1)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yields the address of the dispatcher for a rank of the training job.

    If the training job runs the dispatchers, the dispatcher runs in this process until
    the `with` block ends.

    Args:
        compute_config: the configuration that the compute job has written.
        rank: this process's rank in the training job.

    Raises:
        TimeoutError: the compute job has not registered in time.
    """
    compute = compute_config.compute_client()
    number = rank if compute_config.dispatchers > 1 else 0
    server = None
    if compute_config.dispatcher_side == "training" and number == rank:
        server = _start_dispatcher(compute, number)
    try:
        limit = compute_config.timeout
        dispatcher = compute.wait_for_dispatcher_registration(number, limit)
        compute.wait_for_dispatcher_worker_registration(number, limit)
        yield dispatcher
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
    """Returns a dataset like `dataset` that the compute job prepares.

    Args:
        dataset: the dataset that the workers compute.
        compute_config: the configuration that the compute job has written.
        rank: this process's rank in the training job.
        size: the size of the training job; needed for `round_robin`.
        processing_mode: as for `tf.data.experimental.service.distribute`.
        reuse_dataset: whether all ranks share one pass over the data.
        round_robin: whether the ranks take turns, with `reuse_dataset`.

    Raises:
        RuntimeError: the training job runs the dispatchers.
        TimeoutError: the compute job has not registered in time.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "training side dispatcher not supported, use tf_data_service context "
            "manager instead"
        )
    takes_turns = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as dispatcher:
        return dataset.apply(
            _service.distribute(
                processing_mode=processing_mode,
                service=dispatcher,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if takes_turns else None,
                num_consumers=size if takes_turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Prepares data until the service is shut down; runs in all ranks of the job.

    Raises:
        TimeoutError: the other job has not registered in time.
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
        url = compute.wait_for_dispatcher_registration(number, limit)
        protocol, dispatcher = url.split("://")
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
    # All ranks leave the loop together. If one rank left alone, the other ranks would
    # wait for it in the allreduce and count it as lost.
    running = True
    while running:
        own = tf.constant(int(compute.is_running()))
        running = bool(allreduce(own, op=Min, name="data service running"))
        state.commit()


def _start_dispatcher(compute: ComputeClient, number: int) -> Server:
    server = _service.DispatchServer(_service.DispatcherConfig())
    # TensorFlow's target has the host name localhost, which other hosts cannot use.
    protocol, _, address_and_port = server.target.partition("://")
    port = address_and_port.rpartition(":")[2]
    compute.register_dispatcher(number, f"{protocol}://{_host()}:{port}")
    return server


def _host() -> str:
    names = runtime.config().network_interfaces
    host = address.of_interfaces(names)[0]
    return f"[{host}]" if ":" in host else host


def _stop(server: Server) -> None:
    """Stops a server, or leaves it to the end of the process while trainers read.

    TensorFlow's method `_stop` waits for every request, and holds the GIL while
    it waits. With `round_robin`, a request never ends if another consumer of its round
    has ended. This function therefore waits for a limited time until no task is left.
    """
    # A dispatcher has no `_num_tasks`; `int()` returns 0 in its place.
    tasks = getattr(server, "_num_tasks", int)
    end = time.monotonic() + _STOP_TIMEOUT
    while tasks() and time.monotonic() < end:
        time.sleep(0.1)
    if tasks():
        # Keep the server, because its destructor would stop it, too.
        _kept_alive.append(server)
        return
    server._stop()  # TensorFlow has no public method that stops a server
    server.join()
