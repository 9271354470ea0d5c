"""The commands that a worker receives from the coordinator, as dataclasses.

client.py parses the JSON messages from the coordinator into directives. membership.py
and epochs.py decide which messages the coordinator sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.control.member import JsonObject, Member
from ringjax.control.number_lists import compress, expand
from ringjax.control.worker_address import WorkerAddress
from ringjax.membership import member_table


@dataclass(frozen=True, slots=True)
class EpochDirective:
    """A new epoch: its members, and the commit decisions about the epoch before.

    The directive voids every earlier `ResizePending`; the coordinator announces pending
    changes again. A worker applies the decisions of every `EpochDirective` that it
    receives, even if the worker never used the communicators of that epoch.

    Attributes:
        epoch: the index of the epoch. Indices increase, not always by one.
        kind: "start", "repair", "restart" or "resize".
        members: the members by rank.
        rank: the rank of this worker.
        previous: the rank of each member in the epoch before, -1 for a newcomer.
        decisions: maps the id of a communicator to a pair: the count of complete calls,
            and whether the call in flight is repeated. A communicator without an entry
            has no complete call, and repeats its call unless kind is "restart".
        sets: the ranks of each process set in this epoch, by id; without the world. If
            all ranks of a set are lost, its entry is empty.
        next_set: the least id that no process set ever had.
        lost: lost and departed ranks of the epoch before, with the reasons.
        group: the number of workers in a group, see `MembershipConfig`.
        group_addresses: the addresses of the workers of this worker's group, in order;
            empty without groups.
    """

    epoch: int
    kind: str
    members: tuple[Member, ...]
    rank: int
    previous: tuple[int, ...]
    decisions: Mapping[int, tuple[int, bool]]
    sets: Mapping[int, tuple[int, ...]]
    next_set: int
    lost: Mapping[int, str]
    group: int = 1
    group_addresses: tuple[WorkerAddress, ...] = ()

    @property
    def new_ranks(self) -> tuple[int, ...]:
        """The new rank of each old rank, -1 if lost; see `ResilientComm.install`."""
        size = 1 + max([*self.previous, *self.lost], default=-1)
        found = [-1] * size
        for new, old in enumerate(self.previous):
            if old >= 0:
                found[old] = new
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Welcome:
    """This worker is a newcomer, and becomes a member only after it sends `ready`.

    Attributes:
        epoch: the current epoch of the members.
        rank, size: the provisional rank, and the provisional number of members, which
            includes this worker's group.
        why: the reason why this worker has to wait, for the log.
        group_addresses: the addresses of the newcomers of this worker's group, in
            order; empty without groups.
    """

    epoch: int
    rank: int
    size: int
    why: str
    group_addresses: tuple[WorkerAddress, ...] = ()

    @property
    def group(self) -> int:
        """The number of workers in a group, see `MembershipConfig`."""
        return max(1, len(self.group_addresses))


@dataclass(frozen=True, slots=True)
class Revoke:
    """An epoch is over: the worker must stop its calls and `report`.

    If further ranks are lost before the next `EpochDirective`, the coordinator sends
    another `Revoke` with more entries in `lost`. A worker reports once; a second report
    would replace the first.

    Attributes:
        lost: lost ranks and the reasons; empty if all ranks are alive and start again.
        restart: whether all ranks return to their last commit.
    """

    epoch: int
    lost: Mapping[int, str]
    restart: bool


@dataclass(frozen=True, slots=True)
class ResizePending:
    """Some workers want to join, or some members want to leave.

    The members agree at a commit which change, identified by `number`, they apply, and
    then call `CoordinatorClient.pause`.
    """

    number: int
    joining: int
    leaving: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """This worker must leave the job without an error, because it is not needed."""

    text: str


@dataclass(frozen=True, slots=True)
class Fence:
    """This worker has been declared lost, and must not continue."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The whole job ends without success: ranks or the coordinator are missing."""

    text: str


@dataclass(frozen=True, slots=True)
class UserNotice:
    """A line for the user that explains why the job waits."""

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


def parse(message: Mapping[str, Any], worker: int) -> Directive | None:
    """Parses a message from the coordinator. Returns None if it is not a directive.

    Example:
        >>> parse({"type": "update", "number": 3, "joining": 1, "leaving": 0}, 5)
        ResizePending(number=3, joining=1, leaving=0)
    """
    text = str(message.get("text", ""))
    match message.get("type"):
        case "members":
            return _parse_epoch(message, worker)
        case "welcome":
            return _parse_welcome(message)
        case "revoke":
            lost = _texts_by_rank(message["lost"])
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


def _parse_welcome(message: Mapping[str, Any]) -> Welcome:
    epoch, rank, size = (int(message[name]) for name in ("epoch", "rank", "size"))
    return Welcome(epoch, rank, size, str(message["why"]), _group_addresses(message))


def _group_addresses(message: Mapping[str, Any]) -> tuple[WorkerAddress, ...]:
    return tuple(map(WorkerAddress.from_json, message.get("mates", ())))


def _parse_epoch(message: Mapping[str, Any], worker: int) -> EpochDirective:
    members = member_table.decode(message["members"])
    return EpochDirective(
        epoch=int(message["epoch"]),
        kind=str(message["kind"]),
        members=members,
        rank=[member.worker for member in members].index(worker),
        previous=expand(message["previous"]),
        decisions={
            int(number): (int(complete), bool(repeats))
            for number, (complete, repeats) in message["verdicts"].items()
        },
        sets={int(number): expand(ranks) for number, ranks in message["sets"].items()},
        next_set=int(message["next_set"]),
        lost=_texts_by_rank(message["lost"]),
        group=int(message.get("group", 1)),
        group_addresses=_group_addresses(message),
    )


def _texts_by_rank(texts: Mapping[str, Any]) -> dict[int, str]:
    return {int(rank): str(text) for rank, text in texts.items()}


def progress_message(
    kind: str, epoch: int, sets: Mapping[int, Sequence[int]] | None, next_set: int
) -> JsonObject:
    """Makes a message that contains the process sets of a worker."""
    known = {str(number): compress(ranks) for number, ranks in (sets or {}).items()}
    return {"type": kind, "epoch": epoch, "sets": known, "next_set": next_set}
