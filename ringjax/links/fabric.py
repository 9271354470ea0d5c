"""Finds libfabric and the provider that RINGJAX_FABRIC names, before the job begins.

A provider of libfabric drives one kind of network card. The native core loads the
library and moves the bytes (xla_ext/transport/fabric_link.cc). This module asks it what
the library of this host can do, so that a rank without the library or the provider
fails at once, by a sentence that says what to install. It never falls back to TCP,
which would only show as a slow job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringjax import _native
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.errors import StartupError

# The first text is for a host without the library, the second for one without the
# provider.
_INSTALL = (
    "install libfabric (apt-get install libfabric1, dnf install libfabric, or the "
    "installer of the card's vendor), set RINGJAX_FABRIC_LIBRARY to its "
    "libfabric.so.1, or set RINGJAX_FABRIC=off for TCP"
)
_CHOOSE = (
    "set RINGJAX_FABRIC to one of these, install the driver of the card, set "
    "RINGJAX_FABRIC_LIBRARY to another libfabric.so.1, or set RINGJAX_FABRIC=off for "
    "TCP"
)


@dataclass(frozen=True)
class FabricProvider:
    """The provider that this rank uses.

    Attributes:
        name: the full name, such as "tcp;ofi_rxm", of which RINGJAX_FABRIC may give a
            part.
        protocol: libfabric's number of what the provider sends. Two versions of
            libfabric may have different providers of one name.
        domain: the card.
        library: the version and the path of libfabric.
    """

    name: str
    protocol: int
    domain: str
    library: str

    def hello(self) -> dict[str, str]:
        """Returns what the coordinator compares, and the rest for its sentence."""
        return {
            "speaks": f"{self.name} (protocol {self.protocol})",
            "library": self.library,
        }


def is_wanted(config: Config) -> bool:
    return config.fabric != "off"


def name_of(config: Config) -> str:
    """Returns the setting without the card, which may differ between hosts; or ""."""
    return config.fabric.partition(":")[0] if is_wanted(config) else ""


def source_address(config: Config) -> str:
    """Returns the address whose card libfabric has to use; "" if it may choose.

    Raises StartupError if an interface of the setting does not exist.
    """
    if not config.network_interfaces:
        return ""
    try:
        found = address.of_interfaces(config.network_interfaces)
    except ValueError as error:
        raise StartupError(f"RINGJAX_NETWORK_INTERFACES: {error}") from None
    return min(found, key=lambda host: ":" in host)  # IPv4 if there is any


def options(config: Config, local_rank: int) -> dict[str, str | float] | None:
    """Returns the options with which a communicator uses a fabric; None for TCP.

    `local_rank` divides the cards of a host between its ranks.
    """
    if not is_wanted(config):
        return None
    # The core waits for the peers, so that a fabric which does not connect them is an
    # error of init. An elastic job does not wait: a rank that waits for a peer of an
    # epoch that is over would not take part in the next epoch. Its links connect when
    # they are first used, and calls end with their epoch.
    wait = 0.0 if config.elastic else config.start_timeout
    return {
        "library": config.fabric_library,
        "provider": config.fabric,
        "source": source_address(config),
        "slot_bytes": config.fabric_slot,
        "local_rank": local_rank,
        "seconds": wait,
    }


def probe(config: Config) -> dict[str, Any]:
    """Asks libfabric for the provider of RINGJAX_FABRIC; see `_native.fabric_probe`."""
    return _native.fabric_probe(
        config.fabric_library,
        config.fabric,
        source_address(config),
        config.local_rank or 0,
    )


def find(config: Config, who: str) -> FabricProvider:
    """Returns the provider of RINGJAX_FABRIC on this host. `who` names the rank.

    Raises StartupError if the library or the provider is missing.
    """
    found = probe(config)
    if found["error"]:
        raise StartupError(
            f"ringjax.init: {who} has RINGJAX_FABRIC={config.fabric}, but "
            f"{found['error']}: {_CHOOSE if found['path'] else _INSTALL}"
        )
    return FabricProvider(
        found["provider"], found["protocol"], found["domain"], _library(found)
    )


def _library(found: dict[str, Any]) -> str:
    return f"libfabric {'.'.join(map(str, found['version']))} ({found['path']})"
