"""Connections and memory of a rank grow with the logarithm of the number of ranks.

A rank that is connected to all others makes a job of P ranks cost P * P. The tests
count, so they do not depend on the speed of the machine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.launch import StartJob

SCRIPT = """
import json, os, sys

per_host = int(os.environ["PER_HOST"])
if per_host:
    host = int(os.environ["RINGJAX_RANK"]) // per_host
    os.environ["RINGJAX_HOSTNAME"] = f"host{host}"

import numpy as np
import ringjax
from ringjax import eager
from ringjax.control.listener import LinkListener
from ringjax.control.sealed_messages import MessageOpener
from ringjax.links import factory
from support.numpy_only import allreduce

counted = dict.fromkeys(("called", "accepted", "received"), 0)


def count(owner, name, entry, amount):
    inner = getattr(owner, name)

    def outer(*args, **options):
        counted[entry] += amount(*args)
        return inner(*args, **options)

    setattr(owner, name, outer)


count(factory, "authenticate", "called", lambda *args: 1)
count(LinkListener, "_admit", "accepted", lambda *args: 1)
count(MessageOpener, "feed", "received", lambda opener, piece: len(piece))


def host_memory():
    # The bytes that the memory of this host has allocated, in both lanes.
    blocks = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:ringjax"):
                found = os.stat(path)
                blocks[found.st_ino] = 512 * found.st_blocks
        except OSError:
            pass  # the descriptor that listed the folder
    return sum(blocks.values())


ringjax.init()
handshakes, size = counted["called"] + counted["accepted"], ringjax.size()
memory = host_memory()
for elements in (7, 1001, 100003):
    assert allreduce(np.ones(elements, "f4"))[-1] == size
    assert eager.allreduce(np.ones(elements, "f4"))[-1] == 1
    assert eager.broadcast(np.full(elements, ringjax.rank()), 0)[-1] == 0
assert len(eager.allgather(np.ones((3, 5), "f4"))) == 3 * size
found = {
    "handshakes": handshakes,
    "descriptors": len(os.listdir("/proc/self/fd")),
    "received": counted["received"],
    "memory": memory,
}
print("counts:", json.dumps(found), flush=True)
ringjax.shutdown()
"""

# For the ranks of a host, 0 for all: a and b of a + b * log2(P), which limits a count
# of each rank. On several hosts, a rank has five connections to each far neighbour:
# one for control, and two for the data of each lane. The bytes that a rank receives
# from the coordinator include the addresses of the neighbours that it calls.
LIMITS = {
    0: {"handshakes": (0, 3), "descriptors": (18, 2), "received": (400, 200)},
    4: {"handshakes": (-10, 10), "descriptors": (10, 10), "received": (400, 200)},
}


def counts_of(start_job: StartJob, size: int, per_host: int) -> list[dict[str, Any]]:
    """Runs a job, and returns the counts of its ranks."""
    env = {"PER_HOST": str(per_host), "RINGJAX_CALIBRATE": "off"}
    # Long limits, because many ranks share the cores of the machine.
    env |= {"RINGJAX_START_TIMEOUT": "600", "RINGJAX_FAILURE_TIMEOUT": "600"}
    job = start_job(size, SCRIPT, env=env)
    assert job.wait(55) == 0, job.logs()
    texts = (job.output(rank).partition("counts: ")[2] for rank in range(size))
    return [json.loads(text.splitlines()[0]) for text in texts]


@pytest.mark.parametrize("per_host", LIMITS)
@pytest.mark.parametrize(("size", "log"), [(16, 4), (32, 5)])
def test_a_rank_needs_as_much_as_the_logarithm_of_the_ranks(
    start_job: StartJob, size: int, log: int, per_host: int
) -> None:
    found = counts_of(start_job, size, per_host)
    for name, (a, b) in LIMITS[per_host].items():
        assert (a + 5 * b) / (a + 4 * b) < 1.5  # between 16 and 32 ranks
        assert max(counts[name] for counts in found) <= a + b * log, name
    # Rings of all pairs would be 240 and 992 rings of up to 1 MiB.
    assert max(counts["memory"] for counts in found) <= 64 << 20
