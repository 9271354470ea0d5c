"""Chooses the hosts whose agents start the agents of other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FEWEST_HOSTS = 64  # fewest remote hosts of a job with relays
FAN = 32  # most hosts behind one relay


def assign_relays(hosts: Sequence[str]) -> Mapping[str, str]:
    """Returns the relay of each host to which ringrun does not connect directly.

    Example:
        >>> relays = assign_relays([f"n{i}" for i in range(64)])
        >>> relays["n1"], relays["n32"], relays["n34"], len(relays)
        ('n0', 'n0', 'n33', 62)
        >>> assign_relays(["n0", "n1"])
        {}
    """
    if len(hosts) < FEWEST_HOSTS:
        return {}
    group = FAN + 1  # a relay, and the hosts behind it
    return {
        host: hosts[index - index % group]
        for index, host in enumerate(hosts)
        if index % group
    }
