"""Profiles: what all ranks do when, for a while or for a whole job.

`ringjax.profile(directory)` in a program, `ringrun --profile DIR` around it, and then
`python -m ringjax.profile show DIR`. The package itself can be called. Each rank
records in world/profile_recording.py; here the parts are brought together and drawn.
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

PATIENCE = 10.0  # seconds for the other ranks' parts, at the end
BETWEEN = 0.2  # of what `merge` draws: the other ranks wait meanwhile


def profile(
    directory: str | os.PathLike[str],
    steps: int | None = None,
    *,
    jax_trace: bool = True,
) -> Profile:
    """Begins to record what this rank exchanges when; all ranks call it.

    Compiled calls and named operations are recorded, and JAX's own trace for the first
    seconds, if the program has imported it. At the end rank 0 writes `profile.tar` for
    https://ui.perfetto.dev and `profile.json.gz` for older viewers, both with all ranks
    whose files it finds in `directory`: where hosts share no such folder see
    `python -m ringjax.profile merge`. Memory and files are bounded, the newest part is
    kept, and trouble with the disk ends the profile and not the program.

    Args:
        directory: made if it is not there. An earlier profile in it is replaced, and
            one that is under way comes to its end.
        steps: end after so many. A step is one round of collectives: it is over when
            the operation that moves most comes again, unless the program says so
            (`Profile.step`). None: at `Profile.stop`, or at the end of the job.
        jax_trace: False: without JAX's, of which a process can make only one at a time.

    Returns:
        The profile, to stop it, or for `with`.

    Raises:
        NotInitialized: before `init`.
        ValueError: `steps` is not positive, or nothing can be written there.

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
    """One that was begun; see `profile`."""

    def __init__(
        self, directory: Path, recording: ProfileRecording, world: World
    ) -> None:
        self._directory, self._recording = directory, recording
        self._world, self._first = world, world.rank == 0

    def step(self) -> None:
        """The program has come to the end of a step; then only these count."""
        self._recording.mark_step()

    def stop(self) -> None:
        """Ends it; on rank 0 both files are there then. May be called twice."""
        self._recording.end()
        first, self._first = self._first, False
        if not first:
            return
        from ringjax import stderr
        from ringjax.profile import parts

        until = time.monotonic() + PATIENCE
        run = self._recording.run
        while not parts.complete(self._directory, run) and time.monotonic() < until:
            epoch = self._world.current_epoch
            if self._world.failed or (epoch is not None and epoch.lost()):
                break  # what is missing will not come
            time.sleep(0.05)  # files of other processes: nobody tells when they end
        try:
            merge(self._directory, BETWEEN)
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
    """Writes both files from what ranks have left in a folder; returns the breakdown.

    Args:
        share: of the most that is drawn.

    Raises:
        ProfileNotFound: there is nothing.
        OSError: they cannot be written.
    """
    from ringjax.profile import archive, breakdown, parts

    found = breakdown.MergedProfile.of(
        parts.read(directory, int(share * parts.MOST_CALLS))
    )
    lines = archive.write(directory, found, int(share * archive.MOST_EVENTS))
    return breakdown.text(found, lines)


def show(directory: Path) -> str:
    """The breakdown of the profile in a folder; writes nothing.

    Raises:
        ProfileNotFound: there is nothing.
    """
    from ringjax.profile import breakdown, parts

    return breakdown.text(breakdown.MergedProfile.of(parts.read(directory)))


class _Callable(types.ModuleType):
    """A module that is called like the function of its name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __call__(self, *args: Any, **kwargs: Any) -> Profile:
        return profile(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
