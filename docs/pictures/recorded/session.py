"""A session at a terminal, recorded: an elastic job, and one of its workers killed.

    python session.py killed.cast

Run by `make recording`, which has an SVG made of the file (an asciicast). What is
typed is typed by this program; what answers is the job. It waits for what it wants to
see, at most a minute at a time, and fails if that does not come.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

ROOT = Path(__file__).resolve().parents[3]
JOB = "ringrun -np 3 --min-np 2 python examples/jax_elastic.py --epochs 5 &"
TYPED, PLAIN = "\033[36m", "\033[0m"


class Terminal:
    """Shows what is written on it, and keeps it with its times."""

    def __init__(self, file: Path, width: int = 88, height: int = 24) -> None:
        self._cast = file.open("w")
        self._began = time.monotonic()
        self._keep({"version": 2, "width": width, "height": height})

    def _keep(self, entry: object) -> None:
        self._cast.write(json.dumps(entry) + "\n")
        self._cast.flush()

    def write(self, text: str) -> None:
        """Some characters, or lines."""
        print(text, end="", flush=True)
        seconds = round(time.monotonic() - self._began, 3)
        self._keep([seconds, "o", text.replace("\n", "\r\n")])

    def type_in(self, command: str) -> None:
        """A prompt, and the command key by key."""
        self.write(f"{TYPED}$ ")
        for key in command:
            time.sleep(0.04)
            self.write(key)
        self.write(f"{PLAIN}\n")


class Job:
    """The job; its lines are shown as they come."""

    def __init__(self, command: str, terminal: Terminal) -> None:
        self._terminal = terminal
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env |= {"JAX_PLATFORMS": "cpu", "RINGJAX_RECORD_DIR": "off"}
        self._process = subprocess.Popen(
            command.rstrip(" &").split(),
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def until(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Shows lines up to the first one with `pattern`.

        Raises:
            TimeoutError: it does not come.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0, end - time.monotonic()))
            except Empty:
                raise TimeoutError(f"no line with {pattern!r}") from None
            self._terminal.write(line)
            found = re.search(pattern, line)
            if found:
                return found

    def end(self) -> None:
        """Waits for it, and shows what is left."""
        code = self._process.wait(60)
        time.sleep(0.2)  # the thread that shows its lines comes after it
        while not self._lines.empty():
            self._terminal.write(self._lines.get())
        assert code == 0, code


def main() -> None:
    """The session."""
    terminal = Terminal(Path(sys.argv[1]))
    terminal.type_in(JOB)
    job = Job(JOB, terminal)
    pid = job.until(r"rank 2 of 3, pid (\d+)")[1]
    job.until(r"step +30 ")
    kill = f"kill -9 {pid}    # rank 2"
    terminal.type_in(kill)
    os.kill(int(pid), signal.SIGKILL)
    job.until(r"rank 2 of 3, pid (\d+)")
    job.until(r"result")
    job.end()


if __name__ == "__main__":
    main()
