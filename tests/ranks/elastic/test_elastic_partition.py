"""Two hosts whose network is partitioned, or whose packets are captured.

After a partition, only one side may continue to train. The hosts are network namespaces
(tests/support/namespaces.py), so the tests need root and `ip`. ringrun is outside of
both namespaces and starts its agents by a script that replaces ssh.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.faults import ChaosJob, Fault, lines, recoveries
from support.doctor import needs_root
from support.handshakes import needs_tls
from support.launch import StartJob
from support.namespaces import LAUNCHER, Namespaces, address

_SO_RCVBUFFORCE = 33  # a constant of Linux that Python does not define
# Replaces OpenSSH. The arguments are options, a host, and a command for the shell. The
# last number of the address of the host is one more than the number of its namespace.
SSH = """#!/bin/sh
while :; do case "$1" in -p|-i) shift 2;; -*) shift;; *) break;; esac; done
number=${1##*.}; shift
exec ip netns exec rj%sn$((number - 1)) env -u RINGJAX_SECRET sh -c "$*"
"""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=20)


pytestmark = [needs_root("ip"), pytest.mark.timeout(150)]


class Hosts:
    """Two hosts, the second of which can be cut off from the network."""

    def __init__(self, network: Namespaces, tag: str, folder: Path) -> None:
        self.network, self.tag = network, tag
        _ip(f"addr add {LAUNCHER}/24 dev {network._bridge}")
        bin_ = folder / "bin"
        bin_.mkdir()
        (bin_ / "ssh").write_text(SSH % tag)
        (bin_ / "ssh").chmod(0o755)
        self.env = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}

    def options(self, first: int, second: int) -> list[str]:
        """Returns the option -H for `first` and `second` slots on the two hosts."""
        return ["-H", f"{address(0)}:{first},{address(1)}:{second}"]

    def set_link(self, state: str) -> None:
        """Sets the network link of the second host "down" or "up"."""
        _ip(f"link set {self.network._links[1]} {state}")

    def block_replies(self) -> None:
        """Drops all packets from the second host to the first, one direction only."""
        _ip(f"-n {self.network.names[1]} route add blackhole {address(0)}/32")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    tag = f"{os.getpid():x}"[-5:]
    with Namespaces(2, None, tag) as network:
        yield Hosts(network, tag, tmp_path)


def _chaos(start_job: StartJob, hosts: Hosts, folder: Path, first: int) -> ChaosJob:
    traces = folder / "traces"
    traces.mkdir()
    options = hosts.options(first, 1)
    chaos = ChaosJob(start_job, traces, np=first + 1, env=hosts.env, options=options)
    chaos.wait_for_workers(first + 1)
    return chaos


def test_a_host_that_is_cut_off_is_lost_and_stops_training(
    start_job: StartJob, hosts: Hosts, tmp_path: Path
) -> None:
    chaos = _chaos(start_job, hosts, tmp_path, first=2)
    cut = Fault(time.monotonic(), "cut", 2)
    hosts.set_link("down")
    chaos.wait_for_steps(50)
    hosts.set_link("up")
    chaos.wait_for_exit(2, 30)  # the link is up, so worker 2 learns that it is fenced
    result = chaos.end()
    assert result.smallest == 2
    traces = {int(p.stem): lines(p) for p in chaos.folder.glob("*.jsonl")}
    assert len(list(recoveries(cut, traces))) == 2
    # Worker 2 made no step without worker 0, so only one side has trained.
    assert all(0 in line["workers"] for line in traces[2])


def test_a_host_that_receives_but_cannot_send(
    start_job: StartJob, hosts: Hosts, tmp_path: Path
) -> None:
    chaos = _chaos(start_job, hosts, tmp_path, first=1)
    hosts.block_replies()  # both hosts still reach ringrun, whose coordinator decides
    # A replacement on the second host cannot connect to the first, and is not admitted.
    chaos.wait_for_steps(50)
    result = chaos.end()
    assert result.smallest == 1


# A sentence, because no other packet contains these bytes by chance.
SECRET = b"what one rank tells another one and nobody else"
BROADCAST_SECRET = f"""
import numpy as np
import ringjax
from ringjax import eager
ringjax.init()
mine = np.frombuffer({SECRET!r}, np.uint8) * (ringjax.rank() == 0)
received = eager.broadcast(mine.astype(np.uint8), root_rank=0)
assert received.tobytes() == {SECRET!r}
print("received by", *sorted(ringjax.runtime.communicator().stats()["transports"]))
ringjax.shutdown()
"""


@pytest.mark.parametrize("tls", ["off", pytest.param("required", marks=needs_tls)])
def test_data_between_hosts_are_readable_only_without_tls(
    start_job: StartJob, hosts: Hosts, tls: str
) -> None:
    all_protocols = socket.htons(0x3)  # ETH_P_ALL
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, all_protocols) as sniffer:
        sniffer.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        sniffer.setblocking(False)
        sniffer.bind((hosts.network._links[1], 0))
        env = hosts.env | {"RINGJAX_TLS": tls}
        job = start_job(2, BROADCAST_SECRET, env, hosts.options(1, 1))
        assert job.wait(60) == 0, job.logs()
        outputs = [job.output(rank).strip() for rank in (0, 1)]
        assert outputs == ["received by tcp"] * 2, job.logs()
        packets = bytearray()
        with contextlib.suppress(BlockingIOError):
            while True:
                packets += sniffer.recv(1 << 16)
    assert len(packets) > 10_000
    assert (SECRET in packets) == (tls == "off")
