"""Tests of reading rank and size from the environment variables of launchers."""

from __future__ import annotations

import re

import pytest

import ringjax
from ringjax.config import Config
from ringjax.control import launch_environment
from ringjax.control.launch_environment import LaunchInfo
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
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "PMIX_NAMESPACE": "jsm-4711",
    "PMIX_RANK": "5",
}
KUBEFLOW_JAX = {
    "JAX_PROCESS_ID": "1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:29500",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCH = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
}
PYTORCH_JOB = PYTORCH | {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "3"}
KUBEFLOW_PYTORCH = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-23-train-1",
}
PRTERUN = {"PRTE_LAUNCHED": "1", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-7@1"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
HALF = [
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    (MPICH, "PMI_RANK", "PMI_SIZE"),
    (TORCHRUN, "RANK", "WORLD_SIZE"),
    (JSRUN, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    (KUBEFLOW_JAX, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    (KUBEFLOW_PYTORCH, "PET_NODE_RANK", "PET_NNODES"),
    (SKYPILOT, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
]


def find(environ: dict[str, str]) -> LaunchInfo:
    return launch_environment.detect_launch(Config.from_env(environ), environ)


def test_no_variables_mean_a_job_of_one() -> None:
    info = find({})
    assert (info.rank, info.size, info.launcher) == (0, 1, "a job of one")


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
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "6"},
            3,
            6,
            "Slurm",
            False,
        ),
        (JSRUN, 5, 12, "jsrun", False),
        (JSRUN | {"JSM_NAMESPACE_LOCAL_SIZE": "12"}, 5, 12, "jsrun", True),
        (KUBEFLOW_JAX, 1, 2, "Kubeflow's runtime for JAX", False),
        (PYTORCH, 2, 3, "a launcher for PyTorch", False),
        (PYTORCH | {"MASTER_ADDR": "127.0.0.1"}, 2, 3, "a launcher for PyTorch", True),
        (PYTORCH | {"LOCAL_WORLD_SIZE": "3"}, 2, 3, "a launcher for PyTorch", True),
        (PYTORCH_JOB, 2, 3, "a launcher for PyTorch", False),
        (KUBEFLOW_PYTORCH, 1, 2, "Kubeflow's runtime for PyTorch", False),
        (SKYPILOT, 1, 2, "SkyPilot", False),
        (PMI | {"MASTER_ADDR": "localhost"}, 1, 2, "a launcher with PMI", True),
    ],
)
def test_rank_and_size_of_each_launcher(
    environ: dict[str, str], rank: int, size: int, source: str, one_host: bool
) -> None:
    info = find(environ)
    assert (info.rank, info.size, info.launcher) == (rank, size, source)
    assert info.single_host == one_host


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (SLURM | OPEN_MPI, "Open MPI"),  # mpirun inside a Slurm step
        (SLURM | MPICH, "MPICH"),  # hydra starts its proxies as a Slurm step
        (SLURM | {"PMI_RANK": "0", "PMI_SIZE": "4"}, "Slurm"),  # srun --mpi=pmi2
        (SLURM | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, "Slurm"),
        (SLURM | PYTORCH, "Slurm"),  # exported by the batch script
        (
            SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | PYTORCH,
            "a launcher for PyTorch",  # in a shell by srun --pty
        ),
        (JSRUN | OPEN_MPI, "Open MPI"),
        (KUBEFLOW_JAX | OPEN_MPI, "Open MPI"),  # mpirun in a pod
        (KUBEFLOW_PYTORCH | TORCHRUN, "torchrun"),
        (INDEXED_JOB | {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "1"}, "RINGJAX_RANK"),
        (SLURM | TORCHRUN, "torchrun"),
        (
            SLURM | OPEN_MPI | {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "1"},
            "RINGJAX_RANK",
        ),
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], source: str) -> None:
    assert find(environ).launcher == source


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_ID": "4294967291"},  # the batch script itself
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {"SLURM_STEP_ID": "9" * 5000},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": ""},
        {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}
        | {"PMIX_NAMESPACE": "slurm.pmix.77.0"},
        {"SLURM_PROCID": None},
    ],
)
def test_a_batch_script_is_a_job_of_one(change: dict[str, str | None]) -> None:
    batch = SLURM | {"SLURM_PROCID": "0"}
    environ = {k: v for k, v in (batch | change).items() if v is not None}
    assert find(environ).size == 1


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        {"PMI_RANK": "1"},
        {"PET_NPROC_PER_NODE": "4"},
        {"SKYPILOT_NODE_IPS": "10.0.0.4"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-1"},
        dict.fromkeys(KUBEFLOW_JAX | SKYPILOT | PRTERUN | INDEXED_JOB | SLURM, ""),
    ],
)
def test_unrelated_variables_are_ignored(environ: dict[str, str]) -> None:
    assert find(environ).launcher == "a job of one"


@pytest.mark.parametrize(
    "environ",
    [
        KUBEFLOW_JAX | {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "1"},
        KUBEFLOW_PYTORCH | {"PET_NODE_RANK": "0", "PET_NNODES": "1"},
        KUBEFLOW_PYTORCH
        | {"PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        SKYPILOT | {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        *({size: "1"} for _, _, size in HALF),
    ],
)
def test_launchers_of_one_process(environ: dict[str, str]) -> None:
    info = find(environ)
    assert (info.rank, info.size, info.single_host) == (0, 1, True)


def refusal(environ: dict[str, str]) -> str:
    """Returns the error for `environ`, which must not silently mean a job of one."""
    with pytest.raises(StartupError) as caught:
        find(environ)
    on_purpose = environ | {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "1"}
    assert find(on_purpose).size == 1
    elastic = environ | {"RINGJAX_ELASTIC": "1", "RINGJAX_WORKER": "7"}
    assert find(elastic).size == 1
    text = str(caught.value)
    assert "for a job of one on purpose set RINGJAX_RANK=0 and RINGJAX_SIZE=1" in text
    return text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            PRTERUN,
            r"prterun.*\(PMIX_RANK=1\).*how many.*start it by mpirun, or set ",
        ),
        (SLURM | PRTERUN, "prterun"),  # its daemons are the step's tasks
        (
            INDEXED_JOB,
            r"\(JOB_COMPLETION_INDEX=0\), but nothing tells how many there are: set "
            r"RINGJAX_RANK to \$JOB_COMPLETION_INDEX and RINGJAX_SIZE to how many",
        ),
        (PYTORCH | {"MASTER_ADDR": ""}, "RANK=2 WORLD_SIZE=3.*the host of rank 0"),
        (
            PMI,
            "PMI_RANK=1 PMI_SIZE=2.*host of rank 0: set MASTER_ADDR to it, localhost",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "head:1234"},
            r"\(JAX_COORDINATOR_ADDRESS=head:1234\), but JAX_PROCESS_ID is not set",
        ),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, "the host of rank 0: set MASTER_ADDR"),
        (
            KUBEFLOW_PYTORCH | {"PET_NPROC_PER_NODE": "4"},
            "PET_NPROC_PER_NODE is '4' and not 1: start it by torchrun, or set RING",
        ),
        (KUBEFLOW_PYTORCH | {"PET_NPROC_PER_NODE": "auto"}, "is 'auto' and not 1"),
        (
            KUBEFLOW_PYTORCH
            | {"PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"},
            "PET_NPROC_PER_NODE is '4' and not 1",
        ),
        # Two pods of four processes. RANK counts pods, and WORLD_SIZE counts processes.
        (
            PYTORCH_JOB
            | {"RANK": "1", "WORLD_SIZE": "8", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
            | {"PET_NPROC_PER_NODE": "4"},
            "PET_NPROC_PER_NODE is '4' and not 1",
        ),
        (
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "train-worker-0:23456"},
            "PET_NODE_RANK is not set: start it by torchrun",
        ),
        (
            KUBEFLOW_PYTORCH | {"PET_NNODES": "1:4"},
            "PET_NNODES is '1:4': expected a number: start it by torchrun",
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
            r"Slurm.*\(SLURM_PROCID=3\).*how many there are: start it by srun, or",
        ),
    ],
)
def test_several_processes_are_no_jobs_of_one(
    environ: dict[str, str], expected: str
) -> None:
    assert re.search(expected, refusal(environ))


@pytest.mark.parametrize(("environ", "rank", "size"), HALF)
def test_incomplete_variables_are_refused(
    environ: dict[str, str], rank: str, size: str
) -> None:
    without = {k: v for k, v in environ.items() if k != size}
    assert f"{size} is not set" in refusal(without)
    assert f"{size} is not set" in refusal(environ | {size: ""})
    alone = {k: v for k, v in environ.items() if k not in (rank, "PMIX_RANK")}
    assert f"{rank} is not set" in refusal(alone)


BAD = ["x", "-1", "1.0", " 1", "+1", "1 ", "\u0661", "9" * 10, "9" * 5000, "0x1"]


@pytest.mark.parametrize("bad", BAD, ids=lambda text: text[:11])
@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        *HALF,
        (PYTORCH, "RANK", "WORLD_SIZE"),
        (PMI | {"MASTER_ADDR": "head"}, "PMI_RANK", "PMI_SIZE"),
        (SLURM, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_bad_ranks_and_sizes(
    environ: dict[str, str], rank: str, size: str, bad: str
) -> None:
    for name in (rank, size):
        text = refusal(environ | {name: bad})
        assert re.search(
            rf"but {name} is .*: expected (a number|at most 2147483647)", text
        )
        assert len(text) < 1000
    assert f"{rank} is 9: expected less than {size}, which is" in refusal(
        environ | {rank: "9", size: "9"}
    )
    assert f"{rank} is 0: expected less than {size}, which is 0" in refusal(
        environ | {rank: "0", size: "0"}
    )


@pytest.mark.parametrize("environ", [OPEN_MPI, TORCHRUN, MPICH, JSRUN])
def test_bad_local_sizes(environ: dict[str, str]) -> None:
    (name,) = (k for k in environ if "LOCAL" in k)
    assert f"{name} is 'x': expected a number" in refusal(environ | {name: "x"})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("head:29500", "head"),
        ("10.0.0.4:29500", "10.0.0.4"),
        ("[fd00::1]:29500", "fd00::1"),
        ("[fd00::1]", "fd00::1"),
        ("fd00::1", "fd00::1"),
        ("head", "head"),
    ],
)
def test_rendezvous_addresses_with_and_without_ports(text: str, host: str) -> None:
    environ = KUBEFLOW_JAX | {"JAX_COORDINATOR_ADDRESS": text}
    assert find(environ).rank0_host == host
    assert find(PYTORCH | {"MASTER_ADDR": text}).rank0_host == host


def test_a_rendezvous_without_a_rank() -> None:
    half = {"RINGJAX_RENDEZVOUS": "127.0.0.1:5", "RINGJAX_JOB": "0" * 16}
    with pytest.raises(StartupError, match="RINGJAX_RENDEZVOUS is set, but nothing"):
        find(half)
    assert find(half | JSRUN).size == 12


def test_init_refuses_incomplete_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PRTERUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match="PMIX_RANK=1.*RINGJAX_SIZE"):
        ringjax.init()
    assert not ringjax.is_initialized()


def test_identity_of_a_job() -> None:
    assert find(SLURM).identity == find(SLURM | {"SLURM_PROCID": "0"}).identity
    assert find(SLURM).identity != find(SLURM | {"SLURM_STEP_ID": "1"}).identity
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert find(TORCHRUN).identity != find(again).identity
    assert find(MPICH).identity == ""  # its ranks have one parent
    rank_0 = {"SKYPILOT_NODE_RANK": "0"}
    assert find(SKYPILOT).identity == find(SKYPILOT | rank_0).identity
    assert (
        find(SKYPILOT).identity != find(SKYPILOT | {"SKYPILOT_TASK_ID": "2"}).identity
    )


def test_address_of_rank_0() -> None:
    assert find(SLURM).rank0_host == "n1"
    assert find(SLURM | {"MASTER_ADDR": "head"}).rank0_host == "head"
    assert find(SLURM | {"SLURM_STEP_RESV_PORTS": "16900-16901"}).port == 16900
    assert find(TORCHRUN).port == 0  # torch's store uses MASTER_PORT
    assert find(SKYPILOT).rank0_host == "10.0.0.4"
    assert find(KUBEFLOW_PYTORCH).rank0_host == "train-node-0-0.train"
    assert find(KUBEFLOW_PYTORCH).port == 29400
    assert find(KUBEFLOW_JAX).port == 0  # jax.distributed uses it
    by_hand = {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "2", "MASTER_ADDR": "head"}
    info = find(by_hand | {"MASTER_PORT": "4000"})
    assert (info.rank0_host, info.port, info.single_host) == ("head", 4000, False)


def test_local_size_of_one_and_several_hosts() -> None:
    environ = {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "4", "MASTER_ADDR": "head"}
    assert find(environ | {"RINGJAX_LOCAL_SIZE": "4"}).single_host
    assert not find(environ | {"RINGJAX_LOCAL_SIZE": "2"}).single_host


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
