"""The manifests of examples/kubernetes are valid, and run in emulated pods.

The schemas come from kubernetes-validate and from Kubeflow's models. kubernetes.py
emulates the cluster.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.elastic_member import MEMBER_PROGRAM
from support.launch import ROOT, StartJob

from ringjax.config import Config
from ringjax.control import launch_environment

_MISSING = "the packages that `make test-engines` installs for Kubernetes are missing"
validation = pytest.importorskip("kubernetes_validate", reason=_MISSING)
yaml = pytest.importorskip("yaml", reason=_MISSING)
models = pytest.importorskip("kubeflow_trainer_api.models", reason=_MISSING)
pytest.importorskip("kmock", reason=_MISSING)

from engines import kubernetes  # noqa: E402  (imports the packages checked above)

FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(file.name for file in FOLDER.glob("*.yaml"))
_MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
}
# The allowed keys of an MPIJob of v2beta1. No package on PyPI has the schema.
_MPI_JOB = {
    "spec": {"slotsPerWorker", "sshAuthMountPath", "mpiReplicaSpecs", "runPolicy"}
    | {"mpiImplementation", "launcherCreationPolicy", "runLauncherAsWorker"},
    "replica": {"replicas", "restartPolicy", "template"},
}
_WRONG = (AssertionError, ValueError, validation.ValidationError)
# Mappings whose keys users choose, or that no schema describes.
_FREE = ("labels", "selector", "jax", "requests", "limits", "mpiReplicaSpecs")
needs_pods = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        bool(kubernetes.missing()), reason=kubernetes.missing() or "all is here"
    ),
]


def _documents(name: str) -> list[dict[str, Any]]:
    text = (FOLDER / name).read_text()
    return [document for document in yaml.safe_load_all(text) if document]


def _validate(document: dict[str, Any]) -> None:
    """Raises if a key or value is wrong or unknown, also inside of templates."""
    kind = document["kind"]
    if kind in _MODELS:
        model = getattr(models, _MODELS[kind])
        known = model.from_dict(document).to_dict()
        _compare(document, known, kind)  # the model drops unknown keys
        for job in _jobs(document):
            validation.validate(job, "1.37", strict=True)
    elif kind == "MPIJob":
        assert document["apiVersion"] == "kubeflow.org/v2beta1"
        assert document["spec"].keys() <= _MPI_JOB["spec"]
        for replica in document["spec"]["mpiReplicaSpecs"].values():
            assert replica.keys() <= _MPI_JOB["replica"]
            pod = {**replica["template"]["spec"], "restartPolicy": "Never"}
            job = _job({"template": {**replica["template"], "spec": pod}})
            validation.validate(job, "1.37", strict=True)
    else:
        validation.validate(document, "1.37", strict=True)


def _job(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": spec,
    }


def _jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    if document["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]
    return [_job(each["template"]["spec"]) for each in spec.get("replicatedJobs", ())]


def _compare(given: Any, known: Any, path: str) -> None:
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in known, f"{path} has no {key}"
            _compare(value, known[key], f"{path}.{key}")
    elif isinstance(given, list):
        for value, found in zip(given, known, strict=True):
            _compare(value, found, path)
    else:
        assert given == known, path


@pytest.mark.parametrize("name", FILES)
def test_the_manifests_are_valid(name: str) -> None:
    for document in _documents(name):
        _validate(document)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all mappings whose keys the API defines, not the user."""
    if isinstance(value, dict):
        if path and path[-1] not in _FREE:
            yield path
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*path, number))


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_key_is_found_anywhere(name: str) -> None:
    for document in _documents(name):
        for path in _paths(document):
            if document["kind"] == "MPIJob" and path[:1] == ("metadata",):
                continue
            wrong = yaml.safe_load(yaml.safe_dump(document))
            mapping = wrong
            for step in path:
                mapping = mapping[step]
            mapping["replicaz"] = 3
            with pytest.raises(_WRONG):
                _validate(wrong)
                print(f"not noticed: {document['kind']} {path}")


def test_pods_receive_their_rank_and_size() -> None:
    service, job = _documents("indexed-job.yaml")
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    given = {e["name"]: e for e in pod["containers"][0]["env"]}
    path = given["RINGJAX_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert re.fullmatch(
        r"metadata\.annotations\['batch\.kubernetes\.io/.*index'\]", path
    )
    env = {name: e["value"] for name, e in given.items() if "value" in e}
    env |= {"RINGJAX_RANK": "3", "RINGJAX_SECRET": "ab" * 32}
    info = launch_environment.detect_launch(Config.from_env(env), env)
    assert (info.rank, info.size) == (3, job["spec"]["completions"])
    assert not info.single_host
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert (info.rank0_host, info.port) == (first, 29400)


# -- the programs in the pods ----------------------------------------------------------

STATIC = """
import numpy as np
import ringjax

ringjax.init()
total = int(ringjax.allreduce(np.ones(3), op=ringjax.Sum)[0])
print("rank", ringjax.rank(), "of", ringjax.size(), total, flush=True)
"""
# Trains until the file `end` exists. Each change of the size is written to a file.
ELASTIC = """
import socket, time
from pathlib import Path
import numpy as np
import ringjax

folder = Path({folder!r})
ringjax.init()
me = folder / f"size-{{socket.gethostname()}}-{{time.time_ns()}}"

@ringjax.elastic.run
def train(state):
    size = end = 0
    while not end:
        mine = [1.0, float((folder / "end").exists())]
        count, end = ringjax.allreduce(np.array(mine), op=ringjax.Sum)
        state.step += 1
        if int(count) != size:
            size = int(count)
            with me.open("a") as file:
                file.write(f"{{state.step}} {{size}} {{time.time()}}\\n")
        time.sleep(0.02)
        state.commit()

train(ringjax.elastic.State(step=0))
print("end", flush=True)
"""


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    program = request.param.format(folder=str(tmp_path))
    found = kubernetes.Cluster(tmp_path, program)
    found.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "train"},
            "stringData": {"secret": "5a" * 32},
        }
    )
    try:
        yield found
    finally:
        left = found.close()
    assert not left, left


static = pytest.mark.parametrize("cluster", [STATIC], indirect=True)
elastic = pytest.mark.parametrize("cluster", [ELASTIC], indirect=True)


def _sizes(folder: Path, host: str) -> list[tuple[int, int, float]]:
    """Returns the lines of the newest rank on a host: step, size, time."""
    files = sorted(folder.glob(f"size-{host}-*"), key=lambda f: f.stat().st_ctime_ns)
    lines = files[-1].read_text().split("\n")[:-1] if files else []
    return [(int(a), int(b), float(c)) for a, b, c in map(str.split, lines)]


def _wait_for(cluster: Any, size: int, hosts: list[str]) -> None:
    """Waits until the ranks on all `hosts` have reported `size`."""

    def all_reported() -> bool:
        last = [_sizes(cluster.folder, host)[-1:] for host in hosts]
        return all(each and each[0][1] == size for each in last)

    cluster.wait_for(all_reported, f"{size} ranks on {', '.join(hosts)}")


def _seconds(cluster: Any, host: str, size: int, since: float) -> float:
    """Returns the seconds from `since` to the first step of `size` ranks."""
    times = [t for _, n, t in _sizes(cluster.folder, host) if n == size and t > since]
    return times[0] - since


def _kill(cluster: Any, pod: str) -> float:
    now = time.time()
    cluster.pods[pod].kill()
    return now


@static
class TestStatic:
    pytestmark = needs_pods

    def test_an_indexed_job(self, cluster: Any) -> None:
        for document in _documents("indexed-job.yaml"):
            cluster.apply(document)
        cluster.wait_for(lambda: cluster.status("train"), "the end")
        assert cluster.status("train") == "Complete", cluster.logs()
        outputs = [cluster.pods[f"train-{n}"].output.strip() for n in range(4)]
        assert outputs == [f"rank {n} of 4 4" for n in range(4)]

    def test_a_train_job(self, cluster: Any) -> None:
        runtime, train_job = _documents("trainjob.yaml")
        cluster.apply(kubernetes.job_set_of(train_job, runtime))
        cluster.wait_for(lambda: cluster.status("train-node-0"), "the end")
        assert cluster.status("train-node-0") == "Complete", cluster.logs()
        outputs = [cluster.pods[f"train-node-0-{n}"].output.strip() for n in range(4)]
        assert outputs == [f"rank {n} of 4 4" for n in range(4)]


@elastic
class TestElastic:
    pytestmark = needs_pods

    def test_an_elastic_job_grows_and_shrinks(self, cluster: Any) -> None:
        for document in _documents("elastic-job.yaml"):
            cluster.apply(document)
        names = [f"train-{n}" for n in range(6)]
        _wait_for(cluster, 4, names[:4])
        killed = _kill(cluster, "train-2")
        _wait_for(cluster, 3, ["train-0", "train-1", "train-3"])
        _wait_for(cluster, 4, names[:4])
        pause = _seconds(cluster, "train-1", 3, killed)
        print(f"a pod killed: the next step after {pause:.2f} s")
        assert cluster.failures == {"train-2": 1}
        cluster.scale("train", 6)
        _wait_for(cluster, 6, names)
        cluster.scale("train", 3)
        cluster.wait_for(lambda: len(cluster.pods) == 3, "three pods")
        _wait_for(cluster, 3, names[:3])
        killed = _kill(cluster, "train-0")
        _wait_for(cluster, 2, names[1:3])
        pause = _seconds(cluster, "train-1", 2, killed)
        print(f"pod 0 killed: the next step after {pause:.2f} s")
        _wait_for(cluster, 3, names[:3])
        cluster.pods["train-0"].signal(signal.SIGTERM)  # as if its node is drained
        _wait_for(cluster, 2, names[1:3])
        _wait_for(cluster, 3, names[:3])
        steps = [step for step, _, _ in _sizes(cluster.folder, "train-1")]
        assert steps == sorted(steps) and len(steps) > 5  # pod 1 kept its process
        (cluster.folder / "end").touch()
        cluster.wait_for(lambda: cluster.status("train"), "the end")
        assert cluster.status("train") == "Complete", cluster.logs()
        assert cluster.failures == {"train-0": 2, "train-2": 1}

    def test_a_job_set(self, cluster: Any) -> None:
        (job_set,) = _documents("jobset.yaml")
        cluster.apply(job_set)
        hosts = [f"train-host-{n}-0" for n in range(4)]
        _wait_for(cluster, 4, hosts)
        _kill(cluster, "train-host-1-0")
        _wait_for(cluster, 3, [hosts[0], *hosts[2:]])
        _wait_for(cluster, 4, hosts)
        before = dict(cluster.pods)
        _kill(cluster, "train-ringrun-0-0")
        again = "and another is looked for"
        cluster.wait_for(lambda: again in cluster.output(hosts[0]), "a loss")
        cluster.wait_for(
            lambda: cluster.output("train-ringrun-0-0").count("has come") == 4,
            "all hosts at the new ringrun",
        )
        assert [cluster.pods[h] for h in hosts] == [before[h] for h in hosts]
        assert _sizes(cluster.folder, hosts[0])[-1][1] == 4
        (cluster.folder / "end").touch()
        for job in ("train-ringrun-0", *(f"train-host-{n}" for n in range(4))):
            cluster.wait_for(lambda job=job: cluster.status(job), f"the end of {job}")
            assert cluster.status(job) == "Complete", cluster.logs()


# Replaces OpenSSH. The arguments are options, a host, and a command for the shell.
SSH = """#!/bin/sh
while :; do case "$1" in -*) shift;; *) break;; esac; done
shift
cd / && exec env -u RINGJAX_SECRET sh -c "$*"
"""


def test_an_mpi_job(start_job: StartJob, tmp_path: Path) -> None:
    """Runs the command of the launcher, and emulates ssh and the operator."""
    (mpi_job,) = _documents("mpijob.yaml")
    roles = mpi_job["spec"]["mpiReplicaSpecs"]
    (launcher,) = roles["Launcher"]["template"]["spec"]["containers"]
    words = launcher["command"]
    assert (words[0], words[-2:]) == ("ringrun", ["python", "train.py"])
    assert words[words.index("--slots") + 1] == str(mpi_job["spec"]["slotsPerWorker"])
    script = tmp_path / "discover_hosts.sh"

    def write_hosts(*numbers: int) -> None:
        lines = [f"echo train-worker-{n}.train.default.svc" for n in numbers]
        (tmp_path / "new").write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (tmp_path / "new").chmod(0o755)
        (tmp_path / "new").rename(script)

    write_hosts(0, 1)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    options = [w if w != "/etc/mpi/discover_hosts.sh" else str(script) for w in words]
    env = {
        "FOLDER": str(tmp_path),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    job = start_job(2, MEMBER_PROGRAM, env, options[1:-2])
    job.wait_for(1, "epoch 0 start: 1/2")
    write_hosts(0, 1, 2)
    job.wait_for(0, "resize: 0/3")
    write_hosts(0, 2)
    job.wait_for(0, "resize: 0/2")
    (tmp_path / "end").touch()
    assert job.wait(30) == 0
