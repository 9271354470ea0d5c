"""Jobs in allocations of a real Slurm: `sbatch` with `ringrun python train.py`."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import slurm as small
from engines.slurm import Slurm

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(small.missing()), reason=small.missing() or "all is here"),
]
PROGRAM = """
import os, sys
import numpy as np
import ringjax

ringjax.init()
total = ringjax.allreduce(np.ones(3), op=ringjax.Sum)[0]
print(ringjax.rank(), ringjax.size(), ringjax.local_rank(), int(total),
      os.environ["SLURMD_NODENAME"], os.environ.get("RINGJAX_SECRET_FILE"), flush=True)
"""
TRAIN = """
import os, sys
from engines import programs
print("end", programs.train(sys.argv[1], int(sys.argv[2]), 0.02)["sizes"], flush=True)
"""
# Every step adds 1, whoever is there; checkpoints come only when rank 0 leaves.
COUNT = """
import os, sys, time
import numpy as np
import ringjax

folder, steps = sys.argv[1], int(sys.argv[2])
ringjax.init()

@ringjax.elastic.run(checkpointer=ringjax.elastic.Checkpointer(folder, every=10**9))
def train(state):
    begin = state.step
    while state.step < steps:
        state.total += float(ringjax.allreduce(np.ones(3))[0])
        state.step += 1
        if state.step == begin + 20:
            print("trains from", begin, flush=True)
        time.sleep(0.02)
        state.commit()
    print("end", int(state.total), flush=True)

train(ringjax.elastic.State(step=0, total=0.0))
"""
RINGRUN = f"{sys.executable} -P -m ringjax.run"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def program(slurm: Slurm) -> Path:
    (slurm.folder / "train.py").write_text(PROGRAM)
    (slurm.folder / "elastic.py").write_text(TRAIN)
    (slurm.folder / "count.py").write_text(COUNT)
    return slurm.folder / "train.py"


def _ranks(text: str) -> list[str]:
    found = re.findall(r"\[(\d+)\]<stdout>:(.*)", text)
    return [line for _, line in sorted(found, key=lambda item: int(item[0]))]


def test_an_allocation_needs_no_options(slurm: Slurm, program: Path) -> None:
    script = f"{RINGRUN} {sys.executable} {program}\n"
    begin = time.monotonic()
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=2")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    print(f"two nodes, four ranks: {time.monotonic() - begin:.1f} s")
    assert _ranks(slurm.output(job)) == [
        "0 4 0 4 n1 None",
        "1 4 1 4 n1 None",
        "2 4 0 4 n2 None",
        "3 4 1 4 n2 None",
    ]


def test_one_node(slurm: Slurm, program: Path) -> None:
    job = slurm.submit(f"{RINGRUN} {sys.executable} {program}\n", "--ntasks=3")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    assert [line.split()[1] for line in _ranks(slurm.output(job))] == ["3"] * 3


def test_srun_itself(slurm: Slurm, program: Path) -> None:
    job = slurm.submit(f"srun {sys.executable} {program}\n", "--ntasks=3", "--nodes=1")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    lines = sorted(slurm.output(job).strip().splitlines())
    assert [line.split()[:2] for line in lines] == [["0", "3"], ["1", "3"], ["2", "3"]]


def test_srun_on_two_nodes_says_what_is_missing(slurm: Slurm, program: Path) -> None:
    job = slurm.submit(f"srun {sys.executable} {program}\n", "--nodes=2")
    assert slurm.wait(job).startswith("FAILED")
    text = slurm.output(job)
    assert "RINGJAX_SECRET_FILE" in text, text


def test_a_rank_that_fails_ends_the_job(slurm: Slurm, program: Path) -> None:
    bad = slurm.folder / "bad.py"
    bad.write_text(
        "import ringjax; ringjax.init()\n"
        "if ringjax.rank() == 1: raise ValueError('boom')\n"
        "ringjax.barrier()\n"
    )
    job = slurm.submit(f"{RINGRUN} {sys.executable} {bad}\n", "--nodes=2")
    assert slurm.wait(job) == "FAILED 1:0", slurm.output(job)
    last = slurm.output(job).strip().splitlines()[-1]
    assert last == "ringrun: rank 1 (n2) failed: ValueError: boom (exit code 1)"


def _elastic(slurm: Slurm, folder: Path, steps: int, *options: str) -> str:
    folder.mkdir(exist_ok=True)
    words = f"{slurm.folder}/elastic.py {folder} {steps}"
    script = f"exec {RINGRUN} --min-np 1 --verbose {sys.executable} {words}\n"
    return slurm.submit(script, "--nodes=2", "--ntasks-per-node=1", *options)


def _wait_for(slurm: Slurm, job: str, text: str, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not (
        Path(f"{slurm.folder}/{job}.out").exists() and text in slurm.output(job)
    ):
        assert time.monotonic() < deadline, slurm.output(job)
        time.sleep(0.05)


def test_a_killed_agent_is_replaced(
    slurm: Slurm, program: Path, tmp_path: Path
) -> None:
    from engines import programs

    job = _elastic(slurm, tmp_path / "sizes", 700)
    programs.wait_for_sizes(tmp_path / "sizes", 2, 2)
    agents = [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if _is_agent(pid, "n2")
    ]
    assert len(agents) == 1
    killed = time.time()
    os.kill(agents[0], signal.SIGKILL)
    _wait_for(slurm, job, "joined as rank 1")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    text = slurm.output(job)
    assert re.search(r"rank 1 \(worker 1, on n2.*: lost its host, srun ended", text)
    assert text.count("]<stdout>:end") == 2
    sizes = [
        float(w) for w in re.findall(r", 1, (\d+\.\d+)\)", text) if float(w) > killed
    ]
    print(f"the survivor's next step came {min(sizes) - killed:.2f} s after the kill")


def _is_agent(pid: int, node: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    name = f"SLURMD_NODENAME={node}".encode()
    return b"ringjax.run.hosts.agent" in words and b"python" in words[0] and name in env


def test_scancel_leaves_nothing(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    from engines import programs

    job = _elastic(slurm, tmp_path / "sizes", 100000)
    programs.wait_for_sizes(tmp_path / "sizes", 2, 2)
    slurm.ask("scancel", job)
    assert slurm.wait(job).startswith("CANCELLED")
    deadline = time.monotonic() + 10
    pids = [int(file.name) for file in (tmp_path / "sizes").iterdir()]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "options",
    [
        "--gpus-per-node=2",
        "--gres=gpu:2 --ntasks-per-node=2",
        "--gpus=4 --ntasks-per-node=2",
        "--gpus-per-task=1 --ntasks-per-node=2",
        "--gpus-per-node=2 --ntasks-per-node=2 --mem-per-cpu=100 --cpus-per-task=2",
    ],
)
def test_gpus_of_the_step(slurm: Slurm, options: str) -> None:
    """Every rank sees all GPUs that the job has on its node, and takes its own."""
    show = "echo $SLURMD_NODENAME $RINGJAX_LOCAL_RANK $CUDA_VISIBLE_DEVICES"
    job = slurm.submit(f"{RINGRUN} sh -c '{show}'\n", "--nodes=2", *options.split())
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    places = [f"{node} {local}" for node in ("n1", "n2") for local in (0, 1)]
    assert _ranks(slurm.output(job)) == [f"{place} 0,1" for place in places]


def test_gpus_that_are_spread_unevenly(slurm: Slurm) -> None:
    job = slurm.submit(f"{RINGRUN} true\n", "--nodes=2", "--gpus=3")
    assert slurm.wait(job).startswith("FAILED")
    assert "ask for --gpus-per-node instead of --gpus" in slurm.output(job)


def _count(slurm: Slurm, folder: Path, *options: str) -> str:
    words = f"{slurm.folder}/count.py {folder} 300"
    script = f"exec {RINGRUN} --min-np 1 {sys.executable} {words}\n"
    alone = ["--nodes=2", "--ntasks-per-node=1", "--exclusive", "--requeue"]
    job = slurm.submit(script, *alone, *options)
    _wait_for(slurm, job, "trains from 0")
    return job


def _resumed(slurm: Slurm, job: str) -> str:
    """Waits until a job was queued again and has ended; what both its lives wrote."""
    slurm.wait_for(["squeue", "-h", "-j", job, "-o", "%t %r"], "PD BeginTime")
    # Which is in two minutes, so long Slurm knows the old one's credential.
    slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now")
    assert slurm.wait(job, 90) == "COMPLETED 0:0", slurm.output(job)
    text = slurm.output(job)
    assert text.count("]<stdout>:end 300\n") == 2, text
    begins = [int(step) for step in re.findall(r"trains from (\d+)", text)]
    assert begins[0] == 0 and max(begins) >= 20, text
    return text


def test_requeue(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    job = _count(slurm, tmp_path)
    slurm.ask("scontrol", "requeue", job)
    assert "ringrun: ended by SIGTERM" in _resumed(slurm, job)


def test_a_warning_before_the_end(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    job = _count(slurm, tmp_path, "--signal=B:USR1@60", "--time=10")
    slurm.ask("scancel", "--signal=USR1", "--batch", job)
    text = _resumed(slurm, job)
    assert "ringrun: SIGUSR1: all ranks leave at their next commit" in text
    assert f"ringrun: job {job} is queued again" in text


@pytest.mark.parametrize("signals", [[], ["--signal=B:USR1@60"]])
def test_preemption(
    slurm: Slurm, program: Path, tmp_path: Path, signals: list[str]
) -> None:
    job = _count(slurm, tmp_path, "--time=10", *signals)
    urgent = ["--nodes=2", "--exclusive", "--partition=urgent"]
    other = slurm.submit("sleep 1\n", *urgent)
    assert slurm.wait(other) == "COMPLETED 0:0"
    text = _resumed(slurm, job)
    assert ("SIGUSR1: all ranks leave" in text) == bool(signals), text


def test_a_lost_node(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    """Last, since the node stays away: the others go on without it."""
    from engines import programs

    job = _elastic(slurm, tmp_path / "sizes", 400, "--no-kill")
    programs.wait_for_sizes(tmp_path / "sizes", 2, 2)
    slurm.kill_slurmd("n2")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    text = slurm.output(job)
    assert re.search(r"rank 1 \(worker 1, on n2.*: lost its host, srun ended", text)
    assert "]<stdout>:end" in text
