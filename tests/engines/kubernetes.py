"""A small emulation of Kubernetes: an API server, controllers, and pods as processes.

kmock emulates the API server over HTTP. The controllers in this file implement those
parts of Jobs, JobSets and TrainJobs that the manifests of examples/kubernetes use. A
pod is a process in its own namespaces (network, host name, processes), with only the
environment of its manifest. Pods resolve names of other pods as their Service defines.
Scheduling, images, volumes and probes are not emulated. Needs root and `ip`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kmock
from support import leaks
from support.launch import ROOT
from support.namespaces import Namespaces, address

Object = dict[str, Any]
PODS = 16  # the most pods of one cluster, because addresses are never used again
_PATHS = {
    "Service": "api/v1/namespaces/default/services",
    "Secret": "api/v1/namespaces/default/secrets",
    "Pod": "api/v1/namespaces/default/pods",
    "Job": "apis/batch/v1/namespaces/default/jobs",
    "JobSet": "apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets",
    "TrainJob": "apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs",
}
INDEX = "batch.kubernetes.io/job-completion-index"
# The first process of a container has pid 1, its own host name and its own /etc/hosts.
_INSIDE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_UNSHARE = "unshare --uts --mount --pid --fork --kill-child --mount-proc sh -c"


def missing() -> str:
    """Returns the reason why this machine cannot run pods, or "" if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    absent = [name for name in ("ip", "unshare", "mount") if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)}: install iproute2, util-linux"
    name = f"rjprobe{os.getpid() % 1000}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return done.stderr.strip()


class Server:
    """The emulated API server, in a thread."""

    def __init__(self) -> None:
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="kmock")
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        emulator = kmock.KubernetesEmulator()
        for kind, path in _PATHS.items():
            *group, plural = path.removeprefix("apis/").removeprefix("api/").split("/")
            words = ["", group[0]] if len(group) == 3 else group[:2]
            emulator.resources[kmock.resource(*words, plural)] = {"kind": kind}
        async with emulator, kmock.Server(emulator) as server:
            self.url = str(server.url).rstrip("/")
            self._ready.set()
            await self._stop.wait()

    def ask(self, method: str, path: str, body: Object | None = None) -> Object:
        request = urllib.request.Request(
            f"{self.url}/{path}",
            json.dumps(body).encode() if body is not None else None,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: Object = json.loads(answer.read() or b"{}")
        return found

    def close(self) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class Pod:
    """A running container.

    Attributes:
        deadline: when the pod is killed, after it was asked to end.
    """

    def __init__(
        self, manifest: Object, process: subprocess.Popen[bytes], ip: str, log: Path
    ) -> None:
        self.manifest, self.ip = manifest, ip
        self.name: str = manifest["metadata"]["name"]
        self.index = int(manifest["metadata"]["annotations"][INDEX])
        self.since = time.monotonic()
        self.deadline: float | None = None
        self._process, self._log = process, log

    @property
    def hostname(self) -> str:
        return str(self.manifest["spec"]["hostname"])

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def ended(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Signals the first process. SIGKILL ends all processes of the pod."""
        pid = self._process.pid
        with contextlib.suppress(OSError, IndexError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(children[0]), number)

    def kill(self) -> None:
        """Simulates the loss of the pod's node."""
        self.signal(signal.SIGKILL)


class Cluster:
    """Runs the objects of the applied manifests until it is closed."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self.id = folder, secrets.token_hex(6)
        (folder / "train.py").write_text(program)
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        self.server = Server()
        self._network = Namespaces(PODS, None, f"{os.getpid():x}"[-5:])
        self._network.__enter__()
        self._free: Iterator[int] = iter(range(PODS))
        self.pods: dict[str, Pod] = {}  # the newest pod of each name
        self.failures: dict[str, int] = {}  # the number of failures of each pod name
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._control, name="controllers")
        self._thread.start()

    def close(self) -> list[str]:
        """Ends all pods; returns the processes that outlived their pods."""
        self._closing = True
        self._thread.join()
        for pod in self.pods.values():
            pod.kill()
        left = leaks.settle(lambda: list(leaks.processes(self.id).values()))
        self._network.__exit__()
        self.server.close()
        if self._error is not None:
            raise self._error
        return left

    # -- the actions of users ----------------------------------------------------------

    def apply(self, manifest: Object) -> None:
        """Does what `kubectl apply` does."""
        kind = manifest["kind"]
        self.server.ask("POST", _PATHS[kind], manifest)
        for child in children(manifest):
            self.apply(child)

    def scale(self, job: str, count: int) -> None:
        """Sets completions and parallelism of a job, like `kubectl patch`."""
        spec = {"completions": count, "parallelism": count}
        self.server.ask("PATCH", f"{_PATHS['Job']}/{job}", {"spec": spec})

    def status(self, job: str) -> str:
        """Returns the status of a job: "Complete", "Failed" or ""."""
        found = self.server.ask("GET", f"{_PATHS['Job']}/{job}")
        return str(found.get("status", {}).get("phase", ""))

    def wait_for(self, what: Any, why: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert self._error is None, self._error
            assert time.monotonic() < deadline, f"never: {why}\n{self.logs()}"
            time.sleep(0.05)

    def output(self, pod: str) -> str:
        """Returns the output of the newest pod of a name."""
        found = self.pods.get(pod)
        return "" if found is None else found.output

    def logs(self) -> str:
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in found)

    # -- the controllers ---------------------------------------------------------------

    def _control(self) -> None:
        try:
            while not self._closing:
                for job in self._list("Job"):
                    self._job(job)
                self._resolve()
                time.sleep(0.05)
        except BaseException as error:
            self._error = error

    def _list(self, kind: str) -> list[Object]:
        return list(self.server.ask("GET", _PATHS[kind]).get("items", []))

    def _job(self, job: Object) -> None:
        """Controls an Indexed Job: a pod for each index until all have succeeded."""
        spec, name = job["spec"], job["metadata"]["name"]
        if job.get("status", {}).get("phase"):
            return
        assert spec["parallelism"] == spec["completions"], "ranks would wait for others"
        limit = spec.get("backoffLimitPerIndex", spec.get("backoffLimit", 6))
        pods = {}
        for pod in list(self.pods.values()):
            if pod.manifest["metadata"]["labels"]["job-name"] == name:
                pods[pod.index] = pod
        done = 0
        for index in range(spec["completions"]):
            pod = pods.get(index)
            code = None if pod is None else pod.ended()
            if pod is None:
                self._start(job, index)
            elif code == 0:
                done += 1
            elif code is not None:
                self.failures[pod.name] = self.failures.get(pod.name, 0) + 1
                if self.failures[pod.name] > limit:
                    self._failed(job)
                    return
                self._start(job, index)
        for index, pod in pods.items():
            if index >= spec["completions"]:
                self._delete(pod)
        if done == spec["completions"]:
            self._finish(name, "Complete")

    def _failed(self, job: Object) -> None:
        """Handles a failed Job of a JobSet: restarts only the Job, or fails the set."""
        name = job["metadata"]["name"]
        if job["metadata"].get("annotations", {}).get("restarts") == "RestartJob":
            for pod in list(self.pods.values()):
                if pod.manifest["metadata"]["labels"]["job-name"] == name:
                    self.failures.pop(pod.name)
                    del self.pods[pod.name]
            return
        self._finish(name, "Failed")

    def _finish(self, job: str, phase: str) -> None:
        path = f"{_PATHS['Job']}/{job}"
        self.server.ask("PATCH", path, {"status": {"phase": phase}})

    def _delete(self, pod: Pod) -> None:
        now = time.monotonic()
        if pod.ended() is not None:
            del self.pods[pod.name]
        elif pod.deadline is None:
            spec = pod.manifest["spec"]
            pod.deadline = now + spec.get("terminationGracePeriodSeconds", 30)
            pod.signal(signal.SIGTERM)
        elif now > pod.deadline:
            pod.kill()

    def _resolve(self) -> None:
        """Writes a hosts file with the pods that a headless Service selects."""
        lines = ["127.0.0.1 localhost"]
        for service in self._list("Service"):
            spec, domain = service["spec"], service["metadata"]["name"]
            if spec.get("clusterIP") != "None":
                continue
            for pod in self.pods.values():
                labels = pod.manifest["metadata"]["labels"]
                chosen = spec["selector"].items() <= labels.items()
                late = time.monotonic() < pod.since + 0.5
                if chosen and not late and pod.ended() is None:
                    assert spec["publishNotReadyAddresses"], "they wait for each other"
                    if pod.manifest["spec"].get("subdomain") == domain:
                        lines.append(f"{pod.ip} {pod.hostname}.{domain} {pod.hostname}")
        self._names.write_text("\n".join([*lines, ""]))

    # -- the kubelet -------------------------------------------------------------------

    def _start(self, job: Object, index: int) -> None:
        name = f"{job['metadata']['name']}-{index}"
        template = copy.deepcopy(job["spec"]["template"])
        meta = template.setdefault("metadata", {})
        meta["name"] = name
        labels = {"job-name": job["metadata"]["name"]}
        meta["labels"] = {**meta.get("labels", {}), **labels}
        meta["annotations"] = {**meta.get("annotations", {}), INDEX: str(index)}
        spec = template["spec"]
        spec.setdefault("hostname", name)
        (container,) = spec["containers"]
        number = next(self._free)
        log = self.folder / f"{name}.{number}.log"
        words = [*_UNSHARE.split(), _INSIDE, "pod", spec["hostname"], str(self._names)]
        inside = ["ip", "netns", "exec", self._network.names[number]]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*inside, *words, *container["command"]],
                env=self._environment(container, template),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._network._processes.append(process)
        self.pods[name] = Pod(template, process, address(number), log)

    def _environment(self, container: Object, pod: Object) -> dict[str, str]:
        env = {
            # Variables of the image.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "JAX_PLATFORMS": "cpu",
            leaks.JOB_VARIABLE: self.id,
            # Variables that the Job controller adds.
            "JOB_COMPLETION_INDEX": pod["metadata"]["annotations"][INDEX],
        }
        for entry in container.get("env", ()):
            value = entry.get("value")
            if value is None:
                value = self._value_from(entry["valueFrom"], pod)
            env[entry["name"]] = value
        return env

    def _value_from(self, source: Object, pod: Object) -> str:
        if "secretKeyRef" in source:
            wanted = source["secretKeyRef"]
            found = self.server.ask("GET", f"{_PATHS['Secret']}/{wanted['name']}")
            return str(found["stringData"][wanted["key"]])
        path = source["fieldRef"]["fieldPath"]
        match = re.fullmatch(r"metadata\.(\w+)\['(.+)'\]", path)
        assert match, path
        return str(pod["metadata"][match[1]][match[2]])


def children(manifest: Object) -> list[Object]:
    """Returns the objects that the controllers of JobSet and Trainer create."""
    if manifest["kind"] == "JobSet":
        return _children_of_job_set(manifest)
    return []


def _children_of_job_set(job_set: Object) -> list[Object]:
    name, spec = job_set["metadata"]["name"], job_set["spec"]
    network = spec.get("network", {})
    rules = spec.get("failurePolicy", {}).get("rules") or [{"action": "RestartJobSet"}]
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
        "selector": {"jobset.sigs.k8s.io/jobset-name": name},
    }
    found: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": network.get("subdomain", name)},
            "spec": service,
        }
    ]
    for group in spec["replicatedJobs"]:
        for number in range(group.get("replicas", 1)):
            job = copy.deepcopy(group["template"])
            job |= {"apiVersion": "batch/v1", "kind": "Job"}
            job["metadata"] = {
                "name": f"{name}-{group['name']}-{number}",
                "annotations": {"restarts": rules[0]["action"]},
            }
            template = job["spec"]["template"]
            template["metadata"] = {"labels": service["selector"]}
            template["spec"]["subdomain"] = network.get("subdomain", name)
            found.append(job)
    return found


def job_set_of(train_job: Object, runtime: Object) -> Object:
    """Returns the JobSet that Trainer creates from a TrainJob and its JAX runtime."""
    name, trainer = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"]["jax"] == {}
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (group,) = spec["replicatedJobs"]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert group["template"]["metadata"]["labels"][label] == "trainer"
    count = trainer["numNodes"]
    job = group["template"]["spec"]
    job |= {"completions": count, "parallelism": count, "backoffLimit": 0}
    (container,) = job["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container["command"] = trainer["command"]
    place = {"fieldPath": f"metadata.annotations['{INDEX}']"}
    container["env"] += [
        {"name": "JAX_NUM_PROCESSES", "value": str(count)},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": place}},
        {
            "name": "JAX_COORDINATOR_ADDRESS",
            "value": f"{name}-{group['name']}-0-0.{name}:29500",
        },
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": spec,
    }
