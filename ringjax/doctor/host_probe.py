"""Probe of one host: `python -m ringjax.doctor.host_probe FD`, started by an agent.

The probe reads an order from standard input, and writes a reply to the file descriptor
FD, each as a line of JSON. After the order "look" the probe runs the checks of its
host, and serves connections of other hosts until the agent kills the probe. After the
order "call" the probe connects to all other hosts.

The server listens on a free port of every address, as ranks do, and replies only to
peers that send the token of this survey. Probes exchange no data of the user.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ringjax.config import Config
from ringjax.control import addresses
from ringjax.doctor import checks
from ringjax.doctor.findings import Call, Facts, HostContext, InterfaceFacts
from ringjax.doctor.software import versions
from ringjax.run import environ
from ringjax.run.hosts.channel import Message

_CONNECT_TIMEOUT = 2.0  # seconds until a connection attempt fails, as in a job
_REPLY_TIMEOUT = 3.0  # seconds to wait for the reply of a server
_LARGE = 1 << 18  # bytes of a large message, which fills many consecutive packets
_CLOCK_ROUNDS = 8
_CLOCK = struct.Struct("!d")
_LARGE_REQUEST, _TIME_REQUEST, _OK = b"L", b"T", b"!"
_NET = Path("/sys/class/net")
_TUNNELS = ("tun", "wg", "tailscale", "ppp", "zt", "utun")


class ProbeServer:
    """A server that accepts connections from the probes of other hosts, in threads."""

    def __init__(self, token: str, interfaces: str = "") -> None:
        self._token = token.encode()
        self.places: list[tuple[str, int]] = []
        for host in addresses.of_interfaces(interfaces):
            with contextlib.suppress(OSError):  # the address may have gone meanwhile
                sock = addresses.listen(host)
                self.places.append((host, sock.getsockname()[1]))
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=self._reply, args=(sock,), daemon=True).start()

    def _reply(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            sock.settimeout(2 * _REPLY_TIMEOUT)
            if not hmac.compare_digest(_receive(sock, len(self._token)), self._token):
                return
            sock.sendall(_OK)
            while True:
                request = _receive(sock, 1)
                if request == _LARGE_REQUEST:
                    _receive(sock, _LARGE)
                    sock.sendall(_OK)
                elif request == _TIME_REQUEST:
                    sock.sendall(_CLOCK.pack(time.time()))


def _receive(sock: socket.socket, size: int) -> bytes:
    """Receives `size` bytes; raises EOFError if fewer bytes arrive."""
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def probe(place: tuple[str, int], token: str) -> Call:
    """Connects to the probe server of another host, and measures the connection."""
    found: Call = {"address": place[0], "error": ""}
    try:
        with addresses.connect(place, _CONNECT_TIMEOUT) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_REPLY_TIMEOUT)
            sock.sendall(token.encode())
            _receive(sock, 1)
            found["source"] = sock.getsockname()[0]
            found["offset"], found["round_trip"] = _compare_clocks(sock)
            found["large"] = _passes_large(sock)
    except EOFError:
        found["error"] = "something else answers there"
    except OSError as error:
        found["error"] = error.strerror or str(error) or type(error).__name__
    return found


def _compare_clocks(sock: socket.socket) -> tuple[float, float]:
    """Returns the offset of the peer's clock, and the shortest round-trip time."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        sock.sendall(_TIME_REQUEST)
        [there] = _CLOCK.unpack(_receive(sock, _CLOCK.size))
        back = time.time()
        if back - sent < best[1]:
            best = (there - (sent + back) / 2, back - sent)
    return best


def _passes_large(sock: socket.socket) -> bool:
    try:
        sock.sendall(_LARGE_REQUEST + bytes(_LARGE))
        return _receive(sock, 1) == _OK
    except OSError:
        return False


def probe_all(
    others: Mapping[str, Sequence[tuple[str, int]]], token: str
) -> dict[str, list[Call]]:
    """Connects to every address of every other host, up to 32 addresses at a time."""
    with ThreadPoolExecutor(32) as pool:
        running = {
            name: [pool.submit(probe, (place[0], place[1]), token) for place in places]
            for name, places in others.items()
        }
        return {n: [f.result() for f in calls] for n, calls in running.items()}


def _machine() -> str:
    """Returns an id of this machine: the boot id, and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _interfaces() -> dict[str, InterfaceFacts]:
    return {
        name: {
            "addresses": places,
            "mtu": _mtu(name),
            "tunnel": name.startswith(_TUNNELS) or (_NET / name / "tun_flags").exists(),
        }
        for name, places in addresses.by_interface().items()
    }


def _mtu(name: str) -> int:
    """Returns the mtu of an interface, the largest packet in bytes; 0 if unknown."""
    try:
        return int((_NET / name / "mtu").read_text())
    except (OSError, ValueError):
        return 0


def _look(order: Message) -> Message:
    variables = environ.inherited()
    host = HostContext(**order["host"], environ=variables)
    try:
        interfaces = Config.from_env(variables).network_interfaces
        places = ProbeServer(order["token"], interfaces).places
    except ValueError:  # another check reports the wrong value
        places = []
    findings = checks.on_host(host)
    facts: Facts = {
        "hostname": socket.gethostname(),
        "machine": _machine(),
        "python": sys.executable,
        "versions": versions(),
        "interfaces": _interfaces(),
        "places": places,
    }
    return {
        "facts": facts,
        "findings": {n: [f.as_json() for f in found] for n, found in findings.items()},
    }


def main() -> None:
    result = int(sys.argv[1])
    os.set_inheritable(result, False)
    order = json.load(sys.stdin)
    looks = order["do"] == "look"
    if looks:
        answer = _look(order)
    else:
        answer = {"calls": probe_all(order["others"], order["token"])}
    with open(result, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(answer) + "\n")
    while looks:  # the threads of the server end with this process
        signal.pause()


if __name__ == "__main__":
    main()
