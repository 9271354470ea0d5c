"""The console script `ringrun`, also as `python -m ringjax.run`."""

import signal
import sys


def main() -> int:
    """Imports the launcher, without a traceback if Ctrl-C comes meanwhile."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ringjax.run import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
