"""A mark for tests that need a ringjax that was built with CUDA device code.

Without device code, ringjax packs no tensors, converts no dtypes and does not overwrite
the results of a failed epoch. This module is not part of device_calls.py, because its
check opens the CUDA driver, and a stub reads its settings when it is opened.
"""

from __future__ import annotations

import pytest

from ringjax import _native

HAS_KERNELS = bool(_native.cuda_info()["images"])
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="built without device code")
