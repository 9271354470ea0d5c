"""Keeps TensorFlow and PyTorch in separate processes of the suite.

PyTorch's CUDA build crashes in a process that loaded TensorFlow before. `import
tensorflow, torch; torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])` is enough. So
only ranks and other separate processes load TensorFlow. The process of pytest, which
collects all files and runs the unit tests of PyTorch, never loads TensorFlow.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from support.rank_worker import VARIABLE


def in_ranks(module: str) -> Any:
    """Imports a module in a rank. Returns None in the pytest that launches ranks."""
    return importlib.import_module(module) if VARIABLE in os.environ else None


def both_loaded() -> bool:
    """Returns whether this process has loaded both TensorFlow and PyTorch."""
    loaded = [sys.modules.get(name) for name in ("tensorflow", "torch")]
    return None not in loaded
