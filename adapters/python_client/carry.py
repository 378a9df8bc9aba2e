"""Copies the readers of streams that the service and its client share into the client, or checks the copies.

    python adapters/python_client/carry.py            write
    python adapters/python_client/carry.py --check    exit 1 and name the files that differ

The client installs without the service; the files named here import nothing but the standard library.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "policy_service" / "domain"
TARGET = HERE / "policy_client" / "_carried"
NAMES = ("stream_events.py", "watchdog.py")
NOTE = "# A copy of policy_service/domain/{}, made by carry.py. Change the original."


def copy_of(name: str, source: Path = SOURCE) -> str:
    """Text of the copy of one file."""
    return f"{NOTE.format(name)}\n{(source / name).read_text()}"


def drift(source: Path = SOURCE, target: Path = TARGET) -> list[str]:
    """Copies that are missing or differ from their originals."""
    present = {path.name: path.read_text() for path in target.glob("*.py")}
    return [name for name in NAMES if present.get(name) != copy_of(name, source)]


def write(source: Path = SOURCE, target: Path = TARGET) -> None:
    """Make every copy equal to its original."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "__init__.py").touch()
    for name in NAMES:
        (target / name).write_text(copy_of(name, source))


def main(arguments: list[str]) -> int:
    """Write, or with --check compare; 1 on drift."""
    if "--check" not in arguments:
        write()
        return 0
    stale = drift()
    for name in stale:
        print(f"stale: policy_client/_carried/{name}; run python adapters/python_client/carry.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
