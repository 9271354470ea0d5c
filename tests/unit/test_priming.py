"""Tests of priming, in one process with 4 devices that counts as their only process."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

from support.launch import environment

PROGRAM = """
import threading
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ringjax.errors import InvalidArgument, PeerLost, Stalled, Unreachable
from ringjax.xla import jax_client, priming

asked, announced = [], []

def connect(group):
    asked.append([device.id for device in group])
    return {place: f"{len(asked)}, {place}" for place in range(len(group))}

def expect(color, key, communicator):
    assert communicator == f"{len(asked)}, {key}"
    announced.append((color, key))

primed = priming.Priming(0, lambda group: connect(group), expect)
stop = jax_client.on_load(primed)

def groups():
    found = list(primed._groups)
    primed._groups.clear()
    return found

def on(mesh, function):
    every = P(mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=every, out_specs=every,
                                 check_vma=False))

devices = np.array(jax.devices())
x = jnp.arange(12.0)
square = Mesh(devices.reshape(2, 2), ("a", "b"))
mixed = Mesh(devices[[3, 1, 0, 2]].reshape(2, 2), ("a", "b"))
"""


def run(lines: str) -> list[str]:
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM + dedent(lines)],
        env=environment("priming", {"XLA_FLAGS": flags}),
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_groups_of_programs_are_primed_once() -> None:
    out = run(
        """
        (x * 2).block_until_ready()  # no communication
        assert not asked
        total = on(square, lambda x: lax.psum(x, "a"))
        assert np.asarray(total(x))[0] == 0 + 6
        print(groups(), asked, announced)
        asked.clear(), announced.clear()
        on(square, lambda x: lax.psum(x, "b"))(x)
        on(square, lambda x: lax.pmax(x, "b"))(x)
        print(list(primed._groups), asked)
        groups()
        on(mixed, lambda x: lax.psum(x, "a"))(x)
        print(groups())
        on(mixed, lambda x: lax.psum(x, ("b", "a")))(x)
        print(groups())
        on(mixed, lambda x: lax.ppermute(x, "a", [(0, 1)]))(x)
        print(groups())
        on(Mesh(devices[2:], ("c",)), lambda x: lax.all_gather(x, "c"))(x)
        print(groups())
        on(Mesh(devices[1:2], ("c",)), lambda x: lax.psum(x, "c"))(x)
        print(groups())
        on(square, lambda x: lax.psum(x, "a", axis_index_groups=[[0], [1]]))(x)
        print(groups())
        jax.jit(jnp.sum)(jax.device_put(x, NamedSharding(mixed, P(("a", "b")))))
        print(groups())
        """
    )
    assert out == [
        "[(0, 2), (1, 3)] [[0, 2], [1, 3]] [(0, 0), (0, 1), (1, 0), (1, 1)]",
        "[(0, 1), (2, 3)] [[0, 1], [2, 3]]",
        "[(1, 2), (3, 0)]",
        "[(3, 0, 1, 2)]",
        "[(3, 1, 0, 2)]",
        "[(2, 3)]",
        "[(1,)]",
        "[(0,), (1,), (2,), (3,)]",
        "[(3, 1, 0, 2)]",
    ]


def test_programs_that_are_not_run_or_not_compiled_are_primed() -> None:
    out = run(
        """
        branch = on(square, lambda x: lax.cond(
            x.sum() > 0, lambda x: lax.psum(x, "a"), lambda x: x, x))
        branch.lower(x).compile()
        print(groups())
        loop = on(square, lambda x: lax.fori_loop(
            0, 3, lambda i, x: lax.pmax(x, "b") + i, x)).lower(x).compile()
        print(groups())
        stored = serialize_executable.serialize(loop)
        read = serialize_executable.deserialize_and_load(*stored)
        print(groups())
        assert (np.asarray(read(x)) == np.asarray(loop(x))).all()
        stop()
        on(mixed, lambda x: lax.psum(x, "a"))(x)
        assert not groups()
        """
    )
    assert out == ["[(0, 2), (1, 3)]", *2 * ["[(0, 1), (2, 3)]"]]


def test_settings_of_the_program_do_not_apply() -> None:
    run(
        """
        with jax.set_mesh(mixed), jax.transfer_guard("disallow"):
            y = jax.device_put(x, NamedSharding(mixed, P(("a", "b"))))
            with jax.disable_jit(False), jax.default_device(devices[3]):
                jax.jit(lambda y: y.sum())(y)
        assert groups() == [(3, 1, 0, 2)]
        """
    )


def test_threads_prime_a_group_once() -> None:
    """Two threads load programs with a common group while it is connected."""
    run(
        """
        met = threading.Barrier(2)
        second = on(square, lambda x: lax.pmax(x, "a"))

        def load_second():
            met.wait()
            second(x)

        thread = threading.Thread(target=load_second)
        thread.start()
        def connect(group):
            asked.append(group)
            if len(asked) == 1:
                met.wait()
            return {}
        on(square, lambda x: lax.psum(x, "a"))(x)
        thread.join()
        assert len(asked) == 2 and len(groups()) == 2
        """
    )


def test_errors_reach_whoever_compiles() -> None:
    out = run(
        """
        def fails(error):
            global connect
            def connect(group):
                raise error
            try:
                on(square, lambda x: lax.psum(x, "a"))(x)
            except (InvalidArgument, PeerLost, Stalled) as error:
                print(type(error).__name__, getattr(error, "ranks", error.rank), error)
            assert not groups()  # the next program tries again

        fails(Unreachable("JAX's processes 0, 1: rank 1 did not call", [1]))
        fails(PeerLost("JAX's devices 0, 1 of processes 0, 1: rank 1 is gone", 1))
        jax_client.on_load(lambda devices, texts: priming.groups_of(
            "HloModule m\\n  %bad = f32[] all-reduce(%p)"))
        fails(None)
        """
    )
    text = "the program jit__lambda communicates between processes 0: "
    assert out[0].startswith(f"Stalled [1] {text}compiling it is collective: each ")
    assert out[0].endswith("in the same order; rank 1 did not call")
    assert out[1] == f"PeerLost 1 {text}rank 1 is gone"
    assert out[2].startswith("InvalidArgument -1 the HLO instruction %bad")
