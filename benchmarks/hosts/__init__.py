"""Benchmarks between hosts, and of many ranks; they use parts of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
