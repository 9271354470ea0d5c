"""One rank of a job between hosts: times the items of a plan, in turns.

collectives.py starts this program on a host, with the variables of a rank. Every item
of the plan gets a short burst in each round, so that other work of the machine slows
all items equally. Rank 0 prints the results as JSON, one line for each item.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import ringjax
from benchmarks.harness import machine, patterns
from ringjax import _native, runtime

Step = Callable[[], Any]
CHUNK = 1 << 20  # bytes of a call on a plain stream
BURST, MOST_CALLS = 0.15, 50  # most seconds and calls of a turn


class Core:
    """Calls of ringjax's core, for the measurement and for agreement between ranks."""

    def __init__(self) -> None:
        self.communicator = runtime.communicator()

    def call(self, name: str, given: Any, out: Any, op: str = "Sum") -> None:
        """Calls a collective on numpy arrays, perhaps in place, with root 0."""
        part = max(given.size, out.size) // ringjax.size()
        counts = {"allreduce": 0, "broadcast": 0, "alltoall": 2}.get(name, 1)
        which = _native.COLLECTIVES[name], _native.REDUCE_OPS[op]
        rows = [part] * (counts * ringjax.size())
        self.communicator.execute(*which, [given], [out], counts=rows)

    def allreduce(self, array: Any, op: str = "Sum") -> Any:
        self.call("allreduce", array, array, op)
        return array

    def collective(self, name: str, count: int) -> tuple[Step, str]:
        """Returns a call after a check of its result, and the name of the algorithm."""
        place = ringjax.rank(), ringjax.size(), count
        array, right = patterns.input_of(name, *place), patterns.expected(name, *place)
        out = patterns.output_for(name, array, right)
        before = self.algorithms(name)
        self.call(name, array, out)
        if not np.array_equal(out, right):
            raise ArithmeticError(
                f"rank {place[0]}: {name} of {count} numbers is wrong"
            )
        used = [a for a, n in self.algorithms(name).items() if n > before.get(a, 0)]
        array.fill(0)  # zeros, because sums in place would grow with each call
        return partial(self.call, name, array, out), "+".join(used)

    def algorithms(self, name: str) -> dict[str, int]:
        """Returns how often each algorithm has been used."""
        return dict(self.communicator.stats().get(name, {}).get("algorithms", {}))

    def exposed(self) -> float:
        """Returns the seconds for which this rank has waited for buckets so far."""
        seconds = self.communicator.stats().get("overlap", {}).get("exposed_seconds", 0)
        return float(seconds)


class Streams:
    """The limit: plain TCP from the first rank of each host to the next host.

    Args:
      flows: connections in each direction of the ring.
      ring: rank and address of the first rank of each host.
    """

    def __init__(self, flows: int, ring: Sequence[tuple[int, str]], core: Core) -> None:
        self._ends: list[tuple[socket.socket, Callable[..., None]]] = []
        self._flows = flows
        ranks, addresses = zip(*ring, strict=True)
        ports = np.zeros(len(ring), np.int64)
        if ringjax.rank() not in ranks:
            core.allreduce(ports)
            return
        place = ranks.index(ringjax.rank())
        ahead = (place + 1) % len(ring)
        with socket.create_server((addresses[place], 0), backlog=flows) as server:
            ports[place] = server.getsockname()[1]
            core.allreduce(ports)
            for _ in range(flows):
                where = (addresses[ahead], int(ports[ahead]))
                self._ends.append((socket.create_connection(where, 30), _send))
            for _ in range(flows):
                self._ends.append((server.accept()[0], _receive))
        for end, _ in self._ends:
            end.settimeout(60)
        self._threads = ThreadPoolExecutor(len(self._ends))

    def move(self, size: int) -> None:
        """Sends and receives `size` bytes at the same time."""
        if self._ends:
            jobs: list[Future[None]] = [
                self._threads.submit(work, end, size // self._flows)
                for end, work in self._ends
            ]
            for job in jobs:
                job.result()

    def close(self) -> None:
        for end, _ in self._ends:
            end.close()
        if self._ends:
            self._threads.shutdown()


def _send(end: socket.socket, size: int) -> None:
    chunk = memoryview(bytes(CHUNK))
    while size > 0:
        size -= end.send(chunk[: min(size, CHUNK)])


def _receive(end: socket.socket, size: int) -> None:
    chunk = memoryview(bytearray(CHUNK))
    while size > 0:
        got = end.recv_into(chunk[: min(size, CHUNK)])
        if got == 0:
            raise ConnectionError("the other end of a plain stream has gone")
        size -= got


class Item:
    """An operation that is timed, and its bursts so far."""

    def __init__(self, about: dict[str, Any], step: Step, least: int = 1) -> None:
        self.about, self.step, self.least = about, step, least
        self.calls = 1
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.wall = self.busy = 0.0

    def burst(self, core: Core) -> float:
        """Runs a burst; returns the seconds per call on the slowest rank."""
        core.allreduce(np.zeros(1))  # all ranks start together
        wall, busy = time.perf_counter(), machine.cpu_seconds()
        waited = [core.exposed()]
        for _ in range(self.calls):
            self.step()
            waited.append(core.exposed())
        own = time.perf_counter() - wall
        self.wall, self.busy = self.wall + own, self.busy + machine.cpu_seconds() - busy
        # The last rank waits only for the network, and the other ranks also for that
        # rank.
        self.exposed.append(float(np.mean(core.allreduce(np.diff(waited), "Min"))))
        return float(core.allreduce(np.array([own / self.calls]), "Max")[0])

    def settle(self, core: Core) -> None:
        """Warms up and chooses the calls of a burst, the same on all ranks."""
        self.burst(core)
        wanted = round(BURST / self.burst(core))
        self.calls = max(self.least, min(MOST_CALLS, wanted))
        self.wall = self.busy = 0.0
        self.exposed.clear()

    def result(self) -> dict[str, Any]:
        busy = self.busy / (self.wall * (os.cpu_count() or 1))
        return {
            **self.about,
            "seconds": statistics.median(self.seconds),
            "rounds": self.seconds,
            "exposed": statistics.median(self.exposed),
            "busy": min(1.0, busy),
        }


def in_turns(items: Sequence[Item], rounds: int, core: Core) -> None:
    """Times all items, some calls each in every round; prints them on rank 0."""
    for item in items:
        item.settle(core)
    for turn in range(rounds):
        first = turn % len(items)  # the order changes, so that neighbours change, too
        for item in (*items[first:], *items[:first]):
            item.seconds.append(item.burst(core))
    if ringjax.rank() == 0:
        for item in items:
            print(json.dumps(item.result()), flush=True)


def sizes(plan: dict[str, Any], core: Core) -> None:
    """Times each collective and size, next to plain streams with the least bytes."""
    streams = [Streams(flows, plan["ring"], core) for flows in plan["flows"]]
    for name, size, crossing in plan["cases"]:
        about = {"collective": name, "size": size}
        step, algorithm = core.collective(name, size // 4)
        kind = {"kind": "collective", "algorithm": algorithm}
        items = [Item(about | kind, step)]
        for flows, plain in zip(plan["flows"], streams, strict=True):
            kind = {"kind": "streams", "flows": flows}
            items.append(Item(about | kind, partial(plain.move, crossing)))
        in_turns(items, plan["rounds"], core)
    for plain in streams:
        plain.close()


# -- a real model ----------------------------------------------------------------------

CHANNELS, DENSE, CLASSES = (3, 32, 64, 128, 256), 512, 10


def parameters() -> list[Any]:
    """Returns a convolutional network: most numbers are last, most work is first."""
    import jax.numpy as jnp

    make, layers = np.random.default_rng(0), []
    for inner, outer in pairwise(CHANNELS):
        layers.append(make.normal(0, (9 * inner) ** -0.5, (3, 3, inner, outer)))
    flat = CHANNELS[-1] * 16
    layers.append(make.normal(0, flat**-0.5, (flat, DENSE)))
    layers.append(make.normal(0, DENSE**-0.5, (DENSE, CLASSES)))
    return [jnp.asarray(layer, jnp.float32) for layer in layers]


def loss(layers: list[Any], images: Any, labels: Any) -> Any:
    """Returns the cross entropy of images of 32 x 32 points."""
    import jax
    import jax.numpy as jnp

    x = images
    for i, kernel in enumerate(layers[: len(CHANNELS) - 1]):
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
        if i > 0:  # use averages of 2 x 2 points
            n, h, w, c = x.shape
            x = x.reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ layers[-2])
    logits = jax.nn.log_softmax(x @ layers[-1])
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(labels, CLASSES), axis=1))


def model(plan: dict[str, Any], core: Core) -> None:
    """Times a step with allreduce after, during and without the backward pass."""
    import jax
    import jax.numpy as jnp

    make = np.random.default_rng(1 + ringjax.rank())
    shape = (plan["batch"], 32, 32, 3)
    images = jnp.asarray(make.normal(size=shape), jnp.float32)
    labels = jnp.asarray(make.integers(0, CLASSES, plan["batch"]))

    def item(name: str, overlap: bool | None) -> Item:
        change = ringjax.allreduce_grads(
            # Arguments that are not given are chosen by autotune.
            overlap="auto" if name == "tuned" else bool(overlap),
            bucket_bytes=None if name == "tuned" else plan["bucket_bytes"],
        )

        def step(layers: Any, state: Any) -> Any:
            gradients = layers
            if name != "alone":
                gradients = jax.grad(loss)(layers, images, labels)
            if overlap is not None:
                gradients, state = change.update(gradients, state)
            rate = 0.0 if name == "alone" else 1e-3
            pairs = zip(layers, gradients, strict=True)
            return [layer - rate * g for layer, g in pairs], state

        compile_step = ringjax.autotune if name == "tuned" else jax.jit
        compiled = compile_step(step, donate_argnums=(0, 1))
        layers = parameters()
        held = [layers, change.init(layers)]

        def call() -> None:
            held[:] = jax.block_until_ready(compiled(*held))

        while name == "tuned" and compiled._settled is None:
            call()
        size = sum(int(x.nbytes) for x in layers)
        return Item({"kind": "model", "variant": name, "size": size}, call, 2)

    variants = {"none": None, "in turn": False, "overlapped": True, "alone": False}
    variants["tuned"] = True
    items = [item(name, overlap) for name, overlap in variants.items()]
    in_turns(items, plan["rounds"], core)


def main() -> None:
    """Joins the world and runs the plan."""
    plan = json.loads(sys.argv[1])
    ringjax.init()
    core = Core()
    core.allreduce(np.zeros(1))
    if plan["cases"]:
        sizes(plan, core)
    if plan["batch"]:
        model(plan, core)
    ringjax.shutdown()


if __name__ == "__main__":
    main()
