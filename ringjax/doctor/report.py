"""What a survey has found, as a table to read or as JSON. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ringjax.doctor import software
from ringjax.doctor.findings import OK, WORST, Finding, JobContext, as_json

Row = tuple[str, str, Finding]  # check, host or "", finding
_COLOURS = {"ok": 32, "warn": 33, "FAIL": 31}
_INDENT = 6


def worst(rows: Iterable[Row]) -> str:
    """The worst status."""
    return max((f.status for *_, f in rows), key=WORST.index, default=OK)


def _merged(rows: Iterable[Row], hosts: int) -> list[tuple[str, str, Finding]]:
    """Rows that say the same of several hosts become one; "" stands for all."""
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
    """A line for each finding, below it what mends it; and the hosts' versions."""
    merged = _merged(rows, len(job.reports))
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
    versions = _versions(job)
    return "\n".join([*lines, *([""] if versions else []), *versions, "", _sum(rows)])


def _versions(job: JobContext) -> list[str]:
    """A row for each host; what is not the first one's is marked."""
    hosts = job.reached
    if len(hosts) < 2:
        return []
    titles = list(dict.fromkeys(t for r in hosts for t in r.facts["versions"]))
    differing = software.differences(hosts)
    rows = [["versions", *titles]]
    for report in hosts:
        row = [report.name]
        for title in titles:
            mine = report.facts["versions"].get(title, "-")
            first = hosts[0].facts["versions"].get(title, "-")
            row.append(mine + "*" * (title in differing and mine != first))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _sum(rows: Iterable[Row]) -> str:
    counts = dict.fromkeys(WORST, 0)
    for *_, finding in rows:
        counts[finding.status] += 1
    if not (counts["warn"] or counts["FAIL"]):
        return "All is well."
    parts = [f"{counts[s]} {s}" for s in ("FAIL", "warn") if counts[s]]
    return f"{' and '.join(parts)}; each line above says what mends it."


def as_dict(rows: list[Row], job: JobContext) -> Mapping[str, Any]:
    """For --json: `status`, `checks` and by host `versions`."""
    return {
        "status": worst(rows),
        "checks": [
            {"check": check, "host": host, **as_json(finding), "help": finding.link}
            for check, host, finding in rows
        ],
        "versions": {r.name: r.facts["versions"] for r in job.reached},
    }
