"""Tests of --same-bits: the variables of ranks, and values that contradict them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import environment
from support.ringrun import ringrun, sh

from ringjax.settings import same_bits

FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
SHOW = sh("echo $NPROC $RINGJAX_SAME_BITS $XLA_FLAGS")


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, FLAGS),
        ({"NPROC": " 1 ", "PJRT_NPROC": ""}, FLAGS),
        ({"XLA_FLAGS": "--xla_a=b"}, f"--xla_a=b {FLAGS}"),
        ({"XLA_FLAGS": FLAGS}, FLAGS),
        (
            {"XLA_FLAGS": "--xla_gpu_deterministic_ops"},
            "--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0",
        ),
    ],
)
def test_the_variables_of_a_rank(given: dict[str, str], flags: str) -> None:
    assert same_bits.variables(given) == {"NPROC": "1", "XLA_FLAGS": flags}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NPROC", "4", "needs NPROC=1, but it is 4: unset it"),
        ("NPROC", "many", "needs NPROC=1, but it is many"),
        ("PJRT_NPROC", "2", "needs PJRT_NPROC=1, but it is 2"),
        ("XLA_FLAGS", "/etc/flags", "needs flags in XLA_FLAGS, but it is the name of"),
        ("XLA_FLAGS", f"{FLAGS[:-1]}4", "autotune_level=0 in XLA_FLAGS, but it is 4"),
        ("XLA_FLAGS", "--xla_gpu_deterministic_ops=0", "=true in XLA_FLAGS, but it is"),
    ],
)
def test_a_contradiction_is_an_error(name: str, value: str, text: str) -> None:
    done = ringrun("-np", "1", "--same-bits", "true", **{name: value})
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_ringrun_sets_the_variables(ssh: dict[str, str]) -> None:
    expected = f"1 1 {FLAGS}"
    for words in (
        ("-np", "2"),
        ("-np", "2", "--min-np", "1"),
        ("-H", "localhost:1,far:1"),
    ):
        done = ringrun(*words, "--same-bits", *SHOW, **ssh, XLA_FLAGS="")
        lines = [line.partition(":")[2] for line in done.stdout.splitlines()]
        assert lines.count(expected) == 2, done
    without = ringrun("-np", "1", *SHOW, XLA_FLAGS="")
    assert without.stdout == "[0]<stdout>:\n"


# Prints the number of XLA's threads, which have a name of their own.
THREADS = """
import ringjax
ringjax.init()
import jax
from pathlib import Path
jax.numpy.ones(3).block_until_ready()
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen\\n"))
"""


def test_a_rank_without_ringrun_sets_the_variables() -> None:
    def run(**env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", THREADS],
            env=environment("ringrun", {"RINGJAX_SAME_BITS": "1", **env}),
            capture_output=True,
            text=True,
            timeout=50,
        )

    assert run().stdout == "1\n"
    wrong = run(NPROC="3")
    assert "ValueError: RINGJAX_SAME_BITS (--same-bits) needs NPROC=1" in wrong.stderr


def test_run_passes_the_setting_on() -> None:
    script = """
import os, ringjax
print(ringjax.run(lambda: os.environ["NPROC"], np=2, same_bits=True))
try:
    ringjax.run(int, same_bits=True, env={**os.environ, "NPROC": "2"})
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment("ringrun", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout.splitlines() == [
        "['1', '1']",
        "RINGJAX_SAME_BITS (--same-bits) needs NPROC=1, but it is 2: unset it",
    ], done.stderr
