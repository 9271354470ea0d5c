"""Tests of the world apart, with processes that no launcher has started."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
from support import apart

SECRET = "5e" * 32


def run(folder: Path, lines: str, size: int, **variables: str) -> list[str]:
    return apart.run(folder, dedent(lines), size, [variables] * size)


@pytest.mark.parametrize("size", [2, 3])
def test_groups_in_any_order_of_ranks_and_of_making(tmp_path: Path, size: int) -> None:
    out = run(
        tmp_path,
        """
        everybody = list(range(world.size))
        groups = [everybody, everybody[::-1], [rank]]
        groups += [[0, 1], [2, 0], [1, 2]] if world.size == 3 else []
        # Two threads of a process make groups in orders of their own.
        import threading
        def make(some):
            for group in some:
                if rank in group:
                    made[tuple(group)] = world.connect(group)
        made = {}
        threads = [threading.Thread(target=make, args=(some,))
                   for some in (groups[rank % 2::2], groups[1 - rank % 2::2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for group in groups:
            if rank in group:
                communicator = world.connect(group)
                assert communicator is made[tuple(group)]
                assert communicator.rank == group.index(rank)
                assert gathered(communicator, 10 + rank) == [10 + r for r in group]
                assert total(communicator) == sum(range(len(group) + 1))
        print("right")
        """,
        size,
    )
    assert out == ["right\n"] * size


def test_a_world_apart_leaves_the_ordinary_world_alone(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        import ringjax, numpy
        from ringjax import runtime
        ringjax.init()
        assert (ringjax.rank(), ringjax.size()) == (0, 1)
        assert total(runtime.communicator()) == 1
        assert total(world.connect([1, 0])) == 3
        ringjax.shutdown()
        assert total(world.connect([0, 1])) == 3
        print("right")
        """,
        2,
    )
    assert out == ["right\n"] * 2


def test_a_lost_process_is_named(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        import os, signal
        everybody = world.connect([2, 0, 1])
        total(everybody)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total(everybody)
        except Exception as error:
            print(type(error).__name__, error)
        try:
            world.connect([0, 1, 2])
        except Exception as error:
            print(type(error).__name__, error)
        assert total(world.connect([0, 2])) == 3
        """,
        3,
        RINGJAX_RECORD_DIR="off",
    )
    assert out[1] == ""
    for text in (out[0], out[2]):
        first, second = text.splitlines()
        assert first.startswith("StatusError RINGJAX[JAX's processes 2, 0, 1, epoch 0]")
        assert "rank 1 closed its connection" in first
        assert second.startswith("PeerLost JAX's processes 0, 1, 2: rank 1 ")


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        from ringjax.errors import Unreachable
        everybody = world.connect([0, 1, 2])
        try:
            if rank == 0:
                world.connect([0, 1])
        except Unreachable as error:
            print(error.ranks, error)
        # Nobody leaves before: that would be another reason.
        assert total(everybody) == 6
        """,
        3,
        RINGJAX_START_TIMEOUT="3",
    )
    assert out[0].startswith("[1] JAX's processes 0, 1: rank 0 could not be connected")
    assert out[1:] == ["", ""]


def test_a_world_without_one_process_does_not_begin(tmp_path: Path) -> None:
    """The second process of three does not join."""
    limit = {"RINGJAX_START_TIMEOUT": "1"}
    out = apart.run(
        tmp_path, "", 3, [limit, {"RINGJAX_SECRET": "not hexadecimal"}, limit]
    )
    for text in (out[0], out[2]):
        assert "StartupError: " in text
        assert "process 1 has not set test/machine/1 in JAX's key-value store" in text


def test_a_secret_of_the_job_is_not_published(tmp_path: Path) -> None:
    lines = "assert total(world.connect([0, 1])) == 3"
    assert run(tmp_path, lines, 2, RINGJAX_SECRET=SECRET) == ["", ""]
    texts = [path.read_text() for path in (tmp_path / "store").iterdir()]
    assert not [text for text in texts if SECRET in text]
    (found,) = [value for text in texts if "secret" in (value := text)]
    assert json.loads(found)["value"]["secret"] == ""


def test_a_process_without_the_secret_of_the_job_is_refused(tmp_path: Path) -> None:
    limit = {"RINGJAX_START_TIMEOUT": "2"}
    out = apart.run(tmp_path, "", 2, [limit | {"RINGJAX_SECRET": SECRET}, limit])
    assert "StartupError: " in out[0]
    assert "process 0 has the secret of a job (RINGJAX_SECRET)" in out[1]


def test_a_forked_child_closes_its_copies(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        import os, stat
        def sockets():
            found = []
            for fd in range(256):
                try:
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        found.append(fd)
                except OSError:
                    pass
            return found
        communicator = world.connect([0, 1])
        child = os.fork()
        if child == 0:
            world.close_in_child()
            os._exit(len(sockets()))
        assert sockets()
        assert os.waitpid(child, 0)[1] == 0
        assert total(communicator) == 3
        world.close()
        world.close()
        assert not sockets()
        """,
        2,
    )
    assert out == ["", ""]
