"""What all ranks of an elastic job know alike: who takes part, since which epoch.

A rank may be lost at any moment, and ranks do not learn of it at the same time. So what
must not differ between ranks (who has which samples, when training starts again) hangs
on results of collectives, which are the same everywhere. Not the membership itself,
which is the runtime's.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from ringjax import eager, errors, failpoints, runtime
from ringjax.elastic.transfer import Audience


class Having(enum.IntEnum):
    """What a rank has of the training state."""

    CURRENT = 0  # what everybody else has who says this
    COMMITTED = 1  # its own; all take that of one rank
    NOTHING = 2  # it has just come


class Agreement(NamedTuple):
    """A result of `agree`.

    Attributes:
        epoch: of the membership.
        workers: the numbers of all workers, in the order of the ranks.
        audience: who sends the state to whom.
        lost: nobody has the state any more: all who had it are gone.
    """

    epoch: int
    workers: tuple[int, ...]
    audience: Audience
    lost: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """This worker's place among them, and how many there are."""
        return self.workers.index(own_number()), len(self.workers)


_latest: Agreement | None = None


def own_number() -> int:
    """This process's worker number."""
    number = runtime.config().worker
    if number is None:
        raise errors.NotInitialized("this process has no RINGJAX_WORKER")
    return number


def latest() -> Agreement | None:
    """The last one of this process; None outside of elastic training."""
    return _latest


def forget() -> None:
    """Training is over."""
    global _latest
    _latest = None


def agree(having: Having) -> Agreement:
    """All ranks say what they have; all of them get the same answer.

    Raises:
        RingjaxError: it could not be finished.
    """
    global _latest
    _, epoch = runtime.check_updates()
    failpoints.passing("agreement.halfway")
    mine = np.array([[own_number(), having]], np.int32)
    rows = np.asarray(eager.allgather(mine, name="elastic.agreement"))
    workers = tuple(int(number) for number in rows[:, 0])
    everyone = [int(one) for one in rows[:, 1]]
    lost = min(everyone) == Having.NOTHING
    _latest = Agreement(epoch, workers, audience_of(everyone), lost)
    return _latest


def audience_of(having: list[int]) -> Audience:
    """Who sends the state to whom, if rank r has ``having[r]``.

    Example:
        >>> audience_of([Having.CURRENT, Having.CURRENT, Having.NOTHING])
        Audience(source=0, receivers=(2,))
        >>> audience_of([Having.COMMITTED, Having.COMMITTED, Having.NOTHING])
        Audience(source=0, receivers=(1, 2))
    """
    source = having.index(min(having))
    current = having[source] == Having.CURRENT
    needs = [not current or one != Having.CURRENT for one in having]
    return Audience(source, tuple(r for r, n in enumerate(needs) if n and r != source))


def absent_from_last_call() -> frozenset[int]:
    """Shares (places among the workers) that are not in the last result of all ranks.

    Their ranks were lost before it was finished; the others have repeated it.
    """
    if _latest is None or not runtime.elastic():
        return frozenset()
    present = set(runtime.last_contributors())
    if not present:  # there was no call yet
        return frozenset()
    return frozenset(i for i, w in enumerate(_latest.workers) if w not in present)
