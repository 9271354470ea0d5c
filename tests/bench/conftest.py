"""Makes `benchmarks` importable for the tests of this folder."""

import sys

from support.launch import ROOT

# Behind everything else: the ringjax under test must not come from the checkout.
sys.path.append(str(ROOT))
