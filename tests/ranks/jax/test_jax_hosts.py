"""JAX's own collectives between two hosts, with two processes on each.

The hosts are network namespaces (tests/support/namespaces.py), which need root.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from support import leaks
from support.doctor import needs_root
from support.handshakes import needs_tls
from support.jax_processes import HEAD, VARIABLES
from support.launch import StartJob, environment
from support.namespaces import LAUNCHER, Namespaces, address

from ringjax.settings import mpi_library

pytestmark = [needs_root("ip"), pytest.mark.timeout(150)]

RANKS, PER_HOST = 4, 2
PORT = 23456  # of JAX's coordinator: the hosts have no other programs
WHERE = f"{address(0)}:{PORT}"

COLLECTIVES = """
from ringjax.world import call_records
for kind in "int32", "float32":
    for n in 1, 3000, 200_000:
        value = (np.arange(size * size * n) % 5).astype(kind).reshape(size, size * n)
        own = value[rank]
        got = on(lambda x: lax.psum(x, "p"), value)[0]
        np.testing.assert_array_equal(got, value.sum(0))
        got = on(lambda x: lax.psum_scatter(x[0], "p", tiled=True)[None], value)[0]
        np.testing.assert_array_equal(got, value.sum(0).reshape(size, n)[rank])
        got = on(lambda x: lax.all_gather(x[0], "p")[None], value)[0]
        np.testing.assert_array_equal(got, value)
        ring = [(i, (i + 1) % size) for i in range(size)]
        got = on(lambda x: lax.ppermute(x, "p", ring), value)[0]
        np.testing.assert_array_equal(got, value[(rank - 1) % size])
        got = on(lambda x: lax.all_to_all(x, "p", 1, 1, tiled=True), value)[0]
        blocks = value.reshape(size, size, n)[:, rank]
        np.testing.assert_array_equal(got, blocks.ravel())
# A sum inside of each host, and one of each process and its peer on the other host.
grid = devices.reshape(2, 2)
value = np.arange(4, dtype=np.float32).reshape(4, 1)
row, column = divmod(rank, 2)
spec = P(("x", "y"))
for axis, members in ("y", (2 * row, 2 * row + 1)), ("x", (column, column + 2)):
    f = program(lambda x: lax.psum(x, axis), grid, ("x", "y"), spec)
    got = local(f(array(value, grid, ("x", "y"), spec)))
    assert got[0, 0] == sum(members), (axis, got)
links = {}
for communicator in call_records.world_apart().communicators.values():
    for kind, count in communicator.stats()["transports"].items():
        links[kind] = max(links.get(kind, 0), count)
assert links == {"shm": 1, "tcp": 2}, links
published = dict(store.key_value_dir_get("ringjax/"))
(found,) = [v for k, v in published.items() if "coordinator" in k]
if rank == 0:
    print("coordinator:", found, flush=True)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("end")
print("all right", flush=True)
"""
LOSS = """
f = program(lambda x: lax.psum(x, "p"))
x = array(np.ones((size, 4), np.float32))
local(f(x))
store.wait_at_barrier("ready", 50_000)
print("ready", flush=True)
text = error_of(lambda: [local(f(x)) for _ in range(10**9)])
print(text.splitlines()[0], flush=True)
os._exit(0)  # without JAX's barrier at the exit
"""


@pytest.fixture
def network() -> Iterator[Namespaces]:
    with Namespaces(2, None, f"j{os.getpid() % 10_000}") as namespaces:
        run(f"ip addr add {LAUNCHER}/24 dev {namespaces._bridge}")
        yield namespaces


def run(command: str) -> None:
    subprocess.run(command.split(), capture_output=True, check=True, timeout=20)


class Processes:
    """Processes of jax.distributed on the hosts, started without a launcher."""

    def __init__(
        self, network: Namespaces, folder: Path, lines: str, **more: str
    ) -> None:
        self._logs = [folder / str(rank) for rank in range(RANKS)]
        wanted = VARIABLES | mpi_library.variables(VARIABLES) | more
        self.running = []
        for rank, path in enumerate(self._logs):
            words = [sys.executable, "-P", "-c", HEAD + dedent(lines)]
            with path.open("wb") as log:
                self.running.append(
                    network.start(
                        rank // PER_HOST,
                        [*words, str(rank), str(RANKS), WHERE],
                        environment("hosts", wanted),
                        log,
                    )
                )

    def texts(self) -> list[str]:
        """Returns what each process has printed."""
        return [path.read_text() for path in self._logs]

    def wait_for(self, text: str, ranks: Sequence[int] = range(RANKS)) -> None:
        late = leaks.settle(
            lambda: [str(r) for r in ranks if text not in self.texts()[r]], 90
        )
        assert not late, self.texts()

    def wait(self, ranks: Sequence[int] = range(RANKS)) -> None:
        for rank in ranks:
            assert self.running[rank].wait(90) == 0, self.texts()


@pytest.mark.parametrize("tls", ["auto", pytest.param("required", marks=needs_tls)])
def test_collectives_between_hosts(
    network: Namespaces, tmp_path: Path, tls: str
) -> None:
    processes = Processes(network, tmp_path, COLLECTIVES, RINGJAX_TLS=tls)
    processes.wait()
    first, *others = processes.texts()
    assert [text.splitlines()[-1] for text in (first, *others)] == ["all right"] * RANKS
    found = json.loads(first.splitlines()[0].removeprefix("coordinator: "))["value"]
    # Without a launcher JAX's store is the only way to pass on a secret.
    assert len(found["secret"]) == 64
    assert found["addresses"].startswith(f"{address(0)}:")


def test_a_process_that_is_killed_on_one_host_is_named_on_the_other(
    network: Namespaces, tmp_path: Path
) -> None:
    processes = Processes(network, tmp_path, LOSS)
    processes.wait_for("ready")
    os.kill(processes.running[3].pid, signal.SIGKILL)
    processes.wait([0, 1, 2])
    for text in processes.texts()[:3]:
        error = text.splitlines()[1]
        assert "rank 3 closed its connection" in error and "psum" in error, text


def test_a_host_that_is_cut_off_is_named(network: Namespaces, tmp_path: Path) -> None:
    more = {"RINGJAX_FAILURE_TIMEOUT": "2", "RINGJAX_HEARTBEAT": "0.2"}
    processes = Processes(network, tmp_path, LOSS, **more)
    processes.wait_for("ready")
    run(f"ip -n {network.names[1]} link set eth0 down")
    processes.wait()
    for rank, text in enumerate(processes.texts()):
        lost = "[23]" if rank < PER_HOST else "[01]"
        error = text.splitlines()[1]
        assert re.search(f"rank {lost} has been silent", error), text


def test_ringrun_starts_programs_on_two_hosts(
    network: Namespaces, start_job: StartJob, tmp_path: Path
) -> None:
    slots = ",".join(f"{address(host)}:{PER_HOST}" for host in range(2))
    words = 'os.environ["RINGJAX_RANK"], os.environ["RINGJAX_SIZE"]'
    job = start_job(
        RANKS,
        f'import os, sys\nsys.argv[1:] = [{words}, "{WHERE}"]\n{HEAD}{COLLECTIVES}',
        {},
        ["-H", slots, *network.agent_options(tmp_path), "--jax-collectives"],
    )
    assert job.wait(90) == 0, job.logs()
    for rank in range(RANKS):
        assert "all right" in job.output(rank), job.logs()
    (line,) = [x for x in job.output(0).splitlines() if x.startswith("coordinator: ")]
    # All processes derive the secret from that of the job.
    assert json.loads(line.removeprefix("coordinator: "))["value"]["secret"] == ""
