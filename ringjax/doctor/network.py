"""Checks the network: host names, loopback, interfaces, ports, packets, clocks.

ringjax sends addresses to ranks, but other libraries of a job look up names. The job
checks use the results of the connections between all hosts (`host_probe.probe_all`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringjax.control import addresses
from ringjax.doctor.findings import (
    Call,
    Finding,
    HostContext,
    HostReport,
    JobContext,
    fail,
    ok,
    warn,
)

_SLOW_LOOKUP = 1.0  # seconds; a longer lookup of a name is slow
_MAX_OFFSET = 0.5  # most seconds between two clocks
_PORTS = 8  # most ports that a rank uses for each other rank
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _look_up(name: str) -> list[str]:
    """Returns the addresses of a host name, or [] if the name has no address."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _edit_hosts(name: str, address: str = "") -> str:
    """Returns a command that edits /etc/hosts, so that `name` is no loopback address.

    The command removes only the name from a line, because the line may also contain
    localhost. The command writes into the existing file, because a container cannot
    replace the file. If `address` is given, the name gets this address and leaves all
    other lines.
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
    """Returns a command that adds this host's name to /etc/hosts, with an address."""
    others = [a for a in addresses.of_interfaces() if not addresses.is_loopback(a)]
    return _edit_hosts(name, next(iter(others), "127.0.1.1"))


def is_ours(address: str) -> bool:
    """Returns whether `address` belongs to this host, so that a socket can bind it."""
    try:
        addresses.listen(address).close()
    except OSError:
        return False
    return True


def own_name(host: HostContext) -> Iterator[Finding]:
    """Checks that this host's own name has an address that other hosts can reach."""
    name = socket.gethostname()
    start = time.monotonic()
    found = _look_up(name)
    seconds = time.monotonic() - start
    named, problem = f"{name!r} resolves to {', '.join(found)}", ""
    if not found:
        problem = f"{name!r} has no address, and JAX and Gloo ask for it"
    elif not host.alone and all(map(addresses.is_loopback, found)):
        problem = f"{named}: others that ask it would get that address"
    elif not any(is_ours(address) for address in found):
        problem = f"{named}, which is not this host"
    if problem:
        yield warn(problem, _hosts_line(name))
    else:
        yield ok(f"{name} is {', '.join(found)}")
    if seconds > _SLOW_LOOKUP:
        text = f"looking {name!r} up took {seconds:.1f} s"
        yield warn(f"{text}: a name server does not answer", _hosts_line(name))


def other_names(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks for host names that resolve to this machine, or to one machine twice."""
    machines: dict[str, str] = {}
    for report in job.reports.values():
        name = report.name.rpartition("@")[2]
        mine = name in ("localhost", socket.gethostname(), "127.0.0.1", "::1")
        found = _look_up(name)
        is_loopback = any(map(addresses.is_loopback, found))
        if job.is_local.get(report.name) and not mine and is_loopback:
            text = f"resolves to {found[0]}, this machine: its ranks would run here"
            yield report.name, fail(text, _edit_hosts(name))
            continue
        machine = report.facts.get("machine")
        if machine and machine in machines:
            text = f"is the same machine as {machines[machine]}"
            yield report.name, warn(text, f"ringrun -H {machines[machine]}:N")
        elif machine:
            machines[machine] = report.name


def loopback(host: HostContext) -> Iterator[Finding]:
    """Checks the loopback interface, which ringrun and ranks of one host use."""
    here = addresses.loopback()
    try:
        with addresses.listen(here) as sock:
            addresses.connect((here, sock.getsockname()[1]), 1.0).close()
    except OSError as error:
        text = f"this host does not reach itself at {here}: {error.strerror or error}"
        yield fail(text, "sudo ip link set lo up", "startuperror")
    else:
        yield ok(here)


def port_range(host: HostContext) -> Iterator[Finding]:
    """Checks that the system has enough ephemeral ports for all pairs of ranks."""
    needed = _PORTS * max(1, host.ranks) * (1 if host.alone else host.size)
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return
    if high - low + 1 < needed:
        text = f"{high - low + 1} ports for calls to others; {needed} may be needed"
        mend = 'sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
        yield warn(text, mend, "unreachable")


def chosen_interfaces(host: HostContext) -> Iterator[Finding]:
    """Checks that the chosen interfaces exist, and that one is not loopback."""
    asked = host.environ.get("RINGJAX_NETWORK_INTERFACES", "")
    asked = asked or host.environ.get("HOROVOD_GLOO_IFACE", "")
    known = addresses.by_interface()
    others = [name for name in known if name != "lo"]
    for name in filter(None, map(str.strip, asked.split(","))):
        if name not in known:
            text = f"{name!r} does not exist or has no address"
            text += f"; here is {', '.join(known)}"
            mend = f"ringrun --network-interfaces {(others or ['lo'])[0]}"
            yield fail(text, mend, "startuperror")
    if not (host.alone or others):
        text = "no address but loopback's, and the job has other hosts"
        yield fail(text, "ip addr; sudo dhclient", "unreachable")


def _interface_of(report: HostReport, address: str) -> str:
    """Returns the interface of a host that has `address`; "" if there is none."""
    for name, about in report.facts["interfaces"].items():
        if address in about["addresses"]:
            return str(name)
    return ""


def _used(job: JobContext) -> dict[str, dict[str, str]]:
    """Returns, for each pair of hosts, the interface that connects them."""
    return {
        report.name: {
            other: _interface_of(report, answered[0]["source"])
            for other, calls in report.calls.items()
            if (answered := [c for c in calls if not c["error"]])
        }
        for report in job.reached
    }


def _best(job: JobContext) -> str:
    """Returns the interfaces between hosts, as a value of --network-interfaces."""
    names = (name for used in _used(job).values() for name in used.values())
    found = dict.fromkeys(n for n in names if n and not n.startswith(("docker", "br-")))
    return ",".join(found) or "eth0"


def interfaces(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks for tunnels, unequal packet sizes, and one address on several hosts."""
    owners: dict[tuple[str, str], list[str]] = {}
    for report in job.reached:
        for name, about in report.facts["interfaces"].items():
            for address in about["addresses"]:
                if not addresses.is_loopback(address) and name in _in_use(report):
                    owners.setdefault((name, address), []).append(report.name)
    for (name, address), hosts in owners.items():
        if len({job.reports[h].facts["machine"] for h in hosts}) > 1:
            text = f"{name} is {address} on {', '.join(hosts)}"
            text += ": who calls it calls itself"
            mend = f"ringrun --network-interfaces {_best(job)}"
            yield "", warn(text, mend, "unreachable")
    yield from _ways(job)


def _in_use(report: HostReport) -> set[str]:
    """Returns the interfaces whose addresses the ranks of a host would publish."""
    given = {address for address, _ in report.facts.get("places", ())}
    about = report.facts["interfaces"]
    return {n for n, found in about.items() if given & set(found["addresses"])}


def _ways(job: JobContext) -> Iterator[tuple[str, Finding]]:
    sizes: dict[int, str] = {}
    for host, used in _used(job).items():
        for name in dict.fromkeys(filter(None, used.values())):
            about = job.reports[host].facts["interfaces"][name]
            sizes.setdefault(about["mtu"], f"{name} of {host}")
            if about["tunnel"]:
                text = f"{name}, a tunnel, is the way to {', '.join(used)}: slow"
                mend = "ip route get ADDRESS; ringrun --network-interfaces eth0"
                yield host, warn(text, mend, "unreachable")
            else:
                yield host, ok(f"{name}, mtu {about['mtu']}")
    sizes.pop(0, None)
    if len(sizes) > 1:
        each = ", ".join(f"{size} on {where}" for size, where in sizes.items())
        name = sizes[max(sizes)].partition(" of ")[0]
        mend = f"sudo ip link set dev {name} mtu {min(sizes)}"
        yield "", warn(f"packets differ: mtu {each}", mend, "unreachable")


def ports(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks that every host can connect to an ephemeral port of every other host."""
    pairs = 0
    for report in job.reached:
        if len(job.reached) > 1 and not report.calls:
            text = f"its calls to the others did not end {report.trouble}".rstrip()
            yield report.name, fail(text, f"ssh {report.name} uptime", "unreachable")
        for other, calls in report.calls.items():
            if any(not call["error"] for call in calls):
                pairs += 1
                continue
            tried = "; ".join(f"{call['address']}: {call['error']}" for call in calls)
            if tried:  # otherwise another check has failed
                mend = _opened(report, other, calls)
                text = f"does not reach {other} ({tried})"
                yield report.name, fail(text, mend, "unreachable")
    if pairs:
        yield "", ok(f"{pairs} of {pairs} ways open")


def _opened(report: HostReport, other: str, calls: Sequence[Call]) -> str:
    """Returns a firewall command that lets the host of `report` connect to `other`."""
    if not any(call["error"] in ("timed out", "Connection refused") for call in calls):
        return f"on {report.name}: ip route get {calls[0]['address']}"
    mine = [
        address
        for name in _in_use(report)
        for address in report.facts["interfaces"][name]["addresses"]
        if not addresses.is_loopback(address)
    ]
    source = next(iter(mine), report.name)
    return f"on {other}: sudo ufw allow from {source}; ip route get {source}"


def large_messages(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks that full-size packets arrive wherever small packets arrive."""
    for report in job.reached:
        for other, calls in report.calls.items():
            for call in calls:
                if not call["error"] and not call["large"]:
                    name = _interface_of(report, call["source"]) or "eth0"
                    text = (
                        f"{other} at {call['address']} answers, but full packets get "
                        f"lost: something on the way takes only smaller ones"
                    )
                    mend = f"sudo ip link set dev {name} mtu 1400"
                    yield report.name, fail(text, mend, "unreachable")


def clocks(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks that the clocks of all hosts agree with the first host's clock."""
    if len(job.reached) < 2:
        return
    first = job.reached[0]
    worst = 0.0
    for other, calls in first.calls.items():
        answered = [call for call in calls if not call["error"]]
        if not answered:
            continue
        call = min(answered, key=lambda c: float(c["round_trip"]))
        offset, error = float(call["offset"]), float(call["round_trip"]) / 2
        worst = max(worst, abs(offset) + error)
        if abs(offset) - error > _MAX_OFFSET:
            ahead = f"{abs(offset):.3g} s {'ahead' if offset > 0 else 'behind'}"
            text = f"its clock is {ahead} (± {error:.1g} s): logs and files mislead"
            mend = "sudo chronyc makestep || sudo systemctl restart systemd-timesyncd"
            yield other, warn(text, mend)
    if worst <= _MAX_OFFSET:
        yield "", ok(f"within {worst:.2g} s of {first.name}'s")
