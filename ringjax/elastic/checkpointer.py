"""Checkpointer: the committed state on disk, for when no rank is left to have it.

Written by rank 0 in a thread of its own, one folder for each checkpoint, which gets its
name when everything is in it. So what has a name is complete. What the files inside are
is up to the kind of state (`array_files.py`, `ringjax.torch.elastic.state`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from ringjax import failpoints, runtime, stderr

_ABOUT = "about.json"
_UNFINISHED = ".writing"


class CheckpointLayout(Protocol):
    """How one kind of state is laid out in a folder."""

    def prepare(self, committed: dict[str, Any]) -> Any:
        """What `write` needs; nobody changes it any more.

        Raises:
            TypeError: something in it cannot be written.
        """

    def write(self, folder: Path, prepared: Any) -> None:
        """Fills the folder. Runs in a thread."""

    def read(self, folder: Path, present: dict[str, Any]) -> dict[str, Any]:
        """What was committed; `present` has the structure.

        Raises:
            ValueError: the program's structure is another one.
        """


class CheckpointedState(Protocol):
    """What a checkpointer needs of a state."""

    def committed(self) -> dict[str, Any]:
        """What the last commit has kept."""

    def adopt(self, committed: dict[str, Any]) -> None:
        """Goes on from there."""

    def files(self) -> CheckpointLayout:
        """How it is written."""


def _refuse_groups() -> None:
    if runtime.is_initialized() and runtime.group_size() > 1:
        raise RuntimeError(
            "ringjax.elastic.Checkpointer: in a job of groups (ringrun --group-size) "
            "no process has the whole state; have one group write it by orbax, which "
            "knows arrays of several processes: if ringjax.replica_set().rank() == 0"
        )


class Checkpointer:
    """Writes a state to disk now and then, and finds the newest one again.

    Give it to `ringjax.elastic.run`: then it writes at commits, on rank 0 only, while
    training goes on, and a job that starts anew begins with the newest checkpoint that
    is complete, on any number of ranks. A commit that comes while the checkpoint before
    is still being written is passed over. A disk that is full, or any other failure to
    write, is a warning: the checkpoints before stay, and training goes on.

    A checkpoint is a folder with a number for a name: ``state.step``, if there is such
    an attribute, or the next free one. JAX's trees in it are orbax checkpoints,
    one for each attribute (``pip install "ringjax[checkpoint]"``), and everything else
    is in ``plain.json``. A `ringjax.torch.elastic.TorchState` is one file of
    `torch.save`. Both can be read without ringjax.

    Args:
        directory: the same for all ranks, on a file system that they share.
        every: one of so many commits is written.
        seconds: not before so many have passed since the last one began.
        keep: so many complete ones stay.

    Example:
        >>> import ringjax, tempfile
        >>> ringjax.init()
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpointer(folder) as checkpointer:
        ...     state = ringjax.elastic.State(step=7, name="first")
        ...     begun = checkpointer.save(state)
        >>> state = ringjax.elastic.State(step=0, name="")
        >>> Checkpointer(folder).load(state)
        7
        >>> state.step, state.name
        (7, 'first')
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 1,
        seconds: float = 0.0,
        keep: int = 3,
    ) -> None:
        if every < 1 or keep < 1 or seconds < 0:
            raise ValueError(
                f"ringjax.elastic.Checkpointer: every={every}, seconds={seconds}, "
                f"keep={keep}: `every` and `keep` are at least 1, `seconds` at least 0"
            )
        self.directory = Path(os.path.abspath(directory))
        self.every = every
        self.seconds = seconds
        self.keep = keep
        self._commits = self._written = 0
        self._begun = float("-inf")
        self._thread: threading.Thread | None = None
        self._state: Any = None

    def numbers(self) -> list[int]:
        """Of all complete checkpoints, the newest last."""
        with contextlib.suppress(FileNotFoundError):
            found = [entry.name for entry in self.directory.iterdir()]
            complete = (
                name for name in found if (self.directory / name / _ABOUT).is_file()
            )
            return sorted(int(name) for name in complete if name.isdecimal())
        return []

    def save(self, state: CheckpointedState) -> bool:
        """Begins to write what the state's last commit has kept.

        Returns:
            False if one is still being written; then this one is not.

        Raises:
            TypeError: the state holds something that cannot be written.
        """
        _refuse_groups()
        if self._thread is not None and self._thread.is_alive():
            return False
        self.wait()
        self._begun = time.monotonic()
        files, committed = state.files(), state.committed()
        number, step = max([-1, *self.numbers()]) + 1, committed.get("step")
        if type(step) is int:
            number = max(number, step)
        # Not a daemon: a program that ends finishes what it has begun to write.
        self._thread = threading.Thread(
            target=self._write,
            args=(files, number, files.prepare(committed)),
            name="ringjax-checkpoint",
        )
        self._thread.start()
        return True

    def load(self, state: CheckpointedState) -> int | None:
        """Takes the newest checkpoint that can be read into the state, as committed.

        For one rank; `State.sync` or `run` tell the others.

        Returns:
            Its number; None if there is none.

        Raises:
            RuntimeError: there are some, and none can be read.
        """
        _refuse_groups()
        self.wait()
        last: Exception | None = None
        for number in reversed(self.numbers()):
            folder = self.directory / str(number)
            try:
                found = state.files().read(folder, state.committed())
            except Exception as error:
                _say("warning", f"checkpoint {folder} cannot be read: {error}")
                last = error
                continue
            state.adopt(found)
            _say("info", f"training goes on from checkpoint {folder}")
            return number
        if last is not None:
            raise RuntimeError(
                f"ringjax.elastic: none of the checkpoints in {self.directory} can be "
                f"read by this program; to begin anew, use another directory ({last})"
            ) from last
        return None

    def wait(self) -> None:
        """Returns when nothing is being written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    # -- for `run` ---------------------------------------------------------------------

    def attach(self, state: Any) -> Callable[[], bool]:
        """From now on commits of the state are written.

        Returns:
            Loads the newest checkpoint into the state, if there is one; True if so.
        """
        _refuse_groups()
        self._state = state
        state.after_save(self._on_commit)

        def load() -> bool:
            return self.load(state) is not None

        return load

    def detach(self) -> None:
        """No longer; returns when the last one is written."""
        if self._state is not None:
            self._state.after_save(None)
            self._state = None
        self.wait()

    def _on_commit(self) -> None:
        self._commits += 1
        soon = time.monotonic() - self._begun < self.seconds
        if (
            self._commits % self.every == 0
            and not soon
            and runtime.rank() == 0
            and self.save(self._state)
        ):
            self._written = self._commits

    def save_last(self) -> None:
        """Begins to write the last commit, unless that was done when it was made."""
        if self._state is not None and self._written < self._commits:
            self.wait()
            self.save(self._state)

    # -- the thread --------------------------------------------------------------------

    def _write(self, files: CheckpointLayout, number: int, prepared: Any) -> None:
        unfinished = self.directory / f".{number}{_UNFINISHED}"
        try:
            self._remove_unfinished()
            unfinished.mkdir(parents=True)
            failpoints.passing("checkpoint.begun")
            files.write(unfinished, prepared)
            with synced(unfinished / _ABOUT) as file:
                file.write(json.dumps({"format": 1, "number": number}).encode())
            _force_to_disk(unfinished)
            failpoints.passing("checkpoint.written")
            unfinished.rename(self.directory / str(number))
            _force_to_disk(self.directory)
            failpoints.passing("checkpoint.named")
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            left = self.numbers()
            stays = f"the one before, {left[-1]}, stays" if left else "none is there"
            _say(
                "warning",
                f"checkpoint {self.directory / str(number)} could not be written: "
                f"{_first_line(error)}; {stays}, and training goes on",
            )
        else:
            for old in self.numbers()[: -self.keep]:
                self._remove(old)

    def _remove(self, number: int) -> None:
        # First the name: what is half removed must not look complete.
        gone = self.directory / f".{number}.old{_UNFINISHED}"
        with contextlib.suppress(OSError):
            (self.directory / str(number)).rename(gone)
            shutil.rmtree(gone)

    def _remove_unfinished(self) -> None:
        """What an earlier rank 0 has left behind when it was lost."""
        for left in self.directory.glob(f".*{_UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file to write, which is on the disk afterwards."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _force_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def _say(level: str, text: str) -> None:
    """Prints the line if `level` is wanted; warnings also outside of a job."""
    if runtime.is_initialized():
        runtime.current("elastic").log(level, f"elastic: {text}")
    elif level == "warning":
        stderr.line(f"[ringjax] warning: elastic: {text}")
