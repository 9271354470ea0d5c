"""`python -m ringjax.run`: the same as the console script `ringrun`."""

import sys

from ringjax.run.cli import main

if __name__ == "__main__":
    sys.exit(main())
