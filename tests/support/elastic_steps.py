"""Training loops for workers of an elastic job, and checks of their results.

Worker w contributes 2**w, so a mean shows which workers contributed. All surviving
workers must have bit-for-bit equal results, and each result must be the mean over the
members of one epoch.
"""

from __future__ import annotations

import itertools

from support.elastic_job import ElasticJob

# Prints a line for each finished step: its number, time, size of the job, a checksum of
# the results, and the smallest and largest elements without duplicates.
LOOP = """
import zlib

def digest(arrays):
    found = 0
    for x in arrays:
        found = zlib.crc32(np.ascontiguousarray(x).tobytes(), found)
    return found

def train(step, state, steps=10**9):
    i = 0
    while i < steps and not os.path.exists(sys.argv[0] + ".stop"):
        updates, state = step(state)
        shown = [np.asarray(x) for x in updates.values()]
        say("step", i, f"{time.time():.6f}", runtime.size(), digest(shown),
            *{float(x.min()) for x in shown} | {float(x.max()) for x in shown})
        i += 1
"""

# Named operations, some of them concurrent.
EAGER = (
    LOOP
    + """
from ringjax import eager
from support import numpy_only

mine = {f"g{n}": np.full(n, 2.0**WORKER, np.float32) for n in (1, 77, 50_021)}

def step(state):
    handles = {name: eager.allreduce_async(x, name=name) for name, x in mine.items()}
    return {name: eager.synchronize(h) for name, h in handles.items()}, state

train(step, None)
"""
)


def stop_loops(job: ElasticJob) -> None:
    """Tells the loops to end. Workers may see the flag at different steps."""
    job.create_flag("stop")


def memberships(workers: set[int]) -> dict[float, set[int]]:
    """Maps the mean of the contributions of each set of workers to that set."""
    return {
        sum(2.0**w for w in group) / len(group): set(group)
        for n in range(1, len(workers) + 1)
        for group in itertools.combinations(sorted(workers), n)
    }


def check_steps(job: ElasticJob, alive: set[int], *, whole: bool = True) -> None:
    """Checks that survivors have equal results, each over one membership.

    Args:
        alive: the workers that survived.
        whole: whether each step is a single call. The calls of a step with several
            calls may have different members.
    """
    groups = memberships(set(job.workers))
    traces = {w: {int(x[0]): x for x in job.lines(w, "step")} for w in job.workers}
    first = traces[min(alive)]
    for worker in job.workers:
        common = traces[worker].keys() & first.keys()
        for i in common:
            assert traces[worker][i][3] == first[i][3], (i, worker, job.logs())
    before, seen = set(job.workers), list[set[int]]()
    for i in sorted(first):
        found = []
        for value in map(float, first[i][4:]):
            near = [g for mean, g in groups.items() if abs(mean - value) < 1e-6 * mean]
            assert len(near) == 1, (i, first[i])
            assert near[0] <= before, (i, near, before)
            found += near
        # After a loss, each named operation is completed or repeated independently.
        assert len(found) == 1 or not whole, (i, first[i])
        before = set.intersection(*found)
        seen.append(before)
    # Workers may see the stop flag at different steps, so the last steps may have fewer
    # members.
    assert alive in seen, job.logs()
    assert before <= alive, job.logs()


def wait_for_more_steps(job: ElasticJob, workers: set[int], steps: int) -> None:
    """Waits until each worker has made `steps` more steps."""
    now = {w: len(job.lines(w, "step")) for w in workers}
    for worker in workers:
        job.wait_for_line(worker, "step", now[worker] + steps)


def wait_for_first_steps(job: ElasticJob, steps: int = 20) -> None:
    for worker in job.workers:
        job.wait_for_line(worker, "step", steps)
