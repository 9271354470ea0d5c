"""Jobs in allocations of a real Slurm: `sbatch` with `ringrun python train.py`."""

from __future__ import annotations

import os
import random
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
# Every step adds the average 1, for any size. Because of the large `every`, checkpoints
# are written only when rank 0 leaves.
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
# Each step hashes the step before, so the last hash proves that all steps were made
# once and in order.
CHAIN = """
import os, sys, time
import numpy as np
import ringjax

folder, last_size = sys.argv[1], 0
ringjax.init()

@ringjax.elastic.run
def train(state):
    global last_size
    while not state.done:
        values = np.array([state.step + 1.0, os.path.exists(folder + "/end")])
        number, done = ringjax.allreduce(values)
        state.chain = (31 * state.chain + int(number)) % 1000003
        state.step += 1
        state.done = bool(done > 0)
        if last_size != ringjax.size():
            last_size = ringjax.size()
            with open(f"{folder}/{os.getpid()}", "a") as file:
                file.write(f"{ringjax.rank()} {last_size} {time.time()}\\n")
        time.sleep(0.01)
        state.commit()
    print("end", state.step, state.chain, flush=True)

train(ringjax.elastic.State(step=0, chain=1, done=False))
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
    (slurm.folder / "chain.py").write_text(CHAIN)
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


def test_srun_on_two_nodes_names_the_missing_option(
    slurm: Slurm, program: Path
) -> None:
    job = slurm.submit(f"srun {sys.executable} {program}\n", "--nodes=2")
    assert slurm.wait(job).startswith("FAILED")
    text = slurm.output(job)
    assert "RINGJAX_SECRET_FILE" in text, text
    assert "or run ringrun in the batch script, which needs none" in text, text


def test_srun_with_a_host_name_that_does_not_resolve(
    slurm: Slurm, program: Path
) -> None:
    secret = "RINGJAX_SECRET=7365637265742d7365637265742d313233"
    start = f"export RINGJAX_START_TIMEOUT=8 {secret}\n"
    step = f"srun {sys.executable} {program}\n"
    job = slurm.submit(start + step, "--nodes=2")
    assert slurm.wait(job).startswith("FAILED")
    assert "set MASTER_ADDR to a name or address that" in slurm.output(job)
    known = start + "export MASTER_ADDR=127.0.0.1\n" + step
    job = slurm.submit(known, "--nodes=2", "--time=1")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)


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
    agents = _pids("agent", "n2", tmp_path)
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


def _pids(kind: str, node: str, folder: Path) -> list[int]:
    """Returns the processes of a node of one kind.

    "agent" is the agent in a job step, "own agent" the agent next to ringrun, "rank" a
    rank that has reported its size, and "srun" the client that started the agent.
    """
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if _is(kind, pid, node, folder)]


def _is(kind: str, pid: int, node: str, folder: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if kind == "srun":
        return words[0] == b"srun" and f"--nodelist={node}".encode() in words
    on_node = f"SLURMD_NODENAME={node}".encode() in env
    of_step = any(entry.startswith(b"SLURM_STEP_ID=") for entry in env)
    agent = b"ringjax.run.hosts.agent" in words and words[0] != b"srun"
    return on_node and {
        "agent": agent and of_step,
        "own agent": agent and not of_step,
        "rank": of_step and (folder / str(pid)).exists(),
    }.get(kind, False)


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
    """Every rank sees all GPUs of the job on its node."""
    show = "echo $SLURMD_NODENAME $RINGJAX_LOCAL_RANK $CUDA_VISIBLE_DEVICES"
    job = slurm.submit(f"{RINGRUN} sh -c '{show}'\n", "--nodes=2", *options.split())
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    ranks = [f"{node} {local}" for node in ("n1", "n2") for local in (0, 1)]
    assert _ranks(slurm.output(job)) == [f"{rank} 0,1" for rank in ranks]


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
    """Waits until a job was requeued and has ended; returns the output of both runs."""
    slurm.wait_for(["squeue", "-h", "-j", job, "-o", "%t %r"], "PD BeginTime")
    # Slurm would start the job only in two minutes, when the old credential expires.
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


def test_an_array_is_one_job(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    """Task 0 runs ringrun and a rank, the other tasks join, and one is cancelled."""
    from engines import programs

    (tmp_path / "sizes").mkdir()
    words = f"{slurm.folder}/elastic.py {tmp_path}/sizes 300"
    script = f"""
export RINGJAX_HOSTNAME=t$SLURM_ARRAY_TASK_ID
export RINGJAX_SECRET=7365637265742d7365637265742d313233
if [ $SLURM_ARRAY_TASK_ID = 0 ]; then
  exec {RINGRUN} -H localhost:1 --listen 29431 --min-np 1 {sys.executable} {words}
fi
exec {RINGRUN} --join 127.0.0.1:29431 --slots 1
"""
    job = slurm.submit(script, "--array=0-2", "--nodes=1", "--ntasks=1")
    programs.wait_for_sizes(tmp_path / "sizes", 3, 3)
    slurm.ask("scancel", f"{job}_2")
    programs.wait_for_sizes(tmp_path / "sizes", 2, 2)
    numbers = slurm.ask("squeue", "-h", "-o", "%A %K").splitlines()
    tasks = {task: number for number, task in map(str.split, numbers)}
    for task in ("0", "1"):
        state = slurm.wait(tasks[task])
        assert state == "COMPLETED 0:0", slurm.output(tasks["0"])
    assert slurm.output(tasks["0"]).count("]<stdout>:end") == 2


def test_random_kills(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    """Kills agents, ranks, sruns or slurmd on one node, while the other node trains.

    A kill hits the other node only after all four ranks train together again, because
    otherwise no rank with the state would be left.
    """
    seed = int(os.environ.get("RINGJAX_TEST_SEED", random.randrange(10**6)))
    rng = random.Random(seed)
    script = f"exec {RINGRUN} --min-np 1 {sys.executable} {slurm.folder}/chain.py "
    options = ["--nodes=2", "--ntasks-per-node=2", "--no-kill"]
    job = slurm.submit(f"{script}{tmp_path}\n", *options)
    kills: list[str] = []
    begin, last = time.monotonic(), ""
    try:
        while time.monotonic() - begin < 45:
            kind, node = rng.choice(KILLS)
            if node != last:
                time.sleep(2)  # ranks end some time after their srun or agent
                _wait_for_four(tmp_path)
            last = node
            kills.append(f"{time.monotonic() - begin:.1f} s: {kind} on {node}")
            if kind == "slurmd":
                slurm.kill_slurmd(node)
                time.sleep(rng.uniform(0, 1))
                slurm.start_slurmd(node)
            else:
                for pid in _pids(kind, node, tmp_path)[: rng.randint(1, 2)]:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(rng.uniform(0, 2))
        _wait_for_four(tmp_path)
        (tmp_path / "end").touch()
        assert slurm.wait(job) == "COMPLETED 0:0"
        text = slurm.output(job)
        ends = re.findall(r"\]<stdout>:end (\d+) (\d+)", text)
        assert len(ends) == 4 and len(set(ends)) == 1
        chain = 1
        for step in range(1, int(ends[0][0]) + 1):
            chain = (31 * chain + step) % 1000003
        assert int(ends[0][1]) == chain
    except BaseException as error:
        error.add_note(f"RINGJAX_TEST_SEED={seed}: {kills}\n{slurm.output(job)}")
        raise
    print(f"{len(kills)} kills, {ends[0][0]} steps")


KILLS = [(kind, node) for kind in ("agent", "rank", "srun") for node in ("n1", "n2")]
KILLS += [("own agent", "n1"), ("slurmd", "n2")]  # ringrun runs under slurmd of n1


def _wait_for_four(folder: Path, seconds: float = 40) -> None:
    """Waits until four live ranks train together."""
    deadline = time.monotonic() + seconds
    while True:
        found = [file for file in folder.iterdir() if file.name.isdigit()]
        live = [file for file in found if Path(f"/proc/{file.name}").exists()]
        last = [(file.read_text().split("\n") * 2)[-2].split()[1:2] for file in live]
        if last.count(["4"]) == 4:
            return
        assert time.monotonic() < deadline, f"sizes of {live}: {last}"
        time.sleep(0.05)


def test_a_lost_node(slurm: Slurm, program: Path, tmp_path: Path) -> None:
    """Must be the last test, because the node is not started again."""
    from engines import programs

    job = _elastic(slurm, tmp_path / "sizes", 400, "--no-kill")
    programs.wait_for_sizes(tmp_path / "sizes", 2, 2)
    slurm.kill_slurmd("n2")
    assert slurm.wait(job) == "COMPLETED 0:0", slurm.output(job)
    text = slurm.output(job)
    assert re.search(r"rank 1 \(worker 1, on n2.*: lost its host, srun ended", text)
    assert "]<stdout>:end" in text
