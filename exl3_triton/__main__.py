"""`python -m exl3_triton` is the program `exl3-triton`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
