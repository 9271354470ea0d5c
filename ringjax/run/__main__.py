"""Entry point of the console script `ringrun` and of `python -m ringjax.run`."""

import signal
import sys


def main() -> int:
    """Runs the launcher. Ctrl-C during the imports ends it without a traceback."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ringjax.run import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
