"""Simulates several hosts on one machine by network namespaces on a bridge.

A host is a namespace whose eth0 is one end of a veth pair; the other end is on the
bridge. Token buckets at both ends limit the rate in both directions. There is no added
latency and no loss, because not every kernel has netem. Only root can make namespaces.
When the network is removed, all processes on its hosts are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

BURST, QUEUE = "128kb", "20ms"  # the size and the longest wait of a token bucket
END = 10.0  # seconds until ended processes must have exited
# The subnet of the hosts. Each test process uses another subnet, because the kernel
# routes a subnet to one bridge, and concurrent tests have different bridges.
NETWORK = f"10.77.{os.getpid() % 256}"
# The address of the bridge, by which hosts reach a launcher outside of the namespaces.
LAUNCHER = f"{NETWORK}.254"


def address(host: int) -> str:
    """Returns the IP address of a host. By default, only hosts can reach it."""
    return f"{NETWORK}.{host + 1}"


def spawn(
    words: Sequence[str], env: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts a process in a new session, so that Ctrl-C does not interrupt it."""
    return subprocess.Popen(
        words,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


# Starts the agent of a host in its network namespace. The last number of the address
# of the host is one more than the number of the namespace.
_AGENT = """#!/bin/sh
number=$((${1##*.} - 1)); shift
exec ip netns exec %sn$number "$@"
"""


class Namespaces:
    """Hosts and their network, which exist only inside of the `with` statement.

    Args:
      hosts: the number of hosts.
      rate: the rate of a link in tc's notation; None for no limit.
      tag: a few characters for the names of this network, unique on this machine.
    """

    def __init__(self, hosts: int, rate: str | None, tag: str) -> None:
        self.hosts, self._rate = hosts, rate
        self._bridge = f"rjb{tag}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.names = [f"rj{tag}n{host}" for host in range(hosts)]
        self._links = [f"rj{tag}v{host}" for host in range(hosts)]
        longest = max(len(name) for name in (*self._links, self._bridge))
        if not 0 < hosts < 255 or longest > 15:  # 15 is IFNAMSIZ without the zero
            raise ValueError(f"{hosts} hosts with the tag {tag!r} cannot be named")

    def up(self) -> list[list[str]]:
        words = [f"ip link add {self._bridge} type bridge"]
        words.append(f"ip link set {self._bridge} up")
        for host, (name, link) in enumerate(zip(self.names, self._links, strict=True)):
            words += [
                f"ip netns add {name}",
                f"ip link add {link} type veth peer name eth0 netns {name}",
                f"ip link set {link} master {self._bridge} up",
                f"ip -n {name} link set lo up",
                f"ip -n {name} addr add {address(host)}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
            ]
            if self._rate is not None:
                bucket = f"root tbf rate {self._rate} burst {BURST} latency {QUEUE}"
                words.append(f"tc qdisc add dev {link} {bucket}")
                words.append(f"tc -n {name} qdisc add dev eth0 {bucket}")
        return [line.split() for line in words]

    def down(self) -> list[list[str]]:
        """Returns the commands that remove the network. Some commands may fail."""
        # Removing one end of a veth pair also removes the other end.
        words = [f"ip link del {link}" for link in self._links]
        words += [f"ip netns del {name}" for name in self.names]
        return [line.split() for line in (*words, f"ip link del {self._bridge}")]

    def left(self) -> list[str]:
        links = Path("/sys/class/net")
        found = [n for n in (*self._links, self._bridge) if (links / n).exists()]
        return found + [n for n in self.names if Path("/run/netns", n).exists()]

    def __enter__(self) -> Self:
        try:
            for command in self.up():
                self._run(command)
        except BaseException:  # clean up after Ctrl-C, too
            self._remove()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self._remove()

    def agent_options(self, folder: Path) -> tuple[str, str]:
        """Returns ringrun's option that starts agents by a script in `folder`."""
        agent = folder / "agent"
        agent.write_text(_AGENT % self.names[0].removesuffix("n0"))
        agent.chmod(0o755)
        return "--agent-command", f"{agent} {{host}}"

    def start(
        self, host: int, words: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host. The process is killed with the network."""
        inside = ["ip", "netns", "exec", self.names[host]]
        process = spawn([*inside, *words], env, log)
        self._processes.append(process)
        return process

    def _remove(self) -> None:
        with _signals_delayed():
            self._end_processes()
            for command in self.down():
                _quiet(command)
            deadline = time.monotonic() + END
            while (left := self.left()) and time.monotonic() < deadline:
                time.sleep(0.02)
        if left:
            raise RuntimeError(f"could not remove {', '.join(left)}")

    def _end_processes(self) -> None:
        """Kills the started processes, and all other processes on the hosts."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        for name in self.names:
            for pid in _quiet(["ip", "netns", "pids", name]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _run(self, command: list[str]) -> None:
        done = _call(command)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _signals_delayed() -> Iterator[None]:
    """Delays SIGINT, SIGTERM and SIGHUP until the end of the body."""
    late: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        s: signal.signal(s, lambda number, _: late.append(number)) for s in signals
    }
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
        for number in late:
            signal.raise_signal(number)


def _quiet(command: list[str]) -> str:
    """Returns the output of a command, which may fail."""
    return _call(command).stdout


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Ctrl-C on the terminal must not interrupt the command, so use a new session.
    return subprocess.run(
        command, capture_output=True, text=True, start_new_session=True, check=False
    )
