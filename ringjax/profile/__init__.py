"""Records when each rank made which calls, for some steps or for a whole job.

`ringjax.profile(directory)` in a program or `ringrun --profile DIR` records a profile,
and `python -m ringjax.profile show DIR` prints the profile. The package itself can be
called. world/profile_recording.py records one file on each rank, and this package
merges the files of all ranks and writes traces.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringjax.world.profile_recording import ProfileRecording
    from ringjax.world.world import World

__all__ = ["Profile", "profile"]

MERGE_TIMEOUT = 10.0  # seconds for which `stop` waits for the files of other ranks
# `Profile.stop` reads only this share of MAX_CALLS and MAX_EVENTS, because the other
# ranks may wait until rank 0 has merged the profile.
SHARE_IN_PROGRAM = 0.2


def profile(
    directory: str | os.PathLike[str],
    steps: int | None = None,
    *,
    jax_trace: bool = True,
) -> Profile:
    """Begins to record when this rank makes which calls. Call `profile` on all ranks.

    The profile contains compiled calls and named operations. If the program has
    imported JAX, the profile also contains JAX's own trace of the first seconds. At the
    end, rank 0 writes `profile.tar` for https://ui.perfetto.dev and `profile.json.gz`
    for older viewers, with all ranks whose files are in `directory`. If the hosts do
    not share a file system, use `python -m ringjax.profile merge`. Memory and files are
    bounded, and the newest calls are kept. A full disk ends the profile, but not the
    program.

    Args:
        directory: the folder, which is created if it is missing. A new profile replaces
            an earlier profile in the folder, and ends a profile that is being recorded.
        steps: how many training steps to record. With None, the profile ends with
            `Profile.stop` or with the job. A step ends when the operation that moves
            most data is repeated, or when the program calls `Profile.step`.
        jax_trace: whether to record JAX's own trace. JAX can record only one trace of a
            process at a time.

    Returns:
        The profile. `Profile.stop`, or the end of a `with` block, ends the profile.

    Raises:
        NotInitialized: before `init`.
        ValueError: `steps` is not positive, or `directory` cannot be written.

    Example:
        >>> import tempfile, numpy as np, ringjax
        >>> ringjax.init()
        >>> folder = tempfile.mkdtemp()
        >>> with ringjax.profile(folder, jax_trace=False):
        ...     x = ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
        >>> "profile.tar" in os.listdir(folder)
        True
    """
    from ringjax import runtime

    world = runtime.current("profile")
    if steps is not None and steps < 1:
        raise ValueError(f"ringjax.profile: steps must be positive, not {steps}")
    try:
        recording = world.begin_profile(
            os.fspath(directory), steps=steps or 0, jax_trace=jax_trace
        )
    except OSError as error:
        raise ValueError(f"ringjax.profile: {directory}: {error.strerror}") from error
    made = Profile(Path(directory), recording, world)
    runtime.on_shutdown(made.stop)
    return made


class Profile:
    """A profile that is being recorded; see `profile`."""

    def __init__(
        self, directory: Path, recording: ProfileRecording, world: World
    ) -> None:
        self._directory, self._recording = directory, recording
        self._world, self._first = world, world.rank == 0

    def step(self) -> None:
        """Marks the end of a training step. Then only marked steps are counted."""
        self._recording.mark_step()

    def stop(self) -> None:
        """Ends the profile; rank 0 then writes the traces. Further calls do nothing."""
        self._recording.end()
        first, self._first = self._first, False
        if not first:
            return
        from ringjax import stderr
        from ringjax.profile import parts

        # Poll: nothing notifies this process when other ranks have closed their files.
        until = time.monotonic() + MERGE_TIMEOUT
        run = self._recording.run
        while not parts.complete(self._directory, run) and time.monotonic() < until:
            epoch = self._world.current_epoch
            if self._world.failed or (epoch is not None and epoch.lost()):
                break  # a rank was lost, and will not close its file
            time.sleep(0.05)
        try:
            merge(self._directory, SHARE_IN_PROGRAM)
        except (OSError, ValueError) as error:
            stderr.line(f"ringjax.profile: {error}")

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def merge(directory: Path, share: float = 1.0) -> str:
    """Writes the traces from all ranks' files in a folder, and returns the breakdown.

    The traces contain only a `share` of MAX_CALLS and MAX_EVENTS. Raises
    ProfileNotFound if no rank's file is found, and OSError if writing fails.
    """
    from ringjax.profile import archive, breakdown, parts

    found = breakdown.MergedProfile.of(
        parts.read(directory, int(share * parts.MAX_CALLS))
    )
    lines = archive.write(directory, found, int(share * archive.MAX_EVENTS))
    return breakdown.format_breakdown(found, lines)


def show(directory: Path) -> str:
    """Returns the breakdown of the profile in a folder. Writes no file.

    Raises ProfileNotFound if the folder contains no profile.
    """
    from ringjax.profile import breakdown, parts

    return breakdown.format_breakdown(breakdown.MergedProfile.of(parts.read(directory)))


class _Callable(types.ModuleType):
    """A module that can be called like its function `profile`."""

    # Make pickles refer to this module by name, as cloudpickle does for plain modules.
    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __call__(self, *args: Any, **kwargs: Any) -> Profile:
        return profile(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
