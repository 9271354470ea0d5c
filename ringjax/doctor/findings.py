"""What a check sees, and what it says: the host that it runs on, the job, a finding.

Records only. Everything here but `HostContext.environ` travels between hosts as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringjax.errors import HELP

OK, WARN, FAIL = "ok", "warn", "FAIL"
WORST = (OK, WARN, FAIL)  # the last one counts


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        status: "ok"; "warn", a job runs but not well; "FAIL", it would not run.
        text: what is the case.
        mend: a command that mends it, or does without.
        help: the paragraph of docs/troubleshooting.md that explains it.
    """

    status: str
    text: str
    mend: str = ""
    help: str = ""

    @property
    def link(self) -> str:
        """The command that prints that paragraph; nothing if all is well."""
        return f"{HELP} {self.help}" if self.help else ""


def ok(text: str) -> Finding:
    """All is well."""
    return Finding(OK, text)


def warn(text: str, mend: str, help_: str = "doctor") -> Finding:
    """A job runs, but something will be slow, or fail in other libraries."""
    return Finding(WARN, text, mend, help_)


def fail(text: str, mend: str, help_: str = "doctor") -> Finding:
    """A job would not start, or not where it should."""
    return Finding(FAIL, text, mend, help_)


def count(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> count(1, "rank"), count(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class HostContext:
    """What a check of one host knows.

    Attributes:
        name: what the host is called in -H.
        ranks: how many it is to have; `size` is that of the whole job.
        hosts: the names of all hosts.
        environ: of this process, which is that of the ranks.
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
    """What a host has said.

    Attributes:
        facts: see `facts.collect`; empty if the host could not be reached.
        findings: of the checks that ran there, by their names.
        calls: by the other host's name what `calling.call` has found.
        trouble: why there are no facts, in the words of ssh or Python.
        code: the exit code that came with it.
    """

    name: str
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    trouble: str = ""
    code: int = 0


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """What a check of the whole job knows: the hosts, in the order of -H.

    Attributes:
        is_local: by host, whether ringrun would take it for this machine.
    """

    reports: Mapping[str, HostReport]
    is_local: Mapping[str, bool] = field(default_factory=dict)

    @property
    def reached(self) -> list[HostReport]:
        """The hosts that have answered."""
        return [report for report in self.reports.values() if report.facts]


def as_json(finding: Finding) -> dict[str, str]:
    """A finding for another host, or for --json."""
    return dataclasses.asdict(finding)
