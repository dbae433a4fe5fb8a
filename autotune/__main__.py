"""`python -m autotune`: what the compiler makes of the kernels on any GPU, without one (see `autotune.audit`)."""

import sys

from .audit import main

if __name__ == "__main__":
    sys.exit(main())
