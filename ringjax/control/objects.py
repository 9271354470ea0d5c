"""Encodes Python objects without pickle: JSON for the structure, raw bytes for arrays.

`encode` and `decode` handle builtin types and arrays of numpy. `elastic/state_codec.py`
extends both classes by arrays of JAX and PyTorch, whose memory is sent without a copy.
Decoding does not trust its input: any bytes of another rank result in an object of the
types below, or in a ValueError. `object_messages.py` sends objects between ranks.

Layout: ``RJO1`` | u32 length of the JSON text | JSON text | blobs, one after another.
The text is ``{"value": node, "blobs": [size, …]}``. A node is null, true, false,
a number, a string, a list of nodes, or one of ``{"tuple": [node, …]}``,
``{"set": [node, …]}``, ``{"frozenset": [node, …]}``, ``{"dict": [[key, value], …]}``,
``{"float": "nan"}``, ``{"int": hex}``, ``{"complex": [re, im]}``, ``{"bytes": blob}``,
``{"array": [blob, dtype, shape]}``, ``{"scalar": [blob, dtype, []]}``.
Another layout is ``RJOP`` | a pickle, which is read only if the caller allows pickles.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import numpy as np

_PLAIN, _PICKLE = b"RJO1", b"RJOP"
_MAX_DEPTH = 100
_LENGTH = struct.Struct("<I")
# The dtypes that a peer may name. numpy itself accepts "(9999,9999)f8" and "O", too,
# which a peer could misuse.
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d+(\[\w+\])?")
# A dtype of ml_dtypes is sent by name, because its `dtype.str` is ambiguous.
_ML_DTYPE = re.compile(r"bfloat16|u?int[124]|float\d_e\w+")
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, "
    "and numpy or jax arrays and scalars"
)
Array = np.ndarray[Any, Any]
_T = TypeVar("_T")
Node = Any  # a node of the layout above, as `json` represents it


def encode(value: object, *, allow_pickle: bool = False) -> bytes:
    """Encodes `value` as bytes.

    Raises:
        TypeError: `value` contains an object of another type than the layout allows,
            and `allow_pickle` is False. The text says where the object is.
    """
    try:
        return ObjectEncoder().encode(value)
    except TypeError:
        if not allow_pickle:
            raise
    import cloudpickle

    return _PICKLE + bytes(cloudpickle.dumps(value))


def decode(data: bytes, *, allow_pickle: bool = False) -> Any:
    """Decodes the bytes that `encode` has made. jax arrays arrive as numpy arrays.

    Raises:
        ValueError: `data` are damaged or forged, or are a pickle that is not allowed.
    """
    if data[:4] == _PICKLE and allow_pickle:
        import cloudpickle

        return cloudpickle.loads(data[4:])
    if data[:4] == _PICKLE:
        raise ValueError(
            "the sender has pickled the object; pass allow_pickle=True here too"
        )
    try:
        return ObjectDecoder(data).decode()
    except (KeyError, IndexError, TypeError, RecursionError, OverflowError) as e:
        raise ValueError(f"not an encoded object: {type(e).__name__}: {e}") from None


def is_named_callable(value: object) -> bool:
    """Returns whether `value` is a function or a class, which need not be sent."""
    return callable(value) and hasattr(value, "__name__")


def comparison_text(value: object) -> str:
    """Describes a function or a class as text, for a comparison between ranks.

    Example:
        >>> comparison_text(len), comparison_text("same")
        ('the builtin_function_or_method <built-in function len>', "the str 'same'")
    """
    # Addresses differ between processes that hold the same function.
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    if len(text) > 100:  # errors show the text, so keep only its beginning
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        text = f"{text[:80]}... (SHA-256 {digest[:16]})"
    return f"the {type(value).__name__} {text}"


def dtype_name(dtype: np.dtype[Any], kinds: str) -> str:
    """Returns the name of a dtype in the layout, or "" if the dtype cannot be sent.

    Args:
        kinds: the characters (`numpy.dtype.kind`) of numpy's own dtypes to accept.
    """
    # numpy sets `isbuiltin` to 2 for dtypes of other packages, such as ml_dtypes.
    if _ML_DTYPE.fullmatch(dtype.name) and dtype.isbuiltin == 2:
        return dtype.name
    return dtype.str if dtype.kind in kinds else ""


def dtype_of(name: str, kinds: str) -> np.dtype[Any]:
    """Returns the dtype whose `dtype_name` is `name`.

    Raises ValueError or TypeError if no dtype of these kinds has this name.
    """
    found: np.dtype[Any] | None = None
    if _ML_DTYPE.fullmatch(name):
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, name, "V"))
    elif _NUMPY_DTYPE.fullmatch(name):
        found = np.dtype(name)
    if found is None or not dtype_name(found, kinds):
        raise ValueError(f"not an encoded object: an array of dtype {name!r}")
    return found


class ObjectEncoder:
    """Encodes one object. A subclass encodes further types in `_other`.

    Attributes:
        kinds: the characters of numpy's dtypes that can be encoded.
    """

    kinds = "biufc"

    def __init__(self) -> None:
        self._blobs: list[bytes] = []

    def encode(self, value: object) -> bytes:
        return self._pack(self._node(value, "the object", 0))

    def _pack(self, node: Node) -> bytes:
        head = {"value": node, "blobs": [len(blob) for blob in self._blobs]}
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        return b"".join([_PLAIN, _LENGTH.pack(len(text)), text, *self._blobs])

    def _node(self, value: Any, where: str, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise TypeError(f"{where} is nested more than {_MAX_DEPTH} deep")
        # Compare exact types: a named tuple, for example, must not become a tuple.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            # Use hexadecimal: Python refuses to parse decimals of over 4300 digits.
            return value if abs(value) < 1 << 256 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is complex:
            parts = (value.real, value.imag)
            return {"complex": [self._node(p, where, depth) for p in parts]}
        if kind is str:
            return _unicode(value, where)
        if kind is bytes:
            return {"bytes": self._blob(value)}
        return self._container(value, where, depth + 1)

    def _container(self, value: Any, where: str, depth: int) -> Node:
        kind = type(value)
        if kind is list or kind is tuple:
            nodes = self._nodes(value, where, depth)
            return nodes if kind is list else {"tuple": nodes}
        if kind is set or kind is frozenset:
            return {kind.__name__: [self._key(v, where, depth) for v in value]}
        if kind is dict:
            pairs = [
                [
                    self._key(k, f"the key {k!r} of {where}", depth),
                    self._node(v, f"{where}[{k!r}]", depth),
                ]
                for k, v in value.items()
            ]
            return {"dict": pairs}
        if isinstance(value, np.generic) and dtype_name(value.dtype, self.kinds):
            return {"scalar": self._array(value, where)}
        return self._other(value, where, depth)

    def _nodes(self, values: Iterable[object], where: str, depth: int) -> list[Node]:
        return [self._node(v, f"{where}[{i}]", depth) for i, v in enumerate(values)]

    _key = _node  # encodes the key of a dict or an element of a set

    def _other(self, value: Any, where: str, depth: int) -> Node:
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            return {"array": self._array(value, where)}
        raise TypeError(
            f"{where} is a {type_name(value)}, expected {_ALLOWED}; "
            "allow_pickle=True sends anything"
        )

    def _array(self, value: object, where: str) -> Node:
        try:
            array = np.asarray(value)
        # numpy can read neither a tracer nor a typed key of jax.random.
        except TypeError as e:
            raise TypeError(f"{where} cannot be read as a numpy array: {e}") from None
        dtype = array.dtype
        if dtype.isbuiltin == 1 or dtype.byteorder == ">":
            dtype = dtype.newbyteorder("<")  # the byte order of the layout
        if not (name := dtype_name(dtype, self.kinds)):
            raise TypeError(
                f"{where} is an array of dtype {array.dtype}, which has no plain bytes"
            )
        blob = self._blob(np.ascontiguousarray(array, dtype).tobytes())
        return [blob, name, list(array.shape)]

    def _blob(self, blob: bytes) -> int:
        self._blobs.append(blob)
        return len(self._blobs) - 1


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unicode(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{where} is a str that is not valid Unicode") from None
    return value


class Template:
    """An existing object of this process that the decoded object will replace.

    `ObjectDecoder` ignores templates. A subclass may decode into the template's memory.
    """

    def child(self, kind: type[Any], key: Any) -> Self:
        """Returns the template of an item in a container of this kind."""
        return self


_NO_TEMPLATE = Template()


class ObjectDecoder:
    """Decodes one object. A subclass adds the tags of further types to `_tags`."""

    kinds = ObjectEncoder.kinds

    def __init__(self, data: bytes) -> None:
        self._blobs: list[memoryview] = []
        self._root = self._parse(memoryview(data))
        # For each tag, the decoder: a function of (content, template, depth).
        self._tags: dict[str, Callable[[Node, Any, int], Any]] = {
            "tuple": lambda v, t, d: tuple(self._items(v, t, d, tuple)),
            "set": lambda v, _, d: set(self._items(v, _NO_TEMPLATE, d)),
            "frozenset": lambda v, _, d: frozenset(self._items(v, _NO_TEMPLATE, d)),
            "dict": self._dict,
            "float": lambda v, _, __: float(typed(v, str)),
            "int": lambda v, _, __: int(typed(v, str), 16),
            "complex": self._complex,
            "bytes": lambda v, _, __: bytes(self._blob(v)),
            "array": lambda v, _, __: self._array(v).copy(),
            "scalar": lambda v, _, __: self._array(v)[()],
        }

    def decode(self, template: Template = _NO_TEMPLATE) -> Any:
        return self._value(self._root, template, 0)

    def _parse(self, data: memoryview) -> Node:
        start = 4 + _LENGTH.size
        if len(data) < start or bytes(data[:4]) != _PLAIN:
            raise ValueError("not an encoded object: it does not begin with RJO1")
        (length,) = _LENGTH.unpack(data[4:start])
        if length > len(data) - start:
            raise ValueError("not an encoded object: its text is cut off")
        end = start + length
        head = typed(json.loads(str(data[start:end], "utf-8")), dict)
        for size in typed(head["blobs"], list):
            if not 0 <= typed(size, int) <= len(data) - end:
                raise ValueError("not an encoded object: a blob is cut off")
            self._blobs.append(data[end : end + size])
            end += size
        if end != len(data):
            raise ValueError(f"not an encoded object: {len(data) - end} bytes too many")
        return head["value"]

    def _value(self, node: Node, template: Template, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"not an encoded object: more than {_MAX_DEPTH} deep")
        if isinstance(node, list):
            return self._items(node, template, depth + 1)
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise ValueError("not an encoded object: a node with several tags")
        ((tag, content),) = node.items()
        return self._tags[tag](content, template, depth + 1)

    def _items(
        self, nodes: Node, template: Template, depth: int, kind: type = list
    ) -> list[Any]:
        return [
            self._value(node, template.child(kind, i), depth)
            for i, node in enumerate(typed(nodes, list))
        ]

    def _dict(self, pairs: Node, template: Template, depth: int) -> dict[Any, Any]:
        found = {}
        for pair in typed(pairs, list):
            key_node, value_node = typed(pair, list)
            key = self._value(key_node, _NO_TEMPLATE, depth)
            found[key] = self._value(value_node, template.child(dict, key), depth)
        return found

    def _complex(self, parts: Node, template: Template, depth: int) -> complex:
        real, imag = self._items(parts, template, depth)
        return complex(typed(real, float), typed(imag, float))

    def _array(self, content: Node) -> Array:
        index, name, shape = typed(content, list)
        dtype = dtype_of(typed(name, str), self.kinds)
        blob = self._blob(index)
        if any(typed(n, int) < 0 for n in typed(shape, list)) or len(shape) > 64:
            raise ValueError(f"not an encoded object: an array of shape {shape}")
        if math.prod(shape) * dtype.itemsize != len(blob):
            raise ValueError(
                "not an encoded object: an array with the wrong number of bytes"
            )
        return np.frombuffer(blob, dtype).reshape(shape)

    def _blob(self, index: Node) -> memoryview:
        if typed(index, int) < 0:
            raise ValueError("not an encoded object: a negative blob")
        return self._blobs[index]


def typed(value: Node, kind: type[_T]) -> _T:
    """Returns `value` if its type is exactly `kind`, or else raises ValueError."""
    if type(value) is not kind:  # isinstance would accept a bool as an int
        raise ValueError(
            f"not an encoded object: a {type(value).__name__} where a {kind.__name__} "
            "belongs"
        )
    return value
