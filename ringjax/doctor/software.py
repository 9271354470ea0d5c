"""Checks of software: ssh, the native core, versions, settings."""

from __future__ import annotations

import glob
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ringjax import config
from ringjax.doctor.findings import (
    Finding,
    HostContext,
    HostReport,
    JobContext,
    differing_versions,
    fail,
    ok,
    warn,
)
from ringjax.settings.unknown_variables import unknown_variable_warnings

# Names of distributions by the title of their column.
DISTRIBUTIONS = {
    "ringjax": ("ringjax",),
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
# Patterns of messages of ssh, a shell or Python, each with an explanation and a
# command.
_REASONS = (
    (
        r"Permission denied( \(|, please)",
        "ssh is not let in without a question",
        "ssh-copy-id {host}",
    ),
    (
        r"[Hh]ost key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "ssh does not trust the key that the host has now",
        "ssh-keygen -R {name} && ssh {host} true",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        "the name has no address here",
        'echo "ADDRESS {name}" | sudo tee -a /etc/hosts',
    ),
    (
        r"Connection refused",
        "no ssh server listens there",
        "on {name}: sudo systemctl enable --now ssh; another port is ringrun -p PORT",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "the host is not reached",
        "ping -c 1 {name}; ip route get ADDRESS",
    ),
    (
        r"ssh ended \(127\)",
        "there is no ssh client on this machine",
        "sudo apt-get install openssh-client",
    ),
    (
        r"No module named '?(ringjax|\w+)",
        "Python is there, but not what it needs",
        "ssh {host} {python} -m pip install ringjax=={version}",
    ),
    (
        r"(?i)no such file or directory|not found|permission denied",
        "this Python is not at the same path there (a shell without a terminal reads "
        "no .bashrc, activates nothing)",
        "ssh {host} ls -l {python}",
    ),
)


def reached(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks that ringrun reaches each host, and finds Python and ringjax there."""
    others = [r for r in job.reports.values() if not job.is_local.get(r.name)]
    for report in others:
        if report.facts:
            yield report.name, ok("reached, and ringjax is there")
        else:
            yield report.name, _unreached(report)
    for report in job.reports.values():
        if job.is_local.get(report.name) and not report.facts:
            text = f"the checks did not run here: {report.trouble}"
            yield (
                report.name,
                fail(text, f"{sys.executable} -m ringjax.doctor", "doctor"),
            )


def _unreached(report: HostReport) -> Finding:
    named = {
        "host": shlex.quote(report.name),
        "name": report.name.rpartition("@")[2],
        "python": sys.executable,
        "version": _installed("ringjax") or "",
    }
    for pattern, what, command in _REASONS:
        if re.search(pattern, report.trouble):
            return fail(f"{what}: {report.trouble}", command.format(**named))
    text = report.trouble or f"no answer (exit code {report.code})"
    return fail(text, f"ssh -v {named['host']} {sys.executable} --version")


def versions() -> dict[str, str]:
    """Returns the versions of all software that must be equal on all hosts."""
    found = {"Python": platform.python_version()}
    for title, names in DISTRIBUTIONS.items():
        for name in names:
            try:
                found[title] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    for file in glob.glob("/proc/driver/nvidia/version"):
        words = Path(file).read_text().split()
        found["driver"] = next((w for w in words if w[:1].isdigit() and "." in w), "?")
    return found


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def core(host: HostContext) -> Iterator[Finding]:
    """Checks that the native core loads with this Python, processor and C library."""
    try:
        from ringjax import _native

        yield ok(f"ringjax {_native.version()}")
    except Exception as error:
        text = f"the native core does not load: {error}"
        mend = f"{sys.executable} -m pip install --force-reinstall --no-deps ringjax"
        yield fail(text, mend, "startuperror")


def _number(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (0, 10, 2) of 0.10.2rc1."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def fitting(host: HostContext) -> Iterator[Finding]:
    """Checks that ringjax supports this jax, and that jaxlib fits jax."""
    jax, jaxlib = _installed("jax"), _installed("jaxlib")
    if jax is None or jaxlib is None:
        text = f"{'jax' if jax is None else 'jaxlib'} is not installed"
        yield warn(text, f"{sys.executable} -m pip install jax")
        return
    wanted = _wanted()
    tests = {"<": lambda a, b: a < b, ">=": lambda a, b: a >= b}
    for sign, version in re.findall(r"(<|>=)([\d.]+)", wanted):
        if not tests[sign](_number(jax), _number(version)):
            mend = f"{sys.executable} -m pip install '{wanted}'"
            yield fail(f"jax {jax}, and ringjax takes {wanted}", mend, "startuperror")
    if _number(jax)[:2] != _number(jaxlib)[:2]:
        mend = f"{sys.executable} -m pip install jax=={jax} jaxlib=={jax}"
        yield fail(f"jax {jax} with jaxlib {jaxlib}", mend, "startuperror")


def _wanted() -> str:
    """Returns the requirement of ringjax, such as "jax<0.13,>=0.10.2"."""
    try:
        needs = metadata.requires("ringjax") or []
    except metadata.PackageNotFoundError:  # ringjax is a checkout that is not installed
        needs = []
    return next((need for need in needs if re.match(r"jax[<>=]", need)), "jax")


def alike(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks that all hosts have equal versions."""
    hosts = job.reached
    if len(hosts) < 2:
        return
    differing = differing_versions(hosts)
    for title in differing:
        each = {r.facts["versions"].get(title, "none") for r in hosts}
        text = f"{title} differs: {', '.join(sorted(each))}"
        most = hosts[0].facts["versions"].get(title)
        name = DISTRIBUTIONS.get(title, (title,))[0]
        mend = f"on all hosts: {sys.executable} -m pip install {name}=={most}"
        if title in ("Python", "driver"):
            mend = f"install the same {title} on all hosts"
        if title in ("ringjax", "jax", "jaxlib", "NCCL"):
            yield "", fail(text, mend, "startuperror")
        else:
            yield "", warn(text, mend, "startuperror")
    if not differing:
        yield "", ok("alike")


def settings(host: HostContext) -> Iterator[Finding]:
    """Checks that all settings of ringjax are valid and spelt correctly."""
    try:
        config.Config.from_env(host.environ)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        yield fail(str(error), f"unset {name}; {sys.executable} -m ringjax.config")
    for sentence in unknown_variable_warnings(host.environ):
        name = sentence.partition(" ")[0]
        yield warn(sentence, f"unset {name}; {sys.executable} -m ringjax.config")
