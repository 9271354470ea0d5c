"""The exceptions of ringjax, and how a status of the native core becomes one of them.

Not for bad arguments: those are ValueError or TypeError naming the argument, raised
before anything is sent. All of these happened at run time, to this rank or another one.
What a compiled program or graph raises has a class of JAX's or TensorFlow's:
`translate` makes ours of it, from its text and without importing either.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

# Prints the section of docs/troubleshooting.md that has the name of a class.
HELP = "ringjax explain"
# In the text of every Fenced, and of the status that it comes from.
FENCED = "was declared lost and must not go on"

# "RINGJAX[world, epoch 0]: allreduce 'grads' (2 tensors, SUM, seq 3): what happened"
_CALL = re.compile(
    r"RINGJAX\[[^\]]*\]: (?:Mismatched [\w ]+ of )?"
    r"(allreduce|allgather|broadcast|reducescatter|alltoall|barrier)\b"
    r"(?: '(.*?)')?(?=[ :])"
)
_LEAF = re.compile(r"\brank \d+ sent '(.*?)' ")
# TensorFlow's codes, and what of ours becomes them; UNKNOWN is more than one thing.
_TENSORFLOW = {3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 9: "MISMATCH"}


class StatusLike(Protocol):
    """What `ringjax._native.StatusError` carries: a code name and the rank to blame."""

    code: str
    rank: int


class RingjaxError(RuntimeError):
    """Base class of every failure at run time. Its text says who, what and why.

    A traceback ends with the command that tells what to do about it.

    Attributes:
        rank: the world rank to blame, -1 if there is none or it is not known.

    Example:
        >>> text = "ABORTED: RINGJAX[world, epoch 0]: allreduce 'loss': ranks disagree"
        >>> error = translate(ValueError(text))
        >>> type(error).__name__, error.rank, error.op, error.tensor
        ('Mismatch', -1, 'allreduce', 'loss')
    """

    rank: int = -1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # A note, because the text is compared, sent and searched.
        self.add_note(f"Help: {HELP} {type(self).__name__}")

    @property
    def op(self) -> str:
        """The operation that has failed, such as "allreduce"; "" if it was none."""
        found = _CALL.search(str(self))
        return found[1] if found else ""

    @property
    def tensor(self) -> str:
        """The name of its tensor, and of the leaf that ranks disagree about."""
        found = _CALL.search(str(self))
        leaf = _LEAF.search(str(self), found.end()) if found else None
        named = (found[2] if found else None, leaf[1] if leaf else None)
        return "/".join(name for name in named if name)


# Horovod's name for the same thing: `except HorovodInternalError` keeps working.
HorovodInternalError = RingjaxError


class PeerLost(RingjaxError):
    """A rank is gone: it died, failed, left, or cannot be reached any more.

    Attributes:
        rank: the world rank that was lost, -1 if it is not known.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerLost], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class Fenced(PeerLost):
    """This rank was declared lost, and must not go on: the others do without it."""


class Mismatch(RingjaxError):
    """Ranks disagree about an operation. Every rank gets this; the job stays usable."""


class Stalled(RingjaxError):
    """A living rank did not take part within the time allowed.

    Attributes:
        rank: the first such rank, -1 if it is not known.
        ranks: all of them that are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.rank = self.ranks[0] if self.ranks else -1

    def __reduce__(self) -> tuple[type[Stalled], tuple[str, list[int]]]:
        return type(self), (str(self), self.ranks)


class Cancelled(RingjaxError):
    """An operation was interrupted on this rank."""


class InvalidArgument(RingjaxError, ValueError):
    """An operation was refused on this rank before anything was sent."""


class NotInitialized(RingjaxError):
    """`ringjax.init()` has not been called, or `shutdown()` has."""


class StartupError(RingjaxError):
    """The job could not be brought together; the text says who is missing and why."""


class OutOfDescriptors(StartupError):
    """This process may not open as many files and sockets as the job needs of it."""


class Unreachable(StartupError):
    """Some ranks could not be connected with in time.

    Attributes:
        ranks: which.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple[type[Unreachable], tuple[str, list[int]]]:
        return type(self), (str(self), self.ranks)


class AuthenticationError(StartupError):
    """The other end does not know this job's secret, or broke the protocol."""


class LaunchError(RingjaxError):
    """A job started by `ringrun` or `ringjax.run.run` failed.

    Attributes:
        rank: the first rank that failed, -1 if none did.
        exit_code: what ringrun exits with.
    """

    def __init__(self, message: str, rank: int = -1, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[LaunchError], tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.exit_code)


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks join or leave: the training function starts again, nothing is restored.

    Not a failure, so no RingjaxError; elastic training catches it.

    Attributes:
        skip_sync: ranks only leave, so that those who stay have equal states already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type[HostsUpdatedInterrupt], tuple[bool]]:
        return type(self), (self.skip_sync,)


class HorovodVersionMismatchError(ImportError):
    """A framework is not the version that it was; Horovod's name.

    Nothing of ringjax is compiled against a framework, so ringjax does not raise it.

    Attributes:
        name: the framework.
        version: the one found now.
        installed_version: the one found before.
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
    """The exception for a status code; XLA's names of the codes work too."""
    if code == "UNAVAILABLE" and FENCED in message:
        return Fenced(message, rank)
    if code == "UNAVAILABLE":
        return PeerLost(message, rank)
    kinds: dict[str, type[RingjaxError]] = {
        "MISMATCH": Mismatch,
        "ABORTED": Mismatch,  # how a mismatch travels through XLA
        "CANCELLED": Cancelled,
        "INVALID_ARGUMENT": InvalidArgument,
    }
    if code == "DEADLINE_EXCEEDED":
        return Stalled(message, [rank] if rank >= 0 else ())
    return kinds.get(code, RingjaxError)(message)


def from_status(exc: StatusLike) -> RingjaxError:
    """Translates an exception of the native core; raise the result `from` it."""
    return from_code(exc.code, str(exc), exc.rank)


def from_program(text: str) -> RingjaxError | None:
    """What the text of a program's failure stands for; None if it is not ringjax's.

    Example:
        >>> from_program("UNAVAILABLE: RINGJAX[world, epoch 0]: rank 2 is gone").rank
        2
    """
    # jax adds a rule and advice about tracebacks below the message.
    found = re.match(r"(?s)\W*([A-Z_]+): .*?(RINGJAX\[.*?)(\n-{5,}|$)", text)
    if found is None:
        return None
    culprit = re.search(r"\brank (\d+)", found[2])
    rank = int(culprit[1]) if culprit else -1
    return from_code(found[1], found[2].strip(), rank)


def translate(error: BaseException) -> RingjaxError | None:
    """The exception of ringjax that another one stands for; None if it is not ours.

    A collective that fails inside of a compiled program raises what JAX makes of it, a
    JaxRuntimeError or, where the step is called from its cache, a ValueError; in a
    graph of TensorFlow it raises an OpError.

    Args:
        error: any exception. One of ringjax is returned as it is.

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
        return _of_tensorflow(str(error), int(error.error_code))
    if not kinds & {"JaxRuntimeError", "XlaRuntimeError", "ValueError"}:
        return None
    return from_program(str(error))


def _of_tensorflow(text: str, code: int) -> RingjaxError | None:
    # Behind the message TensorFlow says which node of the graph has failed.
    found = re.search(r"(?s)RINGJAX\[.*?(?=\n\s*\[\[|$)", text)
    if found is None:
        return None
    culprit = re.search(r"\brank (\d+)", found[0])
    known = _TENSORFLOW.get(code, "UNAVAILABLE" if culprit else "UNKNOWN")
    return from_code(known, found[0].strip(), int(culprit[1]) if culprit else -1)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Within it, what fails between the ranks is raised as an exception of ringjax.

    For compiled steps, whose exceptions have classes of JAX's or TensorFlow's; others
    pass through. Also a decorator. An exception comes when a result is used, so what
    uses it (`block_until_ready`, `float`) belongs inside.

    Raises:
        RingjaxError: `PeerLost`, `Mismatch`, `Stalled` and so on, from the original.

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
