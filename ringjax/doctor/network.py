"""Checks of the network: loopback, interfaces, ports both ways, packets, clocks.

What is looked at is what `calling.py` has found when every host called every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringjax.control import addresses
from ringjax.doctor.findings import (
    Finding,
    HostContext,
    HostReport,
    JobContext,
    fail,
    ok,
    warn,
)

_CLOCK = 0.5  # seconds between two clocks
_PORTS = 8  # of a rank for each other one, at most
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def loopback(host: HostContext) -> Iterator[Finding]:
    """ringrun and the ranks of one host meet there."""
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
    """The system has enough ports to give away: one or two for each pair of ranks."""
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
    """What is to be used exists, and there is something beside loopback to use."""
    asked = host.environ.get("RINGJAX_NETWORK_INTERFACES", "")
    asked = asked or host.environ.get("HOROVOD_GLOO_IFACE", "")
    known = addresses.by_interface()
    others = [name for name in known if name != "lo"]
    for name in filter(None, map(str.strip, asked.split(","))):
        if name not in known:
            text = (
                f"{name!r} does not exist or has no address; here is {', '.join(known)}"
            )
            mend = f"ringrun --network-interfaces {(others or ['lo'])[0]}"
            yield fail(text, mend, "startuperror")
    if not (host.alone or others):
        text = "no address but loopback's, and the job has other hosts"
        yield fail(text, "ip addr; sudo dhclient", "unreachable")


def _interface_of(report: HostReport, address: str) -> str:
    """The interface that has an address, "" if none has."""
    for name, about in report.facts["interfaces"].items():
        if address in about["addresses"]:
            return str(name)
    return ""


def _used(job: JobContext) -> dict[str, dict[str, str]]:
    """By host and other host: the interface from which it reaches it."""
    return {
        report.name: {
            other: _interface_of(report, answered[0]["from"])
            for other, calls in report.calls.items()
            if (answered := [c for c in calls if not c["error"]])
        }
        for report in job.reached
    }


def _best(job: JobContext) -> str:
    """The interfaces by which hosts reach each other, for --network-interfaces."""
    names = (name for used in _used(job).values() for name in used.values())
    found = dict.fromkeys(n for n in names if n and not n.startswith(("docker", "br-")))
    return ",".join(found) or "eth0"


def interfaces(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """No address is on two hosts, no tunnel and no odd packet size on the way."""
    owners: dict[tuple[str, str], list[str]] = {}
    for report in job.reached:
        for name, about in report.facts["interfaces"].items():
            for address in about["addresses"]:
                if not addresses.is_loopback(address) and name in _in_use(report):
                    owners.setdefault((name, address), []).append(report.name)
    for (name, address), hosts in owners.items():
        if len({job.reports[h].facts["machine"] for h in hosts}) > 1:
            text = (
                f"{name} is {address} on {', '.join(hosts)}: who calls it calls itself"
            )
            mend = f"ringrun --network-interfaces {_best(job)}"
            yield "", warn(text, mend, "unreachable")
    yield from _ways(job)


def _in_use(report: HostReport) -> set[str]:
    """The interfaces whose addresses ranks there would give away."""
    given = {address for address, _ in report.facts.get("places", ())}
    about: dict[str, Any] = report.facts["interfaces"]
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
    """Every host reaches every other one on a port that the system has chosen."""
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
            if tried:  # else another check says why it has no address
                mend = _opened(report, other, calls)
                text = f"does not reach {other} ({tried})"
                yield report.name, fail(text, mend, "unreachable")
    if pairs:
        yield "", ok(f"{pairs} of {pairs} ways open")


def _opened(report: HostReport, other: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """The command that opens the way from a host to another one."""
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
    """What passes in small packets passes in full ones."""
    for report in job.reached:
        for other, calls in report.calls.items():
            for call in calls:
                if not call["error"] and not call["large"]:
                    name = _interface_of(report, call["from"]) or "eth0"
                    text = (
                        f"{other} at {call['address']} answers, but full packets get "
                        f"lost: something on the way takes only smaller ones"
                    )
                    mend = f"sudo ip link set dev {name} mtu 1400"
                    yield report.name, fail(text, mend, "unreachable")


def clocks(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """They agree, as far as the first host can tell."""
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
        if abs(offset) - error > _CLOCK:
            ahead = f"{abs(offset):.3g} s {'ahead' if offset > 0 else 'behind'}"
            text = f"its clock is {ahead} (± {error:.1g} s): logs and files mislead"
            mend = "sudo chronyc makestep || sudo systemctl restart systemd-timesyncd"
            yield other, warn(text, mend)
    if worst <= _CLOCK:
        yield "", ok(f"within {worst:.2g} s of {first.name}'s")
