"""CMA between real processes: denied, allowed, and while a rank is killed.

test_eager_grid.py and tests/native/cma_test.cc test the data that CMA transfers.
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

# For each machine, the number of the system call process_vm_readv, and the constant
# AUDIT_ARCH_* by which a seccomp filter recognizes the machine.
SYSCALLS = {"x86_64": (310, 0xC000003E), "aarch64": (270, 0xC00000B7)}


def _exchange_long_messages(world: World) -> None:
    """Runs collectives whose messages are long enough for CMA."""
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


def _deny_cma() -> None:
    """Installs a seccomp filter that denies process_vm_readv until the process ends."""
    number, machine = SYSCALLS[platform.machine()]

    def instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    load, jump_if_equal, result = 0x20, 0x15, 0x06
    allow, deny = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = (
        instruction(load, 0, 0, 4)  # the architecture
        + instruction(jump_if_equal, 0, 3, machine)
        + instruction(load, 0, 0, 0)  # the number of the system call
        + instruction(jump_if_equal, 0, 1, number)
        + instruction(result, 0, 0, deny)
        + instruction(result, 0, 0, allow)
    )
    memory = ctypes.create_string_buffer(program)
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_no_new_privs, pr_set_seccomp, with_filter = 38, 22, 2
    assert libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0) == 0
    pointer = ctypes.c_char_p(filters)
    result_code = libc.prctl(pr_set_seccomp, with_filter, pointer, 0, 0)
    assert result_code == 0, ctypes.get_errno()


@pytest.mark.ranks(3)
def test_messages_go_over_the_ring_if_cma_is_denied(world: World) -> None:
    """Needs a launch of its own, because a seccomp filter cannot be removed."""
    if platform.machine() not in SYSCALLS:
        pytest.skip(f"SYSCALLS has no numbers for {platform.machine()}")
    ringjax.shutdown()
    if world.rank == 1:
        _deny_cma()
    ringjax.init()
    for _ in range(3):
        _exchange_long_messages(world)


ALLGATHER_TWICE = """
import numpy as np
import ringjax
from ringjax import eager

ringjax.init()
for name in ("first", "second"):  # the first long message on a link is copied
    eager.allgather(np.ones(500_000, np.float32), name=name)
"""


def test_ranks_of_a_job_read_each_others_memory(start_job: StartJob) -> None:
    """Both ends of a link read the memory of the other end."""
    env = {"RINGJAX_FAILPOINTS": "cma.read=exit@1"}
    job = start_job(2, ALLGATHER_TWICE, env=env)
    assert job.wait(40), job.logs()
    assert "failpoint cma.read" in job.output(1), job.logs()
    env = {"RINGJAX_FAILPOINTS": "cma.read=exit@0"}
    job = start_job(2, ALLGATHER_TWICE, env=env)
    assert job.wait(40), job.logs()
    assert "failpoint cma.read" in job.output(0), job.logs()


EXCHANGE_FOREVER = """
import numpy as np
import ringjax
from ringjax import eager, errors

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()
x = np.full((size, 500_000), rank, np.float32)
out = np.empty((size * size, 500_000), np.float32)
received = np.empty_like(x)
rounds = 0
try:
    while True:
        eager.alltoall(x, name="a", out=received)
        assert (received[:, 7] == np.arange(size)).all()
        eager.allgather(x, name="g", out=out)
        assert (out[::size, -1] == np.arange(size)).all()
        last = eager.broadcast(x, rounds % size, name="b")
        assert (last[:, ::1000] == rounds % size).all()
        rounds += 1
        if rounds == 20:
            print("moving", flush=True)
except errors.PeerLost as error:
    print(f"caught: {error}", flush=True)
    assert (x == rank).all()
    raise
"""


def test_a_rank_killed_while_peers_read_its_memory(start_job: StartJob) -> None:
    job = start_job(3, EXCHANGE_FOREVER)
    for rank in range(3):
        job.wait_for(rank, "moving")
    job.kill(rank=1)
    assert job.wait(40) == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2):
        assert "rank 1" in job.output(rank).partition("caught: ")[2], job.logs()
