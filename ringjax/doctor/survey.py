"""Asks all hosts: has ringrun's agents run host.py there, twice, and collects answers.

First every host looks at itself and listens, then each calls all others. Judges
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.control import addresses
from ringjax.doctor.findings import Finding, HostReport
from ringjax.run import environ
from ringjax.run.console import Console
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.hosts.slots import HostSlots

_LOOK = 30.0  # seconds beyond those that ssh may take to connect
_AFTER = 0.3  # for what ssh has still to say when it has ended
_MOST = 2000  # characters of it


class HostSurvey:
    """One survey of some hosts; `run` makes it and leaves nothing behind.

    Args:
        places: the hosts and how many ranks each is to have.
        spec: how they are reached, and the environment of the ranks.
    """

    def __init__(self, places: Sequence[HostSlots], spec: JobSpec) -> None:
        self._places = places
        self._spec = spec
        self._token = secrets.token_hex(32)
        self._console = Console(0)
        self._agents = AgentPool(spec, self._console, self)
        self._said: dict[int, bytearray] = {}  # by the number of a process
        self._errors: dict[str, str] = {}  # by host
        self._gone: set[int] = set()
        self.reports = {h.name: HostReport(name=h.name, ranks=h.slots) for h in places}

    def run(self) -> Mapping[str, HostReport]:
        """Ask, and wait for the answers or for the time that they may take."""
        patience = self._spec.start_timeout + _LOOK
        try:
            self._agents.start()
            self._ask({h.name: self._look(h) for h in self._places}, 0)
            self._wait(patience, self._looked)
            found = [r.name for r in self.reports.values() if r.facts]
            if len(found) > 1:
                first = len(self._places)
                self._ask({name: self._call(name) for name in found}, first)
                self._wait(patience, lambda: self._called(found))
        finally:
            self._agents.end(1.0)
            self._agents.close(1.0)
        return self.reports

    def is_local(self) -> dict[str, bool]:
        """By host, whether ringrun takes it for this machine."""
        return {host.name: self._agents.is_local(host.name) for host in self._places}

    # What is asked.

    def _look(self, host: HostSlots) -> dict[str, Any]:
        about = {
            "name": host.name,
            "ranks": host.slots,
            "size": sum(h.slots for h in self._places),
            "hosts": [h.name for h in self._places],
        }
        return {"do": "look", "host": about}

    def _call(self, name: str) -> dict[str, Any]:
        others = {
            r.name: r.facts["places"]
            for r in self.reports.values()
            if r.facts and r.name != name
        }
        return {"do": "call", "others": _without_loopback(others)}

    def _ask(self, orders: Mapping[str, dict[str, Any]], first: int) -> None:
        names = list(self.reports)
        for name, order in orders.items():
            argv = [sys.executable, "-P", "-m", "ringjax.doctor.host"]
            process = {
                "id": first + names.index(name),
                "argv": argv,
                "env": {"PYTHONPATH": environ.agent_path()},
            }
            payload = json.dumps({**order, "token": self._token}).encode()
            self._agents.spawn(name, [process], self._spec.env, payload)

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self._agents.poll(0.1)
        deadline = time.monotonic() + _AFTER
        while self._gone and time.monotonic() < deadline:
            self._agents.poll(0.05)
        self._note_troubles()

    def _looked(self) -> bool:
        return all(
            report.facts or number in self._gone
            for number, report in enumerate(self.reports.values())
        )

    def _called(self, names: Sequence[str]) -> bool:
        numbers = {n: i + len(self._places) for i, n in enumerate(self.reports)}
        return all(
            self.reports[name].calls or numbers[name] in self._gone for name in names
        )

    def _note_troubles(self) -> None:
        """The last line of ssh, or of a traceback, is the reason."""
        for report in self.reports.values():
            said = self._errors.get(report.name, "").split("\n")
            last = [line.strip() for line in said if line.strip()][-1:]
            if last and not report.facts:
                report.trouble = last[0]

    # What the fleet reports.

    def started(self, name: int, pid: int) -> None:
        """Nothing to note."""

    def wrote(self, name: int, stream: str, data: bytes) -> None:
        """Keeps an answer, and what ssh or Python complain about."""
        if name < 0 or stream == "stderr":
            host = self._console.labels.get(name) or self._report(name).name
            text = self._errors.get(host, "") + data.decode(errors="replace")
            self._errors[host] = text[-_MOST:]
        elif stream == "result":
            self._said.setdefault(name, bytearray()).extend(data)
            if self._said[name].endswith(b"\n"):
                self._answered(self._report(name), json.loads(self._said.pop(name)))

    def _report(self, name: int) -> HostReport:
        return list(self.reports.values())[name % len(self._places)]

    @staticmethod
    def _answered(report: HostReport, answer: Mapping[str, Any]) -> None:
        if "calls" in answer:
            report.calls = answer["calls"]
            return
        report.facts = answer["facts"]
        report.findings = {
            name: [Finding(**finding) for finding in found]
            for name, found in answer["findings"].items()
        }

    def exited(self, name: int, code: int, text: str) -> None:
        """Notes why there will be no answer."""
        self._end(name, code, text)

    def host_lost(self, names: Sequence[int], text: str) -> None:
        """Notes that a host was not reached, or no more."""
        for name in names:
            self._end(name, 255, text)

    def _end(self, name: int, code: int, text: str) -> None:
        self._gone.add(name)
        report = self._report(name)
        report.code = code
        report.trouble = report.trouble or text


def _without_loopback(
    others: Mapping[str, Sequence[Sequence[Any]]],
) -> dict[str, list[Sequence[Any]]]:
    """Addresses that another host may call."""
    return {
        name: [place for place in places if not addresses.is_loopback(place[0])]
        for name, places in others.items()
    }


def spec_of(
    variables: Mapping[str, str], changes: Mapping[str, str], **given: Any
) -> JobSpec:
    """How hosts are reached, as ringrun does it; `given` are fields of `JobSpec`."""
    env = environ.for_ranks(variables, changes)
    spec = JobSpec(command=(), env=env, start_timeout=10.0)
    return dataclasses.replace(spec, **given)
