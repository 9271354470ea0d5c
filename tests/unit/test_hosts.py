"""Tests of host lists, host files, and the slots of ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.run.hosts.job_spec import check_agent_command
from ringjax.run.hosts.slots import (
    HostSlots,
    assign_slots,
    is_local,
    merge_aliases,
    parse_hostfile,
    parse_hosts,
    reachable_addresses,
)
from ringjax.run.job_setup import requested_hosts, requested_slots


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:2,b:4", [HostSlots("a", 2), HostSlots("b", 4)]),
        (" a:2 , b ", [HostSlots("a", 2), HostSlots("b", 1)]),
        ("10.0.0.7:1,[fe80::1]:3", [HostSlots("10.0.0.7", 1), HostSlots("fe80::1", 3)]),
        ("[::1]", [HostSlots("::1", 1)]),
        ("a:1,b:2,a:3", [HostSlots("a", 4), HostSlots("b", 2)]),
        ("me@gpu-01.example.org:8", [HostSlots("me@gpu-01.example.org", 8)]),
    ],
)
def test_host_list(text: str, expected: list[HostSlots]) -> None:
    assert parse_hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-H: no host given"),
        ("a:0", "slots of 'a' must be a positive whole number, not '0'"),
        ("a:two", "slots of 'a' must be a positive whole number, not 'two'"),
        ("a:", "must be a positive whole number, not ''"),
        ("-oProxyCommand=x:1", "'-oProxyCommand=x' is not a host name"),
        ("a b:1", "'a b' is not a host name"),
        ("me@-x:1", "'me@-x' is not a host name"),
    ],
)
def test_bad_host_list_names_the_entry(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^-H: ") as caught:
        parse_hosts(text)
    assert message in str(caught.value)


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# the cluster\nhost1 slots=2\n\nhost2:4 # fast\nhost3\n"
        "host4 slots=1 max_slots=8\nhost1 slots=1\n"
    )
    expected = [
        HostSlots("host1", 3),
        HostSlots("host2", 4),
        HostSlots("host3", 1),
        HostSlots("host4", 1),
    ]
    assert parse_hostfile(file) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slots=x\n", "line 2: slots of 'b'"),
        ("a cores=2\n", "line 1: 'cores=2' is not understood"),
        ("# nobody\n", "no host in it"),
    ],
)
def test_bad_hostfile_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_hostfile(file)


def test_missing_hostfile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hostfile .*nowhere: .*No such file"):
        parse_hostfile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("kubectl exec pod", "expected a command with {host} in it"),
        (" ", "expected a command with {host} in it"),
        ("rsh {host} 'exec", "No closing quotation"),
    ],
)
def test_bad_agent_command(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--agent-command .*{message}"):
        check_agent_command(template)


def test_ranks_are_assigned_as_in_horovod() -> None:
    slots = assign_slots([HostSlots("a", 3), HostSlots("b", 1), HostSlots("c", 2)], 6)
    assert [s.host for s in slots] == list("aaabcc")
    assert [s.rank for s in slots] == [0, 1, 2, 3, 4, 5]
    assert [s.local_rank for s in slots] == [0, 1, 2, 0, 0, 1]
    assert [s.local_size for s in slots] == [3, 3, 3, 1, 2, 2]
    assert [s.cross_rank for s in slots] == [0, 0, 0, 1, 2, 1]
    assert [s.cross_size for s in slots] == [3, 2, 1, 3, 3, 2]
    env = slots[5].environment()
    for prefix in ("RINGJAX", "HOROVOD"):
        assert env[f"{prefix}_RANK"] == "5"
        assert env[f"{prefix}_SIZE"] == "6"
        assert env[f"{prefix}_LOCAL_RANK"] == "1"
        assert env[f"{prefix}_LOCAL_SIZE"] == "2"
        assert env[f"{prefix}_CROSS_RANK"] == "1"
        assert env[f"{prefix}_CROSS_SIZE"] == "2"
        assert env[f"{prefix}_HOSTNAME"] == "c"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_every_slot_has_one_rank(counts: list[int], data: st.DataObject) -> None:
    hosts = [HostSlots(f"h{i}", count) for i, count in enumerate(counts)]
    size = data.draw(st.integers(1, sum(counts)))
    slots = assign_slots(hosts, size)
    assert [s.rank for s in slots] == list(range(size))
    assert {(s.host, s.local_rank) for s in slots} == {
        (s.host, local) for s in slots for local in range(s.local_size)
    }
    for slot in slots:
        column = [s for s in slots if s.local_rank == slot.local_rank]
        assert len(column) == slot.cross_size
        assert column[slot.cross_rank] == slot


def test_too_few_slots() -> None:
    with pytest.raises(ValueError, match=r"-np 4: .*there are 3 \(a:1, b:2\)"):
        assign_slots([HostSlots("a", 1), HostSlots("b", 2)], 4)


def test_sources_of_the_host_list(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("x slots=2\n")
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    environ = {"SLURM_JOB_ID": "7", **nodes}

    def names(np: int | None, hosts: str | None, hostfile: str | None) -> list[str]:
        return [slot.host for slot in requested_slots(np, hosts, hostfile, environ)]

    assert names(None, "a:1,b:1", None) == ["a", "b"]
    assert names(1, None, str(file)) == ["x"]
    assert names(3, None, None) == ["n1", "n1", "n2"]
    assert [s.host for s in requested_slots(2, None, None, {})] == ["localhost"] * 2
    with pytest.raises(ValueError, match="-np: say how many"):
        requested_slots(None, None, None, {})
    with pytest.raises(ValueError, match="only one of them"):
        requested_slots(1, "a:1", str(file), {})


def test_names_of_this_machine_are_merged() -> None:
    own = socket.gethostname()
    there = [
        HostSlots("n1.invalid", 2),
        HostSlots("localhost", 1),
        HostSlots("127.0.0.1", 2),
    ]
    found = merge_aliases([*there, HostSlots("n2.invalid", 1), HostSlots(own, 3)])
    wanted = [
        HostSlots("n1.invalid", 2),
        HostSlots("localhost", 6),
        HostSlots("n2.invalid", 1),
    ]
    assert found == wanted
    assert merge_aliases([HostSlots(own, 3), HostSlots("a@localhost", 1)]) == [
        HostSlots(own, 3),
        HostSlots("a@localhost", 1),
    ]
    hosts = requested_hosts("localhost:2,127.0.0.1:2", None, {}, None)
    assert hosts == [HostSlots("localhost", 4)]


def test_local_names() -> None:
    for name in ("localhost", "127.0.0.1", "127.0.0.2", "::1", socket.gethostname()):
        assert is_local(name), name
    for name in ("203.0.113.7", "no-such-host.invalid", "me@localhost"):
        assert not is_local(name), name


def test_own_addresses() -> None:
    assert reachable_addresses([], "") == ["127.0.0.1"]
    assert reachable_addresses([], "lo") in (["127.0.0.1"], ["127.0.0.1", "::1"])
    assert reachable_addresses(["127.0.0.2"], "") == ["127.0.0.1"]
    # A host that only ssh can resolve may need the address of any interface.
    found = reachable_addresses(["no-such-host.invalid"], "")
    assert found
    assert "0.0.0.0" not in found
    text = "--network-interfaces: .*'nope0' does not exist .*this host has .*lo"
    with pytest.raises(ValueError, match=text):
        reachable_addresses(["127.0.0.2"], "nope0")
