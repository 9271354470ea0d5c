"""Many ranks on one host: `python -m benchmarks.hosts.many_ranks`.

Measures jobs of numpy ranks with increasing numbers of ranks: the times to start, to
call, to idle and to end, and the memory; the cost of a lost rank in an elastic job, and
of many lost ranks; and the coordinator alone with very many ranks. Two hundred ranks on
few cores need minutes. README.md explains the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import jobs, report
from ringjax.membership import member_table

if TYPE_CHECKING:
    from chaos.faults import ChaosJob

MODULE = "benchmarks.hosts.many_ranks"
SECRET, JOB = b"s" * 32, "0123456789abcdef"
# Seconds. A rank that shares a core with a hundred other ranks may be silent for long.
LIMITS = {
    "RINGJAX_START_TIMEOUT": 1500,
    "RINGJAX_FAILURE_TIMEOUT": 120,
    "RINGJAX_HEARTBEAT": 1,
}
IDLE = 10.0  # seconds without a call
KILLS = 20  # the workers that `--kills` kills by and by
Row = dict[str, Any]


def own_memory(pid: int | str = "self") -> float:
    """Returns MiB of a process, with its share of libraries, without shared memory."""
    words = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
    pss, shared = (int(words[words.index(k) + 1]) for k in ("Pss:", "Pss_Shmem:"))
    return (pss - shared) / 1024


def shared_memory(pid: int | str = "self") -> float:
    """Returns MiB that are allocated for the memory of this host, in all lanes.

    All ranks of the host have the same memory. Few of its pages are mapped in a rank,
    so the map of a process does not show them.
    """
    blocks = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that reads the folder
            if os.readlink(path).startswith("/memfd:ringjax"):
                found = path.stat()
                blocks[found.st_ino] = found.st_blocks
    return sum(blocks.values()) * 512 / 2**20


# -- ranks -----------------------------------------------------------------------------


def rank() -> None:
    """Runs one rank. Rank 0 reports the measurements of all ranks."""
    began = float(os.environ["MANY_BEGAN"])
    import numpy as np

    from ringjax import eager, runtime

    loaded, before = time.time(), own_memory()
    used_before = time.process_time()
    runtime.init()
    ready, init = time.time(), time.process_time() - used_before
    own = own_memory()
    open_now = len(os.listdir("/proc/self/fd"))
    calls = []
    for _ in range(20):
        start = time.perf_counter()
        eager.allreduce(np.ones(1024, np.float32))
        calls.append(time.perf_counter() - start)
    start = time.perf_counter()
    mean = eager.allreduce(np.full(1 << 18, runtime.rank(), np.float32))
    large = time.perf_counter() - start
    assert mean[0] == mean[-1] == (runtime.size() - 1) / 2
    busy = time.process_time()
    time.sleep(IDLE)
    used = 100 * (time.process_time() - busy) / IDLE
    mine = [loaded - began, ready - began, 1e3 * init, own - before, open_now, used]
    shared = shared_memory()
    seen = eager.allgather(np.array([mine], np.float64))
    found = {
        "ranks": runtime.size(),
        "loaded s": float(seen[:, 0].max()),
        "init s": float(np.median(seen[:, 1] - seen[:, 0])),
        "ready s": float(seen[:, 1].max() - seen[:, 0].max()),
        "init CPU ms": float(np.median(seen[:, 2])),
        "4 KiB ms": 1e3 * median(calls[2:]),
        "1 MiB ms": 1e3 * large,
        "init MiB/rank": float(seen[:, 3].mean()),
        "shared MiB": shared,
        "descriptors": int(seen[:, 4].max()),
        "idle % of a core": float(seen[:, 5].sum()),
        "done": time.time(),
    }
    first = runtime.rank() == 0
    runtime.shutdown()
    if first:
        jobs.report(found)


def job(ranks: int, timeout: float) -> Row:
    """Runs a job of `ranks` ranks."""
    env = {**os.environ, "MANY_BEGAN": str(time.time())}
    for name, seconds in LIMITS.items():
        env.setdefault(name, str(seconds))
    (row,) = jobs.run(ranks, MODULE, "--rank", env=env, timeout=timeout)
    return row | {"end s": time.time() - row.pop("done")}


# -- an elastic job --------------------------------------------------------------------


@contextlib.contextmanager
def chaos_job(ranks: int) -> Iterator[ChaosJob]:
    """Starts an elastic job of the chaos tests, which imports the tests' modules."""
    from chaos.faults import EAGER_PROGRAM, ChaosJob
    from support.launch import Jobs

    env = {k: os.environ.get(k, str(seconds)) for k, seconds in LIMITS.items()}
    with (
        tempfile.TemporaryDirectory(prefix="ringjax-many-") as name,
        contextlib.closing(Jobs(lambda: Path(tempfile.mkdtemp(dir=name)))) as started,
    ):
        yield ChaosJob(
            started.start,
            Path(tempfile.mkdtemp(dir=name)),
            ranks,
            env=env,
            program=EAGER_PROGRAM,
            slots=ranks + KILLS,
            interval=max(0.01, ranks / 1000),
        )


def elastic(ranks: int, timeout: float) -> Row:
    """Kills a worker, waits for the new worker, and checks all steps."""
    times = [time.monotonic()]
    with chaos_job(ranks) as chaos:
        training = chaos.wait_for_workers(ranks, timeout)
        times.append(time.monotonic())
        chaos.wait_for_steps(20, timeout)
        times.append(time.monotonic())
        own = sum(map(own_memory, training.values())) / ranks
        shared = shared_memory(next(iter(training.values())))
        victim = sorted(training)[ranks // 2]
        chaos.inject("kill", victim, training[victim], random.Random())
        chaos.wait_for_steps(20, timeout)
        chaos.wait_for_workers(ranks, timeout)  # the new worker is among these ranks
        times.append(time.monotonic())
        outcome = chaos.end(timeout)
        times.append(time.monotonic())
    began, steps, _, end = (b - a for a, b in itertools.pairwise(times))
    return {
        "ranks": ranks,
        "start s": began,
        "step ms": 1e3 * steps / 20,
        "MiB/rank": own,
        "shared MiB": shared,
        "recovery s": median(outcome.recoveries),
        "most s": max(outcome.recoveries),
        "newcomer s": max(outcome.pauses),
        "end s": end,
    }


def kills(ranks: int, goal: int, timeout: float) -> Row:
    """Makes `goal` steps, kills KILLS workers meanwhile, and checks all steps.

    Every second time, two workers are killed at once. New workers take their places.
    """
    rng, began = random.Random(ranks), time.monotonic()
    with chaos_job(ranks) as chaos:
        chaos.wait_for_workers(ranks, timeout)
        start, killed = time.monotonic() - began, 0
        while killed < KILLS:
            chaos.wait_for_steps(goal // KILLS, timeout)
            training = chaos.training()
            at_once = min(1 + killed % 3, 2, KILLS - killed)
            for worker in rng.sample(sorted(training), at_once):
                chaos.inject("kill", worker, training[worker], rng)
            killed += at_once
            elapsed, steps = time.monotonic() - began, max(chaos.progress().values())
            print(f"{elapsed:.0f} s: step {steps}, {killed} killed", file=sys.stderr)
        training = chaos.wait_for_workers(ranks, timeout)
        while max(chaos.progress().values()) < goal:
            chaos.wait_for_steps(1, timeout)
        open_now = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in training.values())
        own = sum(map(own_memory, training.values())) / ranks
        shared = shared_memory(next(iter(training.values())))
        stops = time.monotonic()
        outcome = chaos.end(timeout)
    return {
        "ranks": ranks,
        "start s": start,
        "steps": outcome.steps,
        "killed": killed,
        "recovery s": median(outcome.recoveries),
        "most s": max(outcome.recoveries),
        "newcomer s": median(outcome.pauses),
        "newcomer most s": max(outcome.pauses),
        "least ranks": outcome.smallest,
        "descriptors": open_now,
        "MiB/rank": own,
        "shared MiB": shared,
        "end s": time.monotonic() - stops,
        "all s": time.monotonic() - began,
    }


# -- the coordinator alone -------------------------------------------------------------


def serve(ranks: int) -> None:
    """Runs a coordinator until the standard input of this process ends."""
    from ringjax.membership.coordinator import Coordinator

    before = own_memory()
    server = Coordinator(SECRET, JOB, np=ranks, on_loss="stop", start_timeout=600.0)
    server.start()
    print(",".join(server.addresses), flush=True)
    sys.stdin.read()
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {"cpu s": used.ru_utime + used.ru_stime}
    server.close()
    found["peak MiB"] = used.ru_maxrss / 1024 - before
    jobs.report(found)


def hello(number: int, ranks: int) -> Row:
    """Returns the description that a rank sends to the coordinator."""
    return {
        "rank": number,
        "size": ranks,
        "version": "0.1.0",
        "hostname": "host",
        "machine": "f" * 36 + " 4026531840",
        "shm": True,
        "cuda": 0,
        "door": f"ringjax-{JOB}-{number}-{number:016x}",
        "addresses": f"127.0.0.1:{20000 + number}",
        "settings": {f"a setting {i}": 1 << 20 for i in range(8)},
    }


class Client:
    """The client side of a rank. One thread runs all clients in turns."""

    def __init__(self, number: int, ranks: int, where: tuple[str, int]) -> None:
        from ringjax.control.handshake import HandshakeRequest, Purpose, caller_steps

        self.hello = hello(number, ranks)
        introduction = HandshakeRequest(JOB, Purpose.RENDEZVOUS, number, -1)
        self.steps = caller_steps(SECRET, introduction)
        self.output, self.wants = next(self.steps)
        self.sock = socket.create_connection(where)
        self.keys: Any = None

    def authenticate(self) -> bool:
        """Handles the next part of the handshake; returns whether more parts follow."""
        try:
            received = self.sock.recv(self.wants, socket.MSG_WAITALL)
            self.output, self.wants = self.steps.send(received)
        except StopIteration as finished:
            self.keys = finished.value[1]
            self.sealer, self.opener = self.keys.sealer(), self.keys.opener()
            return False
        return True

    def send(self, kind: str, **more: Any) -> None:
        self.sock.sendall(self.sealer.seal({"type": kind, **more}))

    def receive(self) -> Row:
        while not (found := self.opener.feed(self.sock.recv(1 << 20))):
            pass
        return dict(found[0])


def gather(ranks: int) -> Row:
    """Makes all clients join at the same time, send once, and leave together."""
    words = [sys.executable, "-m", MODULE, "--serve", str(ranks)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(words, cwd=jobs.ROOT, stdin=pipe, stdout=pipe, text=True)
    with server:
        assert server.stdout is not None
        host, _, port = server.stdout.readline().strip().rpartition(":")
        times = [time.perf_counter()]
        clients = [Client(n, ranks, (host, int(port))) for n in range(ranks)]
        waiting = clients
        while waiting:
            for client in waiting:
                client.sock.sendall(client.output)
            waiting = [client for client in waiting if client.authenticate()]
        for client in clients:
            client.send("hello", hello=client.hello)
        tables = [client.receive()["members"] for client in clients]
        members = [len(member_table.decode(table)) for table in tables]
        times.append(time.perf_counter())
        for number, client in enumerate(clients):
            client.send("exchange", epoch=0, number=0, value=number, seconds=60)
        values = [client.receive()["values"] for client in clients]
        times.append(time.perf_counter())
        for client in clients:
            client.send("leave", epoch=0)
        for client in clients:
            client.sock.close()
        text, _ = server.communicate()
        times.append(time.perf_counter())
    assert set(members) == {ranks}
    assert all(value == list(range(ranks)) for value in values)
    gather, exchange, end = (b - a for a, b in itertools.pairwise(times))
    found = {"clients": ranks, "gather s": gather, "exchange s": exchange, "end s": end}
    return found | jobs.reports(text)[-1]


def table(rows: list[Row]) -> str:
    cells = [
        [f"{v:.3g}" if isinstance(v, float) and v < 100 else f"{v:.0f}" for v in r]
        for r in (row.values() for row in rows)
    ]
    return report.columns([list(rows[0]), *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--ranks", default="8,64,128,256", help="jobs, comma separated")
    parser.add_argument("--elastic", default="32,64,128", help="jobs that lose a rank")
    parser.add_argument("--kills", default="", help="jobs that lose many ranks")
    parser.add_argument("--steps", type=int, default=1000, help="of these jobs")
    parser.add_argument("--clients", default="100,1000", help="of a coordinator")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return rank()
    if args.serve:
        return serve(args.serve)
    from ringjax.control import open_files

    clients, sizes, elastics, killed = (
        [int(n) for n in x.split(",") if n]
        for x in (args.clients, args.ranks, args.elastic, args.kills)
    )
    open_files.raise_limit(max(clients, default=0))
    for rows in (
        map(gather, clients),
        (job(n, args.timeout) for n in sizes),
        (elastic(n, args.timeout) for n in elastics),
        (kills(n, args.steps, args.timeout) for n in killed),
    ):
        found: list[Row] = []
        for row in rows:
            print("\t".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
            found.append(row)
        if found:
            print("\n" + table(found) + "\n", flush=True)
    return None


if __name__ == "__main__":
    main()
