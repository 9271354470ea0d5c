"""The members of an epoch in a message: a column for each attribute, without addresses.

All members receive the same table, whose length hardly depends on their number: columns
consist of few progressions, and the names of hosts are mostly numbered. A member asks
for the addresses of those ranks to which it connects (`CoordinatorClient.locate`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringjax.control.member import JsonObject, Member
from ringjax.control.number_lists import (
    MOST,
    compress,
    compress_column,
    expand,
    expand_column,
)


def encode(workers: Sequence[int], hellos: Sequence[JsonObject]) -> JsonObject:
    """Returns the table of the members with these ids and hellos, in rank order.

    Example:
        >>> hello = {"machine": "m", "hostname": "node1", "shm": True}
        >>> table = encode([0, 1], [hello, hello])
        >>> table["hostnames"], table["host"]
        ([['node1', 1]], [[[0, 1, 0]], [[2, 1, 0]]])
        >>> decode(table)[1]
        Member(rank=1, worker=1, host=0, hostname='node1', shm=True, cuda=0)
    """
    keys = [f"{h.get('machine')} {h.get('hostname')}" for h in hellos]
    names: dict[str, str] = {}
    for key, hello in zip(keys, hellos, strict=True):
        names.setdefault(key, str(hello.get("hostname") or ""))
    index = {key: host for host, key in enumerate(names)}
    return {
        "workers": compress(workers),
        "host": compress_column(index[key] for key in keys),
        "hostnames": _count_names(names.values()),
        "shm": compress_column(int(bool(h.get("shm"))) for h in hellos),
        "cuda": compress_column(_count(h.get("cuda")) for h in hellos),
    }


def decode(table: Mapping[str, Any]) -> tuple[Member, ...]:
    """Returns the members of a table, in rank order.

    Raises LookupError, TypeError or ValueError if the table is malformed.
    """
    names = _expand_names(table["hostnames"])
    columns = (expand_column(table[name]) for name in ("host", "shm", "cuda"))
    rows = zip(expand(table["workers"]), *columns, strict=True)
    return tuple(
        Member(rank, worker, host, names[host], bool(shm), cuda)
        for rank, (worker, host, shm, cuda) in enumerate(rows)
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _count_names(names: Iterable[str]) -> list[list[Any]]:
    """Returns pairs of a name and how many names follow from it by counting up.

    Example:
        >>> _count_names(["node09", "node10", "login"])
        [['node09', 2], ['login', 1]]
    """
    found: list[list[Any]] = []
    following = None
    for name in names:
        if name == following:
            found[-1][1] += 1
        else:
            found.append([name, 1])
        following = _next_name(name)
    return found


def _expand_names(counted: Iterable[Iterable[Any]]) -> list[str]:
    found: list[str] = []
    for name, count in counted:
        if count > MOST - len(found):
            raise ValueError(f"there are more than {MOST} hosts")
        following: str | None = str(name)
        for _ in range(count):
            if following is None:
                raise ValueError(f"the host name {name!r} has no number")
            found.append(following)
            following = _next_name(following)
    return found


def _next_name(name: str) -> str | None:
    """Returns the name with the last number in it increased by one, if it has one."""
    parts = re.fullmatch(r"(.*?)([0-9]{1,18})([^0-9]*)", name, re.DOTALL)
    if parts is None:
        return None
    before, digits, after = parts.groups()
    return f"{before}{int(digits) + 1:0{len(digits)}}{after}"
