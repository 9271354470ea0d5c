"""Every example runs by its command, with few steps, on two ranks.

The tests of accuracy run an example on one rank, without a launcher.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.launch import ROOT, environment

EXAMPLES = ROOT / "examples"
# For each example, options for a short run and a pattern of the output.
SHORT_RUNS = {
    "jax_plain.py": (["--steps", "60"], r"step 60: loss 0\.\d+"),
    "jax_digits.py": (["--epochs", "2"], r"epoch  2: loss .*images/s  allreduce"),
    "jax_char_lm.py": (
        ["--steps", "4", "--width", "16", "--layers", "1", "--sample", "8"],
        r"step     4: train \d\.\d+  test \d\.\d+ bits/char",
    ),
    "torch_digits.py": (
        ["--epochs", "2"],
        r"epoch  2: loss .*images/s\n(.*\n)?.*result: \d+\.\d+% of 360 unseen digits",
    ),
    "tensorflow_digits.py": (
        ["--epochs", "2"],
        r"epoch  2: loss .*images/s\n(.*\n)?.*result: \d+\.\d+% of 360 unseen digits",
    ),
    "keras_digits.py": (
        ["--epochs", "2"],
        r"epoch  2: loss .*images/s\n(.*\n)?.*result: \d+\.\d+% of 360 unseen digits",
    ),
    "torch_synthetic_benchmark.py": (
        [
            "--batch",
            "2",
            "--blocks",
            "1",
            "1",
            "1",
            "1",
            "--width",
            "8",
            "--rounds",
            "2",
        ],
        r"round 2: .*without ringjax: +\d+\.\d  with ringjax: +\d+\.\d\n(.*\n)*"
        r".*result: together \d+% of the speed of \d alone",
    ),
    "jax_elastic.py": (
        ["--epochs", "1", "--pause", "0"],
        r"step   20 .* images  loss \d.*\n(.*\n)*.*result: \d+\.\d+% after \d+ steps",
    ),
    "jax_fsdp.py": (
        ["--steps", "10", "--width", "16", "--layers", "1", "--length", "16"],
        r"step   10  2 rank.*bits/char\n(.*\n)*.*result: \d.*kernels in 4 shards",
    ),
    "same_bits.py": (
        ["--steps", "50"],
        r"step   50 .* loss \d.*\n(.*\n)*.*result: SHA-256 [0-9a-f]{64} after 50 steps",
    ),
    "torch_same_bits.py": (
        ["--steps", "50"],
        r"step   50 .* loss \d.*\n(.*\n)*.*result: SHA-256 [0-9a-f]{64} after 50 steps",
    ),
    "torch_elastic.py": (
        ["--epochs", "1", "--pause", "0"],
        r"step   20 .* images  loss \d.*\n(.*\n)*.*result: \d+\.\d+% after \d+ steps",
    ),
    "mixed_frameworks.py": (
        [],
        r"result: y = (2\.9|3\.0)\d* x -(0\.9|1\.0)\d*, alike on",
    ),
}
TIMEOUT = 120  # seconds


def run(command: list[str]) -> str:
    env = environment("", {})
    env = {k: v for k, v in env.items() if not k.startswith(("RINGJAX_", "HOROVOD_"))}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    # See tests/engines/spark_example_jobs.py and tests/lightning_ranks/test_jobs.py.
    on_engines = {"spark_torch.py", "lightning_digits.py"}
    assert {
        path.name for path in EXAMPLES.glob("*.py")
    } == SHORT_RUNS.keys() | on_engines


def run_on_two(name: str) -> str:
    options, expected = SHORT_RUNS[name]
    words = [sys.executable, "-m", "ringjax.run", "-np", "2", sys.executable]
    out = run([*words, str(EXAMPLES / name), *options])
    assert re.search(expected, out), out
    assert "2 rank(s)" in out or name == "jax_plain.py"
    return out


@pytest.mark.timeout(TIMEOUT + 10)
@pytest.mark.parametrize(
    "name", [name for name in SHORT_RUNS if name != "keras_digits.py"]
)
def test_an_example_runs(name: str) -> None:
    out = run_on_two(name)
    if name == "jax_digits.py":
        assert "MB of gradients in" in out and "algorithm: " in out
        assert "transport: 1 × shm" in out
    if name == "mixed_frameworks.py":  # each rank imports only one framework
        assert re.search(r"rank 0: its line is a jax\S+, it has loaded jax\n", out), out
        expected = "rank 1: its line is a torch.Tensor, it has loaded torch\n"
        assert expected in out, out


@pytest.mark.timeout(TIMEOUT + 10)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_keras_example_runs_on(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    out = run_on_two("keras_digits.py")
    assert f"2 rank(s), 48 images a step, 85,066 parameters, {backend}" in out


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_every_example_says_how_to_continue(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert "ringrun -np" in text
    assert re.search("[Ff]urther", text.split('"""')[1])


def test_the_plain_example_is_short() -> None:
    lines = (EXAMPLES / "jax_plain.py").read_text().splitlines()
    assert len(lines) < 40


@pytest.mark.timeout(TIMEOUT + 10)
def test_the_demo_reaches_its_accuracy() -> None:
    """The result of the demo does not depend on the number of ranks."""
    out = run([sys.executable, str(EXAMPLES / "jax_digits.py")])
    reached = [float(x) for x in re.findall(r"test +([\d.]+)%", out)]
    assert reached[-1] >= 97.0, out
    assert "transport: none, this is a job of one rank" in out


@pytest.mark.timeout(TIMEOUT + 10)
def test_torch_reaches_the_same_accuracy() -> None:
    out = run([sys.executable, str(EXAMPLES / "torch_digits.py")])
    reached = [float(x) for x in re.findall(r"test +([\d.]+)%", out)]
    assert reached[-1] >= 97.0, out
    assert f"result: {reached[-1]:.2f}% of 360 unseen digits" in out
