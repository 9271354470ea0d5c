"""Tests of `ringjax.run(fn)`: results, exceptions, and no process left behind."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support import leaks
from support.waiting import until

import ringjax
from ringjax.errors import LaunchError
from ringjax.run import run


def _rank() -> int:
    return int(os.environ["RINGJAX_RANK"])


def test_results_by_rank() -> None:
    def task(base: int, *, step: int) -> tuple[int, int]:
        return int(os.environ["RINGJAX_RANK"]) * step + base, os.getpid()

    results = run(task, (100,), {"step": 7}, np=3)
    assert [value for value, _ in results] == [100, 107, 114]
    assert len({os.getpid(), *(pid for _, pid in results)}) == 4


def test_ringjax_run_is_callable() -> None:
    assert ringjax.run(lambda: "hello") == ["hello"]
    assert ringjax.run(lambda: 1, num_proc=2) == [1, 1]
    assert ringjax.run(lambda: 2, hosts="localhost:2") == [2, 2]


def test_large_results_and_arguments() -> None:
    data = os.urandom(3 << 20)
    assert run(lambda blob: blob[::-1], (data,), np=2) == [data[::-1]] * 2


def test_an_exception_names_the_rank_and_shows_its_traceback() -> None:
    def task() -> None:
        if os.environ["RINGJAX_RANK"] == "1":
            raise KeyError("the missing key")

    with pytest.raises(LaunchError) as caught:
        run(task, np=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    text = str(caught.value)
    assert text.startswith("rank 1 failed: KeyError: 'the missing key' (exit code 1)\n")
    # The source line is missing with cloudpickle after 3.1.2, which hides file names.
    assert "Traceback" in text and " in task\n" in text


def test_a_killed_rank_raises() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 was killed by signal 9") as caught:
        run(lambda: os.kill(os.getpid(), 9))
    assert caught.value.exit_code == 137


def test_a_rank_without_a_result() -> None:
    with pytest.raises(LaunchError, match=r"rank 0: no result: .*without a result"):
        run(lambda: sys.exit(0))


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(LaunchError, match="cannot pickle"):
        run(threading.Lock)


def test_output_goes_to_stdout_of_the_caller(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "logs")
    run(lambda: print("hello"), np=2, output_filename=folder)
    assert set(capsys.readouterr().out.splitlines()) == {
        "[0]<stdout>:hello",
        "[1]<stdout>:hello",
    }
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "hello\n"


def _train() -> None:
    import numpy

    from ringjax import eager

    ringjax.init()
    for _ in range(5):
        eager.allreduce(numpy.ones(4, "f4"), name="gradients")


def _train_and_fail() -> None:
    _train()
    raise ValueError("too late")


def test_the_goodput_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It is there after a failure, too, and not if the ranks have not trained."""
    run(lambda: None, np=2)
    assert "goodput" not in capsys.readouterr().err
    run(_train, np=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"ringrun: goodput [\d.]+ % of [\d.]+ s: ", last)
    with pytest.raises(LaunchError, match="too late"):
        run(_train_and_fail, np=2)
    assert "ringrun: goodput" in capsys.readouterr().err


def test_ranks_get_the_given_environment() -> None:
    base = {k: v for k, v in os.environ.items() if k != "HOME"}
    seen = run(lambda: dict(os.environ), env={**base, "COLOUR": "blue"})[0]
    assert seen["COLOUR"] == "blue"
    assert "HOME" not in seen


def test_ranks_find_modules_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ringjax_test_module.py").write_text(
        "def task():\n    return 'found'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = __import__("ringjax_test_module")
    assert run(module.task, np=2) == ["found", "found"]


def test_sys_path_of_ranks_has_the_callers_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders after site-packages, such as those of `.pth` files, stay after it."""
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('the wrong one')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    ours = list(dict.fromkeys(map(os.path.abspath, filter(os.path.exists, sys.path))))
    theirs = run(lambda: list(__import__("sys").path))[0]
    assert theirs[: len(ours)] == ours


def test_run_works_in_a_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(run(lambda: 5, np=2)))
    thread.start()
    thread.join(40)
    assert results == [5, 5]


def test_an_interrupt_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringjax.run.job import Job

    signals = [KeyboardInterrupt]

    def interrupted(self: Job, name: int, pid: int) -> None:
        if signals:
            raise signals.pop()

    monkeypatch.setattr(Job, "started", interrupted)
    monkeypatch.setenv(leaks.JOB_VARIABLE, "interrupted")
    with pytest.raises(KeyboardInterrupt):
        run(lambda: __import__("time").sleep(1000), np=2)
    until(lambda: not leaks.processes("interrupted"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 2, "num_proc": 3}, "np=2 and num_proc=3"),
        ({"np": 0}, "-np: at least one process"),
        ({"np": 3, "hosts": "localhost:2"}, "more processes than slots"),
        ({"start_timeout": -1}, "RINGJAX_START_TIMEOUT is '-1'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(_rank, **options)
