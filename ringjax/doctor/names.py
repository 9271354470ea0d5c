"""Checks of names: what a host calls itself, and what this one takes the others for.

ringjax itself hands addresses around; other libraries of a job ask for names.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from ringjax.control import addresses
from ringjax.doctor.findings import Finding, HostContext, JobContext, fail, ok, warn

_SLOW = 1.0  # seconds of a look-up


def _look_up(name: str) -> list[str]:
    """The addresses of a name; none if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _edit_hosts(name: str, address: str = "") -> str:
    """The command that has /etc/hosts take a name away from loopback.

    Only the word goes, as localhost may be in the same line; and the file stays the
    same one, because a container does not allow to replace it.

    Args:
        address: what it is to be instead; then no other line keeps it either.
    """
    lines = f' "{address} {name}"' if address else ""
    where = "" if address else "/^127\\./"
    word = name.replace(".", "\\.")
    edit = f"{where}s/[[:space:]]{word}([[:space:]]|$)/\\1/g"
    return (
        f'sudo sh -c \'x=$(sed -E "{edit}" /etc/hosts) && '
        f'printf "%s\\n" "$x"{lines} > /etc/hosts\''
    )


def _hosts_line(name: str) -> str:
    """The command that gives this host's name an address."""
    others = [a for a in addresses.of_interfaces() if not addresses.is_loopback(a)]
    return _edit_hosts(name, next(iter(others), "127.0.1.1"))


def is_ours(address: str) -> bool:
    """Whether this host has an address: it has what it can listen on."""
    try:
        addresses.listen(address).close()
    except OSError:
        return False
    return True


def own_name(host: HostContext) -> Iterator[Finding]:
    """Its name has an address, and with other hosts one that they can reach."""
    name = socket.gethostname()
    start = time.monotonic()
    found = _look_up(name)
    seconds = time.monotonic() - start
    if not found:
        yield warn(
            f"{name!r} has no address, and JAX and Gloo ask for it", _hosts_line(name)
        )
    elif not host.alone and all(map(addresses.is_loopback, found)):
        where = ", ".join(found)
        text = (
            f"{name!r} resolves to {where}: others that ask it would get that address"
        )
        yield warn(text, _hosts_line(name))
    elif not any(is_ours(address) for address in found):
        text = f"{name!r} resolves to {', '.join(found)}, which is not this host"
        yield warn(text, _hosts_line(name))
    else:
        yield ok(f"{name} is {', '.join(found)}")
    if seconds > _SLOW:
        text = (
            f"looking {name!r} up took {seconds:.1f} s: a name server does not answer"
        )
        yield warn(text, _hosts_line(name))


def other_names(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """No other host is taken for this machine, and no two are the same one."""
    machines: dict[str, str] = {}
    for report in job.reports.values():
        name = report.name.rpartition("@")[2]
        mine = name in ("localhost", socket.gethostname(), "127.0.0.1", "::1")
        found = _look_up(name)
        if (
            job.is_local.get(report.name)
            and not mine
            and any(map(addresses.is_loopback, found))
        ):
            text = f"resolves to {found[0]}, this machine: its ranks would run here"
            yield report.name, fail(text, _edit_hosts(name))
            continue
        machine = report.facts.get("machine")
        if machine and machine in machines:
            text = f"is the same machine as {machines[machine]}"
            yield report.name, warn(text, f"ringrun -H {machines[machine]}:N")
        elif machine:
            machines[machine] = report.name
