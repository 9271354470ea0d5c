"""Checks libfabric and its provider on a host, if RINGJAX_FABRIC asks for one.

The check loads libfabric, as a rank does, and opens no card.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

from ringjax.config import Config
from ringjax.doctor.findings import Finding, HostContext, fail, ok, warn
from ringjax.errors import RingjaxError
from ringjax.links import standing

# Providers over sockets or shared memory, which pin no memory.
_SOFTWARE = ("tcp", "net", "sockets", "udp", "shm", "sm2")
_SLOTS = 2 * 4  # long messages that a link can have under way, in both directions


def provider(host: HostContext) -> Iterator[Finding]:
    """Checks that libfabric has the provider, and that the host's limits allow it."""
    try:
        config = Config.from_env(host.environ)
    except ValueError:  # another check reports the setting
        return
    if config.fabric == "off":
        return
    # Only here: another check tells of a native core that does not load.
    from ringjax.links import fabric

    try:
        found = fabric.find(config, host.name)
    except RingjaxError as error:
        text = str(error).removeprefix("ringjax.init: ")
        yield fail(text, "unset RINGJAX_FABRIC", "startuperror")
        return
    if found.name.partition(";")[0] not in _SOFTWARE:
        yield from _memlock(host, config)
    if found.name.startswith("cxi") and not host.environ.get("SLINGSHOT_VNIS"):
        text = "cxi needs a VNI that all ranks share, from one step or job of Slurm"
        yield warn(text, "sbatch --network=job_vni, or srun", "startuperror")
    yield ok(f"{found.name} on {found.domain}, by {found.library}")


def _memlock(host: HostContext, config: Config) -> Iterator[Finding]:
    """Checks how much memory a rank may pin for the links to its neighbours."""
    peers = standing.most_neighbours(host.size, host.ranks)
    needed = peers * _SLOTS * config.fabric_slot
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if 0 <= limit < needed:
        text = f"a rank may pin {limit >> 10} KiB (ulimit -l), and up to "
        text += f"{needed >> 20} MiB are needed (Docker: --ulimit memlock=-1, systemd: "
        text += "LimitMEMLOCK=infinity)"
        yield fail(text, "ulimit -l unlimited", "startuperror")
