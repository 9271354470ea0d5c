"""Programs of jax.distributed without ringjax and without a launcher, for tests.

Each process has the variables that `ringjax jax-collectives` prints.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from textwrap import dedent

from ringjax.settings import mpi_library
from ringjax.world.groups import bind_free_port
from support.launch import environment

VARIABLES = {mpi_library.SWITCH: "1", "RINGJAX_START_TIMEOUT": "30"}
HEAD = """
import os, re, signal, sys, threading, time
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank, size, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if size > 1:
    jax.distributed.initialize(where, size, rank)
devices = np.array(jax.devices())
store = jax._src.distributed.global_state.client

def program(function, devices=devices, names=("p",), spec=P("p")):
    mesh = Mesh(devices, names)
    return jax.jit(jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

def array(value, devices=devices, names=("p",), spec=P("p")):
    '''The rows of all devices; row i of device i is the part of the array.'''
    sharding = NamedSharding(Mesh(devices, names), spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

def local(result):
    return np.asarray(result.addressable_shards[0].data)

def on(function, value, devices=devices):
    return local(program(function, devices)(array(value, devices)))

def error_of(function):
    try:
        function()
    except Exception as error:
        return str(error)
    return "no error"

def leave(lost=1):
    '''Ends this process at once; process 0 is the last, because JAX ends the others
    when its coordinator is gone. Process `lost` is gone already.'''
    sys.stdout.flush()
    store.key_value_set(f"leaves/{rank}", "")
    for other in set(range(size)) - {rank, lost} if rank == 0 else ():
        store.blocking_key_value_get(f"leaves/{other}", 100_000)
    os._exit(0)
"""
# Programs that have run on all devices, before a process is lost.
READY = """
n = len(devices)
f = program(lambda x: lax.psum(x, "p"))
g = program(lambda x: lax.ppermute(x, "p", [(i, (i + 1) % n) for i in range(n)]))
x = array(np.ones((n, 4), np.float32))
local(f(x)), local(g(x))
store.wait_at_barrier("ready", 50_000)  # a process may still be within g
print("ready", flush=True)
"""


@contextlib.contextmanager
def started(
    lines: str, size: int, *variables: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the lines in processes of jax.distributed.

    `variables` has those of each process; an empty one is not set.
    """
    reserved = bind_free_port()
    where = f"127.0.0.1:{reserved.getsockname()[1]}"
    wanted = VARIABLES | mpi_library.variables(VARIABLES)
    words = [sys.executable, "-P", "-c", HEAD + dedent(lines)]
    variables = variables or ({},) * size
    every = [environment("collectives", wanted | extra) for extra in variables]
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(size), where],
            env={name: value for name, value in own.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(every)
    ]
    try:
        yield processes
    finally:
        reserved.close()
        for process in processes:
            process.kill()
            with process:  # closes the pipes
                process.wait()


def run(lines: str, size: int, *variables: dict[str, str]) -> list[tuple[str, str]]:
    """Runs the lines. Returns what each process printed, and its errors."""
    with started(lines, size, *variables) as processes:
        found = [process.communicate(timeout=200) for process in processes]
        for process, (_, errors) in zip(processes, found, strict=True):
            assert process.returncode == 0, errors
    return found


def run_ok(lines: str, size: int, *variables: dict[str, str]) -> None:
    """Runs lines that check their results, and that ringjax carries them."""
    out = run(dedent(lines) + '\nprint("all right")\n', size, *variables)
    assert out == [("all right\n", "")] * size


def devices(count: int) -> dict[str, str]:
    """Returns the variables with which a process has so many devices."""
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
