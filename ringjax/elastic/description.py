"""A state as plain data: its structure with numbers in the place of arrays.

The structure is what `ringjax.control.objects` can encode. A node is one of ``["value",
x]``, ``["leaf", number]``, ``["list" | "tuple", [node, …]]``, ``["dict", [[key, node],
…]]``, ``["node", type, [name, …], [node, …]]`` for what JAX has registered (rebuilt
with what the receiver has in that place), ``["own", look]`` for functions, which
every rank has itself, and ``["pickle", bytes]`` where both ends allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringjax.control import objects
from ringjax.elastic import leaves, values
from ringjax.elastic.leaves import Array, Leaf

_VALUES = (type(None), bool, int, float, complex, str, bytes, set, frozenset)
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple}


class Described(NamedTuple):
    """A state, taken apart.

    Attributes:
        structure: without arrays.
        leaves: the arrays, as a receiver must know them.
        memory: their bytes, to be read only.
    """

    structure: Any
    leaves: list[Leaf]
    memory: list[Array]

    @classmethod
    def of(cls, state: dict[str, Any], *, allow_pickle: bool) -> Described:
        """Takes it apart; waits for what is still being computed.

        Raises:
            TypeError: it holds something that cannot be sent.
            ValueError: the memory of an array was donated.
        """
        described = cls([], [], [])
        for name, value in state.items():
            node = described._node(value, f"state.{name}", allow_pickle)
            described.structure.append([name, node])
        return described

    def _node(self, value: Any, where: str, allow_pickle: bool) -> list[Any]:
        kind = type(value)
        if kind in _VALUES:
            return ["value", value]
        if kind is dict:
            pairs = [
                [key, self._node(item, f"{where}[{key!r}]", allow_pickle)]
                for key, item in value.items()
            ]
            return ["dict", pairs]
        if kind is list or kind is tuple:
            return [kind.__name__, self._nodes(value, where, allow_pickle)]
        try:
            leaf = leaves.read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if leaf is not None:
            self.leaves.append(leaf[0])
            self.memory.append(leaf[1])
            return ["leaf", len(self.leaves) - 1]
        node = values.node(value)
        if node is not None:
            nodes = self._nodes(node.children, where, allow_pickle)
            return ["node", _type(value), node.names, nodes]
        if objects.is_named(value) and not allow_pickle:
            return ["own", objects.look(value)]
        return ["pickle", _pickled(value, where, allow_pickle)]

    def _nodes(self, items: Sequence[Any], where: str, allow_pickle: bool) -> Any:
        return [
            self._node(item, f"{where}[{i}]", allow_pickle)
            for i, item in enumerate(items)
        ]


class Restored(NamedTuple):
    """A state with room for arrays.

    Attributes:
        memory: where the bytes of all arrays have to go.
        values: puts the state together; called once the bytes are there.
    """

    memory: list[Array]
    values: Callable[[], dict[str, Any]]


def restored(
    structure: Any, specs: Sequence[Any], own: dict[str, Any], *, allow_pickle: bool
) -> Restored:
    """Prepares what a `Described` of another rank says.

    Args:
        structure: of it, as are the `specs` of its leaves.
        own: this rank's state.
        allow_pickle: read pickles.

    Raises:
        ValueError: this rank's state is made in another way.
    """
    known = [Leaf(*spec) for spec in specs]
    memory = [leaf.memory() for leaf in known]
    reader = _Reader(known, memory, allow_pickle)
    # Once to see whether it fits, before anything is sent.
    for name, node in structure:
        reader.check(node, own.get(name), f"state.{name}")

    def build() -> dict[str, Any]:
        return {name: reader.build(node, own.get(name)) for name, node in structure}

    return Restored(memory, build)


class _Reader:
    def __init__(
        self, known: list[Leaf], memory: list[Array], allow_pickle: bool
    ) -> None:
        self._leaves = known
        self._memory = memory
        self._allow_pickle = allow_pickle

    def check(self, node: Any, own: Any, where: str) -> None:
        """Raises ValueError if the node cannot be built beside this rank's value."""
        match node:
            case ["dict", pairs]:
                for key, inner in pairs:
                    self.check(inner, _item(own, dict, key), f"{where}[{key!r}]")
            case [("list" | "tuple") as kind, nodes]:
                for i, inner in enumerate(nodes):
                    beside = _item(own, _CONTAINERS[kind], i)
                    self.check(inner, beside, f"{where}[{i}]")
            case ["node", kind, names, nodes]:
                template = values.node(own)
                here = _type(own) if own is not None else "None"
                if template is None or here != kind or template.names != names:
                    raise ValueError(
                        f"ringjax.elastic: {where} of rank 0 is a {kind} of "
                        f"{len(nodes)} parts, and here it is a {here}; make the state "
                        "in the same way on all ranks before the training function"
                    )
                parts = zip(nodes, template.children, names, strict=True)
                for inner, child, name in parts:
                    self.check(inner, child, where + name)
            case ["own", look] if look != objects.look(own):
                raise ValueError(
                    f"ringjax.elastic: {where} of rank 0 is {look}, and here it is "
                    f"{objects.look(own)}; make the state in the same way on all ranks"
                )
            case ["pickle", _] if not self._allow_pickle:
                raise ValueError(f"ringjax.elastic: {where} came as a pickle")

    def build(self, node: Any, own: Any) -> Any:
        """The value of the node."""
        match node:
            case ["value", value]:
                return value
            case ["own", _]:
                return own
            case ["leaf", number]:
                return self._leaves[number].value(self._memory[number], own)
            case ["dict", pairs]:
                return {k: self.build(inner, _item(own, dict, k)) for k, inner in pairs}
            case [("list" | "tuple") as kind, nodes]:
                made = _CONTAINERS[kind]
                return made(
                    self.build(inner, _item(own, made, i))
                    for i, inner in enumerate(nodes)
                )
            case ["node", _, _, nodes]:
                template = values.node(own)
                children = zip(nodes, template.children, strict=True)
                return template.rebuild([self.build(n, c) for n, c in children])
            case ["pickle", data] if self._allow_pickle:
                import cloudpickle

                return cloudpickle.loads(data)
        raise ValueError(f"not a node of a state: {node!r:.200}")


def _item(own: Any, kind: Any, key: Any) -> Any:
    """What this rank has in that place, if anything."""
    if type(own) is not kind:
        return None
    if kind is dict:
        return own.get(key)
    return own[key] if key < len(own) else None


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _pickled(value: Any, where: str, allow_pickle: bool) -> bytes:
    if not allow_pickle:
        raise TypeError(
            f"{where} is a {_type(value)}, expected arrays, numbers, strings, lists, "
            "tuples, dicts, what JAX has registered as a tree, and at the top objects "
            "with state_dict() and load_state_dict()"
        )
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # a pickle runs the object's own code
        raise TypeError(f"{where} cannot be pickled: {error}") from error
