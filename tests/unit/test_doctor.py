"""Tests of `ringjax doctor` on one host. Each test causes a fault that it must find.

If the suggested fix is a command for this machine, the test runs the command and then
expects no finding. test_doctor_hosts.py tests several hosts.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.doctor import DoctorRun, needs_root, run_doctor
from support.launch import ROOT, environment
from support.stubs import stub_environment

from ringjax.doctor import trial

_NETWORK = ["unshare", "-n"]
MOUNTS = ["unshare", "-m", "--propagation", "private"]
# Warnings that are correct on the machines that run these tests.
TOLERATED = {"/dev/shm", "CPUs", "memory", "name", "trial", "processes"}


def run_doctor_once(*words: str, **more: object) -> DoctorRun:
    [found] = run_doctor(*words, **more)  # type: ignore[arg-type]
    return found


def check_fix(check: str, status: str, folder: Path, **more: object) -> DoctorRun:
    """Checks that the doctor finds a fault, and that the suggested command fixes it."""
    first, second = run_doctor(again=True, folder=folder, **more)  # type: ignore[arg-type]
    assert [s for s, _ in first.problems(check)] == [status], first.found
    assert first.code == (status == "FAIL")
    assert not second.problems(check), (first.fix_of(check), second.found)
    return first


def test_a_healthy_machine() -> None:
    found = run_doctor_once("-np", "2", trial=True)
    assert found.code == 0
    assert found.failed_checks() <= TOLERATED, found.found
    named = [row["check"] for row in found.rows()]
    assert named[-1] == "trial" and {"name", "loopback", "core", "memfd"} <= {*named}
    text = found.rows()[-1]["text"]
    assert re.match(r"allreduce of 8 MiB: \S+ GB/s busbw, \S+ of a plain copy's", text)


@needs_root("unshare", "hostname")
def test_a_name_without_an_address(tmp_path: Path) -> None:
    hosts, empty = tmp_path / "hosts", tmp_path / "empty"
    hosts.write_text("127.0.0.1 localhost\n")
    empty.write_text("hosts: files\n")
    before = f"""
    mount --bind {hosts} /etc/hosts; mount --bind {empty} /etc/nsswitch.conf
    hostname rj-nameless
    """
    found = check_fix("name", "warn", tmp_path, before=before, inside=[*MOUNTS, "-u"])
    assert "'rj-nameless' has no address" in found.problems("name")[0][1]
    assert "localhost" in hosts.read_text()


@needs_root("unshare", "hostname")
def test_a_name_with_a_foreign_address(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    lines = "127.0.0.1 localhost\n192.0.2.77 rj-moved.lab rj-moved other\n"
    hosts.write_text(lines)
    before = f"mount --bind {hosts} /etc/hosts; hostname rj-moved"
    found = check_fix("name", "warn", tmp_path, before=before, inside=[*MOUNTS, "-u"])
    [(_, text)] = found.problems("name")
    assert text == "'rj-moved' resolves to 192.0.2.77, which is not this host"
    kept = hosts.read_text().splitlines()
    assert kept[:2] == ["127.0.0.1 localhost", "192.0.2.77 rj-moved.lab other"]


@needs_root("unshare", "ip")
def test_loopback_is_down(tmp_path: Path) -> None:
    found = check_fix("loopback", "FAIL", tmp_path, inside=_NETWORK)
    assert found.fix_of("loopback") == "sudo ip link set lo up"


@needs_root("unshare")
def test_a_small_dev_shm(tmp_path: Path) -> None:
    before = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    found = check_fix("/dev/shm", "warn", tmp_path, before=before, inside=MOUNTS)
    assert "64 MiB are too few" in found.problems("/dev/shm")[0][1]


@needs_root("unshare")
def test_a_full_dev_shm() -> None:
    before = """
    mount -t tmpfs -o size=300m tmpfs /dev/shm
    dd if=/dev/zero of=/dev/shm/left bs=1M count=100 status=none
    """
    [(status, text)] = run_doctor_once(before=before, inside=MOUNTS).problems(
        "/dev/shm"
    )
    assert (status, text) == (
        "warn",
        "200 of 300 MiB are free: something was left there",
    )


def test_shared_memory_is_unusable() -> None:
    found = run_doctor_once(before="ulimit -f 100")
    [(status, text)] = found.problems("memfd")
    assert status == "warn" and "RLIMIT_FSIZE" in text
    assert found.fix_of("memfd") == "ulimit -f unlimited"


def _forbidden(number: int) -> list[str]:
    """Returns a command prefix that forbids a system call (of x86-64)."""
    code = f"""
import ctypes, os, struct, sys
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x50001)]
steps += [(0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *step) for step in steps)
kept = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
if libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(kept))), 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[1], sys.argv[1:])
"""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of system calls are those of x86-64")
    words = [sys.executable, "-c", code]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no filter of system calls: {tried.stderr}")
    return words


def test_a_container_without_process_vm_readv() -> None:
    found = run_doctor_once(inside=_forbidden(310))  # process_vm_readv
    [row] = [row for row in found.rows() if row["check"] == "reading"]
    assert "may not read each other's memory (Operation not permitted)" in row["text"]
    default = Path("/proc/sys/kernel/yama/ptrace_scope")
    usual = default.exists() and default.read_text().strip() == "1"
    assert row["status"] == ("ok" if usual else "warn")


def test_a_container_without_memfd() -> None:
    # ringrun's agents need memfd_create, so only the checking process lacks it.
    script = "from ringjax.doctor import limits\n"
    script += "print([f.text for f in limits.memfd(None)])"
    done = subprocess.run(
        [*_forbidden(319), sys.executable, "-c", script],
        env=environment("doctor", {}),
        capture_output=True,
        text=True,
    )
    assert "cannot be had: Operation not permitted" in done.stdout


@needs_root("unshare", "ip")
def test_few_ports(tmp_path: Path) -> None:
    range_ = "/proc/sys/net/ipv4/ip_local_port_range"
    before = f"ip link set lo up; echo 60000 60003 > {range_}"
    found = check_fix("port range", "warn", tmp_path, before=before, inside=_NETWORK)
    assert found.problems("port range")[0][1].startswith("4 ports for calls to others")


@needs_root("unshare")
def test_no_room_for_temporary_files() -> None:
    before = "mount -t tmpfs -o size=1m tmpfs /tmp"
    if str(ROOT).startswith("/tmp") or sys.executable.startswith("/tmp"):
        before = "mount -t tmpfs -o size=1m tmpfs /var/tmp; export TMPDIR=/var/tmp"
    found = run_doctor_once(before=before, inside=MOUNTS)
    [(status, text)] = found.problems("temporary files")
    assert status == "warn" and text.startswith("1 MiB are free in /")


def test_more_ranks_than_gpus() -> None:
    env = stub_environment(CUDA_STUB_DEVICES=1)
    found = run_doctor_once("-np", "2", env=env)
    [(status, text)] = found.problems("GPUs")[:1]
    assert status == "FAIL" and text.startswith("2 ranks and 1 GPU (")
    assert found.fix_of("GPUs") == "ringrun -H localhost:1"


@pytest.mark.parametrize(
    ("seen", "each", "mend"),
    [
        (4, "2", ""),
        (4, "all", "-H localhost:1"),
        (3, "2", "-H localhost:1"),
        (2, "4", "-H localhost:1 --devices-per-rank all"),
    ],
)
def test_several_gpus_per_rank(seen: int, each: str, mend: str) -> None:
    env = stub_environment(CUDA_STUB_DEVICES=seen)
    found = run_doctor_once("-np", "2", "--devices-per-rank", each, env=env)
    told = [row for row in found.problems("GPUs") if row[1].startswith("2 ranks and ")]
    assert len(told) == bool(mend)
    for status, text in told:
        assert status == "FAIL"
        assert (
            f"of which each rank is to have {seen if each == 'all' else each}" in text
        )
        assert found.fix_of("GPUs") == f"ringrun {mend}"


def test_too_few_descriptors() -> None:
    found = run_doctor_once(before="ulimit -n 200")
    assert found.code == 1
    # Even root may lack the right to raise the limit, so the command is not run.
    assert found.fix_of("descriptors") == "sudo prlimit --pid $$ --nofile=65536"
    assert "at most 200 (ulimit -Hn)" in found.problems("descriptors")[0][1]
    row = next(r for r in found.rows() if r["check"] == "descriptors")
    assert row["help"] == "ringjax explain outofdescriptors"


def test_a_limit_of_the_address_space() -> None:
    found = run_doctor_once(before=f"ulimit -v {8 << 20}")
    assert [s for s, _ in found.problems("address space")] == ["warn"]
    assert found.fix_of("address space") == "ulimit -v unlimited"


@needs_root("setpriv")
def test_too_few_threads() -> None:
    # The check runs as user 65534, who must be allowed to read this Python.
    nobody = ["setpriv", "--reuid=65534", "--clear-groups"]
    nobody += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    before = "ulimit -u 60; export HOME=/nonexistent PYTHONDONTWRITEBYTECODE=1"
    found = run_doctor_once("-np", "2", before=before, inside=nobody)
    [(status, text)] = found.problems("processes")
    assert status == "warn" and "128 are needed" in text


def _cgroup(controller: str) -> Path:
    """Makes a control group (version 1 or 2), or skips the test."""
    old, new = Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")
    name = f"ringjax-doctor-{os.getpid()}"
    try:
        if (old / "cgroup.procs").exists():
            group = old / name
        elif controller in (new / "cgroup.subtree_control").read_text().split():
            group = new / name
        else:
            pytest.skip(f"no control groups for {controller}")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups for {controller}: {error}")
    return group


@needs_root()
def test_a_cpu_quota(tmp_path: Path) -> None:
    group = _cgroup("cpu")
    old = (group / "cpu.cfs_quota_us").exists()
    file, value = ("cpu.cfs_quota_us", "50000") if old else ("cpu.max", "50000 100000")
    before = f"echo {value} > {group / file}; echo $$ > {group}/cgroup.procs"
    try:
        found = check_fix("CPUs", "warn", tmp_path, before=before)
    finally:
        group.rmdir()
    assert "the control group gives 0.5 of" in found.problems("CPUs")[0][1]
    assert str(group / file) in found.fix_of("CPUs")


@needs_root()
def test_a_memory_limit() -> None:
    group = _cgroup("memory")
    old = (group / "memory.limit_in_bytes").exists()
    file = "memory.limit_in_bytes" if old else "memory.max"
    before = f"echo {700 << 20} > {group / file}; echo $$ > {group}/cgroup.procs"
    try:
        found = run_doctor_once("-np", "2", before=before)
    finally:
        group.rmdir()
    [(status, text)] = found.problems("memory")
    assert status == "warn" and "for 2 ranks; each takes some 512 MiB" in text
    assert found.fix_of("memory") == "ringrun -np 1"


def test_fewer_cpus_than_ranks() -> None:
    cpu = min(os.sched_getaffinity(0))
    found = run_doctor_once("-np", "3", inside=["taskset", "-c", str(cpu)])
    assert found.problems("CPUs")[0][1].startswith("3 ranks on 1 CPU")
    assert found.fix_of("CPUs") == "ringrun -np 1"


@pytest.mark.parametrize(
    ("name", "value", "status", "text"),
    [
        ("RINGJAX_HEARTBEAT", "soon", "FAIL", "RINGJAX_HEARTBEAT is 'soon'"),
        ("RINGJAX_HEARBEAT", "1", "warn", "is it RINGJAX_HEARTBEAT?"),
    ],
)
def test_bad_settings(name: str, value: str, status: str, text: str) -> None:
    found = run_doctor_once(env={name: value})
    [(how, said)] = found.problems("settings")
    assert how == status and text in said
    assert found.fix_of("settings").startswith(f"unset {name};")


def test_another_library_than_ringjaxs_for_the_collectives_of_jax() -> None:
    wanted = {"RINGJAX_JAX_COLLECTIVES": "1"}
    assert not run_doctor_once(env=wanted).problems("JAX's collectives")
    found = run_doctor_once(env=wanted | {"MPITRAMPOLINE_LIB": "/other.so"})
    [(how, said)] = found.problems("JAX's collectives")
    assert how == "warn" and said.endswith("MPITRAMPOLINE_LIB names /other.so")
    assert found.fix_of("JAX's collectives") == "unset MPITRAMPOLINE_LIB"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NCCL_P2P_DISABLE", "1", "turns a fast way off"),
        ("NCCL_SHM_DISABLE", "1", "turns a fast way off"),
        ("NCCL_SOCKET_IFNAME", "ib", "names no interface here"),
        ("GLOO_SOCKET_IFNAME", "=eth", "names no interface here"),
    ],
)
def test_a_leftover_nccl_variable(name: str, value: str, text: str) -> None:
    [(status, said)] = run_doctor_once(env={name: value}).problems("NCCL")
    # On a machine with GPUs the status is FAIL, because NCCL could not connect.
    assert status in ("warn", "FAIL") and f"{name}={value}" in said and text in said


def test_correct_nccl_variables() -> None:
    env = {"NCCL_P2P_DISABLE": "0", "NCCL_SOCKET_IFNAME": "^docker", "NCCL_DEBUG": "1"}
    assert not run_doctor_once(env=env).problems("NCCL")


@needs_root("unshare")
@pytest.mark.parametrize(
    ("visible", "status", "text"),
    [(None, "FAIL", "the driver shows none"), ("-1", "warn", "CUDA_VISIBLE_DEVICES")],
)
def test_a_gpu_without_a_driver(visible: str | None, status: str, text: str) -> None:
    before = """
    test -e /dev/nvidia0 && exit 7
    mkdir -p /mnt; mount -t tmpfs tmpfs /mnt; cp -a /dev/null /dev/urandom /mnt
    touch /mnt/nvidia0; mkdir /mnt/shm; mount --move /mnt /dev
    """
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    [(how, said)] = run_doctor_once(before=before, inside=MOUNTS, env=env).problems(
        "GPUs"
    )
    assert how == status and text in said


@needs_root("unshare")
def test_a_native_core_that_does_not_load(tmp_path: Path) -> None:
    from ringjax import _native

    broken = tmp_path / "core"
    broken.write_bytes(b"not for this machine")
    before = f"mount --bind {broken} {_native.__file__}"
    found = run_doctor_once(before=before, inside=MOUNTS)
    [(status, text)] = found.problems("core")
    assert status == "FAIL" and "the native core does not load" in text
    assert "pip install --force-reinstall" in found.fix_of("core")


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("jaxlib", "0.7.1", f"jax {metadata.version('jax')} with jaxlib 0.7.1"),
        ("jax", "0.4.30", "jax 0.4.30, and ringjax takes jax<"),
    ],
)
def test_incompatible_versions(
    tmp_path: Path, name: str, version: str, text: str
) -> None:
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), environment("", {})["PYTHONPATH"]])
    found = run_doctor_once(env={"PYTHONPATH": path}).problems("versions")
    assert found[0][0] == "FAIL" and text in found[0][1]


def test_a_host_without_ssh() -> None:
    found = run_doctor_once("-H", "some-host:1", env={"PATH": "/nonexistent"})
    [(status, text)] = found.problems("ssh")
    assert status == "FAIL" and "no ssh client" in text


@needs_root("unshare", "ssh")
def test_a_host_name_unknown_to_ssh() -> None:
    found = run_doctor_once("-H", "some-host.invalid:1", inside=["unshare", "-n"])
    assert found.code == 1
    [(status, text)] = found.problems("ssh")
    assert status == "FAIL" and "the name has no address here" in text


@pytest.mark.parametrize(
    ("said", "text", "mend"),
    [
        ("u@one: Permission denied (publickey).", "not let in", "ssh-copy-id one"),
        ("Host key verification failed.", "does not trust", "ssh-keygen -R one"),
        ("connect to host one port 22: Connection timed out", "not reached", "ping"),
        ("connect to host one port 22: Connection refused", "no ssh server", "ssh; an"),
        ("env: /opt/python: No such file or directory", "same path", "ls -l"),
        ("python: No module named ringjax", "not what it needs", "pip install"),
        ("something else", "something else", "ssh -v one"),
    ],
)
def test_error_messages_of_ssh(said: str, text: str, mend: str, tmp_path: Path) -> None:
    # A fake ssh prints an error message of OpenSSH, of a shell, or of Python.
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\necho Welcome. >&2\necho '{said}' >&2\nexit 255\n")
    ssh.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    found = run_doctor_once("-H", "one:1", env={"PATH": path})
    [(status, how)] = found.problems("ssh")
    assert status == "FAIL" and text in how and said in how
    assert mend in found.fix_of("ssh")


def test_the_trial_job_fails() -> None:
    found = run_doctor_once(
        "-np", "2", trial=True, env={"RINGJAX_ALGORITHM": "nonsense"}
    )
    assert found.code == 1
    [(status, text)] = found.problems("trial")
    assert status == "FAIL" and "nonsense" in text


def test_the_trial_job_uses_tcp_on_one_host() -> None:
    found = run_doctor_once("-np", "2", trial=True, env={"RINGJAX_SHM": "0"})
    [(status, text)] = found.problems("trial")
    assert status == "warn" and "over TCP though all ranks are on one host" in text


def test_the_trial_job_is_slower_than_before() -> None:
    about = {"ranks": 2, "hosts": 2, "allreduce": 0.5, "copy": 0.01, "predicted": 0.1}
    about |= {"transports": {"tcp": 1}}
    [slow] = trial.judge(about | {"remembered": 7200.0, "file": "/x/network-1.json"})
    assert slow.status == "warn" and "remembered for 2 hours" in slow.text
    assert slow.mend == "rm -f /x/network-1.json"
    [well] = trial.judge(about | {"allreduce": 0.11, "remembered": 0.0, "file": ""})
    assert well.status == "ok" and "measured just now" in well.text
