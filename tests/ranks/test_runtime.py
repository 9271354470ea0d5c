"""init, shutdown, process sets and forks on real ranks, below every framework."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from support.handshakes import needs_tls

import ringjax
from ringjax import _native, runtime
from ringjax.errors import Mismatch, NotInitialized, RingjaxError

pytestmark = pytest.mark.launch("core")
SUM = _native.REDUCE_OPS["Sum"]
ALLREDUCE = _native.COLLECTIVES["allreduce"]


def total(value: float, process_set: runtime.ProcessSet | None = None) -> float:
    """Sums `value` over the ranks by a direct call of the native core."""
    chosen = process_set or runtime.global_process_set
    x = np.full(3, value, np.float64)
    out = np.empty_like(x)
    runtime.communicator(chosen).execute(ALLREDUCE, SUM, [x], [out], name="total")
    assert (out == out[0]).all()
    return float(out[0])


@pytest.mark.ranks(1, 2, 3, 5)
def test_ranks_and_sizes() -> None:
    ringjax.init()
    rank, size = ringjax.rank(), ringjax.size()
    assert (rank, size) == tuple(
        int(os.environ[f"RINGJAX_{x}"]) for x in ("RANK", "SIZE")
    )
    assert (ringjax.local_rank(), ringjax.local_size()) == (rank, size)
    assert (ringjax.cross_rank(), ringjax.cross_size()) == (0, 1)
    assert ringjax.is_homogeneous()
    assert ringjax.global_process_set.ranks == list(range(size))
    assert ringjax.global_process_set.rank() == rank
    assert total(rank) == size * (size - 1) / 2


@pytest.mark.ranks(1, 3, isolated=True)
def test_repeated_init_and_shutdown() -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    ringjax.shutdown()
    ringjax.shutdown()
    before = resources()
    for _ in range(10):
        assert not ringjax.is_initialized()
        ringjax.init()
        ringjax.init()
        assert total(1) == ringjax.size()
        ringjax.shutdown()
    assert resources() == before


@pytest.mark.ranks(2, isolated=True)
def test_hooks() -> None:
    ringjax.shutdown()
    calls: list[str] = []
    runtime.on_init(lambda: calls.append(f"init {ringjax.size()}"))
    runtime.on_shutdown(lambda: calls.append(f"first {ringjax.is_initialized()}"))
    runtime.on_shutdown(lambda: calls.append("second"))
    assert calls == []
    ringjax.init()
    runtime.on_init(lambda: calls.append("late"))
    ringjax.shutdown()
    assert calls == ["init 2", "late", "second", "first True"]


@pytest.mark.ranks(1)
def test_new_settings_need_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    ringjax.shutdown()
    ringjax.init()
    monkeypatch.setenv("RINGJAX_STALL_WARNING", "17")
    with pytest.raises(ValueError, match="already initialised with other settings"):
        ringjax.init()
    ringjax.shutdown()
    ringjax.init()
    assert runtime.config().stall_warning == 17
    ringjax.shutdown()  # the next test has other settings


@pytest.mark.ranks(2)
def test_arguments_of_init() -> None:
    ringjax.init(comm=[0, 1], process_sets="dynamic")
    with pytest.raises(
        ValueError, match="comm must be None or the list of all 2 ranks"
    ):
        ringjax.init(comm=[0])
    with pytest.raises(TypeError, match="process_sets must be a list of ProcessSet"):
        ringjax.init(process_sets="static")
    with pytest.raises(TypeError, match="process_sets must be a list of ProcessSet"):
        ringjax.init(process_sets=[[0]])  # type: ignore[list-item]


@pytest.mark.ranks(1)
def test_before_init() -> None:
    ringjax.shutdown()
    for function in (
        ringjax.rank,
        ringjax.size,
        ringjax.local_rank,
        ringjax.cross_size,
    ):
        expected = f"ringjax.{function.__name__}: call ringjax.init"
        with pytest.raises(NotInitialized, match=expected):
            function()
    with pytest.raises(NotInitialized, match=r"ringjax.ProcessSet.rank: call"):
        ringjax.ProcessSet([0]).rank()
    with pytest.raises(NotInitialized, match=r"ringjax.broadcast: call"):
        runtime.communicator(op="broadcast")


@pytest.mark.ranks(3, 5)
def test_process_sets() -> None:
    ringjax.init()
    rank, size = ringjax.rank(), ringjax.size()
    ends = ringjax.add_process_set([size - 1, 0])
    rest = ringjax.add_process_set(range(1, size))
    assert (ends.ranks, ends.size(), rest.size()) == ([0, size - 1], 2, size - 1)
    assert ends.process_set_id != rest.process_set_id
    if ends.included():
        assert total(rank, ends) == size - 1
        assert ends.rank() == (0 if rank == 0 else 1)
    else:
        with pytest.raises(ValueError, match=f"does not include this rank, {rank}"):
            runtime.communicator(ends)
        with pytest.raises(ValueError, match=f"rank {rank} is not in"):
            ends.rank()
    if rest.included():
        assert total(1, rest) == size - 1
    assert total(1) == size
    assert ringjax.remove_process_set(ends)
    assert not ringjax.remove_process_set(ends)
    assert ends.process_set_id is None
    assert ringjax.remove_process_set(rest)
    with pytest.raises(ValueError, match="is not registered"):
        runtime.communicator(rest)


@pytest.mark.ranks(3)
def test_equal_sets_share_their_number() -> None:
    ringjax.init()
    one, two = ringjax.add_process_set([0, 2]), ringjax.ProcessSet([2, 0])
    assert ringjax.add_process_set(two) is two
    assert one.process_set_id == two.process_set_id
    assert ringjax.add_process_set(range(3)).process_set_id == 0
    assert ringjax.remove_process_set(two)
    assert one.process_set_id is None
    assert not ringjax.remove_process_set(ringjax.global_process_set)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("ranks", "error", "text"),
    [
        ([0, 3], ValueError, "rank 3 is not in the job, which has 3 ranks"),
        ([1, 1], ValueError, "ranks must be given once each"),
        ([-1], ValueError, "ranks must not be negative"),
        ([], ValueError, "the set has no ranks"),
        ([0.5], TypeError, "ranks must be integers, not 0.5"),
        ([True], TypeError, "ranks must be integers, not True"),
        ("01", TypeError, "ranks must be a sequence of integers"),
    ],
)
def test_bad_sets_are_refused_before_anything_is_sent(
    ranks: object, error: type[Exception], text: str
) -> None:
    ringjax.init()
    if ringjax.rank() == 0:  # an exchange would wait for the other ranks for ever
        with pytest.raises(error, match=text):
            ringjax.add_process_set(ranks)  # type: ignore[arg-type]
    assert total(1) == 3


@pytest.mark.ranks(3)
def test_ranks_that_disagree_about_a_process_set_all_raise() -> None:
    ringjax.init()
    ranks = [0, 1] if ringjax.rank() else [0]
    with pytest.raises(Mismatch, match=r"rank [01] calls add_process_set \d+ \[0"):
        ringjax.add_process_set(ranks)
    assert total(1) == 3
    both = ringjax.add_process_set([0, 1])  # the job still works
    assert ringjax.remove_process_set(both)


@pytest.mark.ranks(3)
def test_static_sets() -> None:
    ringjax.shutdown()
    for _ in range(2):
        pair = ringjax.ProcessSet([1, 2])
        ringjax.init(process_sets=[pair])
        assert pair.process_set_id == 1
        if pair.included():
            assert total(1, pair) == 2
        ringjax.shutdown()
        assert pair.process_set_id is None


@pytest.mark.ranks(2, isolated=True, env={"RINGJAX_SHM": "0"})
def test_without_shared_memory() -> None:
    ringjax.init()
    assert total(1) == 2
    assert runtime.communicator().stats()["transports"] == {"tcp": 1}


def check_fork() -> None:
    """Checks that a forked child is no rank and has no sockets; its parent works."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        refused = []
        for function in (ringjax.init, runtime.communicator, runtime.lane):
            try:
                function()
            except RingjaxError as error:
                refused.append("was forked from one" in str(error))
        sockets = [
            fd
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
            and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        ]
        ringjax.shutdown()  # has no effect in the child
        info = (ringjax.rank(), ringjax.size(), ringjax.is_initialized())
        text = f"{refused} {info} {len(sockets)}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        info = (ringjax.rank(), 2, True)
        assert file.read() == f"[True, True, True] {info} 0"
    os.waitpid(child, 0)
    assert total(1) == 2


@pytest.mark.ranks(2, isolated=True)
@pytest.mark.filterwarnings("ignore:.*fork:")
def test_a_forked_child_does_not_disturb_the_job() -> None:
    ringjax.init()
    check_fork()
    # A new process set makes new connections, so the parent's listener still works.
    process_set = ringjax.add_process_set([0])
    assert ringjax.remove_process_set(process_set)


# TLS must use each record number once, so only the parent may continue a connection.
ENCRYPTED = {"RINGJAX_SHM": "0", "RINGJAX_TLS": "required", "RINGJAX_HEARTBEAT": "0.05"}


@needs_tls
@pytest.mark.ranks(2, isolated=True, env=ENCRYPTED)
@pytest.mark.filterwarnings("ignore:.*fork:")
def test_a_forked_child_does_not_disturb_encrypted_links() -> None:
    ringjax.init()
    for _ in range(3):
        assert total(1) == 2
        check_fork()
        time.sleep(0.2)  # for some heartbeats
    assert total(1) == 2
