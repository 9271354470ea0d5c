"""Tests of the output of `ringjax doctor`: tables, marks, links, and exit codes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.doctor import DOCTOR, DoctorRun, run_doctor
from support.launch import ROOT, environment

from ringjax.doctor import checks, findings, limits, network, software
from ringjax.doctor.findings import (
    Finding,
    HostContext,
    HostReport,
    JobContext,
    ok,
    warn,
)

# Warnings that are correct on the machines that run these tests.
TOLERATED = {"/dev/shm", "CPUs", "memory", "name", "trial", "processes"}


def one(*words: str, **more: object) -> DoctorRun:
    [found] = run_doctor(*words, **more)  # type: ignore[arg-type]
    return found


def test_text_output() -> None:
    words = [word for word in DOCTOR if word != "--json"]
    env = environment("doctor", {"NCCL_P2P_DISABLE": "1"})
    done = subprocess.run(
        [*words, "--no-trial"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = r"warn  NCCL +NCCL_P2P_DISABLE=1 turns a fast way off"
    [at] = [i for i, text in enumerate(lines) if re.fullmatch(said, text)]
    assert lines[at + 1].strip() == "mend: unset NCCL_P2P_DISABLE"
    assert re.search(r"\d warn; each line above says what mends it\.", lines[-1])


def _job(*hosts: str) -> JobContext:
    facts = {"versions": {"jax": "1"}, "machine": "m"}
    return JobContext(
        reports={h: HostReport(name=h, ranks=1, facts=dict(facts)) for h in hosts}
    )


def test_equal_findings_of_hosts_share_a_line() -> None:
    job = _job(*"abcdef")
    rows = [("memfd", name, ok("fine")) for name in "abcdef"]
    rows += [("name", name, warn("bad", "mend it")) for name in "abcde"]
    text = findings.table(rows, job, colour=False)
    assert text.count("fine") == text.count("bad") == 1
    assert "a, b, c, 2 more  bad" in text
    assert findings.worst(rows) == "warn"


def test_different_versions_are_marked() -> None:
    job = _job("a", "b")
    job.reports["b"].facts["versions"] = {"jax": "2", "torch": "3"}
    [(_, jax), (_, torch)] = software.alike(job)
    assert (jax.status, torch.status) == ("FAIL", "warn")
    text = findings.table([], job, colour=False)
    assert re.search(r"b +2\* +3\*", text)


def test_a_port_check_that_does_not_end() -> None:
    job = _job("a", "b")
    job.reports["b"].calls = {"a": [{"error": ""}]}
    (host, found), (_, fine) = network.ports(job)
    assert (host, found.status, fine.status) == ("a", "FAIL", "ok")
    assert "did not end" in found.text


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: HostContext) -> list[Finding]:
        raise KeyError(host.name)

    rows = (checks.Check("broken", of_host=broken),)  # type: ignore[arg-type]
    monkeypatch.setattr(checks, "CHECKS", rows)
    host = HostContext(name="one", ranks=1, size=1, hosts=["one"])
    [found] = checks.on_host(host)["broken"]
    assert found.status == "warn" and "KeyError: 'one'" in found.text


def test_limits_of_cgroup_v2(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    mount = "30 23 0:26 / /cg rw - cgroup2 cgroup rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    group = tmp_path / "cg/job"
    group.mkdir(parents=True)
    (tmp_path / "cg/cpu.max").write_text("max 100000\n")
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "pids.max").write_text("100\n")
    (group / "pids.current").write_text("90\n")
    assert limits.quota(tmp_path) == (1.5, group)
    assert limits.threads_left(tmp_path) == (10, group)
    (group / "pids.max").write_text("max\n")
    assert limits.threads_left(tmp_path)[0] == float("inf")


def test_every_finding_links_to_a_paragraph() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    heads = re.findall(r"(?m)^## (.*)$", page)
    anchors = {head.lower().replace(" ", "-") for head in heads}
    used = {"doctor"}  # the default
    for file in (ROOT / "ringjax" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and len(node.args) == 3:
                name = getattr(node.func, "id", "")
                if name in ("warn", "fail", "say"):
                    used |= set(re.findall(r"'([a-z-]+)'", ast.unparse(node.args[2])))
    assert {"unreachable", "startuperror", "without-an-error"} < used <= anchors


def test_the_ringjax_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["ringjax"] == "ringjax.__main__:main"
    words = [sys.executable, "-m", "ringjax"]
    done = subprocess.run([*words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout
    done = subprocess.run([*words, "nurse"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: ringjax COMMAND" in done.stderr
    done = subprocess.run(
        [*words, "doctor", "-H", "a:x"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "ringjax doctor: -H: slots of 'a'" in done.stderr
