"""Every GPU test on this machine's card, with a summary: `python tests/run_on_gpu.py [--out DIR] [pytest options] [files]`."""

from __future__ import annotations

import collections
import json
import pathlib
import platform
import sys
import time

import pytest
import torch


class Summary:
    """Collects outcomes and times per test file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.seconds: collections.Counter = collections.Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:
        file = report.nodeid.split("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[file][report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)
            print(f"\nFAILED {report.nodeid}\n{str(report.longrepr)[-1500:]}", flush=True)


def main() -> int:
    arguments = sys.argv[1:]
    out = None
    if "--out" in arguments:
        at = arguments.index("--out")
        out = pathlib.Path(arguments[at + 1])
        del arguments[at : at + 2]
    if not torch.cuda.is_available():
        print("no GPU here: these tests would run in Triton's interpreter (make test)", file=sys.stderr)
        return 2
    summary, start = Summary(), time.time()
    named = any(pathlib.Path(argument.split("::")[0]).exists() for argument in arguments)
    tests = [] if named else [str(pathlib.Path(__file__).parent)]
    code = int(pytest.main([*tests, "-q", "-p", "no:cacheprovider", "--tb=short", *arguments], plugins=[summary]))
    import triton

    header = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(time.time() - start, 1),
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    for file, outcomes in sorted(summary.outcomes.items()):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{file:32} {counts:40} {summary.seconds[file]:7.1f} s")
    for failure in summary.failures:
        print("FAILED", failure)
    if out is not None:
        rows = [{"file": file, **outcomes} for file, outcomes in sorted(summary.outcomes.items())]
        (out / "gpu_tests.json").write_text(
            json.dumps({"header": header, "rows": rows, "failures": summary.failures}, indent=1)
        )
    return code


if __name__ == "__main__":
    raise SystemExit(main())
