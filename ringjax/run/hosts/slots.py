"""Where ranks run: host lists, host files, and which rank gets which slot.

Names and counts only, plus the question "is this host me, and under which address do
the others reach me". Nothing here starts a process or opens a connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringjax.control import addresses
from ringjax.run.hosts import name_lookup

# A host is handed to ssh as an argument: it must never look like an option.
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.\-]*@)?[A-Za-z0-9_][\w.\-]*")
_ADDRESS6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[\w.\-]+)?")
ANY = "*"  # a remote host that nobody knows yet
_LOOPBACK = ("localhost", "localhost.localdomain", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class HostSlots:
    """One machine and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One rank's place in the job, in Horovod's terms."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """Variables that tell the rank its place, under our names and Horovod's."""
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


def check_name(name: str) -> str:
    """A host's name, as it stands.

    Raises:
        ValueError: it is none.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host name")
    return name


def host_of(name: str, slots: str | None, where: str) -> HostSlots:
    """Check one entry; `where` opens the error text."""
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


def _split(entry: str, where: str) -> HostSlots:
    """Read `host`, `host:slots` or `[v6 address]:slots`."""
    name, colon, slots = entry.rpartition(":")
    if not colon or entry.endswith("]"):
        return host_of(entry, None, where)
    return host_of(name, slots, where)


def merged(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    """Hosts in order of first mention; slots of repeated mentions add up."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


def parse_hosts(text: str) -> list[HostSlots]:
    """Read the value of -H: `host1:2,host2:4`; a host without a number has one slot.

    Raises:
        ValueError: naming the entry that cannot be read.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not any(entries):
        raise ValueError("-H: no host given; write for example host1:2,host2:2")
    return merged(_split(entry, "-H") for entry in entries if entry)


def parse_hostfile(path: str | os.PathLike[str]) -> list[HostSlots]:
    """Read a host file: per line `host slots=N`, `host:N` or `host`; `#` comments.

    Raises:
        ValueError: naming file and line of what cannot be read.
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
            hosts.append(_split(words[0], where))
        else:
            hosts.append(host_of(words[0], slots, where))
    if not hosts:
        raise ValueError(f"--hostfile {os.fspath(path)}: no host in it")
    return merged(hosts)


def parse_discovered(text: str, slots: int) -> list[HostSlots]:
    r"""Read what a discovery script prints: per line `host` or `host:slots`.

    Raises:
        ValueError: naming the line that cannot be read.

    Example:
        >>> parse_discovered("a:4\nb\n", slots=2)
        [HostSlots(name='a', slots=4), HostSlots(name='b', slots=2)]
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        host = _split(line, "--host-discovery-script")
        counted = ":" in line and not line.endswith("]")
        found.append(host if counted else HostSlots(host.name, slots))
    return merged(found)


def assign(hosts: Sequence[HostSlots], size: int) -> list[SlotInfo]:
    """Give `size` ranks to the hosts in order, filling one host before the next.

    local_rank counts inside a host; cross_rank counts the hosts that have a rank with
    the same local_rank, as in Horovod.

    Raises:
        ValueError: if the hosts have fewer slots than ranks are asked for.
    """
    if size < 1:
        raise ValueError(f"-np: at least one process is needed, not {size}")
    available = sum(host.slots for host in hosts)
    if size > available:
        given = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"-np {size}: more processes than slots; there are {available} ({given})"
        )
    taken: list[tuple[HostSlots, int]] = []
    left = size
    for host in hosts:
        count = min(host.slots, left)
        if count:
            taken.append((host, count))
        left -= count
    slots: list[SlotInfo] = []
    for host, count in taken:
        for local_rank in range(count):
            same = [other.name for other, n in taken if n > local_rank]
            slots.append(
                SlotInfo(
                    host=host.name,
                    rank=len(slots),
                    size=size,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=same.index(host.name),
                    cross_size=len(same),
                )
            )
    return slots


def in_order(host: HostSlots) -> list[tuple[int, str]]:
    """A key that sorts hosts by name, with numbers as numbers.

    Example:
        >>> hosts = [HostSlots("n-10", 1), HostSlots("n-9", 1)]
        >>> [host.name for host in sorted(hosts, key=in_order)]
        ['n-9', 'n-10']
    """
    pieces = re.split(r"([0-9]+)", host.name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def is_local(name: str) -> bool:
    """Whether `name` is this machine: loopback, its name, or an address of it."""
    if name in _LOOPBACK or name == socket.gethostname():
        return True
    if "@" in name:  # another user, even on this machine, needs ssh
        return False
    found = name_lookup.addresses(name)
    return any(_is_ours(family, address) for family, *_, address in found)


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    """An address is ours exactly if we can bind to it; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def without_aliases(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    """Hosts under the first of the names they have here: names of the same address.

    Two ranks of a machine with the same local_rank would share a GPU. Two users of a
    machine are two hosts.
    """
    if len(hosts) < 2:
        return list(hosts)
    name_lookup.ask(host.name.rpartition("@")[2] for host in hosts)
    known: dict[tuple[str, object], str] = {}

    def first_name(name: str) -> str:
        user, _, host = name.rpartition("@")
        found: set[object] = {a[0] for *_, a in name_lookup.addresses(host)}
        keys = [(user, each) for each in ({None} if is_local(name) else found)]
        first = next((known[key] for key in keys if key in known), name)
        known.update(dict.fromkeys(keys, first))
        return first

    return merged(HostSlots(first_name(host.name), host.slots) for host in hosts)


def own_addresses(remote: Sequence[str], interfaces: Sequence[str]) -> list[str]:
    """Addresses of this machine under which the `remote` hosts can reach it.

    Loopback alone if there is no remote host. The given interfaces if any. All that
    there are if `remote` is `[ANY]`, as nobody knows yet who will come. Otherwise the
    addresses from which packets to the remote hosts leave, and for names that only
    ssh can resolve every address of this machine but loopback.

    Raises:
        ValueError: naming an interface that does not exist or has no address.
    """
    if interfaces:
        try:
            return addresses.of_interfaces(",".join(interfaces))
        except ValueError as error:
            raise ValueError(f"--network-interfaces: {error}") from None
    if not remote:
        return [addresses.loopback()]
    if remote == [ANY]:
        return _every_address() or [addresses.loopback()]
    routed = [_address_towards(name.rpartition("@")[2]) for name in remote]
    found = [address for address in routed if address]
    if None in routed:
        found += _every_address()
    return list(dict.fromkeys(found)) or [addresses.loopback()]


def _every_address() -> list[str]:
    return [a for a in addresses.of_interfaces() if not addresses.is_loopback(a)]


def _address_towards(name: str) -> str | None:
    """Our address on the way to `name`; connecting a datagram socket sends nothing."""
    for family, kind, protocol, _, address in name_lookup.addresses(name):
        with (
            contextlib.suppress(OSError),
            socket.socket(family, kind, protocol) as probe,
        ):
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
