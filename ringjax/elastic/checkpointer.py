"""Writes the committed state to disk, in case all ranks are lost.

Rank 0 writes one folder for each checkpoint, in a separate thread. A folder receives
its name, a number, when all its files are complete, so a folder with such a name is a
complete checkpoint. The files depend on the class of the state (`array_files.py`,
`ringjax.torch.elastic.state`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringjax import failpoints, runtime, stderr
from ringjax.elastic.array_files import CheckpointLayout, synced
from ringjax.elastic.state import State
from ringjax.world.time_spent import spent

_ABOUT = "about.json"
_UNFINISHED = ".writing"


def _refuse_groups() -> None:
    if runtime.is_initialized() and runtime.group_size() > 1:
        raise RuntimeError(
            "ringjax.elastic.Checkpointer: in a job of groups (ringrun --group-size) "
            "no process has the whole state; have one group write it by orbax, which "
            "knows arrays of several processes: if ringjax.replica_set().rank() == 0"
        )


class Checkpointer:
    """Writes a state to disk at commits, and loads the newest checkpoint.

    Pass the checkpointer to `ringjax.elastic.run`. Rank 0 then writes at commits, while
    training continues, and a job that is started again begins with the newest complete
    checkpoint, on any number of ranks. A commit is not written if the previous
    checkpoint is still being written. If writing fails, for example because the disk is
    full, a warning is printed, earlier checkpoints stay, and training continues.

    A checkpoint is a folder whose name is a number: ``state.step`` if there is such an
    attribute, or else the next free number. Each attribute that contains arrays is an
    orbax checkpoint in the folder (``pip install "ringjax[checkpoint]"``), and all
    other attributes are in ``plain.json``. A `ringjax.torch.elastic.TorchState` is one
    file of `torch.save`. These files can be read without ringjax.

    Args:
        directory: the folder of all checkpoints, on a file system that all ranks share.
        every: the number of commits from one checkpoint to the next.
        seconds: the smallest time between the starts of two checkpoints.
        keep: how many complete checkpoints to keep.

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
        self._state: State | None = None

    def numbers(self) -> list[int]:
        """Returns the numbers of all complete checkpoints, the newest last."""
        with contextlib.suppress(FileNotFoundError):
            found = [entry.name for entry in self.directory.iterdir()]
            complete = (
                name for name in found if (self.directory / name / _ABOUT).is_file()
            )
            return sorted(int(name) for name in complete if name.isdecimal())
        return []

    def save(self, state: State) -> bool:
        """Begins to write the last commit of the state.

        Returns:
            True, or False if the previous checkpoint is still being written, so that
            this commit is not written.

        Raises:
            TypeError: the state contains an object that cannot be written.
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
        # The thread is no daemon, so that the interpreter waits for the last checkpoint
        # at exit.
        self._thread = threading.Thread(
            target=self._write,
            args=(files, number, files.prepare(committed)),
            name="ringjax-checkpoint",
        )
        self._thread.start()
        return True

    def load(self, state: State) -> int | None:
        """Loads the newest readable checkpoint into the state, and commits the state.

        Call `load` on one rank. `State.sync` or `run` then send the state to the other
        ranks.

        Returns:
            The number of the checkpoint, or None if there is no checkpoint.

        Raises:
            RuntimeError: there are checkpoints, but none can be read.
        """
        _refuse_groups()
        self.wait()
        last: Exception | None = None
        for number in reversed(self.numbers()):
            folder = self.directory / str(number)
            try:
                found = state.files().read(folder, state.committed())
            except Exception as error:
                _log("warning", f"checkpoint {folder} cannot be read: {error}")
                last = error
                continue
            state.adopt(found)
            _log("info", f"training goes on from checkpoint {folder}")
            return number
        if last is not None:
            raise RuntimeError(
                f"ringjax.elastic: none of the checkpoints in {self.directory} can be "
                f"read by this program; to begin anew, use another directory ({last})"
            ) from last
        return None

    def wait(self) -> None:
        """Waits until the checkpoint in progress is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    # -- called by `run` ---------------------------------------------------------------

    def attach(self, state: State) -> Callable[[], bool]:
        """Makes this checkpointer write the commits of a state from now on.

        Returns a function that loads the newest checkpoint, and returns whether there
        is a checkpoint.
        """
        _refuse_groups()
        self._state = state
        state.after_save(self._on_commit)

        def load() -> bool:
            return self.load(state) is not None

        return load

    def detach(self) -> None:
        """Stops writing commits. Waits until the last checkpoint is written."""
        if self._state is not None:
            self._state.after_save(None)
            self._state = None
        with spent.on("checkpoints"):
            self.wait()

    def _on_commit(self) -> None:
        self._commits += 1
        soon = time.monotonic() - self._begun < self.seconds
        if (
            self._state is not None
            and self._commits % self.every == 0
            and not soon
            and runtime.rank() == 0
        ):
            with spent.on("checkpoints"):
                begun = self.save(self._state)
            if begun:
                self._written = self._commits

    def save_last(self) -> None:
        """Begins to write the last commit, unless the commit is on disk already."""
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
            # Even after a crash of the host, a folder named by a number must be
            # complete. So force the files and their folder to the disk before the
            # folder is renamed to its number, and then the parent folder.
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
            _log(
                "warning",
                f"checkpoint {self.directory / str(number)} could not be written: "
                f"{_first_line(error)}; {stays}, and training goes on",
            )
        else:
            for old in self.numbers()[: -self.keep]:
                self._remove(old)

    def _remove(self, number: int) -> None:
        # Rename first, so that a partly removed folder does not look complete.
        renamed = self.directory / f".{number}.old{_UNFINISHED}"
        with contextlib.suppress(OSError):
            (self.directory / str(number)).rename(renamed)
            shutil.rmtree(renamed)

    def _remove_unfinished(self) -> None:
        """Removes unfinished checkpoints of earlier processes."""
        for left in self.directory.glob(f".*{_UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)


def _force_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def _log(level: str, text: str) -> None:
    """Logs a line with the level of the job. Outside of a job, prints warnings."""
    if runtime.is_initialized():
        runtime.current("elastic").log(level, f"elastic: {text}")
    elif level == "warning":
        stderr.line(f"[ringjax] warning: elastic: {text}")
