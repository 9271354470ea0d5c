"""Tests of ringrun's command line, output and exit codes, with short shell scripts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import environment
from support.ringrun import Done, ringrun, sh
from support.waiting import LONG


def last_line(done: Done) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_a_job_without_ringjax_runs() -> None:
    done = ringrun("-np", "2", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# A program that runs ringrun or its agent, and fails if ringjax sleeps. Its select()
# has no timeout, so a start that needs a timer hangs.
TIMELESS = """
import runpy, selectors, sys, time
from ringjax.run.hosts import agent_pool

sleep, select = time.sleep, selectors.EpollSelector.select

def checked(seconds):
    assert not sys._getframe(1).f_globals["__name__"].startswith("ringjax")
    sleep(seconds)

time.sleep = checked
selectors.EpollSelector.select = lambda self, limit=None: select(self, limit and None)
code = sys.orig_argv[sys.orig_argv.index("-c") + 1]
agent_pool.agent_command = lambda: [sys.executable, "-P", "-c", code]
module = "ringjax.run" if sys.argv[1:] else "ringjax.run.hosts.agent"
runpy.run_module(module, run_name="__main__")
"""


def test_a_start_imports_little_and_waits_for_no_timer() -> None:
    """A start takes as long as two Python interpreters: 0.16 s on two idle cores."""

    def loaded(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-P", *words],
            env=environment("ringrun", {"PYTHONPROFILEIMPORTTIME": "1"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr
        lines = [x for x in done.stderr.splitlines() if x.startswith("import time:")]
        return [line.rpartition("|")[2].strip() for line in lines]

    found, before = loaded("-c", TIMELESS, "-np", "2", "true"), loaded("-c", "")
    assert found.count("ringjax.run.hosts") == 2  # in ringrun and in its agent
    foreign = {x.partition(".")[0] for x in {*found} - {*before}}
    # The module `copy` tries to import org.python.core, which exists only in Jython.
    assert foreign <= {*sys.stdlib_module_names, "ringjax", "org"}
    assert "asyncio" not in found
    assert len(found) < 700  # twice the present number of both processes


def test_exit_code_and_reason_of_the_first_failure() -> None:
    script = "[ $RINGJAX_RANK = 1 ] && echo boom >&2 && exit 7; exec sleep 1000"
    done = ringrun("-np", "3", *sh(script))
    assert done.returncode == 7
    assert last_line(done) == "ringrun: rank 1 failed: boom (exit code 7)"


def test_notes_of_jax_are_not_the_reason() -> None:
    note = "--------------------\nFor simplicity, JAX has removed its internal frames"
    done = ringrun("-np", "1", *sh(f"echo 'ValueError: x\n{note} …' >&2; exit 1"))
    assert last_line(done) == "ringrun: rank 0 failed: ValueError: x (exit code 1)"


def test_the_help_line_is_not_the_reason() -> None:
    code = "import ringjax; raise ringjax.errors.StartupError('nobody came')"
    done = ringrun("-np", "1", sys.executable, "-c", code)
    assert "Help: ringjax explain StartupError\n" in done.stderr
    why = "ringjax.errors.StartupError: nobody came (exit code 1)"
    assert last_line(done) == f"ringrun: rank 0 failed: {why}"


def test_the_line_about_a_crash_is_the_reason() -> None:
    code = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"
    done = ringrun("-np", "1", sys.executable, "-c", code)
    crash = "Fatal Python error: Segmentation fault (killed by signal 11 (SIGSEGV))"
    assert last_line(done) == f"ringrun: rank 0 failed: {crash}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_signals_become_exit_codes(number: signal.Signals) -> None:
    done = ringrun("-np", "2", *sh(f"kill -{number.value} $$"))
    assert done.returncode == 128 + number
    assert f"killed by signal {number.value} ({number.name})" in last_line(done)


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    script = "trap '' TERM; [ $RINGJAX_RANK = 0 ] && sleep 0.3 && exit 3; sleep 1000"
    assert ringrun("-np", "2", *sh(script)).returncode == 3


def test_a_rank_may_exit_early_without_an_error(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script = f'[ $RINGJAX_RANK = 0 ] && exit 0; while [ ! -e "{flag}" ]; do :; done'
    words = [sys.executable, "-P", "-m", "ringjax.run", "--verbose", "-np", "2"]
    with subprocess.Popen(
        [*words, *sh(script)],
        env=environment("ringrun", {}),
        stderr=subprocess.DEVNULL,
    ) as job:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(0.7)
        finally:
            flag.touch()
        assert job.wait(LONG) == 0


def test_commands_that_cannot_run(tmp_path: Path) -> None:
    done = ringrun("-np", "2", "no-such-command")
    assert done.returncode == 127
    reason = "cannot run 'no-such-command': No such file or directory"
    assert last_line(done) == f"ringrun: rank 0: {reason}"
    script = tmp_path / "plain"
    script.write_text("true")
    done = ringrun("-np", "2", script)
    assert done.returncode == 126
    assert "Permission denied" in last_line(done)


def test_variables_are_passed_to_ranks() -> None:
    words = ("-x", "COLOUR", "-x", "SHAPE=round", "-x", "NOT_SET", "-x", "EMPTY=")
    script = sh("echo $COLOUR $SHAPE ${NOT_SET-none} ${EMPTY-none}.")
    done = ringrun("-np", "1", *words, *script, COLOUR="red")
    assert done.stdout == "[0]<stdout>:red round none .\n"
    assert done.stderr == (
        "ringrun: -x NOT_SET: it is not set, so the ranks do not get it\n"
    )
    assert ringrun("-np", "1", "-x", "=3", "true").returncode == 2


def test_options_after_the_command_belong_to_it() -> None:
    line = "-np 7 --verbose -H x:1 --log begins --several options --"
    done = ringrun("-np", "1", "echo", *line.split())
    assert done.stdout == f"[0]<stdout>:{line}\n"
    assert ringrun("-np", "1", "--", "echo", "a").stdout == "[0]<stdout>:a\n"


HOROVOD = """
-np 2 -H localhost:2 --gloo --disable-cache --cycle-time-ms 3.5 --cache-capacity 0
--fusion-threshold-mb 32 --autotune --autotune-log-file a.csv --no-stall-check
--hierarchical-allreduce --timeline-filename t.json --timeline-mark-cycles
--mpi-threads-disable --num-nccl-streams 2 --thread-affinity 1 --tcp
--gloo-timeout-seconds 9 --log-level DEBUG --log-hide-timestamp
--network-interface lo --start-timeout 600 --mpi-args=-x --binding-args=-y
-p 22 -i /key --stall-check-warning-time-seconds 5 --verbose
"""


def test_a_command_line_of_horovod_is_accepted() -> None:
    done = ringrun(*HOROVOD.split(), *sh("env"))
    assert done.returncode == 0, done.stderr
    for line in (
        f"RINGJAX_BUCKET_BYTES={32 << 20}",
        "RINGJAX_LOG_LEVEL=debug",
        "RINGJAX_STALL_WARNING=0",
        "RINGJAX_COLLECTIVE_TIMEOUT=0",
        "RINGJAX_NETWORK_INTERFACES=lo",
        "RINGJAX_START_TIMEOUT=600",
        f"RINGJAX_FUSION_THRESHOLD={32 << 20}",
        "RINGJAX_CYCLE_TIME=3.5",
        "RINGJAX_CACHE_CAPACITY=0",
        "RINGJAX_FAILURE_TIMEOUT=9",
        "NCCL_IB_DISABLE=1",
        "RINGJAX_TIMELINE=t.json",
        "RINGJAX_TIMELINE_MARK_CYCLES=1",
        "RINGJAX_AUTOTUNE=1",
        "RINGJAX_AUTOTUNE_LOG=a.csv",
    ):
        assert f"[0]<stdout>:{line}\n" in done.stdout
    notes = [line for line in done.stderr.splitlines() if "without effect" in line]
    assert len(notes) == 1
    assert "--disable-cache, " in notes[0]
    assert "--autotune" not in notes[0]
    assert "--log-level" not in notes[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "0"], "0 is less than 1"),
        (["-np", "two"], "invalid whole number value: 'two'"),
        (["-np", "2"], "no command given"),
        (["true"], "-np: say how many processes to start"),
        (["-np", "3", "-H", "localhost:2", "true"], "more processes than slots"),
        (
            ["-np", "1", "--network-interfaces", "nope0", "true"],
            "'nope0' does not exist",
        ),
        (["-np", "1", "--log-level", "loud", "true"], "invalid choice: 'loud'"),
        (["-np", "1", "--config-file", "none.toml", "true"], "No such file"),
        (["-np", "1", "--cache-capacity", "0.5", "true"], "invalid whole number"),
        (["-np", "1", "--cycle-time-ms", "-1", "true"], "-1 is less than 0"),
    ],
)
def test_wrong_options_are_errors(words: list[str], message: str) -> None:
    done = ringrun(*words)
    assert done.returncode == 2
    assert message in last_line(done)
    assert "Traceback" not in done.stderr


def test_bad_settings_in_the_environment() -> None:
    done = ringrun("-np", "1", "true", RINGJAX_START_TIMEOUT="soon")
    assert done.returncode == 2
    assert "RINGJAX_START_TIMEOUT is 'soon'" in last_line(done)


@pytest.mark.parametrize("kind", ["toml", "yaml"])
def test_config_file(tmp_path: Path, kind: str) -> None:
    text = {
        "toml": "[params]\nfusion_threshold_mb = 1\ncycle_time_ms = 2.5\n"
        "cache_capacity = 9\ntorus_allreduce = true\n"
        "[library_options]\ngloo_timeout_seconds = 4\n"
        '[timeline]\nfilename = "a.json"\nmark_cycles = false\n'
        '[logging]\nlevel = "INFO"\n[stall_check]\nwarning_time_seconds = 7\n',
        "yaml": "params:\n  fusion_threshold_mb: 1\n  cycle_time_ms: 2.5\n"
        "  cache_capacity: 9\n  torus_allreduce: true\n"
        "library_options:\n  gloo_timeout_seconds: 4\n"
        "timeline:\n  filename: a.json\n  mark_cycles: false\n"
        "logging:\n  level: INFO\nstall_check:\n  warning_time_seconds: 7\n",
    }[kind]
    if kind == "yaml":
        pytest.importorskip("yaml")
    file = tmp_path / f"job.{kind}"
    file.write_text(text)
    words = ["-np", "1", "--config-file", str(file), "--log-level", "error", *sh("env")]
    done = ringrun(*words)
    assert done.returncode == 0, done.stderr
    assert f"RINGJAX_BUCKET_BYTES={1 << 20}\n" in done.stdout
    assert "RINGJAX_LOG_LEVEL=error\n" in done.stdout  # the command line wins
    assert "RINGJAX_STALL_WARNING=7\n" in done.stdout
    for line in (
        "RINGJAX_CYCLE_TIME=2.5",
        "RINGJAX_CACHE_CAPACITY=9",
        "RINGJAX_FAILURE_TIMEOUT=4",
        "RINGJAX_TIMELINE=a.json",
        "RINGJAX_TIMELINE_MARK_CYCLES=0",
    ):
        assert f"[0]<stdout>:{line}\n" in done.stdout
    assert "params.torus_allreduce in " in done.stderr


def test_config_file_with_a_wrong_value(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[params]\ncache_capacity = 1.5\n")
    done = ringrun("-np", "1", "--config-file", str(file), "true")
    assert done.returncode == 2
    assert "cache_capacity is 1.5: expected a whole number" in last_line(done)


def test_default_malloc_settings_of_ranks() -> None:
    done = ringrun("-np", "1", *sh("env"))
    (line,) = [x for x in done.stdout.splitlines() if "GLIBC_TUNABLES=" in x]
    tunables = [x.split("=") for x in line.partition("=")[2].split(":")]
    assert {name: int(value) for name, value in tunables} == {
        "glibc.malloc.hugetlb": 1,
        "glibc.malloc.mmap_threshold": 32 << 20,
        "glibc.malloc.trim_threshold": 1 << 40,
    }
    chosen = ringrun("-np", "1", *sh("env"), GLIBC_TUNABLES="glibc.malloc.check=0")
    assert "GLIBC_TUNABLES=glibc.malloc.check=0\n" in chosen.stdout


def test_ranks_do_not_get_an_empty_name_of_a_library() -> None:
    """With it, jaxlib would look for MPI in Python, and end the process."""
    done = ringrun("-np", "1", *sh("env"), MPITRAMPOLINE_LIB="")
    assert done.returncode == 0 and "MPITRAMPOLINE_LIB" not in done.stdout
    done = ringrun("-np", "1", *sh("env"), MPITRAMPOLINE_LIB="/other.so")
    assert "MPITRAMPOLINE_LIB=/other.so\n" in done.stdout


def test_a_job_inside_an_elastic_job_is_not_elastic() -> None:
    done = ringrun("-np", "1", *sh("env"), RINGJAX_ELASTIC="1", RINGJAX_WORKER="7")
    assert done.returncode == 0
    assert "RINGJAX_ELASTIC" not in done.stdout
    assert "RINGJAX_WORKER" not in done.stdout


def test_yaml_without_pyyaml(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise ImportError('none')\n")
    file = tmp_path / "job.yaml"
    file.write_text("{}")
    path = os.pathsep.join([str(tmp_path), environment("", {}).get("PYTHONPATH", "")])
    done = ringrun("-np", "1", "--config-file", file, "true", PYTHONPATH=path)
    assert done.returncode == 2
    assert "needs PyYAML" in last_line(done)
    assert "TOML" in last_line(done)


def test_version_and_check_build() -> None:
    import ringjax

    assert ringrun("--version").stdout == f"ringrun {ringjax.__version__}\n"
    text = ringrun("--check-build").stdout
    assert text.startswith(f"ringjax v{ringjax.__version__}:\n")
    for word in ("JAX", "shared memory", "TCP", "NCCL"):
        assert word in text
    for title in ("TensorFlow", "Keras", "PyTorch"):
        module = title.lower().removeprefix("py")
        version = rf"\[X\] {title} \d+\.\d+\S* \(ringjax\.{module}\)\n"
        assert re.search(version, text), text


def test_public_names_of_ringjax_resolve() -> None:
    import ringjax

    assert {"init", "allreduce", "allreduce_grads", "run"} <= set(dir(ringjax))
    for name in ringjax.__all__:
        assert getattr(ringjax, name) is not None
    assert callable(ringjax.run)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ringjax.nonsense
