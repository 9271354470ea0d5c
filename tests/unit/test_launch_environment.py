"""Who am I: what engines put into the environment, and what must not be believed."""

from __future__ import annotations

import pytest

from ringjax.config import Config
from ringjax.control import launch_environment
from ringjax.control.launch_environment import Place
from ringjax.control.slurm import hosts_of
from ringjax.errors import StartupError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "123456789",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def find(environ: dict[str, str]) -> Place:
    return launch_environment.find(Config.from_env(environ), environ)


def test_alone() -> None:
    place = find({})
    assert (place.rank, place.size, place.source) == (0, 1, "a job of one")


@pytest.mark.parametrize(
    ("environ", "rank", "size", "source", "one_host"),
    [
        ({"RINGJAX_RANK": "1", "RINGJAX_SIZE": "2"}, 1, 2, "RINGJAX_RANK", True),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"}, 0, 3, "RINGJAX_RANK", True),
        (OPEN_MPI, 2, 4, "Open MPI", True),
        (MPICH, 1, 3, "MPICH", True),
        (TORCHRUN, 1, 2, "torchrun", True),
        (SLURM, 3, 4, "Slurm", False),
        (SLURM | {"SLURM_STEP_NODELIST": "n1"}, 3, 4, "Slurm", True),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, 4, "Open MPI", False),
    ],
)
def test_engines(
    environ: dict[str, str], rank: int, size: int, source: str, one_host: bool
) -> None:
    place = find(environ)
    assert (place.rank, place.size, place.source) == (rank, size, source)
    assert place.one_host == one_host


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (SLURM | OPEN_MPI, "Open MPI"),  # mpirun inside a Slurm step
        (SLURM | MPICH, "MPICH"),  # hydra starts its proxies as a Slurm step
        (SLURM | {"PMI_RANK": "0", "PMI_SIZE": "4"}, "Slurm"),  # srun --mpi=pmi2
        (SLURM | TORCHRUN, "torchrun"),
        (
            SLURM | OPEN_MPI | {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "1"},
            "RINGJAX_RANK",
        ),
    ],
)
def test_the_innermost_engine_counts(environ: dict[str, str], source: str) -> None:
    assert find(environ).source == source


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_ID": "4294967291"},  # the batch script itself
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": None},
    ],
)
def test_a_batch_script_is_not_rank_0_of_n(change: dict[str, str | None]) -> None:
    environ = {k: v for k, v in (SLURM | change).items() if v is not None}
    assert find(environ).size == 1


def test_stray_variables_mean_nothing() -> None:
    assert find({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "1"}).size == 1


def test_what_identifies_a_job() -> None:
    assert find(SLURM).identity == find(SLURM | {"SLURM_PROCID": "0"}).identity
    assert find(SLURM).identity != find(SLURM | {"SLURM_STEP_ID": "1"}).identity
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert find(TORCHRUN).identity != find(again).identity
    assert find(MPICH).identity == ""  # its ranks have one parent


def test_where_rank_0_is() -> None:
    assert find(SLURM).first_host == "n1"
    assert find(SLURM | {"MASTER_ADDR": "head"}).first_host == "head"
    assert find(SLURM | {"SLURM_STEP_RESV_PORTS": "16900-16901"}).ports == (16900,)
    assert find(TORCHRUN).ports == ()  # torch's own store sits on MASTER_PORT
    by_hand = {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "2", "MASTER_ADDR": "head"}
    place = find(by_hand | {"MASTER_PORT": "4000"})
    assert (place.first_host, place.ports, place.one_host) == ("head", (4000,), False)


def test_local_size_tells_whether_there_are_other_hosts() -> None:
    environ = {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "4", "MASTER_ADDR": "head"}
    assert find(environ | {"RINGJAX_LOCAL_SIZE": "4"}).one_host
    assert not find(environ | {"RINGJAX_LOCAL_SIZE": "2"}).one_host


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(StartupError, match="OMPI_COMM_WORLD_SIZE is 'x': expected"):
        find(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1,3],m5", ["n1", "n3", "m5"]),
        ("gpu[08-10,12]-ib", ["gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu12-ib"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a,b-c,d.e.f", ["a", "b-c", "d.e.f"]),
        ("", []),
    ],
)
def test_slurm_node_lists(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *(
            "n[1-",
            f"n[{'0' * 21}-1]",
            "n1]",
            "n[]",
            "n[a-b]",
            "n[3-1]",
            "n[[1]]",
            "n[1-99999999]",
        ),
        "n[1-60000][1-60000]",
    ],
)
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        hosts_of(text)
    step = SLURM | {"SLURM_STEP_NODELIST": text}
    with pytest.raises(StartupError, match="SLURM_STEP_NODELIST: node list"):
        find(step)
