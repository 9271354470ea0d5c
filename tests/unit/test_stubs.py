"""Tests of the stub of CUDA's driver, on which other tests rely.

These tests test neither ringjax nor CUDA. Each test runs a script in a new process.
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


def test_the_driver_has_one_device(processes: Processes) -> None:
    processes.run("""
        count = ctypes.c_int()
        assert cuda.code.DeviceGetCount(ctypes.byref(count)) == 3  # before cuInit
        cuda.Init(0)
        assert handle(cuda.DriverGetVersion) == 13000
        assert handle(cuda.DeviceGetCount) == 1
        values = [handle(cuda.DeviceGetAttribute, a, 0) for a in (16, 75, 76)]
        assert values == [132, 9, 0]
        assert cuda.code.DeviceGet(ctypes.byref(count), 1) == 101
        name = ctypes.c_char_p()
        cuda.GetErrorName(600, ctypes.byref(name))
        assert name.value == b"CUDA_ERROR_NOT_READY"
        assert cuda.code.GetErrorName(12345, ctypes.byref(name)) == 1
    """)


def test_wrong_handles_are_errors(processes: Processes) -> None:
    processes.run("""
        cuda.Init(0)
        place = ctypes.c_size_t()
        assert cuda.code.StreamCreateWithPriority(ctypes.byref(place), 1, 0) == 201
        assert cuda.code.CtxSetCurrent(4096) == 201
        use_device()
        stream, event = new_stream(), new_event()
        assert cuda.code.EventRecord(4096, stream) == 400
        assert cuda.code.EventRecord(event, 4096) == 400
        assert cuda.code.StreamSynchronize(4096) == 400
        assert cuda.code.ModuleUnload(4096) == 400
        assert cuda.code.MemFree_v2(4096) == 1
        memory = handle(cuda.MemAlloc_v2, 100)
        cuda.MemFree_v2(memory)
        assert cuda.code.MemFree_v2(memory) == 1
        assert cuda.code.MemAlloc_v2(ctypes.byref(place), 0) == 1
        assert cuda.code.ModuleLoadData(ctypes.byref(place), 0) == 1
        module = handle(cuda.ModuleLoadData, b"image")
        found = cuda.code.ModuleGetFunction(ctypes.byref(place), module, b"rj_none")
        assert found == 500
        cuda.StreamDestroy_v2(stream)
        assert cuda.code.StreamDestroy_v2(stream) == 400
        cuda.DevicePrimaryCtxRelease_v2(0)
        assert cuda.code.EventQuery(event) == 400
        assert cuda.code.DevicePrimaryCtxRelease_v2(0) == 201
    """)


KERNELS = """
    use_device()
    module = handle(cuda.ModuleLoadData, b"image")

    class Entry(ctypes.Structure):
        _fields_ = [("tensor", ctypes.c_uint64), ("elements", ctypes.c_uint64),
                    ("first_chunk", ctypes.c_uint), ("offset16", ctypes.c_uint)]

    def table(fused, entries, capacity=168):
        class Table(ctypes.Structure):
            _fields_ = [("fused", ctypes.c_uint64), ("poison", ctypes.c_uint64),
                        ("scale", ctypes.c_double), ("count", ctypes.c_uint),
                        ("chunks", ctypes.c_uint), ("entries", Entry * capacity)]
        made = Table(fused=at(fused), scale=1.0)
        for array, offset in entries:
            made.entries[made.count] = Entry(at(array), array.size, made.chunks, offset)
            made.count += 1
            made.chunks += -(-array.nbytes // 16384)
        return made

    def launch(name, table, stream):
        function = handle(cuda.ModuleGetFunction, module, name)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        cuda.LaunchKernel(function, 8, 1, 1, 512, 1, 1, 0, stream, parameters, None)
"""


@pytest.mark.parametrize("capacity", [168, 1360])
def test_kernels_run_on_the_stream_with_the_parameters_of_the_launch(
    processes: Processes, tmp_path: Path, capacity: int
) -> None:
    log = tmp_path / "log"
    processes.run(
        KERNELS,
        f"""
        stream, event = new_stream(), new_event()
        first, second = np.arange(5000.0), np.arange(7.0)
        fused, back = np.zeros(5010), np.zeros_like(first)
        packing = table(fused, [(first, 0), (second, 2500)], {capacity})
        launch(b"rj_pack_f64_f64_{capacity}", packing, stream)
        cuda.EventRecord(event, stream)
        assert cuda.code.EventQuery(event) == cuda.code.StreamQuery(stream) == 600
        ctypes.memset(ctypes.byref(packing), 0, ctypes.sizeof(packing))
        cuda.StreamSynchronize(stream)
        assert cuda.code.EventQuery(event) == cuda.code.StreamQuery(stream) == 0
        assert (fused[:5000] == first).all() and (fused[5000:5007] == second).all()
        unpacking = table(fused, [(back, 0)], {capacity})
        launch(b"rj_unpack_f64_f64_{capacity}", unpacking, 0)
        cuda.StreamSynchronize(0)
        assert (back == first).all()
        """,
        CUDA_STUB_DELAY_US=100000,
        CUDA_STUB_LOG=str(log),
    )
    names = [f"rj_{way}_f64_f64_{capacity}" for way in ("pack", "unpack")]
    assert [line["kernel"] for line in read_log(log)] == names


def test_events_order_streams(processes: Processes) -> None:
    processes.run(
        KERNELS,
        """
        slow, quick, event = new_stream(), new_stream(), new_event(0)
        source, later, fused = np.ones(8), np.full(8, 2.0), np.zeros(8)
        cuda.StreamWaitEvent(quick, event, 0)  # never recorded: nothing to wait for
        cuda.StreamSynchronize(quick)
        launch(b"rj_pack_f64_f64_168", table(fused, [(source, 0)]), slow)
        cuda.EventRecord(event, slow)
        cuda.StreamWaitEvent(quick, event, 0)
        copy = np.zeros(8)
        cuda.MemcpyDtoDAsync_v2(at(copy), at(fused), 64, quick)
        # A later record changes nothing for a wait that has been enqueued.
        launch(b"rj_pack_f64_f64_168", table(fused, [(later, 0)]), slow)
        cuda.EventRecord(event, slow)
        assert cuda.code.StreamQuery(quick) == 600
        cuda.StreamSynchronize(quick)
        assert (copy == 1).all() and cuda.code.EventQuery(event) == 600
        cuda.StreamSynchronize(slow)
        other, elapsed = new_event(0), ctypes.c_float()
        cuda.EventRecord(other, slow)
        cuda.StreamSynchronize(slow)
        cuda.EventElapsedTime(ctypes.byref(elapsed), event, other)
        assert elapsed.value >= 0
        pair = (new_event(2), other)
        assert cuda.code.EventElapsedTime(ctypes.byref(elapsed), *pair) == 400
        """,
        CUDA_STUB_DELAY_US=100000,
    )


def test_memory_copies_and_sets(processes: Processes) -> None:
    processes.run("""
        use_device()
        stream = new_stream()
        a, b = handle(cuda.MemAlloc_v2, 64), handle(cuda.MemAllocAsync, 64, stream)
        source, result = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
        cuda.MemcpyDtoHAsync_v2(at(result), a, 64, stream)
        assert np.isnan(result).all()  # fresh memory
        cuda.MemcpyHtoDAsync_v2(a, at(source), 64, stream)
        cuda.MemcpyDtoDAsync_v2(b, a, 64, stream)
        cuda.MemcpyDtoHAsync_v2(at(result), b, 64, stream)
        assert (result == source).all()  # a copy into pageable memory is synchronous
        cuda.MemsetD32Async(a, 0x3F800000, 16, stream)
        cuda.MemcpyDtoHAsync_v2(at(result), a, 64, stream)
        assert (result == 1).all()
        cuda.MemFreeAsync(b, stream)
        cuda.MemFree_v2(a)
    """)


def test_streams_belong_to_one_device(processes: Processes) -> None:
    processes.run(
        """
        use_device(1)
        stream = new_stream()
        use_device(0)
        event = new_event()
        assert cuda.code.EventRecord(event, stream) == 400
        cuda.EventRecord(event, 0)
        cuda.StreamWaitEvent(stream, event, 0)
        cuda.StreamSynchronize(stream)
        """,
        CUDA_STUB_DEVICES=2,
    )


def test_a_machine_without_devices(processes: Processes) -> None:
    processes.run("assert cuda.code.Init(0) == 100", CUDA_STUB_DEVICES=0)


def test_a_call_fails_on_request(processes: Processes) -> None:
    processes.run(
        """
        use_device()
        place = ctypes.byref(ctypes.c_size_t())
        assert [cuda.code.MemAlloc_v2(place, 8) for _ in range(3)] == [0, 999, 0]
        assert cuda.code.StreamSynchronize(0) == cuda.code.StreamSynchronize(0) == 999
        """,
        CUDA_STUB_FAIL="cuMemAlloc:2,cuStreamSynchronize:*",
    )


def test_a_child_of_fork_has_no_cuda_and_a_busy_process_ends(
    processes: Processes,
) -> None:
    processes.run(
        KERNELS,
        """
        source, fused = np.ones(8), np.zeros(8)
        launch(b"rj_pack_f64_f64_168", table(fused, [(source, 0)]), 0)
        child = os.fork()
        if child == 0:
            os._exit(cuda.code.StreamQuery(0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        """,
        CUDA_STUB_DELAY_US=3_600_000_000,
    )
