"""Options of the monitor: checks the settings for reports and metrics."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ringjax.config import Config


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """The kinds of reports and metrics that the user has requested.

    Attributes:
        report: seconds between two reports; 0 means no reports. host, port: address of
        the metrics server; an empty `host` means no server. token: token that clients
        must send; empty if clients need no token. file: file to which metrics are
        written; empty if no file is written.
    """

    report: float = 0.0
    host: str = ""
    port: int = 0
    token: str = ""
    file: str = ""

    @property
    def needs_samples(self) -> bool:
        """Whether ranks must send samples during the whole job."""
        return bool(self.report or self.host or self.file)


def monitor_options(config: Config) -> MonitorOptions:
    """Converts the settings of a job to options of the monitor.

    Raises ValueError if a setting is invalid, or if other hosts could read metrics
    without a token.

    Example:
        >>> monitor_options(Config(metrics="9400")).host
        '127.0.0.1'
        >>> monitor_options(Config(metrics=":9400"))
        Traceback (most recent call last):
        ValueError: --metrics :9400: expected PORT or ADDRESS:PORT
    """
    host, port = _parse_address(config.metrics) if config.metrics else ("", 0)
    token = config.metrics_token()
    if host and not (token or _is_loopback(host)):
        raise ValueError(
            f"--metrics {config.metrics}: others reach this address: a token is "
            "needed, in a file that --metrics-token-file names: "
            "(umask 077; openssl rand -hex 32 > FILE)"
        )
    file = config.metrics_file
    if file and not file.endswith(".prom"):
        raise ValueError(
            f"--metrics-file {file}: expected NAME.prom, node_exporter reads no other"
        )
    return MonitorOptions(config.report, host, port, token, file)


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    value = int(port) if port.isdecimal() and len(port) <= 5 else 65536
    if value > 65535 or (colon and not host):
        raise ValueError(f"--metrics {text}: expected PORT or ADDRESS:PORT")
    return (host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"), value


def _is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address `host`.

    The only accepted name is "localhost", because another name may later resolve to any
    address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
