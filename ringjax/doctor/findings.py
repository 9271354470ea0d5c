"""Inputs and findings of the checks, and the formatting of findings for the user.

Hosts exchange the inputs and findings, without `HostContext.environ`, as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from ringjax.errors import HELP

OK, WARN, FAIL = "ok", "warn", "FAIL"
WORST = (OK, WARN, FAIL)  # all statuses, from best to worst
_COLOURS = {OK: 32, WARN: 33, FAIL: 31}
_INDENT = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check.

    Attributes:
        status: "ok", "warn" if a job runs but not well, or "FAIL" if a job would not
            run.
        mend: a command that repairs or avoids the problem.
        help: the section of docs/troubleshooting.md that explains the problem.
    """

    status: str
    text: str
    mend: str = ""
    help: str = ""

    @property
    def link(self) -> str:
        """The command that prints the section `help` of the documentation, or ""."""
        return f"{HELP} {self.help}" if self.help else ""

    def as_json(self) -> dict[str, str]:
        return dataclasses.asdict(self)


Row = tuple[str, str, Finding]  # name of the check, host ("" means all), finding


def ok(text: str) -> Finding:
    return Finding(OK, text)


def warn(text: str, mend: str, help_: str = "doctor") -> Finding:
    """Makes a warning: a job runs, but is slow, or other libraries would fail."""
    return Finding(WARN, text, mend, help_)


def fail(text: str, mend: str, help_: str = "doctor") -> Finding:
    """Makes a failure: a job would not start, or would run on the wrong hosts."""
    return Finding(FAIL, text, mend, help_)


def count(number: int, what: str) -> str:
    """Formats `number` with the noun `what`, in the plural if needed.

    Example:
        >>> count(1, "rank"), count(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


class InterfaceFacts(TypedDict):
    """A network interface of a host. An `mtu` of 0 means that the mtu is unknown."""

    addresses: list[str]
    mtu: int
    tunnel: bool


class Facts(TypedDict, total=False):
    """Facts about a host, for checks that compare hosts.

    Attributes:
        machine: an id of the machine, to detect one machine under two names.
        versions: versions of Python, packages and the GPU driver, by title.
        places: address and port of each server of `host_probe`.
    """

    hostname: str
    machine: str
    python: str
    versions: dict[str, str]
    interfaces: dict[str, InterfaceFacts]
    places: Sequence[tuple[str, int]]


class Call(TypedDict, total=False):
    """The result of connecting to one address of another host.

    If the connection failed, only the first two keys are set.

    Attributes:
        source: this host's address of the connection.
        large: whether many consecutive full packets arrive.
        offset: seconds by which the clock of the other host is ahead, with an error of
            at most half of `round_trip`, the duration of the shortest round trip.
    """

    address: str
    error: str
    source: str
    large: bool
    offset: float
    round_trip: float


@dataclass(frozen=True, kw_only=True)
class HostContext:
    """The description of a host and its job, which a host check receives.

    Attributes:
        name: name of the host in -H.
        ranks: number of ranks on the host.
        size: number of ranks of the whole job.
        hosts: names of all hosts.
        environ: environment of this process, which ranks would get, too.
    """

    name: str
    ranks: int
    size: int
    hosts: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether the job has no other host."""
        return len(self.hosts) == 1


@dataclass(kw_only=True)
class HostReport:
    """The report that one host has sent to the survey.

    Attributes:
        facts: facts about the host; empty if the survey did not reach the host.
        findings: findings of the host checks, by the name of the check.
        calls: results of connections to other hosts, by the name of the other host.
        trouble: the reason why there are no facts: a message of ssh or Python.
        code: the exit code that belongs to `trouble`.
    """

    name: str
    ranks: int
    facts: Facts = field(default_factory=Facts)
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    trouble: str = ""
    code: int = 0


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The reports of all hosts, which a job check receives.

    Attributes:
        reports: the reports by host, in the order of -H.
        is_local: whether ringrun would treat a host as this machine, by host.
    """

    reports: Mapping[str, HostReport]
    is_local: Mapping[str, bool] = field(default_factory=dict)

    @property
    def reached(self) -> list[HostReport]:
        """The reports of the hosts that the survey has reached."""
        return [report for report in self.reports.values() if report.facts]


# -- the output of `ringjax doctor` ----------------------------------------------------


def worst(rows: Iterable[Row]) -> str:
    return max((f.status for *_, f in rows), key=WORST.index, default=OK)


def _merge_hosts(rows: Iterable[Row], hosts: int) -> list[Row]:
    """Merges rows that differ only in their host; the new row names all their hosts."""
    found: dict[tuple[str, Finding], list[str]] = {}
    for check, host, finding in rows:
        found.setdefault((check, finding), []).append(host)
    merged = []
    for (check, finding), names in found.items():
        everywhere = "" in names or len(names) == hosts
        shown = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
        merged.append((check, "" if everywhere else ", ".join(shown), finding))
    return merged


def table(rows: list[Row], job: JobContext, *, colour: bool) -> str:
    """Returns the printed output: a line for each finding, and a table of versions."""
    merged = _merge_hosts(rows, len(job.reports))
    width = max((len(check) for check, *_ in merged), default=0)
    place = max((len(host) for _, host, _ in merged), default=0)
    lines = []
    for check, host, finding in merged:
        status = f"{finding.status:<4}"
        if colour:
            status = f"\x1b[{_COLOURS[finding.status]}m{status}\x1b[0m"
        where = f"  {host:<{place}}" if place else ""
        lines.append(f"{status}  {check:<{width}}{where}  {finding.text}".rstrip())
        if finding.mend:
            lines.append(f"{'':<{_INDENT}}mend: {finding.mend}")
        if finding.help:
            lines.append(f"{'':<{_INDENT}}help: {finding.link}")
    versions = _version_lines(job)
    last = _summary(rows)
    return "\n".join([*lines, *([""] if versions else []), *versions, "", last])


def differing_versions(hosts: Sequence[HostReport]) -> list[str]:
    """Returns the titles of the software whose versions differ between hosts."""
    versions = [report.facts["versions"] for report in hosts]
    titles = dict.fromkeys(title for found in versions for title in found)
    return [t for t in titles if len({found.get(t) for found in versions}) > 1]


def _version_lines(job: JobContext) -> list[str]:
    """Returns a table of versions, with a star where a host differs from the first."""
    hosts = job.reached
    if len(hosts) < 2:
        return []
    titles = list(dict.fromkeys(t for r in hosts for t in r.facts["versions"]))
    differing = differing_versions(hosts)
    rows = [["versions", *titles]]
    for report in hosts:
        row = [report.name]
        for title in titles:
            own = report.facts["versions"].get(title, "-")
            first = hosts[0].facts["versions"].get(title, "-")
            row.append(own + "*" * (title in differing and own != first))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _summary(rows: Iterable[Row]) -> str:
    counts = dict.fromkeys(WORST, 0)
    for *_, finding in rows:
        counts[finding.status] += 1
    if not (counts[WARN] or counts[FAIL]):
        return "All is well."
    parts = [f"{counts[s]} {s}" for s in (FAIL, WARN) if counts[s]]
    return f"{' and '.join(parts)}; each line above says what mends it."


def as_dict(rows: list[Row], job: JobContext) -> Mapping[str, object]:
    """Returns the JSON output: `status`, `checks`, and `versions` by host."""
    return {
        "status": worst(rows),
        "checks": [
            {"check": check, "host": host, **finding.as_json(), "help": finding.link}
            for check, host, finding in rows
        ],
        "versions": {r.name: r.facts["versions"] for r in job.reached},
    }
