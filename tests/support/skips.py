"""A pytest plugin that lists the skipped tests by reason at the end of a run.

tests/conftest.py registers it. `pytest -rs` lists them by file.
"""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints one line for each reason, the most frequent first."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(map(_reason, reports))
    if not reasons:
        return
    terminalreporter.write_sep("=", f"{len(reports)} skipped, by reason")
    for reason, count in sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0])):
        example = next(r.nodeid for r in reports if _reason(r) == reason)
        terminalreporter.write_line(f"{count:4} {reason} ({example})")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the reason of a skip. The report holds a file, a line and the reason."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return " ".join(str(text).removeprefix("Skipped: ").split()) or "no reason"
