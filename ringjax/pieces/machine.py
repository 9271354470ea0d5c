"""Facts about this process and its machine on which XLA's results depend."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

from ringjax.settings import same_bits

# Instructions that XLA or Eigen may choose. Other flags of a CPU have no influence.
_FEATURES = re.compile(
    r"(ss?se|avx|fma|f16c|bmi|abm|amx|gfni|v?aes|v?pclmul|sha|popcnt|movbe|asimd|s[vm]e"
    r"|bf16|i8mm|fphp|fcma|neon|vfp)\w*"
)
# Fields of /proc/cpuinfo that name the model of a CPU, on x86 and on ARM.
_MODEL = ("vendor_id", "model name", "CPU implementer", "CPU part", "CPU variant")
# The core's own caches: Eigen's blocks, and so the order of its sums, depend on them.
_CACHES = "/sys/devices/system/cpu/cpu0/cache/index[0-2]/size"


@functools.cache
def facts() -> dict[str, str]:
    """Returns the facts by their names. Makes JAX's client.

    Example:
        >>> sorted(facts())[:3]
        ['CPU', 'CPU features', 'XLA threads']
    """
    device = jax.local_devices()[0]
    kind = f"{device.device_kind}, {device.client.platform_version}".split("\n")[0]
    found = {
        "jaxlib": f"{jaxlib_version.__version__} with jax {jax.__version__}",
        "device": kind,
        "XLA_FLAGS": " ".join(_flags(os.environ.get("XLA_FLAGS", ""))),
    }
    if device.platform == "cpu":
        found |= _cpu() | {"XLA threads": threads()}
    return found


def _flags(text: str) -> list[str]:
    """Returns the flags, in order, without those that only write files."""
    return sorted(flag for flag in text.split() if not flag.startswith("--xla_dump"))


def _cpu() -> dict[str, str]:
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    features = fields.get("flags", "") or fields.get("Features", "")
    model = [fields[name] for name in _MODEL if fields.get(name)]
    caches = [path.read_text().strip() for path in sorted(Path("/").glob(_CACHES[1:]))]
    return {
        "CPU": f"{' '.join(model)}, caches {' '.join(caches) or 'unknown'}",
        "CPU features": " ".join(
            sorted(name for name in features.split() if _FEATURES.fullmatch(name))
        ),
    }


def threads() -> str:
    """Returns the number of threads of XLA:CPU as text: "1", or "2 on 8 cores".

    With more than one thread, XLA also splits loops by the number of usable cores.
    """
    count = _running_threads() or _expected_threads()
    cores = len(os.sched_getaffinity(0))
    return "1" if count == 1 else f"{count} on {cores} cores"


def _running_threads() -> int:
    """Counts the threads of the client's pool by their name; 0 if there are none."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # the thread has just ended
            continue
    return names.count("tf_XLAEigen")


def _expected_threads() -> int:
    """Returns the number that the client reads from the environment when it starts."""
    for name in same_bits.THREADS:
        text = os.environ.get(name, "").strip()
        if text.isdecimal():
            return max(int(text), 1)
    return len(os.sched_getaffinity(0))
