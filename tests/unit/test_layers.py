"""Tests of the packages' layers: allowed imports and includes, and names of files.

docs/developers/architecture.md describes each package. A new package must be added to
`LAYERS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from support.tree import Check, Tree, expect_offences, report

# Packages and single modules by layer, the top layer first. A module may import from
# its own layer and from lower layers.
LAYERS = (
    {"torch", "tensorflow", "keras", "ray", "spark", "data", "horovod", "bench"}
    | {"doctor", "explain", "top", "__main__", "mxnet", "lightning"},
    {"optim", "sync", "elastic", "observe", "tuning", "profile", "pieces"},
    {"collectives", "compression", "exact"},
    {"xla", "eager"},
    {"runtime", "timeline", "world"},
    {"run", "membership", "links", "monitor"},
    {"control"},
    {"config", "settings", "errors", "ops", "failpoints", "stderr", "stdout"}
    | {"_native"},
)
LAYER = {name: -number for number, names in enumerate(LAYERS) for name in names}
# Matches import_module(). Of an f-string it matches the part before the first brace.
BY_NAME = r"import_module\(\s*f?[\"'](ringjax\.[\w.]+)"
# Packages that start jobs, and the modules of their engines.
ENGINES = {"ray": {"ray"}, "spark": {"pyspark", "pyarrow"}}
# Packages with Horovod's module paths, which only re-export names. Horovod chose these
# vague names. No module of ringjax imports them.
REEXPORTING = ("common", "runner")
LAYER |= dict.fromkeys(REEXPORTING, 1)
HOROVODS_PATHS = (
    *("ringjax/common/", "ringjax/runner/", "ringjax/spark/common/"),
    *("ringjax/tensorflow/util.py/", "ringjax/ray/utils.py/"),
)
MAX_TOP_MODULES = 16

JAX = {"jax", "jaxlib", "optax"}
JAX_USERS = {"xla", "collectives", "exact", "optim", "sync", "bench", "keras", "data"}
JAX_USERS |= {"pieces"}
# Modules that are loaded only if the program has loaded JAX or needs it.
JAX_MODULES = {"ringjax.elastic.jax_leaves", "ringjax.spark.trainers.flax"}
JAX_MODULES |= {"ringjax.tuning.step", "ringjax.elastic.jax_shards"}
JAX_PRIVATE = {"ringjax.xla.jax_private", "ringjax.xla.jax_client"}
JAX_PRIVATE |= {"ringjax.xla.tokens"}
FRAMEWORKS = {*JAX, "flax", "torch", "lightning", "tensorflow", "keras", "mxnet"}
# Adapters that import several frameworks, because TensorFlow contains Keras, and Keras
# has backends.
SEVERAL_FRAMEWORKS = {"tensorflow": {"keras"}, "keras": {"tensorflow", "torch"}}
SEVERAL_FRAMEWORKS["lightning"] = {"torch"}
SEVERAL_FRAMEWORKS["spark"] = {"torch", "keras", "flax"}  # one estimator for each
SEVERAL_FRAMEWORKS["spark"] |= {"lightning"}
# Modules that may read environment variables other than ringjax's settings: variables
# that ranks inherit, variables of other launchers, the system's folder for sockets, and
# settings that NCCL and JAX read when they start.
ENVIRONMENT_READERS = {
    *(
        "config.py",
        "settings/unknown_variables.py",
        *("settings/same_bits.py", "pieces/machine.py"),  # variables of XLA
        "run/environ.py",
        "world/devices.py",
    ),
    *("control/launch_environment.py", "membership/job_credentials.py"),
    "spark/trainers/keras.py",  # says which backend a task's Keras has
    "xla/jax_collectives.py",  # XLA_FLAGS
    "xla/jax_plugin.py",  # is imported in all programs of JAX, so config.py is not
    "xla/jax_distributed.py",  # gRPC's variables, for the group's own coordinator
    "horovod/functions.py",  # an example in a docstring
    "runtime/reused_process.py",  # changes it during a `with` block
}

VAGUE_NAMES = {"util", "utils", "misc", "common", "helper", "helpers", "core"}
# The checks bound medians instead of maxima, because a long file about one idea reads
# better than the same file cut into parts at a limit.
MEDIAN_FILE = 150  # lines
MEDIAN_FUNCTION = 10
MAX_METHODS = 40  # per class of the core
# CLASS matches a class in clang-format's style, and METHOD the first line of a method.
CLASS = r"(?m)^(?:class|struct) (\w+)[^;{\n]*\{.*\n((?:(?!\};).*\n)*)"
METHOD = r"(?m)^  (?!//|using |friend |static_assert|.*std::function<)\S.*\("

# For each folder of xla_ext, the other folders whose headers it may include.
ENGINE = {"engine/call", "engine/communicator", "engine/heartbeat", "engine/eager"}
ENGINE |= {"engine/recorder"}
INCLUDES = {
    "base": set(),
    "exact": {"base"},
    "transport": {"base"},
    "collective": {"base"},
    "engine/call": {"base", "transport", "collective"},
    "engine/recorder": {"base", "collective"},
    "engine/communicator": {
        *("base", "transport", "collective", "engine/call", "engine/recorder"),
        "exact",
    },
    "engine/heartbeat": {
        *("base", "transport", "engine/call", "engine/communicator"),
        "engine/recorder",
    },
    "engine/eager": {
        *("base", "collective", "engine/call", "engine/communicator"),
        "engine/recorder",
    },
    "mpi": {"base", "collective", "engine/call", "engine/communicator"},
    "cuda": set(),  # some compilers receive only this folder
    "cuda/cuda_on_cpu.h": {"base", "cuda"},  # replaces CUDA's headers
    "device": {"base", "collective", "cuda", *ENGINE},
    "ffi": {"base", "exact", "device", *ENGINE},
    "binding": {
        *("base", "transport", "collective", "cuda", "device", "ffi", "mpi", *ENGINE),
        "exact",
    },
}

EVERYTHING = "ringjax xla_ext tests examples benchmarks docs release"
READS = r"\bos\.environ\b|\bos\.getenv\b|\bfrom os import .*(?:environ|getenv)"


def _name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _package(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "ringjax" and len(parts) > 1 else None


def _modules(tree: Tree) -> dict[str, str]:
    """Returns the path of each module by its name."""
    return {_name(path): path for path in tree.files("ringjax", ".py")}


def _imports(tree: Tree, path: str) -> Iterator[tuple[str, str]]:
    """Yields place and absolute name of each import in a module and its functions."""
    parts = path.split("/")
    for node in tree.module(path).imports:
        place = f"{path}:{node.lineno}"
        if isinstance(node, ast.Import):
            yield from ((place, alias.name) for alias in node.names)
        else:
            here = parts[: len(parts) - node.level] if node.level else ()
            base = ".".join([*here, *filter(None, [node.module])])
            yield place, base
            if base.split(".")[0] == "ringjax":
                yield from ((place, f"{base}.{alias.name}") for alias in node.names)
    for place, match in tree.matches(BY_NAME, path):
        yield place, match[1].rstrip(".")


def every_package_has_a_layer(tree: Tree) -> Iterator[str]:
    modules = _modules(tree)
    for name, path in modules.items():
        if _package(name) not in {None, *LAYER}:
            yield f"{path}:1: {_package(name)} has no layer"
    top = [path for path in modules.values() if path.count("/") == 1]
    for path in top[:1] if len(top) > MAX_TOP_MODULES else ():
        yield f"{path}:1: {len(top)} files at the top, at most {MAX_TOP_MODULES} fit"


def _forbidden(module: str, name: str) -> Iterator[str]:
    """Yields the reasons why a module must not import this name."""
    mine, theirs, top = _package(module) or "", _package(name), name.split(".")[0]
    if theirs in LAYER and LAYER[theirs] > LAYER.get(mine, 0):
        yield f"{theirs} is in a layer above {mine}"
    if theirs == "run" and mine not in ("run", "runner", "doctor", *ENGINES):
        yield f"the launcher is not for {mine}"
    if top in JAX:
        allowed = mine in JAX_USERS or module in JAX_MODULES
    elif any(top in theirs for theirs in ENGINES.values()):
        allowed = top in ENGINES.get(mine, ())
    else:
        allowed = top not in FRAMEWORKS or top in {
            mine,
            *SEVERAL_FRAMEWORKS.get(mine, ()),
        }
    if not allowed:
        yield f"{top} is not for {mine}"
    if name.startswith("jax._src") and module not in JAX_PRIVATE:
        yield f"{name} is private to JAX"


def imports_follow_the_layers(tree: Tree) -> Iterator[str]:
    for module, path in _modules(tree).items():
        # ringjax/__init__.py is exempt, because it imports names lazily
        # (test_imports_load_no_other_frameworks).
        imports = _imports(tree, path) if _package(module) else ()
        found = (f"{p}: {why}" for p, n in imports for why in _forbidden(module, n))
        yield from dict.fromkeys(found)


def no_module_imports_ringjax_itself(tree: Tree) -> Iterator[str]:
    """Forbids `import ringjax` in modules, which would depend on the whole package."""
    modules = {*_modules(tree), "ringjax._native"}
    for path in _modules(tree).values():
        for node in tree.module(path).imports:
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.Import):
                found = {"ringjax"} & {*names}
            else:
                found = {f"ringjax.{x}" for x in names if node.module == "ringjax"}
            for name in sorted(found - modules | found & {"ringjax"}):
                yield f"{path}:{node.lineno}: {name} is imported from the package"


def reexporting_modules_define_nothing(tree: Tree) -> Iterator[str]:
    modules = _modules(tree).items()
    for path in [path for name, path in modules if _package(name) in REEXPORTING]:
        exported: list[str] = []
        imported: list[str] = []
        for node in ast.parse(tree.text(path)).body[1:]:  # without the docstring
            match node:
                case ast.ImportFrom(module=str(module), names=names, level=0) if (
                    module.startswith("ringjax.")
                ):
                    imported += [alias.name for alias in names]
                    exported += [a.name for a in names if a.asname == a.name]
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    exported += ast.literal_eval(value)
                case _:
                    yield f"{path}:{node.lineno}: no import of a name, no __all__"
        if sorted(exported) != sorted(imported):
            yield f"{path}:1: imports {sorted(imported)}, re-exports {sorted(exported)}"


def reexporting_modules_are_not_imported(tree: Tree) -> Iterator[str]:
    for module, path in _modules(tree).items():
        for place, name in _imports(tree, path):
            if _package(name) in REEXPORTING and _package(module) not in REEXPORTING:
                yield f"{place}: {name} only re-exports names"


def imports_have_no_cycle(tree: Tree) -> Iterator[str]:
    modules = _modules(tree)
    places = {
        (name, used): place
        for name, path in modules.items()
        for place, used in _imports(tree, path)
        # `from . import x` inside a package also names the package. This is no cycle.
        if used in modules.keys() - {"ringjax", name}
        and not name.startswith(f"{used}.")
    }
    graph: dict[str, set[str]] = {}
    for name, used in places:
        if name != "ringjax":
            graph.setdefault(name, set()).add(used)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        for used, name in pairwise(error.args[1]):
            yield f"{places[name, used]}: {used} is part of a cycle"


def only_config_reads_the_environment(tree: Tree) -> Iterator[str]:
    for path in _modules(tree).values():
        if path.removeprefix("ringjax/") not in ENVIRONMENT_READERS:
            for place, _ in tree.matches(READS, path):
                yield f"{place}: only config.py reads the environment"


def _folder_of(path: str) -> str:
    """Returns the longest key of INCLUDES that is a prefix of a path in xla_ext."""
    folders = (k for k in INCLUDES if f"{path}/".startswith(f"{k}/"))
    return max(folders, key=len, default="")


def _includes(tree: Tree, path: str) -> Iterator[tuple[str, str, bool]]:
    """Yields each included header with its place, and whether it is quoted."""
    for place, match in tree.matches(r'(?m)^\s*#\s*include\s+(["<])([^">]+)', path):
        yield place, match[2], match[1] == '"'


def includes_point_downwards(tree: Tree) -> Iterator[str]:
    for path in tree.files("xla_ext", ".h .cc .cu"):
        folder = _folder_of(path.removeprefix("xla_ext/"))
        for place, header, quoted in _includes(tree, path):
            beside = (tree.root / path).parent / header
            theirs = folder if beside.exists() else _folder_of(header)
            if header.startswith("xla/"):
                if folder != "ffi":
                    yield f"{place}: {header} is for ffi alone"
            elif quoted:
                if not theirs or theirs not in {folder, *INCLUDES.get(folder, ())}:
                    yield f"{place}: {header} is not for {folder or 'no folder'}"
            elif header.startswith(("nanobind", "Python.h")) and folder != "binding":
                yield f"{place}: {header} is for binding alone"


def file_names_are_specific_and_files_begin_with_a_summary(tree: Tree) -> Iterator[str]:
    for path in tree.files(EVERYTHING, ".py .pyi .h .cc .cu .sh"):
        words = {*re.split(r"[_./]", path)} & VAGUE_NAMES
        if words and not f"{path}/".startswith(HOROVODS_PATHS):
            yield f"{path}:1: {', '.join(words)} says nothing: name what is inside"
        text = tree.text(path)
        if path.endswith(".py") and text.strip() and not tree.module(path).docstring:
            yield f"{path}:1: begin with a summary of the file"
        if path.endswith((".h", ".cc", ".cu")) and not text.startswith("//"):
            yield f"{path}:1: begin with a summary of the file"


def most_files_and_functions_are_short(tree: Tree) -> Iterator[str]:
    for folder in ("ringjax", "xla_ext"):
        paths = tree.files(folder, ".py .h .cc .cu")
        lines = [len(text.splitlines()) for path in paths if (text := tree.text(path))]
        functions = [
            length
            for path in paths
            if path.endswith(".py")
            for *_, length in tree.module(path).functions
        ]
        for kind, lengths, most in (
            ("file", lines, MEDIAN_FILE),
            ("function", functions, MEDIAN_FUNCTION),
        ):
            if lengths and median(lengths) > most:
                yield f"{folder}: the median {kind} has {median(lengths):g} lines"


def classes_of_the_core_have_one_duty(tree: Tree) -> Iterator[str]:
    for path in tree.files("xla_ext", ".h"):
        for place, found in tree.matches(CLASS, path):
            methods = len(re.findall(METHOD, found[2]))
            if methods > MAX_METHODS:
                yield f"{place}: {found[1]} has {methods} methods: split it"


CHECKS: list[Check] = [
    *(every_package_has_a_layer, imports_follow_the_layers),
    *(no_module_imports_ringjax_itself, reexporting_modules_define_nothing),
    *(reexporting_modules_are_not_imported, imports_have_no_cycle),
    *(only_config_reads_the_environment, includes_point_downwards),
    file_names_are_specific_and_files_begin_with_a_summary,
    *(most_files_and_functions_are_short, classes_of_the_core_have_one_duty),
]


@pytest.mark.parametrize("check", CHECKS)
def test_files_follow_the_rule(check: Check) -> None:
    report(check)


def test_each_offence_is_named(tmp_path: Path) -> None:
    files = {
        **dict.fromkeys((f"ringjax/{name}.py" for name in LAYER), ""),
        "ringjax/common.py": "'''D.''' # !! common says nothing: name what is inside",
        "ringjax/__init__.py": """'''D.''' # !! files at the top, at most 16 fit
from ringjax.common import a # !! ringjax.common only re-exports names !! common.a only
""",
        "ringjax/attic/a.py": "'''D.''' # !! attic has no layer",
        "ringjax/common/a.py": """'''D.''' # !! imports ['b'], re-exports []
from ringjax.ops import b
b = 1 # !! no import of a name, no __all__
""",
        "ringjax/config.py": """'''D.'''
import jax._src.x # !! jax is not for config !! jax._src.x is private to JAX
import ringjax, torch # !! ringjax is imported from !! torch is not for config
def late():
    if True:
        from ringjax.run import cli # !! run is in a layer above !! the launcher is not
        from ringjax import errors, rank # !! ringjax.rank is imported from
        import pyspark # !! pyspark is not for config
        importlib.import_module("ringjax.xla.a") # !! xla is in a layer above config
def long():
    '''D.'''
"""
        + "    x = 1\n" * 21,
        "ringjax/links/one.py": """'''D.'''
from . import two # !! ringjax.links.two is part of a cycle
import os
os.environ # !! only config.py reads the environment
""",
        "ringjax/links/two.py": """'''D.'''
from ringjax.links.one import x # !! ringjax.links.one is part of a cycle
""",
        "tests/utils.py": "1 # !! begin with a summary !! utils says nothing\n",
        "xla_ext/lone.h": '// D.\n#include "base/f.h" // !! is not for no folder',
        "xla_ext/base/a.h": """ // !! begin with a summary of the file
#include "ffi/b.h" // !! ffi/b.h is not for base
  # include "xla/c.h" // !! xla/c.h is for ffi alone
#include "nowhere/d.h" // !! nowhere/d.h is not for base
#include <Python.h> // !! Python.h is for binding alone
#include <xla/e.h> // !! xla/e.h is for ffi alone
#include "f.h"
""",
        "xla_ext/base/f.h": "// D.\nclass Few {\n  void A();\n  int a_;\n};\n"
        "class Many : Few {  // !! Many has 41 methods: split it\n"
        + "  void A(int a,\n         int b);\n" * 41
        + "};\n",
    }
    median_of_two = "ringjax: the median function has 13 lines"
    expect_offences(CHECKS, tmp_path, files, median_of_two)
