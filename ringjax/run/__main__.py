"""The console script `ringrun`, which is `python -m ringjax.run`, too."""

import signal
import sys


def main() -> int:
    """Runs the launcher. A Ctrl-C during the imports prints no traceback."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ringjax.run import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
