"""Encodes a profile in Perfetto's own format, a sequence of protobuf messages.

https://perfetto.dev/docs/reference/synthetic-track-event lists messages and fields. The
code names each field by its protobuf field number. The tests read the traces with
Perfetto's own parser.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count

from ringjax.profile.trace import TraceProcess, TraceSlice

BEGIN, END, COUNTER = 1, 2, 4  # values of TrackEvent.Type
SEQUENCE = 1
FIRST_PID = 1  # lowest process id; process 0 is the kernel's idle task


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SMALL = [_encode_varint(value) for value in range(1 << 12)]


def _varint(value: int) -> bytes:
    return _SMALL[value] if value < len(_SMALL) else _encode_varint(value)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


@lru_cache(1 << 14)  # names repeat, so cache the encoded names
def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


@lru_cache(1 << 14)
def _annotation(key: str, value: int | str) -> bytes:
    encoded = _number(3, value) if isinstance(value, int) else _text(6, value)
    return _bytes(4, _text(10, key) + encoded)


def _packet(*fields: bytes) -> bytes:
    return _bytes(1, b"".join((*fields, _number(10, SEQUENCE))))


def _track(uuid: int, name: str, *more: bytes) -> bytes:
    return _packet(_bytes(60, b"".join((_number(1, uuid), _text(2, name), *more))))


def _event(seconds: float, kind: int, track: int, *fields: bytes) -> bytes:
    event = b"".join((_number(9, kind), _number(11, track), *fields))
    return _packet(_number(8, max(round(seconds * 1e9), 0)), _bytes(11, event))


def packets(processes: Iterable[TraceProcess]) -> Iterator[bytes]:
    """Yields the encoded packets of a trace. Times in packets are nanoseconds."""
    numbers = count(1)
    for process in processes:
        uuid = next(numbers)
        pid = process.number + FIRST_PID
        about = _number(1, pid) + _text(6, process.title)
        yield _track(uuid, process.title, _bytes(3, about))
        for index, row in enumerate(process.threads):
            track = next(numbers)
            thread = _number(1, pid) + _number(2, pid * 1000 + index)
            yield _track(track, row.name, _bytes(4, thread + _text(5, row.name)))
            for each in row.slices:
                yield from _slice(each, track)
        for (name, unit), values in process.counters.items():
            track = next(numbers)
            counter = _bytes(8, _text(6, unit))
            yield _track(track, name, _number(5, uuid), counter)
            for when, value in values:
                double = _varint(44 << 3 | 1) + struct.pack("<d", value)
                yield _event(when, COUNTER, track, double)


def _slice(each: TraceSlice, track: int) -> Iterator[bytes]:
    fields = [_text(23, each.name)]
    if each.flow:
        fields.append(_varint(47 << 3 | 1) + struct.pack("<Q", each.flow))
    fields += [_annotation(key, value) for key, value in each.arguments.items()]
    yield _event(each.start, BEGIN, track, *fields)
    for inner in each.inner:
        yield from _slice(inner, track)
    yield _event(each.end, END, track)
