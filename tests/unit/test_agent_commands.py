"""Tests of agents that an engine starts: srun in Slurm, or a command template.

These tests replace the engine by a shell script. tests/engines uses the real Slurm.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.ringrun import Done, ringrun, sh

# A fake of srun and kubectl exec. Its arguments are options and then a command. Like
# those programs, it sets some environment variables for the command.
ENGINE = """#!/bin/sh
echo "$@" >> "$ENGINE_LOG"
for word; do
  case "$word" in
    --nodelist=*) NODE=${word#*=}; shift;;
    -*) shift;;
    exec) NODE=$2; shift 2;;
    *) break;;
  esac
done
[ "$NODE" = n3 ] && echo "n3 is drained" >&2 && exit 7
SLURMD_NODENAME=$NODE CUDA_VISIBLE_DEVICES=GPU-$NODE RINGJAX_SECRET=theirs \\
  WHOSE=engine exec "$@"
"""
SHOW = sh('echo "$RINGJAX_HOSTNAME $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $WHOSE"')


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which `srun` and `engine` are the fake engine."""
    for name in ("srun", "engine"):
        (tmp_path / name).write_text(ENGINE)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "ENGINE_LOG": str(tmp_path / "log"),
        "SLURMD_NODENAME": "n0",
        "CUDA_VISIBLE_DEVICES": "GPU-n0",
        "WHOSE": "ringrun",
    }


def _allocation(nodes: str, tasks: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_TASKS_PER_NODE": tasks,
    }


def _lines(done: Done) -> list[str]:
    return sorted(line for line in done.stdout.splitlines() if "<stdout>" in line)


def test_a_slurm_allocation_needs_no_options(engine: dict[str, str]) -> None:
    done = ringrun(*SHOW, **engine, **_allocation("n[1-2]", "1,2"))
    assert done.returncode == 0, done.stderr
    assert _lines(done) == [
        "[0]<stdout>:n1 n1 GPU-n1 engine",
        "[1]<stdout>:n2 n2 GPU-n2 engine",
        "[2]<stdout>:n2 n2 GPU-n2 engine",
    ]
    calls = Path(engine["ENGINE_LOG"]).read_text().splitlines()
    assert len(calls) == 2  # a call for each host
    assert all("--overlap" in call and "--nodes=1" in call for call in calls)


def test_a_passed_variable_overrides_the_engines(
    engine: dict[str, str],
) -> None:
    done = ringrun("-x", "WHOSE=mine", *SHOW, **engine, **_allocation("n1", "1"))
    assert _lines(done) == ["[0]<stdout>:n1 n1 GPU-n1 mine"], done.stderr


def test_agent_command_template(engine: dict[str, str]) -> None:
    words = ["--agent-command", "engine exec {host}", "-H", "localhost:1,pod-1:1"]
    done = ringrun(*words, *SHOW, **engine)
    assert done.returncode == 0, done.stderr
    assert _lines(done) == [
        "[0]<stdout>:localhost n0 GPU-n0 ringrun",
        "[1]<stdout>:pod-1 pod-1 GPU-pod-1 engine",
    ]


def test_ranks_get_ringruns_secret(engine: dict[str, str]) -> None:
    script = sh('[ -n "$RINGJAX_SECRET" ] && [ "$RINGJAX_SECRET" != theirs ]')
    done = ringrun(*script, **engine, **_allocation("n1", "1"))
    assert done.returncode == 0, done.stderr


def test_a_host_that_the_engine_refuses(engine: dict[str, str]) -> None:
    done = ringrun(*sh("sleep 100"), **engine, **_allocation("n[1,3]", "1(x2)"))
    assert done.returncode == 255
    assert "n3 is drained" in done.stderr
    assert "rank 1 (n3): lost its host, srun ended (7)" in done.stderr


def test_a_host_outside_of_the_allocation_is_reached_by_ssh(
    engine: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho not here >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    done = ringrun("-H", "n9:1", *SHOW, **engine, **_allocation("n1", "1"))
    assert "rank 0: lost its host, ssh ended (255)" in done.stderr


def test_a_template_must_contain_the_host() -> None:
    done = ringrun("--agent-command", "rsh", "-np", "1", "true")
    assert done.returncode == 2
    assert "--agent-command 'rsh': expected a command with {host} in it" in done.stderr


def test_lsf_and_grid_engine(engine: dict[str, str], tmp_path: Path) -> None:
    """The fake engine replaces blaunch and qrsh, which take the host as an argument."""
    stand_in = ENGINE.replace("-*) shift;;", "-*) shift;;\n    n1|n2) NODE=$1; shift;;")
    for name in ("blaunch", "qrsh"):
        (tmp_path / name).write_text(stand_in)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("n1 1 all.q\nn2 1 all.q\n")
    for given, command in (
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 1 n2 1"}, "-z n2 env"),
        ({"JOB_ID": "7", "PE_HOSTFILE": str(tmp_path / "hosts")}, "-inherit -nos"),
    ):
        done = ringrun(*SHOW, **engine, **given)
        assert _lines(done) == [
            "[0]<stdout>:n1 n1 GPU-n1 engine",
            "[1]<stdout>:n2 n2 GPU-n2 engine",
        ], done.stderr
        # Both agents start at the same time, so either may have written the last line.
        called = Path(engine["ENGINE_LOG"]).read_text().splitlines()[-2:]
        assert any(command in line for line in called), called


def test_an_agent_forwards_sigterm_to_its_ranks(engine: dict[str, str]) -> None:
    """Engines stop a host with SIGTERM. Ranks may handle the forwarded signal."""
    wanted = sh(
        '[ "$RINGJAX_RANK" = 0 ] && sleep 0.5 && exit 0\n'
        "trap 'sleep 0.2; echo ended well; exit 0' TERM\n"
        "kill $PPID\n"
        "while :; do sleep 0.05; done"
    )
    done = ringrun(*wanted, **engine, **_allocation("n[1-2]", "1(x2)"))
    assert done.returncode == 0, done.stderr
    assert _lines(done) == ["[1]<stdout>:ended well"]


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ("RUNNING", 0, "ringrun: job 7 is queued again"),
        ("RUNNING", 1, "ringrun: job 7 is not queued again: this is disabled"),
        ("COMPLETING", 0, "ringrun: every rank has left, as it was asked to"),
    ],
)
def test_slurm_requeues_a_job_whose_ranks_have_left(
    tmp_path: Path, state: str, code: int, said: str
) -> None:
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\n[ $1 = show ] && echo JobId=7 JobState={state} && exit\n"
        f"[ \"$1 $2\" = 'requeue 7' ] && echo this is disabled >&2; exit {code}\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    wanted = sh("kill -USR1 $(ps -o ppid= $PPID); sleep 100")
    done = ringrun(*("-np", "1", "--min-np", "1"), *wanted, SLURM_JOB_ID="7", **path)
    assert done.returncode == 143
    assert done.stderr.splitlines()[-1] == said
