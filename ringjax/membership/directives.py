"""What the coordinator of an elastic job tells a worker, as values.

Made from the JSON messages that arrive; who reads them is in client.py, who decides
them in membership.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.control.member import Member


@dataclass(frozen=True, slots=True)
class EpochDirective:
    """An epoch: who belongs to it, and what becomes of the calls of the one before.

    It voids every earlier `ResizePending`; a change that still waits is announced
    again. A worker applies the decisions of every `EpochDirective` that it gets, even
    if it never installed the epoch.

    Attributes:
        epoch: its number; they only grow, but not always by one.
        kind: "start", "repair", "restart" or "resize".
        members: by rank; `Member.worker` is the number that is never used again.
        rank: this worker's.
        previous: by new rank: its rank in the epoch before, -1 for a newcomer.
        verdicts: by number of the communicator: (finished, repeats). One that is not in
            it has finished nothing, and repeats unless kind is "restart".
        sets: process sets that any survivor knows, without the world: number -> ranks
            in this epoch. The ranks of a set may all be lost: then it is empty.
        next_set: the least number that no process set ever had.
        lost: ranks of the epoch before that are no longer there -> why.
        group: so many workers are lost and join together, those with one w // group.
    """

    epoch: int
    kind: str
    members: tuple[Member, ...]
    rank: int
    previous: tuple[int, ...]
    verdicts: Mapping[int, tuple[int, bool]]
    sets: Mapping[int, tuple[int, ...]]
    next_set: int
    lost: Mapping[int, str]
    group: int = 1

    @property
    def mates(self) -> tuple[Member, ...]:
        """This worker's group, by place."""
        mine = self.members[self.rank].worker // self.group
        return tuple(m for m in self.members if m.worker // self.group == mine)

    @property
    def ranks(self) -> tuple[int, ...]:
        """By old rank: the new one, -1 if it is lost; for `ResilientComm.install`."""
        size = 1 + max([*self.previous, *self.lost], default=-1)
        found = [-1] * size
        for new, old in enumerate(self.previous):
            if old >= 0:
                found[old] = new
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Welcome:
    """To a newcomer: it is known, but no member before it says `ready`.

    Attributes:
        epoch: the present one of the members.
        rank: provisional; so is the size.
        mates: its group, by place, all of which are newcomers; none without groups.
    """

    epoch: int
    rank: int
    size: int
    why: str
    mates: tuple[Member, ...] = ()

    @property
    def group(self) -> int:
        """So many workers are lost and join together."""
        return max(1, len(self.mates))


@dataclass(frozen=True, slots=True)
class Revoke:
    """An epoch is over: stop its calls and `report`.

    It comes again, with more in `lost`, when further ranks are lost before the next
    `EpochDirective`; one report is enough (another one replaces it).

    Attributes:
        lost: ranks -> why; empty if all are alive and start again.
        restart: all ranks go back to their last commit.
    """

    epoch: int
    lost: Mapping[int, str]
    restart: bool


@dataclass(frozen=True, slots=True)
class ResizePending:
    """A change waits: the members agree at a commit on `number` and say `pause`."""

    number: int
    joining: int
    leaving: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """This worker belongs to the job no more, in good order: it asked for it, or the
    job has finished without needing it.
    """  # noqa: D205

    text: str


@dataclass(frozen=True, slots=True)
class Fence:
    """This worker was declared lost, and must not go on."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The whole job ends without success, and why: too few ranks, no coordinator."""

    text: str


@dataclass(frozen=True, slots=True)
class UserNotice:
    """Something a user may want to read while nothing happens."""

    text: str


Directive = (
    EpochDirective
    | Welcome
    | Revoke
    | ResizePending
    | Dismiss
    | Fence
    | Stop
    | UserNotice
)


def read(message: Mapping[str, Any], worker: int) -> Directive | None:
    """Takes an order from a message to `worker`.

    Returns:
        None if the message is something else.

    Example:
        >>> read({"type": "update", "number": 3, "joining": 1, "leaving": 0}, 5)
        ResizePending(number=3, joining=1, leaving=0)
    """
    text = str(message.get("text", ""))
    match message.get("type"):
        case "members":
            return _members(message, worker)
        case "welcome":
            epoch, rank, size = (
                int(message[name]) for name in ("epoch", "rank", "size")
            )
            place = worker % max(1, len(message.get("mates", ())))
            mates = tuple(
                Member(rank - place + i, str(m["seen"]), dict(m["hello"]))
                for i, m in enumerate(message.get("mates", ()))
            )
            return Welcome(epoch, rank, size, str(message["why"]), mates)
        case "revoke":
            lost = _by_rank(message["lost"])
            return Revoke(int(message["epoch"]), lost, bool(message["restart"]))
        case "update":
            number, joining = int(message["number"]), int(message["joining"])
            return ResizePending(number, joining, int(message["leaving"]))
        case "dismissed":
            return Dismiss(text)
        case "fenced":
            return Fence(text)
        case "stopped":
            return Stop(text)
        case "notice":
            return UserNotice(text)
    return None


def _members(message: Mapping[str, Any], worker: int) -> EpochDirective:
    members = tuple(
        Member(int(m["rank"]), str(m["seen"]), dict(m["hello"]), int(m["worker"]))
        for m in message["members"]
    )
    return EpochDirective(
        epoch=int(message["epoch"]),
        kind=str(message["kind"]),
        members=members,
        rank=[member.worker for member in members].index(worker),
        previous=tuple(map(int, message["previous"])),
        verdicts={
            int(number): (int(finished), bool(repeats))
            for number, (finished, repeats) in message["verdicts"].items()
        },
        sets={
            int(number): tuple(map(int, ranks))
            for number, ranks in message["sets"].items()
        },
        next_set=int(message["next_set"]),
        lost=_by_rank(message["lost"]),
        group=int(message.get("group", 1)),
    )


def _by_rank(texts: Mapping[str, Any]) -> dict[int, str]:
    return {int(rank): str(text) for rank, text in texts.items()}


def standing_of(
    kind: str, epoch: int, sets: Mapping[int, Sequence[int]] | None, next_set: int
) -> dict[str, Any]:
    """The message of a rank that has come to a stand: its process sets are in it."""
    known = {str(number): list(ranks) for number, ranks in (sets or {}).items()}
    return {"type": kind, "epoch": epoch, "sets": known, "next_set": next_set}
