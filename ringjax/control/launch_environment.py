"""Who this process is in its job, when that is known from the environment alone.

Own variables (ringrun, or set by hand; Horovod's names too) are the strongest, then
torchrun, Open MPI, MPICH and Intel MPI, a Slurm step; otherwise this is a job of one.
Reads no settings of ringjax (config.py does) and opens no connection (see
rendezvous_lookup.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ringjax.config import Config
from ringjax.control.slurm import hosts_of
from ringjax.errors import StartupError

# The numbers that Slurm gives to what is not a step of srun: batch script, interactive
# shell, and so on. They carry the job's variables but are not rank 0 of N.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Place:
    """A process's place in its job.

    Attributes:
        source: who told.
        one_host: whether all ranks are known to be on this host.
        identity: the same text on all ranks of this job and on no others, if known.
        first_host: a name or address of rank 0's host, if known.
        ports: ports that the engine reserved for this job.
    """

    rank: int
    size: int
    source: str
    one_host: bool = False
    identity: str = ""
    first_host: str = ""
    ports: tuple[int, ...] = ()


def find(config: Config, environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place.

    Raises:
        StartupError: an engine's variable holds something that is not a number.
    """
    if config.rank is not None and config.size is not None:
        return _explicit(config, environ)
    for detect in _DETECTORS:
        if (place := detect(environ)) is not None:
            return place
    return Place(0, 1, "a job of one", one_host=True)


def _explicit(config: Config, environ: Mapping[str, str]) -> Place:
    assert config.rank is not None and config.size is not None
    first_host = environ.get("MASTER_ADDR", "")
    local = config.local_size
    one_host = local == config.size or (local is None and not first_host)
    return Place(
        config.rank,
        config.size,
        "RINGJAX_RANK",
        one_host=one_host,
        identity=f"job {config.job}" if config.job else "",
        first_host=first_host,
        ports=_master_port(environ),
    )


def _torchrun(environ: Mapping[str, str]) -> Place | None:
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    size = _number(environ, "WORLD_SIZE")
    names = ("RUN_ID", "RESTART_COUNT")
    run = [environ.get(f"TORCHELASTIC_{name}", "") for name in names]
    return Place(
        _number(environ, "RANK"),
        size,
        "torchrun",
        one_host=_number(environ, "LOCAL_WORLD_SIZE", size) == size,
        # Its port is in use by torch's own store, so it only tells jobs apart.
        identity=" ".join(["torchrun", *run, environ.get("MASTER_PORT", "")]),
        first_host=environ.get("MASTER_ADDR", ""),
    )


def _open_mpi(environ: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    run = next((environ[name] for name in names if environ.get(name)), "")
    return Place(
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        size,
        "Open MPI",
        one_host=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size) == size,
        identity=f"ompi {run}" if run else "",
        first_host=environ.get("MASTER_ADDR", ""),
        ports=_master_port(environ),
    )


def _mpich(environ: Mapping[str, str]) -> Place | None:
    # Slurm's own PMI sets PMI_RANK too, but only hydra counts the local ranks.
    if "PMI_RANK" not in environ or "MPI_LOCALNRANKS" not in environ:
        return None
    size = _number(environ, "PMI_SIZE")
    return Place(
        _number(environ, "PMI_RANK"),
        size,
        "MPICH",
        one_host=_number(environ, "MPI_LOCALNRANKS") == size,
        first_host=environ.get("MASTER_ADDR", ""),
        ports=_master_port(environ),
    )


def _slurm(environ: Mapping[str, str]) -> Place | None:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if "SLURM_PROCID" not in environ or not step.isdecimal():
        return None
    tasks = "SLURM_STEP_NUM_TASKS"
    size = _number(environ, tasks if tasks in environ else "SLURM_NTASKS", 1)
    if int(step) >= _FIRST_SPECIAL_STEP or size == 1:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    try:
        hosts = hosts_of(nodes)
    except ValueError as error:
        raise StartupError(f"SLURM_STEP_NODELIST: {error}") from None
    job = environ.get("SLURM_JOB_ID", "0")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "").split("-")[0].split(",")[0]
    return Place(
        _number(environ, "SLURM_PROCID"),
        size,
        "Slurm",
        one_host=len(hosts) == 1,
        identity=f"slurm {job} {step} {restarts}",
        first_host=environ.get("MASTER_ADDR") or (hosts[0] if hosts else ""),
        ports=(int(reserved),) if reserved.isdecimal() else (),
    )


_DETECTORS: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
    _torchrun,
    _open_mpi,
    _mpich,
    _slurm,
)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise StartupError(f"{name} is {text!r}: expected a number")
    return int(text)


def _master_port(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("MASTER_PORT", "")
    return (int(text),) if text.isdecimal() and 0 < int(text) < 65536 else ()
