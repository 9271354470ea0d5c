"""Surveys all hosts: ringrun's agents run host_probe.py twice on each host.

In the first run every host checks itself and listens for connections. In the second run
each host connects to all other hosts. The survey returns one report for each host, and
the checks of the job judge the reports.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ringjax.control import addresses
from ringjax.doctor.findings import Finding, HostReport
from ringjax.run import environ
from ringjax.run.console import Console
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Message
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.hosts.slots import HostSlots

_PROBE_TIMEOUT = 30.0  # seconds until a probe ends, in addition to the timeout of ssh
_OUTPUT_DELAY = 0.3  # seconds to wait for the last output of ssh after its exit
_MAX_ERROR = 2000  # most characters of error output of a host


class HostSurvey:
    """A survey of hosts, each with a number of ranks. `run` also ends the probes."""

    def __init__(self, places: Sequence[HostSlots], spec: JobSpec) -> None:
        self._places = places
        self._spec = spec
        self._token = secrets.token_hex(32)
        self._console = Console(0)
        self._agents = AgentPool(spec, self._console, self)
        self._results: dict[int, bytearray] = {}  # output by process number
        self._errors: dict[str, str] = {}  # error output, by host
        self._ended: set[int] = set()
        self.reports = {h.name: HostReport(name=h.name, ranks=h.slots) for h in places}

    def run(self) -> Mapping[str, HostReport]:
        """Runs the probe twice on each host. Returns the reports by host name."""
        timeout = self._spec.config.start_timeout + _PROBE_TIMEOUT
        try:
            self._agents.start()
            self._ask({h.name: self._look(h) for h in self._places}, 0)
            self._wait(timeout, self._looked)
            found = [r.name for r in self.reports.values() if r.facts]
            if len(found) > 1:
                first = len(self._places)
                self._ask({name: self._call(name) for name in found}, first)
                self._wait(timeout, lambda: self._called(found))
        finally:
            self._agents.end(1.0)
            self._agents.close(1.0)
        return self.reports

    def is_local(self) -> dict[str, bool]:
        """Returns for each host whether ringrun treats the host as this machine."""
        return {host.name: self._agents.is_local(host.name) for host in self._places}

    # -- orders to the hosts -----------------------------------------------------------

    def _look(self, host: HostSlots) -> Message:
        about = {
            "name": host.name,
            "ranks": host.slots,
            "size": sum(h.slots for h in self._places),
            "hosts": [h.name for h in self._places],
        }
        return {"do": "look", "host": about}

    def _call(self, name: str) -> Message:
        others = {
            r.name: r.facts["places"]
            for r in self.reports.values()
            if r.facts and r.name != name
        }
        return {"do": "call", "others": _without_loopback(others)}

    def _ask(self, orders: Mapping[str, Message], first: int) -> None:
        names = list(self.reports)
        for name, order in orders.items():
            argv = [sys.executable, "-P", "-m", "ringjax.doctor.host_probe"]
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
        deadline = time.monotonic() + _OUTPUT_DELAY
        while self._ended and time.monotonic() < deadline:
            self._agents.poll(0.05)
        self._note_troubles()

    def _looked(self) -> bool:
        return all(
            report.facts or number in self._ended
            for number, report in enumerate(self.reports.values())
        )

    def _called(self, names: Sequence[str]) -> bool:
        numbers = {n: i + len(self._places) for i, n in enumerate(self.reports)}
        return all(
            self.reports[name].calls or numbers[name] in self._ended for name in names
        )

    def _note_troubles(self) -> None:
        """Sets `trouble` of unreached hosts to the last line of ssh or a traceback."""
        for report in self.reports.values():
            output = self._errors.get(report.name, "").split("\n")
            last = [line.strip() for line in output if line.strip()][-1:]
            if last and not report.facts:
                report.trouble = last[0]

    # -- events of processes, from the agents: see `ProcessObserver` -------------------

    def started(self, number: int, pid: int) -> None:
        pass

    def wrote(self, number: int, stream: str, data: bytes) -> None:
        """Records the results of a probe, or the error output of ssh or Python."""
        if number < 0 or stream == "stderr":
            host = self._console.labels.get(number) or self._report(number).name
            text = self._errors.get(host, "") + data.decode(errors="replace")
            self._errors[host] = text[-_MAX_ERROR:]
        elif stream == "result":
            result = self._results.setdefault(number, bytearray())
            result.extend(data)
            if result.endswith(b"\n"):
                del self._results[number]
                self._record(self._report(number), json.loads(result))

    def _report(self, number: int) -> HostReport:
        return list(self.reports.values())[number % len(self._places)]

    @staticmethod
    def _record(report: HostReport, answer: Message) -> None:
        if "calls" in answer:
            report.calls = answer["calls"]
            return
        report.facts = answer["facts"]
        report.findings = {
            name: [Finding(**finding) for finding in found]
            for name, found in answer["findings"].items()
        }

    def exited(self, number: int, code: int, text: str) -> None:
        self._ended.add(number)
        report = self._report(number)
        report.code = code
        report.trouble = report.trouble or text

    def host_lost(self, numbers: Sequence[int], text: str) -> None:
        for number in numbers:
            self.exited(number, 255, text)


def _without_loopback(
    others: Mapping[str, Sequence[tuple[str, int]]],
) -> dict[str, list[tuple[str, int]]]:
    """Removes loopback addresses, because other hosts cannot reach them."""
    return {
        name: [place for place in places if not addresses.is_loopback(place[0])]
        for name, places in others.items()
    }
