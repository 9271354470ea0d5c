"""The results of all kinds of calls after ranks were killed in the middle."""

from __future__ import annotations

import time

import pytest
from support.elastic_job import Start
from support.elastic_steps import (
    EAGER,
    LOOP,
    check_steps,
    stop_loops,
    wait_for_first_steps,
    wait_for_more_steps,
)
from support.fabric import fabric_env, needs_fabric

JIT = (
    LOOP
    + """
import jax, itertools

tx = ringjax.allreduce_grads()
mine = 2.0**WORKER
sizes = {"a": 7, "b": 100_003, "c": (3, 5)}
grads = {name: np.full(size, mine, "f4") for name, size in sizes.items()}

@jax.jit
def step(state):
    return tx.update(grads, state)

train(step, tx.init(grads))
say("compiled", step._cache_size())
"""
)

OVERLAPPED = JIT.replace(
    "allreduce_grads()", "allreduce_grads(overlap=True, bucket_bytes=1)"
)

# Every second step has a weight.
WEIGHTED = JIT.replace(
    "\ntrain(step,",
    """
@jax.jit
def weighted(state):
    return tx.update(grads, state, weight=3.0)

steps = itertools.cycle([step, weighted])
train(lambda state: next(steps)(state),""",
).replace("step._cache_size()", "step._cache_size(), weighted._cache_size()")
# The gradients are also passed as parameters, so the parameter check finds differences
# between ranks. With RINGJAX_CHECK_PARAMETERS=2, every second step then makes three
# more calls, in which a rank may be lost.
CHECKED = JIT.replace("update(grads, state)", "update(grads, state, grads)")


@pytest.mark.parametrize(
    "fabric",
    [{}, pytest.param(fabric_env(), marks=needs_fabric)],
    ids=["tcp", "fabric"],
)
def test_ranks_of_several_hosts_are_killed_in_the_middle_of_calls(
    start: Start, fabric: dict[str, str]
) -> None:
    # 2 hosts with 3 workers each, then with 2 and 3, with 2 each, and with 2 and 1.
    script = JIT + 'say("used", *{c["algorithm"] for c in ringjax.recent_calls()})'
    script += '\nsay("links", *ringjax.stats()["transports"])'
    kills = "call.moving=kill@4#300;call.complete=kill@1#600;call.closed=kill@3#900"
    env = {"RINGJAX_FAILPOINTS": kills, "RINGJAX_CALIBRATE": "off"}
    job = start(6, script, env=env | fabric, hosts=2)
    alive = {0, 2, 5}
    wait_for_first_steps(job, 1)
    for victim in (4, 1, 3):
        job.workers[victim].wait()
    wait_for_more_steps(job, alive, 20)
    stop_loops(job)
    for worker in alive:
        assert job.workers[worker].wait() == 0, job.logs()
    assert "hierarchical_shared" in job.lines(0, "used")[0]
    # The name of libfabric's provider: "ofi_tcp", or "tcp;ofi_rxm" before version 1.18.
    assert ("ofi" in " ".join(job.lines(0, "links")[0])) == bool(fabric)
    check_steps(job, alive)


@pytest.mark.parametrize(
    ("script", "victims"),
    [(WEIGHTED, (2, 0)), (CHECKED, (2, 0, 4, 3))],
    ids=["plain and weighted", "checked"],
)
def test_ranks_are_killed_one_by_one_until_one_is_left(
    start: Start, script: str, victims: tuple[int, ...]
) -> None:
    env = {"RINGJAX_CHECK_PARAMETERS": "2"}
    job = start(1 + len(victims), script, env=env)
    wait_for_first_steps(job)
    alive = {1, *victims}
    for victim in victims:
        job.kill(victim)
        alive -= {victim}
        wait_for_more_steps(job, alive, 50)
    stop_loops(job)
    assert job.wait(1) == 0, job.logs()
    check_steps(job, {1})
    (compiled,) = job.lines(1, "compiled")
    assert set(compiled) == {"1"}


@pytest.mark.parametrize("script", [OVERLAPPED, EAGER], ids=["overlapped", "eager"])
def test_one_rank_then_two_then_one_during_recovery_are_killed(
    start: Start, script: str
) -> None:
    job = start(6, script)
    wait_for_first_steps(job)
    job.kill(0)
    wait_for_more_steps(job, {1, 2, 3, 4, 5}, 30)
    job.kill(1)
    job.kill(4)
    wait_for_more_steps(job, {2, 3, 5}, 30)
    job.kill(5)
    time.sleep(0.008)  # about as long as the recovery takes to connect links
    job.kill(3)
    wait_for_more_steps(job, {2}, 30)
    stop_loops(job)
    assert job.wait(2) == 0, job.logs()
    check_steps(job, {2}, whole=script is not EAGER)
    if script is not EAGER:
        assert job.lines(2, "compiled") == [["1"]]


UNEVEN = """
import jax, jax.numpy as jnp, signal

tx = ringjax.allreduce_grads()
state = tx.init(jnp.zeros(3))
batches = [np.ones((2, 3), "f4")] * (4, 9, 14)[WORKER]

@jax.jit
def step(state, batch, mask):
    mean = jnp.mean(batch, axis=0, where=mask[:, None])
    return tx.update(mean, state, weight=mask.sum())

for i, (batch, mask) in enumerate(ringjax.data.even_steps(batches)):
    if i == 6 and WORKER == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    updates, state = step(state, batch, mask)
    say("step", i, *np.asarray(updates))
say("compiled", step._cache_size())
"""


def test_no_steps_are_made_for_the_batches_of_a_lost_rank(start: Start) -> None:
    job = start(3, UNEVEN)
    assert (job.wait(0), job.wait(1)) == (0, 0), job.logs()
    for worker in (0, 1):
        steps = [[str(i), *["1.0"] * 3] for i in range(9)]
        assert job.lines(worker, "step") == steps, job.logs()
        assert job.lines(worker, "compiled") == [["1"]]


SETS = """
low, high = ringjax.add_process_set([0, 1]), ringjax.add_process_set([1, 2, 3])


def total(process_set):
    from ringjax import _native
    x = np.full(1001, 2.0**WORKER)
    out = np.empty_like(x)
    native = runtime.communicator(process_set)
    native.execute(
        _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Sum"], [x], [out])
    assert (out == out[0]).all()
    return int(out[0])

def show(word):
    say(word, ringjax.rank(), ringjax.size(), low.ranks, high.ranks,
        *(total(s) for s in (runtime.global_process_set, low, high) if s.included()))

show("before")
# runtime.size() may change on one rank a call before it changes on the others, so the
# loop ends by the sum, which all ranks receive in the same call.
while total(runtime.global_process_set) == 15:
    pass
show("after")
pair = ringjax.add_process_set([0, 2])
say("number", pair.process_set_id, *([total(pair)] if pair.included() else []))
ringjax.remove_process_set(high)
while total(runtime.global_process_set) != 1:
    pass
say("last", low.ranks, pair.ranks, high.process_set_id, total(low), total(pair))
"""


def test_process_sets_shrink_with_lost_ranks(start: Start) -> None:
    job = start(4, SETS)
    for worker in range(4):
        job.wait_for_line(worker, "before")
    job.kill(1)
    for worker in (0, 2, 3):
        job.wait_for_line(worker, "number")
    both = ["[0]", "[1, 2]"]
    shown = {w: " ".join(job.lines(w, "after")[0]) for w in (0, 2, 3)}
    assert shown == {
        0: f"0 3 {both[0]} {both[1]} 13 1",
        2: f"1 3 {both[0]} {both[1]} 13 12",
        3: f"2 3 {both[0]} {both[1]} 13 12",
    }, job.logs()
    assert [job.lines(w, "number")[0] for w in (0, 2, 3)] == [
        ["3", "9"], ["3"], ["3", "9"],
    ]  # fmt: skip
    job.kill(2)
    job.kill(3)
    job.wait_for_line(0, "last")
    assert " ".join(job.lines(0, "last")[0]) == "[0] [0] None 1 1"
    assert job.wait(0) == 0, job.logs()
