"""``python -m nrl`` is ``nrl``."""

import sys

from nrl.cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
