"""Tests of reading a batch system's allocation from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringjax.run.hosts import allocations
from ringjax.run.hosts.slots import HostSlots
from ringjax.run.job_setup import requested_slots

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def hosts(**environ: str) -> list[HostSlots]:
    found = allocations.find(environ)
    assert found is not None
    return list(found.hosts)


@pytest.mark.parametrize(
    ("nodelist", "tasks", "expected"),
    [
        ("n1,n2", "2(x2)", [HostSlots("n1", 2), HostSlots("n2", 2)]),
        (
            "n[08-10]",
            "1(x2),4",
            [HostSlots("n08", 1), HostSlots("n09", 1), HostSlots("n10", 4)],
        ),
        (
            "a[1,3]-ib,b",
            "2",
            [HostSlots("a1-ib", 2), HostSlots("a3-ib", 2), HostSlots("b", 2)],
        ),
        ("lonely", "4", [HostSlots("lonely", 4)]),
    ],
)
def test_slurm_allocations(
    nodelist: str, tasks: str, expected: list[HostSlots]
) -> None:
    nodes = {"SLURM_JOB_NODELIST": nodelist, "SLURM_TASKS_PER_NODE": tasks}
    assert hosts(SLURM_JOB_ID="7", **nodes) == expected


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_JOB_NODELIST": "n1"}, {"LSB_JOBID": "7"}, {"JOB_ID": "7"}]
)
def test_no_allocation_is_found(environ: dict[str, str]) -> None:
    assert allocations.find(environ) is None


def test_slurm_with_gpus_and_no_number_of_tasks() -> None:
    environ = {**SLURM, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"}
    assert hosts(**environ) == [HostSlots("n1", 4), HostSlots("n2", 4)]
    assert hosts(**environ, SLURM_NTASKS="2") == [
        HostSlots("n1", 1),
        HostSlots("n2", 1),
    ]


def test_a_slurm_step_requests_all_gpus_of_a_node() -> None:
    environ = {**SLURM, "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1"}
    found = allocations.find(environ)
    assert found is not None
    assert "--gres=gpu:4" in found.command
    assert "SLURM_GPUS_PER_TASK" in found.unset


def test_gpus_spread_unevenly() -> None:
    environ = {**SLURM, "SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "2"}
    with pytest.raises(ValueError, match="3 GPUs .* ask for --gpus-per-node"):
        allocations.find(environ)
    assert allocations.find_readable(environ) is None


def test_one_host_may_have_more_ranks_than_slots() -> None:
    environ = {**SLURM, "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}
    assert [slot.host for slot in requested_slots(None, None, None, environ)] == [
        "n1"
    ] * 2
    assert len(requested_slots(3, None, None, environ)) == 3


def test_lsf_allocations(tmp_path: Path) -> None:
    assert hosts(LSB_JOBID="7", LSB_MCPU_HOSTS="a 2 b 4") == [
        HostSlots("a", 2),
        HostSlots("b", 4),
    ]
    file = tmp_path / "hosts"
    file.write_text("b\nb\na\n")
    environ = {
        "LSB_JOBID": "7",
        "LSB_DJOB_HOSTFILE": str(file),
        "LSB_MCPU_HOSTS": "c 1",
    }
    assert hosts(**environ) == [HostSlots("b", 2), HostSlots("a", 1)]


def test_grid_engine_allocations(tmp_path: Path) -> None:
    file = tmp_path / "pe_hostfile"
    file.write_text("n1 2 all.q@n1 UNDEFINED\nn2 4 all.q@n2 <NULL>\n")
    environ = {"JOB_ID": "7", "PE_HOSTFILE": str(file)}
    assert hosts(**environ) == [HostSlots("n1", 2), HostSlots("n2", 4)]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST: .*brackets"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "x"}, "SLURM_TASKS_PER_NODE: .*'x'"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b"}, "no number behind 'b'"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a two"}, "LSB_MCPU_HOSTS: slots of 'a'"),
        ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/no/file"}, "LSB_DJOB_HOSTFILE /no"),
        ({"JOB_ID": "7", "PE_HOSTFILE": "/no/file"}, "PE_HOSTFILE /no/file: .*No such"),
    ],
)
def test_an_unreadable_variable_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocations.find(environ)
    assert allocations.find_readable(environ) is None  # the user may name other hosts
