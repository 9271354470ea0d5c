"""Names of the operations on gradients in a graph, which all ranks find alone.

They are numbered in the order in which a graph is traced. TensorFlow traces a function
that makes variables twice, and that is not so on all ranks: one of them may have
trained before, or have read its model from a file. So what is traced in place of
something else gets its numbers again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class _TracePosition:
    """Where a function is traced within another one."""

    outer: weakref.ref[Any]
    name: str
    calls: int  # in `outer` before it
    before: Counter[str]  # the numbers given until then

    def is_at(self, outer: Any, name: str, calls: int) -> bool:
        here = self.outer() is outer
        return here and (self.name, self.calls) == (name, calls)


@dataclass
class _GraphNames:
    """What has been numbered in an outermost graph.

    Attributes:
        counter: the last numbers, by the beginnings of names.
        last: where the last one was given, from the outside to the inside.
        places: of the functions traced in it.
    """

    counter: Counter[str] = field(default_factory=Counter)
    last: list[_TracePosition] = field(default_factory=list)
    places: weakref.WeakKeyDictionary[Any, _TracePosition] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def enter(self, inner: list[Any]) -> None:
        """Begins to number in the innermost of these functions, from the outside."""
        path = []
        for graph in inner:
            if graph not in self.places:
                self.places[graph] = self._place(graph)
            path.append(self.places[graph])
        self.last = path

    def _place(self, graph: Any) -> _TracePosition:
        outer, name = graph.outer_graph, str(graph.name)
        calls = _calls(outer)
        for place in self.last:
            if place.is_at(outer, name, calls):
                # Nobody has called that one, and nobody will.
                self.counter = Counter(place.before)
                return place
        return _TracePosition(weakref.ref(outer), name, calls, Counter(self.counter))


_given: weakref.WeakKeyDictionary[Any, _GraphNames] = weakref.WeakKeyDictionary()


def gradient_namer(prefix: str) -> Callable[[], str]:
    """Gives names that no other operation in this graph has; none ends in eager mode.

    Eager operations have ended before the next begins, and an outermost graph runs
    once at a time.

    Example:
        >>> name = gradient_namer("step")
        >>> name(), name()
        ('step.gradients.1', 'step.gradients.2')
    """
    given = _GraphNames()
    if not tf.executing_eagerly():
        top, inner = _nested(tf.compat.v1.get_default_graph())
        given = _given.setdefault(top, given)
        given.enter(inner)

    def name() -> str:
        given.counter[prefix] += 1
        return f"{prefix}.gradients.{given.counter[prefix]}"

    return name


def _nested(graph: Any) -> tuple[Any, list[Any]]:
    """The function that all is traced in or the graph around all, and those inside.

    The last of them is `graph`; none if that is the outermost.
    """
    inner: list[Any] = []
    outer: Any = getattr(graph, "outer_graph", None)
    while hasattr(outer, "outer_graph"):
        inner.append(graph)
        graph, outer = outer, outer.outer_graph
    if outer is not None and not tf.compat.v1.executing_eagerly_outside_functions():
        inner.append(graph)
        graph = outer
    return graph, inner[::-1]


def _calls(graph: Any) -> int:
    """How many functions a graph calls."""
    return sum(op.type.endswith("PartitionedCall") for op in graph.get_operations())
