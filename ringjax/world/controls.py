"""The numbers of the device communicators' control meshes, and what they say.

A mesh of the host has one number in an epoch, alike on all ranks: that of its process
set or replica set, a bit for its lane, or what is added here for each device.
"""

from __future__ import annotations

from ringjax.world.lanes import LANE

CONTROL = 1 << 30  # added for the first device of each rank
# And as often for each further one: above process sets, below replica sets and lanes.
_PLACE, _PLACES = 1 << 20, 1 << 7


def number_of(process_set: int, place: int) -> int:
    """Of the mesh for the devices at a place of each rank.

    Example:
        >>> number = number_of(3, place=2)
        >>> set_of(number), place_of(number)
        (3, 2)
    """
    return process_set | CONTROL | place * _PLACE


def place_of(number: int) -> int:
    """Which device of each rank a control mesh is for; 0 for all other meshes."""
    return number // _PLACE % _PLACES if number & CONTROL else 0


def set_of(number: int) -> int:
    """The process set, or the replica set, that any mesh belongs to."""
    return number % LANE - place_of(number) * _PLACE
