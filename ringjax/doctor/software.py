"""Checks the software: ssh, the native core, versions, settings, GPUs, NCCL.

No check loads a framework.
"""

from __future__ import annotations

import glob
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ringjax import config
from ringjax.control import addresses
from ringjax.doctor.findings import (
    Finding,
    HostContext,
    HostReport,
    JobContext,
    count,
    differing_versions,
    fail,
    ok,
    warn,
)
from ringjax.run.check_build import cuda_info, installed_version, library
from ringjax.settings import mpi_library
from ringjax.settings.unknown_variables import unknown_variable_warnings

# Variables that make NCCL slower, and variables that list network interfaces.
_OFF = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_P2P_LEVEL")
_IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Column title -> names of the Python distributions whose version the column shows.
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
# Patterns of error messages of ssh, a shell or Python, each with its cause and a
# remedy.
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
    """Checks that ringrun can log in to each host, and finds Python and ringjax."""
    for report in job.reports.values():
        local = job.is_local.get(report.name)
        if local and not report.facts:
            text = f"the checks did not run here: {report.trouble}"
            yield report.name, fail(text, f"{sys.executable} -m ringjax.doctor")
        elif not report.facts:
            yield report.name, _unreached(report)
        elif not local:
            yield report.name, ok("reached, and ringjax is there")


def _unreached(report: HostReport) -> Finding:
    named = {
        "host": shlex.quote(report.name),
        "name": report.name.rpartition("@")[2],
        "python": sys.executable,
        "version": installed_version("ringjax") or "",
    }
    for pattern, what, command in _REASONS:
        if re.search(pattern, report.trouble):
            return fail(f"{what}: {report.trouble}", command.format(**named))
    text = report.trouble or f"no answer (exit code {report.code})"
    return fail(text, f"ssh -v {named['host']} {sys.executable} --version")


def versions() -> dict[str, str]:
    """Returns the versions of software that should be equal on all hosts."""
    found = {"Python": platform.python_version()}
    for title, names in DISTRIBUTIONS.items():
        if known := list(filter(None, map(installed_version, names))):
            found[title] = known[0]
    for file in glob.glob("/proc/driver/nvidia/version"):
        words = Path(file).read_text().split()
        found["driver"] = next((w for w in words if w[:1].isdigit() and "." in w), "?")
    return found


def core(host: HostContext) -> Iterator[Finding]:
    """Checks that the native core can be loaded by this Python on this processor."""
    try:
        from ringjax import _native

        yield ok(f"ringjax {_native.version()}")
    except Exception as error:
        text = f"the native core does not load: {error}"
        mend = f"{sys.executable} -m pip install --force-reinstall --no-deps ringjax"
        yield fail(text, mend, "startuperror")


def _number(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version text: (0, 10, 2) for "0.10.2rc1"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def fitting(host: HostContext) -> Iterator[Finding]:
    """Checks that ringjax supports the installed jax, and jax the installed jaxlib."""
    jax, jaxlib = installed_version("jax"), installed_version("jaxlib")
    if jax is None and (mxnet := installed_version("mxnet")):
        yield ok(f"mxnet {mxnet}, without jax, which needs another numpy")
        return
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
    """Returns ringjax's requirement for jax, such as "jax<0.13,>=0.10.2"."""
    try:
        needs = metadata.requires("ringjax") or []
    except metadata.PackageNotFoundError:  # ringjax is a checkout that is not installed
        needs = []
    return next((need for need in needs if re.match(r"jax[<>=]", need)), "jax")


def jax_collectives(host: HostContext) -> Iterator[Finding]:
    """Checks that ringjax can carry JAX's own collectives, if the settings want it."""
    if not mpi_library.is_wanted(host.environ):
        return
    named = host.environ.get(mpi_library.VARIABLE, "")
    if why := mpi_library.problem():
        yield warn(f"Gloo carries them: {why}", f"{sys.executable} -m pip install jax")
    elif named and Path(named) != mpi_library.path():
        text = f"Gloo carries them: {mpi_library.VARIABLE} names {named}"
        yield warn(text, f"unset {mpi_library.VARIABLE}")
    else:
        yield ok("ringjax carries them")


def alike(job: JobContext) -> Iterator[tuple[str, Finding]]:
    """Checks that the software has equal versions on all hosts."""
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
    """Checks that the settings of ringjax are valid, and their names spelled right."""
    try:
        config.Config.from_env(host.environ)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        yield fail(str(error), f"unset {name}; {sys.executable} -m ringjax.config")
    for sentence in unknown_variable_warnings(host.environ):
        name = sentence.partition(" ")[0]
        yield warn(sentence, f"unset {name}; {sys.executable} -m ringjax.config")


# -- GPUs ------------------------------------------------------------------------------


def _has_gpu() -> bool:
    """Returns whether the kernel reports a GPU. Works without the driver's library."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _each(host: HostContext) -> int:
    """Returns the number of GPUs that each rank uses; 0 means all GPUs."""
    try:
        return config.Config.from_env(host.environ).devices_per_rank
    except ValueError:  # another check reports the setting
        return 1


def devices(host: HostContext) -> Iterator[Finding]:
    """Checks the driver, the number of GPUs, the CUDA code of ringjax, and NCCL."""
    about = cuda_info()
    found = about["devices"]
    visible = host.environ.get("CUDA_VISIBLE_DEVICES")
    if _has_gpu() and not found:
        if visible is not None and not visible.strip("-1, "):
            text = f"CUDA_VISIBLE_DEVICES is {visible!r}, so there are none"
            yield warn(text, "unset CUDA_VISIBLE_DEVICES", "startuperror")
        else:
            why = about["driver_error"]
            text = f"the kernel has some, the driver shows none: {why} (Docker: "
            yield fail(f"{text}--gpus all)", "nvidia-smi", "startuperror")
    if not found:
        return
    names = ", ".join(dict.fromkeys(str(device["name"]) for device in found))
    each = _each(host) or len(found)
    if len(found) < host.ranks * each:
        text = f"{count(host.ranks, 'rank')} and {count(len(found), 'GPU')} ({names})"
        if each > 1:
            text += f", of which each rank is to have {each}"
        mend = f"ringrun -H {host.name}:{max(1, len(found) // each)}"
        if len(found) < each:
            mend += " --devices-per-rank all"
        yield fail(text, mend, "startuperror")
    else:
        yield ok(f"{len(found)} x {names}")
    if about["device_code"] == "none":
        text = "this build of ringjax has no code for CUDA devices"
        yield warn(text, "pip install --force-reinstall ringjax", "startuperror")
    if not library("libnccl.so*", "nvidia/nccl/lib"):
        text = "NCCL is not found"
        yield fail(text, "pip install nvidia-nccl-cu12", "startuperror")


def nccl_variables(host: HostContext) -> Iterator[Finding]:
    """Checks for variables that make NCCL slow, or that name missing interfaces."""
    for name in _OFF:
        value = host.environ.get(name, "").strip()
        if value not in ("", "0") and not (name.endswith("LEVEL") and value != "LOC"):
            text = f"{name}={value} turns a fast way off"
            yield warn(text, f"unset {name}", "doctor")
    for name in _IFNAMES:
        yield from _interfaces(host, name)


def _interfaces(host: HostContext, name: str) -> Iterator[Finding]:
    """Checks that the interfaces in the variable `name` exist."""
    value = host.environ.get(name, "").strip()
    known = addresses.by_interface()
    if not value:
        return
    used = matching(value, known)
    others = [n for n in known if n != "lo" and not n.startswith("docker")]
    mend = f"export {name}={(others or ['lo'])[0]}"
    if not used:
        text = f"{name}={value} names no interface here; there is {', '.join(known)}"
        say = fail if _has_gpu() else warn
        yield say(text, mend, "startuperror")
    elif used == ["lo"] and not host.alone:
        yield fail(f"{name}={value}: other hosts are not reached by it", mend, "doctor")


def matching(value: str, known: Mapping[str, object]) -> list[str]:
    """Returns the interfaces that NCCL would use for a value of NCCL_SOCKET_IFNAME.

    The value lists prefixes of interface names. After "=" it lists complete names, and
    after "^" it lists prefixes to exclude.

    Example:
        >>> known = dict.fromkeys(["lo", "eth0", "eth1", "docker0"])
        >>> [matching(text, known) for text in ("eth", "=eth1", "^docker,lo")]
        [['eth0', 'eth1'], ['eth1'], ['eth0', 'eth1']]
    """
    without, exact = value.startswith("^"), "=" in value[:2]
    names = [word.strip() for word in value.lstrip("^=").split(",")]

    def is_named(interface: str) -> bool:
        # A name may have a port, as in "eth0:1". The port is not checked.
        words = (word.partition(":")[0] for word in names)
        return any(interface == w if exact else interface.startswith(w) for w in words)

    return [name for name in known if is_named(name) != without]
