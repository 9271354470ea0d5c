"""Tests that all public module paths can be imported.

Two processes import all paths. The first process imports the paths that need no
TensorFlow. The second imports the paths that need TensorFlow, and then PyTorch, because
some builds of PyTorch crash in a process with TensorFlow. The names in `ringjax.torch`,
`ringjax.tensorflow` and `ringjax.keras` are tested by test_torch_names.py,
test_tensorflow_names.py and tests/support/keras_checks.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from support.launch import environment
from support.tree import Tree

import ringjax

NAMES = """
    Adasum Average Compression Max Min ProcessSet Product PrometheusCollector Sum
    add_process_set allgather allgather_object allreduce allreduce_grads
    allreduce_metrics alltoall autotune barrier broadcast broadcast_object
    broadcast_parameters build_info ccl_built collective_timeout cross_rank cross_size
    cuda_built data ddl_built eager elastic errors exact global_process_set gloo_built
    gloo_enabled group_rank group_size grouped_allgather grouped_allreduce
    grouped_alltoall grouped_broadcast grouped_reducescatter init is_homogeneous
    is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported
    nccl_built pieces profile progress rank recent_calls reducescatter
    remove_process_set replica_set rocm_built run shutdown size start_timeline stats
    stop_timeline sycl_built time_for weighted_loss write_scalars
"""
# The public modules by the framework that they import.
MODULES = {
    "nothing": """
        ringjax ringjax.common ringjax.common.basics ringjax.common.elastic
        ringjax.common.exceptions ringjax.common.process_sets ringjax.common.util
        ringjax.config ringjax.data ringjax.data.data_loader_base ringjax.data.sampler
        ringjax.eager ringjax.elastic ringjax.errors ringjax.ops ringjax.ray ringjax.run
        ringjax.run.engine_job ringjax.spark
        ringjax.runner ringjax.runner.common.util.env ringjax.runner.elastic.discovery
        ringjax.runner.elastic.driver ringjax.runner.elastic.worker
        ringjax.runner.util.network
        ringjax.runtime ringjax.timeline
    """,
    "jax": """
        ringjax.bench ringjax.collectives ringjax.compression ringjax.data.steps
        ringjax.exact ringjax.optim ringjax.pieces ringjax.sync
    """,
    "torch": """
        ringjax.torch ringjax.torch.compression ringjax.torch.elastic
        ringjax.torch.elastic.sampler ringjax.torch.elastic.state
        ringjax.torch.functions ringjax.torch.mpi_ops ringjax.torch.optimizer
        ringjax.torch.sync_batch_norm
    """,
    "tensorflow": """
        ringjax.keras ringjax.keras.callbacks ringjax.keras.elastic ringjax.tensorflow
        ringjax.tensorflow.compression ringjax.tensorflow.data
        ringjax.tensorflow.data.compute_service ringjax.tensorflow.data.compute_worker
        ringjax.tensorflow.elastic ringjax.tensorflow.functions
        ringjax.tensorflow.gradient_names ringjax.tensorflow.keras
        ringjax.tensorflow.keras.callbacks ringjax.tensorflow.keras.elastic
        ringjax.tensorflow.mpi_ops ringjax.tensorflow.sync_batch_norm
        ringjax.tensorflow.util
    """,
}
FRAMEWORKS = {"ringjax.torch": "torch", "ringjax.tensorflow": "tensorflow"}
FRAMEWORKS["ringjax.keras"] = "tensorflow"
# The environments of tests/engines and tests/with_mxnet have these frameworks.
FRAMEWORKS |= {"ringjax.ray": "ray", "ringjax.spark": "pyspark"}
FRAMEWORKS |= {"ringjax.mxnet": "mxnet"}
FRAMEWORKS["ringjax.lightning"] = "lightning"  # see tests/lightning_ranks
pytestmark = pytest.mark.timeout(120)


def _in_documents() -> dict[str, str]:
    """Maps each path `ringjax.x.y` in documents to its place; `hvd.x` counts, too."""
    tree, found = Tree(), {}
    pages = ["README.md", *tree.files("docs", ".md"), *tree.files("examples", ".py")]
    for page in pages:
        for place, match in tree.matches(r"\bringjax(?:\.[A-Za-z_]\w*)+", page):
            found[match[0]] = place
        imports = r"from (ringjax[\w.]*) import ([\w, ]+)"
        for place, match in tree.matches(imports, page):
            for name in match[2].split(","):
                found[f"{match[1]}.{name.strip()}"] = place
        hvd = {m[1] for _, m in tree.matches(r"import (ringjax\.\w+) as hvd", page)}
        for place, match in tree.matches(r"\bhvd((?:\.[A-Za-z_]\w*)+)", page):
            if len(hvd) == 1:
                found[min(hvd) + match[1]] = place
    return found


def _needs(path: str) -> str:
    first_two = ".".join(path.split(".")[:2])
    return FRAMEWORKS.get(first_two, "jax")


RESOLVE = """
import json, pkgutil, sys
for name, paths in json.loads(sys.argv[1]).items():
    missing = []
    for path, place in paths.items():
        try:
            pkgutil.resolve_name(path)
        except Exception as error:
            missing.append(f"{place}: {path}: {error!r}")
    print(json.dumps([name, missing, [*sys.modules]]), flush=True)
"""
BOTH = """
import tensorflow as tf, torch
torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
"""
REDUCED = """
import ringjax.tensorflow as hvd, ringjax.torch
hvd.init()
assert ringjax.torch.is_initialized()
assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum).numpy() == 2.0
assert ringjax.torch.allreduce(torch.tensor(3.0), op=hvd.Sum).item() == 3.0
hvd.shutdown()
print("both reduced")
"""


class ImportProcess:
    """A process that has imported the paths of several steps, one after the other.

    Attributes:
        loaded: for each step, all modules that were loaded after it.
        missing: a line with the place for each path that could not be imported.
    """

    def __init__(self, steps: dict[str, dict[str, str]], then: str = "") -> None:
        words = [sys.executable, "-P", "-W", "ignore", "-c", RESOLVE + then]
        env = environment("imports", {"PYTHONFAULTHANDLER": "0"})
        self.ended = subprocess.run(
            [*words, json.dumps(steps)],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        lines = self.ended.stdout.splitlines()[: len(steps)]
        assert len(lines) == len(steps), self.ended.stderr
        told: list[Any] = [json.loads(line) for line in lines]
        self.loaded = {step: set(modules) for step, _, modules in told}
        self.missing = [path for _, missing, _ in told for path in missing]


def _paths(framework: str) -> dict[str, str]:
    """Maps each path that needs this framework to its place."""
    found = _in_documents().items()
    used = {path: place for path, place in found if _needs(path) == framework}
    assert framework == "nothing" or len(used) > 5, used
    return dict.fromkeys(MODULES[framework].split(), "MODULES") | used


def test_ringjax_exports_exactly_the_public_names() -> None:
    assert sorted(NAMES.split()) == ringjax.__all__
    for name in NAMES.split():
        assert getattr(ringjax, name) is not None


@pytest.fixture(scope="module")
def without_tensorflow() -> ImportProcess:
    light = ("ringjax.run.cli", "ringjax", "ringjax.eager")
    steps = {path: {path: "MODULES"} for path in light}
    frameworks = ["nothing", *filter(find_spec, ["torch"]), "jax"]
    return ImportProcess(steps | {each: _paths(each) for each in frameworks})


@pytest.fixture(scope="module")
def with_tensorflow() -> ImportProcess:
    if find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    steps = {"tensorflow": _paths("tensorflow")}
    return ImportProcess(steps, BOTH + REDUCED if find_spec("torch") else "")


def test_all_paths_without_tensorflow_resolve(
    without_tensorflow: ImportProcess,
) -> None:
    assert not without_tensorflow.missing


def test_all_paths_with_tensorflow_resolve(with_tensorflow: ImportProcess) -> None:
    assert not with_tensorflow.missing


def test_imports_load_no_other_frameworks(without_tensorflow: ImportProcess) -> None:
    heavy = {"jax", "torch", "tensorflow"}
    absent = {"ringjax.run.cli": {*heavy, "numpy", "ringjax._native"}}
    absent |= {"ringjax": heavy, "ringjax.eager": heavy, "nothing": heavy}
    absent |= {"torch": heavy - {"torch"}, "jax": {"tensorflow"}}
    loaded = without_tensorflow.loaded
    found = {step: absent[step] & modules for step, modules in loaded.items()}
    assert not any(found.values()), found


def test_tensorflow_and_pytorch_in_one_process(with_tensorflow: ImportProcess) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    ended = with_tensorflow.ended
    if ended.returncode < 0 and ImportProcess({}, BOTH).ended.returncode < 0:
        signal = -ended.returncode
        pytest.skip(f"they end a process without ringjax, too: signal {signal}")
    assert ended.returncode == 0, ended.stderr
    assert "both reduced" in ended.stdout


def test_a_missing_path_is_reported_with_its_place() -> None:
    steps = {"one": {"ringjax.gone.x": "a.md:1", "json.loads": "a.md:2"}}
    found = ImportProcess(steps | {"two": {"json.gone": "b.md:3"}})
    named = [text.partition(": AttributeError")[0] for text in found.missing]
    assert named == ["a.md:1: ringjax.gone.x", "b.md:3: json.gone"]
    assert "json" in found.loaded["one"]


@pytest.mark.parametrize(
    "module", ["ringjax.config", "ringjax.bench", "ringjax.doctor"]
)
def test_modules_run_as_programs(module: str) -> None:
    words = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower() or "RINGJAX_" in done.stdout
