"""Checks XLA's schedule of a training step for several GPUs of a process.

As in schedule.py, no GPU is needed. Here XLA has collectives of its own, over the
devices of the process. ringjax may add only those that gather the shares it has
distributed, and must copy nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import described_gpu
from support.described_gpu import (
    LAYERS,
    MATRIX,
    ROWS,
    WIDTH,
    Shape,
    dense,
    dense_loss,
)  # fmt: skip
from support.hlo import COLLECTIVE, Program

import ringjax
from ringjax.xla import lowering

DEVICES = 4
P = PartitionSpec
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[Any]:
    """Four described GPUs of one process, which do not exist."""
    ringjax.init()
    yield described_gpu.gpus(DEVICES)
    ringjax.shutdown()


class Step:
    """Returns a training step with parameters sharded over rows, or replicated."""

    def __init__(self, gpus: Any, kind: AxisType, cut: bool, hiding: bool) -> None:
        self._mesh = jax.sharding.Mesh(gpus, ("d",), axis_types=(kind,))
        self._spec, self._kind = P("d") if cut else P(), kind
        self._hiding = hiding

    def _place(self, tree: Any, spec: Any) -> Any:
        def one(x: Any) -> Any:
            chosen = spec if x.shape and x.shape[0] % DEVICES == 0 else P()
            where = NamedSharding(self._mesh, chosen)
            return Shape(x.shape, x.dtype, sharding=where)

        return jax.tree.map(one, tree)

    def _loss(self, params: Any, batch: Any) -> Any:
        if self._kind is AxisType.Explicit:  # JAX does not gather these itself
            params = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params)
        return dense_loss(params, batch)

    def compiled(self, transform: Any) -> Program:
        tx = optax.chain(transform, optax.adam(1e-3))

        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(self._loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        params = self._place(dense(), self._spec)
        state = self._place(jax.eval_shape(tx.init, params), self._spec)
        with jax.set_mesh(self._mesh), lowering.without_device():
            lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
                params, state, self._place(ROWS, P("d"))
            )
        options = {
            "xla_gpu_enable_latency_hiding_scheduler": self._hiding,
            "xla_gpu_autotune_level": 0,
        }
        program = Program(lowered.compile(compiler_options=options).as_text())
        print(f"\njax {jax.__version__}:\n  {program}")
        return program


def collectives(program: Program) -> Counter[str]:
    """Returns XLA's own collectives."""
    return Counter(COLLECTIVE.findall(program.text))


def check_call(program: Program, elements: int) -> None:
    """Checks that one call sends all `elements` in place, after the backward pass."""
    (call,) = program.calls()
    assert program.count_everywhere() == 1
    assert call.kind == "RUN0"
    assert len(call.operands) == 2 * LAYERS + 1
    assert call.aliases == [(i, i) for i in range(2 * LAYERS)], call.rest
    assert not program.heavy_between(call, program.instructions[-1])
    for operand in call.operands[:-1]:
        origin, _ = program.origin(operand)
        assert origin.opcode != "copy", f"{origin.name} is copied for {call.name}"
    shapes = re.findall(r"f32\[([\d,]*)\]", call.shape)
    sizes = [int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes]
    assert sum(sizes) == elements
    assert re.search(r'partition = "4 devices \(0, 1, 2, 3\)', call.rest), call.rest


PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("hiding", [False, True], ids=["default", "latency-hiding"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_sharded_parameters_cost_no_additional_collective(
    gpus: Any, kind: AxisType, hiding: bool
) -> None:
    step = Step(gpus, kind, True, hiding)
    plain = collectives(step.compiled(optax.identity()))
    program = step.compiled(ringjax.allreduce_grads())
    assert collectives(program) == plain
    assert plain["reduce-scatter"] == 1
    check_call(program, PARAMETERS // DEVICES)


@pytest.mark.parametrize("hiding", [False, True], ids=["default", "latency-hiding"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_replicated_parameters_are_reduced_in_three_parts(
    gpus: Any, kind: AxisType, hiding: bool
) -> None:
    """XLA's sum over devices becomes a sharded sum, ringjax's call, and a gather."""
    step = Step(gpus, kind, False, hiding)
    plain = collectives(step.compiled(optax.identity()))
    assert plain == {"all-reduce": 1}
    program = step.compiled(ringjax.allreduce_grads())
    # Biases are small, so their sum and the loss's stay one all-reduce.
    found = {"all-reduce": 1, "reduce-scatter": 1, "all-gather": 1}
    assert collectives(program) == found
    check_call(program, PARAMETERS // DEVICES)
    order = [
        x.opcode for x in program.instructions if COLLECTIVE.search(f" {x.opcode}(")
    ]
    assert order[-1].startswith("all-gather")
    places = {x.opcode: i for i, x in enumerate(program.instructions)}
    (call,) = program.calls()
    here = program.place(call.name)
    assert places["reduce-scatter-done"] < here < places["all-gather-start"]


def test_the_gradients_travel_in_one_call_with_and_without_overlap(gpus: Any) -> None:
    """XLA puts its sums over the devices at the end of the backward pass."""
    step = Step(gpus, AxisType.Auto, True, False)
    program = step.compiled(
        ringjax.allreduce_grads(overlap=True, bucket_bytes=2 * MATRIX)
    )
    check_call(program, PARAMETERS // DEVICES)


def test_calls_with_tokens(gpus: Any) -> None:
    """A number that stands for a token orders a metric before the gradients."""
    mesh = jax.sharding.Mesh(gpus, ("d",))
    tx = ringjax.allreduce_grads()

    def step(x: Any, state: Any) -> Any:
        total = ringjax.allreduce(x.sum())
        return *tx.update(x, state), total

    x = Shape((1 << 16,), np.float32, sharding=NamedSharding(mesh, P("d")))
    state = jax.eval_shape(tx.init, x)
    place = NamedSharding(mesh, P())
    state = jax.tree.map(lambda s: Shape(s.shape, s.dtype, sharding=place), state)
    with lowering.without_device():
        lowered = jax.jit(step).lower(x, state)
    text = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()
    targets = re.findall(r'custom_call_target="ringjax_(\w+)"', text)
    assert Counter(targets) == {"run": 2, "order": 2}
