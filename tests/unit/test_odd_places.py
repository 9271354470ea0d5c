"""Tests of ringrun and init in unusual environments: containers, batch systems, sudo.

The environments have blocked or ignored signals, hosts that do not answer or print a
greeting, no folder for temporary files, a proxy, or process ids of another namespace.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.doctor import needs_root
from support.launch import environment
from support.ringrun import Done, ringrun
from support.waiting import LONG, until

from ringjax.config import Config
from ringjax.control import temporary
from ringjax.errors import LaunchError, StartupError
from ringjax.membership import job_credentials
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join
from ringjax.run import job, run
from ringjax.world import recorder

WITH_SIGNALS = "import os, signal, sys; {}; os.execv(sys.argv[1], sys.argv[1:])"


def ringrun_after(before: str, *words: str) -> subprocess.Popen[str]:
    """Runs ringrun from a program that has changed its signals."""
    own = [sys.executable, "-P", "-m", "ringjax.run"]
    return subprocess.Popen(
        [sys.executable, "-c", WITH_SIGNALS.format(before), *own, *words],
        env=environment("ringrun", {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "blocked", ["{signal.SIGCHLD}", "signal.valid_signals()"], ids=["SIGCHLD", "all"]
)
def test_blocked_signals_are_unblocked(blocked: str) -> None:
    """The launchers of Slurm and MPI start programs with blocked signals."""
    block = f"signal.pthread_sigmask(signal.SIG_BLOCK, {blocked})"
    job = ringrun_after(block, "-np", "2", "echo", "ended")
    text, _ = job.communicate(timeout=LONG)
    assert job.returncode == 0 and text.count("ended") == 2, text


def test_an_ignored_sigint_stays_ignored(tmp_path: Path) -> None:
    """A shell script starts background jobs with SIGINT ignored."""
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    end = tmp_path / "end"
    loop = f"echo runs; until [ -e {end} ]; do sleep 0.05; done; echo to the end"
    job = ringrun_after(ignore, "-np", "1", "sh", "-c", loop)
    assert job.stdout is not None
    assert job.stdout.readline() == "[0]<stdout>:runs\n"
    job.send_signal(signal.SIGINT)
    end.touch()
    text, _ = job.communicate(timeout=LONG)
    assert job.returncode == 0 and text == "[0]<stdout>:to the end\n"


@pytest.fixture
def over_ssh(tmp_path: Path) -> Callable[..., Done]:
    """Runs ringrun with a script instead of ssh."""

    def start(script: str, *words: str) -> Done:
        client = tmp_path / "ssh"
        skip = 'while [ "${1#-}" != "$1" ]; do shift; done; shift\n'
        client.write_text(f"#!/bin/sh\n{skip}{script}\n")
        client.chmod(0o755)
        return ringrun(*words, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return start


def test_a_login_greeting_may_lack_a_newline(over_ssh: Callable[..., Done]) -> None:
    greets = "printf 'Welcome '; exec sh -c \"$*\""
    done = over_ssh(greets, "-np", "1", "-H", "far:1", "nosuchprogram")
    assert done.returncode == 127
    assert "rank 0: cannot run 'nosuchprogram'" in done.stderr


def test_an_ssh_that_never_answers_times_out(over_ssh: Callable[..., Done]) -> None:
    words = ["-np", "2", "--start-timeout", "1", "-H", "far1:1,far2:1", "true"]
    done = over_ssh("exec sleep 1000", *words)
    assert done.returncode == 255
    assert "rank 0 (far1): no answer over ssh in 1 s; a login script" in done.stderr


def test_ranks_get_home_and_user_of_their_host(over_ssh: Callable[..., Done]) -> None:
    there = 'export HOME=/home/there USER=there; unset SHELL LOGNAME; exec sh -c "$*"'
    shows = "echo $HOME $USER $SHELL$LOGNAME"
    done = over_ssh(there, "-np", "1", "-H", "there@far:1", "sh", "-c", shows)
    assert done.stdout == "[0]<stdout>:/home/there there\n", done.stderr


@pytest.mark.parametrize(
    ("first", "mode", "why"),
    [
        ("print()\n", 0o644, "Permission denied; is it python {}?"),
        ("#!/usr/bin/python\r\n", 0o755, "(lines end as on Windows)"),
        ("#!/no/python\n", 0o755, "there is no interpreter '/no/python'"),
    ],
)
def test_errors_explain_scripts_that_cannot_be_executed(
    tmp_path: Path, first: str, mode: int, why: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(first)
    script.chmod(mode)
    done = ringrun("-np", "1", script)
    assert done.returncode in (126, 127)
    assert f"cannot run {str(script)!r}: " in done.stderr
    assert why.format(script) in done.stderr


def test_an_error_suggests_python_for_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    done = ringrun("-np", "1", "train.py")
    assert done.stderr.rstrip().endswith(
        "No such file or directory; is it python train.py?"
    )


def test_a_deleted_working_directory_is_an_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    own = f"{sys.executable} -P -m ringjax.run -np 1 true"
    done = subprocess.run(
        ["sh", "-c", f"cd {gone}; rmdir {gone}; {own}"],
        env=environment("ringrun", {}),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 1
    assert done.stderr == "ringrun: the current folder has been deleted\n"


def test_an_error_suggests_stdin_for_a_program_from_standard_input() -> None:
    done = ringrun("-np", "1", sys.executable, "-")
    assert "ranks read nothing from -: --stdin 0 gives it to rank 0" in done.stderr


def test_a_missing_ssh_is_an_error(tmp_path: Path) -> None:
    for name in ("env", "sh"):
        found = next(p for p in ("/usr/bin", "/bin") if os.path.exists(f"{p}/{name}"))
        (tmp_path / name).symlink_to(f"{found}/{name}")
    done = ringrun("-np", "1", "-H", "far:1", "true", PATH=str(tmp_path))
    why = "ssh ended (127): cannot run 'ssh': No such file or directory"
    assert done.stderr.rstrip().endswith(f"rank 0: lost its host, {why}")


def test_a_failed_rank_that_does_not_exit_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_HANG_TIMEOUT", 0.2)

    def task() -> None:
        import ringjax

        ringjax.init()
        if ringjax.rank() == 1:
            threading.Thread(target=threading.Event().wait).start()
            sys.excepthook(ValueError, ValueError("boom"), None)
        threading.Event().wait()

    with pytest.raises(LaunchError, match="rank 1 failed: ValueError: boom"):
        run(task, np=2)
    assert "rank 1 has failed, and its process has not ended" in capfd.readouterr().err


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)


@pytest.mark.usefixtures("no_temporary_folder")
def test_a_missing_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert temporary.folder() in ("/dev/shm", "")
    monkeypatch.setattr(temporary, "_MEMORY", "/nonexistent")
    assert temporary.folder() == job_credentials._runtime_folder() == ""
    monkeypatch.setattr(recorder._native, "Recorder", lambda *given: given)
    assert recorder.create_recorder(Config(), "rank 0", "0123456789abcdef")[2] == ""
    with pytest.raises(StartupError, match="set TMPDIR, or MASTER_ADDR"):
        job_credentials.private_folder()


@pytest.mark.parametrize("what", ["absent", "a stranger's", "own"])
def test_runtime_folders_of_other_users_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Slurm passes XDG_RUNTIME_DIR of the login node; su and sudo, of another user."""
    place = tmp_path / "run"
    if what != "absent":
        place.mkdir(mode=0o700)
    if what == "a stranger's":
        found = os.stat(place)
        stranger = os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))
        before = os.stat
        monkeypatch.setattr(
            job_credentials.os,
            "stat",
            lambda p: stranger if p == str(place) else before(p),
        )
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    wanted = str(place) if what == "own" else tempfile.gettempdir()
    assert job_credentials._runtime_folder() == wanted
    assert job_credentials.private_folder() == f"{wanted}/ringjax-{os.geteuid()}"
    mode = os.stat(f"{wanted}/ringjax-{os.geteuid()}").st_mode
    assert stat.S_IMODE(mode) == 0o700


@needs_root("unshare")
def test_children_end_although_proc_shows_another_pid_namespace(tmp_path: Path) -> None:
    """The ids in /proc belong to another namespace, so they must not be killed."""
    pid, script = tmp_path / "pid", tmp_path / "rank.py"
    script.write_text(
        f"""
import os, subprocess, sys
child = "import os; print(os.readlink('/proc/self'), flush=True); "
child += "os.execvp('sleep', ['sleep', '1000'])"
with open({str(pid)!r}, "w") as out:
    subprocess.Popen([sys.executable, "-c", child], stdout=out, start_new_session=True)
while not open({str(pid)!r}).read().endswith("\\n"):
    pass
"""
    )
    own = [sys.executable, "-P", "-m", "ringjax.run", "-np", "1", sys.executable]
    # A shell is process 1 of the namespace and waits, because the kernel kills all
    # other processes of the namespace when process 1 ends.
    first = ["sh", "-c", '"$@"; echo over; read nothing', "sh", *own, str(script)]
    job = subprocess.Popen(
        ["unshare", "-p", "-f", "--kill-child", *first],
        env=environment("ringrun", {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        assert job.stdout.readline() == "over\n"
        until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists())


def test_connections_inside_a_group_bypass_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ringjax.xla import jax_distributed

    for name in (
        *jax_distributed._PROXY_VARIABLES,
        jax_distributed._NO_PROXY,
        jax_distributed._NO_PROXY_OF_ALL,
    ):
        monkeypatch.delenv(name, raising=False)
    jax_distributed._bypass_proxy("10.0.0.1")
    assert jax_distributed._NO_PROXY not in os.environ
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv(jax_distributed._NO_PROXY_OF_ALL, "localhost")
    monkeypatch.setenv(jax_distributed._NO_PROXY, "")
    jax_distributed._bypass_proxy("10.0.0.1")
    assert os.environ[jax_distributed._NO_PROXY] == "localhost,10.0.0.1"


def test_sigint_during_imports_prints_no_traceback() -> None:
    program = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "ringjax.run.cli":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from ringjax.run.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment("interrupt", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_unreachable_loopback_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def connect(where: object, *_: object, **__: object) -> None:
        tried.append(where)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", connect)
    hello = {"size": 1}
    with pytest.raises(StartupError, match="ip link set lo up"):
        join(JobCredentials("127.0.0.1:4000", bytes(32), "00" * 8), 0, hello, LONG)
    assert len(tried) == 1  # no retries until the start timeout
    with pytest.raises(StartupError, match="could not join its job within 0.1 s"):
        join(JobCredentials("192.0.2.1:4000", bytes(32), "00" * 8), 0, hello, 0.1)
