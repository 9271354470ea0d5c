"""What programs may import, by its path: a room that moves must not take one along.

Modules are imported in processes of their own: TensorFlow and PyTorch do not always
bear each other. The names in `ringjax.torch` and its like, with their arguments, are in
test_torch_names.py, test_tensorflow_names.py and tests/support/keras_checks.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ringjax

ROOT = Path(__file__).resolve().parents[2]
NAMES = """
    Adasum Average Compression Max Min ProcessSet Product PrometheusCollector Sum
    add_process_set allgather allgather_object allreduce allreduce_grads
    allreduce_metrics alltoall autotune barrier broadcast broadcast_object
    broadcast_parameters build_info ccl_built collective_timeout cross_rank cross_size
    cuda_built data ddl_built eager elastic errors global_process_set gloo_built
    gloo_enabled group_rank group_size grouped_allgather grouped_allreduce
    grouped_alltoall grouped_broadcast grouped_reducescatter init is_homogeneous
    is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported
    nccl_built profile rank recent_calls reducescatter remove_process_set replica_set
    rocm_built run shutdown size start_timeline stats stop_timeline sycl_built
    write_scalars
"""
# By what they load.
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
        ringjax.optim ringjax.sync
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
FRAMEWORKS |= {"ringjax.ray": "ray", "ringjax.spark": "pyspark"}  # see tests/engines
# Written in documents, and no path of ours.
ELSEWHERE = ("ringjax.mxnet",)


def _in_documents() -> set[str]:
    """`ringjax.x.y` of the documents and the examples; `hvd.x` by what they import."""
    found = set()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    for page in [*pages, *(ROOT / "examples").glob("**/*.py")]:
        text = page.read_text()
        found |= set(re.findall(r"\bringjax(?:\.[A-Za-z_]\w*)+", text))
        for module, names in re.findall(r"from (ringjax[\w.]*) import ([\w, ]+)", text):
            found |= {f"{module}.{name.strip()}" for name in names.split(",")}
        hvd = re.findall(r"import (ringjax\.\w+) as hvd", text)
        if len(set(hvd)) == 1:
            used = re.findall(r"\bhvd((?:\.[A-Za-z_]\w*)+)", text)
            found |= {hvd[0] + name for name in used}
    return {name for name in found if not name.startswith(ELSEWHERE)}


def _needs(path: str) -> str:
    first_two = ".".join(path.split(".")[:2])
    return FRAMEWORKS.get(first_two, "jax")


def _skip_without(framework: str) -> None:
    if framework in ("torch", "tensorflow") and find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


def _resolve(paths: list[str]) -> subprocess.CompletedProcess[str]:
    code = "import pkgutil, sys\nfor p in sys.argv[1:]: pkgutil.resolve_name(p)"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *paths],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_public_name_is_there() -> None:
    assert sorted(NAMES.split()) == ringjax.__all__
    for name in NAMES.split():
        assert getattr(ringjax, name) is not None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", MODULES)
def test_every_module_can_be_imported(framework: str) -> None:
    _skip_without(framework)
    done = _resolve(MODULES[framework].split())
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", ["jax", "torch", "tensorflow"])
def test_what_documents_and_examples_use_is_there(framework: str) -> None:
    _skip_without(framework)
    paths = sorted(p for p in _in_documents() if _needs(p) == framework)
    assert len(paths) > 5, paths
    done = _resolve(paths)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["ringjax.config", "ringjax.bench", "ringjax.doctor"]
)
def test_modules_that_are_programs(module: str) -> None:
    words = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower() or "RINGJAX_" in done.stdout
