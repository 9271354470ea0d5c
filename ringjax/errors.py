"""The exceptions of ringjax, and functions that make them from a framework's errors.

These exceptions are failures at run time, on this rank or on another rank. Wrong
arguments raise ValueError or TypeError before anything is sent. A compiled program or
graph raises an exception of JAX or TensorFlow. From its text, `translate` makes an
exception of ringjax, without importing either framework.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

# The command that prints the section of docs/troubleshooting.md about a class.
HELP = "ringjax explain"
# Every `Fenced` error contains this text, by which `from_code` recognizes the error.
FENCED = "was declared lost and must not go on"
# The core says so of a rank that has announced that it closes its links.
SHUT_DOWN = "has shut down before this call"

# "RINGJAX[world, epoch 0]: allreduce 'grads' (2 tensors, SUM, seq 3): <problem>"
_CALL = re.compile(
    r"RINGJAX\[[^\]]*\]: (?:Mismatched [\w ]+ of )?"
    r"(allreduce|allgather|broadcast|reducescatter|alltoall|barrier|exchange)\b"
    r"(?: '(.*?)')?(?=[ :])"
)
_LEAF = re.compile(r"\brank \d+ sent '(.*?)' ")
# TensorFlow's status code -> ringjax's code. TensorFlow's other codes are ambiguous.
_TENSORFLOW_CODES = {3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 9: "MISMATCH"}


class StatusLike(Protocol):
    """The attributes of `ringjax._native.StatusError`."""

    code: str  # the name of the status code
    rank: int  # the rank that caused the failure; -1 for none


class RingjaxError(RuntimeError):
    """Base class of all failures at run time.

    The text names the rank, the operation and the reason. A traceback ends with the
    command that prints help.

    Attributes:
        rank: the rank of the world that caused the failure; -1 if it is not known.

    Example:
        >>> text = "ABORTED: RINGJAX[world, epoch 0]: allreduce 'loss': ranks disagree"
        >>> error = translate(ValueError(text))
        >>> type(error).__name__, error.rank, error.op, error.tensor
        ('Mismatch', -1, 'allreduce', 'loss')
    """

    rank: int = -1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Add a note, not a line of the text, because programs compare the text.
        self.add_note(f"Help: {HELP} {type(self).__name__}")

    @property
    def op(self) -> str:
        """The operation that failed, such as "allreduce"; "" if it is not known."""
        found = _CALL.search(str(self))
        return found[1] if found else ""

    @property
    def tensor(self) -> str:
        """The name of the tensor and of the mismatched leaf; "" if neither is known."""
        found = _CALL.search(str(self))
        leaf = _LEAF.search(str(self), found.end()) if found else None
        named = (found[2] if found else None, leaf[1] if leaf else None)
        return "/".join(name for name in named if name)


# Horovod's name, so that `except HorovodInternalError` keeps working.
HorovodInternalError = RingjaxError


class PeerLost(RingjaxError):
    """A rank is gone: it died, failed, left, or cannot be reached any more.

    Attributes:
        rank: the lost rank in the world, -1 if it is not known.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Fenced(PeerLost):
    """This rank was declared lost and must stop. The other ranks continue."""


class Mismatch(RingjaxError):
    """Ranks disagree about an operation. All ranks raise this; the job stays usable."""


class Stalled(RingjaxError):
    """A live rank did not take part in an operation within the time allowed.

    Attributes:
        rank: the first late rank, -1 if it is not known.
        ranks: all late ranks that are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.rank = self.ranks[0] if self.ranks else -1


class Cancelled(RingjaxError):
    """An operation was interrupted on this rank."""


class InvalidArgument(RingjaxError, ValueError):
    """An operation was refused on this rank before anything was sent."""


class NotInitialized(RingjaxError):
    """`ringjax.init()` has not been called, or `shutdown()` was called after it."""


class StartupError(RingjaxError):
    """The ranks could not join the job; the text names missing ranks and the cause."""


class OutOfDescriptors(StartupError):
    """This process needs more sockets than its limit of open files allows."""


class Unreachable(StartupError):
    """This rank could not connect with some ranks in time.

    Attributes:
        ranks: the ranks that were not reached.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class AuthenticationError(StartupError):
    """The peer does not have this job's secret, or broke the protocol."""


class LaunchError(RingjaxError):
    """A job started by `ringrun` or `ringjax.run.run` failed.

    Attributes:
        rank: the first rank that failed, -1 if no rank failed.
        exit_code: the exit code of ringrun.
    """

    def __init__(self, message: str, rank: int = -1, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks join or leave the job, so the training function must start again.

    The function starts again with its current state. This is no failure, and therefore
    no RingjaxError. Elastic training catches it.

    Attributes:
        skip_sync: whether ranks only leave, so that the remaining ranks have equal
            states already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type[HostsUpdatedInterrupt], tuple[bool]]:
        return type(self), (self.skip_sync,)


class HorovodVersionMismatchError(ImportError):
    """Horovod's error for a framework of another version than Horovod was compiled for.

    ringjax is not compiled against frameworks, so it does not raise this error.

    Attributes:
        name: the framework.
        version: the version found now.
        installed_version: the version for which Horovod was compiled.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} {version} is installed, but {installed_version} was there before",
            name=name,
        )
        self.version = version
        self.installed_version = installed_version

    def __reduce__(
        self,
    ) -> tuple[type[HorovodVersionMismatchError], tuple[str, str, str]]:
        return type(self), (str(self.name), self.version, self.installed_version)


def from_code(code: str, message: str, rank: int = -1) -> RingjaxError:
    """Returns the exception for a status code of ringjax or XLA, given by its name."""
    if code == "UNAVAILABLE" and FENCED in message:
        return Fenced(message, rank)
    if code == "UNAVAILABLE":
        return PeerLost(message, rank)
    kinds: dict[str, type[RingjaxError]] = {
        "MISMATCH": Mismatch,
        "ABORTED": Mismatch,  # the code of a mismatch within XLA
        "CANCELLED": Cancelled,
        "INVALID_ARGUMENT": InvalidArgument,
    }
    if code == "DEADLINE_EXCEEDED":
        return Stalled(message, [rank] if rank >= 0 else ())
    return kinds.get(code, RingjaxError)(message)


def from_status(exc: StatusLike) -> RingjaxError:
    """Returns the exception for an error of the native core, to raise `from exc`."""
    return from_code(exc.code, str(exc), exc.rank)


def from_program(text: str) -> RingjaxError | None:
    """Returns the exception for the error text of a compiled program.

    Returns None if the error is not about ringjax.

    Example:
        >>> from_program("UNAVAILABLE: RINGJAX[world, epoch 0]: rank 2 is gone").rank
        2
    """
    # JAX adds a line of dashes and advice about tracebacks below the message.
    found = re.match(r"(?s)\W*([A-Z_]+): .*?(RINGJAX\[.*?)(\n-{5,}|$)", text)
    if found is None:
        return None
    return from_code(found[1], found[2].strip(), _rank_in(found[2]))


def _rank_in(text: str) -> int:
    """Returns the first rank that a text names; -1 if it names none."""
    found = re.search(r"\brank (\d+)", text)
    return int(found[1]) if found else -1


def translate(error: BaseException) -> RingjaxError | None:
    """Returns the exception of ringjax for an exception of JAX or TensorFlow.

    A collective that fails inside of a compiled program makes JAX raise a
    JaxRuntimeError, or a ValueError if the step is called from JAX's cache. In a graph
    of TensorFlow it raises an OpError.

    Args:
        error: any exception.

    Returns:
        `error` itself if it is an exception of ringjax; None if it is not about
        ringjax.

    Example:
        >>> text = "UNAVAILABLE: RINGJAX[world, epoch 0]: barrier: rank 2 is gone"
        >>> lost = translate(ValueError(text))
        >>> type(lost).__name__, lost.rank, lost.op
        ('PeerLost', 2, 'barrier')
        >>> translate(ValueError("mine")) is None
        True
    """
    if isinstance(error, RingjaxError):
        return error
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OpError" in kinds and hasattr(error, "error_code"):
        return _from_tensorflow(str(error), int(error.error_code))
    if not kinds & {"JaxRuntimeError", "XlaRuntimeError", "ValueError"}:
        return None
    return from_program(str(error))


def _from_tensorflow(text: str, code: int) -> RingjaxError | None:
    # TensorFlow appends the failed node of the graph, in double brackets.
    found = re.search(r"(?s)RINGJAX\[.*?(?=\n\s*\[\[|$)", text)
    if found is None:
        return None
    rank = _rank_in(found[0])
    name = _TENSORFLOW_CODES.get(code, "UNKNOWN" if rank < 0 else "UNAVAILABLE")
    return from_code(name, found[0].strip(), rank)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Context manager that converts errors of JAX and TensorFlow to ringjax's.

    Use it around compiled steps. Exceptions that are not about ringjax pass through.
    JAX raises the exception of a step when its result is used, so use the result inside
    of the block (`block_until_ready`, `float`). `translated` is a decorator, too.

    Raises:
        RingjaxError: `PeerLost`, `Mismatch`, `Stalled` and others. Its cause is the
            original exception.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> step = jax.jit(ringjax.allreduce)
        >>> try:
        ...     with ringjax.errors.translated():
        ...         loss = float(step(jnp.float32(0.5)))
        ... except ringjax.errors.PeerLost as error:
        ...     print("without rank", error.rank)
        >>> loss
        0.5
    """
    try:
        yield
    except Exception as error:
        ours = translate(error)
        if ours is None or ours is error:
            raise
        raise ours from error
