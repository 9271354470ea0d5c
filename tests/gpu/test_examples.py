"""Examples on one rank of a GPU, as a user runs them, to an accuracy."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.launch import ROOT


@pytest.mark.parametrize(
    ("script", "words", "pattern", "lowest", "highest"),
    [
        ("jax_digits.py", ["--epochs", "12"], r"test +([\d.]+)%", 95.0, 100.0),
        (
            "jax_char_lm.py",
            ["--steps", "150", "--sample", "8"],
            r"test +([\d.]+) bits/char",
            0.0,
            3.6,
        ),
    ],
    ids=["jax_digits", "jax_char_lm"],
)
def test_example_learns(
    script, words, pattern, lowest, highest, record_property
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / script), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reached = float(re.findall(pattern, done.stdout)[-1])
    record_property(f"{script}, reached", f"{reached:g}")
    for speed in re.findall(r"[\d,]+ (?:images|characters)/s", done.stdout)[-1:]:
        record_property(f"{script}, speed", speed)
    assert lowest <= reached <= highest
