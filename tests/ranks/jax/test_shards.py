"""Processes with several devices: JAX shards within a process, ringjax reduces between.

Training must equal that of one device with the data of all ranks
(support/local_devices.py), and all ranks must have equal bits.
"""

from __future__ import annotations

import functools
import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import local_devices as devices

import ringjax
from ringjax import runtime
from ringjax.xla import multi_device

pytestmark = [
    pytest.mark.ranks(3, env=devices.environment(4)),
    pytest.mark.launch("shards"),
    pytest.mark.usefixtures("world"),
]
KINDS = [AxisType.Auto, AxisType.Explicit]


def rows(count: int = 8) -> np.ndarray:
    return np.arange(4.0 * count).reshape(count, 4)


def summed(x, size: int):
    """Returns the sum over ranks of `x * (rank + 1)`."""
    return x * (size * (size + 1) / 2)


MESHES = {
    "fsdp": ((4,), devices.FSDP),
    "tensor": ((2, 2), devices.TENSOR),
    "two-of-four": ((2,), devices.FSDP),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("name", MESHES)
def test_training_equals_that_of_one_device_with_all_data(world, name, kind) -> None:
    shape, specs = MESHES[name]
    mesh = devices.mesh(shape, kind, jax.devices()[: int(np.prod(shape))])
    params = devices.place(devices.parameters(), specs, mesh)
    devices.train_as_one(world, ringjax.allreduce_grads(), params, mesh)


def test_donated_and_in_a_scan(world) -> None:
    mesh = devices.mesh((4,))
    x = jax.device_put(np.ones((8, 2)), NamedSharding(mesh, P("d")))
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(params * (world.rank + 1), state)
        return (optax.apply_updates(params, updates), state), None

    step = jax.jit(lambda c: jax.lax.scan(body, c, length=4)[0], donate_argnums=0)
    params, _ = step((x, tx.init(x)))
    factor = 1 - 0.1 * (world.size + 1) / 2
    np.testing.assert_allclose(params, np.full((8, 2), factor**4), 1e-12)


def test_two_transforms_and_other_calls_in_one_program(world) -> None:
    mesh = devices.mesh((4,))
    x = jax.device_put(rows(), NamedSharding(mesh, P("d")))
    one = ringjax.allreduce_grads(op=ringjax.Sum, name="one")
    two = ringjax.allreduce_grads(op=ringjax.Max, name="two")

    @jax.jit
    def program(x, states):
        a, first = one.update(x * (world.rank + 1), states[0])
        total = ringjax.allreduce(x.sum() * (world.rank + 1), op=ringjax.Sum)
        b, second = two.update({"x": x + world.rank}, states[1])
        ringjax.barrier()
        return a, total, b["x"], (first, second)

    states = (one.init(x), two.init(x))
    for _ in range(3):
        a, total, b, states = program(x, states)
        np.testing.assert_array_equal(a, summed(rows(), world.size))
        assert float(total) == summed(rows().sum(), world.size)
        np.testing.assert_array_equal(b, rows() + world.size - 1)
    assert [s.seq.tolist() for s in states] == [[3], [3]]


def test_micro_batches_and_ensembles(world) -> None:
    mesh = devices.mesh((4,))
    where = NamedSharding(mesh, P("d"))
    tx = optax.MultiSteps(optax.chain(ringjax.allreduce_grads(), optax.sgd(1.0)), 2)
    params = jax.device_put(np.zeros(8), where)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(4):
        grads = jax.device_put(np.full(8, float(world.rank + step)), where)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, -np.full(8, world.size - 1 + 3.0), 1e-12)
    many = jax.device_put(
        np.full((3, 8), world.rank + 1.0), NamedSharding(mesh, P(None, "d"))
    )
    out = jax.jit(jax.vmap(lambda x: ringjax.allreduce(x, op=ringjax.Sum)))(many)
    np.testing.assert_array_equal(out, summed(np.ones((3, 8)), world.size))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_allreduce_and_broadcast_keep_the_sharding(world, kind, jit) -> None:
    mesh = devices.mesh((2, 2), kind)
    wrap = jax.jit if jit else lambda f: f
    own = world.rank + 1
    for spec in (P("d", "t"), P("t"), P(("t", "d")), P()):
        x = jax.device_put(rows(), NamedSharding(mesh, spec))
        mine = x * own
        for op, want in (
            (ringjax.Sum, summed(rows(), world.size)),
            (ringjax.Min, rows()),
            (ringjax.Max, rows() * world.size),
        ):
            got = wrap(lambda v, op=op: ringjax.allreduce(v, op=op))(mine)
            np.testing.assert_array_equal(got, want)
            assert got.sharding.is_equivalent_to(x.sharding, 2)
        root = world.size - 1
        got = wrap(functools.partial(ringjax.broadcast, root_rank=root))(mine)
        np.testing.assert_array_equal(got, rows() * world.size)
        assert got.sharding.is_equivalent_to(x.sharding, 2)


def test_dtypes_shapes_and_the_wire(world) -> None:
    mesh = devices.mesh((4,))
    tree = {
        "bool": np.arange(4) == world.rank, "int8": np.full((4, 3), 2, np.int8),
        "half": np.full(12, 1.5, jnp.bfloat16), "complex": np.full(4, 1 + 2j),
        "none": np.zeros((4, 0)), "number": np.float32(2), "odd": np.ones(7),
    }  # fmt: skip
    specs = {k: P() if k in ("number", "odd") else P("d") for k in tree}
    out = ringjax.allreduce(devices.place(tree, specs, mesh), op=ringjax.Sum)
    n = world.size
    for key, value in tree.items():
        want = np.arange(4) < n if key == "bool" else (value * n).astype(value.dtype)
        np.testing.assert_array_equal(np.asarray(out[key]), want)
        assert out[key].dtype == value.dtype
    tx = ringjax.allreduce_grads(compression=ringjax.Compression.bf16)
    grads = devices.place(
        {"w": np.linspace(1, 2, 64, dtype=np.float32) + world.rank}, {"w": P("d")}, mesh
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(None))
    mean = np.linspace(1, 2, 64) + (n - 1) / 2
    np.testing.assert_allclose(updates["w"], mean, 2e-2)
    devices.same_bits_everywhere(updates)


def test_uneven_shardings(world) -> None:
    mesh = devices.mesh((4,))
    where = NamedSharding(mesh, P("d"))
    x = jax.device_put(np.arange(8.0), where)

    @jax.jit
    def program(x):
        odd = jax.lax.with_sharding_constraint(x[:7] * (world.rank + 1), where)
        return ringjax.allreduce(odd, op=ringjax.Sum)

    np.testing.assert_array_equal(program(x), summed(np.arange(7.0), world.size))


def test_replicated_data_travel_once(world) -> None:
    mesh = devices.mesh((2, 2))
    x = devices.place({"a": rows(), "b": rows()}, {"a": P("d"), "b": P()}, mesh)
    jax.block_until_ready(ringjax.allreduce(x))

    def sent() -> tuple[int, int]:
        stats = runtime.communicator().stats()["allreduce"]
        return stats["calls"], stats["bytes"]

    before = sent()
    jax.block_until_ready(ringjax.allreduce(x))
    after = sent()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 2 * rows().nbytes)


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_of_shard_map(world, check_vma) -> None:
    """Each device communicates with the devices of the same position on other ranks."""
    mesh = devices.mesh((4,))
    x = jax.device_put(rows(), NamedSharding(mesh, P("d")))
    n = world.size

    def each(v):
        mean = jax.lax.pmean(v, "d")
        return {
            "sum": ringjax.allreduce(v, op=ringjax.Sum),
            "same": jax.lax.pmean(ringjax.allreduce(mean, op=ringjax.Sum), "d"),
            "all": ringjax.allgather(v),
            "part": ringjax.reducescatter(jnp.tile(v, (n, 1)), op=ringjax.Sum),
            "swap": ringjax.alltoall(jnp.tile(v, (n, 1))),
        }

    specs = {"sum": P("d"), "same": P(), "all": P("d"), "part": P("d"), "swap": P("d")}
    f = jax.jit(
        jax.shard_map(
            each, mesh=mesh, in_specs=P("d"), out_specs=specs, check_vma=check_vma
        )
    )
    out = f(x * (world.rank + 1))
    own = rows().reshape(4, 2, 4)  # axis 0 is the device
    want = summed(rows(), n)
    np.testing.assert_array_equal(out["sum"], want)
    np.testing.assert_allclose(out["same"], summed(own.mean(0), n), 1e-12)
    np.testing.assert_array_equal(out["part"], want)
    everyone = np.concatenate([own * (r + 1) for r in range(n)], axis=1).reshape(-1, 4)
    np.testing.assert_array_equal(out["all"], everyone)
    np.testing.assert_array_equal(out["swap"], everyone)


def test_gradients_inside_of_shard_map(world) -> None:
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads()
    x = jax.device_put(rows() + world.rank, NamedSharding(mesh, P("d")))

    def step(v, state):
        updates, state = tx.update({"cut": v, "whole": jax.lax.pmean(v, "d")}, state)
        return updates, state

    out = ({"cut": P("d"), "whole": P()}, P())
    f = jax.shard_map(step, mesh=mesh, in_specs=(P("d"), P()), out_specs=out)
    updates, state = jax.jit(f)(x, tx.init(None))
    mean = rows() + (world.size - 1) / 2
    np.testing.assert_allclose(updates["cut"], mean, 1e-12)
    np.testing.assert_allclose(updates["whole"], mean.reshape(4, 2, 4).mean(0), 1e-12)
    assert state.seq.tolist() == [1]


def test_a_different_device_order_on_one_rank_is_harmless(world) -> None:
    order = jax.devices() if world.rank else jax.devices()[::-1]
    mesh = devices.mesh((4,), devices=order)
    x = jax.device_put(rows() * (world.rank + 1), NamedSharding(mesh, P("d")))
    want = summed(rows(), world.size)
    np.testing.assert_array_equal(ringjax.allreduce(x, op=ringjax.Sum), want)
    f = jax.shard_map(
        lambda v: ringjax.allreduce(v, op=ringjax.Sum),
        mesh=mesh, in_specs=P("d"), out_specs=P("d"),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(f)(x), want)


def test_control_arrival_order_gives_wrong_sums(world, monkeypatch) -> None:
    """A control: if every device called separately, counterparts would be mixed up."""
    monkeypatch.setitem(multi_device._TARGETS, "run", "ringjax_run")
    mesh = devices.mesh((2,), devices=jax.devices()[:2])
    late = 0 if world.rank else 1

    def calls() -> int:
        return runtime.communicator().stats().get("allreduce", {"calls": 0})["calls"]

    before = calls()

    def wait(device, v):
        while int(device) == late and calls() == before:
            time.sleep(0.01)
        return v

    def each(v):
        v = jax.pure_callback(wait, v, jax.lax.axis_index("d"), v)
        return ringjax.allreduce(v, op=ringjax.Sum)

    x = jax.device_put(np.array([1.0, 10.0]), NamedSharding(mesh, P("d")))
    f = jax.shard_map(
        each, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    got = np.asarray(jax.jit(f)(x))
    assert sorted(got.tolist()) != [world.size, 10.0 * world.size]


def test_a_different_sharding_on_one_rank_raises_and_the_next_call_works(world) -> None:
    mesh = devices.mesh((2, 2))
    spec = P("d") if world.rank == 0 else P(None, "d")
    x = {"kernel": jax.device_put(np.ones((4, 4)), NamedSharding(mesh, spec))}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"'kernel\[0:2,0:4\]' f64"):
        jax.block_until_ready(ringjax.allreduce(x))
    same = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, P("d")))
    got = ringjax.allreduce(same, op=ringjax.Sum)
    np.testing.assert_array_equal(got, np.full((4, 4), world.size))


def test_different_devices_on_one_rank_raise(world) -> None:
    own = jax.devices()[:2] if world.rank == 0 else jax.devices()[2:]
    mesh = devices.mesh((2,), devices=own)
    x = jax.device_put(np.ones(4), NamedSharding(mesh, P("d")))
    text = r"rank 0 sent 2 devices \(0, 1\), rank 1 sent 2 devices \(2, 3\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(ringjax.allreduce(x))


def test_broadcast_parameters_keep_their_sharding(world) -> None:
    mesh = devices.mesh((4,), AxisType.Explicit)
    own = jax.tree.map(lambda x: x * (world.rank + 1), devices.parameters())
    tree = {
        "params": devices.place(own, devices.FSDP, mesh),
        "key": jax.random.key(world.rank),
        "step": world.rank,
        "host": np.arange(3) + world.rank,
    }
    got = ringjax.broadcast_parameters(tree)
    for key, value in devices.parameters().items():
        np.testing.assert_array_equal(got["params"][key], value)
        where = tree["params"][key].sharding
        assert got["params"][key].sharding.is_equivalent_to(where, value.ndim)
    assert got["step"] == 0 and got["host"].tolist() == [0, 1, 2]
    assert (
        jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(0))
    ).all()


def test_metrics_of_sharded_arrays(world) -> None:
    mesh = devices.mesh((4,))
    x = jax.device_put(np.arange(4.0) + world.rank, NamedSharding(mesh, P("d")))
    got = ringjax.allreduce_metrics({"x": x, "mean": x.mean()}, op=ringjax.Sum)
    n = world.size
    np.testing.assert_allclose(got["x"], np.arange(4) * n + n * (n - 1) / 2)
    assert got["mean"] == pytest.approx(1.5 * n + n * (n - 1) / 2)


def test_compilation_on_other_threads(world) -> None:
    """The partitioning rule runs on the compiling thread, which then ends."""
    mesh = devices.mesh((4,))
    x = jax.device_put(np.ones(8), NamedSharding(mesh, P("d")))
    for number in range(3):
        f = jax.jit(lambda v, k=float(number): ringjax.allreduce(v * k, op=ringjax.Sum))
        thread = threading.Thread(target=f.lower(x).compile)
        thread.start()
        thread.join()
        gc.collect()
        np.testing.assert_array_equal(f(x), np.full(8, number * world.size))
    jax.clear_caches()
    gc.collect()


def test_the_program_has_one_call_and_no_extra_collectives(world) -> None:
    mesh = devices.mesh((4,), AxisType.Explicit)
    params = devices.place(devices.parameters(), devices.FSDP, mesh)
    x = jax.device_put(devices.data(0, 0), NamedSharding(mesh, P("d")))

    def text(tx) -> str:
        def step(params, state, x):
            grads = jax.grad(devices.loss)(params, x)
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state

        with jax.set_mesh(mesh):
            lowered = jax.jit(step).lower(params, tx.init(params), x)
        return lowered.compile().as_text()

    reduced, plain = text(ringjax.allreduce_grads()), text(optax.identity())
    assert reduced.count('custom_call_target="ringjax_meet"') == 1
    for collective in (" all-gather(", " all-reduce(", " all-to-all("):
        assert reduced.count(collective) == plain.count(collective), collective
