"""One rank of one peer: executes requests of the program that alternates between peers.

worlds.py starts this program. An idle rank sleeps in a read, so that it does not slow
the peer whose turn it is. peers/table.py lists the libraries.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import time
import traceback
from typing import Any

import numpy as np

from benchmarks.harness import patterns
from benchmarks.peers.adapter import KINDS, Operation, Peer, Shapes
from benchmarks.peers.table import PEERS


def run(peer: Peer, step: Operation, batches: int, calls: int) -> dict[str, Any]:
    """Runs batches; returns seconds per call of each batch, and CPU seconds."""
    timed = getattr(step, "seconds", None) or functools.partial(_seconds, step)
    before = time.process_time()
    peer.total(0.0)  # all ranks start together
    seconds = [timed(calls) / calls for _ in range(batches)]
    return {"seconds": seconds, "cpu": time.process_time() - before}


def _seconds(step: Operation, calls: int) -> float:
    repeat = getattr(step, "repeat", None)
    start = time.perf_counter()
    if repeat is not None:
        repeat(calls)
    else:
        for _ in range(calls):
            step()
    return time.perf_counter() - start


class Fresh:
    """An operation for which all ranks write their input again before each call.

    The time of the operation does not include these writes.
    """

    def __init__(self, step: Operation, given: np.ndarray[Any, Any]) -> None:
        self._step, self._given = step, given

    def __call__(self) -> Any:
        self._given.fill(0)
        return self._step()

    def seconds(self, calls: int) -> float:
        taken = 0.0
        for _ in range(calls):
            self._given.fill(0)
            start = time.perf_counter()
            self._step()
            taken += time.perf_counter() - start
        return taken


def check(peer: Peer) -> None:
    """Checks that the peer really adds the inputs of all ranks."""
    total, right = peer.total(peer.rank + 1.0), peer.size * (peer.size + 1) / 2
    if total != right:
        raise ArithmeticError(f"the sum of 1..{peer.size} came out as {total}")


def collective(peer: Peer, variant: str, count: int, fresh: bool = False) -> Operation:
    """Returns a collective after a check of one result, perhaps with `Fresh` input.

    Raises:
      ArithmeticError: the result is wrong.
    """
    name = variant.partition(": ")[0]
    array = patterns.input_of(name, peer.rank, peer.size, count)
    right = patterns.expected(name, peer.rank, peer.size, count)
    out = patterns.output_for(name, array, right)
    step = peer.collective(variant, array, out)
    result = step()
    got = out if result is None else peer.local(result)
    if not np.array_equal(got.reshape(-1), right):
        raise ArithmeticError(f"{variant} of {count} numbers came out wrong")
    array.fill(0)  # zeros, because sums in place would grow with each call
    return Fresh(step, array) if fresh else step


class Worker:
    """Replies to requests. Operations live until the next `prepare`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._steps: dict[str, Operation] = {}

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "prepare":
            self._steps.clear()  # clear first, so that memory is not held twice
            shapes = [tuple(s) for s in request["shapes"]]
            for variant in request["variants"]:
                self._steps[variant] = self._make(variant, shapes, request)
            return {}
        step = self._steps[request["variant"]]
        return run(self._peer, step, request["batches"], request["calls"])

    def _make(self, variant: str, shapes: Shapes, request: dict[str, Any]) -> Operation:
        if request["collective"]:
            return collective(self._peer, variant, shapes[0][0], request["fresh"])
        if request["network"]:
            return self._peer.training(variant, request["network"])
        return self._peer.operation(variant, shapes, request["dtype"])


def main() -> None:
    """Joins the peer's world, sends a hello, and replies until the connection ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.harness.worker")
    parser.add_argument("socket")
    parser.add_argument("peer", choices=PEERS)
    for number in ("rank", "size", "port"):
        parser.add_argument(f"--{number}", type=int, default=0)
    options = parser.parse_args()
    peer = PEERS[options.peer].kind(options.rank, options.size, options.port)
    check(peer)
    worker = Worker(peer)
    said = ("rank", "version", "dtypes", "networks", *KINDS)
    hello = {name: getattr(peer, name) for name in said} | {"pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.socket)
        with connection.makefile("rw") as stream:
            print(json.dumps(hello), file=stream, flush=True)
            for line in stream:
                try:
                    text = json.dumps(worker.reply(json.loads(line)))
                except Exception:
                    text = json.dumps({"error": traceback.format_exc()})
                print(text, file=stream, flush=True)
    peer.close()


if __name__ == "__main__":
    main()
