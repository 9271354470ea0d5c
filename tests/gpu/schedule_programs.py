"""Checks XLA's schedules of usual training programs for several GPUs.

Like schedule_several.py, for a program of each kind: with flax, with accumulation, with
steps in a loop, with two transforms. In every program XLA has the collectives that it
would have without ringjax, or an all-reduce becomes three operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen
import jax
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import described_gpu
from support.described_gpu import BATCH, F32, LAYERS, ROWS, WIDTH, Shape
from support.hlo import COLLECTIVE, Program

import ringjax
from ringjax.xla import lowering

DEVICES = 4
P = PartitionSpec
# A step, and the shapes of its state.
Built = tuple[Callable[..., Any], Any]


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[Any]:
    """Four described GPUs of one process, which do not exist."""
    ringjax.init()
    yield described_gpu.gpus(DEVICES)
    ringjax.shutdown()


def loss(params: Any, batch: Any) -> Any:
    # On explicit axes JAX gathers no sharded parameters by itself.
    if jax.typeof(batch[0]).sharding.mesh.explicit_axes:
        params = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params)
    return described_gpu.dense_loss(params, batch)


def dense(tx: Any) -> Built:
    params = described_gpu.dense()

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, jax.eval_shape(tx.init, params))


def accumulating(tx: Any) -> Built:
    """Returns a step that averages every second time."""
    return dense(optax.MultiSteps(tx, 2))


def two(tx: Any) -> Built:
    """Returns a step with an optimizer for matrices and another one for biases."""
    other = optax.chain(tx, optax.scale(0.5))
    names = {f"layer_{i}": {"w": "w", "b": "b"} for i in range(LAYERS)}
    return dense(optax.multi_transform({"w": tx, "b": other}, names))


def looping(tx: Any) -> Built:
    step, state = dense(tx)

    def steps(carry: Any, batch: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            return step(carry, batch), None

        return jax.lax.scan(one, carry, length=3)[0]

    return steps, state


def linen(tx: Any) -> Built:
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(LAYERS):
                x = flax.linen.tanh(flax.linen.Dense(WIDTH)(x))
            return x

    model = Model()

    def make() -> TrainState:
        params = model.init(jax.random.key(0), jax.numpy.zeros((1, WIDTH), F32))
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: TrainState, batch: Any) -> TrainState:
        x, y = batch
        grads = jax.grad(lambda p: ((model.apply(p, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    return step, jax.eval_shape(make)


def of_nnx(tx: Any) -> Built:
    def make() -> Any:
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            *(
                layer
                for _ in range(LAYERS)
                for layer in (nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.tanh)
            )
        )
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        x, y = batch
        grads = nnx.grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1]

    return step, state


def compiled(
    mesh: Any, spec: Any, build: Callable[[Any], Built], transform: Any
) -> Program:
    def place(x: Any, spec: Any) -> Any:
        chosen = spec if x.shape and x.shape[0] % DEVICES == 0 else P()
        return Shape(x.shape, x.dtype, sharding=NamedSharding(mesh, chosen))

    step, state = build(optax.chain(transform, optax.adam(1e-3)))
    state = jax.tree.map(lambda x: place(x, spec), state)
    batch = tuple(place(x, P(mesh.axis_names)) for x in ROWS)
    assert batch[0].shape == (BATCH, WIDTH)
    with jax.set_mesh(mesh), lowering.without_device():
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    return Program(
        lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()
    )


PROGRAMS = {
    "MultiSteps": accumulating, "two": two, "scan": looping, "linen": linen,
    "nnx": of_nnx,
}  # fmt: skip
# Cut over all devices, over those of a half only, or alike on all of them.
CUTS = {"cut": ((4,), P("d")), "half": ((2, 2), P("t")), "alike": ((4,), P())}
EXPLICIT = {"MultiSteps", "two", "scan"}  # layers of flax do not say what is gathered
ROW = [
    pytest.param(name, kind, cut, id=f"{name}-{kind.name}-{cut}")
    for name in PROGRAMS
    for kind in (AxisType.Auto, AxisType.Explicit)
    for cut in CUTS
    if kind is AxisType.Auto or name in EXPLICIT
]


@pytest.mark.parametrize(("name", "kind", "cut"), ROW)
def test_no_program_has_additional_collectives(
    gpus: Any, name: str, kind: AxisType, cut: str
) -> None:
    shape, spec = CUTS[cut]
    axes = ("d", "t")[: len(shape)]
    mesh = jax.sharding.Mesh(gpus.reshape(shape), axes, axis_types=(kind,) * len(axes))
    plain, program = (
        compiled(mesh, spec, PROGRAMS[name], transform)
        for transform in (optax.identity(), ringjax.allreduce_grads())
    )
    calls = 2 if name == "two" else 1
    assert program.count_everywhere() == calls
    assert program.text.count('partition = "4 devices (0, 1, 2, 3)') == calls
    before, found = (Counter(COLLECTIVE.findall(one.text)) for one in (plain, program))
    print(f"\n{name}, {kind.name}, {cut}: {dict(before)} -> {dict(found)}")
    gathered, summed = (found[k] - before[k] for k in ("all-gather", "all-reduce"))
    # A sum over the devices becomes a cut sum; that of what is small stays beside it.
    summed += found["reduce-scatter"] - before["reduce-scatter"]
    assert gathered == (cut != "cut")
    assert summed in ((0, 1) if cut == "alike" else (0,))
    assert {*found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    if cut == "cut":
        assert found == before
