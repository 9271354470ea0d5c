"""Tests of encoded objects: values survive a round trip, hostile bytes do no harm."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringjax.control import object_messages, objects
from ringjax.control.sealed_messages import ObjectSeal

KEY = b"of the job"
SEAL = ObjectSeal(KEY, "broadcast_object")
ARRAYS = hnp.arrays(
    st.sampled_from(
        [np.dtype(d) for d in ("?", "i1", "<u8", ">i4", "<f2", "f8", "c16")]
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
)
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLE | st.complex_numbers(allow_nan=False) | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=20,
)


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return (
            a.shape == b.shape
            and a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")
            and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


@given(VALUES)
def test_values_survive_a_round_trip(value) -> None:
    assert same(objects.decode(objects.encode(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        *(math.inf, -math.inf, -0.0, 5e-324, 0.1, 1 << 5000, -(1 << 300), 2**53 + 1),
        *(
            True,
            "\0ß€😀",
            "\ud83d\ude00".encode("utf-16", "surrogatepass"),
            b"",
            (),
            {},
        ),
        *(
            [[]],
            {"a": {1: (2, [3.5])}},
            {(1, "x"): None, 1.5: {}},
            complex(math.inf, -0.0),
        ),
        *(np.float32(0.1), np.bool_(True), np.uint64(2**64 - 1), np.zeros((2, 0, 3))),
        np.arange(12).reshape(3, 4).T[::2],
    ],
    ids=lambda v: f"{type(v).__name__}",
)
def test_unusual_values_survive_a_round_trip(value) -> None:
    back = objects.decode(objects.encode(value))
    assert same(back, value)
    assert repr(back) == repr(value) or isinstance(value, np.ndarray)


def test_nan_stays_nan() -> None:
    assert math.isnan(objects.decode(objects.encode(math.nan)))


def test_jax_arrays_become_writable_numpy_arrays() -> None:
    back = objects.decode(objects.encode({"x": jnp.arange(3, dtype=jnp.bfloat16)}))
    assert type(back["x"]) is np.ndarray and back["x"].dtype == jnp.bfloat16
    back["x"][0] = 7


class Point(collections.namedtuple("Point", "x")):
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, r"the object\['a'\]\[0\] is a builtins.object"),
        (Point(1), "the object is a .*Point"),
        (np.array([None]), "dtype object"),
        (np.array(["x"]), "dtype <U1"),
        ([lambda: 0], r"the object\[0\] is a builtins.function"),
        ({"k": jax.random.key(0)}, r"the object\['k'\]"),
        ("\ud800", "not valid Unicode"),
    ],
    ids=["object", "namedtuple", "objects", "strings", "function", "key", "surrogate"],
)
def test_unsupported_types_are_refused_with_their_place(value, where) -> None:
    with pytest.raises(TypeError, match=where):
        objects.encode(value)


def test_a_recursive_object_is_refused() -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested more than 100 deep"):
        objects.encode(loop)


def test_pickles_are_written_and_read_only_on_request() -> None:
    data = objects.encode(Point(2), allow_pickle=True)
    assert objects.decode(data, allow_pickle=True) == Point(2)
    with pytest.raises(ValueError, match="allow_pickle=True here too"):
        objects.decode(data)


def test_supported_types_are_never_pickled() -> None:
    data = objects.encode({"a": 1}, allow_pickle=True)
    assert objects.decode(data) == {"a": 1}


# -- hostile bytes ---


def forged(value, blobs=(), body=b"") -> bytes:
    text = json.dumps({"value": value, "blobs": list(blobs)}).encode()
    return b"RJO1" + struct.pack("<I", len(text)) + text + body


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data) -> None:
    for prefix in (b"", b"RJO1"):
        with pytest.raises(ValueError):
            objects.decode(prefix + data)


@given(VALUES, st.data())
def test_a_damaged_message_raises_or_decodes_to_plain_values(value, data) -> None:
    good = objects.encode(value)
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255))
    bad = good[:at] + bytes([byte]) + good[at + 1 :]
    with contextlib.suppress(ValueError):
        objects.encode(objects.decode(bad))


@given(VALUES, st.data())
def test_a_truncated_message_is_refused(value, data) -> None:
    good = objects.encode(value)
    with pytest.raises(ValueError):
        objects.decode(good[: data.draw(st.integers(0, len(good) - 1))])


@pytest.mark.parametrize(
    "data",
    [
        forged({"array": [0, "<f8", [1 << 62]]}, [8], bytes(8)),
        forged({"array": [0, "<f8", [-1, -1]]}, [8], bytes(8)),
        forged({"array": [0, "O", [1]]}, [8], bytes(8)),
        forged({"array": [0, "float64", [2]]}, [8], bytes(8)),
        forged({"array": [0, "(9999999,9999999)f8", [1]]}, [8], bytes(8)),
        forged({"array": [0, "<f8", [1]]}),
        forged({"array": [-1, "<f8", [1]]}, [8], bytes(8)),
        forged({"array": [0, "i1", [1] * 65]}, [1], bytes(1)),
        forged({"array": [0, "<f8", [True]]}, [8], bytes(8)),
        forged({"scalar": [0, "<M8[s]", []]}, [8], bytes(8)),
        forged({"bytes": True}, [1, 1], bytes(2)),
        forged({"bytes": "0"}, [1], bytes(1)),
        forged({"bytes": 0}, [1 << 62]),
        forged({"bytes": 0}, [-1]),
        forged({"int": "xyz"}),
        forged({"int": 5}),
        forged({"float": "seven"}),
        forged({"complex": [1.0]}),
        forged({"complex": ["1", "2"]}),
        forged({"set": [[]]}),
        forged({"dict": [[1]]}),
        forged({"dict": [[{"dict": []}, 1]]}),
        forged({"tuple": 3}),
        forged({"object": "os.system"}),
        forged({"tuple": [], "list": []}),
        forged({}),
        forged(0, body=b"more"),
        b"RJO1" + struct.pack("<I", 2) + b"[]",
        b"RJO1" + struct.pack("<I", 200_000) + b"[" * 200_000,
        b"RJO1" + struct.pack("<I", 10**9) + b"{}",
        b"RJO1" + struct.pack("<I", 2) + b"\xff\xff",
        b"RJOP" + b"cos\nsystem\n(S'true'\ntR.",
        b"",
    ],
)
def test_forged_messages_are_refused(data) -> None:
    with pytest.raises(ValueError):
        objects.decode(data)


def test_deep_nesting_is_refused() -> None:
    value: list = []
    for _ in range(150):
        value = [value]
    with pytest.raises(ValueError, match="deep"):
        objects.decode(forged(value))


def test_a_message_fits_into_its_announced_size() -> None:
    for length in (0, 1, 63, 64, 65, 1000):
        message = object_messages.ObjectMessage(False, bytes(length))
        room = object_messages.padded_size(message.head())
        assert len(message.body()) == room >= max(length, 64)
        assert room & (room - 1) == 0
    with pytest.raises(ValueError, match="announced"):
        object_messages.padded_size(
            np.array([0, object_messages.MAX_BYTES + 1], np.uint32)
        )


def test_receivers_raise_the_senders_encoding_error() -> None:
    message = object_messages.ObjectMessage.of(object(), SEAL, allow_pickle=False)
    head, body = message.head(), message.body().tobytes()
    with pytest.raises(TypeError, match="the object is a builtins.object"):
        object_messages.open_message(head, body, SEAL, allow_pickle=False)


class FailingPickle:
    """Fails the test when its pickle is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle that was not genuine has been read",)


@pytest.mark.parametrize("value", [{"lr": 0.1}, FailingPickle()])
@pytest.mark.parametrize("forger", [(b"guessed", "broadcast_object"), (KEY, "elastic")])
def test_an_unauthenticated_message_is_not_decoded(
    value: Any, forger: tuple[bytes, str]
) -> None:
    message = object_messages.ObjectMessage.of(
        value, ObjectSeal(*forger), allow_pickle=True
    )
    head, body = message.head(), message.body().tobytes()
    with pytest.raises(ValueError, match="altered on its way"):
        object_messages.open_message(head, body, SEAL, allow_pickle=True)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_altered_bytes_are_detected(place: int, by: int) -> None:
    message = object_messages.ObjectMessage.of(
        {"w": np.arange(5)}, SEAL, allow_pickle=True
    )
    data = bytearray(message.data)
    data[place % len(data)] ^= by
    with pytest.raises(ValueError, match="altered on its way"):
        object_messages.open_message(
            message.head(), bytes(data), SEAL, allow_pickle=True
        )
    flipped = np.array([1, len(message.data)], np.uint32)
    for head in (flipped, np.array([0, 5], np.uint32)):
        with pytest.raises(ValueError, match="altered on its way"):
            object_messages.open_message(head, message.data, SEAL, allow_pickle=True)
