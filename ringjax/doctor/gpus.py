"""Checks of GPUs and of the variables that NCCL reads. Loads no framework."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import Any

from ringjax.config import Config
from ringjax.control import addresses
from ringjax.doctor.findings import Finding, HostContext, count, fail, ok, warn
from ringjax.run.check_build import library

_OFF = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_P2P_LEVEL")
_IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _information() -> dict[str, Any]:
    try:
        from ringjax import _native
    except ImportError:
        return {}
    return _native.cuda_info()


def _has_gpu() -> bool:
    """Returns whether the kernel reports a GPU; needs no library of the driver."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _each(host: HostContext) -> int:
    """Returns the number of GPUs of each rank; 0 means all GPUs."""
    try:
        return Config.from_env(host.environ).devices_per_rank
    except ValueError:  # another check reports the setting
        return 1


def devices(host: HostContext) -> Iterator[Finding]:
    """Checks the driver, the number of GPUs, the CUDA code of ringjax, and NCCL."""
    about = _information()
    found = about.get("devices", [])
    visible = host.environ.get("CUDA_VISIBLE_DEVICES")
    if _has_gpu() and not found:
        if visible is not None and not visible.strip("-1, "):
            text = f"CUDA_VISIBLE_DEVICES is {visible!r}, so there are none"
            yield warn(text, "unset CUDA_VISIBLE_DEVICES", "startuperror")
        else:
            why = about.get("driver_error")
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
    if about.get("device_code") == "none":
        text = "this build of ringjax has no code for CUDA devices"
        yield warn(text, "pip install --force-reinstall ringjax", "startuperror")
    if not library("libnccl.so*", "nvidia/nccl/lib"):
        text = "NCCL is not found"
        yield fail(text, "pip install nvidia-nccl-cu12", "startuperror")


def nccl_variables(host: HostContext) -> Iterator[Finding]:
    """Checks for variables that slow NCCL down, or that name missing interfaces."""
    for name in _OFF:
        value = host.environ.get(name, "").strip()
        if value not in ("", "0") and not (name.endswith("LEVEL") and value != "LOC"):
            text = f"{name}={value} turns a fast way off"
            yield warn(text, f"unset {name}", "doctor")
    for name in _IFNAMES:
        yield from _interfaces(host, name)


def _interfaces(host: HostContext, name: str) -> Iterator[Finding]:
    """Checks whether the interfaces in a variable exist."""
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

    The value contains prefixes of names. After "=" it contains complete names, and
    after "^" excluded prefixes.

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
