"""`python -m jcoll`."""

from __future__ import annotations

import sys

from jcoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
