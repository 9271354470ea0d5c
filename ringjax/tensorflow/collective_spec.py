"""The specification of a collective, which a graph node stores as a string.

A specification has no tensors: pending_operations.py receives them when the graph runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from ringjax import runtime
from ringjax.eager import lane
from ringjax.ops import Sum
from ringjax.world import timeouts
from ringjax.world.process_set import ProcessSet, global_process_set

W = TypeVar("W")
_sets: dict[int, ProcessSet] = {}


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """The properties of one collective, without its tensors.

    Attributes:
        op: the name of the collective.
        name: the name of the operation on all ranks; if it is empty, the operation
            gets a number.
        reduce_op: the code of a `ringjax.ops.ReduceOp`.
        root: the sender's rank in the world.
        timeout: the time limit that `ringjax.collective_timeout` sets at this place of
            the program, in seconds; -1 without a limit.
        waits: True in a session, where RingjaxWait waits instead of a token queue.
        bare: whether a graph uses `name` without the name scope around it.
    """

    op: str
    name: str = ""
    process_set_id: int = 0
    reduce_op: int = int(Sum)
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    timeout: float = timeouts.JOB_LIMIT
    waits: bool = False
    bare: bool = False

    def to_json(self) -> str:
        """Returns the specification as a string, for an attribute of a node."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CollectiveSpec:
        """Undoes `to_json`."""
        return CollectiveSpec(**json.loads(text))

    def process_set(self) -> ProcessSet:
        """Returns the process set; raises a ValueError if it has been removed."""
        number = self.process_set_id
        found = _sets.get(number, global_process_set)
        if found.process_set_id == number:
            return found
        if number == 0:  # `found` belongs to a world that has ended
            return global_process_set
        raise ValueError(
            f"{lane.title(self.op, self.name)}: there is no process set {number}"
        )

    def lane_arguments(self, process_set: ProcessSet) -> lane.LaneOptions:
        """Returns the keyword arguments of `lane.submit` for this collective."""
        if self.op == "broadcast":
            return {"root": lane.root_in_set("broadcast", self.root, process_set)}
        if self.op in ("allreduce", "reducescatter"):
            return {
                "reduce_op": self.reduce_op,
                "prescale": self.prescale,
                "postscale": self.postscale,
            }
        return {}


def process_set_id_of(process_set: ProcessSet, op: str) -> int:
    """Returns the id by which `CollectiveSpec.process_set` finds the process set."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"ringjax.{op}: process_set must be a ProcessSet, not {process_set!r}"
        )
    if process_set is global_process_set:
        # Replace an equal process set, because it may have another time limit.
        _sets[0] = process_set
        return 0
    number = process_set.process_set_id
    if number is None:
        raise ValueError(
            f"ringjax.{op}: process_set {process_set} is not registered; call "
            "ringjax.add_process_set first"
        )
    if number not in runtime.current(op).sets:
        raise ValueError(f"ringjax.{op}: there is no process set {number}")
    _sets[number] = process_set
    return number


def finish_with_work(work: W) -> W:
    """Makes the native work itself the result of a handle of the eager lane."""
    return work
