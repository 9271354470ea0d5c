"""Groups of processes: JAX connects the processes of a group, ringjax connects groups.

Training must equal that of one device with the data of all ranks
(support/local_devices.py), and processes with the same position in their groups must
have the same bits. ../elastic/test_groups.py tests elastic jobs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import local_devices as devices

import ringjax
from ringjax import runtime

# Three groups of two processes with two devices each. With as many groups as processes
# in a group, the tests would not notice if the code mixed up the two numbers.
pytestmark = [
    pytest.mark.ranks(6, env=devices.environment(2, RINGJAX_GROUP_SIZE="2")),
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("world"),
]


def parts(tree) -> list[bytes]:
    """Returns the bytes of all shards on the devices of this process."""
    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_training_equals_that_of_one_device_with_all_data(kind) -> None:
    mesh = devices.mesh((jax.device_count(),), kind)
    params = devices.place(devices.parameters(), devices.FSDP, mesh)
    groups = ringjax.replica_set()

    def batch(step):
        return devices.place(devices.data(groups.rank(), step), P("d"), mesh)

    with jax.set_mesh(mesh):
        got, state = devices.train(ringjax.allreduce_grads(), params, batch)
        whole = jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))(got)
    for key, value in devices.expected(groups.size()).items():
        rtol = 2e-2 if value.dtype == jnp.bfloat16 else 1e-12
        np.testing.assert_allclose(
            *(np.asarray(v, np.float64) for v in (whole[key], value)), rtol, rtol
        )
    mine = parts(got)
    alike = ringjax.allgather_object(mine, process_set=groups)
    assert alike == [mine] * groups.size()
    assert np.asarray(state[0].seq.addressable_shards[0].data).tolist() == [5]


def test_ranks_and_groups_have_their_numbers(world) -> None:
    assert (ringjax.group_size(), ringjax.group_rank()) == (2, world.rank % 2)
    assert (jax.process_count(), jax.process_index()) == (2, world.rank % 2)
    peers = ringjax.replica_set()
    assert peers.ranks == list(range(world.rank % 2, world.size, 2))
    assert (peers.size(), peers.rank()) == (world.size // 2, world.rank // 2)
    assert ringjax.global_process_set.size() == world.size
    # An array on one device is reduced over all processes or over a process set.
    mine = jnp.float32(world.rank)
    assert ringjax.allreduce(mine, op=ringjax.Sum) == sum(range(world.size))
    got = ringjax.allreduce(mine, op=ringjax.Sum, process_set=peers)
    assert got == sum(peers.ranks)
    assert not ringjax.remove_process_set(peers)


def test_parameters_come_from_the_same_position_in_the_roots_group(world) -> None:
    mesh = devices.mesh((4,))
    group = world.rank // 2
    own = {"w": np.arange(8.0) * (group + 1), "b": np.float32(group)}
    tree = {**devices.place({"w": own["w"]}, {"w": P("d")}, mesh), "b": own["b"]}
    got = ringjax.broadcast_parameters(tree, root_rank=world.size - 1)
    first = jax.process_index() * 4
    for i, shard in enumerate(got["w"].addressable_shards):
        at = first + 2 * i
        np.testing.assert_array_equal(
            shard.data, np.arange(at, at + 2.0) * (world.size // 2)
        )
    assert got["b"] == world.size // 2 - 1


def test_a_state_is_sent_between_equal_positions_of_groups(world) -> None:
    mesh, group = devices.mesh((4,)), world.rank // 2
    tree = {"w": np.arange(8.0) + group, "b": np.full(3, float(group))}
    placed = devices.place(tree, {"w": P("d"), "b": P()}, mesh)
    # A receiver may have another sharding, and adopts that of the source.
    placed["b"] = placed["b"] if group == 0 else np.zeros(3)
    everywhere = NamedSharding(mesh, P())
    key = jax.jit(lambda: jax.random.key(group), out_shardings=everywhere)()
    state = ringjax.elastic.State(params=placed, key=key, step=group)
    state.sync()
    assert state.step == 0
    at = 4 * jax.process_index()
    for i, shard in enumerate(state.params["w"].addressable_shards):
        np.testing.assert_array_equal(shard.data, np.arange(8.0)[at + 2 * i :][:2])
    assert state.params["b"].sharding.is_equivalent_to(everywhere, 1)
    data = jax.random.key_data(state.key).addressable_shards[0].data
    np.testing.assert_array_equal(data, jax.random.key_data(jax.random.key(0)))


def test_metrics_are_of_all_processes(world) -> None:
    got = ringjax.allreduce_metrics({"loss": float(world.rank // 2)})
    assert got == {"loss": (world.size // 2 - 1) / 2}


def test_a_different_call_in_one_group_is_a_mismatch(world) -> None:
    peers = ringjax.replica_set()
    rows = 3 if world.rank == 2 else 4
    if ringjax.group_rank() == 0:
        with pytest.raises(ringjax.errors.Mismatch, match=r"float32\[3\]"):
            ringjax.broadcast_parameters(np.zeros(rows, np.float32), process_set=peers)
    ringjax.barrier()
    assert ringjax.allreduce(jnp.ones(()), process_set=peers) == 1


def test_impossible_groups_are_refused(world, tmp_path) -> None:
    mesh = devices.mesh((4,))
    x = devices.place(np.ones(8), P("d"), mesh)
    with pytest.raises(ValueError, match=r"process_set=ringjax\.replica_set\(\)"):
        ringjax.allreduce(x)
    with pytest.raises(ValueError, match=r"named operations cannot be of replica_set"):
        ringjax.eager.allreduce(np.ones(2), name="x", process_set=ringjax.replica_set())
    state = ringjax.elastic.State(x=x)
    with pytest.raises(RuntimeError, match="no process has the whole state"):
        ringjax.elastic.Checkpointer(tmp_path).save(state)
    with pytest.raises(ringjax.errors.StartupError, match="some framework: RINGJAX_GR"):
        runtime.refuse_groups("some framework")
    got = ringjax.allreduce(x, process_set=ringjax.replica_set())
    np.testing.assert_array_equal(got.addressable_shards[0].data, np.ones(2))
