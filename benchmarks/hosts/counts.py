"""Thousands of ranks, counted: `python -m benchmarks.hosts.counts`.

No job of this size runs. The functions of ringjax that decide what a rank does run for
4,096 and 27,600 ranks: the graph of neighbours, the rules of the coordinator with
simulated time, the encoding of its messages, and the plan of a ring. The table shows
what they count, beside the prediction that was made before they were written.
"""

from __future__ import annotations

import argparse
import hmac
import random
import resource
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import jobs, report
from benchmarks.hosts.many_ranks import hello
from ringjax.control.number_lists import compress
from ringjax.control.sealed_messages import encode
from ringjax.links.standing import neighbours
from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.membership import JobMembership

STREAMS, LANES = 2, 2
# Descriptors of a rank without neighbours. A job of 16 ranks on hosts of 4 has 46 of
# them at most and makes 13.5 connections a rank, one of 32 ranks 56 and 18.5
# (tests/ranks/test_counts.py). `links_of` returns these numbers.
OWN_DESCRIPTORS = 18
SHAPES = ((4096, 8), (27600, 6))
SAMPLE = 8  # lost ranks, of many, whose news are followed
SEALS = 100  # ranks whose messages are encoded and sealed
# By quantity, for the two shapes.
PREDICTED = {
    "neighbours of a rank": (23, 30),
    "... on other hosts": (20, 27),
    "descriptors of a rank": (140, 180),
    "TCP connections of the job": (0.2e6, 1.9e6),
    "connections that a rank makes": (63, 84),
    "heartbeats a second, job": (94e3, 828e3),
    "hops: 1 rank lost": (5, 6),
    "hops: 5 % of hosts lost": (5, 6),
    "hops: 16 hosts in a row lost": (5, 6),
    "... least neighbours left": (10, 18),
    "messages that tell a loss": (94e3, 828e3),
    "rules of a start, s": (None, None),
    "rules of an epoch, s": (0.05, 0.3),
    "members, for a rank, kB": (4.6, 5.8),
    "members, for all ranks, MB": (19, 160),
    "... encoded and sealed, s": (0.2, 1.5),
    "plan of a ring, ms": (5, 30),
}
Found = dict[str, float]


@contextmanager
def cpu(found: Found, name: str) -> Iterator[None]:
    """Adds the CPU seconds of the block to an entry."""
    before = time.process_time()
    yield
    found[name] = found.get(name, 0.0) + time.process_time() - before


# -- the graph -------------------------------------------------------------------------


def graph_of(size: int, per_host: int) -> list[list[int]]:
    """Returns the neighbours of all ranks.

    All hosts are full, so the neighbours of a rank are those of the rank at its
    position on the first host, moved. Some ranks are computed as ranks do.
    """
    hosts = [rank // per_host for rank in range(size)]
    first = [neighbours(rank, hosts) for rank in range(per_host)]

    def moved(rank: int) -> list[int]:
        position = rank % per_host
        return sorted((n + rank - position) % size for n in first[position])

    for rank in random.Random(size).sample(range(size), 50):
        assert moved(rank) == neighbours(rank, hosts)
    return [moved(rank) for rank in range(size)]


def links_of(graph: Sequence[Sequence[int]], per_host: int) -> Found:
    """Counts the neighbours and the connections of the ranks."""
    size, most = len(graph), max(map(len, graph))
    far = [sum(n // per_host != r // per_host for n in graph[r]) for r in range(size)]
    data, passed = LANES * STREAMS, sum(len(found) for found in graph)
    # Within a host, the memory of the second lane goes along connections that are
    # closed again: one for each rank except the first.
    made = passed / 2 + sum(far) / 2 * data + (LANES - 1) * size * (1 - 1 / per_host)
    return {
        "neighbours of a rank": most,
        "... on other hosts": max(far),
        "descriptors of a rank": OWN_DESCRIPTORS + most + max(far) * data,
        "TCP connections of the job": sum(far) / 2 * (1 + data),
        "connections that a rank makes": made / size,
        "heartbeats a second, job": sum(far),  # the others are stores into memory
        "messages that tell a loss": passed,
    }


def hops(graph: Sequence[Sequence[int]], gone: Collection[int]) -> int:
    """Returns after how many hops all other ranks know that some ranks are lost.

    The neighbours of a lost rank notice its loss, and each rank passes it on.
    """
    most = 0
    for lost in random.Random(3).sample(sorted(gone), min(len(gone), SAMPLE)):
        seen = {*gone, *graph[lost]}
        latest = set(graph[lost]).difference(gone)
        count = 0
        while latest := {n for rank in latest for n in graph[rank]} - seen:
            seen |= latest
            count += 1
        assert len(seen) == len(graph), "the ranks that are left are not connected"
        most = max(most, count)
    return most


def losses(graph: Sequence[Sequence[int]], per_host: int) -> Found:
    size, choice = len(graph), random.Random(5)
    row = range(7 * per_host, 23 * per_host)
    hosts = choice.sample(range(size // per_host), size // per_host // 20)
    some = {host * per_host + p for host in hosts for p in range(per_host)}
    return {
        "hops: 1 rank lost": hops(graph, {size // 3}),
        "hops: 5 % of hosts lost": hops(graph, some),
        "hops: 16 hosts in a row lost": hops(graph, row),
        "... least neighbours left": min(len({*graph[r]}.difference(row)) for r in row),
    }


# -- the coordinator -------------------------------------------------------------------


def coordinate(graph: Sequence[Sequence[int]]) -> Found:
    """Starts a job and loses a rank, with all rules and messages, but no sockets."""
    size, found, now = len(graph), Found(), 0.0
    rules = JobMembership(MembershipConfig(np=size, min_np=1, max_np=size))
    sent: list[tuple[int, Any, bool]] = []

    def settle() -> None:  # as the coordinator does after each message
        sent.extend(rules.drain()[0])
        rules.deadline()

    hellos = [hello(rank, size) for rank in range(size)]
    with cpu(found, "rules of a start, s"):
        for rank in range(size):
            rules.on_hello(rank, "10.0.0.1", hellos[rank], None, now)
            settle()
    tables = [message for _, message, _ in sent if message["type"] == "members"]
    assert len(tables) == size
    sent.clear()
    with cpu(found, "encoded"):
        table = encode(tables[0])
    sample = random.Random(6).sample(range(size), SEALS)
    with cpu(found, "sealed"):
        for rank in sample:
            called = [r for r in graph[rank] if r < rank]
            question = {"type": "locate", "epoch": 0, "ranks": compress(called)}
            rules.on_message(rank, question | {"number": 0}, now)
            settle()
        answers = [encode(message) for _, message, _ in sent]
        for answer in answers:
            for text in (table, answer):
                hmac.digest(bytes(32), text, "sha256")
    seconds = found.pop("encoded") + found.pop("sealed") * size / SEALS
    found["... encoded and sealed, s"] = seconds
    each = len(table) + sum(map(len, answers)) / SEALS
    found["members, for a rank, kB"] = each / 1e3
    found["members, for all ranks, MB"] = size * each / 1e6
    sent.clear()
    lost, lines = size // 3, {"0": (9, 9, True), "1": (700, 700, True)}
    with cpu(found, "rules of an epoch, s"):
        for rank in graph[lost]:
            suspicion = {"type": "suspect", "epoch": 0, "rank": lost, "text": "silent"}
            rules.on_message(rank, suspicion, now)
            settle()
        rules.process_ended(lost, "was killed", now)
        settle()
        rules.on_disconnected(lost, "closed", now)
        settle()
        for rank in range(size):
            if rank != lost:
                done = {"type": "report", "epoch": 0, "lines": lines, "next_set": 1}
                rules.on_message(rank, done, now)
                settle()
    assert rules.epoch.number == 1
    assert len(rules.epoch.order) == size - 1
    return found


# -- the plan --------------------------------------------------------------------------


def plan_of(size: int, per_host: int, core: Path) -> Found:
    """Times a plan of the native core, in a program without Python."""
    if not core.exists():  # `make .venv/installed-test` builds it
        return {}
    source = Path(__file__).with_name("plan.cc")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "plan")
        words = ["g++", "-O2", "-std=c++20", f"-I{jobs.ROOT / 'xla_ext'}", str(source)]
        subprocess.run([*words, str(core), "-o", str(program)], check=True)
        done = subprocess.run(
            [program, str(size), str(per_host)], check=True, capture_output=True
        )
    return {"plan of a ring, ms": float(done.stdout)}


def count(size: int, per_host: int, core: Path) -> Found:
    graph = graph_of(size, per_host)
    return (
        links_of(graph, per_host)
        | losses(graph, per_host)
        | coordinate(graph)
        | plan_of(size, per_host, core)
    )


def show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    core = jobs.ROOT / "build" / "native" / "libringjax_core.a"
    parser.add_argument("--core", type=Path, default=core, help="the native core")
    args = parser.parse_args()
    columns = [count(size, per_host, args.core) for size, per_host in SHAPES]
    rows = [["", *(w for p, n in SHAPES for w in (f"{p}, {n} a host", "predicted"))]]
    for name, predicted in PREDICTED.items():
        pairs = zip(columns, predicted, strict=True)
        rows.append([name, *(show(x) for c, p in pairs for x in (c.get(name), p))])
    print(report.columns(rows))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{used.ru_utime:.0f} s of CPU, {used.ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
