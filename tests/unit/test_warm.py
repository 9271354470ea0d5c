"""Tests that a program forked by a warm server behaves as in a new interpreter."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import leaks, warm
from support.launch import StartJob, environment

SHOW = """
import atexit, os, signal, sys, threading, __main__

def target(name):
    return os.readlink(f"/proc/self/fd/{name}").split(":")[0]

read = lambda name: open(f"/proc/self/{name}", "rb").read().rstrip(b"\\0")
print("words", sys.argv, sys.executable, read("cmdline"))
print("variables", sorted(os.environ.items()))
print("environ", sorted(read("environ").split(b"\\0")) == sorted(
    os.fsencode(f"{k}={v}") for k, v in os.environ.items()))
print("path", sys.path)
print("main", __main__.__file__, __name__, [n for n in dir() if n.startswith("__")])
print("files", [target(n) for n in sorted(os.listdir("/proc/self/fd")) if n != "3"])
print("handlers", [signal.getsignal(n) for n in sorted(signal.valid_signals())])
print("mask", signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print("alone", os.getpid() == os.getpgid(0) == os.getsid(0), threading.active_count())
print("input", repr(sys.stdin.read()), os.getcwd(), os.umask(0o22))
atexit.register(print, "atexit runs")
print("errors", file=sys.stderr)
"""
ENDS = {
    "0": "pass",
    "a thread": "threading.Thread(target=lambda: print('is waited for')).start()",
    "7": "sys.exit(7)",
    "text": "sys.exit('a reason')",
    "raises": "def f():\n    raise ValueError('here')\nf()",
    "chain": "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise KeyError from e",
    "syntax": "eval('1 +')",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "aborted": "os.abort()",
}


def outcome(folder: Path, source: str, *, forked: bool) -> list[str | int]:
    """Runs a script. Returns its exit code and its output without addresses."""
    script = folder / "script.py"
    script.write_text(source)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        program = warm.start(
            [sys.executable, str(script), "a word", ""],
            environment("warm", {"A_VARIABLE": "a value = another"}),
            stdout=out,
            stderr=err,
            text="" if forked else None,
            session=True,
        )
        assert isinstance(program, warm.Process) == forked
        code = program.wait(40)
    texts = [(folder / n).read_text() for n in ("out", "err")]
    return [code, *(re.sub(r"0x[0-9a-f]+", "0x", text) for text in texts)]


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_program_behaves_like_a_fresh_one(tmp_path: Path, end: str) -> None:
    source = f"{SHOW}\n{ENDS[end]}\n"
    fresh = outcome(tmp_path, source, forked=False)
    assert "errors" in str(fresh[2])
    assert outcome(tmp_path, source, forked=True) == fresh


def test_programs_do_not_share_state(tmp_path: Path) -> None:
    source = """
        import json, os, sys, tempfile
        print(json.__dict__.get("left"), os.environ.get("LEFT"), tempfile.tempdir)
        json.left = os.environ["LEFT"] = tempfile.tempdir = "by the first"
    """
    for _ in range(2):
        said = outcome(tmp_path, textwrap.dedent(source), forked=True)
        assert said == [0, "None None None\n", ""]


def test_other_values_of_import_variables_need_another_server(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import jax; print(jax.config.jax_enable_x64)")
    said = []
    for value in ("0", "1"):
        with (tmp_path / "out").open("wb") as out:
            env = environment("warm", {"JAX_ENABLE_X64": value})
            words = [sys.executable, str(script)]
            assert warm.start(words, env, stdout=out, text="import jax").wait(50) == 0
        said.append((tmp_path / "out").read_text().strip())
    assert said == ["False", "True"]


def test_other_programs_are_started_directly(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        program = warm.start(["echo", "hello"], environment("warm", {}), stdout=out)
        assert isinstance(program, subprocess.Popen)
        assert program.wait(10) == 0
    assert (tmp_path / "out").read_text() == "hello\n"


def test_ranks_are_children_of_their_agent(
    start_job: StartJob,
) -> None:
    job = start_job(
        2, "import os, time\nprint(os.getppid(), flush=True)\ntime.sleep(60)"
    )
    for rank in range(2):
        job.wait_for(rank, "\n")
    found = leaks.processes(job.id)
    ranks = {job.rank_pid(rank) for rank in range(2)}
    agent = int(job.output(0))
    assert found.keys() == {job.pid, agent, *ranks}
    assert "ringjax.run.hosts.agent" in found[agent]
    job.kill(1, signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL
    assert not leaks.processes(job.id)


def test_the_framework_follows_from_the_imports_of_a_test() -> None:
    ranks = Path(__file__).parents[1] / "ranks"

    def framework(name: str, **env: str) -> str:
        return warm.framework(warm.sources(ranks / name), env)

    assert framework("jax/test_broadcast.py") == "jax"
    assert framework("torch/test_torch_ops.py") == "torch"
    assert framework("tensorflow/test_tensorflow_ops.py") == "tensorflow"
    assert framework("keras/test_keras_jax.py", KERAS_BACKEND="jax") == "jax"
    script = "os.environ['KERAS_BACKEND'] = 'torch'\nimport keras"
    assert warm.framework(script, {}) == "torch"
    assert warm.framework("x = 'import jax'\n", {}) == ""


def test_ranks_have_their_framework_and_the_default_sigint_handler(
    start_job: StartJob,
) -> None:
    script = """
        import signal, sys
        print("jax" in sys.modules, signal.getsignal(signal.SIGINT).__name__)
        import jax
    """
    job = start_job(2, script)
    assert job.wait() == 0, job.logs()
    assert {job.output(rank) for rank in range(2)} == {"True default_int_handler\n"}
