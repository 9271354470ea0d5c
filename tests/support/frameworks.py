"""TensorFlow and PyTorch in the suite: never both in one process.

PyTorch's CUDA build crashes in a process that loaded TensorFlow before. `import
tensorflow, torch; torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])` is enough. So
only ranks and other separate processes load TensorFlow. The process of pytest, which
collects all files and runs the unit tests of PyTorch, never loads it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from support.rank_worker import VARIABLE


def in_ranks(module: str) -> Any:
    """A module for tests that ranks run; None in the process that collects them."""
    return importlib.import_module(module) if VARIABLE in os.environ else None


def together() -> bool:
    """Whether this process has loaded both TensorFlow and PyTorch."""
    loaded = [sys.modules.get(name) for name in ("tensorflow", "torch")]
    return None not in loaded
