"""Long messages in a host are sent through the ring if reading by CMA is forbidden.

That they arrive if it is allowed: test_eager_grid.py, tests/native/cma_test.cc.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import signal
import struct

import numpy as np
import pytest
from support.launch import StartJob
from support.rank_worker import World

import ringjax
from ringjax import _native, runtime

LENGTH = 500_000

# The number of process_vm_readv, and what Linux calls the architecture.
SYSTEM = {"x86_64": (310, 0xC000003E), "aarch64": (270, 0xC00000B7)}


def _move(world: World) -> None:
    """Moves messages that are long enough to be read by CMA."""
    rank, size = world.rank, world.size
    own = np.arange(LENGTH, dtype=np.float32)
    x, all_x = own + rank, np.concatenate([own + r for r in range(size)])
    run, op = runtime.communicator().execute, _native.COLLECTIVES
    out = np.zeros(LENGTH * size, np.float32)
    run(op["allgather"], 1, [x], [out], counts=[LENGTH] * size)
    assert (out == all_x).all()
    out[:] = 0
    run(
        op["alltoall"],
        1,
        [np.concatenate([x] * size)],
        [out],
        counts=[LENGTH] * 2 * size,
    )
    assert (out == all_x).all()
    for root in range(size):
        cast = x.copy()
        run(op["broadcast"], 1, [cast], [cast], root=root)
        assert (cast == own + root).all()


def _forbid() -> None:
    """From now on the kernel refuses this process process_vm_readv, for good."""
    number, machine = SYSTEM[platform.machine()]

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = (
        step(load, 0, 0, 4)  # the architecture
        + step(equal, 0, 3, machine)
        + step(load, 0, 0, 0)  # the number of the call
        + step(equal, 0, 1, number)
        + step(give, 0, 0, refuse)
        + step(give, 0, 0, allow)
    )
    memory = ctypes.create_string_buffer(program)
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_no_new_privs, pr_set_seccomp, with_filter = 38, 22, 2
    assert libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) == 0
    given = ctypes.c_char_p(filters)
    assert libc.prctl(pr_set_seccomp, with_filter, given, 0, 0) == 0, ctypes.get_errno()


@pytest.mark.ranks(3)
def test_messages_that_one_rank_may_not_read_are_sent(world: World) -> None:
    """Alone in its launch: nothing gives back what the kernel was told to refuse."""
    if platform.machine() not in SYSTEM:
        pytest.skip(f"no filter for system calls of {platform.machine()} here")
    ringjax.shutdown()
    if world.rank == 1:
        _forbid()
    ringjax.init()
    for _ in range(3):
        _move(world)


READ = """
import numpy as np
import ringjax
from ringjax import eager

ringjax.init()
for name in ("first", "second"):  # the first one on a link is copied
    eager.allgather(np.ones(500_000, np.float32), name=name)
"""


def test_ranks_of_a_job_read_each_others_memory(start_job: StartJob) -> None:
    """Both ends of a connection know the process number of the other end."""
    env = {"RINGJAX_FAILPOINTS": "cma.read=exit@1"}
    job = start_job(2, READ, env=env)
    assert job.wait(40), job.logs()
    assert "failpoint cma.read" in job.output(1), job.logs()
    env = {"RINGJAX_FAILPOINTS": "cma.read=exit@0"}
    job = start_job(2, READ, env=env)
    assert job.wait(40), job.logs()
    assert "failpoint cma.read" in job.output(0), job.logs()


MOVE_ON = """
import numpy as np
import ringjax
from ringjax import eager, errors

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()
x = np.full((size, 500_000), rank, np.float32)
out = np.empty((size * size, 500_000), np.float32)
mine = np.empty_like(x)
many = 0
try:
    while True:
        eager.alltoall(x, name="a", out=mine)
        assert (mine[:, 7] == np.arange(size)).all()
        eager.allgather(x, name="g", out=out)
        assert (out[::size, -1] == np.arange(size)).all()
        last = eager.broadcast(x, many % size, name="b")
        assert (last[:, ::1000] == many % size).all()
        many += 1
        if many == 20:
            print("moving", flush=True)
except errors.PeerLost as error:
    print(f"caught: {error}", flush=True)
    assert (x == rank).all()
    raise
"""


def test_a_rank_that_is_killed_under_its_readers(start_job: StartJob) -> None:
    job = start_job(3, MOVE_ON)
    for rank in range(3):
        job.wait_for(rank, "moving")
    job.kill(rank=1)
    assert job.wait(40) == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2):
        assert "rank 1" in job.output(rank).partition("caught: ")[2], job.logs()
