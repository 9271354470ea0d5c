"""Runs a trial job for three seconds, and checks the speed of its collectives.

`python -m ringjax.doctor.trial` is one rank of the job. On one host the trial compares
the duration of an allreduce with the duration of a plain memory copy of as many bytes,
which all ranks make at the same time. On several hosts the trial compares the allreduce
with the prediction of the cost model, whose parameters an earlier job may have
measured.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np

from ringjax import _native, eager, runtime
from ringjax.doctor.findings import Finding, fail, ok, warn
from ringjax.links import calibration, cost_cache
from ringjax.ops import ReduceOp
from ringjax.run import environ

SIZE = 8 << 20  # bytes of an allreduce and of a copy
_SECONDS = 3.0
_MIN_ROUNDS = 4
_CLOCK_ROUNDS = 4  # number of rounds after which rank 0 reads the clock
_JOB_TIMEOUT = 60.0  # seconds until the job is ended
_POOR = 0.1  # share of the speed of a copy below which the allreduce is slow
_SLOWER = 4.0  # multiple of the predicted duration above which the network is busy
_MARK = "ringjax doctor: "


class TrialResult(TypedDict, total=False):
    """The measurements of the ranks of the trial job.

    Attributes:
        allreduce, copy: seconds of an allreduce, and of a copy of as many bytes.
        hosts: number of hosts.
        predicted: seconds that the cost model predicts; not set on one host.
        remembered: age in seconds of the cost model's measured parameters; 0 if this
            job has measured them.
        file: the file that holds these parameters.
    """

    ranks: int
    allreduce: float
    copy: float
    transports: list[str]
    hosts: int
    predicted: float
    remembered: float
    file: str


def main() -> None:
    """Runs one rank of the trial job. Rank 0 prints the measurements of all ranks."""
    born = time.time()
    runtime.init()
    found = _measure()
    if runtime.rank() == 0:
        print(_MARK + json.dumps(found | _network(born)), flush=True)
    runtime.shutdown()


def _measure() -> TrialResult:
    """Measures the seconds of an allreduce and of a copy on the slowest rank."""
    tensor, source = np.ones(SIZE // 4, "f4"), np.ones(SIZE // 4, "f4")
    target = np.empty_like(source)
    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    while True:
        eager.barrier()
        begun = time.perf_counter()
        np.copyto(target, source)
        copied = time.perf_counter() - begun
        eager.barrier()
        begun = time.perf_counter()
        eager.allreduce(tensor, ReduceOp.Max, name="doctor", out=tensor)
        times.append((time.perf_counter() - begun, copied))
        if len(times) % _CLOCK_ROUNDS == 0:
            # Rank 0 decides for all ranks, because the calls of all ranks must match.
            going = np.array([time.perf_counter() - start < _SECONDS])
            if not eager.broadcast(going, 0, name="going")[0]:
                break
    slowest = eager.allreduce(np.array(times), ReduceOp.Max, name="times")
    # Use the minimum, because other programs on the machine only add time.
    rounds = np.asarray(slowest)[_MIN_ROUNDS // 2 :]
    moved, copied = (float(x) for x in rounds.min(axis=0))
    return {"ranks": runtime.size(), "allreduce": moved, "copy": copied}


def _network(born: float) -> TrialResult:
    """Returns the cost model's prediction, and the age of its measured parameters.

    This rank was started at `born`, in seconds since 1970. If the parameters are newer
    than that, this job has measured them.
    """
    world = runtime.current("doctor")
    communicator = runtime.communicator(op="doctor")
    stats, hosts = communicator.stats(), list(communicator.hosts)
    found: TrialResult = {
        "transports": stats["transports"],
        "hosts": len(set(hosts)),
    }
    network = None
    if world.client is not None:
        network = calibration.describe_network(world.members, world.client.hello)
    if network is None or runtime.config().calibrate == "off":
        return found
    used = stats.get("allreduce", {}).get("algorithms", {})
    predicted = dict(_native.predict("allreduce", SIZE, hosts, communicator.cost))
    usual = [predicted[name] for name in used if name in predicted]
    file = cost_cache.path_of(runtime.config().cache_folder(), network)
    try:
        age = born - os.stat(file).st_mtime
    except OSError:
        age = 0.0
    return found | {
        "predicted": max(usual, default=min(predicted.values())),
        "remembered": age if age > 0 else 0.0,
        "file": file,
    }


# -- the part that runs in `ringjax doctor` --------------------------------------------


def run(options: Sequence[str], variables: Mapping[str, str]) -> list[Finding]:
    """Runs the trial job with these options of ringrun. Returns the findings."""
    python = [sys.executable, "-P", "-m"]
    words = [*python, "ringjax.run", *options, *python, "ringjax.doctor.trial"]
    env = {**variables, "PYTHONPATH": environ.agent_path()}
    process = subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    command = f"ringrun {' '.join(options)} {sys.executable} -m ringjax.doctor.trial"
    try:
        out, err = process.communicate(timeout=_JOB_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        text = f"a job did not end within {_JOB_TIMEOUT:.0f} s"
        return [fail(text, command, "stalled")]
    except BaseException:  # let ringrun end its ranks after Ctrl-C
        process.send_signal(signal.SIGTERM)
        process.communicate()
        raise
    if process.returncode:
        lines = [line for line in err.splitlines() if line.startswith("ringrun: ")]
        reason = (lines or err.splitlines() or ["it said nothing"])[-1]
        anchor = re.search(r"Help: ringjax explain (\w+)", err)
        text = f"a job of this size fails: {reason.removeprefix('ringrun: ')}"
        return [fail(text, command, anchor[1].lower() if anchor else "startuperror")]
    return list(judge(json.loads(out.partition(_MARK)[2].splitlines()[0])))


def judge(found: TrialResult) -> Iterator[Finding]:
    factor = 2 * (found["ranks"] - 1) / found["ranks"]
    if not factor:
        yield ok("a job of one rank ran")
        return
    speed = SIZE * factor / found["allreduce"] / 1e9
    limit = SIZE * factor / found["copy"] / 1e9
    text = f"allreduce of {SIZE >> 20} MiB: {speed:.3g} GB/s busbw"
    if "tcp" in found["transports"] and found["hosts"] == 1:
        text += ", over TCP though all ranks are on one host"
        yield warn(text, "unset RINGJAX_SHM", "without-an-error")
        return
    usual = found.get("predicted")
    if usual is None:
        yield from _on_one_host(text, speed / limit, limit)
        return
    model = SIZE * factor / usual / 1e9
    hours = found["remembered"] / 3600
    since = f"remembered for {hours:.0f} hours" if hours > 0 else "measured just now"
    if found["allreduce"] > _SLOWER * usual:
        text += f", and {model:.3g} by the calibration ({since}): the network is busy"
        mend = f"rm -f {found['file']}" if hours > 0 else "ringjax doctor"
        yield warn(text, mend, "without-an-error")
    else:
        yield ok(f"{text}, {model:.3g} by the calibration ({since})")


def _on_one_host(text: str, part: float, limit: float) -> Iterator[Finding]:
    text += f", {part:.2f} of a plain copy's {limit:.3g}"
    if part < _POOR:
        load = os.getloadavg()[0]
        text += f"; {load:.1f} programs want {len(os.sched_getaffinity(0))} CPUs"
        yield warn(text, "top  # and again once nothing else runs", "without-an-error")
    else:
        yield ok(text)


if __name__ == "__main__":
    main()
