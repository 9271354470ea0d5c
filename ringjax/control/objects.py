"""Python objects as bytes and back, without pickle: JSON for the structure, raw arrays.

Knows no lane and no jax: `broadcast` and `allgather` are given a function that moves
arrays, by `sync.py` and `eager/objects.py`. Bytes that came from another rank are
bounded and checked: whatever they hold, decoding gives an object of the types below or
a ValueError.

Layout: ``RJO1`` | u32 length of the JSON text | JSON text | blobs, one after another.
The text is ``{"value": node, "blobs": [bytes of each]}``. A node is null, true, false,
a number, a string, a list of nodes, or one of ``{"tuple": [node, …]}``,
``{"set": [node, …]}``, ``{"frozenset": [node, …]}``, ``{"dict": [[key, value], …]}``,
``{"float": "nan"}``, ``{"int": hex}``, ``{"complex": [re, im]}``, ``{"bytes": blob}``,
``{"array": [blob, dtype, shape]}``, ``{"scalar": [blob, dtype, []]}``.
Or ``RJOP`` | a pickle, which is only read where the caller has asked for it. What
travels is followed by a seal (`ObjectSeal`), without which nothing of it is looked at.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ringjax.control.sealed_messages import ObjectSeal

MAX_BYTES = 1 << 31
_PLAIN, _PICKLE = b"RJO1", b"RJOP"
_MAX_DEPTH = 100
_LENGTH = struct.Struct("<I")
_KINDS = "biufc"
# Their names: what else numpy makes of a text from a peer is not wanted.
_DTYPES = {
    np.dtype(code).newbyteorder("<").str
    for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
# Of the package ml_dtypes. By name: the `str` of float8_e5m2 is that of no dtype.
_EXTENDED = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "int4",
    "uint4",
)
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, "
    "and numpy or jax arrays and scalars"
)


def is_named(value: Any) -> bool:
    """Whether it is a function, a class or the like: nothing in it has to be sent."""
    return callable(value) and hasattr(value, "__name__")


def look(value: Any) -> str:
    """What ranks compare of a function or the like, which each of them has itself.

    Example:
        >>> look(len), look("same")
        ('the builtin_function_or_method <built-in function len>', "the str 'same'")
    """
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    if len(text) > 100:  # it may be anything, and is shown if it differs
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        text = f"{text[:80]}... (SHA-256 {digest[:16]})"
    return f"the {type(value).__name__} {text}"


def encode(value: Any, *, allow_pickle: bool = False) -> bytes:
    """The bytes of `value`.

    Raises:
      TypeError: `value` holds something else than the types of the layout above, and
        `allow_pickle` is False. The text says where.
    """
    try:
        return _ObjectEncoder().encode(value)
    except TypeError:
        if not allow_pickle:
            raise
    import cloudpickle

    return _PICKLE + bytes(cloudpickle.dumps(value))


def decode(data: bytes, *, allow_pickle: bool = False) -> Any:
    """The object in `data`; jax arrays arrive as numpy arrays.

    Raises:
      ValueError: `data` is not what `encode` makes, or it is a pickle and
        `allow_pickle` is False.
    """
    if data[:4] == _PICKLE and allow_pickle:
        import cloudpickle

        return cloudpickle.loads(data[4:])
    if data[:4] == _PICKLE:
        raise ValueError(
            "the sender has pickled the object; pass allow_pickle=True here too"
        )
    try:
        return _ObjectDecoder(data).decode()
    except (KeyError, IndexError, TypeError, RecursionError, OverflowError) as e:
        raise ValueError(f"not an encoded object: {type(e).__name__}: {e}") from None


class ObjectMessage(NamedTuple):
    """An object on its way, or the reason why it cannot be sent, which travels instead.

    A message is a head of fixed size and a body: the receivers have to know its size.
    """

    failed: bool
    data: bytes

    @classmethod
    def of(cls, value: Any, seal: ObjectSeal, *, allow_pickle: bool) -> ObjectMessage:
        """Never raises: the other ranks already wait for this one."""
        failed = False
        try:
            data = encode(value, allow_pickle=allow_pickle)
            if len(data) > MAX_BYTES - ObjectSeal.SIZE:
                raise ValueError(f"it has {len(data)} bytes, more than {MAX_BYTES}")
        except Exception as e:  # a pickle runs the object's own code
            failed = True
            data = f"{type(e).__name__}: {e}".encode(errors="replace")[:65536]
        return cls(failed, data + seal.of(failed, data))

    def head(self) -> np.ndarray[Any, Any]:
        """uint32[2]: whether it failed, and the number of bytes."""
        return np.array([self.failed, len(self.data)], np.uint32)

    def body(self, size: Size | None = None) -> np.ndarray[Any, Any]:
        """The bytes, filled up to `size`, which is `room` if not given."""
        body = np.zeros((size or room)(self.head()), np.uint8)
        body[: len(self.data)] = np.frombuffer(self.data, np.uint8)
        return body


def length(head: np.ndarray[Any, Any]) -> int:
    """The number of bytes."""
    announced = int(head[1])
    if announced > MAX_BYTES:
        raise ValueError(f"an object of {announced} bytes is announced")
    return announced


def room(head: np.ndarray[Any, Any]) -> int:
    """`length` up to a power of two, where every new shape is a new program."""
    return max(64, 1 << (length(head) - 1).bit_length())


def opened(
    head: np.ndarray[Any, Any], body: bytes, seal: ObjectSeal, *, allow_pickle: bool
) -> Any:
    """The object of a message; TypeError with the sender's reason if it had failed."""
    data = seal.checked(bool(head[0]), body[: int(head[1])])
    if head[0]:
        raise TypeError(data.decode(errors="replace"))
    return decode(data, allow_pickle=allow_pickle)


# -- from rank to rank -----------------------------------------------------------------

# Moves an array between the ranks, the "head" or the "body" of messages.
Move = Callable[[np.ndarray[Any, Any], str], Any]
# From the head of a message to the size of its body as it travels.
Size = Callable[[np.ndarray[Any, Any]], int]


def broadcast(
    what: str,
    obj: Any,
    move: Move,
    size: Size,
    *,
    is_root: bool,
    root_rank: int,
    secret: bytes,
    allow_pickle: bool,
) -> Any:
    """A copy of the root's object. `what` is the function that errors name.

    Raises:
      TypeError: the root's object cannot be sent; on every rank.
      ValueError: what came is no object, or a pickle without `allow_pickle`.
    """
    seal = ObjectSeal(secret, what)
    message = ObjectMessage.of(
        obj if is_root else None, seal, allow_pickle=allow_pickle
    )
    head = np.asarray(move(message.head(), "head"))
    with _blaming(what, root_rank):
        body = message.body(size) if is_root else np.zeros(size(head), np.uint8)
    data = np.asarray(move(body, "body")).tobytes()
    with _blaming(what, root_rank):
        return opened(head, data, seal, allow_pickle=allow_pickle)


def allgather(
    what: str,
    obj: Any,
    move: Move,
    size: Size,
    *,
    ranks: Iterable[int],
    secret: bytes,
    allow_pickle: bool,
) -> list[Any]:
    """The objects of all ranks. Raises as `broadcast`."""
    seal = ObjectSeal(secret, what)
    message = ObjectMessage.of(obj, seal, allow_pickle=allow_pickle)
    heads = np.asarray(move(message.head()[None], "head"))
    data = np.asarray(move(message.body(size), "body")).tobytes()
    senders: list[int | str] = list(ranks)
    if len(heads) < len(senders):  # who has joined sends nothing
        senders = ["unknown"] * len(heads)
    found, start = [], 0
    for rank, head in zip(senders, heads, strict=True):
        with _blaming(what, rank):
            end = start + size(head)
            body = data[start:end]
            found.append(opened(head, body, seal, allow_pickle=allow_pickle))
        start = end
    return found


@contextmanager
def _blaming(what: str, rank: int | str) -> Iterator[None]:
    """Says whose object it is that cannot be sent or read."""
    try:
        yield
    except TypeError as e:
        text = f"ringjax.{what}: `obj` of rank {rank} cannot be sent: {e}"
        raise TypeError(text) from None
    except ValueError as e:
        raise ValueError(f"ringjax.{what}: `obj` of rank {rank}: {e}") from None


# -- the bytes -------------------------------------------------------------------------


class _ObjectEncoder:
    def __init__(self) -> None:
        self._blobs: list[bytes] = []

    def encode(self, value: Any) -> bytes:
        node = self._node(value, "the object", 0)
        head = {"value": node, "blobs": [len(blob) for blob in self._blobs]}
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        return b"".join([_PLAIN, _LENGTH.pack(len(text)), text, *self._blobs])

    def _node(self, value: Any, where: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise TypeError(f"{where} is nested more than {_MAX_DEPTH} deep")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            # Python refuses to read decimals of more than 4300 digits.
            return value if abs(value) < 1 << 256 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is complex:
            parts = (value.real, value.imag)
            return {"complex": [self._node(p, where, depth) for p in parts]}
        if kind is str:
            return self._text(value, where)
        if kind is bytes:
            return {"bytes": self._blob(value)}
        return self._container(value, where, depth + 1)

    def _container(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            items = [self._node(v, f"{where}[{i}]", depth) for i, v in enumerate(value)]
            return items if kind is list else {kind.__name__: items}
        if kind is dict:
            pairs = [
                [
                    self._node(k, f"the key {k!r} of {where}", depth),
                    self._node(v, f"{where}[{k!r}]", depth),
                ]
                for k, v in value.items()
            ]
            return {"dict": pairs}
        if isinstance(value, np.generic) or (
            hasattr(value, "__array__") and hasattr(value, "dtype")
        ):
            return self._array(value, where)
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, expected {_ALLOWED}; "
            "allow_pickle=True sends anything"
        )

    def _text(self, value: str, where: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{where} is a str that is not valid Unicode") from None
        return value

    def _array(self, value: Any, where: str) -> Any:
        try:
            array = np.asarray(value)
        except TypeError as e:  # a tracer, or a typed key of jax.random
            raise TypeError(f"{where} cannot be read as a numpy array: {e}") from None
        numpys = array.dtype.kind in _KINDS and array.dtype.name not in _EXTENDED
        dtype = array.dtype.newbyteorder("<") if numpys else array.dtype
        name = dtype.str if numpys else dtype.name
        if not numpys and name not in _EXTENDED:
            raise TypeError(
                f"{where} is an array of dtype {array.dtype}, which has no plain bytes"
            )
        blob = self._blob(np.ascontiguousarray(array, dtype).tobytes())
        tag = "scalar" if isinstance(value, np.generic) else "array"
        return {tag: [blob, name, list(array.shape)]}

    def _blob(self, blob: bytes) -> int:
        self._blobs.append(blob)
        return len(self._blobs) - 1


class _ObjectDecoder:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._blobs: list[memoryview] = []
        self._tags: dict[str, Callable[[Any, int], Any]] = {
            "tuple": lambda v, d: tuple(self._items(v, d)),
            "set": lambda v, d: set(self._items(v, d)),
            "frozenset": lambda v, d: frozenset(self._items(v, d)),
            "dict": self._dict,
            "float": lambda v, _: float(_typed(v, str)),
            "int": lambda v, _: int(_typed(v, str), 16),
            "complex": self._complex,
            "bytes": lambda v, _: bytes(self._blob(v)),
            "array": lambda v, _: self._array(v).copy(),
            "scalar": lambda v, _: self._array(v)[()],
        }

    def decode(self) -> Any:
        data, start = self._data, 4 + _LENGTH.size
        if len(data) < start or bytes(data[:4]) != _PLAIN:
            raise ValueError("not an encoded object: it does not begin with RJO1")
        (length,) = _LENGTH.unpack(data[4:start])
        if length > len(data) - start:
            raise ValueError("not an encoded object: its text is cut off")
        end = start + length
        head = _typed(json.loads(str(data[start:end], "utf-8")), dict)
        for size in _typed(head["blobs"], list):
            if not 0 <= _typed(size, int) <= len(data) - end:
                raise ValueError("not an encoded object: a blob is cut off")
            self._blobs.append(data[end : end + size])
            end += size
        if end != len(data):
            raise ValueError(f"not an encoded object: {len(data) - end} bytes too many")
        return self._value(head["value"], 0)

    def _value(self, node: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"not an encoded object: more than {_MAX_DEPTH} deep")
        if isinstance(node, list):
            return self._items(node, depth + 1)
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise ValueError("not an encoded object: a node with several tags")
        ((tag, content),) = node.items()
        return self._tags[tag](content, depth + 1)

    def _items(self, nodes: Any, depth: int) -> list[Any]:
        return [self._value(node, depth) for node in _typed(nodes, list)]

    def _dict(self, pairs: Any, depth: int) -> dict[Any, Any]:
        nodes = [_typed(pair, list) for pair in _typed(pairs, list)]
        return {self._value(k, depth): self._value(v, depth) for k, v in nodes}

    def _complex(self, parts: Any, depth: int) -> complex:
        real, imag = self._items(parts, depth)
        return complex(_typed(real, float), _typed(imag, float))

    def _array(self, content: Any) -> np.ndarray[Any, Any]:
        index, name, shape = _typed(content, list)
        if _typed(name, str) in _EXTENDED:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, name))
        elif name in _DTYPES:
            dtype = np.dtype(name)
        else:
            raise ValueError(f"not an encoded object: an array of dtype {name!r}")
        blob = self._blob(index)
        if any(_typed(n, int) < 0 for n in _typed(shape, list)) or len(shape) > 64:
            raise ValueError(f"not an encoded object: an array of shape {shape}")
        if math.prod(shape) * dtype.itemsize != len(blob):
            raise ValueError(
                "not an encoded object: an array with the wrong number of bytes"
            )
        return np.frombuffer(blob, dtype).reshape(shape)

    def _blob(self, index: Any) -> memoryview:
        if _typed(index, int) < 0:
            raise ValueError("not an encoded object: a negative blob")
        blob: memoryview = self._blobs[index]
        return blob


def _typed(value: Any, kind: type) -> Any:
    # bool is an int to Python, but not here.
    if type(value) is not kind:
        raise ValueError(
            f"not an encoded object: a {type(value).__name__} where a {kind.__name__} "
            "belongs"
        )
    return value
