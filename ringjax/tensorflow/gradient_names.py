"""Names of the operations on gradients in a graph; all ranks derive equal names.

Names have numbers, in the order in which a graph is traced. TensorFlow traces a
function that creates variables twice. This happens on some ranks only, because another
rank may have created its variables before. A second trace of a function in the same
position therefore uses the numbers of the first trace again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf


@dataclass(frozen=True)
class _TracePosition:
    """The position at which a function is traced within another function."""

    outer: weakref.ref[tf.Graph]
    name: str
    calls: int  # the number of functions that `outer` has called before
    before: Counter[str]  # the last numbers in names before the trace

    def is_at(self, outer: tf.Graph, name: str, calls: int) -> bool:
        same_outer = self.outer() is outer
        return same_outer and (self.name, self.calls) == (name, calls)


@dataclass
class _GraphNames:
    """The names in an outermost graph, and in all functions traced in that graph.

    Attributes:
        counter: the last number for each prefix of names.
        last: the positions of the last name, from the outermost function to the
            innermost one.
        positions: the position of each function graph.
    """

    counter: Counter[str] = field(default_factory=Counter)
    last: list[_TracePosition] = field(default_factory=list)
    positions: weakref.WeakKeyDictionary[tf.Graph, _TracePosition] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def enter(self, inner: Sequence[tf.Graph]) -> None:
        """Prepares for names in the innermost of the nested functions `inner`."""
        path = []
        for graph in inner:
            if graph not in self.positions:
                self.positions[graph] = self._position_of(graph)
            path.append(self.positions[graph])
        self.last = path

    def _position_of(self, graph: tf.Graph) -> _TracePosition:
        outer, name = graph.outer_graph, str(graph.name)
        calls = _count_calls(outer)
        for position in self.last:
            if position.is_at(outer, name, calls):
                # This is a second trace. TensorFlow has discarded the first trace, so
                # the numbers in its names are free again.
                self.counter = Counter(position.before)
                return position
        return _TracePosition(weakref.ref(outer), name, calls, Counter(self.counter))


_names: weakref.WeakKeyDictionary[tf.Graph, _GraphNames] = weakref.WeakKeyDictionary()


def gradient_namer(prefix: str) -> Callable[[], str]:
    """Returns a function that makes names that are unique in the current graph.

    In eager mode each new function begins with the number 1. Names may repeat there,
    because an eager operation ends before the next operation begins.

    Example:
        >>> name = gradient_namer("step")
        >>> name(), name()
        ('step.gradients.1', 'step.gradients.2')
    """
    names = _GraphNames()
    if not tf.executing_eagerly():
        outermost, inner = _nesting(tf.compat.v1.get_default_graph())
        names = _names.setdefault(outermost, names)
        names.enter(inner)

    def name() -> str:
        names.counter[prefix] += 1
        return f"{prefix}.gradients.{names.counter[prefix]}"

    return name


def _nesting(graph: tf.Graph) -> tuple[tf.Graph, list[tf.Graph]]:
    """Returns the outermost graph around `graph`, and the functions inside of it.

    The last of these functions is `graph` itself, unless `graph` is the outermost one.
    """
    inner: list[tf.Graph] = []
    outer: tf.Graph = getattr(graph, "outer_graph", None)
    while hasattr(outer, "outer_graph"):
        inner.append(graph)
        graph, outer = outer, outer.outer_graph
    if outer is not None and not tf.compat.v1.executing_eagerly_outside_functions():
        inner.append(graph)
        graph = outer
    return graph, inner[::-1]


def _count_calls(graph: tf.Graph) -> int:
    return sum(op.type.endswith("PartitionedCall") for op in graph.get_operations())
