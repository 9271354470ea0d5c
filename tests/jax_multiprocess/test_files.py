"""JAX's own tests of several processes, on ringjax's collectives.

`make jax-tests` gets JAX's source at the tag of the installed version, and
runs each file of its tests/multiprocess on four processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.launch import environment

from ringjax.settings import mpi_library
from ringjax.world.groups import bind_free_port

SOURCE = Path(os.environ.get("JAX_SOURCE", "nowhere"), "tests", "multiprocess")
NOT_FOR_CPUS = {"pgle_test", "tpu_device_test"}
FILES = sorted({file.stem for file in SOURCE.glob("*_test.py")} - NOT_FOR_CPUS)
# Files whose tests need no collective on CPUs.
WITHOUT_COLLECTIVES = {
    *("axis_index_test", "device_id_test", "host_callback_test", "pjit_test"),
    *("key_value_store_test", "socket_transfer_test", "wait_barrier_test"),
}
# This test runs programs in two threads, and sets guards itself.
VARIABLES = {"thread_guard_test": {"JAX_THREAD_GUARD": "0"}}

PROCESSES = 4
LIMIT = 400  # seconds for a file; the slowest needs 10 on two cores
# JAX's limits of 5 to 15 s are for machines with a core for each process.
_LIMITS = ("heartbeat_timeout", "shutdown_timeout", "initialization_timeout")
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Outcome:
    """The results of the tests of one file of JAX in one process.

    Attributes:
        tests: the number of tests.
        errors: the errors of the tests that failed.
        calls: how often ringjax ran each collective.
        output: the output of the process.
    """

    tests: int
    errors: dict[str, str]
    calls: dict[str, int]
    output: str


def run(name: str, folder: Path, **variables: str) -> list[Outcome]:
    """Runs a file of JAX's tests. Returns the outcome of each process."""
    with processes(name, folder, variables) as started:
        for process in started:
            process.wait(LIMIT)
    return [_read(folder, index) for index in range(PROCESSES)]


@contextmanager
def processes(
    name: str, folder: Path, variables: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the processes of a file, and ends those that are left."""
    wanted = {mpi_library.SWITCH: "1"} | variables
    variables = environment("multiprocess", wanted | mpi_library.variables(wanted))
    # JAX runs these tests without a cache.
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)
    with ExitStack() as stack:
        reserved = stack.enter_context(closing(bind_free_port()))
        port = reserved.getsockname()[1]
        started = []
        for index in range(PROCESSES):
            output = stack.enter_context(Path(folder, f"{index}.output").open("wb"))
            words = [
                *(sys.executable, "-P", _WORKER),
                *(SOURCE / f"{name}.py", folder / f"{index}.json"),
                f"--xml_output_file={folder / f'{index}.xml'}",
                f"--num_processes={PROCESSES}",
                f"--multiprocess_test_worker_id={index}",
                f"--multiprocess_test_controller_address=localhost:{port}",
                *(f"--{limit}=100" for limit in _LIMITS),
            ]
            process = subprocess.Popen(
                words, env=variables, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield started


def _read(folder: Path, index: int) -> Outcome:
    output = (folder / f"{index}.output").read_text(errors="replace")
    try:
        tests = [*ElementTree.parse(folder / f"{index}.xml").iter("testcase")]
        calls = json.loads((folder / f"{index}.json").read_text())
    except (OSError, ElementTree.ParseError) as error:
        pytest.fail(f"process {index} wrote no results: {error}\n{output[-8000:]}")
    errors = {}
    for test in tests:
        if found := [*test.iter("failure"), *test.iter("error")]:
            errors[test.attrib["name"]] = "\n".join(e.text or "" for e in found)
    return Outcome(len(tests), errors, calls, output)


def test_jax_has_tests() -> None:
    assert FILES, f"{SOURCE} has no tests: use `make jax-tests`, which gets them"


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("name", FILES)
def test_all_tests_of_a_file_pass(name: str, tmp_path: Path) -> None:
    outcomes = run(name, tmp_path, **VARIABLES.get(name, {}))
    for index, outcome in enumerate(outcomes):
        assert outcome.tests, f"process {index} ran no test:\n{outcome.output}"
        assert not outcome.errors, f"in process {index}:\n{outcome.errors}"
    outputs = "\n".join(outcome.output for outcome in outcomes)
    said = re.findall(r"\[ringjax.*", outputs)
    assert not said
    assert name in WITHOUT_COLLECTIVES or all(o.calls for o in outcomes)


@pytest.mark.timeout(2 * LIMIT)
def test_no_call_is_counted_with_gloo(tmp_path: Path) -> None:
    """So the other tests would show it if they did not run on ringjax."""
    for outcome in run("all_reduce_test", tmp_path, RINGJAX_JAX_COLLECTIVES="0"):
        assert outcome.tests and not outcome.errors and not outcome.calls
