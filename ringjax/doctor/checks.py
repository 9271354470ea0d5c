"""The table of all checks, sorted by how often their problems occur.

To add a check, write a function and a row of the table. There are two kinds:

* A host check takes a `HostContext`, runs on each host in the environment of the ranks
  there, and yields findings.
* A job check takes the `JobContext`, runs once, in the process of `ringjax doctor`, and
  yields pairs of a host's name ("" means all hosts) and a finding.

If a check yields nothing, the output does not contain the check.
tests/unit/test_doctor.py plants a fault for each check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringjax.doctor import fabric, limits, network, software
from ringjax.doctor.findings import Finding, HostContext, JobContext, warn

OfHost = Callable[[HostContext], Iterator[Finding]]
OfJob = Callable[[JobContext], Iterator[tuple[str, Finding]]]


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table: a check's name, its host function and its job function."""

    name: str
    of_host: OfHost | None = None
    of_job: OfJob | None = None


CHECKS = (
    Check("ssh", of_job=software.reached),
    Check("name", of_host=network.own_name),
    Check("other names", of_job=network.other_names),
    Check("loopback", of_host=network.loopback),
    Check("interfaces", of_host=network.chosen_interfaces, of_job=network.interfaces),
    Check("ports", of_job=network.ports),
    Check("port range", of_host=network.port_range),
    Check("messages", of_job=network.large_messages),
    Check("core", of_host=software.core),
    Check("versions", of_host=software.fitting, of_job=software.alike),
    Check("settings", of_host=software.settings),
    Check("JAX's collectives", of_host=software.jax_collectives),
    Check("/dev/shm", of_host=limits.dev_shm),
    Check("memfd", of_host=limits.memfd),
    Check("reading", of_host=limits.reading),
    Check("descriptors", of_host=limits.descriptors),
    Check("address space", of_host=limits.address_space),
    Check("processes", of_host=limits.processes),
    Check("CPUs", of_host=limits.cpus),
    Check("memory", of_host=limits.memory),
    Check("temporary files", of_host=limits.temporary_files),
    Check("GPUs", of_host=software.devices),
    Check("NCCL", of_host=software.nccl_variables),
    Check("fabric", of_host=fabric.provider),
    Check("clocks", of_job=network.clocks),
)


def on_host(host: HostContext) -> dict[str, list[Finding]]:
    """Runs all host checks on this host. Returns the findings by name of the check."""
    found = {}
    for check in CHECKS:
        if check.of_host is not None:
            try:
                found[check.name] = list(check.of_host(host))
            except Exception as error:  # a broken check must not hide the other checks
                text = f"the check itself has failed: {type(error).__name__}: {error}"
                found[check.name] = [warn(text, "ringrun --check-build")]
    return found
