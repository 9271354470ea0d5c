"""Tests of the syntax and the actions of failpoints, without jobs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.launch import ROOT, environment

from ringjax import _native, failpoints
from ringjax.config import Config
from ringjax.errors import RingjaxError
from ringjax.links.shared_memory import create


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("", None)


def test_the_core_knows_its_failpoints() -> None:
    assert tuple(_native.failpoints()) == failpoints.NATIVE


def test_every_failpoint_is_in_the_source() -> None:
    text = "".join(p.read_text() for p in (ROOT / "ringjax").rglob("*.py"))
    for point in failpoints.POINTS:
        assert text.count(f'failpoints.passing("{point}")') >= 1, point
    for point in failpoints.FLIPS:
        assert point in failpoints.NATIVE or f'failpoints.flips("{point}")' in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("join.prepared=kill", "one of recovery.halted,.*join.ready.*memory.map"),
        ("join.ready=die", "join.ready= one of kill, exit, sleep"),
        ("join.ready", "POINT=ACTION"),
        ("join.ready=kill@x", "POINT=ACTION"),
        ("join.ready=sleep(1.2.3)", "a number"),
        ("join.ready=kill, join.admitted=kill", "POINT=ACTION"),
        ("join.ready=flip", "join.ready= one of kill, .*enospc, not 'flip'"),
        ("exact.sum=kill", "exact.sum= one of flip, not 'kill'"),
    ],
)
def test_bad_failpoints_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"RINGJAX_FAILPOINTS is .*{expected}"):
        Config.from_env({"RINGJAX_FAILPOINTS": text})


def test_a_failpoint_acts_at_its_pass_and_process() -> None:
    failpoints.arm("join.ready=error@3#2; join.ready=enospc@4#1; pause.said=eof", 3)
    failpoints.passing("join.ready")
    with pytest.raises(RingjaxError, match=r"failpoint join\.ready"):
        failpoints.passing("join.ready")
    failpoints.passing("join.ready")
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            failpoints.passing("pause.said")
    failpoints.arm("", 3)
    failpoints.passing("pause.said")


def test_a_flip_names_the_bits_of_its_passage() -> None:
    failpoints.arm("pieces.parameter=flip(70)#2; pieces.parameter=flip", None)
    assert failpoints.flips("pieces.parameter") == [0]
    assert failpoints.flips("pieces.parameter") == [70, 0]
    failpoints.arm("", None)
    assert failpoints.flips("pieces.parameter") == []


def test_sleep_delays_the_caller() -> None:
    failpoints.arm("join.ready=sleep(0.05)@any", None)
    before = time.monotonic()
    failpoints.passing("join.ready")
    assert time.monotonic() - before >= 0.05


def test_enospc_raises_oserror() -> None:
    failpoints.arm("memory.make=enospc", None)
    with pytest.raises(OSError, match="No space left") as caught:
        create(4096, 4096)
    assert caught.value.errno == errno.ENOSPC
    failpoints.arm("", None)
    os.close(create(4096, 4096))


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("exit(7)", 7)])
@pytest.mark.parametrize("point", ["join.ready", "call.agreed"])
def test_failpoints_can_end_the_process(point: str, action: str, code: int) -> None:
    script = f"""
from ringjax import _native, failpoints
failpoints.arm("{point}={action}#2", 0)
[alone] = _native.local_world([0])
for i in range(2):
    failpoints.passing("{point}")
    alone.execute(_native.COLLECTIVES["barrier"], _native.REDUCE_OPS["Sum"], [], [])
    print("passed", i, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment("failpoint", {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.split() == ["passed", "0"]
    assert f"ringjax: failpoint {point}: {action.partition('(')[0]}" in done.stderr
