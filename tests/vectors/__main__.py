"""`python -m tests.vectors [DIR]`: run every vector below DIR and print what passed and what did not."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.vectors.harness import DATA, run_folder


def main(argv: list[str]) -> int:
    report = run_folder(Path(argv[1]) if len(argv) > 1 else DATA)
    for name, vector_id, detail in report.failed:
        print(f"FAILED {name} {vector_id}: {detail}")
    for name, count in sorted(report.passed.items()):
        print(f"{name}: {count} passed")
    for name, count in sorted(report.without_runner.items()):
        print(f"{name}: {count} without a runner")
    print(f"{sum(report.passed.values())} passed, {len(report.failed)} failed")
    return 1 if report.failed or not report.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
