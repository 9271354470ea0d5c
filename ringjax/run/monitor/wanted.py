"""What somebody wants to know of a job, from the settings; and whether that can be."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ringjax.config import Config


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """What ringrun is asked for.

    Attributes:
        report: seconds between two reports, 0: none.
        host, port: where metrics are served; no host: nowhere.
        token: what those must show who want them, if there is one.
        file: where they are written, too.
    """

    report: float = 0.0
    host: str = ""
    port: int = 0
    token: str = ""
    file: str = ""

    @property
    def needs_samples(self) -> bool:
        """Whether ranks have to tell all the time."""
        return bool(self.report or self.host or self.file)


NO_MONITORING = MonitorOptions()


def monitor_options(config: Config) -> MonitorOptions:
    """What the settings ask for.

    Raises:
        ValueError: what they say does not make sense, or is not safe.

    Example:
        >>> monitor_options(Config(metrics="9400")).host
        '127.0.0.1'
        >>> monitor_options(Config(metrics=":9400"))
        Traceback (most recent call last):
        ValueError: --metrics :9400: expected PORT or ADDRESS:PORT
    """
    host, port = _address(config.metrics) if config.metrics else ("", 0)
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


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    number = int(port) if port.isdecimal() and len(port) <= 5 else 65536
    if number > 65535 or (colon and not host):
        raise ValueError(f"--metrics {text}: expected PORT or ADDRESS:PORT")
    return (host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"), number


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; of names, localhost alone is believed."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
