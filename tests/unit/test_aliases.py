"""Tests which results alias their operands, and how many copies XLA adds.

The tests read the text of lowered and compiled programs in a job of one rank. A result
aliases its operand unless the operand is an argument that was not donated, because XLA
would have to copy such an argument first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.lowerings import SEQ, chained, found_in

import ringjax

PAIR = (np.ones(3, np.float32), np.ones(4, np.float32))
ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


@pytest.fixture(scope="module", autouse=True)
def _job_of_one() -> Iterator[None]:
    ringjax.init()
    yield
    ringjax.shutdown()


def aliases(f: Any, *args: Any, donate: Any = ()) -> list[list[int]]:
    """Returns the aliased operands of each native call of `f`."""
    text = jax.jit(f, donate_argnums=donate).lower(*args).as_text()
    pairs = [ALIAS.findall(call.rest) for call in found_in(text)]
    assert all(int(result or 0) == int(operand) for p in pairs for result, operand in p)
    return [[int(operand) for _, operand in p] for p in pairs]


def copies(f: Any, *args: Any, donate: Any = ()) -> int:
    compiled = jax.jit(f, donate_argnums=donate).lower(*args).compile()
    text = compiled.as_text() or ""
    return len(re.findall(r" copy\(", text[text.index("ENTRY") :]))


def reduce(x: Any) -> Any:
    return ringjax.allreduce(x, op=ringjax.Sum)


def reduce_chained(x: Any, seq: Any) -> Any:
    return chained(list(x), seq)


def reduce_overlapped(x: Any, seq: Any) -> Any:
    return chained(list(x), seq, cuts=((1,), (0,)))


# -- the alias -------------------------------------------------------------------------


def test_donated_arguments_are_aliased() -> None:
    assert aliases(reduce, PAIR, donate=0) == [[0, 1]]
    assert aliases(lambda x: ringjax.broadcast(x, 0), PAIR, donate=0) == [[0, 1]]
    assert aliases(reduce_chained, PAIR, SEQ, donate=(0, 1)) == [[0, 1, 2]]


def test_kept_arguments_are_not_aliased() -> None:
    assert aliases(reduce, PAIR) == [[]]
    assert aliases(lambda x: ringjax.broadcast(x, 0), PAIR) == [[]]
    assert aliases(reduce_chained, PAIR, SEQ) == [[]]


def test_each_operand_is_aliased_separately() -> None:
    def step(kept: Any, given: Any, seq: Any) -> Any:
        return chained([kept, given, kept * 2], seq)

    assert aliases(step, *PAIR, SEQ, donate=1) == [[1, 2]]
    assert aliases(step, *PAIR, SEQ, donate=2) == [[2, 3]]


def test_temporaries_are_aliased() -> None:
    def twice(x: Any) -> Any:
        return [y + 1 for y in reduce([y * 2 for y in x])]

    assert aliases(twice, PAIR) == [[0, 1]]
    # The second call's operands are results of the first one.
    assert aliases(lambda x: reduce(reduce(x)), PAIR) == [[], [0, 1]]


def test_a_result_of_another_shape_is_not_aliased() -> None:
    assert aliases(ringjax.allgather, PAIR) == [[]]
    assert aliases(ringjax.allgather, PAIR, donate=0) == [[]]


def test_unusable_donations_are_not_aliased() -> None:
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        assert aliases(lambda x: reduce(x)[:2], PAIR[0], donate=0) == [[]]


def test_a_temporary_is_reused_by_the_next_call() -> None:
    """docs/train/tuning.md promises that large results need no memory and no copies."""
    step = jax.jit(lambda x, memory: reduce(x), donate_argnums=1, keep_unused=True)
    x, result = jnp.full(1000, 3.0), jnp.zeros(1000)
    text = step.lower(x, result).compile().as_text() or ""
    assert not re.findall(r" copy\(", text[text.index("ENTRY") :])
    place = result.unsafe_buffer_pointer()
    for _ in range(3):
        result = step(x, result)
        assert result.unsafe_buffer_pointer() == place
        np.testing.assert_array_equal(result, x)


def test_reshaped_arguments_count_as_arguments() -> None:
    matrix = np.ones((2, 3), np.float32)
    assert aliases(lambda x: reduce(x.reshape(-1)), matrix) == [[]]
    assert aliases(lambda x: reduce(x.reshape(3, 2).T), matrix) == [[0]]
    flat = jax.jit(lambda x: reduce(x.reshape(-1)).reshape(2, 3), donate_argnums=0)
    (call,) = found_in(flat.lower(matrix).as_text())
    assert ALIAS.findall(call.rest)


def test_arguments_of_inner_functions_are_aliased() -> None:
    assert aliases(lambda x: jax.jit(reduce)(x), PAIR) == [[0, 1]]

    def body(carry: Any, _: Any) -> Any:
        return reduce(carry), None

    assert aliases(lambda x: jax.lax.scan(body, x, None, length=2)[0], PAIR) == [[0, 1]]


def test_vmap_and_shard_map() -> None:
    rows = np.ones((4, 3), np.float32)
    assert aliases(jax.vmap(reduce), rows) == [[]]
    assert aliases(jax.vmap(reduce), rows, donate=0) == [[0]]
    seqs = np.zeros((4, 1), np.uint32)
    ensemble = jax.vmap(lambda x, s: chained([x], s))
    assert aliases(ensemble, rows, seqs) == [[1]]  # slices of seqs are temporaries
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec)
    assert aliases(mapped, rows) == [[0]]


def test_start_and_done_alias_all_but_arguments() -> None:
    # The calls are START of leaf 1, START of leaf 0, and the two DONEs. After the first
    # call, `seq` is a temporary value, which every later call may alias.
    found = aliases(reduce_overlapped, PAIR, SEQ)
    assert found == [[], [1], [0, 1], [0, 1]]
    found = aliases(reduce_overlapped, PAIR, SEQ, donate=(0, 1))
    assert found == [[0, 1]] * 4


# -- the copies ------------------------------------------------------------------------


@pytest.mark.parametrize("f", [reduce_chained, reduce_overlapped])
@pytest.mark.parametrize("donate", [(), (0,), (1,), (0, 1)])
def test_xla_copies_no_argument(f: Any, donate: tuple[int, ...]) -> None:
    assert copies(f, PAIR, SEQ, donate=donate) == 0


def test_xla_copies_nothing_for_single_calls() -> None:
    assert copies(reduce, PAIR) == 0
    assert copies(reduce, PAIR, donate=0) == 0


@pytest.mark.parametrize("cuts", [None, ((1,), (0,))])
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_xla_copies_nothing_in_a_training_step(
    cuts: Any, donate: tuple[int, ...]
) -> None:
    def step(params: Any, seq: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(p[0] @ p[1]) ** 2))(params)
        grads, seq = chained(grads, seq, cuts)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], seq

    params = [jnp.ones((256, 256)), jnp.ones((256, 256))]
    assert copies(step, params, SEQ, donate=donate) == 0


@pytest.mark.parametrize("f", [reduce_chained, reduce_overlapped])
def test_undonated_arguments_keep_their_values(f: Any) -> None:
    given = [jnp.arange(5.0), jnp.arange(6.0)]
    seq = jnp.zeros(1, jnp.uint32)
    for donate in ((), (1,)):
        out, after = jax.jit(f, donate_argnums=donate)(given, seq)
        np.testing.assert_array_equal(out[1], np.arange(6.0))
        np.testing.assert_array_equal(given[1], np.arange(6.0))
        assert after[0] == 1
        assert out[0].unsafe_buffer_pointer() != given[0].unsafe_buffer_pointer()
