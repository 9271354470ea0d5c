"""ringrun's command line, output and exit codes; the ranks are shell one-liners."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import environment

from ringjax.run import output

Done = subprocess.CompletedProcess[str]
RingRun = Callable[..., Done]


def ringrun(*words: str | Path, **env: str) -> Done:
    """Runs ringrun to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringjax.run", *map(str, words)],
        env=environment("ringrun", env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def last_line(done: Done) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_a_job_without_ringjax_just_runs() -> None:
    done = ringrun("-np", "2", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_starts_in_a_moment() -> None:
    def seconds() -> float:
        begin = time.monotonic()
        assert ringrun("-np", "2", "true").returncode == 0
        return time.monotonic() - begin

    # 0.16 s on an idle machine with two cores; one of some tries, as others work too.
    assert any(seconds() < 0.4 for _ in range(10))


def test_prefixes_and_places() -> None:
    done = ringrun(
        "-np", "3", *sh("echo out $RINGJAX_RANK/$HOROVOD_SIZE; echo err >&2")
    )
    assert done.returncode == 0
    expected = {f"[{rank}]<stdout>:out {rank}/3" for rank in range(3)}
    assert set(done.stdout.splitlines()) == expected
    assert set(done.stderr.splitlines()) == {f"[{r}]<stderr>:err" for r in range(3)}


def test_lines_of_ranks_are_never_mixed() -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do printf a; printf 'b\\n'; done; printf end"
    done = ringrun("-np", "3", *sh(script))
    lines = done.stdout.splitlines()
    assert len(lines) == 30
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}]<stdout>:")]
        assert mine == [f"[{rank}]<stdout>:ab"] * 9 + [f"[{rank}]<stdout>:end"]


def test_a_progress_bar_in_a_log_is_its_last_state() -> None:
    words = ["-np", "1", *sh(r"printf '10%%\r20%%\r\ndone\n'")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ringjax.run", *words],
        env=environment("ringrun", {}),
        capture_output=True,
        timeout=50,
    )
    p = b"[0]<stdout>:"
    assert done.stdout == p + b"20%\r\n" + p + b"done\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bars_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    shown: list[bytes] = []
    console = output.Console(2)
    console._terminal, console._colour = {1: terminal, 2: terminal}, False
    monkeypatch.setattr(console, "_write", lambda target, data: shown.append(data))
    for second in range(22):
        monkeypatch.setattr(output.time, "monotonic", lambda now=second: 100.0 + now)
        for rank in range(2):
            console.write(rank, "stdout", b"\r" + f"{second} s".encode())
    for rank in range(2):
        console.write(rank, "stdout", b"\rend\n")
    text = b"".join(shown)
    if terminal:
        assert text.count(b"\r") == 23  # rank 0's
        assert text.count(b"[1] ") == 1 and b"[1] end\n" in text
    else:
        for rank in (b"[0]", b"[1]"):
            mine = [x for x in text.splitlines() if x.startswith(rank)]
            assert [x.partition(b":")[2] for x in mine] == [b"10 s", b"20 s", b"end"]
        assert b"\r" not in text


def test_a_flood_arrives_whole() -> None:
    code = "import sys; sys.stdout.write(('x' * 99 + '\\n') * 40000)"
    done = ringrun("-np", "2", sys.executable, "-c", code)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 80000
    assert {line.partition(":")[2] for line in lines} == {"x" * 99}


def test_output_files(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "here"
    script = "echo out $RINGJAX_RANK; echo err $RINGJAX_RANK >&2"
    done = ringrun("-np", "11", "--output-filename", folder, *sh(script))
    assert done.returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank.{rank:02d}" for rank in range(11)
    ]
    for rank in range(11):
        for stream, word in (("stdout", "out"), ("stderr", "err")):
            text = (folder / f"rank.{rank:02d}" / stream).read_text()
            assert text == f"{word} {rank}\n"
    assert "[10]<stdout>:out 10\n" in done.stdout


def test_timestamps() -> None:
    words = ["-np", "1", "--prefix-output-with-timestamp", *sh("echo hello")]
    stamp, _, rest = ringrun(*words).stdout.partition("[0]<stdout>:")
    time.strptime(stamp)
    assert rest == "hello\n"


def test_exit_code_and_reason_of_the_first_failure() -> None:
    script = "[ $RINGJAX_RANK = 1 ] && echo boom >&2 && exit 7; exec sleep 100"
    begin = time.monotonic()
    done = ringrun("-np", "3", *sh(script))
    assert done.returncode == 7
    assert last_line(done) == "ringrun: rank 1 failed: boom (exit code 7)"
    assert time.monotonic() - begin < 20


def test_notes_of_jax_are_no_reason() -> None:
    note = "--------------------\nFor simplicity, JAX has removed its internal frames"
    done = ringrun("-np", "1", *sh(f"echo 'ValueError: x\n{note} …' >&2; exit 1"))
    assert last_line(done) == "ringrun: rank 0 failed: ValueError: x (exit code 1)"


def test_a_crash_is_the_reason_and_not_what_is_printed_behind_it() -> None:
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
    script = "trap '' TERM; [ $RINGJAX_RANK = 0 ] && sleep 0.3 && exit 3; sleep 100"
    begin = time.monotonic()
    assert ringrun("-np", "2", *sh(script)).returncode == 3
    assert time.monotonic() - begin < 20


def test_an_early_end_without_an_error_is_fine(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script = f'[ $RINGJAX_RANK = 0 ] && exit 0; while [ ! -e "{flag}" ]; do :; done'
    job = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "ringjax.run",
            "--verbose",
            "-np",
            "2",
            *sh(script),
        ],
        env=environment("ringrun", {}),
        stderr=subprocess.DEVNULL,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.7)
    flag.touch()
    assert job.wait(20) == 0


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


def test_rank_0_reads_what_ringrun_is_given() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "ringjax.run", "-np", "2", "--stdin", "0"),
            *sh("read line && echo got $line; cat"),
        ],
        env=environment("ringrun", {}),
        input="typed\nmore\n",
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "[0]<stdout>:got typed\n[0]<stdout>:more\n", done


def test_a_breakpoint_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text("answer = 6\nbreakpoint()\nprint('it is', answer)\n")
    parent, child = os.openpty()
    words = ("-np", "2", "--stdin", "0", "sh", "-c")
    only_0 = f"[ $RINGJAX_RANK = 1 ] || exec {sys.executable} {script}"
    job = subprocess.Popen(
        [sys.executable, "-P", "-m", "ringjax.run", *words, only_0],
        env=environment("ringrun", {}),
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    seen = b""
    while b"(Pdb)" not in seen:
        seen += os.read(parent, 4096)
    os.write(parent, b"answer = 42\nc\n")
    assert job.wait(20) == 0
    while b"it is 42" not in seen:
        seen += os.read(parent, 4096)
    os.close(parent)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-H", "elsewhere.invalid:1"), "--stdin 0: rank 0 is on another host"),
        (("--min-np", "1"), "--stdin 0: not in an elastic job"),
    ],
)
def test_where_nobody_can_be_given_the_terminal(
    words: tuple[str, ...], text: str
) -> None:
    done = ringrun("-np", "1", *words, "--stdin", "0", "true")
    assert done.returncode == 2 and text in done.stderr


def test_variables_are_handed_on() -> None:
    words = ("-x", "COLOUR", "-x", "SHAPE=round", "-x", "NOT_SET", "-x", "EMPTY=")
    script = sh("echo $COLOUR $SHAPE ${NOT_SET-none} ${EMPTY-none}.")
    done = ringrun("-np", "1", *words, *script, COLOUR="red")
    assert done.stdout == "[0]<stdout>:red round none .\n"
    assert done.stderr == (
        "ringrun: -x NOT_SET: it is not set, so the ranks do not get it\n"
    )
    assert ringrun("-np", "1", "-x", "=3", "true").returncode == 2


def test_stdin_is_empty() -> None:
    assert ringrun("-np", "2", "cat").returncode == 0


def test_everything_after_the_command_is_its_own() -> None:
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


def test_a_command_line_of_horovod_is_understood() -> None:
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
    ):
        assert f"[0]<stdout>:{line}\n" in done.stdout
    notes = [line for line in done.stderr.splitlines() if "without effect" in line]
    assert len(notes) == 1
    assert "--autotune, " in notes[0]
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
def test_what_cannot_be_done_is_said(words: list[str], message: str) -> None:
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


def test_what_ranks_get_unless_somebody_says_otherwise() -> None:
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


def test_a_job_inside_an_elastic_one_is_not_elastic() -> None:
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
    assert re.search(r"\[X\] PyTorch \d+\.\d+\S* \(ringjax\.torch\)\n", text)


def test_everything_public_is_there() -> None:
    import ringjax

    assert {"init", "allreduce", "allreduce_grads", "run"} <= set(dir(ringjax))
    for name in ringjax.__all__:
        assert getattr(ringjax, name) is not None
    assert callable(ringjax.run)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ringjax.nonsense
