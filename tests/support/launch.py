"""Starts jobs of several ranks for tests, sends them signals, and reads their output.

A rank runs the script that a test passes, or tests/support/rank_worker.py.
tests/support/leaks.py finds processes that outlive their job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from support import leaks, warm

ROOT = Path(__file__).resolve().parents[2]
# Variables of launchers. If they are set, a rank would join the job that started pytest
# instead of the job of the test.
_LAUNCHER_PREFIXES = (
    *("RINGJAX_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_"),
    *("JSM_", "JAX_PROCESS_", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_", "PET_"),
    *("SKYPILOT_", "JOB_COMPLETION_INDEX", "RANK", "WORLD_SIZE", "MASTER_"),
)
_LAUNCHER = "ringjax.run"


class JobError(AssertionError):
    """A job did not do what the test waited for. The text holds all ranks' logs."""


class Job:
    """A run of `ringrun -np N …` with its ranks, logs and exit code.

    The fixture `start_job` starts jobs, and closes them after the test.

    Args:
      np: number of ranks.
      script: the Python source of every rank, or the words of a command.
      folder: an empty folder for the script and the logs.
      env: variables added to the job's environment.
      options: further words for ringrun.
      source: the program of the ranks if it is not the script. Its imports choose the
        warm server that forks the ranks (tests/support/warm.py). None: no server.
    """

    def __init__(
        self,
        np: int,
        script: str | Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        source: str | None = "",
    ) -> None:
        self.np = np
        self.id = uuid.uuid4().hex[:12]
        self._folder = folder
        self._command = self._write(script)
        self._source = _source(self._command) if source == "" else source
        self._env = environment(self.id, env or {})
        self._options = list(options)
        self._process: warm.Program | None = None
        self._ended_itself = False

    def start(self) -> Self:
        """Starts the launcher in a new session, as a terminal does."""
        logs = ["--output-filename", str(self._folder / "logs")]
        words = [sys.executable, "-P", "-m", _LAUNCHER, "-np", str(self.np), *logs]
        with (self._folder / "launcher").open("wb") as log:
            self._process = warm.start(
                [*words, *self._options, *self._command],
                self._env,
                stdout=log,
                text=self._source,
                session=True,
            )
        return self

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        if self._process is None:
            raise JobError("the job was not started")
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code of the launcher, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout: float = 40) -> int:
        """Waits for the end of the job and returns ringrun's exit code.

        Raises:
          JobError: if the job still runs after `timeout` seconds. The job is ended, and
            the text shows the stacks of all ranks.
        """
        if self._process is None:
            raise JobError("the job was not started")
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end_with_stacks()
            late = f"the job still ran after {timeout:g} s\n{self.logs()}"
            raise JobError(late) from None
        self._ended_itself = True
        return code

    def wait_for(self, rank: int, text: str, timeout: float = 40) -> None:
        """Waits until `rank` has printed `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            if self.poll() is not None or time.monotonic() > deadline:
                if text in self.output(rank):
                    return
                self.end_with_stacks()
                raise JobError(f"rank {rank} never printed {text!r}\n{self.logs()}")
            time.sleep(0.01)

    def rank_pid(self, rank: int, timeout: float = 20) -> int:
        """Waits for the process of a rank and returns its id."""
        deadline = time.monotonic() + timeout
        while True:
            for pid in leaks.processes(self.id):
                if self._runs_rank(pid, rank):
                    return pid
            if self.poll() is not None or time.monotonic() > deadline:
                raise JobError(f"rank {rank} does not run\n{self.logs()}")
            time.sleep(0.01)

    def worker_pid(self, worker: int) -> int:
        """Returns the process id of a running worker of an elastic job."""
        (pid,) = (
            pid
            for pid in leaks.processes(self.id)
            if self._runs_rank(pid)
            and f"RINGJAX_WORKER={worker}".encode() in _variables(pid)
        )
        return pid

    def kill(self, rank: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a rank."""
        os.kill(self.rank_pid(rank), sig)

    def interrupt(self) -> None:
        """Sends SIGINT to the launcher's whole process group, like Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def output(self, rank: int) -> str:
        """Returns stdout and stderr of a rank, or of a worker in an elastic job."""
        logs = self._folder / "logs"
        number = str(rank).zfill(len(str(self.np - 1)))
        folders = [logs / f"rank.{number}", logs / f"worker.{rank}"]
        names = [folder / name for folder in folders for name in ("stdout", "stderr")]
        return "".join(map(_text, names))

    def launcher_output(self) -> str:
        """Returns the text that ringrun itself has written to the terminal."""
        return _text(self._folder / "launcher")

    def logs(self, tail: int = 4000) -> str:
        """Returns the last output of ringrun and of each rank, for error texts."""
        parts = [("ringrun", self.launcher_output())]
        parts += [(f"rank {rank}", self.output(rank)) for rank in range(self.np)]
        return "\n".join(f"--- {who}\n{_last_words(text, tail)}" for who, text in parts)

    def end_with_stacks(self) -> None:
        """Ends the job; every rank first writes its threads' stacks to its log."""
        alive = leaks.processes(self.id)
        ranks = [pid for pid in alive if self._runs_rank(pid)]
        for pid in ranks:
            _signal(pid, signal.SIGABRT)  # PYTHONFAULTHANDLER is set
        leaks.settle(
            lambda: [str(p) for p in ranks if p in leaks.processes(self.id)], 2
        )
        self._kill_all()

    def left_behind(self) -> list[str]:
        """Ends and returns the processes that outlived the job."""
        found = leaks.settle(lambda: list(leaks.processes(self.id).values()))
        self._kill_all()
        return [f"process that outlived the job: {text}" for text in found]

    def close(self) -> list[str]:
        """Ends the job. If it has ended by itself, returns its leaked processes."""
        found = self.left_behind() if self._ended_itself else []
        self._kill_all()
        return found

    def _write(self, script: str | Sequence[str]) -> list[str]:
        if not isinstance(script, str):
            return list(script)
        path = self._folder / "script.py"
        path.write_text(textwrap.dedent(script).strip() + "\n")
        return [sys.executable, str(path)]

    def _runs_rank(self, pid: int, rank: int | None = None) -> bool:
        """Returns whether `pid` runs the job's command itself, and not a wrapper of it.

        Args:
            rank: the rank that the process must be; None: any rank, or a newcomer.
        """
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            variables = _variables(pid)
        except OSError:
            return False
        command = [word.encode() for word in self._command]
        if rank is None:
            return words == command
        return words == command and f"RINGJAX_RANK={rank}".encode() in variables

    def _kill_all(self) -> None:
        def kill() -> list[str]:
            alive = leaks.processes(self.id)
            for pid in alive:
                _signal(pid, signal.SIGKILL)
            return [str(pid) for pid in alive]

        leaks.settle(kill, 10)
        if self._process is not None:
            self._process.wait(10)


class Jobs:
    """Jobs that are closed together. `new_folder` makes a folder for each job."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._jobs: list[Job] = []

    def start(
        self,
        np: int,
        script: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Job:
        """Starts a job; see `Job`."""
        self._jobs.append(Job(np, script, self._new_folder(), env, options))
        return self._jobs[-1].start()

    def close(self) -> list[str]:
        """Ends all jobs. Returns the leaked processes of jobs that had ended."""
        return [text for job in self._jobs for text in job.close()]


def _source(command: Sequence[str]) -> str:
    """Returns the text of the Python files of a command."""
    return "\n".join(_text(Path(word)) for word in command if word.endswith(".py"))


def _variables(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


StartJob = Callable[..., Job]
"""The fixture `start_job`. It takes the arguments of Job except the folder."""


def environment(job: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment for a job, without launchers' variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    kept.setdefault("JAX_PLATFORMS", "cpu")
    # PyTorch's threads spin at barriers, which is slow while other processes run.
    kept.setdefault("OMP_NUM_THREADS", "1")
    # Let the first rank store byte code, because hundreds of ranks import these files.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [str(ROOT / "tests"), *filter(None, [kept.get("PYTHONPATH")])]
    spec = importlib.util.find_spec("ringjax")
    if spec and spec.origin and Path(spec.origin).parent == ROOT / "ringjax":
        # pytest imports ringjax from the checkout, so the job must do that, too.
        paths = [str(ROOT), *paths]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    return {
        **kept,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        leaks.JOB_VARIABLE: job,
        "RINGJAX_RECORD_DIR": "off",  # jobs that fail on purpose must leave no files
        **extra,
    }


def cheap_code() -> str:
    """Returns XLA's flags for tests, which compile many programs and run them rarely.

    With the flags, XLA still rewrites and schedules programs as usual, but generates
    code in half the time, in TensorFlow, too. XLA aborts a process at an unknown flag,
    and new versions drop flags, so a process tries the flags first.
    """
    level = "--xla_backend_optimization_level=0"
    for flags in (f"{level} --xla_cpu_use_fusion_emitters=false", level):
        if _xla_knows(flags):
            return flags
    return ""


def _xla_knows(flags: str) -> bool:
    """Returns whether JAX initialises its backend with these flags."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import jax; jax.devices()"],
        env=environment("flags", {"XLA_FLAGS": flags}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=50,
    )
    return done.returncode == 0


def _signal(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        os.kill(pid, sig)


def _last_words(text: str, tail: int) -> str:
    """Returns the end of `text`, and before it the begin of a crash report, if any."""
    text = text.strip()
    crash = text.find("Fatal Python error: ")
    if 0 <= crash < len(text) - tail:
        return f"{text[crash : crash + tail]}\n...\n{text[-tail:]}"
    return text[-tail:]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
