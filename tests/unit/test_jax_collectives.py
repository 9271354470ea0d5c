"""Tests of who carries JAX's collectives, and of the client that JAX gets.

The processes are joined by `jax.distributed`, without a launcher. Where they use
ringjax, stand-ins replace the MPI library: Gloo computes, and everything else is real.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from support.launch import ROOT, environment

from ringjax.control import addresses
from ringjax.xla import jax_collectives
from ringjax.xla.jax_collectives import TESTED, VARIABLE, device_count, refusal


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the library and for the core, which counts the calls."""
    library, calls = tmp_path / "libringjax_mpi.so", list[str]()
    library.touch()
    core = SimpleNamespace(mpi_install=calls.append)
    monkeypatch.setattr(jax_collectives, "LIBRARY", library)
    monkeypatch.setattr(jax_collectives, "_mpi", core)
    return calls


def test_ringjax_carries_collectives_of_one_device(installed: list[str]) -> None:
    library = str(jax_collectives.LIBRARY)
    for version in ("0.10.2", "0.11.0", "0.12.0.1", "0.12.9"):
        assert refusal(version, 1, {VARIABLE: library}) == ""
    link = jax_collectives.LIBRARY.with_name("link.so")
    link.symlink_to(library)
    assert refusal("0.12.0", 1, {VARIABLE: str(link)}) == ""
    assert installed == [library] * 5


@pytest.mark.parametrize(
    ("version", "devices", "variable", "why"),
    [
        ("0.10.1", 1, "", "tested with jaxlib from 0.10.2 to before 0.13, not 0.10.1"),
        ("0.13.0", 1, "", "not 0.13.0"),
        ("1.0", 1, "", "not 1.0"),
        ("new", 1, "", "not new"),
        ("0.12.0", 4, "", "a process must have one device, and this one has 4"),
        ("0.12.0", 0, "", "this one has 0"),
        (
            "0.12.0",
            1,
            "",
            "MPITRAMPOLINE_LIB was not set to .*libringjax_mpi.so before",
        ),
        ("0.12.0", 1, "/lib/mpi.so", "names another library, /lib/mpi.so"),
    ],
)
def test_reasons_for_gloo(
    installed: list[str], version: str, devices: int, variable: str, why: str
) -> None:
    found = refusal(version, devices, {VARIABLE: variable} if variable else {})
    assert re.search(why, found)
    assert not installed


def test_reasons_of_the_build_and_of_the_core(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise RuntimeError("jaxlib has not loaded it")

    del installed
    library = jax_collectives.LIBRARY
    monkeypatch.setattr(jax_collectives, "_mpi", SimpleNamespace(mpi_install=refuse))
    found = refusal("0.12.0", 1, {VARIABLE: str(library)})
    assert found == "jaxlib has not loaded it"
    library.unlink()
    found = refusal("0.12.0", 1, {VARIABLE: str(library)})
    assert found == "this build of ringjax has no libringjax_mpi.so"


def test_the_installed_jax_is_among_the_tested_versions() -> None:
    (required,) = [
        text
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "dependencies"
        ]
        if text.startswith("jax>")
    ]
    oldest, newer = (".".join(map(str, bound)) for bound in TESTED)
    assert required == f"jax>={oldest},<{newer}"


@pytest.mark.parametrize(
    ("setting", "flags", "count"),
    [
        (-1, "", 1),
        (3, "", 3),
        (1, "--xla_force_host_platform_device_count=4", 1),
        (-1, "--a=b --xla_force_host_platform_device_count=4", 4),
        (
            -1,
            "--xla_force_host_platform_device_count=4 "
            "--xla_force_host_platform_device_count=2",
            2,
        ),
    ],
)
def test_the_number_of_devices(setting: int, flags: str, count: int) -> None:
    assert device_count(setting, flags) == count


# -- processes -------------------------------------------------------------------------

_GLOO = re.compile(r"(?m)^\[Gloo\].*\n")
HEAD = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank, size, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""
JOIN = """
jax.distributed.initialize(where, size, rank)
devices = np.array(jax.devices())

def on(function, devices=devices):
    mesh = Mesh(devices, ("p",))
    f = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("p"), out_specs=P("p")))
    x = jax.make_array_from_callback(
        (3 * len(devices),), NamedSharding(mesh, P("p")), lambda i: np.arange(
            3.0 * len(devices), dtype=np.float32)[i])
    return np.asarray(f(x).addressable_shards[0].data)
"""
# Gloo in the place of XLA's MPI.
STAND_INS = """
from ringjax.xla import jax_client, jax_collectives, jax_plugin
import ringjax.world.epoch
import support.apart
support.apart.ignore_registered()

class Core:
    split = []
    def mpi_install(self, path): pass
    def mpi_set_world(self, rank, size): self.world = rank, size
    def mpi_expect(self, color, key, collectives, messages):
        assert collectives.id != messages.id
        assert (messages.rank, messages.size) == (collectives.rank, collectives.size)
        self.split.append((color, key, collectives.rank, collectives.size))
    def mpi_close(self, text): print("close:", text)

class Mpi:
    def Init(self): print("Init")
    def Finalize(self): print("Finalize")

core = jax_collectives._mpi = Core()
jax_collectives.refusal = lambda *_: ""
jax_client.make_mpi = Mpi
make_client = jax_client.make_client
jax_client.make_client = lambda collectives: make_client(
    jax_client.make_gloo(jax_client.current_job().store))
"""


def run(lines: str, size: int, *variables: dict[str, str]) -> list[tuple[str, str]]:
    """Runs the lines in processes. Returns what each printed, and its errors."""
    port = addresses.listen("127.0.0.1")
    where = addresses.show(*port.getsockname()[:2])
    port.close()
    more = {"RINGJAX_JAX_COLLECTIVES": "1", "RINGJAX_START_TIMEOUT": "30"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                HEAD + dedent(lines),
                str(rank),
                str(size),
                where,
            ],
            env=environment("collectives", more | dict(extra)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, extra in enumerate(variables or [dict[str, str]()] * size)
    ]
    try:
        found = [process.communicate(timeout=55) for process in processes]
        return [(_GLOO.sub("", out), errors) for out, errors in found]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def entry_point(tmp_path: Path) -> dict[str, str]:
    """Variables with which JAX finds the entry point of pyproject.toml."""
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, module),) = project["entry-points"]["jax_plugins"].items()
    info = tmp_path / "ringjax_of_the_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: ringjax_of_the_test\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[jax_plugins]\n{name} = {module}\n")
    path = environment("x", {})["PYTHONPATH"]
    return {"PYTHONPATH": f"{path}:{tmp_path}"}


def test_gloo_computes_where_a_process_refuses(entry_point: dict[str, str]) -> None:
    """A program without ringjax; its second process has two devices."""
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    lines = JOIN + "print(on(lambda x: lax.psum(x, 'p')))"
    out = run(lines, 2, entry_point, entry_point | two)
    for text, _ in out:
        assert text == "[ 9. 12. 15.]\n"
    assert "[ringjax] JAX's collectives use Gloo, not ringjax: process " in out[0][1]
    assert "[ringjax]" not in out[1][1]


@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_entry_point_does_nothing_for_one_process(
    entry_point: dict[str, str], setting: str
) -> None:
    lines = """
    print(jax.device_count(), float(jnp.arange(3.0).sum()))
    print("ringjax.xla.jax_plugin" in sys.modules, "ringjax._native" in sys.modules)
    """
    variables = entry_point | {"RINGJAX_JAX_COLLECTIVES": setting}
    ((text, errors),) = run(lines, 1, variables)
    assert text == f"1 3.0\nTrue {setting == '1'}\n", errors
    assert errors == ""


def test_programs_are_primed_on_a_world_of_their_own() -> None:
    lines = (
        STAND_INS
        + "jax_plugin.initialize()\n"
        + JOIN
        + dedent("""
        assert core.world == (rank, size)
        assert (on(lambda x: lax.psum(x, "p")) == [3, 5, 7]).all()
        assert (on(lambda x: lax.psum(x, "p"), devices[::-1]) == [3, 5, 7]).all()
        on(lambda x: lax.pmax(x, "p"))
        on(lambda x: lax.psum(x, "p"), devices[rank:rank + 1])
        print(core.split)
        """)
    )
    out = run(lines, 2)
    for rank, (text, errors) in enumerate(out):
        own, last = 2048 * rank, 2048  # the ids of JAX's devices
        split = [(0, rank, rank, 2), (last, 1 - rank, 1 - rank, 2), (own, 0, 0, 1)]
        closing = "close: JAX's collectives have ended on this process"
        assert text.splitlines() == ["Init", str(split), closing, "Finalize"], errors


def test_a_process_that_does_not_compile_is_named() -> None:
    lines = (
        STAND_INS
        + "jax_plugin.initialize()\n"
        + JOIN
        + dedent("""
        client = jax_client.current_job().store
        if rank == 0:
            try:
                on(lambda x: lax.psum(x, "p"))
            except Exception as error:
                print(type(error).__name__, error.ranks, error)
            client.key_value_set("tried", "")
        client.blocking_key_value_get("tried", 50_000)
        """)
    )
    out = run(lines, 2, *2 * [{"RINGJAX_START_TIMEOUT": "4"}])
    found = out[0][0].splitlines()
    assert found[1].startswith(
        "Stalled [1] the program jit__lambda communicates between processes 0, 1: "
        "compiling it is collective: each of them must compile it, and its other "
        "programs in the same order; JAX's processes 0, 1: rank 0 could not be"
    ), out
