"""TensorFlow beside PyTorch in one process: ringjax serves both where they live."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import environment

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


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = environment("both", {"PYTHONFAULTHANDLER": "0"})
    words = [sys.executable, "-P", "-c", code]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=55)


def test_both_in_one_process() -> None:
    ended = run(BOTH + REDUCED)
    if ended.returncode < 0 and run(BOTH).returncode < 0:
        signal = -ended.returncode
        pytest.skip(f"they end a process without ringjax, too: signal {signal}")
    assert ended.returncode == 0, ended.stderr
    assert "both reduced" in ended.stdout
