"""Devices that each send a share of replicated data, as on CUDA, tested on CPU devices.

CPU devices still meet in each call, and their shares are sent like shards. Which shares
there are, how they are reassembled, and what XLA compiles are as on CUDA. Tests in
tests/ranks/cuda use stubs to show that each CUDA device makes its own calls.
"""

from __future__ import annotations

import re

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
from ringjax.xla import lowering, shares

# Three ranks run all code of this layer.
pytestmark = [
    pytest.mark.ranks(3, env=devices.environment(4)),
    pytest.mark.launch("shards"),
    pytest.mark.usefixtures("world", "shared"),
]
KINDS = [AxisType.Auto, AxisType.Explicit]
MESHES = {
    "fsdp": ((4,), devices.FSDP),
    "tensor": ((2, 2), devices.TENSOR),
    "all-alike": ((2, 2), {name: P() for name in devices.FSDP}),
}


@pytest.fixture(params=[64, 1 << 40], ids=["by-sharding", "by-share"])
def shared(request, monkeypatch):
    """Enables shares, which XLA splits from 64 bytes on, or (with 1 << 40) never."""
    monkeypatch.setattr(shares, "splits_replicas", lambda platform: True)
    monkeypatch.setattr(shares, "MIN_SHARDED_BYTES", request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


def sent() -> int:
    return runtime.communicator().stats().get("allreduce", {"bytes": 0})["bytes"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("name", MESHES)
def test_training_equals_that_of_one_device_with_all_data(world, name, kind) -> None:
    shape, specs = MESHES[name]
    mesh = devices.mesh(shape, kind)
    params = devices.place(devices.parameters(), specs, mesh)
    devices.train_as_one(world, ringjax.allreduce_grads(), params, mesh)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_every_sharding_of_every_shape_and_type(world, kind) -> None:
    mesh = devices.mesh((2, 2), kind)
    values = {
        "bool": np.arange(4) == world.rank, "int8": np.full((4, 3), 2, np.int8),
        "half": np.arange(12).astype(jnp.bfloat16), "complex": np.full(4, 1 + 2j),
        "none": np.zeros((4, 0)), "number": np.float32(2), "odd": np.arange(7.0),
        "whole": np.arange(64.0).reshape(4, 4, 4),
    }  # fmt: skip
    for spec in (P(), P("d"), P("t"), P(None, "d"), P("t", "d"), P(("t", "d"))):
        specs = {
            k: P(*spec[: np.ndim(v)]) if k not in ("number", "odd") else P()
            for k, v in values.items()
        }
        specs["int8"] = P(*spec[:1])
        specs["none"] = P(*spec[:1])
        x = devices.place(values, specs, mesh)
        before = sent()
        out = ringjax.allreduce(x, op=ringjax.Sum)
        jax.block_until_ready(out)
        # Each element is sent once. Up to three elements of padding fill the shares.
        most = sum(v.nbytes + 4 * v.itemsize for v in map(np.asarray, values.values()))
        assert sent() - before <= most
        for key, value in values.items():
            n = world.size
            want = np.asarray(value * n).astype(value.dtype)
            if key == "bool":
                want = np.arange(4) < n
            np.testing.assert_array_equal(np.asarray(out[key]), want)
            kept = out[key].sharding.is_equivalent_to(x[key].sharding, np.ndim(value))
            assert kept or np.size(value) == 0
        devices.same_bits_everywhere(out)


def test_set_mesh_does_not_shard_the_part_of_a_device(world) -> None:
    """With explicit axes, a replicated array on each device must stay whole."""
    mesh = devices.mesh((2, 2), AxisType.Explicit)
    x = np.arange(21.0).reshape(7, 3)
    with jax.set_mesh(mesh):
        mine = jax.device_put(x, NamedSharding(mesh, P()))
        got = jax.jit(lambda v: ringjax.allreduce(v, op=ringjax.Sum))(mine)
    np.testing.assert_array_equal(got, x * world.size)
    devices.same_bits_everywhere(got)


def test_broadcast_and_a_mesh_of_some_devices(world) -> None:
    mesh = devices.mesh((3,), devices=jax.devices()[1:])
    x = np.arange(70.0).reshape(7, 10)
    mine = jax.device_put(x * (world.rank + 1), NamedSharding(mesh, P()))
    got = jax.jit(lambda v: ringjax.broadcast(v, root_rank=1))(mine)
    np.testing.assert_array_equal(got, x * 2)
    devices.same_bits_everywhere(got)


def test_in_a_scan_and_beside_other_calls(world) -> None:
    mesh = devices.mesh((4,))
    x = jax.device_put(np.ones((8, 2)), NamedSharding(mesh, P()))
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(params * (world.rank + 1), state)
        total = ringjax.allreduce(params.sum(), op=ringjax.Sum)
        return (optax.apply_updates(params, updates), state), total

    step = jax.jit(lambda c: jax.lax.scan(body, c, length=4), donate_argnums=0)
    (params, _), totals = step((x, tx.init(x)))
    factor = 1 - 0.1 * (world.size + 1) / 2
    np.testing.assert_allclose(params, np.full((8, 2), factor**4), 1e-12)
    want = [16 * world.size * factor**i for i in range(4)]
    np.testing.assert_allclose(totals, want, 1e-12)
    devices.same_bits_everywhere(params)


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_of_shard_map(world, check_vma) -> None:
    """With check_vma, JAX tells which arrays are replicated; without, none count so."""
    mesh = devices.mesh((2, 2))
    tx = ringjax.allreduce_grads()
    x = np.arange(56.0).reshape(8, 7)
    mine = jax.device_put(x + world.rank, NamedSharding(mesh, P("d", None)))

    def step(v, state):
        same = {"d": jax.lax.pmean(v, "d"), "number": jax.lax.pmean(1.0, "t")}
        updates, state = tx.update({**same, "cut": v}, state)
        return updates, state, ringjax.allreduce(v, op=ringjax.Max)

    specs = ({"d": P(), "cut": P("d"), "number": P()}, P(), P("d"))
    f = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("d"), P()),
            out_specs=specs,
            check_vma=check_vma,
        )
    )
    before = sent()
    updates, state, most = jax.block_until_ready(f(mine, tx.init(None)))
    bytes_sent = sent() - before
    mean = x + (world.size - 1) / 2
    np.testing.assert_allclose(updates["cut"], mean, 1e-12)
    np.testing.assert_allclose(updates["d"], mean.reshape(2, 4, 7).mean(0), 1e-12)
    np.testing.assert_array_equal(most, x + world.size - 1)
    assert state.seq.tolist() == [1]
    if check_vma:
        assert bytes_sent <= 8 * (28 + 56 + 1 + 56 + 4 * 4)
        devices.same_bits_everywhere((updates, most))


def test_the_calls_of_cuda_devices(world) -> None:
    """Each CUDA device makes its own call, which describes the data of all devices."""
    del world
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads()

    def step(v, state):
        updates, state = tx.update({"cut": v, "same": jax.lax.psum(v, "d")}, state)
        return updates, state, ringjax.allgather(v), ringjax.allreduce(v)

    specs = ({"cut": P("d"), "same": P()}, P(), P("d"), P("d"))
    f = jax.shard_map(step, mesh=mesh, in_specs=(P("d"), P()), out_specs=specs)
    with lowering.without_device():
        traced = jax.jit(f).trace(jnp.zeros((8, 3)), tx.init(None))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@ringjax_" in line]
    assert all("@ringjax_run" in line for line in calls)
    assert len(calls) == 3
    for line in calls:
        assert "partition = " in line
        assert "4 devices (0, 1, 2, 3)" in line
        assert "shards = " not in line
    # Six replicated elements are padded to eight, so each of four devices sends two.
    assert "tensor<2x3xf64>, tensor<2xf64>, tensor<1xui32>" in calls[0]


@pytest.mark.parametrize("check_vma", [False, True])
def test_replicated_gradients_inside_shard_map(world, check_vma) -> None:
    """With check_vma, JAX replicates the gradients of replicated parameters itself."""
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads()
    w = jax.device_put(np.arange(24.0).reshape(8, 3), NamedSharding(mesh, P()))
    rows = jax.device_put(np.ones((4, 8)) + world.rank, NamedSharding(mesh, P("d")))

    def step(w, state, rows):
        grads = jax.grad(lambda w: (rows @ w).sum())(w)
        if not check_vma:
            grads = jax.lax.psum(grads, "d")
        return tx.update(grads, state)

    specs = (P(), P(), P("d"))
    f = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=check_vma
        )
    )
    before = sent()
    updates, _ = jax.block_until_ready(f(w, tx.init(w), rows))
    # With check_vma, the replicated gradients are sent once, not by every device.
    assert sent() - before == 8 * 24 * (1 if check_vma else 4)
    np.testing.assert_allclose(updates, np.full((8, 3), 2.0 + 2 * world.size), 1e-12)
    if check_vma:
        devices.same_bits_everywhere(updates)


def test_a_mesh_of_devices_that_are_not_joined_is_refused(world, monkeypatch) -> None:
    del world
    found = runtime.current("test").devices
    monkeypatch.setattr(found, "communicators", {0: [object()]})
    monkeypatch.setattr(found, "numbers", (0, 1))
    x = jax.device_put(np.ones(8), NamedSharding(devices.mesh((4,)), P("d")))
    traced = jax.jit(ringjax.allreduce).trace(x)
    text = "runs on the CUDA devices 0, 1, 2, 3 of this process, which has joined only "
    with pytest.raises(ValueError, match=f"{text}0, 1.*--devices-per-rank all"):
        traced.lower(lowering_platforms=("cuda",))
    few = jax.device_put(
        np.ones(8), NamedSharding(devices.mesh((2,), devices=jax.devices()[:2]), P("d"))
    )
    jax.jit(ringjax.allreduce).trace(few).lower(lowering_platforms=("cuda",))


def test_the_program_has_one_reduction_and_one_all_gather(world) -> None:
    """Replicated gradients need one reduction, and an all-gather of the shares."""
    del world
    mesh = devices.mesh((4,))
    where = NamedSharding(mesh, P())
    w = jax.device_put(np.ones((16, 16)), where)
    x = jax.device_put(np.ones((8, 16)), NamedSharding(mesh, P("d")))
    tx = ringjax.allreduce_grads()

    def step(w, state, x):
        grads = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return tx.update(grads, state)

    text = jax.jit(step).lower(w, tx.init(w), x).compile().as_text()
    found = re.findall(r" (all-reduce|reduce-scatter|all-gather|all-to-all)\(", text)
    assert sorted(found)[0] == "all-gather"
    assert sorted(found)[1:] in (["all-reduce"], ["reduce-scatter"])
