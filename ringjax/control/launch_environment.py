"""Finds rank and size in the environment variables that a launcher has set.

There are three sources. The first source that applies decides:

1. RINGJAX_RANK and RINGJAX_SIZE, or Horovod's variables for rank and size, which
   ringrun or the user sets;
2. the variables of a launcher in a table, the innermost launcher first;
3. if no launcher has set a variable, this process is a job of one.

If some variables show that there are several processes but rank or size is missing,
`detect_launch` raises an error. Otherwise N separate trainings would run, and look like
one training that works. config.py reads the variables `RINGJAX_*`, and
membership/rendezvous_discovery.py opens the connections.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.slurm import hosts_of
from ringjax.errors import StartupError

# Slurm's step ids from this value on mark batch scripts, interactive shells and the
# like. These processes have the variables of the job, but srun started no ranks there.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MAX = 2**31 - 1  # the limit of a rank or size, also of RINGJAX_RANK and RINGJAX_SIZE

Environ = Mapping[str, str]


@dataclass(frozen=True)
class LaunchInfo:
    """Rank, size and hosts of a process, as its launcher has set them.

    Attributes:
        launcher: the name of the launcher, for errors.
        single_host: whether all ranks are known to run on this host.
        identity: a text that all ranks of this job have, and no rank of another job; ""
            if the launcher sets no such text.
        rank0_host: a name or address of the host of rank 0; "" if unknown.
        port: a port on the host of rank 0 that is reserved for this job; 0 if unknown.
    """

    rank: int
    size: int
    launcher: str
    single_host: bool = False
    identity: str = ""
    rank0_host: str = ""
    port: int = 0


def detect_launch(config: Config, environ: Environ = os.environ) -> LaunchInfo:
    """Finds rank and size of this process.

    Raises:
        StartupError: a launcher has started several processes, but rank or size is
            missing. The text says which variables exist and which to set.
    """
    if config.rank is not None and config.size is not None:
        return _from_settings(config, environ)
    try:
        for detect in _DETECTORS:
            if (info := detect(environ)) is not None:
                return info
    except StartupError:
        if not config.elastic:  # the coordinator of an elastic job assigns ranks
            raise
    if config.rendezvous and not config.elastic:
        raise StartupError(
            "RINGJAX_RENDEZVOUS is set, but nothing tells this process's rank: set "
            "RINGJAX_RANK and RINGJAX_SIZE, to 0 and 1 for a job of one on purpose"
        )
    return LaunchInfo(0, 1, "a job of one", single_host=True)


def _from_settings(config: Config, environ: Environ) -> LaunchInfo:
    assert config.rank is not None and config.size is not None
    rank0_host = environ.get("MASTER_ADDR", "")
    local = config.local_size
    single_host = local == config.size or (local is None and not rank0_host)
    return LaunchInfo(
        config.rank,
        config.size,
        "RINGJAX_RANK",
        single_host=single_host,
        identity=f"job {config.job}" if config.job else "",
        rank0_host=rank0_host,
        port=_port(environ.get("MASTER_PORT", "")),
    )


@dataclass(frozen=True, kw_only=True)
class _LaunchVariables:
    """The names of the environment variables that one launcher sets for each process.

    A launcher that sets no such variable has the name "". An empty value means unset.

    Attributes:
        launcher: the name of the launcher, for errors.
        rank, size: the variables with rank and size.
        local_size: the variable with the number of ranks on this host.
        needs: a variable that this launcher always sets, unlike other launchers with
            the same variables for rank and size.
        both: whether to ignore rank without size and size without rank, because users
            set one of these variables for other purposes.
        size_copy: a variable that repeats the size. If its value differs from the size,
            this launcher has not set rank and size.
        marker: another variable that shows that there are several processes.
        per_node: the variable with the number of processes of a node, if rank and size
            count nodes.
        hosts: variables that may name the host of rank 0, or a list of hosts that
            begins with this host.
        port: the variable with a port that is free on the host of rank 0.
        identity: variables whose values together identify the job.
        instead: advice for errors, to show before the advice to set variables by hand.
    """

    launcher: str
    rank: str
    size: str = ""
    local_size: str = ""
    needs: str = ""
    both: bool = False
    size_copy: str = ""
    marker: str = ""
    per_node: str = ""
    hosts: tuple[str, ...] = ("MASTER_ADDR",)
    port: str = ""
    identity: tuple[str, ...] = ()
    instead: str = ""

    def detect(self, environ: Environ) -> LaunchInfo | None:
        """Finds rank and size. Returns None if another launcher started the process.

        Raises StartupError if this launcher started the process, but a variable that
        `LaunchInfo` needs is missing or invalid.
        """
        if not self._applies(environ):
            return None
        rank, size = self.rank_and_size(environ)
        self._check_per_node(environ, size)
        hosts = [_host(environ.get(name, "")) for name in self.hosts]
        rank0_host = next(filter(None, hosts), "")
        if environ.get(self.local_size):
            single_host = self._number(environ, self.local_size) == size
        elif size == 1 or rank0_host:
            single_host = size == 1 or _is_this_host(rank0_host)
        else:
            raise self._error(
                environ,
                "nothing tells the host of rank 0",
                "set MASTER_ADDR to it, localhost if it is the only one, or ",
            )
        found = [environ[name] for name in self.identity if environ.get(name)]
        return LaunchInfo(
            rank,
            size,
            self.launcher,
            single_host=single_host,
            identity=" ".join([self.launcher, *found]) if found else "",
            rank0_host=rank0_host,
            port=_port(environ.get(self.port, "")),
        )

    def rank_and_size(self, environ: Environ) -> tuple[int, int]:
        """Reads rank and size. Raises StartupError if either is missing or invalid."""
        if not self.size:
            raise self._error(environ, "nothing tells how many there are")
        rank, size = (self._number(environ, name) for name in (self.rank, self.size))
        if rank >= size:
            why = f"{self.rank} is {rank}: expected less than {self.size}, which is"
            raise self._error(environ, f"{why} {size}")
        return rank, size

    def _error(self, environ: Environ, why: str, instead: str = "") -> StartupError:
        names = (self.needs, self.rank, self.size, self.local_size, self.per_node)
        found = [
            f"{name}={environ[name]:.60}"
            for name in dict.fromkeys((*names, self.marker))
            if environ.get(name)
        ]
        instead = instead or self.instead
        variables = "RINGJAX_RANK and RINGJAX_SIZE"
        if not self.size:
            variables = (
                f"RINGJAX_RANK to ${self.rank} and RINGJAX_SIZE to how many there are"
            )
        return StartupError(
            f"{self.launcher} seems to have started this process as one of several "
            f"({' '.join(found)}), but {why}: {instead}set {variables}, and between "
            f"hosts MASTER_ADDR to the host of rank 0; for a job of one on purpose set "
            f"RINGJAX_RANK=0 and RINGJAX_SIZE=1"
        )

    def _applies(self, environ: Environ) -> bool:
        if self.needs and not environ.get(self.needs):
            return False
        rank, size = environ.get(self.rank), environ.get(self.size)
        if self.both and not (rank and size):
            return False
        if self.size_copy and environ.get(self.size_copy, "") not in ("", size):
            return False
        return bool(rank or environ.get(self.marker) or (size and size != "1"))

    def _number(self, environ: Environ, name: str) -> int:
        text = environ.get(name, "")
        if not text:
            raise self._error(environ, f"{name} is not set")
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise self._error(environ, f"{name} is {text!r:.60}: expected a number")
        if int(text) > _MAX:
            raise self._error(environ, f"{name} is {text}: expected at most {_MAX}")
        return int(text)

    def _check_per_node(self, environ: Environ, nodes: int) -> None:
        """Raises StartupError if each node should run several processes."""
        text = environ.get(self.per_node, "")
        # With a word such as "auto", torchrun would count the devices of the node.
        if text in ("", "1") or (nodes == 1 and text.isalpha()):
            return
        raise self._error(environ, f"{self.per_node} is {text!r:.60} and not 1")


_OPEN_MPI = _LaunchVariables(
    launcher="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    port="MASTER_PORT",
    identity=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_TORCHRUN = _LaunchVariables(
    launcher="torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_size="LOCAL_WORLD_SIZE",
    needs="TORCHELASTIC_RUN_ID",
    # PyTorch's TCPStore listens on MASTER_PORT, so ringjax cannot listen there. The
    # port only helps to identify the job.
    identity=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"),
)
_MPICH = _LaunchVariables(
    launcher="MPICH",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_size="MPI_LOCALNRANKS",
    needs="MPI_LOCALNRANKS",  # Slurm's PMI sets rank and size, too
    port="MASTER_PORT",
)
_JSRUN = _LaunchVariables(
    launcher="jsrun",
    rank="JSM_NAMESPACE_RANK",
    size="JSM_NAMESPACE_SIZE",
    local_size="JSM_NAMESPACE_LOCAL_SIZE",
    port="MASTER_PORT",
    identity=("PMIX_NAMESPACE",),
)
_PMIX = _LaunchVariables(
    launcher="prterun, or another launcher with PMIx,",
    rank="PMIX_RANK",
    instead="start it by mpirun, or ",
)
_SLURM = _LaunchVariables(
    launcher="Slurm", rank="SLURM_PROCID", instead="start it by srun, or "
)
_KUBEFLOW_JAX = _LaunchVariables(
    launcher="Kubeflow's runtime for JAX",
    rank="JAX_PROCESS_ID",
    size="JAX_NUM_PROCESSES",
    marker="JAX_COORDINATOR_ADDRESS",
    # No `port`: jax.distributed listens on the port of JAX_COORDINATOR_ADDRESS.
    hosts=("JAX_COORDINATOR_ADDRESS", "MASTER_ADDR"),
    identity=("JAX_COORDINATOR_ADDRESS",),
)
_PYTORCH = _LaunchVariables(
    launcher="a launcher for PyTorch",
    rank="RANK",
    size="WORLD_SIZE",
    local_size="LOCAL_WORLD_SIZE",
    both=True,
    size_copy="PET_NNODES",
    port="MASTER_PORT",
    identity=("MASTER_ADDR", "MASTER_PORT"),
)
_KUBEFLOW_PYTORCH = _LaunchVariables(
    launcher="Kubeflow's runtime for PyTorch",
    rank="PET_NODE_RANK",
    size="PET_NNODES",
    marker="PET_RDZV_ENDPOINT",
    per_node="PET_NPROC_PER_NODE",
    hosts=("PET_MASTER_ADDR", "MASTER_ADDR"),
    port="PET_MASTER_PORT",
    identity=("PET_MASTER_ADDR", "PET_MASTER_PORT"),
    instead="start it by torchrun, or ",
)
_SKYPILOT = _LaunchVariables(
    launcher="SkyPilot",
    rank="SKYPILOT_NODE_RANK",
    size="SKYPILOT_NUM_NODES",
    hosts=("MASTER_ADDR", "SKYPILOT_NODE_IPS"),
    port="MASTER_PORT",
    identity=("SKYPILOT_TASK_ID",),
)
_INDEXED_JOB = _LaunchVariables(
    launcher="an Indexed Job of Kubernetes",
    rank="JOB_COMPLETION_INDEX",
)
_PMI = _LaunchVariables(
    launcher="a launcher with PMI",
    rank="PMI_RANK",
    size="PMI_SIZE",
    both=True,
    port="MASTER_PORT",
)


def _pmix(environ: Environ) -> LaunchInfo | None:
    # srun --mpi=pmix sets PMIX_RANK, too, but `_slurm` reads Slurm's own variables.
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        return None
    return _PMIX.detect(environ)


def _slurm(environ: Environ) -> LaunchInfo | None:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    tasks = "SLURM_STEP_NUM_TASKS"
    tasks = tasks if environ.get(tasks) else "SLURM_NTASKS"
    if not environ.get("SLURM_PROCID") or environ.get(tasks, "") in ("", "1"):
        return None
    if not (step.isdecimal() and len(step) <= 10 and int(step) < _FIRST_SPECIAL_STEP):
        return None
    rank, size = replace(_SLURM, size=tasks).rank_and_size(environ)
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    try:
        hosts = hosts_of(nodes)
    except ValueError as error:
        raise StartupError(f"SLURM_STEP_NODELIST: {error}") from None
    job = environ.get("SLURM_JOB_ID", "0")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "").split("-")[0].split(",")[0]
    return LaunchInfo(
        rank,
        size,
        "Slurm",
        single_host=len(hosts) == 1,
        identity=f"slurm {job} {step} {restarts}",
        rank0_host=environ.get("MASTER_ADDR") or (hosts[0] if hosts else ""),
        port=_port(reserved),
    )


def _slurm_outside_of_steps(environ: Environ) -> LaunchInfo | None:
    # A single process that srun did not start has SLURM_PROCID=0. Another value shows
    # that there are several processes.
    if environ.get("SLURM_PROCID", "0") in ("", "0"):
        return None
    return _SLURM.detect(environ)


# Inner launchers come before outer launchers: mpirun may run in a step of Slurm, and
# torchrun in a pod of Kubernetes.
_DETECTORS: tuple[Callable[[Environ], LaunchInfo | None], ...] = (
    _TORCHRUN.detect,
    _OPEN_MPI.detect,
    _MPICH.detect,
    _JSRUN.detect,
    _pmix,
    _slurm,
    _KUBEFLOW_JAX.detect,
    _PYTORCH.detect,
    _KUBEFLOW_PYTORCH.detect,
    _SKYPILOT.detect,
    _PMI.detect,
    _INDEXED_JOB.detect,
    _slurm_outside_of_steps,
)


def _host(text: str) -> str:
    """Returns the first host of a list such as "node1:29500 node2", without port."""
    first = next(iter(text.split()), "")
    found = re.fullmatch(r"(?:\[([^]]+)\]|([^:]+))(?::\d+)?", first)
    return (found[1] or found[2]) if found else first


def _is_this_host(host: str) -> bool:
    return host == "localhost" or address.is_loopback(host)


def _port(text: str) -> int:
    """Parses a port. Returns 0 if the text is no port."""
    known = text.isascii() and text.isdecimal() and len(text) <= 5
    return int(text) if known and int(text) < 65536 else 0
