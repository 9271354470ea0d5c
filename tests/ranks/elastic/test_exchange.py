"""Exchanges of exact sums in elastic jobs: kills and flipped bits inside of a call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import pytest
from support.elastic_job import ElasticJob

pytestmark = pytest.mark.timeout(100)

ELEMENTS, STEPS, PIECES = 50_000, 30, 12
SCRIPT = f"""
import zlib
from ringjax import _native

CODE, SUM = _native.COLLECTIVES["exchange"], _native.REDUCE_OPS["Sum"]
odd = 2 * np.arange({ELEMENTS}, dtype=np.uint64) + np.uint64(1)
one = lambda *x: np.array(x, np.int32)

for step in range({STEPS}):
    rng = np.random.default_rng([WORKER, step])
    sums = rng.integers(-(2**50), 2**50, {ELEMENTS}, np.int64)
    words = sums.view(np.uint64)
    checksum = np.array([words.sum(), (words * odd).sum()], np.uint64).view(np.uint32)
    ins = [sums, one(1 << WORKER), one(WORKER), one(-30), checksum]
    outs = [np.empty({ELEMENTS}, np.float32), *(x.copy() for x in ins[1:])]
    runtime.communicator().execute(CODE, SUM, ins, outs, counts=[{PIECES}, {ELEMENTS}])
    say("step", step, outs[1][0], outs[2][0], zlib.crc32(outs[0].tobytes()))
totals = runtime.observed("test").recorder.totals()
say("faults", *(one["faults"] for one in totals if one["op"] == "exchange"))
"""


def digest(workers: list[int], step: int) -> int:
    """Returns the checksum of the mean of these workers' sums."""
    total = np.zeros(ELEMENTS, np.int64)
    for worker in workers:
        rng = np.random.default_rng([worker, step])
        total += rng.integers(-(2**50), 2**50, ELEMENTS, np.int64)
    mean = (total.astype(np.longdouble) * 2.0**-30 / PIECES).astype(np.float32)
    return zlib.crc32(mean.tobytes())


def run(start, failpoints: str, alive: set[int], **env: str) -> ElasticJob:
    """Runs four workers until those of `alive` end; checks every result."""
    given: Mapping[str, str] = {"RINGJAX_FAILPOINTS": failpoints, **env}
    job: ElasticJob = start(4, SCRIPT, env=given)
    for worker in sorted(alive):
        assert job.wait(worker) == 0, job.logs()
    first = job.lines(min(alive), "step")
    assert len(first) == STEPS
    for worker in alive:
        assert job.lines(worker, "step") == first, job.logs()
    for step, bits, most, crc in ([int(word) for word in line] for line in first):
        members = [worker for worker in range(4) if bits >> worker & 1]
        assert set(members) >= alive and most == max(members)
        assert crc == digest(members, step), (step, members)
    return job


@pytest.mark.parametrize("memory", ["1", "0"], ids=["memory", "sockets"])
def test_kills_at_every_point_of_an_exchange(start, memory) -> None:
    job = run(
        start,
        "call.agreed=kill@1#5;call.moving=kill@2#21;call.complete=kill@3#17",
        {0},
        RINGJAX_SHM=memory,
    )
    assert all(job.wait(worker) != 0 for worker in (1, 2, 3))


def test_a_kill_before_the_last_rank_returns(start) -> None:
    run(start, "call.closed=kill@0#9", {1, 2, 3})


def test_a_wrong_sum_is_computed_again(start) -> None:
    job = run(start, "exact.sum=flip(977)@2#4;exact.result=flip(5)@1#8", {0, 1, 2, 3})
    text = "this rank has added up its part of the sums wrongly"
    assert text in job.errors(2), job.logs()
    assert "this rank has a wrong copy of a part of the mean" in job.errors(1)
    faults = [job.lines(worker, "faults") for worker in range(4)]
    assert faults == [[["0"]], [["1"]], [["1"]], [["0"]]]


def test_a_rank_whose_sums_have_changed_is_lost(start) -> None:
    job = run(start, "exact.send=flip(77000)@1#6", {0, 2, 3})
    assert job.wait(1) != 0
    assert "has sums that do not fit their checksum" in job.errors(1), job.logs()
