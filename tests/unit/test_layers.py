"""The layers of the house: who may import or include whom, and how files are named.

What each package is: docs/architecture.md. A new package needs a place in `FLOORS`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.launch import ROOT, environment

PACKAGE = ROOT / "ringjax"
NATIVE = ROOT / "xla_ext"

# Packages and lone modules, the top floor first: imports go down, or stay on a floor.
FLOORS = (
    {"torch", "tensorflow", "keras", "ray", "spark", "data", "horovod", "bench"}
    | {"doctor", "top", "__main__"},
    {"optim", "sync", "elastic", "observe", "tuning", "profile"},
    {"collectives", "compression"},
    {"xla", "eager"},
    {"runtime", "timeline", "recovery", "world"},
    {"run", "membership", "links", "monitor"},
    {"control"},
    {"config", "settings", "errors", "ops", "failpoints", "stderr", "stdout"}
    | {"_native"},
)
FLOOR = {name: -number for number, names in enumerate(FLOORS) for name in names}
ENGINES = {"ray": {"ray"}, "spark": {"pyspark", "pyarrow"}}  # they start jobs, too
# Horovod's module paths. They hand names on and hold nothing, so that they may have
# names that say nothing; nobody here imports them.
HANDING_ON = ("common", "runner")
FLOOR |= dict.fromkeys(HANDING_ON, 1)
HOROVODS_NAMES = (
    *HANDING_ON,
    *("tensorflow/util.py", "spark/common", "ray/utils.py"),
)
MOST_AT_THE_TOP = 16

JAX = {"jax", "jaxlib", "optax"}
JAX_USERS = {"xla", "collectives", "optim", "sync", "bench", "keras", "data"}
# Loaded where the program has loaded JAX, or wants it.
JAX_MODULES = {"ringjax.elastic.jax_leaves", "ringjax.spark.learners.flax"}
JAX_MODULES |= {"ringjax.tuning.step", "ringjax.elastic.jax_shards"}
JAX_PRIVATE = {"ringjax.xla.jax_private", "ringjax.xla.tokens"}
FRAMEWORKS = {*JAX, "flax", "torch", "tensorflow", "keras"}
# Adapters of more than one framework: Keras is part of TensorFlow, and has backends.
MORE = {"tensorflow": {"keras"}, "keras": {"tensorflow", "torch"}}
MORE["spark"] = {"torch", "keras", "flax"}  # a model of each trains on a DataFrame
# What is not ringjax's own configuration: the whole environment to hand on to ranks,
# the traces of another launcher, the system's folder for sockets, what NCCL and JAX
# read when they start.
ENVIRONMENT_READERS = {
    *("config.py", "settings/misspelt.py", "run/environ.py", "world/devices.py"),
    *("control/launch_environment.py", "control/rendezvous_lookup.py"),
    "spark/learners/keras.py",  # says which backend a task's Keras has
    "horovod/functions.py",  # changes it for a while, if a program asks for that
    "runtime/visit.py",  # holds a job's variables in it as long as a call
}

DRAWERS = {"util", "utils", "misc", "common", "helper", "helpers", "core"}
LONGEST, LONGEST_STUB = 450, 600  # the stub describes a whole extension
LONGEST_FUNCTION = 60

# room -> the rooms, beside itself, whose headers it may include
ENGINE = {"engine/call", "engine/communicator", "engine/heartbeat", "engine/eager"}
ENGINE |= {"engine/recorder"}
INCLUDES = {
    "base": set(),
    "transport": {"base"},
    "collective": {"base"},
    "engine/call": {"base", "transport", "collective"},
    "engine/recorder": {"base", "collective"},
    "engine/communicator": {
        *("base", "transport", "collective", "engine/call", "engine/recorder")
    },
    "engine/heartbeat": {
        *("base", "transport", "engine/call", "engine/communicator"),
        "engine/recorder",
    },
    "engine/eager": {
        *("base", "collective", "engine/call", "engine/communicator"),
        "engine/recorder",
    },
    "cuda": set(),  # also read by compilers that know no other folder
    "cuda/cuda_on_cpu.h": {"base", "cuda"},  # what the device would bring
    "device": {"base", "collective", "cuda", *ENGINE},
    "ffi": {"base", "device", *ENGINE},
    "binding": {"base", "transport", "collective", "cuda", "device", "ffi", *ENGINE},
}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _sources() -> list[Path]:
    return sorted(p for p in NATIVE.rglob("*") if p.suffix in (".h", ".cc", ".cu"))


def _everything() -> list[Path]:
    folders = ("ringjax", "xla_ext", "tests", "examples", "benchmarks")
    folders += ("docs", "release")
    found = (p for folder in folders for p in (ROOT / folder).rglob("*"))
    kinds = (".py", ".pyi", ".h", ".cc", ".cu", ".sh")
    return sorted(p for p in found if p.suffix in kinds)


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """The absolute names of all modules that `path` imports, wherever in the file."""
    parts = path.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = parts[: len(parts) - node.level] if node.level else ()
            base = ".".join([*here, *filter(None, [node.module])])
            yield base
            if base.split(".")[0] == "ringjax":
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _layer(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "ringjax" and len(parts) > 1 else None


def test_every_package_has_a_floor() -> None:
    names = {_layer(_name(path)) for path in _modules()} - {None}
    assert names <= FLOOR.keys(), f"give them a floor: {names - FLOOR.keys()}"
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


# Not the package's door, which loads names lazily: test_import_is_light watches that.
@pytest.mark.parametrize("path", [p for p in _modules() if _layer(_name(p))], ids=_name)
def test_imports_point_downwards(path: Path) -> None:
    mine, module = _layer(_name(path)), _name(path)
    assert mine is not None
    for name in _imports(path):
        top, theirs = name.split(".")[0], _layer(name)
        if theirs in FLOOR:
            assert FLOOR[theirs] <= FLOOR[mine], f"{mine} must not import {name}"
            if theirs == "run":
                users = ("run", "runner", "doctor", *ENGINES)
                assert mine in users, f"{mine} must not import the launcher"
        if top in JAX:
            allowed = mine in JAX_USERS or module in JAX_MODULES
            assert allowed, f"{mine} must not import {top}"
        elif any(top in theirs for theirs in ENGINES.values()):
            assert top in ENGINES.get(mine, ()), f"{mine} must not import {top}"
        elif top in FRAMEWORKS:
            assert top in {mine, *MORE.get(mine, ())}, f"{mine} must not import {top}"
        if name.startswith("jax._src"):
            assert module in JAX_PRIVATE, f"{name}: only {JAX_PRIVATE} may name it"


def test_nobody_goes_through_the_door() -> None:
    """`import ringjax` in a module would tie it to all that the package hands out."""
    modules = {_name(path) for path in _modules()} | {"ringjax._native"}
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert "ringjax" not in [alias.name for alias in node.names], path
            elif isinstance(node, ast.ImportFrom) and node.module == "ringjax":
                names = {f"ringjax.{alias.name}" for alias in node.names}
                assert names <= modules, path


@pytest.mark.parametrize(
    "path", [p for p in _modules() if _layer(_name(p)) in HANDING_ON], ids=_name
)
def test_modules_that_hand_on_hold_nothing(path: Path) -> None:
    exported: list[str] = []
    imported: list[str] = []
    for node in ast.parse(path.read_text()).body[1:]:  # without the docstring
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                assert module.startswith("ringjax.") and node.level == 0
                imported += [alias.name for alias in names]
                exported += [a.name for a in names if a.asname == a.name]
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                exported += ast.literal_eval(value)
            case _:
                pytest.fail(f"line {node.lineno}: not an import of a name, no __all__")
    assert sorted(exported) == sorted(imported)


def test_nobody_imports_what_hands_on() -> None:
    for path in _modules():
        if _layer(_name(path)) not in HANDING_ON:
            assert not {_layer(name) for name in _imports(path)} & set(HANDING_ON)


def test_imports_have_no_cycle() -> None:
    modules = {_name(path): path for path in _modules()}
    graph = {
        name: {i for i in _imports(path) if i in modules and i not in ("ringjax", name)}
        for name, path in modules.items()
        if name != "ringjax"
    }
    # `from . import x` inside a package names the package too; that is not a cycle.
    graph = {
        n: {i for i in uses if not n.startswith(f"{i}.")} for n, uses in graph.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_config_reads_the_environment() -> None:
    reads = re.compile(
        r"\bos\.environ\b|\bos\.getenv\b|\bfrom os import .*(environ|getenv)"
    )
    readers = {
        str(path.relative_to(PACKAGE))
        for path in _modules()
        if reads.search(path.read_text())
    }
    assert readers <= ENVIRONMENT_READERS


def _room(path: str) -> str:
    """The longest key of INCLUDES that a path in xla_ext begins with."""
    return max((k for k in INCLUDES if f"{path}/".startswith(f"{k}/")), key=len)


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(NATIVE)))
def test_includes_point_downwards(path: Path) -> None:
    text = path.read_text()
    room = _room(str(path.relative_to(NATIVE)))
    allowed = {room, *INCLUDES[room]}
    for header in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE):
        if header.startswith("xla/"):
            assert room == "ffi", f"{header}: XLA's headers stay in ffi/"
            continue
        beside = (path.parent / header).exists()
        theirs = room if beside else _room(header)
        assert theirs in allowed, f"{room} must not include {header}"
    for header in re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, re.MULTILINE):
        if header.startswith(("nanobind", "Python.h")):
            assert room == "binding", f"{header}: Python's headers stay in binding/"
        assert not header.startswith("xla/") or room == "ffi", header


@pytest.mark.parametrize("path", _everything(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_no_drawer_and_opens_with_what_it_is(path: Path) -> None:
    words = {
        w for part in path.relative_to(ROOT).parts for w in re.split(r"[_.]", part)
    }
    if not any(path.is_relative_to(PACKAGE / name) for name in HOROVODS_NAMES):
        assert not words & DRAWERS, "a name that says nothing; say what is inside"
    text = path.read_text()
    lines = text.splitlines()
    longest = LONGEST_STUB if path.suffix == ".pyi" else LONGEST
    assert len(lines) <= longest, "split it: a file is one idea"
    if path.suffix == ".py" and text.strip():
        assert ast.get_docstring(ast.parse(text)), "say what it is, and what it is not"
    if path.suffix in (".h", ".cc", ".cu"):
        assert lines[0].startswith("//"), "say what it is, and what it is not"


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ringjax", {"jax", "torch", "tensorflow"}),
        ("ringjax.run.cli", {"jax", "numpy", "torch", "tensorflow", "ringjax._native"}),
        ("ringjax.eager", {"jax", "torch", "tensorflow"}),
        ("ringjax.torch", {"jax", "tensorflow"}),
    ],
)
def test_import_is_light(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment("import", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert not absent & set(done.stdout.split())
