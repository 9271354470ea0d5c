"""Tests of the Python binding: descriptors, errors, buffers and signals.

tests/native and tests/ranks test the collectives themselves.
"""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringjax
from ringjax import _native
from ringjax._native import Communicator, StatusError

ALLREDUCE = _native.COLLECTIVES["allreduce"]
ALLGATHER = _native.COLLECTIVES["allgather"]
ALLTOALL = _native.COLLECTIVES["alltoall"]
SUM = _native.REDUCE_OPS["Sum"]


def make_eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def make(links: list[Any], ranks: int = 3, memory: Any = None) -> Communicator:
    return Communicator(
        id=77,
        name="test",
        job=1,
        epoch=0,
        rank=0,
        hosts=[0] * ranks,
        members=list(range(ranks)),
        links=links,
        memory=memory,
        doorbell=f"test-{os.getpid()}",
        options={},
    )


def alone() -> Communicator:
    return _native.local_world([0])[0]


# -- descriptors -----------------------------------------------------------------------


def test_the_communicator_closes_its_descriptors() -> None:
    mine, theirs = socket.socketpair()
    fd = mine.detach()
    communicator = make([(1, [fd], [])], ranks=2)
    assert is_open(fd)
    communicator.close()
    del communicator
    assert not is_open(fd)
    theirs.close()


@pytest.mark.parametrize(
    "peer",
    [
        2,  # an eventfd is not a socket
        9,  # rank 9 does not exist
        0,  # rank 0 is this rank
        1,  # rank 1 has a link already
    ],
)
def test_a_bad_link_still_closes_all_descriptors(peer: int) -> None:
    first, far_first = socket.socketpair()
    third, far_third = socket.socketpair()
    fds = [first.detach(), third.detach(), make_eventfd()]
    with pytest.raises((StatusError, ValueError)):
        make([(1, fds[:1], []), (peer, fds[2:], []), (3, fds[1:2], [])], ranks=4)
    assert not any(map(is_open, fds))
    far_first.close()
    far_third.close()


@pytest.mark.parametrize(
    ("ring", "tile", "ranks"),
    [
        (4096, 0, [0, 1, 2]),  # an eventfd is not shared memory
        (1000, 0, [0, 1, 2]),  # 1000 is no size of a ring
        (4096, 100, [0, 1, 2]),  # 100 is no size of a tile
        (4096, 4096, [0, 1]),  # a segment is for all ranks
        (4096, 0, [1, 2]),  # this rank has no place
        (4096, 0, [0, 1, 9]),  # rank 9 does not exist
        (4096, 0, []),
    ],
)
def test_bad_memory_is_refused_and_closed(
    ring: int, tile: int, ranks: list[int]
) -> None:
    fd = make_eventfd()
    with pytest.raises((StatusError, ValueError)):
        make([], memory=(fd, ring, tile, ranks))
    assert not is_open(fd)


@pytest.mark.parametrize("link", [("tcp", 1), (1, [3]), ("one", [3], []), ()])
def test_a_malformed_link_is_a_type_error(link: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        make([link], ranks=2)


def test_a_call_without_a_link_names_the_peer() -> None:
    data = np.ones(3, np.float32)
    communicator = make([], ranks=2)
    with pytest.raises(StatusError, match="rank 1 has no link") as caught:
        communicator.execute(ALLREDUCE, SUM, [data], [data], name="x")
    communicator.close()
    assert caught.value.rank == 1


# -- errors ----------------------------------------------------------------------------


def test_a_failed_call_raises_its_code_and_rank() -> None:
    communicator = alone()
    communicator.abort("rank 5 is on fire", 5)
    data = np.ones(3, np.float32)
    with pytest.raises(StatusError, match=r"(?s)RINGJAX\[local.*x.*on fire") as caught:
        communicator.execute(ALLREDUCE, SUM, [data], [data], name="x")
    assert caught.value.code == "UNAVAILABLE"
    assert caught.value.rank == 5
    assert communicator.aborted


def test_errors_contain_non_ascii_names() -> None:
    data, name = np.ones(3, np.int32), "größe"
    adasum = _native.REDUCE_OPS["Adasum"]
    with pytest.raises(StatusError, match=name) as caught:
        alone().execute(ALLREDUCE, adasum, [data], [data], name=name)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.rank == -1


@pytest.mark.parametrize("numbers", [(99, 1, -1), (-1, 1, -1), (0, 9, -1), (0, 1, 300)])
def test_unknown_operation_numbers_are_refused(numbers: tuple[int, int, int]) -> None:
    op, reduce_op, wire = numbers
    data = np.ones(3, np.float32)
    with pytest.raises(StatusError, match="there is no") as caught:
        alone().execute(op, reduce_op, [data], [data], wire=wire)
    assert caught.value.code == "INVALID_ARGUMENT"


# -- buffers ---------------------------------------------------------------------------


def test_outputs_of_another_size_or_dtype_are_refused() -> None:
    data, room = np.ones((3, 2), np.float32), np.zeros(3, np.float32)
    communicator = alone()
    with pytest.raises(StatusError, match=r"f32\[3,2\] has 12 bytes"):
        communicator.execute(ALLREDUCE, SUM, [data], [room])
    with pytest.raises(StatusError, match="do not fit a result of 12 bytes"):
        communicator.execute(ALLGATHER, SUM, [data], [room], counts=[3])
    with pytest.raises(StatusError, match="row counts say 4 rows"):
        communicator.execute(ALLGATHER, SUM, [data], [data], counts=[4])
    for op, counts in ((ALLGATHER, [3, 0]), (ALLTOALL, [3, 0, 3, 0])):
        with pytest.raises(StatusError, match=r"\(for 2, and there are 1 now\)"):
            communicator.execute(op, SUM, [data], [data], counts=counts)
    with pytest.raises(StatusError, match="another number of ranks"):
        communicator.execute(ALLGATHER, SUM, [data], [data])
    with pytest.raises(ValueError, match="different element types"):
        communicator.execute(ALLREDUCE, SUM, [data], [np.zeros((3, 2))])
    with pytest.raises(ValueError, match="as many `outs`"):
        communicator.execute(ALLREDUCE, SUM, [data], [])
    with pytest.raises(TypeError, match="incompatible"):  # no DLPack type
        wide = np.zeros(1, np.longdouble)
        communicator.execute(ALLREDUCE, SUM, [wide], [wide])
    assert not room.any()


def test_leaves_are_added_exactly_or_refused() -> None:
    values = [np.array([1.5, -2.0], np.float32), np.array([0.25], np.float64)]
    numbers = (_native.DTYPES["f32"], _native.DTYPES["f64"])
    leaves = [
        (x.ctypes.data, number, x.shape)
        for x, number in zip(values, numbers, strict=True)
    ]
    sums, checksum = np.zeros(3, np.int64), np.zeros(2, np.uint64)
    _native.exact_add(leaves, [-1, -2], 60, sums, checksum)
    _native.exact_add([(0, *leaves[0][1:]), leaves[1]], [-1, -2], 60, sums, checksum)
    assert sums.tolist() == [3, -4, 2]
    assert checksum.tolist() == [1, 3 - 3 * 4 + 5 * 2]
    for units, ins, text in (
        ([-1], leaves, "do not fit the units"),
        ([-1, -2], leaves[:1], "do not fit the units"),
        ([-1], [(0, _native.DTYPES["i32"], (3,))], "has no floats"),
    ):
        with pytest.raises(ValueError, match=text):
            _native.exact_add(ins, units, 60, sums, checksum)
    with pytest.raises(ValueError, match="too large for the unit of its leaf"):
        _native.exact_add(leaves, [-60, -2], 60, sums, checksum)
    with pytest.raises(TypeError, match="incompatible"):
        _native.exact_add(leaves, [-1, -2], 60, sums.astype(np.int32), checksum)


def test_only_outputs_need_to_be_writable() -> None:
    data, out = np.full(3, 2, np.int32), np.zeros(3, np.int32)
    data.flags.writeable = False
    alone().execute(ALLREDUCE, SUM, [data], [out], prescale=1.0)
    assert out.tolist() == [2, 2, 2]
    with pytest.raises(TypeError):
        alone().execute(ALLREDUCE, SUM, [out], [data])


def test_a_mismatch_in_a_local_world_names_the_rank() -> None:
    world = _native.local_world([0, 0])
    errors: list[tuple[str, int, str]] = []

    def call(communicator: Communicator) -> None:
        data = np.ones(3 + communicator.rank, np.float32)
        try:
            communicator.execute(ALLREDUCE, SUM, [data], [data], name="x")
        except StatusError as e:
            errors.append((e.code, e.rank, str(e)))

    threads = [threading.Thread(target=call, args=(c,)) for c in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert errors[0] == errors[1]
    code, rank, text = errors[0]
    assert (code, rank) == ("MISMATCH", 1)
    assert "rank 1 sent f32[4], rank 0 sent f32[3]" in text


@pytest.mark.parametrize("ring_bytes", [0, 63, 100, -4096])
def test_a_local_world_refuses_bad_ring_sizes(ring_bytes: int) -> None:
    with pytest.raises(ValueError, match="ring_bytes"):
        _native.local_world([0, 0], {"ring_bytes": ring_bytes})


# -- signals and processes -------------------------------------------------------------


class _FromTheHandlerError(Exception):
    pass


def test_a_signal_handlers_exception_ends_a_call() -> None:
    def handler(signum: int, frame: object) -> None:
        calls.append(signum)
        raise _FromTheHandlerError

    calls: list[int] = []
    # Both ends stay alive, so only the signal can end the call.
    world = _native.local_world([0, 0])
    waiting = world[0]
    before = signal.signal(signal.SIGUSR1, handler)
    killer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    killer.start()
    data = np.ones(3, np.float32)
    seen: type[BaseException] | None = None
    try:
        try:
            waiting.execute(ALLREDUCE, SUM, [data], [data])  # rank 1 never calls
        finally:
            # The interpreter runs signal handlers between byte codes.
            for _ in range(1000):
                pass
    except BaseException as e:
        seen = type(e)
    finally:
        killer.cancel()
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    assert seen is _FromTheHandlerError
    assert calls == [signal.SIGUSR1]
    assert waiting.aborted


def test_a_forked_child_can_exit_during_a_heartbeat() -> None:
    script = """
        import os, socket, sys
        from ringjax import _native
        ours, theirs = socket.socketpair()
        beat = _native.Heartbeat(
            0, ["", ""], [(1, ours.detach())], interval=0.1, timeout=9
        )
        child = os.fork()
        if child == 0:
            del beat
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert beat.lost() == []
        beat.close()
        print("fine")
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    lines = lines.replace("\ndel beat\nsys", "\n    del beat\n    sys")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", lines],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.stdout == "fine\n", ended.stderr


# -- the stub file and the exported symbols --------------------------------------------


def test_the_stub_file_lists_exactly_the_modules_names() -> None:
    # The stub file is beside the package's sources; an editable install keeps the
    # binary in another folder.
    stub = ast.parse(Path(ringjax.__file__).with_name("_native.pyi").read_text())
    stated = _names(stub.body)
    assert stated.keys() == {n for n in vars(_native) if not n.startswith("_")}
    for name, members in stated.items():
        # Fields of StatusError are attributes of instances, not of the class.
        if members is None or name == "StatusError":
            continue
        bound = vars(getattr(_native, name))
        assert members == {n for n in bound if not n.startswith("_")}, name


def _names(body: list[ast.stmt]) -> dict[str, set[str] | None]:
    found: dict[str, set[str] | None] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {n for n in _names(node.body) if not n.startswith("_")}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    return found


def test_the_module_exports_only_its_entry_point() -> None:
    # Some compilers link libstdc++ statically into the module. If its symbols were
    # exported, they would mix with those of other modules, whose streams then print
    # empty numbers or crash.
    words = ["nm", "--dynamic", "--defined-only", _native.__file__]
    listed = subprocess.check_output(words, text=True).split()
    assert listed[1:] == ["T", "PyInit__native"]
