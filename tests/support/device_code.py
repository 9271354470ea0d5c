"""Whether this ringjax was built with code for CUDA devices.

Without it nothing is packed, no number is converted, and the results of a dead epoch
are not made void.
Not in device_calls.py: to ask opens the CUDA driver, and the settings of a stub must be
made before.
"""

from __future__ import annotations

import pytest

from ringjax import _native

HAS_KERNELS = bool(_native.cuda_info()["images"])
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="built without device code")
