"""`python -m deltanox` is the command `deltanox`."""

import sys

from deltanox.cli import main

if __name__ == "__main__":
    sys.exit(main())
