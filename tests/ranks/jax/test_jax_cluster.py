"""`jax.distributed.initialize()` without arguments, in jobs of ringrun and others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import StartJob, environment

from ringjax.control import addresses
from ringjax.settings import mpi_library

# Processes are started anew, and import JAX, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)

# The cluster must come before Slurm's, as in a shell of an allocation.
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "elsewhere"}
PROGRAM = """
import sys
import jax
jax.distributed.initialize()
import numpy as np
from jax.experimental import multihost_utils
every = multihost_utils.process_allgather(np.int32(jax.process_index()))
print(jax.process_count(), list(map(int, every.ravel())))
import ringjax
ringjax.init()
assert (ringjax.rank(), ringjax.size()) == (jax.process_index(), jax.process_count())
assert ringjax.eager.allreduce(np.float32(1), op=ringjax.Sum) == ringjax.size()
"""


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_processes_of_ringrun_find_each_other(start_job: StartJob, size: int) -> None:
    job = start_job(size, PROGRAM, SLURM, ["--jax-collectives"])
    assert job.wait(60) == 0, job.logs()
    for rank in range(size):
        assert f"{size} {list(range(size))}\n" in job.output(rank)
        assert "Gloo" not in job.output(rank)


@pytest.mark.parametrize("order", ["jax, ringjax", "ringjax, jax"])
def test_the_import_of_ringjax_suffices_under_ringrun(
    start_job: StartJob, order: str
) -> None:
    # The warm server of a script has imported both, in its own order, without a job.
    program = [sys.executable, "-P", "-c", f"import {order}{PROGRAM}"]
    job = start_job(3, program, SLURM)
    assert job.wait(60) == 0, job.logs()
    assert "3 [0, 1, 2]\n" in job.output(1)


def test_processes_of_another_launcher_find_each_other() -> None:
    with addresses.listen("127.0.0.1") as free:
        port = str(free.getsockname()[1])
    wanted = {mpi_library.SWITCH: "1"}
    wanted |= mpi_library.variables(wanted)
    wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    wanted |= {"TORCHELASTIC_RUN_ID": "one", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            env=environment("cluster", wanted)
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        with process:
            output = process.communicate(timeout=60)[0]
        assert "2 [0, 1]\n" in output, output


@pytest.mark.parametrize(
    ("before", "words", "advice"),
    [
        ("import ringjax; ringjax.init()", [], "call it before ringjax.init()"),
        ("", ["--group-size", "2"], "call ringjax.init() instead"),
        ("", ["--min-np", "2"], "start it by ringrun without --min-np"),
    ],
    ids=["initialized", "groups", "elastic"],
)
def test_jobs_that_are_no_jobs_of_jax_say_what_to_do(
    start_job: StartJob, before: str, words: list[str], advice: str
) -> None:
    program = f"{before}\nimport jax\njax.distributed.initialize()\n"
    job = start_job(2, program, None, ["--jax-collectives", *words])
    assert job.wait(60) != 0
    text = job.output(0)
    assert "jax.distributed.initialize: " in text and advice in text


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that loads the library, without a launcher."""
    wanted = {mpi_library.SWITCH: "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment("alone", wanted | mpi_library.variables(wanted)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_without_a_launcher_keeps_the_error_of_jax() -> None:
    done = run_alone("import jax; jax.distributed.initialize()")
    assert "coordinator_address should be defined" in done.stderr


def test_names_of_the_library_do_not_reach_the_program() -> None:
    done = run_alone("import jax; print(sorted(globals()))")
    assert done.returncode == 0, done.stderr
    names = "['__annotations__', '__builtins__', '__doc__', '__loader__', '__name__', "
    assert done.stdout == f"{names}'__package__', '__spec__', 'jax']\n"
