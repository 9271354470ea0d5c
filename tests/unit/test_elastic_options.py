"""Tests of the options of elastic jobs: defaults, and refused combinations."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.ringrun import ringrun

from ringjax.config import Config
from ringjax.run import options, run
from ringjax.run.elastic.elastic_settings import UNBOUNDED, ElasticSettings
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.hosts.slots import HostSlots
from ringjax.run.job import Job
from ringjax.run.job_setup import make_job


def parsed(*words: str) -> Job:
    """Parses a command line of ringrun into a job."""
    args = options.parse([*words, "true"], "")
    config = Config.from_env(options.environment(args))
    spec = JobSpec(command=args.command, env={}, config=config)
    return make_job(spec, options.sizes(args))


def elastic(*words: str) -> ElasticSettings:
    found = parsed(*words)._policy
    assert found is not None
    return found.settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-np 4 --min-np 2", (4, 2, 4, [HostSlots("localhost", 4)])),
        (
            "-np 4 --min-num-proc 2 --max-num-proc 6",
            (4, 2, 6, [HostSlots("localhost", 6)]),
        ),
        (
            "-np 3 --min-np 1 -H a:2,b:4",
            (3, 1, 3, [HostSlots("a", 2), HostSlots("b", 4)]),
        ),
        ("--min-np 1 -H a:2,b:4", (6, 1, 6, [HostSlots("a", 2), HostSlots("b", 4)])),
        (
            "--min-np 1 -H a:2,b:4 --max-np 3",
            (3, 1, 3, [HostSlots("a", 2), HostSlots("b", 4)]),
        ),
        (
            "--min-np 2 -H a:2,b:3 --group-size 2",
            (4, 2, 4, [HostSlots("a", 2), HostSlots("b", 3)]),
        ),
        ("-np 2 --min-np 1 --spares 2", (2, 1, 2, [HostSlots("localhost", 4)])),
        (
            "--min-np 1 -H a:2,b:4 --spares 2",
            (4, 1, 4, [HostSlots("a", 2), HostSlots("b", 4)]),
        ),
        ("--host-discovery-script x --group-size 2", (None, 2, UNBOUNDED, None)),
        ("--host-discovery-script x -np 3", (3, 3, UNBOUNDED, None)),
        ("--host-discovery-script x", (None, 1, UNBOUNDED, None)),
        (
            "--host-discovery-script x --min-np 2 --max-np 5 --slots 3",
            (None, 2, 5, None),
        ),
    ],
)
def test_process_numbers_and_hosts(words: str, expected: tuple[Any, ...]) -> None:
    found = elastic(*words.split())
    assert (found.np, found.min_np, found.max_np, found.hosts) == expected


def test_other_options() -> None:
    found = elastic(
        *("--host-discovery-script", "find --all", "--slots-per-host", "3"),
        *("--reset-limit", "0", "--blacklist-cooldown-range", "10", "60.5"),
    )
    assert (found.script, found.slots) == ("find --all", 3)
    assert (found.reset_limit, found.cooldown) == (0, (10.0, 60.5))
    args = options.parse(["--elastic-timeout", "90", "true"], "")
    assert options.environment(args) == {"RINGJAX_ELASTIC_TIMEOUT": "90"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-np 2 --min-np 3", "--min-np 3: more than -np 2"),
        ("-np 4 --min-np 1 --max-np 3", "--max-np 3: less than -np 4"),
        (
            "--host-discovery-script x --min-np 3 --max-np 2",
            "--max-np 2: less than --min-np 3",
        ),
        ("-np 4 --min-np 1 -H a:3", "-np 4: more processes than slots; there are 3"),
        ("--min-np 4 -H a:3", "--min-np 4: more processes than slots; there are 3"),
        ("--min-np 4", "-np: say how many processes to start"),
        (
            "-np 4 --max-np 6",
            "--max-np: only for elastic jobs; add --min-np or --host-discovery-script",
        ),
        (
            "-np 4 --reset-limit 6 --elastic-timeout 3",
            "--elastic-timeout, --reset-limit: only for elastic jobs",
        ),
        (
            "-np 4 --min-np 2 --slots 2",
            "--slots-per-host: only for hosts that a script finds",
        ),
        (
            "-np 4 --host-discovery-script x -H a:4",
            "--host-discovery-script: it finds the hosts; do not give others",
        ),
        (
            "-np 5 --min-np 2 --group-size 2",
            "-np 5: with groups of 2 (--group-size, RINGJAX_GROUP_SIZE) it must be",
        ),
        ("-np 4 --min-np 1 --group-size 2", "--min-np 1: with groups of 2"),
        ("-np 4 --min-np 2 --max-np 5 --group-size 2", "--max-np 5: with groups of"),
        ("--min-np 3 -H a:2 --group-size 3", "a group of 3: there are 2 slots"),
        ("-np 3 --group-size 2", "-np 3: with groups of 2"),
        ("-H a:2,b:1 --group-size 2", "-np 3: with groups of 2"),
        ("-np 4 --spares 1", "--spares: only for elastic jobs; add --min-np or"),
        (
            "-np 3 --min-np 1 -H a:3 --spares 1",
            "--spares 1: with 3 ranks more processes than slots; there are 3",
        ),
        (
            "-np 2 --min-np 1 --max-np 3 -H a:4 --spares 2",
            "--spares 2: with 3 ranks more processes than slots; there are 4",
        ),
        (
            "--host-discovery-script x --spares 1",
            "--spares 1: every process would become a rank; give --max-np",
        ),
        ("--min-np 2 -H a:2,b:3 --group-size 2 --spares 1", "--spares 1: with groups"),
        (
            "-np 4 --min-np 2 --blacklist-cooldown-range 9 3",
            "--blacklist-cooldown-range 9 3: give two numbers of seconds, the least",
        ),
    ],
)
def test_contradictory_options_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(*words.split())
    assert str(caught.value).startswith(message)


def test_a_job_without_these_options_is_not_elastic() -> None:
    assert parsed("-np", "3")._policy is None


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(ValueError, match="--host-discovery-script: no command given"):
        parsed("--host-discovery-script", " ")


def test_errors_of_run_use_python_names() -> None:
    with pytest.raises(ValueError, match="^spares -1: less than 0"):
        run(print, np=2, min_np=1, spares=-1)
    with pytest.raises(ValueError, match=r"^max_np: only for elastic jobs; add min_np"):
        run(print, np=2, max_np=3)
    with pytest.raises(ValueError, match=r"^min_np 3: more than np 2$"):
        run(print, np=2, min_np=3)


def test_run_of_an_elastic_job(tmp_path: Path) -> None:
    replaced = tmp_path / "replaced"

    def work() -> str:
        worker = os.environ["RINGJAX_WORKER"]
        if worker == "1":
            os.kill(os.getpid(), 9)
        if worker == "3":
            replaced.touch()
        while not replaced.exists():  # no worker is replaced once one has finished
            time.sleep(0.01)
        return worker

    assert run(work, np=3, min_np=2, reset_limit=9) == ["0", "3", "2"]


@pytest.mark.parametrize("script", ["cat hosts", "./find hosts"])
def test_ringrun_with_a_discovery_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    (tmp_path / "hosts").write_text("localhost\n")
    (tmp_path / "find").write_text('#!/bin/sh\ncat "$1"\n')
    (tmp_path / "find").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = ["--slots", "2", "--host-discovery-script", script, "--min-np", "2"]
    done = ringrun(*words, "echo", "hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:hello",
        "[1]<stdout>:hello",
    ]
