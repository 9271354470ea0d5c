"""Tests of the collectives' lowering in JAX: calls, order, rules, refusals.

This process is the only rank of the job. tests/ranks tests the results of the calls,
and test_aliases.py their aliasing.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.launch import environment
from support.lowerings import SEQ, calls, chained, equations
from support.stacked import raises

import ringjax
from ringjax import runtime
from ringjax.xla import call_order, jax_private


@pytest.fixture(scope="module", autouse=True)
def _job_of_one() -> Iterator[None]:
    ringjax.init()
    jax.block_until_ready(ringjax.allreduce(jnp.ones(1)))  # starts JAX's backend
    yield
    ringjax.shutdown()


def bound(f: Any, *args: Any) -> list[tuple[str, int]]:
    """Returns name and number of operands of the collectives in the jaxpr of `f`."""
    found = equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [
        (name.removeprefix("ringjax."), len(e.invars))
        for e in found
        if (name := e.primitive.name).startswith("ringjax.")
    ]


# -- the calls -------------------------------------------------------------------------


def test_a_tree_is_one_call() -> None:
    tree = {"a": jnp.ones(3), "b": [jnp.ones((2, 2), "int8"), 1.0]}
    (call,) = calls(ringjax.allreduce, tree)
    assert call.target == "ringjax_run"
    assert len(call.operands) == 4  # three leaves and the token
    assert "has_side_effect = true" in call.rest
    assert r'names = "a\0Ab/0\0Ab/1"' in call.rest


def many(count: int, size: int = 3) -> list[Any]:
    """Returns small leaves of two dtypes with different values."""
    dtypes = (np.float32, np.int32)
    return [np.full(1 + i % size, i, dtypes[i % 2]) for i in range(count)]


@pytest.mark.parametrize("count", [1, 161, 512, 513, 1025, 1700])
def test_many_tensors_make_few_ordered_calls(count: int) -> None:
    leaves = many(count)
    for f in (ringjax.grouped_allreduce, partial(ringjax.broadcast, root_rank=0)):
        found = calls(f, leaves)
        assert len(found) == -(-count // 512)
        for call, after in pairwise(found):
            assert call.order in after.operands
        for y, x in zip(jax.jit(f)(leaves), leaves, strict=True):
            np.testing.assert_array_equal(y, x)
            assert y.dtype == x.dtype


@pytest.mark.parametrize("count", [512, 513, 1700])
@pytest.mark.parametrize("overlap", [False, True])
def test_many_gradients_make_few_calls(overlap: bool, count: int) -> None:
    leaves = many(count)
    tx = ringjax.allreduce_grads(op=ringjax.Sum, overlap=overlap)
    found = calls(tx.update, leaves, tx.init(leaves))
    # A bucket has one dtype and two calls.
    dtypes, kinds = (2, 2) if overlap else (1, 1)
    assert len(found) == kinds * dtypes * -(-count // dtypes // 512)
    assert sum("last = 1" in call.rest for call in found) == 1
    for update in (jax.jit(tx.update), tx.update):
        out, state = update(leaves, tx.init(leaves))
        assert state.seq.tolist() == [1]
        for y, x in zip(out, leaves, strict=True):
            np.testing.assert_array_equal(y, x)
            assert y.dtype == x.dtype


def test_elastic_jobs_reduce_many_tensors_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = dataclasses.replace(runtime.config(), elastic=True)
    monkeypatch.setattr(runtime, "config", lambda: config)
    monkeypatch.setattr(runtime, "elastic", lambda: True)
    leaves = many(1031)  # no other test compiles a program for so many
    tx = ringjax.allreduce_grads(overlap=False)
    assert len(calls(ringjax.grouped_allreduce, leaves)) == 1
    assert len(calls(tx.update, leaves, tx.init(leaves))) == 1


def test_outside_of_jit_no_program_has_thousands_of_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments: list[int] = []
    emit = jax_private.emit

    def counted(ctx: Any, *args: Any, **more: Any) -> Any:
        arguments.append(len(ctx.avals_in))
        return emit(ctx, *args, **more)

    monkeypatch.setattr(jax_private, "emit", counted)
    leaves = many(1026, size=7)
    for y, x in zip(ringjax.allreduce(leaves, op=ringjax.Sum), leaves, strict=True):
        np.testing.assert_array_equal(y, x)
    assert arguments == [342] * 3


def test_derivatives_and_batches_of_many_tensors() -> None:
    xs = [jnp.full((1 + i % 3,), i, jnp.float32) for i in range(600)]

    def loss(xs: Any) -> Any:
        return sum(y.sum() for y in ringjax.grouped_allreduce(xs)[::100])

    for f in (jax.grad(loss), jax.jit(jax.grad(loss))):
        for i, g in enumerate(f(xs)):
            np.testing.assert_array_equal(g, np.full(1 + i % 3, i % 100 == 0))
    stacked = [jnp.stack([x, x + 1]) for x in xs]
    for y, x in zip(jax.vmap(ringjax.grouped_allreduce)(stacked), stacked, strict=True):
        np.testing.assert_array_equal(y, x)


def test_rank_and_size_are_not_compiled_in() -> None:
    for f in (ringjax.allreduce, partial(ringjax.broadcast, root_rank=0)):
        (call,) = calls(f, jnp.ones(3))
        assert "size = 0 : i64" in call.rest
        assert "counts = array<i64>" in call.rest
    (call,) = calls(ringjax.allgather, jnp.ones(3))
    assert "size = 1 : i64" in call.rest
    assert "counts = array<i64: 3>" in call.rest


def test_the_second_call_depends_on_the_first() -> None:
    def program(x: Any, y: Any, seq: Any) -> Any:
        x = ringjax.allreduce(x)
        (y,), seq = chained([y], seq)
        (z,), _ = chained([x + 1], SEQ)
        ringjax.barrier()
        return x, y, z, seq

    found = calls(program, jnp.ones(3), jnp.ones(4), SEQ)
    # The operands are (leaf, order), (leaf, order, tie) twice, and (order, tie).
    assert [len(call.operands) for call in found] == [2, 3, 3, 2]
    for before, call in pairwise(found):
        assert call.operands[-1] == before.order


def test_unordered_calls_have_no_tie() -> None:
    def program(x: Any) -> Any:
        return ringjax.allreduce(x), chained([x + 1], SEQ)

    assert [len(call.operands) for call in calls(program, jnp.ones(3))] == [2, 3]
    with call_order.unordered():
        assert [len(call.operands) for call in calls(program, jnp.ones(4))] == [2, 2]


def test_calls_in_a_loop_body_are_tied_to_each_other() -> None:
    def program(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return chained([ringjax.allreduce(carry)], SEQ)[0][0], None

        return jax.lax.scan(body, ringjax.allreduce(x), None, length=3)[0]

    assert [len(call.operands) for call in calls(program, jnp.ones(3))] == [2, 2, 3]


def test_starts_and_dones_form_one_chain() -> None:
    def program(a: Any, b: Any, c: Any, seq: Any) -> Any:
        ringjax.allreduce(a)
        return chained([a, b, c], seq, cuts=((2, 1), (0,)))

    found = calls(program, jnp.ones(2), jnp.ones(3), jnp.ones(4), SEQ)
    targets = ["ringjax_run", *["ringjax_start"] * 2, *["ringjax_done"] * 2]
    assert [call.target for call in found] == targets
    chain = found[1:]
    # Only the first START has a tie. Each later call depends on its predecessor's seq.
    assert [len(call.operands) for call in chain] == [4, 2, 3, 2]
    for before, call in pairwise(found):
        assert call.operands[-1] == before.order
    marks = [re.findall(r"(first|last|site) = (\d)", call.rest) for call in chain]
    values = [tuple(int(v) for _, v in sorted(m)) for m in marks]
    assert values == [(1, 0, 0), (0, 0, 1), (0, 0, 0), (0, 1, 1)]  # first, last, site
    assert r'names = "leaf2\0Aleaf1"' in chain[0].rest


@pytest.mark.parametrize(
    ("memory", "kinds"),
    [
        (256, "start start start done done done"),
        (128, "start start done done start done"),  # 64, 64 and 128 bytes
        (0, "run run run"),
    ],
)
def test_started_calls_fit_into_the_memory(monkeypatch, memory, kinds) -> None:
    config = dataclasses.replace(runtime.config(), overlap_memory=memory)
    monkeypatch.setattr(runtime, "config", lambda: config)

    def program(a: Any, b: Any, c: Any, seq: Any) -> Any:
        return chained([a, b, c], seq, cuts=((0,), (1,), (2,)))

    found = calls(program, jnp.ones(2), jnp.ones(16), jnp.ones(17), SEQ)
    assert [c.target.removeprefix("ringjax_") for c in found] == kinds.split()
    for before, call in pairwise(found):
        assert call.operands[-1] == before.order
    flags = [re.findall(r"(first|last) = 1", call.rest) for call in found]
    assert flags == [["first"], *[[]] * (len(found) - 2), ["last"]]
    most = {256: 256, 128: 128, 0: 0}[memory]
    assert all(f"in_flight = {most} :" in call.rest for call in found)


@pytest.mark.parametrize(
    ("memory", "kinds"),
    [(512, "start start start done done done"), (511, "run")],  # twice 256 bytes
)
def test_elastic_steps_start_all_their_calls(monkeypatch, memory, kinds) -> None:
    config = dataclasses.replace(
        runtime.config(),
        elastic=True,
        overlap_memory=64,
        elastic_overlap_memory=memory,
    )
    monkeypatch.setattr(runtime, "config", lambda: config)

    def program(a: Any, b: Any, c: Any, seq: Any) -> Any:
        return chained([a, b, c], seq, cuts=((0,), (1,), (2,)))

    found = calls(program, jnp.ones(2), jnp.ones(16), jnp.ones(17), SEQ)
    assert [c.target.removeprefix("ringjax_") for c in found] == kinds.split()


def test_the_chain_has_no_effect_and_keeps_fast_dispatch() -> None:
    jaxpr = jax.make_jaxpr(lambda x, s: chained([x], s))(jnp.ones(3), SEQ)
    assert not jaxpr.effects
    effects = jax.make_jaxpr(ringjax.allreduce)(jnp.ones(3)).effects
    assert list(map(repr, effects)) == ["CollectiveTokenEffect"]


def test_unused_results_stay_in_order() -> None:
    def program(x: Any) -> Any:
        ringjax.allreduce(x)  # unused, but other ranks may wait for it
        return x

    assert len(calls(program, jnp.ones(3))) == 1


# -- rules -----------------------------------------------------------------------------


def test_zero_tangents_and_cotangents_are_not_sent() -> None:
    def loss(x: Any, y: Any) -> Any:
        a, b = ringjax.allreduce((x, jax.lax.stop_gradient(y)), ringjax.Sum)
        return jnp.sum(a * b)

    found = bound(jax.grad(loss), jnp.ones(3), jnp.ones(3))
    assert found == [("allreduce", 2), ("allreduce", 1)]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (ringjax.allreduce, ["allreduce", "allreduce"]),
        (ringjax.allgather, ["allgather", "reducescatter"]),
        (ringjax.reducescatter, ["reducescatter", "allgather"]),
        (ringjax.alltoall, ["alltoall", "alltoall"]),
        (
            partial(ringjax.broadcast, root_rank=0),
            ["broadcast", "reducescatter", "allreduce"],
        ),
        (partial(ringjax.allreduce, op=ringjax.Max), ["allreduce"] * 3),
        (
            partial(ringjax.allreduce, op=ringjax.Product),
            ["allreduce", "allgather", "reducescatter"],
        ),
    ],
)
def test_collectives_of_derivatives(f: Any, expected: list[str]) -> None:
    found = bound(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))), jnp.ones((2, 3)))
    assert sorted(name for name, _ in found) == sorted(expected)


def test_vmap_makes_one_call() -> None:
    for f in (ringjax.allreduce, ringjax.allgather, ringjax.alltoall):
        assert len(bound(jax.vmap(f, in_axes=1), jnp.ones((4, 5)))) == 1
    ensemble = jax.vmap(lambda x, s: chained([x], s))
    (leaf,), seq = jax.eval_shape(
        ensemble, jnp.ones((3, 5)), jnp.zeros((3, 1), "uint32")
    )
    assert (leaf.shape, seq.shape) == ((3, 5), (3, 1))
    found = bound(ensemble, jnp.ones((3, 5)), jnp.zeros((3, 1), "uint32"))
    assert found == [("allreduce", 2)]


def test_derivative_of_the_chain() -> None:
    def loss(x: Any, y: Any) -> Any:
        (a, b), _ = chained([x * x, y], SEQ)
        return jnp.sum(a) + jax.lax.stop_gradient(jnp.sum(b))

    x = jnp.arange(3.0)
    found = bound(jax.grad(loss), x, x)
    assert found == [("allreduce", 3), ("allreduce", 1)]
    np.testing.assert_allclose(jax.grad(loss)(x, x), 2 * x)
    np.testing.assert_allclose(jax.jvp(loss, (x, x), (x, x))[1], 2 * jnp.sum(x * x))
    with raises(TypeError, "ringjax.allreduce_grads", "op=Max has no derivative"):
        jax.grad(lambda x: chained([x], SEQ, op=ringjax.Max)[0][0][0])(x)


# -- refusals --------------------------------------------------------------------------


def test_the_chain_checks_its_state() -> None:
    with raises(ValueError, "`seq` must be uint32[1], got float32[1]"):
        chained([jnp.ones(2)], jnp.zeros(1))
    with raises(ValueError, "cuts must hold every index below 2 once"):
        chained([jnp.ones(2), jnp.ones(2)], SEQ, cuts=((0,),))
    assert chained([], SEQ) == ([], SEQ)


def test_collectives_need_init() -> None:
    code = """
import jax.numpy as jnp, ringjax
for op in ("allreduce", "allgather", "reducescatter", "alltoall", "barrier"):
    try:
        getattr(ringjax, op)(*([] if op == "barrier" else [jnp.ones(2)]))
    except ringjax.errors.NotInitialized as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment("before-init", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout.splitlines() == [
        f"ringjax.{op}: call ringjax.init() first"
        for op in ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
    ], done.stderr


def test_an_unregistered_process_set_is_refused() -> None:
    with raises(ValueError, "ringjax.allgather: process_set", "not registered"):
        ringjax.allgather(jnp.ones(2), process_set=ringjax.ProcessSet([0]))


def test_refusals_in_programs_over_several_local_devices() -> None:
    code = """
import jax, jax.numpy as jnp, ringjax
from jax.sharding import NamedSharding, PartitionSpec as P
ringjax.init()
auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=auto)
x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("i")))
part = jax.shard_map(ringjax.allreduce, mesh=mesh, in_specs=P("i"), out_specs=P("i"),
                     axis_names={"i"})
lost = jax.shard_map(ringjax.allreduce, mesh=mesh.abstract_mesh, in_specs=P("i"),
                     out_specs=P("i"))
adasum = ringjax.allreduce_grads(op=ringjax.Adasum)
for f in (ringjax.allgather, jax.jit(ringjax.reducescatter), jax.jit(part),
          jax.jit(lambda x: adasum.update(x, adasum.init(x))),
          lambda x: ringjax.allreduce(x, op=ringjax.Adasum), jax.jit(lost)):
    try:
        jax.block_until_ready(f(x))
    except (TypeError, ValueError) as error:
        print(str(error).splitlines()[0])
print(ringjax.allgather(jax.device_put(x, jax.devices()[0])).shape)
"""
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment("devices", variables),
        capture_output=True,
        text=True,
        timeout=50,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    for line, op in zip(lines, ("allgather", "reducescatter"), strict=False):
        assert line.startswith(f"ringjax.{op}: `tensor` is in a program over 4 devices")
        assert "call it inside of jax.shard_map" in line
    assert "leaves the mesh axes ['j'] to JAX" in lines[2]
    for line, op in zip(lines[3:5], ("allreduce_grads", "allreduce"), strict=False):
        assert line.startswith(f"ringjax.{op}: op=Adasum has no meaning in a program")
    assert "does not say which devices it is for" in lines[5]
    assert lines[6] == "(4, 4)"
