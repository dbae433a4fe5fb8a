"""Launch parameters, measured on a GPU or predicted for one that need not be there: `python -m autotune COMMAND`."""

from __future__ import annotations

import argparse
import sys

from . import audit, calibrate, fit, tune


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["audit"]:
        return audit.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m autotune", description=__doc__)
    parser.epilog = "audit OPTIONS: what the compiler makes of the kernels on any GPU (see autotune.audit)"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    tune.add_commands(commands)
    fit.add_commands(commands)
    calibrate.add_arguments(commands.add_parser("calibrate", help="measure data for the predictor"))
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
