"""Makes `python -m ringjax.doctor` run the command `ringjax doctor`."""

from __future__ import annotations

import sys

from ringjax.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
