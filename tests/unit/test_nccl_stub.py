"""Tests of the stub of NCCL, on which other tests rely.

These tests test neither ringjax nor NCCL. Each test runs a script in one process per
rank. The fixture `no_leaks` of conftest.py checks that no process is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stub_processes import Processes
from support.stubs import read_log


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


ALL_REDUCTIONS = """
    import ml_dtypes
    comm = join()
    assert comm.started == IN_PROGRESS and comm.settle() == OK
    stream, n = new_stream(), comm.size

    STEPS = {SUM: np.add, AVG: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}

    def oracle(op, inputs):
        dtype = inputs[0].dtype
        whole_numbers = dtype.kind in "iu"
        if op == AVG and not whole_numbers:
            inputs = [x * np.array(1 / n, dtype) for x in inputs]
        total = inputs[0]
        for x in inputs[1:]:
            total = STEPS[op](total, x).astype(dtype)
        if op == AVG and whole_numbers:
            return np.trunc(total.astype(np.float64) / n).astype(dtype)
        return total

    count = 3001
    draw = np.random.default_rng(5)
    for number, name in enumerate(TYPES):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        values = draw.integers(-7 if dtype.kind not in "u" else 0, 8, (n, n * count))
        inputs = list(values.astype(dtype))
        if dtype.kind not in "iu":
            inputs = [(x * np.array(0.37, dtype)).astype(dtype) for x in inputs]
        for op in (SUM, PROD, MAX, MIN, AVG):
            mine = inputs[comm.rank].copy()
            want = oracle(op, inputs)
            whole, part = np.empty_like(mine), np.empty(count, dtype)
            rooted = np.zeros_like(mine)
            how = (number, op)
            comm.run("AllReduce", at(mine), at(whole), mine.size, *how)
            comm.run("Reduce", at(mine), at(rooted), mine.size, *how, n - 1)
            comm.run("ReduceScatter", at(mine), at(part), count, *how)
            comm.run("AllReduce", at(mine), at(mine), mine.size, *how)
            cuda.StreamSynchronize(0)
            own = want[comm.rank * count : (comm.rank + 1) * count]
            for got, expected in ((whole, want), (mine, want), (part, own)):
                assert got.tobytes() == expected.tobytes(), (name, op)
            if comm.rank == n - 1:
                assert rooted.tobytes() == want.tobytes(), (name, op)
            else:
                assert not rooted.any()
    assert nccl.code.CommFinalize(comm.handle) == IN_PROGRESS and comm.settle() == OK
    nccl.CommDestroy(comm.handle)
    assert nccl.code.CommDestroy(comm.handle) == INVALID_ARGUMENT
"""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_reduction_of_every_dtype(processes: Processes, size: int) -> None:
    processes.run(ALL_REDUCTIONS, size=size)


def test_allgather_broadcast_send_and_recv(processes: Processes) -> None:
    processes.run(
        """
        comm = join()
        comm.settle()
        rank, n, stream = comm.rank, comm.size, new_stream()
        count = 200_000  # several pieces for every slot and channel
        mine = np.arange(count, dtype=np.float64) + 1e6 * rank
        everyone = np.concatenate([np.arange(count) + 1e6 * r for r in range(n)])
        gathered = np.empty(n * count)
        comm.run("AllGather", at(mine), at(gathered), count, 8, stream=stream)
        cuda.StreamSynchronize(stream)
        assert (gathered == everyone).all()
        copy = np.empty(count)
        comm.run("Broadcast", at(mine), at(copy), count, 8, 1, stream=stream)
        cuda.StreamSynchronize(stream)
        assert (copy == everyone[count : 2 * count]).all()
        # Each rank sends two messages of different sizes to each rank, including
        # itself, together with a collective, in nested groups.
        got, again, total = np.zeros((n, count)), np.zeros((n, 5)), np.zeros(count)
        nccl.GroupStart()
        for peer in range(n):
            nccl.GroupStart()
            nccl.Send(at(mine), count - rank, 8, peer, comm.handle, stream)
            nccl.Send(at(mine), 5, 8, peer, comm.handle, stream)
            nccl.Recv(at(got[peer]), count - peer, 8, peer, comm.handle, stream)
            nccl.Recv(at(again[peer]), 5, 8, peer, comm.handle, stream)
            nccl.GroupEnd()
        nccl.AllReduce(at(mine), at(total), count, 8, SUM, comm.handle, stream)
        nccl.GroupEnd()
        assert comm.settle() == OK
        cuda.StreamSynchronize(stream)
        for peer in range(n):
            sent = np.arange(count) + 1e6 * peer
            assert (got[peer, : count - peer] == sent[: count - peer]).all()
            assert (got[peer, count - peer :] == 0).all()
            assert (again[peer] == sent[:5]).all()
        assert (total == everyone.reshape(n, count).sum(0)).all()
        """,
        size=3,
    )


def test_two_communicators_share_two_streams(processes: Processes) -> None:
    processes.run(
        """
        comm = join()
        other = Comm(comm.rank, comm.size, unique_id(
            Path(os.environ["STUB_FOLDER"]) / "second", comm.rank))
        assert comm.settle() == other.settle() == OK
        streams = new_stream(), new_stream()
        arrays = [np.full(9, float(i)) for i in range(6)]
        for i, array in enumerate(arrays):
            which = (comm, other)[i % 2]
            order = i if comm.rank == 0 else i // 2  # ranks need not agree on streams
            which.run("AllReduce", at(array), at(array), 9, 8, SUM,
                      stream=streams[order % 2])
        for stream in streams:
            cuda.StreamSynchronize(stream)
        assert all((array == 2 * i).all() for i, array in enumerate(arrays))
        """,
        size=2,
    )


def test_ranks_may_be_threads_with_separate_devices(processes: Processes) -> None:
    processes.run(
        """
        import threading
        made = unique_id(Path(os.environ["STUB_FOLDER"]) / "id", 0)
        totals = [None, None]

        def body(rank):
            use_device(rank)
            comm, array = Comm(rank, 2, made, blocking=1), np.full(4, rank + 1.0)
            assert comm.started == OK
            comm.run("AllReduce", at(array), at(array), 4, 8, SUM)
            cuda.StreamSynchronize(0)
            totals[rank] = array.sum()

        threads = [threading.Thread(target=body, args=(r,)) for r in range(2)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert totals == [12, 12]
        """,
        CUDA_STUB_DEVICES=2,
    )


def test_calls_that_return_early_must_be_polled(
    processes: Processes, tmp_path: Path
) -> None:
    processes.run(
        """
        asked = Path(os.environ["STUB_FOLDER"]) / "asked"
        if os.environ["STUB_RANK"] == "1":
            wait_until(asked.exists)
        comm = join()
        array = np.ones(4)
        one = (at(array), at(array), 4, 8, SUM, comm.handle, 0)
        if comm.rank == 0:
            assert nccl.code.AllReduce(*one) == INVALID_ARGUMENT  # still connecting
            asked.touch()
        assert comm.settle() == OK
        assert nccl.code.AllReduce(*one) == IN_PROGRESS
        assert nccl.code.AllReduce(*one) == INVALID_ARGUMENT
        assert "poll" in nccl.text("GetLastError", None)
        assert comm.settle() == OK
        nccl.GroupStart()
        assert nccl.code.AllReduce(*one) == nccl.code.AllReduce(*one) == OK
        assert nccl.code.GroupEnd() == OK  # only the first call returns IN_PROGRESS
        cuda.StreamSynchronize(0)
        assert (array == 8).all()
        assert nccl.code.GroupEnd() == INVALID_USAGE
        nccl.GroupStart()
        assert nccl.code.AllReduce(0, *one[1:]) == INVALID_ARGUMENT
        assert nccl.code.GroupEnd() == INVALID_ARGUMENT  # and nothing was enqueued
        assert nccl.code.AllReduce(*one[:5], 4096, 0) == INVALID_ARGUMENT
        assert nccl.code.AllReduce(*one[:6], 4096) == 1  # no such stream
        assert comm.state() == 1
        nccl.CommAbort(comm.handle)
        """,
        size=2,
        NCCL_STUB_LOG=str(tmp_path / "log"),
    )
    lines = [line for line in read_log(tmp_path / "log") if line["rank"] == 0]
    sums = [line for line in lines if line["function"] == "ncclAllReduce"]
    assert [line["group"] for line in sums] == [0, 1, 1, 2]
    assert sums[0]["dtype"] == "float64" and sums[0]["redop"] == "sum"
    assert [lines[0]["function"], lines[-1]["function"]] == [
        "ncclCommInitRankConfig",
        "ncclCommAbort",
    ]


def test_wrong_configurations_are_refused(processes: Processes) -> None:
    processes.run("""
        use_device()
        made = unique_id(Path(os.environ["STUB_FOLDER"]) / "id", 0)
        place = ctypes.c_size_t()

        def start(size=1, rank=0, made=made, bytes=48, **fields):
            unset = -(2**31)
            config = Config(bytes, 0xCAFEBEEF, 21800, 0, *[unset] * 3, None, unset)
            for name, value in fields.items():
                setattr(config, name, value)
            return nccl.code.CommInitRankConfig(
                ctypes.byref(place), size, made, rank, ctypes.byref(config))

        wrong = ({"magic": 1}, {"version": 0}, {"blocking": 7}, {"max": 0},
                 {"size": 0}, {"size": 2, "rank": 2}, {"made": UniqueId()},
                 {"bytes": 8})
        for one in wrong:
            assert start(**one) == INVALID_ARGUMENT and place.value == 0, one
        cuda.CtxSetCurrent(0)
        assert start() == 1
        use_device()
        assert start() == IN_PROGRESS
    """)


@pytest.mark.parametrize(
    ("difference", "words"),
    [("NCCL_STUB_VERSION", "Mismatched NCCL version"), ("CUDA_STUB_UUID", "Duplicate")],
)
def test_ranks_that_cannot_join(
    processes: Processes, difference: str, words: str
) -> None:
    same = difference == "CUDA_STUB_UUID"
    each = [{difference: "22809"}, {difference: "22809" if same else "23004"}]
    processes.run(
        f"""
        comm = join()
        assert comm.settle() == INVALID_USAGE
        assert {words!r} in nccl.text("GetLastError", None)
        assert nccl.code.CommDestroy(comm.handle) == INVALID_USAGE
        nccl.CommAbort(comm.handle)
        """,
        size=2,
        each=each,
    )


# An aborted operation leaves 0x5a in every byte: a finite number in every type.
HANG = """
    comm = join()
    comm.settle()
    stream, event = new_stream(), new_event()
    array = np.ones(300_000)

    def hangs():
        cuda.EventRecord(event, stream)
        time.sleep(0.7)
        assert cuda.code.EventQuery(event) == 600 and comm.state() == OK

    def abort():
        begin = time.monotonic()
        nccl.CommAbort(comm.handle)
        cuda.StreamSynchronize(stream)
        assert time.monotonic() - begin < 5 and cuda.code.EventQuery(event) == 0
        assert (array.view(np.uint8) == 0x5A).all() and np.isfinite(array).all()
"""


@pytest.mark.parametrize("what", ["count", "dtype", "redop", "function", "group"])
def test_a_mismatch_hangs_until_abort(processes: Processes, what: str) -> None:
    processes.run(
        HANG,
        f"""
        odd = {what!r} if comm.rank == 1 else ""
        count, dtype, op = 3000 + (odd == "count"), 8 - (odd == "dtype"), SUM
        nccl.GroupStart()
        if odd == "function":
            nccl.Broadcast(at(array), at(array), count, dtype, 0, comm.handle, stream)
        else:
            op = MAX if odd == "redop" else SUM
            nccl.AllReduce(at(array), at(array), count, dtype, op, comm.handle, stream)
        if odd == "group":
            nccl.AllReduce(at(array), at(array), 7, 8, SUM, comm.handle, stream)
        nccl.GroupEnd()
        comm.settle()
        hangs()
        array = array[: 1 if odd else count]
        abort()
        """,
        size=2,
    )


def test_a_mismatch_is_an_error_on_request(processes: Processes) -> None:
    processes.run(
        """
        comm = join()
        comm.settle()
        array = np.ones(9)
        nccl.AllReduce(at(array), at(array), 8 + comm.rank, 8, SUM, comm.handle, 0)
        wait_until(lambda: comm.state() == INVALID_USAGE)
        assert "disagree" in nccl.text("GetLastError", None)
        nccl.CommAbort(comm.handle)
        cuda.StreamSynchronize(0)
        """,
        size=2,
        NCCL_STUB_MISMATCH="error",
    )


DEATH = """
    array[:] = comm.rank
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    nccl.AllReduce(at(array), at(array), array.size, 8, SUM, comm.handle, stream)
    comm.settle()
"""


def test_survivors_of_a_killed_rank_hang_until_abort(processes: Processes) -> None:
    processes.run(HANG, DEATH, "hangs()\nabort()", size=3, codes=[0, -9, 0])


def test_survivors_get_an_error_on_request(processes: Processes) -> None:
    end = """
    wait_until(lambda: comm.state() == REMOTE_ERROR)
    assert "rank 1" in nccl.text("GetLastError", None)
    cuda.StreamSynchronize(stream)
    nccl.CommAbort(comm.handle)
    """
    processes.run(HANG, DEATH, end, size=3, codes=[0, -9, 0], NCCL_STUB_DETECT_DEATH=1)


def test_abort_from_another_thread_ends_queued_operations(
    processes: Processes,
) -> None:
    processes.run(
        HANG,
        """
        import threading
        if comm.rank == 0:  # the other rank never calls
            for _ in range(3):
                one = (at(array), at(array), array.size, 8, SUM, comm.handle, stream)
                nccl.AllReduce(*one)
                comm.settle()
            hangs()
            thread = threading.Thread(target=abort)
            thread.start(), thread.join()
            after = np.zeros(4, np.uint32)
            cuda.MemsetD32Async(at(after), 7, 4, stream)  # the stream goes on
            cuda.StreamSynchronize(stream)
            assert (after == 7).all()
        """,
        size=2,
    )


def test_a_hanging_init_can_be_aborted(processes: Processes) -> None:
    processes.run(
        """
        comm = join()
        time.sleep(0.5)
        assert comm.state() == IN_PROGRESS
        assert nccl.code.CommDestroy(comm.handle) == INVALID_ARGUMENT
        nccl.CommAbort(comm.handle)
        assert nccl.code.CommAbort(comm.handle) == INVALID_ARGUMENT
        open_files = [os.path.realpath(f) for f in Path("/proc/self/fd").iterdir()]
        assert not [f for f in open_files if "memfd" in f]
        """,
        size=2,
        NCCL_STUB_INIT_HANG=1,
    )


def test_calls_fail_or_stall_on_request(processes: Processes) -> None:
    processes.run(
        """
        comm = join()
        comm.settle()
        array = np.ones(4)
        one = (at(array), at(array), 4, 8, SUM, comm.handle, 0)
        begin = time.monotonic()
        assert nccl.code.AllReduce(*one) == OK
        cuda.StreamSynchronize(0)
        assert time.monotonic() - begin > 0.3
        assert nccl.code.AllReduce(*one) == 2
        assert "NCCL_STUB_FAIL" in nccl.text("GetLastError", None)
        """,
        size=2,
        NCCL_STUB_FAIL="ncclAllReduce:2",
        NCCL_STUB_STALL_SECONDS=0.3,
        NCCL_STUB_IN_PROGRESS=0,
    )


def test_a_process_with_a_hanging_operation_can_exit(processes: Processes) -> None:
    processes.run(
        HANG,
        """
        if comm.rank == 0:
            nccl.AllReduce(at(array), at(array), 9, 8, SUM, comm.handle, stream)
            comm.settle()
            hangs()
        """,
        size=2,
    )
