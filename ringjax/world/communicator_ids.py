"""Communicator ids, by which all ranks identify one communicator of an epoch.

The world has the id 0, and other process sets have the ids from 1 on. Every other
communicator belongs to a process set or a replica set, and its id is the id of that set
plus a bit or an offset for its purpose:

    id                                       communicator
    0 ... REPLICA_SET - 1                    process set
    REPLICA_SET                              replica set of this rank
    REPLICA_SET | EAGER_LANE                 CALL_END, see below
    PRIVATE | hash                           see private_id
    process set | EAGER_LANE                 eager lane of a process set
    set | DEVICE_CONTROL | index * _DEVICE   control of one device of each rank
"""

from __future__ import annotations

import zlib

REPLICA_SET = 1 << 27
PRIVATE = 1 << 28
EAGER_LANE = 1 << 29
DEVICE_CONTROL = 1 << 30
# In an elastic job, a call of a replica set ends only when the calls of all replica
# sets have ended, so that all shards of a training step belong to one epoch. The ranks
# agree on the end over this communicator. Its id is free, because replica sets have no
# eager lane.
CALL_END = REPLICA_SET | EAGER_LANE
# The device index uses the bits between the ids of process sets and REPLICA_SET.
_DEVICE, _MAX_DEVICES = 1 << 20, 1 << 7


def control_id(set_id: int, device_index: int) -> int:
    """Returns the id of the communicator that controls devices with this index.

    Example:
        >>> number = control_id(3, device_index=2)
        >>> process_set_of(number), device_index_of(number)
        (3, 2)
    """
    return set_id | DEVICE_CONTROL | device_index * _DEVICE


def private_id(*key: object) -> int:
    """Returns the id of a private communicator of some ranks.

    Its ranks make it together and the others do not know it, so they all derive the id
    from a `key` that is equal on all of them and has not been used in this epoch.
    """
    return PRIVATE | zlib.crc32(str(key).encode()) & (PRIVATE - 1)


def device_index_of(number: int) -> int:
    """Returns the device index of a control communicator, or 0 for any other."""
    return number // _DEVICE % _MAX_DEVICES if number & DEVICE_CONTROL else 0


def process_set_of(number: int) -> int:
    """Returns the id of the process set or replica set that a communicator serves."""
    return number % EAGER_LANE - device_index_of(number) * _DEVICE
