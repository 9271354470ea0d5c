"""Tests of `ringjax doctor` on two hosts. Each test causes a fault in their network.

The hosts are network namespaces (tests/support/namespaces.py) with separate names, so
the tests need root and `ip`. A fake ssh enters a namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from support.doctor import DoctorRun, needs_root, run_doctor
from support.namespaces import LAUNCHER, Namespaces, address

pytestmark = [needs_root("ip", "unshare", "tc", "hostname"), pytest.mark.timeout(90)]

ONE, TWO = address(0), address(1)
# A fake of OpenSSH. Its arguments are options, a host, and then a shell command. Before
# the command, host N runs FOLDER/N.sh, in which a test may cause a fault on that host.
SSH = """#!/bin/sh
while :; do case "$1" in -p|-i) shift 2;; -*) shift;; *) break;; esac; done
number=$((${1##*.} - 1)); shift
exec ip netns exec %sn$number unshare -u -m --propagation private sh -c '
hostname rj-$0; mount --bind %s/hosts.$0 /etc/hosts; . %s/$0.sh; exec sh -c "$1"
' $number "$*"
"""


class Hosts:
    """Two hosts whose network a test can break before the doctor runs."""

    def __init__(self, network: Namespaces, tag: str, folder: Path) -> None:
        self.network, self.folder = network, folder
        _run(f"ip addr add {LAUNCHER}/24 dev {network._bridge}")
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(SSH % (f"rj{tag}", folder, folder))
        ssh.chmod(0o755)
        for number, where in enumerate((ONE, TWO)):
            self.hosts(number, f"127.0.0.1 localhost\n{where} rj-{number}\n")
            (folder / f"{number}.sh").write_text("")

    def hosts(self, number: int, text: str) -> None:
        """Writes the /etc/hosts of a host."""
        (self.folder / f"hosts.{number}").write_text(text)

    def on(self, number: int, command: str) -> None:
        """Runs a command in a host's network."""
        _run(f"ip netns exec {self.network.names[number]} {command}")

    def run_doctor(self, *words: str, **more: object) -> DoctorRun:
        """Runs the doctor for both hosts and returns its findings."""
        env = {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        env |= more.pop("env", {})  # type: ignore[arg-type]
        words = words or ("-H", f"{ONE}:1,{TWO}:1")
        [found] = run_doctor(*words, env=env, **more)  # type: ignore[arg-type]
        return found


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    tag = f"{os.getpid():x}"[-5:]
    with Namespaces(2, None, tag) as network:
        yield Hosts(network, tag, tmp_path)


def test_two_healthy_hosts(hosts: Hosts, tmp_path: Path) -> None:
    found = hosts.run_doctor(
        trial=True, env={"RINGJAX_CACHE_DIR": str(tmp_path / "cache")}
    )
    # A test machine may be busy or have little memory.
    assert found.failed_checks() <= {"/dev/shm", "memory", "trial"}, found.found
    assert found.code == 0
    said = {row["check"]: row["text"] for row in found.rows()}
    assert said["ssh"] == "reached, and ringjax is there"
    assert said["interfaces"] == "eth0, mtu 1500"
    assert said["ports"] == "2 of 2 ways open"
    assert said["versions"] == "alike"
    assert "by the calibration (measured just now)" in said["trial"]
    versions = found.found["versions"]
    assert isinstance(versions, dict) and set(versions) == {ONE, TWO}


def test_a_host_whose_name_is_a_loopback_address(hosts: Hosts) -> None:
    hosts.hosts(1, "127.0.0.1 localhost\n127.0.1.1 rj-1\n")
    found = hosts.run_doctor()
    assert not found.problems("name", ONE)
    [(status, text)] = found.problems("name", TWO)
    assert status == "warn" and "'rj-1' resolves to 127.0.1.1" in text
    assert f'"{TWO} rj-1" > /etc/hosts' in found.fix_of("name")


def test_another_host_resolves_to_this_one(hosts: Hosts) -> None:
    own = hosts.folder / "own"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 rj-far\n")
    inside = ["unshare", "-m", "--propagation", "private"]
    words = ("-H", f"{ONE}:1,rj-far:1")
    found = hosts.run_doctor(
        *words, before=f"mount --bind {own} /etc/hosts", inside=inside
    )
    [(status, text)] = found.problems("other names", "rj-far")
    assert status == "FAIL" and "resolves to 127.0.1.1, this machine" in text
    assert found.code == 1
    shell = found.fix_of("other names").removeprefix("sudo ")
    mended = hosts.run_doctor(
        *words, before=f"mount --bind {own} /etc/hosts\n{shell}", inside=inside
    )
    assert not mended.problems("other names")
    assert own.read_text().startswith("127.0.0.1 localhost\n")


def test_one_host_under_two_names(hosts: Hosts) -> None:
    hosts.on(0, f"ip addr add {address(100)}/24 dev eth0")
    ssh = hosts.folder / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("- 1))", "- 1)); number=$((number % 100))"))
    found = hosts.run_doctor("-H", f"{ONE}:1,{address(100)}:1")
    assert ("warn", f"is the same machine as {ONE}") in found.problems("other names")


def test_a_firewall_between_hosts(hosts: Hosts) -> None:
    hosts.on(1, f"ip route add blackhole {ONE}/32")
    found = hosts.run_doctor()
    assert found.code == 1
    [(status, text)] = found.problems("ports", ONE)
    # Packets are dropped without a reply, as by a firewall.
    assert status == "FAIL" and f"does not reach {TWO} ({TWO}: timed out)" in text
    rows = {row["host"]: row["mend"] for row in found.rows() if row["check"] == "ports"}
    assert rows[ONE].startswith(f"on {TWO}: sudo ufw allow from {ONE}")
    assert rows[TWO] == f"on {TWO}: ip route get {ONE}"


def test_full_size_packets_are_dropped(hosts: Hosts) -> None:
    bucket = "tbf rate 1gbit burst 1000 latency 50ms"  # drops larger packets
    hosts.on(0, f"tc qdisc add dev eth0 root {bucket}")
    found = hosts.run_doctor()
    assert [s for s, _ in found.problems("messages", ONE)] == ["FAIL"]
    assert not found.problems("ports")
    mend = found.fix_of("messages")
    assert mend == "sudo ip link set dev eth0 mtu 1400"


def _bridge(hosts: Hosts, number: int, name: str, where: str) -> None:
    hosts.on(number, f"ip link add {name} type bridge")
    hosts.on(number, f"ip addr add {where} dev {name}")
    hosts.on(number, f"ip link set {name} up")


def test_docker_bridges_share_an_address(hosts: Hosts) -> None:
    for number in range(2):
        _bridge(hosts, number, "docker0", "172.17.0.1/16")
    found = hosts.run_doctor()
    [(status, text)] = found.problems("interfaces")
    assert status == "warn" and f"docker0 is 172.17.0.1 on {ONE}, {TWO}" in text
    assert found.fix_of("interfaces") == "ringrun --network-interfaces eth0"
    words = ("-H", f"{ONE}:1,{TWO}:1", *found.fix_of("interfaces").split()[1:])
    assert not hosts.run_doctor(*words).problems("interfaces")


def test_different_mtus(hosts: Hosts) -> None:
    hosts.on(1, "ip link set dev eth0 mtu 9000")
    found = hosts.run_doctor()
    [(status, text)] = found.problems("interfaces")
    assert status == "warn" and "9000 on eth0" in text and "1500 on eth0" in text


def test_a_tunnel_between_hosts(hosts: Hosts) -> None:
    for number in range(2):
        hosts.on(number, "ip link set dev eth0 down")
        hosts.on(number, "ip link set dev eth0 name wg0")
        hosts.on(number, "ip link set dev wg0 up")
    found = hosts.run_doctor()
    assert [s for s, t in found.problems("interfaces") if "wg0, a tunnel" in t] == [
        "warn"
    ] * 2


def test_an_interface_that_does_not_exist(hosts: Hosts) -> None:
    found = hosts.run_doctor(env={"RINGJAX_NETWORK_INTERFACES": "eth7"})
    [(status, text), _] = found.problems("interfaces")
    assert status == "FAIL" and "'eth7' does not exist" in text and "eth0" in text
    assert found.fix_of("interfaces") == "ringrun --network-interfaces eth0"


def test_a_host_without_an_address(hosts: Hosts) -> None:
    hosts.on(1, "ip addr flush dev eth0")
    found = hosts.run_doctor()
    [(status, text)] = found.problems("interfaces", TWO)
    assert status == "FAIL" and "no address but loopback's" in text
    assert found.code == 1


def test_an_interface_of_nccl_that_one_host_lacks(hosts: Hosts) -> None:
    _bridge(hosts, 0, "ib0", "10.78.0.1/24")
    found = hosts.run_doctor(env={"NCCL_SOCKET_IFNAME": "ib0"})
    assert not found.problems("NCCL", ONE)
    [(_, text)] = found.problems("NCCL", TWO)
    assert "NCCL_SOCKET_IFNAME=ib0 names no interface here" in text
    assert found.fix_of("NCCL") == "export NCCL_SOCKET_IFNAME=eth0"


def test_different_versions(hosts: Hosts) -> None:
    [where] = [
        Path(str(metadata.distribution("keras").locate_file(file)))
        for file in metadata.files("keras") or ()
        if file.name == "METADATA"
    ]
    version = metadata.version("keras")
    other = hosts.folder / "METADATA"
    other.write_text(where.read_text().replace(f"Version: {version}", "Version: 9.9"))
    (hosts.folder / "1.sh").write_text(f"mount --bind {other} {where}\n")
    found = hosts.run_doctor()
    [(status, text)] = found.problems("versions")
    assert (status, text) == ("warn", f"keras differs: {version}, 9.9")
    assert found.fix_of("versions").endswith(f"pip install keras=={version}")


def test_a_wrong_clock(hosts: Hosts) -> None:
    # All hosts share one kernel clock, so only Python's clock on the second differs.
    late = "import socket, time\nnow = time.time\n"
    late += "if socket.gethostname() == 'rj-1':\n    time.time = lambda: now() + 90\n"
    (hosts.folder / "sitecustomize.py").write_text(late)
    path = os.pathsep.join([str(hosts.folder), os.environ.get("PYTHONPATH", "")])
    found = hosts.run_doctor(env={"PYTHONPATH": path})
    [(status, text)] = found.problems("clocks", TWO)
    assert status == "warn" and "its clock is 90 s ahead" in text
    assert found.fix_of("clocks").startswith("sudo chronyc makestep")


@needs_root("ssh")
def test_no_ssh_server(hosts: Hosts) -> None:
    (hosts.folder / "bin" / "ssh").unlink()
    assert shutil.which("ssh")
    found = hosts.run_doctor()
    assert [s for s, _ in found.problems("ssh")] == ["FAIL"] * 2
    assert all(
        "no ssh server listens there" in text for _, text in found.problems("ssh")
    )


def test_python_has_another_path(hosts: Hosts) -> None:
    (hosts.folder / "1.sh").write_text(f"mount --bind /dev/null {sys.executable}\n")
    found = hosts.run_doctor()
    assert not found.problems("ssh", ONE)
    [(status, text)] = found.problems("ssh", TWO)
    assert status == "FAIL" and "Permission denied" in text
    assert f"ssh {TWO} " in found.fix_of("ssh")
