"""Links over libfabric next to TCP links: `sudo python -m benchmarks.hosts.fabric`.

Two processes in two network namespaces have one communicator for each kind of link, and
run allreduces on them in turns. A kind is `tcp:FLOWS`, or `fabric:PROVIDER:KIB:SLOTS`
with the size and the number of the large slots. RINGJAX_FABRIC_LIBRARY is the path of
libfabric; without it the loader searches. The ratios are to the first kind.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

import numpy as np
from support.namespaces import Namespaces, address

from benchmarks.harness.report import bytes_text, columns
from benchmarks.hosts.layouts import parse_size
from ringjax import _native

KINDS = ["tcp:1", "tcp:4", "fabric:tcp:64:16", "fabric:tcp:256:4", "fabric:tcp:512:4"]
WHICH = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"]
PORT, BURST, MOST_CALLS = 29500, 0.15, 300


class Peer:
    """Makes connections to the other process, each of which both ask for in turn."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.address, other = os.environ["BENCHMARK_ADDRESSES"].split(",")[
            :: 1 - 2 * rank
        ]
        # One listener for all: a connection that waits at a closed one would be lost.
        self.listener = (
            socket.create_server((self.address, PORT)) if rank == 0 else None
        )
        self._where = other, PORT

    def connect(self) -> socket.socket:
        sock = self.listener.accept()[0] if self.listener else self._patient()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _patient(self) -> socket.socket:
        for _ in range(200):
            try:
                return socket.create_connection(self._where)
            except OSError:  # nothing tells when the other process begins to listen
                time.sleep(0.05)
        raise ConnectionError(f"nobody listens at {self._where}")


def communicator(index: int, kind: str, peer: Peer) -> Any:
    """Makes a communicator of both processes with links of a kind."""
    what, *rest = kind.split(":")
    fabric: dict[str, float | str] | None = None
    if what == "fabric":
        library = os.environ.get("RINGJAX_FABRIC_LIBRARY", "")
        fabric = {"library": library, "provider": rest[0], "source": peer.address}
        fabric |= {"slot_bytes": int(rest[1]) << 10, "slots": int(rest[2])}
    flows = 1 if fabric else int(rest[0])
    sockets = [peer.connect().detach() for _ in range(flows)]
    return _native.Communicator(
        id=index + 1,
        name=kind,
        job=1,
        epoch=0,
        rank=peer.rank,
        hosts=[0, 1],
        members=[0, 1],
        links=[(1 - peer.rank, sockets, [])],
        options={},
        fabric=fabric,
        registered=False,
    )


def time_in_turns(rank: int, kinds: list[str], sizes: list[int], rounds: int) -> Any:
    """Returns the seconds of each call, by size and kind."""
    peer = Peer(rank)
    control = peer.connect()
    worlds = [communicator(i, kind, peer) for i, kind in enumerate(kinds)]
    spent: dict[tuple[int, str], list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for size in sizes:
            data = np.ones(size // 4, np.float32)
            for place in range(len(kinds)):
                each = (place + turn) % len(kinds)
                control.sendall(b"x")
                assert control.recv(1) == b"x"
                calls = measure(worlds[each], data, control)
                if turn > 0:
                    spent[size, kinds[each]] += calls
    control.close()
    for world in worlds:
        world.close()
    return spent


def measure(world: Any, data: Any, control: socket.socket) -> list[float]:
    """Times calls for about BURST seconds; the first one says how many fit."""
    calls: list[float] = []
    most = 1
    while len(calls) < most:
        data[:] = 1
        start = time.perf_counter()
        world.execute(*WHICH, [data], [data])
        calls.append(time.perf_counter() - start)
        if data[0] != 2 or data[-1] != 2:
            raise ArithmeticError(f"{world.name}: the sum is wrong")
        if len(calls) == 1:
            own = max(1, min(MOST_CALLS, int(BURST / calls[0])))
            control.sendall(own.to_bytes(4, "little"))
            most = min(own, int.from_bytes(control.recv(4), "little"))
    return calls


def table(spent: dict[tuple[int, str], list[float]], kinds: list[str]) -> str:
    rows = [["allreduce", *kinds]]
    for size in dict.fromkeys(size for size, _ in spent):
        medians = [statistics.median(spent[size, kind]) for kind in kinds]
        cells = [f"{1e6 * m:.1f} us {m / medians[0]:.2f}x" for m in medians]
        rows.append([bytes_text(size), *cells])
    return columns(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.sizes or [8, 4 << 10, 64 << 10, 1 << 20, 64 << 20]
    if options.rank is not None:
        spent = time_in_turns(options.rank, options.kinds, sizes, options.rounds)
        if options.rank == 0:
            print(table(spent, options.kinds))
        return
    addresses = ",".join(address(host) for host in range(2))
    env = os.environ | {"BENCHMARK_ADDRESSES": addresses}
    words = [sys.executable, "-m", "benchmarks.hosts.fabric", *sys.argv[1:], "--rank"]
    tag = f"{os.getpid():x}"[-5:]
    with tempfile.TemporaryFile() as log, Namespaces(2, None, tag) as hosts:
        ranks = [hosts.start(r, [*words, str(r)], env, log) for r in range(2)]
        codes = [process.wait() for process in ranks]
        log.seek(0)
        print(log.read().decode(), end="")
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
