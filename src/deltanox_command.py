"""What the console script `deltanox` starts: the command line, with Ctrl-C heard while JAX is still being imported.

It lies outside of the package, whose first import is that of JAX: seconds in which Ctrl-C would end in a traceback.
"""

import os
import signal
import sys


def main() -> int:
    """Run the process's command line and return the exit status."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where the parent has it ignored, as of a job in the background
        # Nothing has been written yet. A KeyboardInterrupt could be caught, or lost, inside an import.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from deltanox.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command()


if __name__ == "__main__":
    sys.exit(main())
