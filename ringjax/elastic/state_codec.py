"""Encodes a training state: its structure as bytes, its arrays as separate memory.

The structure has the layout of `control/objects.py`, with four more tags. ``{"leaf":
[index, kind, dtype, shape, detail]}`` is an array, whose bytes are not in the
structure. ``{"node": [type, [name, …], [node, …]]}`` is an object that JAX can flatten;
the receiver rebuilds the object with its own object in this place as template.
``{"own": text}`` is a function, which is not sent, because every rank has the function.
``{"pickle": blob}`` is written and read only if both ends allow pickles.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ringjax.control.objects import (
    Array,
    Node,
    ObjectDecoder,
    ObjectEncoder,
    Template,
    comparison_text,
    is_named_callable,
    type_name,
)
from ringjax.elastic import leaf, values
from ringjax.elastic.leaf import NUMPY_KINDS, Leaf
from ringjax.elastic.values import Attributes


class StateEncoder(ObjectEncoder):
    """Encodes a state. Waits for arrays that are still being computed.

    Attributes:
        structure: the encoded structure, without arrays.
        leaves: the type, dtype and shape of each array.
        memory: the bytes of each array. Do not change the bytes, because they are the
            memory of the state's arrays.
    """

    kinds = NUMPY_KINDS

    def __init__(self, state: Attributes, *, allow_pickle: bool) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle
        self._in_key = 0
        self.leaves: list[Leaf] = []
        self.memory: list[Array] = []
        nodes = [[n, self._node(v, f"state.{n}", 1)] for n, v in state.items()]
        self.structure = self._pack({"dict": nodes})

    def _key(self, value: object, where: str, depth: int) -> Node:
        # To decode the tags of this module, the receiver needs its own value at the
        # same place of the state. Keys of dicts and elements of sets have no place.
        self._in_key += 1
        node = super()._key(value, where, depth)
        self._in_key -= 1
        return node

    def _other(self, value: Any, where: str, depth: int) -> Node:
        if self._in_key:
            return super()._other(value, where, depth)
        try:
            found = leaf.read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if found is not None:
            spec, memory = found
            self.leaves.append(spec)
            self.memory.append(memory)
            return {"leaf": [len(self.leaves) - 1, *spec]}
        node = values.node(value)
        if node is not None:
            children = self._nodes(node.children, where, depth)
            return {"node": [type_name(value), node.names, children]}
        if is_named_callable(value) and not self._allow_pickle:
            return {"own": comparison_text(value)}
        return {"pickle": self._blob(_pickled(value, where, self._allow_pickle))}


def _pickled(value: object, where: str, allow_pickle: bool) -> bytes:
    if not allow_pickle:
        raise TypeError(
            f"{where} is a {type_name(value)}, expected arrays, numbers, strings, "
            "lists, tuples, dicts, what JAX has registered as a tree, and at the top "
            "objects with state_dict() and load_state_dict()"
        )
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    # Catch any error, because pickling runs code of the object.
    except Exception as error:
        raise TypeError(f"{where} cannot be pickled: {error}") from error


@dataclass(frozen=True, slots=True)
class _Place(Template):
    """This rank's value in one place of the state. `own` is None without a value."""

    own: Any
    where: str

    def child(self, kind: type[Any], key: Any) -> _Place:
        item = None
        if type(self.own) is kind:
            with contextlib.suppress(LookupError):
                item = self.own[key]
        return _Place(item, f"{self.where}[{key!r}]")


class StateDecoder(ObjectDecoder):
    """Decodes a state in two passes, because its arrays arrive after its structure.

    The constructor runs the first pass: it checks, before any array is sent, that the
    structure equals the structure of this rank's state `own`, and allocates memory for
    the arrays. It raises ValueError if the structures differ.

    `values` runs the second pass. It uses `own` as template for objects of JAX's
    registered types, and places arrays on the devices of the arrays in `own`.

    Attributes:
        memory: buffers for the bytes of the arrays, in the order of the encoder.
    """

    kinds = NUMPY_KINDS

    def __init__(
        self, structure: bytes, own: Attributes, *, allow_pickle: bool
    ) -> None:
        super().__init__(structure)
        self._own, self._allow_pickle = own, allow_pickle
        self._tags |= {
            "leaf": self._leaf,
            "node": self._rebuilt,
            "own": self._same,
            "pickle": self._unpickled,
        }
        self._leaves: list[Leaf] = []
        self.memory: list[Array] = []
        self._filled = False
        self._state()
        self._filled = True

    def values(self) -> Attributes:
        """Returns the state. Call `values` after all bytes have arrived in `memory`."""
        return self._state()

    def _state(self) -> Attributes:
        return {
            name: self._value(node, _Place(self._own.get(name), f"state.{name}"), 1)
            for name, node in self._root["dict"]
        }

    def _leaf(self, content: Node, at: _Place, _: int) -> Any:
        number, *spec = content
        if self._filled:
            return self._leaves[number].value(self.memory[number], at.own)
        self._leaves.append(Leaf(*spec))
        self.memory.append(self._leaves[-1].memory())
        return None

    def _rebuilt(self, content: Node, at: _Place, depth: int) -> Any:
        kind, names, nodes = content
        template = values.node(at.own)
        here = type_name(at.own) if at.own is not None else "None"
        if template is None or here != kind or template.names != names:
            raise ValueError(
                f"ringjax.elastic: {at.where} of rank 0 is a {kind} of {len(nodes)} "
                f"parts, and here it is a {here}; make the state in the same way on "
                "all ranks before the training function"
            )
        children = [
            self._value(node, _Place(child, at.where + name), depth)
            for node, child, name in zip(nodes, template.children, names, strict=True)
        ]
        return template.rebuild(children) if self._filled else None

    def _same(self, text: str, at: _Place, _: int) -> Any:
        if text != comparison_text(at.own):
            raise ValueError(
                f"ringjax.elastic: {at.where} of rank 0 is {text}, and here it is "
                f"{comparison_text(at.own)}; make the state in the same way on all "
                "ranks"
            )
        return at.own

    def _unpickled(self, blob: int, at: _Place, _: int) -> Any:
        if not self._allow_pickle:
            raise ValueError(f"ringjax.elastic: {at.where} came as a pickle")
        if not self._filled:
            return None
        import cloudpickle

        return cloudpickle.loads(self._blob(blob))
