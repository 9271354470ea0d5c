"""ringjax.keras on PyTorch: only its adapter, on three ranks. See test_keras_jax.py.

Process sets of two ranks need a third rank, which is not in the set. The tests with
three ranks are on PyTorch because its processes start fastest.
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
