"""ringjax.keras on PyTorch: its adapter, on three ranks; the rest is on JAX.

On three ranks a process set of two is not the world; PyTorch is the fastest for it.
"""

from __future__ import annotations

import pytest
from support.keras_parameter_checks import *  # noqa: F403
from support.keras_smoke import *  # noqa: F403

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.launch("keras-torch"),
    pytest.mark.ranks(3, env={"KERAS_BACKEND": "torch"}),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(120),
]
