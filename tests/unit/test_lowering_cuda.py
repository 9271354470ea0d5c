"""Tests of the collectives' lowering for CUDA, without a device.

This process is the only rank of the job, and the tests read the text of programs.
test_lowering.py tests properties that do not depend on the platform, and
tests/gpu/schedule.py tests XLA's schedules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.lowerings import SEQ, Call, calls, chained, equations, found_in, lowered
from support.stacked import raises

import ringjax
from ringjax.xla import lowering

ALIAS = re.compile(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)")
ADD = re.compile(r"(%\w+) = stablehlo\.add (%\w+(?:#\d+)?), (%\w+) : tensor<1xui32>")


@pytest.fixture(scope="module", autouse=True)
def _job_of_one() -> Iterator[None]:
    ringjax.init()
    jax.block_until_ready(ringjax.allreduce(jnp.ones(1)))  # starts JAX's backend
    yield
    ringjax.shutdown()


@pytest.fixture
def no_device() -> Iterator[None]:
    with lowering.without_device():
        yield


def on_cuda(f: Any, *args: Any) -> list[Call]:
    return calls(f, *args, platform="cuda")


@pytest.mark.usefixtures("no_device")
def test_cuda_overlaps_if_the_cpu_does_not() -> None:
    def program(a: Any, b: Any, c: Any, seq: Any) -> Any:
        ringjax.allreduce(a)
        return chained(
            [a * 2, b * 2, c * 2],
            seq + 1,
            ((2, 1), (0,)),
            overlapped=False,
            overlapped_on_device=True,
        )

    arguments = (jnp.ones(2), jnp.ones(3), jnp.ones(4), SEQ)
    assert [c.target for c in calls(program, *arguments)] == ["ringjax_run"] * 2
    text = lowered(program, *arguments, platform="cuda")
    found = found_in(text)
    targets = ["ringjax_run", *["ringjax_start"] * 2, *["ringjax_done"] * 2]
    assert [call.target for call in found] == targets
    # The calls form one chain: each call has its predecessor's order as an operand.
    # Each START and DONE reduces in place.
    assert [len(call.operands) for call in found] == [2, 4, 2, 3, 2]
    for before, call in pairwise(found):
        assert call.operands[-1] == before.order
    for call, leaves in zip(found[1:], (2, 1, 2, 1), strict=True):
        expected = [(str(i), str(i)) for i in range(leaves + 1)]
        assert ALIAS.findall(call.rest) == expected
    # The operands of a DONE are the results of its bucket's START.
    started = text.split("@ringjax_start")[0].rsplit("%", 1)[1].split(":")[0]
    assert found[3].operands[:2] == [f"%{started}#0", f"%{started}#1"]


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_program_increments_seq_on_cuda(overlapped: bool) -> None:
    def program(a: Any, b: Any, seq: Any) -> Any:
        (a, b), seq = chained([a, b], seq, ((1,), (0,)), overlapped=overlapped)
        (a, b), seq = chained([a, b], seq, ((1,), (0,)), overlapped=overlapped)
        return a, b, seq

    arguments = (jnp.ones(2), jnp.ones(3), SEQ)
    assert not ADD.findall(lowered(program, *arguments))
    text = lowered(program, *arguments, platform="cuda")
    found = found_in(text)
    each = 4 if overlapped else 1
    assert len(found) == 2 * each
    adds = ADD.findall(text)
    assert [before for _, before, _ in adds] == [found[each - 1].order, found[-1].order]
    # The second chain begins with the sum, and its tie is the order before the sum.
    assert adds[0][0] in found[each].operands[:-1]
    assert found[each].operands[-1] == found[each - 1].order
    assert text.count("dense<1> : tensor<1xui32>") == 2
    assert adds[1][0] in text.split("return")[-1]


@pytest.mark.usefixtures("no_device")
def test_every_collective_lowers_for_cuda() -> None:
    for f in (
        ringjax.allreduce,
        ringjax.allgather,
        ringjax.reducescatter,
        ringjax.alltoall,
        partial(ringjax.broadcast, root_rank=0),
        lambda x: ringjax.barrier() or x,
    ):
        (here,), (there,) = calls(f, jnp.ones(2)), on_cuda(f, jnp.ones(2))
        # Only the token differs from the CPU's call: the platform chooses the handler.
        assert (here.target, here.rest) == (there.target, there.rest)
        assert len(here.operands) == len(there.operands)
        assert here.operands[-1] != there.operands[-1] == "%arg0"


def test_cuda_without_a_device_communicator() -> None:
    for f in (ringjax.allreduce, lambda x: chained([x], SEQ)):
        with raises(
            ValueError,
            "`tensor` is on a CUDA device, but there is no device communicator: no "
            "rank has a CUDA device: ",
            "JAX_PLATFORMS=cpu",
        ):
            on_cuda(f, jnp.ones(17))  # a new shape, because JAX caches lowerings


def test_other_devices_are_refused() -> None:
    with raises(ValueError, "is on a rocm device", "on CPU and CUDA devices only"):
        calls(ringjax.allreduce, jnp.ones(2), platform="rocm")


def test_automatic_overlap_is_for_cuda_only() -> None:
    def parameters(**options: Any) -> tuple[bool, bool]:
        tx = ringjax.allreduce_grads(**options)
        grads = {"a": jnp.ones(2)}
        jaxpr = jax.make_jaxpr(tx.update)(grads, tx.init(grads))
        (found,) = [
            e for e in equations(jaxpr.jaxpr) if e.primitive.name == "ringjax.allreduce"
        ]
        return found.params["overlapped"], found.params["overlapped_on_device"]

    assert parameters() == (False, True)  # all ranks share this host
    assert parameters(overlap=True) == (True, True)
    assert parameters(overlap=False) == (False, False)


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(jnp.int16, "Sum"), (jnp.uint16, "Max"), (jnp.complex64, "Product")],
)
def test_unsupported_nccl_reductions_fail_when_lowered(dtype: Any, op: str) -> None:
    x = jnp.ones(3, dtype)
    f = partial(ringjax.allreduce, op=getattr(ringjax, op))
    assert calls(f, x)  # on CPUs it works
    with raises(TypeError, f"NCCL cannot reduce it with op={op}"):
        on_cuda(f, x)
    assert on_cuda(ringjax.allgather, x)


@pytest.mark.usefixtures("no_device")
def test_adasum_on_cuda_fails_when_lowered() -> None:
    x = jnp.ones(3)
    assert calls(partial(ringjax.allreduce, op=ringjax.Adasum), x)
    with raises(ValueError, "ringjax.allreduce: op=Adasum", "on CUDA devices"):
        on_cuda(partial(ringjax.allreduce, op=ringjax.Adasum), x)
    tx = ringjax.allreduce_grads(ringjax.Adasum)
    with raises(ValueError, "ringjax.allreduce_grads: op=Adasum", "on CUDA devices"):
        on_cuda(tx.update, {"a": x}, tx.init({"a": x}))


@pytest.mark.usefixtures("no_device")
def test_chains_of_one_program_have_separate_buckets() -> None:
    def program(a: Any, b: Any) -> Any:
        first = chained([a, b], SEQ, ((1,), (0,)), overlapped=True)
        return first, chained([a, b], SEQ, ((1,), (0,)), overlapped=True)

    found = on_cuda(program, jnp.ones(2), jnp.ones(3))
    sites = [int(re.findall(r"site = (\d+)", call.rest)[0]) for call in found]
    assert sites == [0, 1, 0, 1, 65536, 65537, 65536, 65537]


@pytest.mark.usefixtures("no_device")
def test_a_bucket_starts_where_its_gradients_are_complete() -> None:
    """Each START except the last is tied to an operand of the next backward layer."""

    def program(ws: Any, x: Any, seq: Any) -> Any:
        def loss(ws: Any) -> Any:
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        return chained(jax.grad(loss)(ws), seq, ((2,), (1,), (0,)), overlapped=True)

    weights = [jnp.ones((4, 4)) for _ in range(3)]
    lines = lowered(
        program, weights, jnp.ones((2, 4)), SEQ, platform="cuda"
    ).splitlines()
    kinds = ("ringjax_start", "ringjax_done", "optimization_barrier", "dot_general")
    found = [kind for line in lines for kind in kinds if kind in line]
    start, done, barrier, dot = kinds
    # The forward pass has three products. The backward pass has two per layer, one for
    # the weights and one for the input, but the first layer needs no input gradient.
    behind = [dot, start, barrier, dot, dot, start, barrier, dot, dot, start]
    assert found == [dot] * 3 + behind + [done] * 3


@pytest.mark.usefixtures("no_device")
def test_parameters_are_compared_on_cpus_only() -> None:
    tx = ringjax.allreduce_grads(overlap=False)
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}

    def program(grads: Any, seq: Any) -> Any:
        return tx.update(grads, ringjax.optim.AllreduceState(seq), grads)

    on_cpu = calls(program, grads, SEQ)
    assert [call.target for call in on_cpu] == ["ringjax_check", "ringjax_run"]
    # The check sends the number of the step and all parameters. The call for the
    # gradients depends on the check.
    assert len(on_cpu[0].operands) == 3
    assert on_cpu[0].order in on_cpu[1].operands
    assert [call.target for call in on_cuda(program, grads, SEQ)] == ["ringjax_run"]
