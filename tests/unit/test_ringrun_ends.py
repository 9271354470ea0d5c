"""Tests of jobs that are ended from outside: Ctrl-C, kill -9, ssh. No process may stay.

"Other hosts" are this machine: a stand-in for ssh runs the remote command in a shell.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support import leaks
from support.launch import environment
from support.ringrun import SSH, ringrun, sh
from support.waiting import LONG, until

from ringjax.run.shutdown import Shutdown

both = pytest.mark.parametrize(
    "elastic", [[], ["--min-np", "1"]], ids=["static", "elastic"]
)
# A rank that prints "ready", and ignores SIGINT and SIGTERM, as do its children.
IGNORE_SIGNALS = "trap '' INT TERM; sleep 1000 & echo ready; sleep 1000 & wait; wait"


class Running:
    """A running ringrun, on a terminal if `terminal` is set."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], terminal: bool
    ) -> None:
        self.job = uuid.uuid4().hex[:12]
        self.text = b""
        if terminal:
            self._reader, writer = pty.openpty()
        else:
            self._reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ringjax.run", *words],
            env=environment(self.job, env),
            stdin=writer if terminal else subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            # On a terminal ringrun is in the foreground group, as in a shell.
            preexec_fn=_take_terminal if terminal else None,
        )
        os.close(writer)
        self.writer = self._reader

    def read_until(self, word: str, times: int = 1, limit: float = LONG) -> str:
        """Reads output until `word` occurs `times` times; to the end if it is empty."""
        deadline = time.monotonic() + limit
        while not word or self.text.count(word.encode()) < times:
            left = deadline - time.monotonic()
            assert left > 0, f"no {word!r} in {self.text.decode()!r}"
            if not select.select([self._reader], [], [], left)[0]:
                continue
            try:
                data = os.read(self._reader, 1 << 16)
            except OSError:  # a terminal that was hung up
                data = b""
            if not data:
                assert not word, f"no {word!r} in {self.text.decode()!r}"
                break
            self.text += data
        return self.text.decode()

    def end(self) -> tuple[int, str]:
        """Waits until ringrun ends. Returns its exit code and output."""
        text = self.read_until("")
        return self.process.wait(LONG), text

    def processes(self) -> dict[int, str]:
        return leaks.processes(self.job)

    def close(self) -> list[str]:
        left = leaks.settle(lambda: list(self.processes().values()), 10)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        os.close(self._reader)
        self.process.wait()
        return left


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Start:
    """Starts ringruns. The fixture `start` checks that they leave no process behind."""

    def __init__(self) -> None:
        self.running: list[Running] = []

    def __call__(
        self, *words: str, env: Mapping[str, str] | None = None, terminal: bool = False
    ) -> Running:
        self.running.append(Running(words, env or {}, terminal))
        return self.running[-1]


@pytest.fixture
def start() -> Iterator[Start]:
    starter = Start()
    yield starter
    left = [text for running in starter.running for text in running.close()]
    assert not left, "\n".join(left)


@both
def test_control_c_on_a_terminal(start: Start, elastic: list[str]) -> None:
    job = start("-np", "2", *elastic, "sh", "-c", IGNORE_SIGNALS, terminal=True)
    text = job.read_until("ready", 2)
    assert "\x1b[" in text
    assert "<stdout>" not in text
    os.write(job.writer, b"\x03")
    code, text = job.end()
    assert code == 130
    assert text.rstrip().endswith("ringrun: ended by SIGINT")


def test_no_color_disables_colors(start: Start) -> None:
    job = start("-np", "1", "echo", "hello", terminal=True, env={"NO_COLOR": "1"})
    assert job.end()[1] == "[0] hello\r\n"


def test_ranks_get_control_c_as_sigint(start: Start) -> None:
    script = "trap 'echo saved; exit 0' INT; echo ready; sleep 1000 & wait"
    job = start("-np", "2", "sh", "-c", script, terminal=True)
    job.read_until("ready", 2)
    os.write(job.writer, b"\x03")
    code, text = job.end()
    assert code == 130
    assert text.count("saved") == 2


def test_a_second_control_c_ends_at_once(start: Start) -> None:
    job = start("-np", "2", "sh", "-c", IGNORE_SIGNALS, terminal=True)
    job.read_until("ready", 2)
    os.write(job.writer, b"\x03")
    job.read_until("^C")
    time.sleep(0.05)  # the kernel would merge two signals that arrive together
    os.write(job.writer, b"\x03")
    assert job.end()[0] == 130


def test_a_second_interrupt_sends_sigkill() -> None:
    ending = Shutdown()
    ending.interrupt(signal.SIGINT)
    assert list(ending.due_signals()) == [signal.SIGINT]
    ending.interrupt(signal.SIGINT)
    assert list(ending.due_signals()) == [signal.SIGKILL]


def test_sigterm(start: Start) -> None:
    job = start("-np", "2", "sh", "-c", IGNORE_SIGNALS)
    job.read_until("ready", 2)
    job.process.terminate()
    code, text = job.end()
    assert code == 143
    assert text.rstrip().endswith("ringrun: ended by SIGTERM")


def test_sigusr1_is_forwarded(start: Start) -> None:
    script = "trap 'echo got it; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    job = start("-np", "2", "sh", "-c", script)
    job.read_until("ready", 2)
    job.process.send_signal(signal.SIGUSR1)
    code, text = job.end()
    assert code == 0
    assert text.count("]<stdout>:got it") == 2


def test_control_c_while_the_output_pipe_is_full(start: Start) -> None:
    job = start("-np", "2", "sh", "-c", "yes flood")
    job.read_until("flood")
    before = len(job.text)
    # Wait until ringrun blocks in a write to the full pipe.
    until(lambda: _writes(job.process.pid))
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(LONG) == 130
    assert len(job.text) == before


def _writes(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    return "pipe_write" in name or name == "0"


@both
def test_kill_9_of_ringrun_leaves_nothing(start: Start, elastic: list[str]) -> None:
    job = start("-np", "2", *elastic, "sh", "-c", IGNORE_SIGNALS)
    job.read_until("ready", 2)
    assert len(job.processes()) >= 6
    job.process.kill()
    until(lambda: not job.processes())


@both
def test_kill_9_of_the_agent_leaves_nothing(start: Start, elastic: list[str]) -> None:
    job = start("-np", "2", *elastic, "sh", "-c", IGNORE_SIGNALS)
    job.read_until("ready", 2)
    [agent] = [
        pid
        for pid, text in job.processes().items()
        if "ringjax.run.hosts.agent" in text
    ]
    os.kill(agent, signal.SIGKILL)
    code, text = job.end()
    assert code == 255
    who = r"worker 0 \(pid \d+\)" if elastic else "rank 0"
    assert re.search(rf"ringrun: {who}: its agent on this host died\s*$", text), text


def test_daemons_do_not_outlive_the_job(start: Start) -> None:
    job = start("-np", "2", "sh", "-c", "setsid sleep 1000 & (setsid sleep 1000 &) ; :")
    assert job.end()[0] == 0


def test_a_closed_output_pipe_does_not_end_the_job(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    rank = f"echo y; until [ -e {closed} ]; do sleep 0.02; done; echo y; echo y; "
    rank += f"touch {tmp_path}/done"
    words = [sys.executable, "-P", "-m", "ringjax.run", "-np", "1", "sh", "-c", rank]
    script = f'"$@" | {{ head -n 1; exec <&-; touch {closed}; }}; '
    script += 'echo "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=environment("ringrun", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "[0]<stdout>:y\n0\n"
    lost = "nothing more is written to standard output: Broken pipe; the job goes on"
    assert done.stderr == f"ringrun: {lost}\n"
    assert (tmp_path / "done").exists()


@both
@pytest.mark.parametrize("closed", [">/dev/full", "2>/dev/full", ">&-", "2>&-"])
def test_unwritable_output_does_not_end_the_job(
    tmp_path: Path, closed: str, elastic: list[str]
) -> None:
    rank = f"echo out; echo err >&2; sleep 0.3; echo out; touch {tmp_path}/done"
    words = [sys.executable, "-P", "-m", "ringjax.run", "-np", "1", "sh", "-c", rank]
    words[4:4] = elastic
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *words],
        env=environment("ringrun", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done
    assert (tmp_path / "done").exists()
    said = (done.stdout + done.stderr).count("No space left on device; the job goes on")
    assert said == closed.endswith("full")


def test_a_full_disk_ends_only_one_output_copy(tmp_path: Path) -> None:
    """ringrun stops writing the copy on the full disk; other copies are complete."""
    folder = tmp_path / "logs" / "rank.0"
    folder.mkdir(parents=True)
    (folder / "stdout").symlink_to("/dev/full")
    rank = "for i in 1 2 3; do echo $RINGJAX_RANK; echo e >&2; sleep 0.1; done"
    done = ringrun("-np", "2", "--output-filename", tmp_path / "logs", *sh(rank))
    assert done.returncode == 0, done
    assert done.stdout.count("[0]<stdout>:0\n") == 3
    why = "No space left on device; the job goes on"
    said = f"ringrun: no more copies in {folder / 'stdout'}: {why}\n"
    assert done.stderr.count(said) == done.stderr.count("ringrun: ") == 1
    assert (folder / "stderr").read_text() == "e\n" * 3
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "1\n" * 3


def test_other_hosts(start: Start, ssh: dict[str, str], tmp_path: Path) -> None:
    words = ["-p", "2222", "-i", "/my key", "-H", "localhost:1,n1:2,n2:1"]
    logs = ["--output-filename", str(tmp_path / "logs")]
    script = "echo $RINGJAX_RANK $RINGJAX_HOSTNAME $RINGJAX_CROSS_RANK; pwd >&2;"
    script += (
        '[ "$DISPLAY$XDG_SEAT" = :7 ] || exit 9'  # only variables of -x are passed on
    )
    words += ["-x", "DISPLAY=:7"]
    job = start(*words, *logs, "sh", "-c", script, env={**ssh, "XDG_SEAT": ""})
    code, text = job.end()
    assert code == 0, text
    for rank, place in enumerate(["localhost 0", "n1 1", "n1 0", "n2 2"]):
        assert f"[{rank}]<stdout>:{rank} {place}\n" in text
        assert f"[{rank}]<stderr>:{os.getcwd()}\n" in text
        stdout = tmp_path / "logs" / f"rank.{rank}" / "stdout"
        assert stdout.read_text() == f"{rank} {place}\n"
    assert "Welcome" not in text
    calls = Path(ssh["SSH_LOG"]).read_text().splitlines()
    assert len(calls) == 2
    assert all("-p 2222 -i /my key" in call for call in calls)


def test_failure_on_another_host(start: Start, ssh: dict[str, str]) -> None:
    script = "[ $RINGJAX_RANK = 2 ] && echo boom >&2 && exit 9; exec sleep 1000"
    job = start("-H", "localhost:1,n1:2", "sh", "-c", script, env=ssh)
    code, text = job.end()
    assert code == 9
    assert text.rstrip().endswith("ringrun: rank 2 (n1) failed: boom (exit code 9)")


def test_host_that_cannot_be_reached(start: Start, ssh: dict[str, str]) -> None:
    job = start("-H", "localhost:1,unreachable:1", "sleep", "1000", env=ssh)
    code, text = job.end()
    assert code == 255
    assert "ringrun: unreachable: ssh: no route to unreachable" in text
    reason = "rank 1 (unreachable): lost its host, ssh ended (255)"
    assert text.rstrip().endswith(f"ringrun: {reason}")


def test_kill_9_with_other_hosts(start: Start, ssh: dict[str, str]) -> None:
    job = start("-H", "localhost:1,n1:2", "sh", "-c", IGNORE_SIGNALS, env=ssh)
    job.read_until("ready", 3)
    job.process.kill()
    until(lambda: not job.processes())


def test_control_c_is_sigint_on_other_hosts(
    start: Start, ssh: dict[str, str], tmp_path: Path
) -> None:
    # Like the real ssh, this stand-in forwards all messages and dies of a SIGINT.
    client = SSH.replace("exec env -u RINGJAX_SECRET", "cat | setsid") + "| cat\n"
    (tmp_path / "bin" / "ssh").write_text(client.replace('"$*"\n', '"$*" '))
    log = tmp_path / "signals"
    script = f"""
    trap 'echo SIGINT >> {log}; exit 130' INT
    trap 'echo SIGTERM >> {log}; exit 143' TERM
    echo ready
    while :; do sleep 0.05; done
    """
    job = start("-H", "localhost:1,n1:1,n2:1", "sh", "-c", script, env=ssh)
    job.read_until("ready", 3)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert log.read_text() == "SIGINT\n" * 3


@both
def test_no_command_line_contains_the_secret(
    start: Start, ssh: dict[str, str], elastic: list[str]
) -> None:
    script = "echo secret $RINGJAX_SECRET; sleep 1000"
    job = start("-H", "localhost:1,n1:1", *elastic, "sh", "-c", script, env=ssh)
    text = job.read_until("secret ", 2)
    text = job.read_until("\n", text.count("\n") + 1) if text[-1] != "\n" else text
    secrets = {line.split()[1] for line in text.splitlines() if "secret " in line}
    [secret] = secrets
    assert len(bytes.fromhex(secret)) == 32
    lines = [Path(f"/proc/{p}/cmdline").read_bytes() for p in job.processes()]
    assert len(lines) >= 5
    assert not any(secret.encode() in line for line in lines)
    assert secret not in Path(ssh["SSH_LOG"]).read_text()
    # Only ranks have the variable, not ssh and not the agents.
    for pid, command in job.processes().items():
        if "ssh" in command or "ringjax.run" in command:
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    job.process.terminate()
    assert job.end()[0] == 143
