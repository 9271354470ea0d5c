"""What an operation says of itself, and how a node of a graph carries that.

The tensors are not here: they come at run time, see pending.py and eager_calls.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ringjax import runtime
from ringjax.eager import lane
from ringjax.ops import Sum
from ringjax.world import timeouts
from ringjax.world.process_set import ProcessSet, global_process_set

_sets: dict[int, ProcessSet] = {}


@dataclass(frozen=True, slots=True)
class Call:
    """One operation, on whatever tensors.

    Attributes:
        op: a collective's name.
        name: what it is called on all ranks; empty: it gets a number.
        process_set_id: the number of the ranks that take part.
        reduce_op: a number of `ringjax.ops.ReduceOp`.
        prescale: multiplies each rank's tensor before the reduction.
        postscale: multiplies the result.
        root: the sender's rank in the world.
        timeout: seconds as `ringjax.collective_timeout` has them here, -1: not given.
        waits: the node that takes the results waits for them, and no queue does.
        bare: in a graph the name is as it is, without a scope.
    """

    op: str
    name: str = ""
    process_set_id: int = 0
    reduce_op: int = int(Sum)
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    timeout: float = timeouts.JOBS
    waits: bool = False
    bare: bool = False

    def text(self) -> str:
        """For an attribute of a node; `read` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Call:
        """The call whose `text` that is."""
        return Call(**json.loads(text))

    def members(self) -> ProcessSet:
        """The ranks that take part.

        Raises:
            ValueError: there is no such set any more.
        """
        number = self.process_set_id
        found = _sets.get(number, global_process_set)
        if found.process_set_id == number:
            return found
        if number == 0:  # an equal set of a world that has ended
            return global_process_set
        raise ValueError(
            f"{lane.title(self.op, self.name)}: there is no process set {number}"
        )

    def details(self, process_set: ProcessSet) -> lane.LaneOptions:
        """What the lane wants to know besides the tensors."""
        if self.op == "broadcast":
            return {"root": lane.root_in_set("broadcast", self.root, process_set)}
        if self.op in ("allreduce", "reducescatter"):
            return {
                "reduce_op": self.reduce_op,
                "prescale": self.prescale,
                "postscale": self.postscale,
            }
        return {}


def number_of(process_set: ProcessSet, op: str) -> int:
    """The number of a process set, by which calls find it again.

    Raises:
        TypeError, ValueError: it is none, or is not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"ringjax.{op}: process_set must be a ProcessSet, not {process_set!r}"
        )
    if process_set is global_process_set:
        _sets[0] = process_set  # not an equal one, which may have a time limit
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
