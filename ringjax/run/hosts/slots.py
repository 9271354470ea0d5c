"""Slots: parses lists of hosts, and assigns each rank to a slot on a host.

Other functions decide whether a name means this machine, and by which addresses other
hosts can reach this machine. This module starts no process and opens no connection.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ringjax.control import addresses
from ringjax.run.hosts import name_lookup

# The name becomes an argument of ssh, so it must not look like an option (-o...).
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.\-]*@)?[A-Za-z0-9_][\w.\-]*")
_ADDRESS6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[\w.\-]+)?")
ANY_HOST = "*"  # stands for a host that is not known yet
_LOOPBACK = ("localhost", "localhost.localdomain", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A host and the number of ranks that can run on it."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """The ranks and sizes of one rank, named as in Horovod's class `SlotInfo`."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """Returns the variables of the rank, by ringjax's and by Horovod's names."""
        place = {
            "RANK": self.rank,
            "SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_SIZE": self.local_size,
            "CROSS_RANK": self.cross_rank,
            "CROSS_SIZE": self.cross_size,
            "HOSTNAME": self.host,
        }
        return {
            f"{prefix}_{key}": str(value)
            for prefix in ("RINGJAX", "HOROVOD")
            for key, value in place.items()
        }


def check_host_name(name: str) -> str:
    """Returns a host name unchanged if it is valid.

    Raises ValueError if the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host name")
    return name


def parse_host(name: str, slots: str | None, where: str) -> HostSlots:
    """Converts a name and a number of slots to a host. `slots=None` means one slot.

    Raises:
        ValueError: the name or the number is invalid. The text begins with `where`.
    """
    if name.startswith("[") and name.endswith("]") and _ADDRESS6.fullmatch(name[1:-1]):
        name = name[1:-1]
    elif not _NAME.fullmatch(name):
        raise ValueError(f"{where}: {name!r} is not a host name")
    if slots is None:
        return HostSlots(name, 1)
    if not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise ValueError(
            f"{where}: slots of {name!r} must be a positive whole number, not {slots!r}"
        )
    return HostSlots(name, int(slots))


def _parse_entry(entry: str, where: str) -> HostSlots:
    """Parses `host`, `host:slots` or `[IPv6 address]:slots`."""
    name, colon, slots = entry.rpartition(":")
    if not colon or entry.endswith("]"):
        return parse_host(entry, None, where)
    return parse_host(name, slots, where)


def merge_hosts(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    """Adds the slots of entries with equal names, in the order of first mention."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


def parse_hosts(text: str) -> list[HostSlots]:
    """Parses the value of -H, `host1:2,host2:4`. An entry without a count has one slot.

    Raises ValueError if an entry cannot be read; the error contains the entry.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not any(entries):
        raise ValueError("-H: no host given; write for example host1:2,host2:2")
    return merge_hosts(_parse_entry(entry, "-H") for entry in entries if entry)


def parse_hostfile(path: str | os.PathLike[str]) -> list[HostSlots]:
    """Parses a host file with lines `host slots=N`, `host:N`, `host` or `# comment`.

    Raises ValueError if the file cannot be read; the error names the file and the line.
    """
    hosts = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--hostfile {os.fspath(path)}: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{os.fspath(path)}, line {number}"
        slots = None
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots":
                slots = value
            elif key not in ("max-slots", "max_slots"):
                raise ValueError(f"{where}: {word!r} is not understood")
        if slots is None:
            hosts.append(_parse_entry(words[0], where))
        else:
            hosts.append(parse_host(words[0], slots, where))
    if not hosts:
        raise ValueError(f"--hostfile {os.fspath(path)}: no host in it")
    return merge_hosts(hosts)


def parse_discovered(text: str, slots: int) -> list[HostSlots]:
    r"""Parses the output of a discovery script: each line is `host` or `host:slots`.

    A host without a count has `slots` slots.

    Raises ValueError if a line cannot be read; the text contains the line.

    Example:
        >>> parse_discovered("a:4\nb\n", slots=2)
        [HostSlots(name='a', slots=4), HostSlots(name='b', slots=2)]
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        host = _parse_entry(line, "--host-discovery-script")
        counted = ":" in line and not line.endswith("]")
        found.append(host if counted else HostSlots(host.name, slots))
    return merge_hosts(found)


def assign_slots(hosts: Sequence[HostSlots], size: int) -> list[SlotInfo]:
    """Assigns `size` ranks to slots. Fills the first host, then the next host.

    Raises ValueError if the hosts have less than `size` slots.
    """
    if size < 1:
        raise ValueError(f"-np: at least one process is needed, not {size}")
    available = sum(host.slots for host in hosts)
    if size > available:
        given = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"-np {size}: more processes than slots; there are {available} ({given})"
        )
    places = [host.name for host in hosts for _ in range(min(host.slots, size))]
    return place_ranks(places[:size])


def place_ranks(hosts: Sequence[str]) -> list[SlotInfo]:
    """Returns the slot of each rank. Rank n runs on the host `hosts[n]`.

    As in Horovod, local_rank is a rank's index on its host, and cross_rank is the index
    of the host among the hosts that have a rank with the same local_rank.
    """
    counts = Counter(hosts)
    local_ranks: dict[str, Iterator[int]] = {host: itertools.count() for host in counts}
    slots: list[SlotInfo] = []
    for rank, host in enumerate(hosts):
        local_rank = next(local_ranks[host])
        same = [other for other, count in counts.items() if count > local_rank]
        slots.append(
            SlotInfo(
                host=host,
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=counts[host],
                cross_rank=same.index(host),
                cross_size=len(same),
            )
        )
    return slots


def natural_order(host: HostSlots) -> list[tuple[int, str]]:
    """Returns a key that sorts hosts by name, and digits in names by their value.

    Example:
        >>> hosts = [HostSlots("n-10", 1), HostSlots("n-9", 1)]
        >>> [host.name for host in sorted(hosts, key=natural_order)]
        ['n-9', 'n-10']
    """
    pieces = re.split(r"([0-9]+)", host.name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def is_local(name: str) -> bool:
    """Returns whether `name` is a name or an address of this machine."""
    if name in _LOOPBACK or name == socket.gethostname():
        return True
    if "@" in name:  # another user needs ssh, even on this machine
        return False
    found = name_lookup.addresses(name)
    return any(_is_own_address(family, address) for family, *_, address in found)


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    """Returns whether this machine can bind a socket to `address`."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def merge_aliases(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    """Merges hosts whose names have a common address. The first name is kept.

    Otherwise two ranks on one machine would have equal local_ranks and share a GPU. Two
    users on one machine count as two hosts.
    """
    if len(hosts) < 2:
        return list(hosts)
    name_lookup.start(host.name.rpartition("@")[2] for host in hosts)
    known: dict[tuple[str, object], str] = {}

    def first_name(name: str) -> str:
        user, _, host = name.rpartition("@")
        found: set[object] = {a[0] for *_, a in name_lookup.addresses(host)}
        keys = [(user, each) for each in ({None} if is_local(name) else found)]
        first = next((known[key] for key in keys if key in known), name)
        known.update(dict.fromkeys(keys, first))
        return first

    return merge_hosts(HostSlots(first_name(host.name), host.slots) for host in hosts)


def reachable_addresses(remote: Sequence[str], interfaces: str) -> list[str]:
    """Returns the addresses by which the `remote` hosts can reach this machine.

    The first of these rules that applies decides:

    * If `interfaces`, such as "eth0,eth1", is not empty: the addresses of the
    interfaces.
    * If there is no remote host: loopback.
    * If `remote` is `[ANY_HOST]`, because the hosts are not known yet: all addresses.
    * Otherwise: the source addresses of packets to the remote hosts. If only ssh can
      resolve a name, all addresses except loopback are added.

    Raises ValueError if an interface does not exist or has no address.
    """
    if interfaces.strip(", "):
        try:
            return addresses.of_interfaces(interfaces)
        except ValueError as error:
            raise ValueError(f"--network-interfaces: {error}") from None
    if not remote:
        return [addresses.loopback()]
    if remote == [ANY_HOST]:
        return _all_addresses() or [addresses.loopback()]
    routed = [_source_address(name.rpartition("@")[2]) for name in remote]
    found = [address for address in routed if address]
    if None in routed:
        found += _all_addresses()
    return list(dict.fromkeys(found)) or [addresses.loopback()]


def _all_addresses() -> list[str]:
    return [a for a in addresses.of_interfaces() if not addresses.is_loopback(a)]


def _source_address(name: str) -> str | None:
    """Returns the source address of packets to the host `name`, or None.

    The kernel chooses this address when a datagram socket is connected, which sends no
    packet.
    """
    for family, kind, protocol, _, address in name_lookup.addresses(name):
        with (
            contextlib.suppress(OSError),
            socket.socket(family, kind, protocol) as probe,
        ):
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
