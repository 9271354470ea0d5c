"""Whether this ringjax was built with code for CUDA devices.

Without device code, ringjax packs no tensors, converts no numbers and does not
overwrite the results of a failed epoch. This module is not part of device_calls.py,
because its check opens the CUDA driver, and the settings of a stub must be made before
that.
"""

from __future__ import annotations

import pytest

from ringjax import _native

HAS_KERNELS = bool(_native.cuda_info()["images"])
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="built without device code")
