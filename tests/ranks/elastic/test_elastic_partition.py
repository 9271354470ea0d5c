"""Two hosts whose network fails, or is listened to.

Where it fails, one side goes on and the other must not.

The hosts are network namespaces (tests/support/namespaces.py), so this needs root
and `ip`; the launcher is outside of both and starts its agents by a stand-in for ssh.
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
from chaos.deeds import Chaos, Deed, lines, recoveries
from support.doctor import needs_root
from support.handshakes import needs_tls
from support.launch import StartJob
from support.namespaces import LAUNCHER, Namespaces, address

_SO_RCVBUFFORCE = 33  # a constant of Linux that Python does not define
# A stand-in for OpenSSH: its words are options, a host, then words for the shell. The
# last number of the host's address is the number of its namespace.
SSH = """#!/bin/sh
while :; do case "$1" in -p|-i) shift 2;; -*) shift;; *) break;; esac; done
number=${1##*.}; shift
exec ip netns exec rj%sn$((number - 1)) env -u RINGJAX_SECRET sh -c "$*"
"""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=20)


pytestmark = [needs_root("ip"), pytest.mark.timeout(150)]


class Hosts:
    """Two hosts, the second of which can be cut off; a worker of its own on each."""

    def __init__(self, network: Namespaces, tag: str, folder: Path) -> None:
        self.network, self.tag = network, tag
        _ip(f"addr add {LAUNCHER}/24 dev {network._bridge}")
        bin_ = folder / "bin"
        bin_.mkdir()
        (bin_ / "ssh").write_text(SSH % tag)
        (bin_ / "ssh").chmod(0o755)
        self.env = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}

    def options(self, first: int, second: int) -> list[str]:
        """How many workers go where, in ringrun's words."""
        return ["-H", f"{address(0)}:{first},{address(1)}:{second}"]

    def cut(self, up: bool = False) -> None:
        """Pulls the second host's cable, or puts it back."""
        _ip(f"link set {self.network._links[1]} {'up' if up else 'down'}")

    def deafen(self) -> None:
        """Drops packets from the second host to the first, but not in return."""
        _ip(f"-n {self.network.names[1]} route add blackhole {address(0)}/32")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    tag = f"{os.getpid():x}"[-5:]
    with Namespaces(2, None, tag) as network:
        yield Hosts(network, tag, tmp_path)


def _chaos(start_job: StartJob, hosts: Hosts, folder: Path, first: int) -> Chaos:
    traces = folder / "traces"
    traces.mkdir()
    options = hosts.options(first, 1)
    chaos = Chaos(start_job, traces, np=first + 1, env=hosts.env, options=options)
    chaos.wait_for(first + 1)
    return chaos


def test_a_host_that_is_cut_off_is_lost_and_does_not_go_on(
    start_job: StartJob, hosts: Hosts, tmp_path: Path
) -> None:
    chaos = _chaos(start_job, hosts, tmp_path, first=2)
    cut = Deed(time.monotonic(), "cut", 2)
    hosts.cut()
    chaos.wait_for_steps(50)
    hosts.cut(up=True)
    chaos.wait_for_end_of(2, 30)  # the cable is back, so it receives its dismissal
    verdict = chaos.end()
    assert verdict.smallest == 2
    traces = {int(p.stem): lines(p) for p in chaos.folder.glob("*.jsonl")}
    assert len(list(recoveries(cut, traces))) == 2
    # No step on the other side of the cut: nobody may train in two places.
    assert all(0 in line["who"] for line in traces[2])


def test_a_host_that_hears_but_is_not_heard(
    start_job: StartJob, hosts: Hosts, tmp_path: Path
) -> None:
    chaos = _chaos(start_job, hosts, tmp_path, first=1)
    hosts.deafen()  # but both still reach the launcher, which decides
    # A worker that comes to that host cannot reach the other one, and leaves it alone.
    chaos.wait_for_steps(50)
    verdict = chaos.end()
    assert verdict.smallest == 1


# A whole sentence, so that no other bytes are taken for it.
SECRET = b"what one rank tells another one and nobody else"
TALK = f"""
import numpy as np
import ringjax
from ringjax import eager
ringjax.init()
mine = np.frombuffer({SECRET!r}, np.uint8) * (ringjax.rank() == 0)
heard = eager.broadcast(mine.astype(np.uint8), root_rank=0)
assert heard.tobytes() == {SECRET!r}
print("heard", *sorted(ringjax.runtime.communicator().stats()["transports"]))
ringjax.shutdown()
"""


@pytest.mark.parametrize("tls", ["off", pytest.param("required", marks=needs_tls)])
def test_who_listens_between_hosts_reads_what_is_not_encrypted_and_nothing_else(
    start_job: StartJob, hosts: Hosts, tls: str
) -> None:
    everything = socket.htons(0x3)  # ETH_P_ALL
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything) as tap:
        tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        tap.setblocking(False)
        tap.bind((hosts.network._links[1], 0))
        env = hosts.env | {"RINGJAX_TLS": tls}
        job = start_job(2, TALK, env, hosts.options(1, 1))
        assert job.wait(60) == 0, job.logs()
        heard = [job.output(rank).strip() for rank in (0, 1)]
        assert heard == ["heard tcp"] * 2, job.logs()
        seen = bytearray()
        with contextlib.suppress(BlockingIOError):
            while True:
                seen += tap.recv(1 << 16)
    assert len(seen) > 10_000
    assert (SECRET in seen) == (tls == "off")
