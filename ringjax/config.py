"""Every setting of ringjax: one frozen dataclass, one table of environment variables.

The only reader of RINGJAX_* and HOROVOD_*. `python -m ringjax.config` prints the table.
Not for what engines (Open MPI, Slurm, ...) put into the environment: see launch.py.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
# Shorter secrets could be guessed; ringrun makes 32 bytes.
MIN_SECRET_BYTES = 16

Parser = Callable[[str], Any]


def _integer(low: int, high: int | None = None) -> Parser:
    limits = f"at least {low}" if high is None else f"between {low} and {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("an integer") from None
        if value < low or (high is not None and value > high):
            raise ValueError(f"an integer {limits}")
        return value

    return parse


def _seconds(low: float = 0.0) -> Parser:
    expected = f"a number of seconds, at least {low:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= value < 1e9:  # also refuses nan and inf
            raise ValueError(expected)
        return value

    return parse


def _multiple_of(unit: int, high: int) -> Parser:
    def parse(text: str) -> int:
        if not text.isdecimal() or (n := int(text)) > high or n % unit:
            raise ValueError(f"a multiple of {unit} up to {high}")
        return n

    return parse


def _power_of_two(low: int, high: int) -> Parser:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= (n := int(text)) <= high or n & (n - 1):
            raise ValueError(f"a power of two between {low} and {high}")
        return n

    return parse


def _boolean(text: str) -> bool:
    values = {"1": True, "true": True, "on": True, "yes": True}
    values |= {"0": False, "false": False, "off": False, "no": False}
    if text.lower() not in values:
        raise ValueError("1 or 0")
    return values[text.lower()]


def _hex(digits: int, *, exactly: bool) -> Parser:
    size = f"{digits}" if exactly else f"at least {digits}"

    def parse(text: str) -> str:
        plain = all(c in "0123456789abcdefABCDEF" for c in text) and len(text) % 2 == 0
        right = len(text) == digits if exactly else len(text) >= digits
        if not (plain and right):
            raise ValueError(f"{size} hexadecimal digits")
        return text.lower()

    return parse


def _level(text: str) -> str:
    level = "warning" if text.lower() == "warn" else text.lower()
    if level not in LOG_LEVELS:
        raise ValueError("one of " + ", ".join(LOG_LEVELS))
    return level


def _choice(*names: str) -> Parser:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError("one of " + ", ".join(names))
        return text.lower()

    return parse


def _setting(
    default: Any, parse: Parser, meaning: str, *horovod: str, secret: bool = False
) -> Any:
    """A field with how to read it; `horovod` are the names Horovod has for it."""
    about = {"parse": parse, "meaning": meaning, "horovod": horovod, "secret": secret}
    return dataclasses.field(default=default, metadata=about, repr=not secret)


_RANK, _COUNT = _integer(0, 2**31 - 1), _integer(1, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process. A field FIELD is read from RINGJAX_FIELD.

    Example:
        >>> Config.from_env({"RINGJAX_RING_BYTES": "65536"}).ring_bytes
        65536
    """

    rank: int | None = _setting(None, _RANK, "this process's rank", "RANK")
    size: int | None = _setting(None, _COUNT, "processes of the job", "SIZE")
    local_rank: int | None = _setting(None, _RANK, "rank on this host", "LOCAL_RANK")
    local_size: int | None = _setting(
        None, _COUNT, "processes on this host", "LOCAL_SIZE"
    )
    cross_rank: int | None = _setting(
        None, _RANK, "this host among the hosts with my local rank", "CROSS_RANK"
    )
    cross_size: int | None = _setting(
        None, _COUNT, "hosts that have a process with my local rank", "CROSS_SIZE"
    )
    rendezvous: str = _setting(
        "", str, "where a rendezvous server listens: host:port,..."
    )
    secret: str = _setting(
        "",
        _hex(2 * MIN_SECRET_BYTES, exactly=False),
        "the job's secret in hexadecimal digits",
        secret=True,
    )
    secret_file: str = _setting(
        "", str, "a file that holds the secret, readable by its owner only"
    )
    job: str = _setting("", _hex(16, exactly=True), "the job's id")
    hostname: str = _setting("", str, "this host's name in the job", "HOSTNAME")
    start_timeout: float = _setting(
        120.0, _seconds(0.1), "for all ranks to appear and connect", "START_TIMEOUT"
    )
    stall_warning: float = _setting(
        30.0,
        _seconds(),
        "of waiting for a living rank until a warning, 0 = never",
        "STALL_CHECK_TIME_SECONDS",
    )
    collective_timeout: float = _setting(
        300.0,
        _seconds(),
        "of waiting for a living rank until an error, 0 = never",
        "STALL_SHUTDOWN_TIME_SECONDS",
    )
    failure_timeout: float = _setting(
        5.0, _seconds(0.1), "of silence until a rank counts as lost"
    )
    heartbeat: float = _setting(1.0, _seconds(0.01), "between two signs of life")
    ring_bytes: int = _setting(
        1 << 20,
        _power_of_two(1 << 14, 1 << 28),
        "shared memory per direction of a pair on one host",
    )
    tile_bytes: int = _setting(
        1 << 19,
        _multiple_of(1 << 12, 1 << 28),
        "an allreduce on one host passes through shared memory in such tiles, 0 = "
        "through the rings",
    )
    tcp_streams: int = _setting(2, _integer(1, 16), "data sockets per pair of hosts")
    network_interfaces: str = _setting(
        "", str, "use these interfaces only: name,...", "GLOO_IFACE"
    )
    shm: bool = _setting(True, _boolean, "shared memory between ranks of one host")
    algorithm: str = _setting(
        "", str, "force one: ring, or allreduce:ring,broadcast:binomial"
    )
    calibrate: str = _setting(
        "auto",
        _choice("auto", "always", "off"),
        "measure the links at start; auto: unless the cache remembers them",
    )
    cache_dir: str = _setting(
        "", str, "for what is remembered; default: ringjax in the user's cache folder"
    )
    spin_us: float = _setting(
        50.0, _seconds(), "microseconds of busy waiting before sleeping"
    )
    bucket_bytes: int = _setting(
        25 << 20,
        _integer(0),
        "gradients per message, 0 = no fusion",
        "FUSION_THRESHOLD",
    )
    overlap_memory: int = _setting(
        40 << 20, _integer(0), "most bytes of gradients that are on their way, on CPUs"
    )
    gpu: bool = _setting(True, _boolean, "CUDA devices; 0: as if there were none")
    nccl: str = _setting(
        "", str, "libnccl.so.2 to load, unless JAX has loaded one already"
    )
    fusion: str = _setting(
        "hybrid",
        _choice("hybrid", "pack", "group"),
        "on CUDA: copy small tensors, all, or none into one buffer",
    )
    fusion_small: int = _setting(
        1 << 20, _integer(0), "bytes of a tensor that is not small to hybrid fusion"
    )
    comm_stream: bool = _setting(
        True, _boolean, "a CUDA stream of its own for communication; 0: no overlap"
    )
    log_level: str = _setting("warning", _level, "least level to print", "LOG_LEVEL")

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.size is None):
            given, missing = ("rank", "size") if self.size is None else ("size", "rank")
            raise ValueError(
                f"RINGJAX_{given.upper()} is set but RINGJAX_{missing.upper()} is not"
            )
        for rank, size in (("rank", "size"), ("local_rank", "local_size")):
            r, n = getattr(self, rank), getattr(self, size)
            if r is not None and n is not None and r >= n:
                raise ValueError(
                    f"RINGJAX_{rank.upper()} is {r}: expected less than "
                    f"RINGJAX_{size.upper()}, which is {n}"
                )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Reads every setting.

        Raises:
            ValueError: naming the variable, its value and what is expected.
        """
        values = {}
        for field in dataclasses.fields(cls):
            for name in variables(field):
                text = environ.get(name, "").strip()
                if not text:  # an empty variable is an unset one
                    continue
                try:
                    values[field.name] = field.metadata["parse"](text)
                except ValueError as expected:
                    shown = "(hidden)" if field.metadata["secret"] else repr(text)
                    raise ValueError(
                        f"{name} is {shown}: expected {expected}"
                    ) from None
                break
        return cls(**values)

    def secret_bytes(self) -> bytes | None:
        """The job's secret from RINGJAX_SECRET or RINGJAX_SECRET_FILE; None if unset.

        Raises:
            ValueError: the file cannot be read, others may read it, or it holds no
                secret.
        """
        if self.secret:
            return bytes.fromhex(self.secret)
        if self.secret_file:
            return _read_secret(self.secret_file)
        return None

    def cache_folder(self, environ: Mapping[str, str] = os.environ) -> str:
        """Where to remember something for later jobs; nothing if there is no place."""
        if self.cache_dir:
            return self.cache_dir
        base = environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # its specification says so
            base = os.path.expanduser("~/.cache")
        return os.path.join(base, "ringjax") if os.path.isabs(base) else ""

    def table(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Rows of (field, variables, default, current value, meaning)."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata["secret"] and value:
                value = "(hidden)"
            yield (
                field.name,
                " ".join(variables(field)),
                _show(field.default),
                _show(value),
                field.metadata["meaning"],
            )


def variables(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The environment variables of a field, the strongest first."""
    horovod = (f"HOROVOD_{name}" for name in field.metadata["horovod"])
    return (f"RINGJAX_{field.name.upper()}", *horovod)


def _read_secret(path: str) -> bytes:
    try:
        # Not blocking: opening a pipe would otherwise wait for somebody to write.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"RINGJAX_SECRET_FILE is {path!r}: {error.strerror}") from None
    try:
        # Of the open file, so that it cannot be exchanged between check and use.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"RINGJAX_SECRET_FILE is {path!r}: not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"RINGJAX_SECRET_FILE is {path!r}: it belongs to user {status.st_uid}, "
                f"expected {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            raise ValueError(
                f"RINGJAX_SECRET_FILE is {path!r}: others may use it (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); chmod 600 it"
            )
        text = os.read(fd, 4096).strip()
    finally:
        os.close(fd)
    try:
        return bytes.fromhex(_hex(2 * MIN_SECRET_BYTES, exactly=False)(text.decode()))
    except ValueError:
        raise ValueError(
            f"RINGJAX_SECRET_FILE is {path!r}: expected a line of at least "
            f"{2 * MIN_SECRET_BYTES} hexadecimal digits (openssl rand -hex 32)"
        ) from None


def _show(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Prints the table of all settings as this environment sets them."""
    head = ("field", "variables", "default", "current", "meaning")
    rows = [head, *Config.from_env().table()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        print("  ".join((*cells, row[4])))


if __name__ == "__main__":
    main()
