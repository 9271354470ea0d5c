"""Sends Python objects between ranks: a head of fixed size, then a body with an HMAC.

The module does not import jax. The callers `sync.py`, `eager/objects.py` and
`elastic/transfer.py` pass a function that moves arrays. The receiver decodes an object
only if the HMAC at its end is genuine, see `ObjectSeal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ringjax.control.objects import Array, decode, encode
from ringjax.control.sealed_messages import ObjectSeal

MAX_BYTES = 1 << 31
_MAX_REASON_BYTES = 65536

# A function that sends an array to other ranks, and returns the array that this rank
# receives. The second argument is "head" or "body".
Move = Callable[[Array, str], Any]
# A function that returns the body's size in bytes, given the head of a message.
BodySize = Callable[[Array], int]


class ObjectMessage(NamedTuple):
    """An encoded object, or the reason why the object cannot be sent.

    The head has a fixed size, because receivers must know the size of the body before
    they can receive it.
    """

    failed: bool
    data: bytes

    @classmethod
    def of(
        cls, value: object, seal: ObjectSeal, *, allow_pickle: bool
    ) -> ObjectMessage:
        """Encodes `value`. Never raises, because other ranks wait for the message."""
        failed = False
        try:
            data = encode(value, allow_pickle=allow_pickle)
            if len(data) > MAX_BYTES - ObjectSeal.SIZE:
                raise ValueError(f"it has {len(data)} bytes, more than {MAX_BYTES}")
        except Exception as e:  # pickling runs code of the object, which may fail
            failed = True
            data = f"{type(e).__name__}: {e}".encode(errors="replace")
            data = data[:_MAX_REASON_BYTES]
        return cls(failed, data + seal.of(failed, data))

    def head(self) -> Array:
        """Returns uint32[2]: whether encoding failed, and the body's size in bytes."""
        return np.array([self.failed, len(self.data)], np.uint32)

    def body(self, size: BodySize | None = None) -> Array:
        """Returns the body, padded with zeros to `size` (by default `padded_size`)."""
        body = np.zeros((size or padded_size)(self.head()), np.uint8)
        body[: len(self.data)] = np.frombuffer(self.data, np.uint8)
        return body


def exact_size(head: Array) -> int:
    announced = int(head[1])
    if announced > MAX_BYTES:
        raise ValueError(f"an object of {announced} bytes is announced")
    return announced


def padded_size(head: Array) -> int:
    """Returns `exact_size` rounded up to a power of two.

    The padding keeps the number of shapes small: JAX compiles a program for each shape.
    """
    return max(64, 1 << (exact_size(head) - 1).bit_length())


def open_message(
    head: Array, body: bytes, seal: ObjectSeal, *, allow_pickle: bool
) -> Any:
    """Returns the object of a message.

    Raises:
        TypeError: the sender could not encode the object. The text has the reason.
        ValueError: the message is not genuine, or contains no object.
    """
    data = seal.verify(bool(head[0]), body[: int(head[1])])
    if head[0]:
        raise TypeError(data.decode(errors="replace"))
    return decode(data, allow_pickle=allow_pickle)


def broadcast(
    what: str,
    obj: object,
    move: Move,
    size: BodySize,
    *,
    is_root: bool,
    root_rank: int,
    secret: bytes,
    allow_pickle: bool,
) -> Any:
    """Returns a copy of the root's object. Error messages begin with `what`.

    Raises:
        TypeError: the root's object cannot be sent. Every rank raises this error.
        ValueError: the message contains no object, or a pickle that is not allowed.
    """
    seal = ObjectSeal(secret, what)
    message = ObjectMessage.of(
        obj if is_root else None, seal, allow_pickle=allow_pickle
    )
    head = np.asarray(move(message.head(), "head"))
    with _naming_sender(what, root_rank):
        body = message.body(size) if is_root else np.zeros(size(head), np.uint8)
    data = np.asarray(move(body, "body")).tobytes()
    with _naming_sender(what, root_rank):
        return open_message(head, data, seal, allow_pickle=allow_pickle)


def allgather(
    what: str,
    obj: object,
    move: Move,
    size: BodySize,
    *,
    ranks: Iterable[int],
    secret: bytes,
    allow_pickle: bool,
) -> list[Any]:
    """Returns the objects of all ranks. Raises the same errors as `broadcast`."""
    seal = ObjectSeal(secret, what)
    message = ObjectMessage.of(obj, seal, allow_pickle=allow_pickle)
    heads = np.asarray(move(message.head()[None], "head"))
    data = np.asarray(move(message.body(size), "body")).tobytes()
    senders: list[int | str] = list(ranks)
    if len(heads) < len(senders):  # a rank that has called `join` sends no object
        senders = ["unknown"] * len(heads)
    found, start = [], 0
    for rank, head in zip(senders, heads, strict=True):
        with _naming_sender(what, rank):
            end = start + size(head)
            body = data[start:end]
            found.append(open_message(head, body, seal, allow_pickle=allow_pickle))
        start = end
    return found


@contextmanager
def _naming_sender(what: str, rank: int | str) -> Iterator[None]:
    """Adds the sender's rank to errors about the sender's object."""
    try:
        yield
    except TypeError as e:
        text = f"ringjax.{what}: `obj` of rank {rank} cannot be sent: {e}"
        raise TypeError(text) from None
    except ValueError as e:
        raise ValueError(f"ringjax.{what}: `obj` of rank {rank}: {e}") from None
